from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import AuthenticationError

from tests.fakes.scripted_run import config
from trainer.driver import cluster
from trainer.driver import run as run_module
from trainer.driver.placement import plan_placement
from trainer.errors import ConfigurationError
from trainer.telemetry import last_words
from weight_sync.device.select import get_backend


@pytest.fixture
def scratch_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cluster, "_scratch_home", lambda: str(tmp_path))
    return tmp_path


CLAIM_AND_DIE = """
import os, sys
from trainer.errors import ConfigurationError
from trainer.driver import cluster
from trainer.driver import run as run_module
cluster._scratch_home = lambda: sys.argv[1]
print(cluster._claim_scratch()[0], flush=True)
sys.stdin.read()
"""


def test_scratch_of_a_driver_that_was_killed_is_swept_and_that_of_a_live_one_stays(scratch_root: Path) -> None:
    mine, claim = cluster._claim_scratch()
    (scratch_root / "tandem-ray-notes").mkdir()
    command = [sys.executable, "-c", CLAIM_AND_DIE, str(scratch_root)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    cluster._sweep_scratch()
    assert {mine, theirs} <= set(scratch_root.iterdir())
    other.kill()
    other.communicate()
    cluster._sweep_scratch()
    assert sorted(path.name for path in scratch_root.iterdir()) == sorted([mine.name, "tandem-ray-notes"])
    os.close(claim)
    cluster._sweep_scratch()
    assert [path.name for path in scratch_root.iterdir()] == ["tandem-ray-notes"]


def test_a_cluster_that_does_not_start_leaves_no_scratch(scratch_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []

    def broken(**options: Any) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in scratch_root.iterdir())
        raise RuntimeError("no port is free")

    monkeypatch.setattr(cluster.ray, "init", broken)
    cfg = config()
    with pytest.raises(RuntimeError, match="no port is free"):
        cluster.Cluster.start(cfg, plan_placement(cfg, resource=None), get_backend("cpu", cpu_threads=1))
    assert modes == [0o700], "sockets and logs of a run are its owner's"
    assert list(scratch_root.iterdir()) == []


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [(2, []), (8, ["this run uses 2 of 8 GPU; 6 on this host stay idle; "])],
)
def test_a_host_with_more_devices_than_the_run_takes_says_so_once(
    num_devices: int,
    expected: list[str],
    scratch_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    backend: Any = SimpleNamespace(name="cuda", ray_resource="GPU", num_devices=lambda: num_devices)
    cfg = config(learner={"num_ranks": 1})
    cluster.Cluster.start(cfg, plan_placement(cfg, resource="GPU"), backend).stop(keep_logs_in=None)
    found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True)), found


def test_only_the_end_of_a_long_actor_log_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_words, "MAX_LOG_BYTES", 10)
    logs = tmp_path / "scratch" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("a" * 50 + "the reason")
    (logs / "worker-1.out").write_text("")
    (logs / "raylet.out").write_text("noise")
    last_words.copy_logs(tmp_path / "scratch", tmp_path / "kept")
    assert {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()} == {"worker-1.err": "the reason"}


def joined(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], **sections: Any) -> None:
    """Join a cluster that has `resources`, as Ray tells of them, with what `auto` finds on a host without devices."""
    monkeypatch.setattr(cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(cluster, "_seated", lambda _cfg, placement, **_: placement)
    cfg = config(ray={"address": "auto"}, **sections)
    cluster.Cluster.start(cfg, plan_placement(cfg, resource=None), get_backend("cpu"))


def test_auto_does_not_take_cpus_where_only_the_other_nodes_have_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"CPU": 64.0, "GPU": 16.0}
    with pytest.raises(ConfigurationError, match=r"(?s)auto, which is cpu .*the Ray cluster has 16 GPU") as caught:
        joined(monkeypatch, there)
    assert "device=cuda or device=rocm; device=cpu leaves them idle" in str(caught.value)
    joined(monkeypatch, there, device={"name": "cpu"})
    joined(monkeypatch, {"CPU": 64.0, "GPU": 0.0})


def test_a_cluster_that_asks_for_a_token_is_refused_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(**_: Any) -> None:
        raise AuthenticationError("Token authentication is enabled but no authentication token was found")

    monkeypatch.setattr(cluster.ray, "init", closed)
    cfg = config(ray={"address": "auto"})
    with pytest.raises(ConfigurationError, match=r"(?s)no authentication token was found.*RAY_AUTH_MODE=token"):
        cluster.Cluster.start(cfg, plan_placement(cfg, resource=None), get_backend("cpu"))


def test_processes_are_ended_also_where_the_logs_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a full disk: what stops a part of the end must not keep Ray and its processes alive."""
    done: list[str] = []

    def refused(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster, "copy_logs", refused)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: done.append("ray"))
    cleaner: Any = SimpleNamespace(close=lambda: done.append("cleaner"))
    placement: Any = None
    cluster.Cluster(placement, scratch=tmp_path, cleaner=cleaner).stop(keep_logs_in=tmp_path / "kept")
    assert done == ["ray", "cleaner"]
    assert "No space left on device" in caplog.text


class HangingRay:
    """`Cluster.start` against an address that takes connections and never answers, until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers, self.stopped = threading.Event(), threading.Event()
        monkeypatch.setattr(run_module.Cluster, "start", self._start)

    def _start(self, *_: object, **_keys: object) -> Any:
        self.answers.wait(60)
        return SimpleNamespace(stop=lambda **_keys: self.stopped.set())

    async def begin(self, *, ray: dict[str, Any] | None = None, **trainer: float) -> Any:
        checked: Any = SimpleNamespace(placement=None, backend=None)
        return await run_module._start_cluster(config(trainer=trainer, ray=ray or {}), checked, {})


async def test_a_ray_that_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match=r"ray\.address=local timed out after 0\.1 s"):
        await HangingRay(monkeypatch).begin(startup_timeout_s=0.1)


async def test_the_thread_that_started_ray_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks the kernel to end its processes with their parent, and to the kernel that is the thread."""
    ray, before = HangingRay(monkeypatch), set(threading.enumerate())
    ray.answers.set()
    await ray.begin()
    await asyncio.sleep(0.1)
    assert any(thread.daemon and thread not in before for thread in threading.enumerate())


@pytest.mark.parametrize("answers", [True, False])
async def test_an_interrupted_start_of_ray_is_finished_and_stopped_or_left(
    *, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = HangingRay(monkeypatch)
    start = asyncio.create_task(ray.begin(shutdown_timeout_s=30.0 if answers else 0.1))
    await asyncio.sleep(0.05)
    start.cancel()
    await asyncio.sleep(0.05)
    if answers:
        ray.answers.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(start, 20)
    assert ray.stopped.is_set() == answers
