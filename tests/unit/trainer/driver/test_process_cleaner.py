from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.fakes.process_life import is_running
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEP = "import time; time.sleep(100)"
DRIVER = """
import json, os, subprocess, sys, time
from pathlib import Path
from trainer.driver.process_cleaner import RUN_ID_VAR, ProcessCleaner
os.environ[RUN_ID_VAR] = sys.argv[1]
scratch = Path(sys.argv[2])
ProcessCleaner(sys.argv[1], scratch, json.loads(sys.argv[3]))
clean = {name: value for name, value in os.environ.items() if name != RUN_ID_VAR}
marked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
holder = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(100)"],
    stdout=(scratch / "log").open("w"), env=clean, start_new_session=True,
)
print(marked.pid, holder.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, RUN_ID_VAR: "another run"}
    with subprocess.Popen([sys.executable, "-c", SLEEP], env=environment) as process:
        yield process
        process.kill()


def wait_until_gone(pids: list[int], path: Path) -> None:
    give_up = time.monotonic() + 20
    while any(map(is_running, pids)) or path.exists():
        assert time.monotonic() < give_up, f"alive: {[pid for pid in pids if is_running(pid)]}, {path.exists()}"
        time.sleep(0.05)


def test_what_a_killed_driver_leaves_is_ended_and_nothing_else(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-c", DRIVER, "run-1", str(scratch), "null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_running, pids))
        reader = subprocess.Popen([sys.executable, "-c", SLEEP], stdin=(scratch / "log").open())
        driver.send_signal(signal.SIGKILL)
    wait_until_gone(pids, scratch)
    assert bystander.poll() is None
    assert reader.poll() is None
    reader.kill()
    reader.wait()


def test_closing_spares_the_driver_even_with_open_files(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with (scratch / "mine").open("w"):
        reaper = ProcessCleaner("run-2", scratch)
        reaper.close()
        reaper.close()
    assert not scratch.exists()


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_driver_that_ends_without_a_word_has_its_last_words_written(tmp_path: Path, is_taken: bool) -> None:
    scratch, run_dir = tmp_path / "scratch", tmp_path / "run"
    logs = scratch / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.err").write_text("what an actor said")
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 7, "version": 7}\n{"step": 8, "ver')
    known = {"run_dir": str(run_dir), "seed": 3, "started_at": time.time() - 60}
    with (run_dir / "owner.lock").open("w") as lock:
        if is_taken:  # by a run that began right after the kill
            fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", DRIVER, "run-3", str(scratch), json.dumps(known)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            driver.send_signal(signal.SIGKILL)
            _, screen = driver.communicate(timeout=30)
        wait_until_gone(pids, scratch)
    if is_taken:
        assert sorted(path.name for path in run_dir.iterdir()) == ["metrics.jsonl", "owner.lock"]
        return
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["exit_reason"], summary["steps"], summary["version"], summary["seed"]) == ("failed", 7, 7, 3)
    assert "SIGKILL" in summary["error"] and 60 <= summary["wall_s"] < 120
    assert screen.splitlines()[-1] == f"failed: {summary['error']}"
    assert summary["error"] in (run_dir / "log.txt").read_text()
    assert (run_dir / "actor_logs" / "worker-1.err").read_text() == "what an actor said"
    assert not (run_dir / "owner.lock").exists()


def test_a_driver_that_closes_in_order_writes_its_own_words(tmp_path: Path) -> None:
    known = {"run_dir": str(tmp_path / "run"), "seed": 3, "started_at": time.time()}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "owner.lock").touch()
    (tmp_path / "scratch").mkdir()
    ProcessCleaner("run-4", tmp_path / "scratch", known).close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["owner.lock"]


def test_a_damaged_record_keeps_no_process_alive(tmp_path: Path) -> None:
    scratch, run_dir = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    run_dir.mkdir()
    (run_dir / "owner.lock").touch()
    (run_dir / "metrics.jsonl").write_bytes(b"\0" * 64 + b"\n")
    known = json.dumps({"run_dir": str(run_dir), "seed": 3, "started_at": time.time()})
    command = [sys.executable, "-c", DRIVER, "run-5", str(scratch), known]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        driver.send_signal(signal.SIGKILL)
    wait_until_gone(pids, scratch)
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 0
    assert not (run_dir / "owner.lock").exists()
