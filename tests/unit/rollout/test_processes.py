from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rollout.processes import OrphanReaper
from tests.fakes.process_life import is_running, wait_until

OWNER = """
import subprocess, sys, time
from rollout.processes import OrphanReaper
gone = subprocess.Popen(["true"])
gone.wait()
child = subprocess.Popen(["sleep", "60"])
reaper = OrphanReaper([gone.pid, child.pid])
print(child.pid, flush=True)
time.sleep(60)
"""
"""Its reaper is given a process that is gone, too."""


def test_a_killed_owner_takes_its_engine_processes_with_it() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    time.sleep(0.2)
    assert is_running(child)
    owner.kill()
    owner.communicate()
    wait_until(lambda: not is_running(child), within_s=30.0, what="the child outlived its owner")


def test_what_an_orderly_end_has_left_is_killed_and_nothing_else() -> None:
    child, other = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["sleep", "60"])
    try:
        reaper = OrphanReaper([child.pid])
        reaper.close()
        reaper.close()
        assert child.wait(10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (child, other):
            process.kill()
            process.wait()


SHARER = """
import time
from multiprocessing import resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
print(segment.name, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("is_gone", [False, True])
def test_the_shared_memory_of_an_engine_goes_with_it_and_no_other(is_gone: bool) -> None:
    """As vLLM's worker processes leave it when they are killed."""
    engine, other = (subprocess.Popen([sys.executable, "-c", SHARER], stdout=subprocess.PIPE, text=True) for _ in "ab")
    try:
        assert engine.stdout is not None and other.stdout is not None
        mine, theirs = (Path("/dev/shm") / each.stdout.readline().strip() for each in (engine, other))
        assert mine.exists() and theirs.exists()
        reaper = OrphanReaper([engine.pid])
        if is_gone:
            engine.kill()
            engine.wait()
        reaper.close()
        assert not mine.exists() and theirs.exists()
        theirs.unlink()
    finally:
        for process in (engine, other):
            process.kill()
            process.communicate()
