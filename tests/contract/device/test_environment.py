"""Environment, engine arguments and selection: pure values, checked on every backend."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.device import Backend, DeviceError, EnvVar, get_backend, merge_env
from weight_sync.device.cpu import host_memory
from weight_sync.device.library import load_library, mapped_libraries
from weight_sync.device.select import AUTO_ORDER, build

if TYPE_CHECKING:
    from weight_sync.device.base import Role

ROLES: tuple[Role, ...] = ("driver", "learner", "engine")
DOCS = Path(__file__).parents[3] / "docs" / "backends.md"


@pytest.fixture(params=AUTO_ORDER)
def backend(request: pytest.FixtureRequest) -> Backend:
    return build(request.param)


@pytest.fixture(params=ROLES)
def role(request: pytest.FixtureRequest) -> Role:
    return request.param


names = st.sampled_from(["A", "B", "C", "D", "E"])
settings = st.dictionaries(names, st.sampled_from(["0", "1", "2"]))


@given(defaults=settings, user=settings, inherited=settings)
def test_user_wins_over_inherited_wins_over_ours(
    defaults: dict[str, str], user: dict[str, str], inherited: dict[str, str]
) -> None:
    variables = tuple(EnvVar(name=name, value=value, why="test") for name, value in defaults.items())
    merged = merge_env(variables, user, inherited)
    assert set(merged) == set(defaults) | set(user)
    for name, value in merged.items():
        assert value == next(source[name] for source in (user, inherited, defaults) if name in source)


def test_a_process_started_with_our_environment_has_no_problems(backend: Backend, role: Role) -> None:
    assert backend.check_env(role, merge_env(backend.process_env(role), {}, {})) == []


def test_every_missing_variable_is_one_problem_that_names_it_and_its_reason(backend: Backend, role: Role) -> None:
    variables = backend.process_env(role)
    problems = backend.check_env(role, {})
    assert len(problems) == len(variables)
    for variable, problem in zip(variables, problems, strict=True):
        assert variable.name in problem
        assert variable.why in problem


def test_every_variable_is_documented_with_its_value(backend: Backend, role: Role) -> None:
    text = DOCS.read_text()
    for variable in backend.process_env(role):
        assert f"`{variable.name}={variable.value}`" in text, variable


def test_a_users_own_value_is_no_problem_and_nothing_is_asked_before_ray_starts(backend: Backend) -> None:
    user = {"HSA_NO_SCRATCH_RECLAIM": "0", "OMP_NUM_THREADS": "7"}
    environ = merge_env(backend.process_env("learner"), user, {})
    assert backend.check_env("learner", environ) == []
    assert backend.check_env("driver", {}) == [] or backend.name == "cpu"
    assert "gloo" in backend.collective, "collectives take host tensors too"


NOSET_HIP = "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES"
REASONS: tuple[tuple[str, Role, dict[str, str | None], tuple[str, ...]], ...] = (
    *(("rocm", role, {NOSET_HIP: "0"}, (f"{NOSET_HIP} must be '1', got '0'", "device.env")) for role in ROLES[1:]),
    ("rocm", "learner", {"HIP_VISIBLE_DEVICES": None, "ROCR_VISIBLE_DEVICES": "0,1"}, ("set HIP_VISIBLE_DEVICES=0,1",)),
    ("rocm", "learner", {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ("disagree",)),
    ("cuda", "engine", {"CUDA_VISIBLE_DEVICES": ""}, ("sees no device",)),
    ("rocm", "engine", {"HIP_VISIBLE_DEVICES": ""}, ("sees no device",)),
    ("npu", "engine", {"ASCEND_RT_VISIBLE_DEVICES": ""}, ("sees no device",)),
    # Ray must narrow visibility where handles do not need it wide.
    ("cuda", "driver", {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, ("take device 0",)),
    ("npu", "driver", {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}, ("take device 0",)),
    *(("npu", "learner", {"HCCL_CONNECT_TIMEOUT": value}, (f"in 120..7200, got {value!r}",))
      for value in ("60", "forever", "100000")),
    # Weights in a blocked layout, even if the user wants them.
    ("npu", "engine", {"VLLM_ASCEND_ENABLE_NZ": "1"}, ("must be '0'",)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "role", "changes", "words"), REASONS)
def test_a_setting_that_breaks_a_device_is_one_problem_that_says_why(
    name: str, role: Role, changes: dict[str, str | None], words: tuple[str, ...]
) -> None:
    backend = build(name)
    environ = {**merge_env(backend.process_env(role), {}, {}), **changes}
    found = {variable: value for variable, value in environ.items() if value is not None}
    (problem,) = backend.check_env(role, found)
    assert all(word in problem for word in words), problem


def test_what_an_image_bakes_in_gives_way_to_ours_where_it_breaks_ipc_but_not_to_the_users() -> None:
    legacy, rocm = "HSA_ENABLE_IPC_MODE_LEGACY", build("rocm")
    baked = {legacy: "1", NOSET_HIP: "0", "HSA_NO_SCRATCH_RECLAIM": "0"}
    for role in ROLES[1:]:
        env = merge_env(rocm.process_env(role), {}, baked)
        assert (env[legacy], env[NOSET_HIP], env["HSA_NO_SCRATCH_RECLAIM"]) == ("0", "1", "0")
        env = merge_env(rocm.process_env(role), {legacy: "1"}, baked)
        assert env[legacy] == "1" and rocm.check_env(role, env) == []


def test_hccl_gets_ports_of_its_own_only_where_learner_and_engine_share_a_device(backend: Backend) -> None:
    names = {variable.name for variable in backend.sharing_env()}
    assert names == ({"HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"} if backend.name == "npu" else set())


def test_the_buffers_of_all_groups_are_not_sized_for_those_of_weight_sync(backend: Backend, role: Role) -> None:
    assert "HCCL_BUFFSIZE" not in {variable.name for variable in backend.process_env(role)}


def test_users_engine_arguments_win_but_weights_stay_in_rows(backend: Backend) -> None:
    mine = {"cudagraph_capture_sizes": [1], "additional_config": {"ascend_scheduler_config": {"enabled": True}}}
    found = backend.engine_args(mine)
    rows = {"weight_nz_mode": 0} if backend.name == "npu" else {}
    assert found == {**backend.engine_defaults(), **mine, "additional_config": {**rows, **mine["additional_config"]}}
    assert backend.engine_args({}) == backend.engine_defaults()


@pytest.mark.parametrize("config", [{"weight_nz_mode": 1}, {"weight_nz_mode": True}, "weight_nz_mode=1"])
def test_a_blocked_layout_of_weights_is_refused_as_an_engine_argument_too(config: object) -> None:
    with pytest.raises(DeviceError, match=r"additional_config.*weight_nz_mode.*must be 0"):
        build("npu").engine_args({"additional_config": config})


def test_cpu_threads_reach_the_environment() -> None:
    (threads,) = get_backend("cpu", cpu_threads=3).process_env("learner")
    assert (threads.name, threads.value) == ("OMP_NUM_THREADS", "3")
    with pytest.raises(DeviceError, match="cpu_threads must be >= 1, got 0"):
        get_backend("cpu", cpu_threads=0)


def test_engine_defaults_are_arguments_that_vllm_has(backend: Backend) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    # Read, not imported: importing vLLM takes many seconds.
    source = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text())
    (engine_args,) = (n for n in source.body if isinstance(n, ast.ClassDef) and n.name == "EngineArgs")
    fields = {n.target.id for n in engine_args.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert set(backend.engine_defaults()) <= fields


def test_auto_takes_the_first_backend_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(name for name in AUTO_ORDER if build(name).is_available())
    assert get_backend().name == first
    monkeypatch.setattr("weight_sync.device.rocm.RocmBackend.unavailable_reason", lambda self: None)
    assert get_backend("auto").name == ("cuda" if first == "cuda" else "rocm")


@pytest.mark.parametrize("name", ["cuda", "rocm", "npu"])
def test_a_backend_that_is_asked_for_but_missing_says_what_to_install(name: str) -> None:
    if build(name).is_available():
        pytest.skip(f"{name} is present on this machine")
    with pytest.raises(DeviceError, match=f"device '{name}' was asked for but cannot be used: .*"):
        get_backend(name)


def test_a_torch_build_for_rocm_is_rocm_and_not_cuda(
    monkeypatch: pytest.MonkeyPatch, libraries: dict[str, str]
) -> None:
    from weight_sync.device.cuda import CudaBackend
    from weight_sync.device.rocm import RocmBackend

    monkeypatch.setattr(torch.version, "hip", "6.4.43482-0f2d60242")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rocm = RocmBackend(library=libraries["rocm"])
    assert rocm.is_available()
    assert rocm.torch_device == "cuda"
    assert rocm.capabilities().sleep_mode
    reason = CudaBackend(library=libraries["cuda"]).unavailable_reason()
    assert reason is not None
    assert "built for rocm, not for cuda" in reason
    monkeypatch.setattr(torch.version, "hip", "6.3.42134-a9a80e791")
    assert not rocm.capabilities().sleep_mode
    monkeypatch.setattr(torch.version, "hip", None)
    assert rocm.capabilities().sleep_mode, "a driver without ROCm does not know what its nodes have"


def test_an_unknown_device_is_refused_with_the_choices() -> None:
    with pytest.raises(DeviceError, match="one of auto, cpu, cuda, npu, rocm, got 'tpu'"):
        get_backend("tpu")


def test_the_library_that_is_already_loaded_is_found_under_its_wheels_name() -> None:
    maps = """\
7f00-7f01 r-xp 00000000 08:01 11 /venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13.0.48
7f01-7f02 rw-p 00001000 08:01 11 /venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13.0.48
7f02-7f03 r-xp 00000000 08:01 12 /venv/lib/torch lib/libcudart-9335f6a2.so.12
7f03-7f04 r-xp 00000000 08:01 13 /usr/lib/libcudart_static_thing.so
7f04-7f05 rw-p 00000000 00:00 0
7f05-7f06 rw-p 00000000 00:00 0 [heap]
"""
    assert mapped_libraries("libcudart", maps) == [
        "/venv/lib/python3.12/site-packages/nvidia/cu13/lib/libcudart.so.13.0.48",
        "/venv/lib/torch lib/libcudart-9335f6a2.so.12",
    ]


def test_a_missing_library_lists_what_was_tried(tmp_path: Path) -> None:
    broken = tmp_path / "libnothere.so"
    broken.write_text("not a library")
    with pytest.raises(DeviceError, match=r"cannot load libnothere \(.*libnothere\.so: .*"):
        load_library("libnothere", installed=[broken])


MEMINFO = "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    800 kB\n"
V2, V1 = "sys/fs/cgroup/memory", "sys/fs/cgroup/memory/memory"
ROOT_GROUP = {f"{V2}.max": "500000", f"{V2}.current": "300000"}


def host_memory_of(root: Path, files: dict[str, str]) -> tuple[int, int]:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(root)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({f"{V2}.max": "max\n", f"{V2}.current": "5\n"}, (800 * 1024, 1000 * 1024)),
        ({**ROOT_GROUP, f"{V2}.stat": "anon 200000\ninactive_file 50000\n"}, (250_000, 500_000)),
        ({f"{V1}.limit_in_bytes": "500000\n", f"{V1}.usage_in_bytes": "100000\n"}, (400_000, 500_000)),
    ],
    ids=["no limit", "version 2", "version 1"],
)
def test_host_memory_is_what_the_kernel_and_the_limit_of_the_container_leave(
    tmp_path: Path, files: dict[str, str], found: tuple[int, int]
) -> None:
    assert host_memory_of(tmp_path, files) == found


V2_ROW = "0::/system.slice/job_77/step_0\n"
V1_ROWS = "7:pids:/\n6:cpu,memory:/system.slice/job_77/step_0\n0::/\n"


@pytest.mark.parametrize(
    ("rows", "mount", "limit", "used"),
    [
        (V2_ROW, "sys/fs/cgroup", "memory.max", "memory.current"),
        (V2_ROW, "sys/fs/cgroup/unified", "memory.max", "memory.current"),
        (V1_ROWS, "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_host_memory_of_a_batch_job_is_what_the_fullest_group_above_it_leaves(
    tmp_path: Path, rows: str, mount: str, limit: str, used: str
) -> None:
    """The job has a limit, and its step has none; a larger limit above it is shared with others, who use it up."""
    slice_, job = f"{mount}/system.slice", f"{mount}/system.slice/job_77"
    files = {
        "proc/self/cgroup": rows,
        f"{job}/step_0/{limit}": "max\n",
        f"{job}/{limit}": "500000\n",
        f"{job}/{used}": "300000\n",
    }
    assert host_memory_of(tmp_path, files) == (200_000, 500_000)
    above = {f"{slice_}/{limit}": "900000\n", f"{slice_}/{used}": "850000\n"}
    assert host_memory_of(tmp_path, above) == (50_000, 500_000)


@pytest.mark.parametrize("rows", ["0::/\n", "0::/../../job\n", "0::/docker/0123\n", "\n:\nnonsense\n", None])
def test_host_memory_in_a_container_that_does_not_see_its_path_is_the_mounts_root(
    tmp_path: Path, rows: str | None
) -> None:
    own = {} if rows is None else {"proc/self/cgroup": rows}
    beside = {"sys/job/memory.max": "1\n", "sys/job/memory.current": "1\n"}  # a group next to the mount is not ours
    assert host_memory_of(tmp_path, {**ROOT_GROUP, **own, **beside}) == (200_000, 500_000)
