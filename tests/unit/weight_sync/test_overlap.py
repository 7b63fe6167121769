"""Calls that come at the wrong moment: beside a commit, or never."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import SlotAt

ROOT = Path(__file__).parents[3]

FORGOTTEN = """
import asyncio, gc
from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions

async def main():
    parties = [LocalPublisher(0, 1, full_weights(1))], [LocalReplica("r0")]
    coordinator = SyncCoordinator(*parties, options=SyncOptions())
    coordinator.itself = coordinator  # as an exception's traceback would hold it: only the collector frees it
    await coordinator.open()
    return parties

parties = asyncio.run(main())
gc.collect()
print("goes on", flush=True)
"""


def test_coordinator_that_nobody_closed_does_not_hang_the_process_when_it_is_collected() -> None:
    """A context that waits for sockets which were collected with it waits for ever."""
    process = subprocess.Popen([sys.executable, "-c", FORGOTTEN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        reading = threading.Timer(120.0, process.kill)
        reading.start()
        assert process.stdout.readline().strip() == "goes on"
        reading.cancel()
    finally:
        process.kill()
        process.wait(10)


class SlowBackend(CpuBackend):
    """Stands still in the middle of a commit, between the copies and their end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_armed = False
        self.reached, self.go_on = threading.Event(), threading.Event()

    def synchronize(self, stream: object = None) -> None:
        if self.is_armed and threading.current_thread().name == "commit":
            self.reached.set()
            self.go_on.wait(10.0)
            self.is_armed = False


def held(publisher: LocalPublisher, version: int) -> SlotAt:
    """As the coordinator pins it."""
    epoch = publisher.publisher._epoch
    assert epoch is not None
    pinned = epoch.table.pin(version, 30.0).result(20.0)
    return SlotAt(0, pinned.slot, pinned.generation)


async def test_pull_beside_a_commit_does_not_reach_what_is_committed() -> None:
    """The commit of version 2 stands still; version 3 is asked for meanwhile. What goes live as 2 must be 2."""
    replica, backend = LocalReplica("r0"), SlowBackend()
    receiver = replica.receivers[0]
    receiver._backend = backend
    publisher = LocalPublisher(0, 1, full_weights(0))
    coordinator = SyncCoordinator([publisher], [replica], options=SyncOptions(timeout_s=20.0, commit="staged"))
    try:
        await coordinator.open()
        for version in (1, 2, 3):
            publisher.full = full_weights(version)
            await coordinator.publish(version)
            if version < 2:
                await coordinator.sync(version)
            if version == 2:
                await asyncio.wrap_future(receiver.prefetch(2, [held(publisher, 2)], deadline_s=5.0))
        backend.is_armed = True
        commit = threading.Thread(target=receiver.commit, args=(2,), kwargs={"deadline_s": 10.0}, name="commit")
        commit.start()
        await asyncio.to_thread(backend.reached.wait, 5.0)
        prefetch = threading.Thread(
            target=receiver.prefetch, args=(3, [held(publisher, 3)]), kwargs={"deadline_s": 5.0}
        )
        prefetch.start()
        await asyncio.sleep(0.3)
        backend.go_on.set()
        await asyncio.to_thread(commit.join, 10.0)
        await asyncio.to_thread(prefetch.join, 10.0)
        assert receiver.live_version == 2
        replica.assert_holds(full_weights(2))
    finally:
        backend.go_on.set()
        await coordinator.close()
