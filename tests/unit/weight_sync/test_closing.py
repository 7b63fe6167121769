"""Memory is freed when nobody maps it any more; one thing that cannot be closed keeps nothing else open; and an open or
a join that fails half-way leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
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

from tests.fakes.sync_world import LocalReplica, World, eventually, full_weights, opened
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend, SharedBlock
from weight_sync.errors import DeviceError, PublisherLost, ReplicaDirty, TransportUnusable, WeightSyncError
from weight_sync.receive import receiver as receiver_module
from weight_sync.receive.epoch import ReceiverEpoch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

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


NAMES = ("r0", "r1", "r2")


@contextlib.asynccontextmanager
async def others_are(world: World, state: str, name: str) -> AsyncIterator[None]:
    """All replicas but the one of this name are live, leased or lost."""
    async with contextlib.AsyncExitStack() as leases:
        for other in {*NAMES} - {name}:
            if state == "leased":
                await leases.enter_async_context(world.coordinator.lease(other))
            elif state == "lost":
                world.coordinator._members[other].apply("lose")
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("state", ["live", "leased", "lost"])
async def test_a_replica_that_leaves_is_unmapped_by_the_others_first(state: str, name: str, mappings: Mappings) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        async with others_are(world, state, name):
            await world.coordinator.leave(name)
            mappings.assert_in_order()
        if state == "live":
            await world.step(2)
    mappings.assert_in_order()


@pytest.mark.parametrize(("state", "name"), [*(("live", name) for name in NAMES), ("lost", "r0")])
async def test_a_live_replica_that_joins_again_is_unmapped_by_the_others_first(
    state: str, name: str, mappings: Mappings
) -> None:
    async with opened(1, chained(), commit="staged") as world:
        await world.step(1)
        async with others_are(world, state, name):
            await world.coordinator.join(world.replicas[NAMES.index(name)])
            mappings.assert_in_order()
        if state == "live":
            await world.step(2)
            assert num_readers(world) == 2
    mappings.assert_in_order()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_replica_that_hangs_keeps_nobody_else_from_closing(
    is_lost: bool, mappings: Mappings, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = chained()
    world = World(1, replicas, commit="staged")
    await world.coordinator.open()
    await world.step(1)
    world.hurry(1.0)
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
    world.hurry(0.3)
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


FORGOTTEN = """
import asyncio, gc
from tests.fakes.sync_world import World

async def main():
    world = World(1, 1)
    world.coordinator.itself = world.coordinator  # as a traceback would hold it: only the collector frees it
    await world.coordinator.open()
    return world.publishers, world.replicas

parties = asyncio.run(main())
gc.collect()
print("goes on", flush=True)
"""


def test_coordinator_that_nobody_closed_does_not_hang_the_process_when_it_is_collected() -> None:
    """A context that waits for sockets which were collected with it waits for ever."""
    with subprocess.Popen(
        [sys.executable, "-c", FORGOTTEN], cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        giving_up = threading.Timer(120.0, process.kill)
        giving_up.start()
        try:
            assert process.stdout.readline().strip() == "goes on"
        finally:
            giving_up.cancel()
            process.kill()


# What fails half-way


def two_of_two(**options: Any) -> World:
    """Two learners, two replicas with two workers each."""
    return World(2, [LocalReplica(f"r{i}", 2) for i in range(2)], **options)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = two_of_two()
    yield world
    await asyncio.wait_for(world.coordinator.close(), 20)


def held() -> Counter[str]:
    """What this process holds that an epoch takes: sockets, blocks of shared memory, their mappings, threads."""
    counts: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        counts[target.split(":")[0].split(" ")[0] if ":" in target or "memfd" in target else "file"] += 1
    counts["mappings"] = Path("/proc/self/maps").read_text().count("tandem-block")
    # The event loop's pool and zmq's own threads grow lazily to a fixed size.
    counts["threads"] = sum(t.name.startswith("weight-sync") for t in threading.enumerate())
    return counts


async def at_rest() -> Counter[str]:
    """What is held once everything that was closed is gone."""
    gc.collect()
    found, since = held(), 0
    while since < 5:
        await asyncio.sleep(0.02)
        now = held()
        found, since = (now, 0) if now != found else (found, since + 1)
    return found


async def assert_back_to(before: Counter[str]) -> None:
    """Sockets are closed by a thread of their context, some time after they were told to."""
    gc.collect()
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: not held() - before, within_s=5.0)
    assert held() - before == Counter(), "left behind"


def refuse(_: object) -> Any:
    raise TransportUnusable("no way from here")


def lose(*_: object, **__: object) -> Any:
    raise PublisherLost("a learner went silent in the middle of opening")


def silent_probe(self: ReceiverEpoch, info: Any, reader: Any, check: Any, *, probe: Any = ReceiverEpoch._probe) -> None:
    """The worker has mapped one learner by then, and holds a line to each."""
    if self.owner == "r1/1" and info.rank == 1:
        raise PublisherLost("a learner went silent while it was probed")
    probe(self, info, reader, check)


HALF_WAY: dict[str, Callable[[World], tuple[object, str, Any]]] = {
    "second replica": lambda world: (world.replicas[1].receivers[0], "open", refuse),
    "second worker": lambda world: (world.replicas[0].receivers[1], "open", refuse),
    "second learner": lambda world: (world.publishers[1], "ws_open", refuse),
    "probe of the second learner": lambda world: (ReceiverEpoch, "_probe", silent_probe),
    "control thread, the last that opening makes": lambda world: (receiver_module, "ControlServer", lose),
    "last link": lambda world: (world.replicas[1].receivers[1], "_link", refuse),
}
"""What is replaced by what fails."""


@pytest.mark.parametrize(
    ("where", "transport"), [*((where, "auto") for where in HALF_WAY), ("probe of the second learner", "gloo")]
)
async def test_an_open_that_fails_half_way_leaves_nothing_behind_and_the_next_one_succeeds(
    where: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = two_of_two(transport=transport)
    await world.coordinator.open()  # what is made once per process is there now
    await world.coordinator.close()
    before = await at_rest()
    with monkeypatch.context() as patch:
        patch.setattr(*HALF_WAY[where](world))
        with pytest.raises((TransportUnusable, PublisherLost)):
            await asyncio.wait_for(world.coordinator.open(), 20)
    assert world.coordinator.plan is None
    await assert_back_to(before)
    await asyncio.wait_for(world.coordinator.open(), 20)
    await world.step(1)
    world.assert_all_hold(1)
    await world.coordinator.close()
    await assert_back_to(before)


def newcomer_refuses(newcomer: LocalReplica, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(newcomer.receivers[1], "open", refuse)


def newcomer_does_not_take_the_version(newcomer: LocalReplica, patch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionError("the newcomer's engine is gone")

    patch.setattr(newcomer, "before_commit", fail)


def newcomer_is_dirty(newcomer: LocalReplica, patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: object) -> Any:
        newcomer.receivers[0]._is_dirty = True
        raise ReplicaDirty("it holds a mixture")

    patch.setattr(type(newcomer.receivers[0]), "_write", fail)


@pytest.mark.parametrize(
    ("fail", "name"),
    [
        (newcomer_refuses, "r2"),
        (newcomer_refuses, "r1"),
        (newcomer_does_not_take_the_version, "r1"),
        (newcomer_is_dirty, "r2"),
    ],
)
async def test_a_join_that_fails_leaves_the_group_as_it_was_and_may_be_tried_again(
    world: World, fail: Callable[[LocalReplica, pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a new name, and under the name of a member, which then stays a member."""
    coordinator = world.coordinator
    await coordinator.open()
    await world.step(1)
    before, members, versions = await at_rest(), coordinator.members, coordinator.live_versions
    newcomer = LocalReplica(name, 2)
    with monkeypatch.context() as patch:
        fail(newcomer, patch)
        with pytest.raises((WeightSyncError, ConnectionError)):
            await asyncio.wait_for(coordinator.join(newcomer), 20)
    assert (coordinator.members, coordinator.live_versions) == (members, versions)
    await assert_back_to(before)
    await asyncio.wait_for(world.step(2), 20)
    assert coordinator.live_versions == {"r0": 2, "r1": 2}
    world.assert_all_hold(2)
    await coordinator.self_test()
    assert await asyncio.wait_for(coordinator.join(newcomer), 20) == 2
    newcomer.assert_holds(full_weights(2))
    assert coordinator.members == {**members, name: "live"}
    await asyncio.wait_for(world.step(3), 20)
    newcomer.assert_holds(full_weights(3))


async def test_a_join_that_is_cancelled_in_its_middle_leaves_the_group_as_it_was(world: World) -> None:
    coordinator = world.coordinator
    await coordinator.open()
    await world.step(1)
    newcomer = LocalReplica("r2", 2)
    newcomer.commit_delay_s = 30.0
    joining = asyncio.create_task(coordinator.join(newcomer))
    await eventually(lambda: newcomer.board)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(joining, 20)
    assert coordinator.members == {"r0": "live", "r1": "live"}
    newcomer.commit_delay_s = 0.0
    await asyncio.wait_for(world.step(2), 20)
    assert await asyncio.wait_for(coordinator.join(newcomer), 20) == 2
    newcomer.assert_holds(full_weights(2))


async def test_learners_free_the_communicators_of_a_killed_replica_when_it_leaves() -> None:
    world = two_of_two(transport="gloo", relay="off")
    coordinator = world.coordinator
    await coordinator.open()
    await world.step(1)
    pairs = [publisher.publisher._epoch.end._senders._pairs for publisher in world.publishers]
    dead = [pair[f"r1/{worker}"]._group for pair in pairs for worker in range(2)]

    async def is_gone(*_: object, **__: object) -> Any:
        raise ConnectionError("r1 was killed")

    world.replicas[1].call = is_gone
    await asyncio.wait_for(coordinator.leave("r1"), 20)
    assert [sorted(pair) for pair in pairs] == [["r0/0", "r0/1"]] * 2
    await eventually(lambda: all(group._is_aborted for group in dead))
    await asyncio.wait_for(world.step(2), 20)
    world.replicas[0].assert_holds(full_weights(2))
    await asyncio.wait_for(coordinator.close(), 20)


async def test_a_leave_during_an_open_waits_until_it_is_open(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, leaver = world.coordinator, world.replicas[1]
    link, leaving = coordinator._opener.link, set[asyncio.Task[None]]()

    async def link_and_leave(*args: Any) -> None:
        if not leaving:
            leaving.add(asyncio.create_task(coordinator.leave("r1")))
            await asyncio.sleep(0.2)
            assert leaver.receivers[0]._epoch is not None, "it was closed while it was being opened"
        await link(*args)

    monkeypatch.setattr(coordinator._opener, "link", link_and_leave)
    await asyncio.wait_for(coordinator.open(), 20)
    await asyncio.wait_for(asyncio.gather(*leaving), 20)
    assert coordinator.members == {"r0": "live"}
    assert leaver.receivers[0]._epoch is None
    await world.step(1)
    world.replicas[0].assert_holds(full_weights(1))


@pytest.mark.parametrize(
    ("name", "during"), [("r2", "ws_record"), ("r2", "ws_open"), ("r1", "ws_record"), ("r1", "ws_open")]
)
async def test_a_join_that_outlives_its_epoch_is_refused_and_the_new_epoch_works(
    world: World, name: str, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`r1` is a member that joins once more, in the same process."""
    coordinator = world.coordinator
    await coordinator.open()
    await world.step(1)
    joining = world.replicas[1] if name == "r1" else LocalReplica(name, 2)
    call, has_begun, is_open = joining.call, asyncio.Event(), asyncio.Event()

    async def call_slowly(method: str, *args: object, timeout_s: float) -> list[Any]:
        is_first = method == during and not has_begun.is_set()
        replies = await call(method, *args, timeout_s=timeout_s)
        if is_first:
            has_begun.set()
            await is_open.wait()
        return replies

    monkeypatch.setattr(joining, "call", call_slowly)
    open_epoch = coordinator._opener.open

    async def open_while_joining(*args: Any) -> Any:
        agreement = await open_epoch(*args)
        is_open.set()
        await asyncio.sleep(0.1)
        return agreement

    monkeypatch.setattr(coordinator._opener, "open", open_while_joining)
    changing = asyncio.create_task(coordinator.join(joining))
    await asyncio.wait_for(has_begun.wait(), 20)
    await asyncio.wait_for(coordinator.open(), 20)
    (failure,) = await asyncio.gather(changing, return_exceptions=True)
    assert isinstance(failure, WeightSyncError)
    assert f"opened again while {name} joined" in str(failure)
    assert coordinator.members == {"r0": "live", "r1": "live"}
    await asyncio.wait_for(world.step(2), 20)
    world.assert_all_hold(2)
    await coordinator.self_test()
    if name == "r2":
        assert joining.receivers[0]._epoch is None
