from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.fakes.process_life import is_running
from trainer.pipeline.reaper import MARK, Reaper

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SLEEP = "import time; time.sleep(100)"
DRIVER = """
import os, subprocess, sys, time
from pathlib import Path
from trainer.pipeline.reaper import MARK, Reaper
os.environ[MARK] = sys.argv[1]
scratch = Path(sys.argv[2])
Reaper(sys.argv[1], scratch)
clean = {name: value for name, value in os.environ.items() if name != MARK}
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
    environment = {**os.environ, MARK: "another run"}
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
    command = [sys.executable, "-c", DRIVER, "run-1", str(scratch)]
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
        reaper = Reaper("run-2", scratch)
        reaper.close()
        reaper.close()
    assert not scratch.exists()
