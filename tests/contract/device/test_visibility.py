"""Which devices a process sees and takes, up to a handle that one opens of another."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from tests.fakes.drivers.build import make_backend
from tests.fakes.drivers.peer import Peer
from tests.fakes.scripted_run import config
from trainer.learner import actor as learner_module
from trainer.learner.actor import LearnerActor
from weight_sync.device import DeviceError, torch_binding
from weight_sync.device.select import build, seen_devices, take_devices
from weight_sync.transports.exporter import offered

if TYPE_CHECKING:
    from collections.abc import Iterator

HIP, CUDA = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


def fake_ray(own: list[str], *, num_devices: int = 4) -> Any:
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": own}, get_node_id=lambda: "here")
    others = {"NodeID": "there", "Resources": {"GPU": 99.0}}
    here = {"NodeID": "here", "Resources": {"GPU": float(num_devices)}}
    return SimpleNamespace(get_runtime_context=lambda: context, nodes=lambda: [others, here])


@pytest.fixture(autouse=True)
def no_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (HIP, CUDA):
        monkeypatch.setenv(name, "")  # so that it is as before when the test ends
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("own", "inherited", "places", "first"),
    [
        (["2"], None, (2,), "2,0,1,3"),
        (["1", "3"], None, (1, 3), "1,3,0,2"),
        (["5"], "4,5,7", (1,), "5,4,7"),
        (["GPU-b"], "GPU-a,GPU-b", (1,), "GPU-b,GPU-a"),
    ],
)
def test_a_process_sees_all_devices_in_the_order_of_the_host_unless_it_must_have_its_own_first(
    own: list[str], inherited: str | None, places: tuple[int, ...], first: str
) -> None:
    rocm, environ = build("rocm"), {} if inherited is None else {HIP: inherited}
    assert seen_devices(rocm, own, num_devices=4, environ=environ) == ({}, places)
    assert [rocm.device_id(place, environ) for place in places] == own
    expected = {HIP: first}, tuple(range(len(own)))
    assert seen_devices(rocm, own, num_devices=4, environ=environ, own_first=True) == expected


def test_a_second_variable_that_says_the_same_goes_on_saying_the_same() -> None:
    both = {HIP: "0,1,2", CUDA: "0,1,2"}
    told, _ = seen_devices(build("rocm"), ["1"], num_devices=4, environ=both, own_first=True)
    assert told == {HIP: "1,0,2", CUDA: "1,0,2"}
    told, _ = seen_devices(build("rocm"), ["1"], num_devices=4, environ=both | {CUDA: "2"}, own_first=True)
    assert told == {HIP: "1,0,2"}, "what is refused is not made right by chance"


def test_a_variable_that_leaves_out_what_ray_gave_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"HIP_VISIBLE_DEVICES=0,1 leaves out 2"):
        seen_devices(build("rocm"), ["1", "2"], num_devices=4, environ={HIP: "0,1"})


def test_an_actor_that_shares_devices_takes_those_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_devices("rocm", fake_ray([])) == () and HIP not in os.environ
    assert take_devices("rocm", fake_ray([]), own=("3", "2")) == (3, 2) and HIP not in os.environ
    nobody: Any = None
    assert take_devices("cuda", nobody, own=("GPU-b", "GPU-a")) == (0, 1)
    assert os.environ[CUDA] == "GPU-b,GPU-a"
    assert [build("cuda").device_id(place, os.environ) for place in (0, 1)] == ["GPU-b", "GPU-a"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "npu"])
def test_nothing_is_done_and_ray_is_not_asked_where_ray_shows_the_devices_itself(device: str) -> None:
    before = dict(os.environ)
    nobody: Any = None
    assert take_devices(device, nobody) == ()
    assert dict(os.environ) == before


def test_a_learner_computes_on_the_device_that_ray_gave_it(
    monkeypatch: pytest.MonkeyPatch, libraries: dict[str, str]
) -> None:
    monkeypatch.setattr(learner_module, "ray", fake_ray(["3"]))
    worker = LearnerActor(config(device={"name": "rocm"}), rank=0, world_size=1)
    with pytest.raises(DeviceError, match="RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES should be '1'"):
        worker.setup(("nowhere", 1))
    for variable in build("rocm").process_env("learner"):
        monkeypatch.setenv(variable.name, variable.value)
    chosen: list[int] = []
    monkeypatch.setattr(type(worker._backend), "unavailable_reason", lambda _: None)
    monkeypatch.setattr(type(worker._backend), "set_device", lambda _, index: chosen.append(index) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        worker.setup(("nowhere", 1))
    assert (chosen, worker.device_id()) == ([3], "3")


@pytest.mark.parametrize(("version", "arguments", "shown"), [("0.25.1", {"device_ids": [2, 3]}, None),
                                                             ("0.19.0", {}, "2,3,0,1")])  # fmt: skip
@pytest.mark.parametrize("devices", [(), ("2", "3")])
@pytest.mark.parametrize("imports", ["before", "in start"])
async def test_an_engine_takes_its_devices_by_number_or_has_them_first(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    arguments: dict[str, Any],
    shown: str | None,
    devices: tuple[str, ...],
    imports: str,
) -> None:
    """Before it imports vLLM, which asks the driver of this device."""
    ray = fake_ray([] if devices else ["2", "3"])
    monkeypatch.setattr("ray.get_runtime_context", ray.get_runtime_context)
    monkeypatch.setattr("ray.nodes", ray.nodes)
    monkeypatch.setattr("weight_sync.vllm.compat.installed_version", lambda: version)
    for variable in build("rocm").process_env("engine"):
        monkeypatch.setenv(variable.name, variable.value)
    seen: list[object] = []
    imported = asyncio.Event()

    async def importing(_spec: EngineSpec) -> float:
        seen.append(os.environ.get(HIP))
        await imported.wait()
        return 0.0

    async def starting() -> dict[str, float]:
        return {"imports": 0.5, "model": 1.0}

    def building(spec: EngineSpec) -> Any:
        seen.extend((spec.engine_args, spec.max_num_seqs, os.environ.get(HIP)))
        return SimpleNamespace(start=starting)

    monkeypatch.setattr("rollout.engine.actor.import_vllm", importing)
    spec = EngineSpec(model="none", device="rocm", tensor_parallel_size=2, forks=False)
    actor = EngineActor(spec, build=building)
    if imports == "before":
        await actor.begin_imports(devices)
        await actor.begin_imports(devices)
    start = asyncio.ensure_future(actor.start(devices=devices, max_num_seqs=9))
    await asyncio.sleep(0.2)
    imported.set()
    stages = await start
    assert seen == [*([shown] if imports == "before" else []), arguments, 9, shown]
    assert stages["imports"] >= (0.69 if imports == "before" else 0.5), "what it waited for is part of the start"
    assert stages["model"] == 1.0


@pytest.fixture
def hosts(libraries: dict[str, str]) -> Iterator[Any]:
    """`hosts("1", "2", own_first=...)` -> processes with these devices, on a host with 3 of AMD."""
    started: list[Peer] = []

    def start(*own: str, own_first: bool) -> list[Peer]:
        rocm, peers = build("rocm"), list[Peer]()
        for device in own:
            env, (place,) = seen_devices(rocm, [device], num_devices=3, environ={}, own_first=own_first)
            peers.append(Peer({**env, "FAKE_NUM_DEVICES": "3"}))
            started.append(peers[-1])
            peers[-1].call("set_device", "rocm", libraries["rocm"], place)
        return peers

    yield start
    for peer in started:
        peer.close()


def test_an_engine_opens_what_the_learner_of_another_device_exports(hosts: Any, libraries: dict[str, str]) -> None:
    learner, engine = hosts("1", "2", own_first=False)
    block = learner.call("alloc", "rocm", libraries["rocm"], 1024)
    learner.call("write", block, 0, b"weights")
    opened = engine.open("rocm", libraries["rocm"], learner.export(block))
    assert engine.call("read", opened, 0, 7) == b"weights"
    engine.call("give_up", opened)


def test_a_handle_whose_number_is_another_device_here_is_refused_with_the_reason(
    hosts: Any, libraries: dict[str, str]
) -> None:
    learner, engine = hosts("1", "2", own_first=True)
    block = learner.call("alloc", "rocm", libraries["rocm"], 1024)
    with pytest.raises(DeviceError, match=r"failed with 101 .*; .*same devices in the same order"):
        engine.open("rocm", libraries["rocm"], learner.export(block))


@pytest.mark.parametrize(("legacy", "expected"), [("0", ("ipc", "nccl")), ("1", ("nccl",))])
def test_memory_that_gets_no_handle_is_not_offered(
    libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch, legacy: str, expected: tuple[str, ...]
) -> None:
    """By a user's own HSA_ENABLE_IPC_MODE_LEGACY=1; what an image has gives way to ours."""
    with closing(Peer({"HSA_ENABLE_IPC_MODE_LEGACY": legacy})) as learner:
        block = learner.call("alloc", "rocm", libraries["rocm"], 1024)
        with pytest.raises(DeviceError, match="hipIpcGetMemHandle failed") if legacy == "1" else nullcontext():
            learner.export(block)
    monkeypatch.setenv("HSA_ENABLE_IPC_MODE_LEGACY", legacy)
    assert offered("auto", make_backend("rocm", libraries["rocm"])) == expected


@pytest.mark.parametrize(("name", "variable"), [("rocm", HIP), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_a_device_is_known_by_its_place_in_the_host_whatever_its_number(
    libraries: dict[str, str], name: str, variable: str
) -> None:
    peers = [Peer({variable: seen, "FAKE_NUM_DEVICES": "3"}) for seen in ("0,1,2", "1,2")]
    try:
        first, second = (
            [peer.call("identity", name, libraries[name], place) for place in range(num)]
            for peer, num in zip(peers, (3, 2), strict=True)
        )
    finally:
        for peer in peers:
            peer.close()
    assert len(set(first)) == 3 and all(first)
    assert second == first[1:]


def test_a_learner_whose_node_has_not_the_device_that_was_named_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    if build("cuda").is_available():
        pytest.skip("this machine has the device")
    for variable in build("cuda").process_env("learner"):
        monkeypatch.setenv(variable.name, variable.value)
    worker = LearnerActor(config(device={"name": "cuda"}), rank=0, world_size=1)
    with pytest.raises(DeviceError, match="device 'cuda' cannot be used on the learner's node: "):
        worker._check_device()


# Memory of another device, as torch.cuda sees it

POINTER, NBYTES = 0x7F00, 16 << 30


class Tensor:
    def __init__(self, pointer: int) -> None:
        self.data_ptr = lambda: pointer

    def set_(self, storage: tuple[int, int]) -> Tensor:
        assert storage[1] == NBYTES
        return Tensor(storage[0])


class TwoDevices:
    """torch, where the memory at POINTER lies on device `home`: asked for it on another one, it makes a copy."""

    uint8, device, __version__ = torch.uint8, torch.device, torch.__version__
    _C = SimpleNamespace(_construct_storage_from_data_pointer=lambda pointer, device, nbytes: (pointer, nbytes))

    def __init__(self, home: int) -> None:
        self.home, self.copied_bytes = home, 0

    def as_tensor(self, data: Any, *, device: torch.device) -> Tensor:
        described = data.__cuda_array_interface__
        if device.index == self.home:
            return Tensor(described["data"][0])
        self.copied_bytes += described["shape"][0]
        return Tensor(POINTER + 1)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return Tensor(0)


@pytest.mark.parametrize(("home", "copied_bytes"), [(0, 0), (1, 1)])
def test_memory_of_another_device_is_viewed_without_a_copy_of_it(
    monkeypatch: pytest.MonkeyPatch, home: int, copied_bytes: int
) -> None:
    """One byte is what it costs to ask."""
    fake = TwoDevices(home)
    monkeypatch.setattr(torch_binding, "torch", fake)
    assert torch_binding.TorchBinding("cuda").tensor_at(POINTER, NBYTES, 0).data_ptr() == POINTER
    assert fake.copied_bytes == copied_bytes
