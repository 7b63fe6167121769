"""Memory is freed when nobody maps it any more, and one thing that cannot be closed keeps nothing else open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import World, opened
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend, SharedBlock
from weight_sync.errors import DeviceError, WeightSyncError

if TYPE_CHECKING:
    from weight_sync.device.base import IpcHandle


class Mappings:
    """Who maps shared memory of whom, and who freed some before it was unmapped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.importers: Counter[int] = Counter()
        self.num_opened = 0
        self.freed_too_early: list[int] = []
        self._lock = threading.Lock()
        real_open, real_close = CpuBackend.ipc_open, SharedBlock.close

        def ipc_open(backend: CpuBackend, handle: IpcHandle) -> SharedBlock:
            block = real_open(backend, handle)
            with self._lock:
                self.importers[os.fstat(block.fd).st_ino] += 1
                self.num_opened += 1
            return block

        def close(block: SharedBlock) -> None:
            if not block.is_closed:
                self._note_close(block)
            real_close(block)

        monkeypatch.setattr(CpuBackend, "ipc_open", ipc_open)
        monkeypatch.setattr(SharedBlock, "close", close)

    def _note_close(self, block: SharedBlock) -> None:
        inode = os.fstat(block.fd).st_ino
        with self._lock:
            if block.is_imported:
                self.importers[inode] -= 1
            elif self.importers[inode]:
                self.freed_too_early.append(block.nbytes)

    def assert_in_order(self) -> None:
        assert self.num_opened > 0
        assert self.freed_too_early == [], "blocks of so many bytes were freed while somebody mapped them"

    def assert_all_gone(self) -> None:
        self.assert_in_order()
        assert self.importers.total() == 0


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Mappings:
    return Mappings(monkeypatch)


class OneByOne(LocalReplica):
    """Replicas with one `turn` close in the order in which they are asked, each after the end of the one before."""

    def __init__(self, name: str, turn: asyncio.Lock) -> None:
        super().__init__(name)
        self._turn = turn

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        async with self._turn if method == "ws_close" else contextlib.nullcontext():
            return await super().call(method, *args, timeout_s=timeout_s)


def chained(number: int = 3) -> list[LocalReplica]:
    """Replicas that hand versions on, the first to the second; the first is closed first."""
    turn = asyncio.Lock()
    return [OneByOne(f"r{i}", turn) for i in range(number)]


def num_readers(world: World) -> int:
    """Replicas that read from another."""
    epochs = [receiver._epoch for replica in world.replicas for receiver in replica.receivers]
    return sum(epoch is not None and any(epoch.relay._readers.values()) for epoch in epochs)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_replicas_unmap_each_other_and_then_the_learners_before_any_of_it_is_freed(
    num_ranks: int, mappings: Mappings
) -> None:
    async with opened(num_ranks, chained(), commit="staged") as world:
        await world.step(1)
        assert num_readers(world) > 0
    mappings.assert_all_gone()


async def test_an_epoch_is_unmapped_before_the_next_one_frees_its_memory(mappings: Mappings) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        await world.coordinator.open()
        mappings.assert_in_order()
        await world.step(1)
        assert num_readers(world) > 0
    mappings.assert_all_gone()


async def test_an_epoch_of_another_coordinator_is_unmapped_before_the_learners_free_it(mappings: Mappings) -> None:
    async with opened(2, chained(1), commit="staged") as world:
        await world.step(1)
        another = SyncCoordinator(world.publishers, world.replicas, options=SyncOptions(timeout_s=20.0))
        await another.open()
        mappings.assert_in_order()


async def test_an_open_that_fails_at_its_links_is_closed_in_order(
    mappings: Mappings, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(1, chained(), commit="staged")

    def refuse(_: object) -> bool:
        raise WeightSyncError("no links here")

    monkeypatch.setattr(world.replicas[2].receivers[0], "_link", refuse)
    with pytest.raises(WeightSyncError, match="no links here"):
        await world.coordinator.open()
    mappings.assert_all_gone()


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
async def test_a_replica_that_leaves_is_unmapped_by_the_others_first(name: str, mappings: Mappings) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        await world.coordinator.leave(name)
        mappings.assert_in_order()
        await world.step(2)
    mappings.assert_in_order()


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
async def test_a_leased_replica_keeps_nothing_of_one_that_leaves(name: str, mappings: Mappings) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        async with contextlib.AsyncExitStack() as leases:
            for leased in {"r0", "r1", "r2"} - {name}:
                await leases.enter_async_context(world.coordinator.lease(leased))
            await world.coordinator.leave(name)
            mappings.assert_in_order()


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
async def test_a_lost_replica_keeps_nothing_of_one_that_leaves(name: str, mappings: Mappings) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        for other in {"r0", "r1", "r2"} - {name}:
            world.coordinator._members[other].apply("lose")
        await world.coordinator.leave(name)
        mappings.assert_in_order()


async def test_a_lost_replica_keeps_nothing_of_a_live_one_that_joins_again(mappings: Mappings) -> None:
    replicas = chained()
    async with opened(1, replicas, commit="staged") as world:
        await world.step(1)
        for other in ("r1", "r2"):
            world.coordinator._members[other].apply("lose")
        await world.coordinator.join(replicas[0])
        mappings.assert_in_order()


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
async def test_a_live_replica_that_joins_again_is_unmapped_by_the_others_first(name: str, mappings: Mappings) -> None:
    replicas = chained()
    async with opened(1, replicas, commit="staged") as world:
        await world.step(1)
        await world.coordinator.join(next(replica for replica in replicas if replica.name == name))
        mappings.assert_in_order()
        await world.step(2)
        assert num_readers(world) == 2
    mappings.assert_all_gone()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_replica_that_hangs_keeps_nobody_else_from_closing(
    is_lost: bool, mappings: Mappings, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = chained()
    world = World(1, replicas, commit="staged", timeout_s=5.0)
    await world.coordinator.open()
    await world.step(1)
    world.coordinator._options = SyncOptions(timeout_s=1.0)
    call = replicas[1].call
    if is_lost:
        world.coordinator._members["r1"].apply("lose")

    replicas[1].call = hang
    caplog.set_level(logging.WARNING, "weight_sync")
    await asyncio.wait_for(world.coordinator.close(), 20)
    assert "did not close: TimeoutError: replica r1 did not answer within" in caplog.text
    assert [replica.receivers[0].status().open for replica in replicas] == [False, True, False]
    assert world.publishers[0].publisher._epoch is None
    await call("ws_close", timeout_s=20.0)


async def hang(_method: str, *_args: object, timeout_s: float) -> Any:
    """As a handle that waits longer than it was told, for an answer that is on its way."""
    await asyncio.Event().wait()


async def test_all_that_hang_share_one_deadline(caplog: pytest.LogCaptureFixture) -> None:
    replicas = chained()
    world = World(2, replicas, commit="staged")
    await world.coordinator.open()
    world.coordinator._options = SyncOptions(timeout_s=0.3)
    parties: list[Any] = [*replicas, *world.publishers]
    calls = [party.call for party in parties]
    for party in parties:
        party.call = hang
    caplog.set_level(logging.WARNING, "weight_sync")
    await asyncio.wait_for(world.coordinator.close(), 20)
    found = re.findall(r"TimeoutError: (.*) did not answer within (.*) s", caplog.text)
    patience_s = {who: float(seconds) for who, seconds in found}
    assert patience_s.keys() == {"replica r0", "replica r1", "replica r2", "learner rank 0", "learner rank 1"}
    assert max(patience_s.values()) == patience_s["replica r0"] == 0.2
    assert patience_s["replica r0"] + patience_s["learner rank 0"] == pytest.approx(0.3)
    for call in calls:
        await call("ws_close", timeout_s=20.0)


@pytest.mark.parametrize("num_opened", [0, 1])
async def test_an_open_that_fails_closes_everybody_before_and_after_it(
    num_opened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, num_closed = LocalReplica("r0"), 0
    async with opened(1, [replica]) if num_opened else contextlib.nullcontext(World(1, [replica])) as world:
        close = replica.services[0].ws_close

        def count() -> bytes:
            nonlocal num_closed
            num_closed += 1
            return close()

        def refuse(_: object) -> bytes:
            raise WeightSyncError("no slots here")

        monkeypatch.setattr(replica.services[0], "ws_close", count)
        monkeypatch.setattr(world.publishers[0], "ws_open", refuse)
        with pytest.raises(WeightSyncError, match="no slots here"):
            await world.coordinator.open()
        assert num_closed == 2
        monkeypatch.undo()


def refuse_to_close(block: Any) -> None:
    def close() -> None:
        raise DeviceError("the driver does not unmap this")

    block.close = close


@pytest.mark.parametrize("what", ["slots", "predecessor"])
async def test_one_mapping_that_cannot_be_closed_keeps_nothing_else_open(
    what: str,
) -> None:
    replicas = chained()
    async with opened(2, replicas, commit="staged") as world:
        await world.step(1)
        reader = next(r for r in replicas if any(r.receivers[0]._epoch.relay._readers.values()))
        epoch: Any = reader.receivers[0]._epoch
        relayed = next(filter(None, epoch.relay._readers.values()))._reader._block
        mapped = [one._reader._block for one in epoch.readers.values() if one._reader is not None]
        broken = mapped[0] if what == "slots" else relayed
        refuse_to_close(broken)
        with pytest.raises(DeviceError, match="does not unmap this"):
            reader.receivers[0].close()
        others = [block for block in (*mapped, relayed) if block is not broken]
        assert all(block.is_closed for block in others)
        assert epoch.targets.buffer.is_closed
    SharedBlock.close(broken)


async def test_what_a_replica_could_not_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    replica = LocalReplica("r0")
    async with opened(1, [replica], commit="staged"):
        reader: Any = next(iter(replica.receivers[0]._epoch.readers.values()))._reader
        broken = reader._block
        refuse_to_close(broken)
        caplog.set_level(logging.WARNING, "weight_sync")
    assert "a party of weight sync did not close: WeightSyncError: DeviceError: r0/0: the driver" in caplog.text
    SharedBlock.close(broken)


async def test_a_publisher_that_cannot_hang_up_frees_its_slots_all_the_same() -> None:
    async with opened(1, [LocalReplica("r0")]) as world:
        publisher = world.publishers[0].publisher
        epoch = publisher._epoch
        assert epoch is not None
        server, block = epoch.server, epoch.end.block
        assert server is not None and block is not None
        end = server.close

        def fail() -> None:
            end()
            raise OSError("the socket is gone")

        server.close = fail
        with pytest.raises(OSError, match="the socket is gone"):
            publisher.close()
        assert block.is_closed


@pytest.mark.parametrize("name", ["r0", "r1", "r2"])
async def test_a_pull_that_still_runs_ends_before_what_it_reads_is_freed(name: str, mappings: Mappings) -> None:
    """One of a sync that gave up, say: nobody wants its version any more."""
    replicas = chained()
    async with opened(1, replicas, commit="staged") as world:
        await world.step(1)
        for replica in replicas:
            receiver: Any = replica.receivers[0]
            receiver._epoch.pull = pull_for_ever
            receiver.prefetch(2, (), deadline_s=60.0)
        await world.coordinator.leave(name)
        mappings.assert_in_order()
    mappings.assert_all_gone()


def pull_for_ever(_version: int, _slots: Any, *, deadline: Any) -> None:
    while True:
        deadline.check()
        time.sleep(0.002)


# A coordinator that nobody closes


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
    process = subprocess.Popen(
        [sys.executable, "-c", FORGOTTEN], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        reading = threading.Timer(120.0, process.kill)
        reading.start()
        assert process.stdout.readline().strip() == "goes on"
        reading.cancel()
    finally:
        process.kill()
        process.wait(10)
