"""The start and the end of a cluster, its scratch directory, and what cleans up after a driver that was killed."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import AuthenticationError

from tests.fakes.process_life import is_running, wait_until
from tests.fakes.scripted_run import config
from trainer.driver import cluster, scratch
from trainer.driver import run as run_module
from trainer.driver.cluster import Cluster
from trainer.driver.placement import plan_placement
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner
from trainer.errors import ConfigurationError
from trainer.telemetry import last_words
from weight_sync.device.environment import EnvVar
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


def start(backend: Any = None, *, resource: str | None = None, **sections: Any) -> Cluster:
    cfg = config(**sections)
    return Cluster.start(cfg, plan_placement(cfg, resource=resource), backend or get_backend("cpu", cpu_threads=1))


# --- the scratch directory ---


@pytest.fixture
def scratch_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch, "_home", lambda: str(tmp_path))
    return tmp_path


MAKE_AND_WAIT = """
import sys
from trainer.driver import scratch
scratch._home = lambda: sys.argv[1]
print(scratch._make()[0], flush=True)
sys.stdin.read()
"""


def test_scratch_of_a_killed_driver_is_swept_and_that_of_a_live_one_stays(scratch_root: Path) -> None:
    mine, lock = scratch._make()
    (scratch_root / "tandem-ray-notes").mkdir()
    command = [sys.executable, "-c", MAKE_AND_WAIT, str(scratch_root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        scratch.sweep()
        assert {mine, theirs} <= set(scratch_root.iterdir())
        other.kill()
    scratch.sweep()
    assert sorted(path.name for path in scratch_root.iterdir()) == sorted([mine.name, "tandem-ray-notes"])
    os.close(lock)
    scratch.sweep()
    assert [path.name for path in scratch_root.iterdir()] == ["tandem-ray-notes"]


@pytest.mark.parametrize(("home", "is_kept"), [("/var/tmp", True), ("/" + "x" * 13, True), ("/" + "x" * 14, False)])
def test_a_socket_of_ray_fits_below_any_temporary_directory(
    home: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = "/tandem-ray-4194304-abcdefgh/session_2026-11-20_19-19-38_041629_4194304/sockets/plasma_store"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: home)
    assert len(scratch._home() + longest) <= 107
    assert scratch._home() == (home if is_kept else "/tmp")


# --- start and end ---


def test_a_cluster_that_does_not_start_leaves_no_scratch(scratch_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def broken(**options: Any) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in scratch_root.iterdir())
        raise RuntimeError("no port is free")

    monkeypatch.setattr(cluster.ray, "init", broken)
    with pytest.raises(RuntimeError, match="no port is free"):
        start()
    assert modes == [0o700], "sockets and logs of a run are its owner's"
    assert list(scratch_root.iterdir()) == []


@pytest.mark.parametrize(
    ("num_devices", "note"), [(2, ""), (8, "this run uses 2 of 8 GPU; 6 on this host stay idle; ")]
)
def test_a_host_with_more_devices_than_the_run_takes_is_reported_once(
    num_devices: int, note: str, scratch_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(cluster.ray, "init", lambda **options: asked.update(options))
    backend = SimpleNamespace(
        name="cuda",
        ray_resource="GPU",
        num_devices=lambda: num_devices,
        capabilities=lambda: SimpleNamespace(forks=False),
    )
    start(backend, resource="GPU", learner={"num_ranks": 1}).stop(keep_logs_in=None)
    assert (asked["num_gpus"], asked["resources"]) == (num_devices, None)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text.startswith(note) for text in warnings] == [True] * bool(note)


@pytest.mark.parametrize("forks", [True, False])
def test_actors_and_engines_of_a_cluster_are_forked_from_servers_that_live_as_long(
    forks: bool, scratch_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there before Ray's processes, which inherit where they are."""
    seen: list[Any] = []

    class Server:
        def __init__(self, folder: Path, environ: Mapping[str, str], *, preload: Sequence[str]) -> None:
            self.addresses = {scratch.ENGINE_SERVER: "7:/engines", scratch.LEARNER_SERVER: "7:/learners"}
            own = environ["TMPDIR"] == str(folder), "TORCHINDUCTOR_CACHE_DIR" in environ, environ.get("ROLE")
            seen.append((folder.parent == scratch_root, preload[0], own))

        def begin_engines(self, variables: Mapping[str, str]) -> None:
            seen.append({name: variables.get(name) for name in ("VLLM_LOGGING_LEVEL", "ROLE", "TMPDIR")})

        def close(self) -> None:
            seen.append("end of the servers")

    def init(*, runtime_env: Mapping[str, Any], **_: Any) -> None:
        pythons = [runtime_env.get("py_executable"), scratch.engine_python().get("py_executable")]
        addresses = [os.environ.get(name) for name in (scratch.ENGINE_SERVER, scratch.LEARNER_SERVER)]
        seen.append((*addresses, *["main" in (each or "") for each in pythons], len(set(pythons))))

    monkeypatch.setenv("TMPDIR", "/elsewhere")
    for name in (
        "ROLE",
        "VLLM_LOGGING_LEVEL",
        "TORCHINDUCTOR_CACHE_DIR",
        scratch.ENGINE_SERVER,
        scratch.LEARNER_SERVER,
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(scratch, "RunServers", Server)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: seen.append("end of Ray"))
    backend = SimpleNamespace(
        name="cuda",
        ray_resource="GPU",
        num_devices=lambda: 2,
        capabilities=lambda: SimpleNamespace(forks=forks),
        process_env=lambda role: (EnvVar(name="ROLE", value=role, why="to see"),),
    )
    start(backend, resource="GPU", learner={"num_ranks": 1}).stop(keep_logs_in=None)
    of_engines = {"VLLM_LOGGING_LEVEL": "WARNING", "ROLE": "engine", "TMPDIR": None}
    begun, end = (True, "ray", (True, False, None)), "end of the servers"
    with_servers = [of_engines, ("7:/engines", "7:/learners", True, True, 2), end]
    assert seen == [begun, *(with_servers if forks else [end, (None, None, False, False, 1)]), "end of Ray"]
    assert not {scratch.ENGINE_SERVER, scratch.LEARNER_SERVER} & os.environ.keys()


def test_only_the_end_of_a_long_actor_log_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "MAX_LOG_BYTES", 10)
    logs = tmp_path / "scratch" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("a" * 50 + "the reason")
    (logs / "worker-1.out").write_text("")
    (logs / "raylet.out").write_text("noise")
    last_words.copy_logs(tmp_path / "scratch", tmp_path / "kept")
    assert {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()} == {"worker-1.err": "the reason"}


def test_processes_are_ended_even_if_a_full_disk_refuses_the_logs(
    scratch_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster, "copy_logs", refused)
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: done.append("ray"))
    start().stop(keep_logs_in=scratch_root / "kept")
    assert done == ["ray"] and list(scratch_root.iterdir()) == []
    assert "No space left on device" in caplog.text


def join(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], **sections: Any) -> None:
    """Join a cluster with these resources from a host without devices."""
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(cluster, "_reserve", lambda _cfg, placement, **_: placement)
    start(ray={"address": "auto"}, **sections)


def test_auto_does_not_take_cpus_where_only_the_other_nodes_have_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"CPU": 64.0, "GPU": 16.0}
    with pytest.raises(ConfigurationError, match=r"(?s)auto, which is cpu .*the Ray cluster has 16 GPU") as caught:
        join(monkeypatch, there)
    assert "device=cuda or device=rocm; device=cpu leaves them idle" in str(caught.value)
    join(monkeypatch, there, device={"name": "cpu"})
    join(monkeypatch, {"CPU": 64.0, "GPU": 0.0})


def test_a_cluster_that_asks_for_a_token_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(**_: Any) -> None:
        raise AuthenticationError("Token authentication is enabled but no authentication token was found")

    monkeypatch.setattr(cluster.ray, "init", closed)
    with pytest.raises(ConfigurationError, match=r"(?s)no authentication token was found.*RAY_AUTH_MODE=token"):
        start(ray={"address": "auto"})


class HangingRay:
    """`Cluster.start` against an address that takes connections and does not respond until `responds` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.responds, self.stopped = threading.Event(), threading.Event()
        monkeypatch.setattr(run_module.Cluster, "start", self._start)

    def _start(self, *_: object, **_keys: object) -> Any:
        self.responds.wait(60)
        return SimpleNamespace(stop=lambda **_keys: self.stopped.set())

    async def begin(self, **trainer: float) -> Any:
        checked: Any = SimpleNamespace(placement=None, backend=None)
        return await run_module._start_cluster(config(trainer=trainer), checked, scratch.Scratch(), {})


async def test_a_ray_that_does_not_respond_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match=r"ray\.address=local timed out after 0\.1 s"):
        await HangingRay(monkeypatch).begin(startup_timeout_s=0.1)


async def test_the_thread_that_started_ray_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks the kernel to end its processes with their parent, and to the kernel that is the thread."""
    ray, before = HangingRay(monkeypatch), set(threading.enumerate())
    ray.responds.set()
    await ray.begin()
    await asyncio.sleep(0.1)
    assert any(thread.daemon and thread not in before for thread in threading.enumerate())


@pytest.mark.parametrize("responds", [True, False])
async def test_an_interrupted_start_of_ray_is_finished_and_stopped_or_left(
    *, responds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = HangingRay(monkeypatch)
    begin = asyncio.create_task(ray.begin(shutdown_timeout_s=30.0 if responds else 0.1))
    await asyncio.sleep(0.05)
    begin.cancel()
    await asyncio.sleep(0.05)
    if responds:
        ray.responds.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(begin, 20)
    assert ray.stopped.is_set() == responds


# --- the process cleaner ---

SLEEP = [sys.executable, "-c", "import time; time.sleep(100)"]
DRIVER = """
import json, os, subprocess, sys, time
from pathlib import Path
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner
os.environ[RUN_ID_VAR] = sys.argv[1]
scratch = Path(sys.argv[2])
ProcessCleaner(sys.argv[1], scratch, json.loads(sys.argv[3]))
clean = {name: value for name, value in os.environ.items() if name != RUN_ID_VAR}
sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
marked = subprocess.Popen(sleep, start_new_session=True)
holder = subprocess.Popen(sleep, stdout=(scratch / "log").open("w"), env=clean, start_new_session=True)
print(marked.pid, holder.pid, flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def killed_driver(scratch: Path, last_words: object) -> Iterator[list[str]]:
    """A driver with two processes that is killed after the block; returns when all of them, and the scratch directory,
    are gone. The list gets what was on its screen."""
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-c", DRIVER, uuid.uuid4().hex, str(scratch), json.dumps(last_words)]
    screen: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        yield screen
        driver.kill()
        screen.extend(driver.communicate(timeout=30)[1].splitlines())
    wait_until(lambda: not any(map(is_running, pids)), within_s=20.0, what="a process of the driver runs on")
    wait_until(lambda: not scratch.exists(), within_s=20.0, what="the scratch directory is left")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "owner.lock").touch()
    return tmp_path / "run"


def known(run_dir: Path) -> dict[str, Any]:
    return {"run_dir": str(run_dir), "seed": 3, "started_at": time.time() - 60}


def test_what_a_killed_driver_leaves_is_ended_and_nothing_else_though_its_record_is_damaged(
    tmp_path: Path, run_dir: Path
) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b"\0" * 64 + b"\n")
    with subprocess.Popen(SLEEP, env={**os.environ, RUN_ID_VAR: "another run"}) as bystander:
        with killed_driver(tmp_path / "scratch", known(run_dir)):
            reader = subprocess.Popen(SLEEP, stdin=(tmp_path / "scratch" / "log").open())
        assert bystander.poll() is None
        assert reader.poll() is None, "it only reads a log"
        for process in (bystander, reader):
            process.kill()
            process.wait()
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 0
    assert not (run_dir / "owner.lock").exists()


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_last_words_of_a_killed_driver_are_written_unless_the_next_run_has_begun(
    tmp_path: Path, run_dir: Path, is_taken: bool
) -> None:
    logs = tmp_path / "scratch" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("what an actor said")
    (run_dir / "metrics.jsonl").write_text('{"step": 7, "version": 7}\n{"step": 8, "ver')
    with (run_dir / "owner.lock").open("w") as lock:
        if is_taken:
            fcntl.flock(lock, fcntl.LOCK_EX)
        with killed_driver(tmp_path / "scratch", known(run_dir)) as screen:
            pass
    if is_taken:
        assert sorted(path.name for path in run_dir.iterdir()) == ["metrics.jsonl", "owner.lock"]
        return
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"], summary["version"], summary["seed"]) == ("failed", 7, 7, 3)
    assert "SIGKILL" in summary["error"] and 60 <= summary["wall_s"] < 120
    assert screen[-1] == f"failed: {summary['error']}"
    assert summary["error"] in (run_dir / "log.txt").read_text()
    assert (run_dir / "actor_logs" / "worker-1.err").read_text() == "what an actor said"
    assert not (run_dir / "owner.lock").exists()


def test_a_driver_that_shuts_down_cleanly_is_spared_and_writes_its_own_last_words(
    tmp_path: Path, run_dir: Path
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with (scratch / "mine").open("w"):
        cleaner = ProcessCleaner("run", scratch, known(run_dir))
        cleaner.close()
        cleaner.close()
    assert not scratch.exists()
    assert [path.name for path in run_dir.iterdir()] == ["owner.lock"]
