from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from rollout.processes import GC_THRESHOLDS, OrphanReaper, rare_collections
from tests.fakes.process_life import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@pytest.fixture
def thawed() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    yield
    gc.freeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thawed")
def test_the_collector_is_as_before_after_the_block_even_if_that_fails() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="block"), rare_collections():
        assert gc.get_threshold() == GC_THRESHOLDS != before
        raise ValueError("the block")
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.freeze()
    with rare_collections():
        pass
    assert gc.get_freeze_count() > 0, "it was frozen before"


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("thawed")
def test_a_young_cycle_is_still_found_in_the_block_and_what_existed_before_is_left_alone() -> None:
    old = Node()
    seen = weakref.ref(old)
    with rare_collections():
        young = weakref.ref(Node())
        kept = [[number] for number in range(2 * GC_THRESHOLDS[0])]
        assert young() is None and len(kept) == 2 * GC_THRESHOLDS[0]
        del old
        gc.collect()
        assert seen() is not None
    gc.collect()
    assert seen() is None
