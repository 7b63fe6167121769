"""An open or a join that fails half-way leaves nothing behind, and the next one succeeds."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.errors import PublisherLost, ReplicaDirty, TransportUnusable, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SETTLE_S = 5.0
"""Sockets are closed by a thread of their context, some time after they were told to."""


class World:
    """Two learners, two replicas with two workers each."""

    def __init__(self, **options: Any) -> None:
        self.publishers = [LocalPublisher(rank, 2, full_weights(0)) for rank in range(2)]
        self.replicas = [LocalReplica(f"r{i}", 2) for i in range(2)]
        merged = {"timeout_s": 20.0, "host": "127.0.0.1", **options}
        self.coordinator = SyncCoordinator(self.publishers, self.replicas, options=SyncOptions(**merged))

    async def step(self, version: int) -> None:
        for publisher in self.publishers:
            publisher.full = full_weights(version)
        await self.coordinator.publish(version)
        await self.coordinator.sync(version)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
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
    gc.collect()
    until = asyncio.get_running_loop().time() + SETTLE_S
    while (more := held() - before) and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.02)
    assert not more, f"left behind: {dict(more)}"


def refuse(_: object) -> Any:
    raise TransportUnusable("no way from here")


def lose(*_: object, **__: object) -> Any:
    raise PublisherLost("a learner went silent in the middle of opening")


def second_replica_refuses(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.replicas[1].receivers[0], "open", refuse)


def second_worker_refuses(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.replicas[0].receivers[1], "open", refuse)


def second_learner_refuses(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.publishers[1], "ws_open", refuse)


def probe_fails_at_the_second_learner(world: World, patch: pytest.MonkeyPatch) -> None:
    """The worker has mapped one learner by then, and holds a line to each."""
    from weight_sync.receive.epoch import ReceiverEpoch

    probe = ReceiverEpoch._probe

    def fail(self: ReceiverEpoch, info: Any, reader: Any, check: Any) -> None:
        if self.owner == "r1/1" and info.rank == 1:
            raise PublisherLost("a learner went silent while it was probed")
        probe(self, info, reader, check)

    patch.setattr(ReceiverEpoch, "_probe", fail)


def control_thread_cannot_listen(world: World, patch: pytest.MonkeyPatch) -> None:
    """The last thing that opening does: everything else is there by then."""
    from weight_sync.receive import receiver

    patch.setattr(receiver, "ControlServer", lose)


def last_link_is_refused(world: World, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(world.replicas[1].receivers[1], "_link", refuse)


@pytest.mark.parametrize(
    ("fail", "transport"),
    [
        (second_replica_refuses, "auto"),
        (second_worker_refuses, "auto"),
        (second_learner_refuses, "auto"),
        (probe_fails_at_the_second_learner, "auto"),
        (probe_fails_at_the_second_learner, "gloo"),
        (control_thread_cannot_listen, "auto"),
        (last_link_is_refused, "auto"),
    ],
)
async def test_an_open_that_fails_half_way_leaves_nothing_behind_and_the_next_one_succeeds(
    fail: Callable[[World, pytest.MonkeyPatch], None], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(transport=transport)
    await world.coordinator.open()  # what is made once per process is there now
    await world.coordinator.close()
    before = await at_rest()
    with monkeypatch.context() as patch:
        fail(world, patch)
        with pytest.raises((TransportUnusable, PublisherLost)):
            await asyncio.wait_for(world.coordinator.open(), 20)
    assert world.coordinator.plan is None
    await assert_back_to(before)
    await asyncio.wait_for(world.coordinator.open(), 20)
    await world.step(1)
    for replica in world.replicas:
        replica.assert_holds(full_weights(1))
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
    for replica in world.replicas:
        replica.assert_holds(full_weights(2))
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
    async with asyncio.timeout(10):
        while not newcomer.board:
            await asyncio.sleep(0.005)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(joining, 20)
    assert coordinator.members == {"r0": "live", "r1": "live"}
    newcomer.commit_delay_s = 0.0
    await asyncio.wait_for(world.step(2), 20)
    assert await asyncio.wait_for(coordinator.join(newcomer), 20) == 2
    newcomer.assert_holds(full_weights(2))


async def test_learners_free_the_communicators_of_a_killed_replica_when_it_leaves() -> None:
    world = World(transport="gloo", relay="off")
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
    async with asyncio.timeout(10):
        while not all(group._is_aborted for group in dead):
            await asyncio.sleep(0.01)
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
    for replica in world.replicas:
        replica.assert_holds(full_weights(2))
    await coordinator.self_test()
    if name == "r2":
        assert joining.receivers[0]._epoch is None
