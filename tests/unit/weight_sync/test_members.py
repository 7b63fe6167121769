"""Replicas that are leased, frozen, replaced or lost: their states, what a sync does with each, and who reads from whom
meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica, World, eventually, full_weights, opened
from weight_sync.control.members import Member, ReplicaState, nothing
from weight_sync.errors import DigestMismatch, VersionUnavailable, WeightSyncError
from weight_sync.receive.relay import Patience

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from weight_sync.receive.relay import Relay

STAGED_OR_NOT = pytest.mark.parametrize("commit", ["staged", "inplace"])

# States

JOINING, LIVE, HELD, REPLACING, DIRTY, DEAD, LEFT = ReplicaState
EVENTS = ("open", "hold", "release", "replace", "keep", "lose", "mix", "leave")
FOLLOWS: dict[ReplicaState, tuple[ReplicaState | None, ...]] = {
    #          open  hold  let go replace    keep  lose  mix    leave
    JOINING: (LIVE, None, None, None, None, DEAD, DIRTY, LEFT),
    LIVE: (LIVE, HELD, None, REPLACING, None, DEAD, DIRTY, LEFT),
    HELD: (LIVE, None, LIVE, REPLACING, None, None, None, LEFT),
    REPLACING: (LIVE, None, None, REPLACING, LIVE, None, None, LEFT),
    DIRTY: (LIVE, None, None, None, None, None, None, LEFT),
    DEAD: (LIVE, None, None, None, None, None, None, LEFT),
    LEFT: (None, None, None, None, None, None, None, LEFT),
}
"""None: refused."""


def member_in(state: ReplicaState) -> Member:
    handle: Any = SimpleNamespace(name="r0")
    member = Member(handle, lambda: 0.0)
    for event in {JOINING: [], LIVE: ["open"], HELD: ["open", "hold"], REPLACING: ["open", "replace"], DIRTY: ["mix"],
                  DEAD: ["lose"], LEFT: ["leave"]}[state]:  # fmt: skip
        member.apply(event)
    assert member.state is state
    return member


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", ReplicaState)
def test_every_event_in_every_state(state: ReplicaState, event: str) -> None:
    member, after = member_in(state), FOLLOWS[state][EVENTS.index(event)]
    if after is None:
        with pytest.raises(ValueError, match=f"r0 is {state.value}, which does not allow {event}"):
            member.apply(event)
    else:
        member.apply(event)
    assert member.state is (state if after is None else after)


@pytest.mark.parametrize("event", ["open", "keep"])
def test_a_replica_that_is_leased_meanwhile_is_held_when_it_comes_back(event: str) -> None:
    member = member_in(REPLACING)
    member.begin_lease(nothing)
    assert member.state is REPLACING
    member.apply(event)
    assert member.state is HELD
    member.begin_lease(nothing)
    member.end_lease(nothing)
    assert member.state is HELD, "another lease lives on"
    member.end_lease(nothing)
    assert member.state is LIVE


def test_only_dead_and_dirty_replicas_are_to_be_replaced() -> None:
    assert {state for state in ReplicaState if state.public != "live"} == {DIRTY, DEAD}


# Leases


@STAGED_OR_NOT
async def test_syncs_pass_a_leased_replica_by_and_it_catches_up_at_the_end(commit: str) -> None:
    async with opened(2, 2, commit=commit) as world:
        leased, other = world.replicas
        await world.step(1)
        with pytest.raises(OSError, match="the evaluation failed"):
            async with world.coordinator.lease("r0") as version:
                assert version == 1
                for number in (2, 3):
                    report = await asyncio.wait_for(world.step(number), 10)
                    assert (report.replicas_live, report.replicas_skipped) == (1, 1)
                assert (leased.versions, other.versions) == ([1], [1, 2, 3])
                assert world.coordinator.live_versions == {"r0": 1, "r1": 3}
                raise OSError("the evaluation failed")  # however it ends
        assert leased.versions == [1, 3], "the newest, not every one it missed"
        leased.assert_holds(world.full)
        assert (await world.step(4)).replicas_live == 2
        leased.assert_holds(world.full)


@STAGED_OR_NOT
async def test_while_the_only_live_replica_is_leased_a_sync_waits_and_a_newcomer_joins_and_takes_it(
    commit: str,
) -> None:
    told: list[dict[str, int | None]] = []

    async def before_skipped() -> None:
        told.append(world.coordinator.live_versions)

    async def never() -> None:
        raise AssertionError("nobody passed it by before its end")

    async with opened(1, 1, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0", before_skipped=never):
            pass
        async with world.coordinator.lease("r0", before_skipped=before_skipped):
            syncing = asyncio.create_task(world.step(2))
            await asyncio.wait({syncing}, timeout=0.1)
            assert not syncing.done()
            assert told == [], "it is not passed by yet"
            await asyncio.wait_for(world.coordinator.join(LocalReplica("r1")), 10)
            report = await asyncio.wait_for(syncing, 10)
            assert (report.replicas_live, report.replicas_skipped) == (1, 1)
            assert world.coordinator.live_versions == {"r0": 1, "r1": 2}
            await asyncio.wait_for(world.step(3), 10)
            assert told == [{"r0": 1, "r1": 2}], "once"
            await asyncio.wait_for(world.step(4), 10)
        assert world.coordinator.live_versions == {"r0": 4, "r1": 4}
        await world.step(5)
        assert len(told) == 1


@STAGED_OR_NOT
async def test_a_sync_that_waited_for_a_lease_does_not_take_a_newer_version_back(commit: str) -> None:
    async with opened(1, 1, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0"):
            await world.publish(2)
            syncing = asyncio.create_task(world.coordinator.sync(2))
            await asyncio.sleep(0)  # it has begun to wait
            await world.publish(3)
            # Joins with version 3, and whoever waits may go on.
            newcomer = LocalReplica("r1")
            await asyncio.wait_for(world.coordinator.join(newcomer), 10)
            await asyncio.wait_for(syncing, 10)
            assert newcomer.versions == [3]
        assert world.replicas[0].versions == [1, 3]
        for replica in (world.replicas[0], newcomer):
            replica.assert_holds(world.full)


async def test_a_lease_whose_end_is_cancelled_keeps_nobody_waiting() -> None:
    async with opened(1, 1, commit="staged") as world:
        await world.step(1)
        leased, let_go = asyncio.Event(), asyncio.Event()

        async def lease() -> None:
            async with world.coordinator.lease("r0"):
                leased.set()
                await let_go.wait()

        leasing = asyncio.create_task(lease())
        await leased.wait()
        async with world.coordinator._membership_lock:  # as while somebody joins
            let_go.set()
            await asyncio.sleep(0.05)
            leasing.cancel()
            await asyncio.gather(leasing, return_exceptions=True)
        assert (await asyncio.wait_for(world.step(2), 10)).replicas_live == 1


async def test_a_replica_that_is_leased_behind_a_waiting_sync_takes_its_version_first() -> None:
    async with opened(1, 3, commit="staged") as world:
        coordinator = world.coordinator
        await world.step(1)
        await world.publish(2)
        versions: list[int | None] = []

        async def evaluate() -> None:
            async with coordinator.lease("r0") as version:
                versions.append(version)

        async with coordinator._membership_lock:  # as while somebody joins
            syncing = asyncio.create_task(coordinator.sync(2))
            await asyncio.sleep(0)
            evaluating = asyncio.create_task(evaluate())
            await asyncio.sleep(0)
        report = await syncing
        await evaluating
        assert (report.num_stalls, report.replicas_live, versions) == (0, 3, [2])


@pytest.mark.parametrize("where", ["lock", "links"])
async def test_a_lease_that_is_cancelled_before_it_begins_was_none(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(1, 2, commit="staged") as world:
        coordinator, has_asked = world.coordinator, asyncio.Event()
        await world.step(1)

        async def lease() -> None:
            async with coordinator.lease("r0"):
                raise AssertionError("it did not begin")

        async def link(*_: object) -> None:
            has_asked.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(coordinator._opener, "link", link)
            if where == "lock":
                async with coordinator._membership_lock:
                    leasing = asyncio.create_task(lease())
                    await asyncio.sleep(0)
                    leasing.cancel()
                    await asyncio.gather(leasing, return_exceptions=True)
                assert not has_asked.is_set()
            else:
                leasing = asyncio.create_task(lease())
                await has_asked.wait()
                leasing.cancel()
                await asyncio.gather(leasing, return_exceptions=True)
        assert leasing.cancelled()
        member = coordinator._members["r0"]
        assert (member.num_leases, member.before_skipped) == (0, [])
        await assert_step_without_stall(world, 2)


# A replica that is evaluated in the middle of an in-place sync: its version is not kept, and nobody waits for it


@asynccontextmanager
async def frozen(world: World) -> AsyncIterator[asyncio.Task[Any]]:
    """r0 is frozen in a sync of version 2, for longer than the deadline of that. r1 has taken it."""
    async with world.coordinator.freeze("r0"):
        syncing = asyncio.create_task(world.step(2))
        await eventually(lambda: world.replicas[1].versions == [1, 2])
        pin: Any = world.coordinator._pin
        await eventually(lambda: not pin.holders)
        world.late_s += 100.0
        assert not syncing.done()
        world.replicas[0].assert_holds(full_weights(1))
        yield syncing


async def test_the_version_of_a_thawed_replica_is_pinned_again_and_it_takes_it() -> None:
    async with opened(1, 2, commit="inplace") as world:
        await world.step(1)
        async with frozen(world) as syncing:
            pass
        assert (await syncing).replicas_live == 2
        world.assert_all_hold(2)


async def test_a_version_whose_slot_is_needed_passes_a_frozen_replica_by_and_the_next_one_reaches_it() -> None:
    """The learner does not wait for an evaluation; the replica writes nothing of a version that is gone."""
    async with opened(1, 2, commit="inplace") as world:
        await world.step(1)
        async with frozen(world) as syncing:
            for version in (3, 4):
                await world.publish(version)
        with pytest.raises(VersionUnavailable, match=r"version 2 .* held: \[3, 4\]"):
            await syncing  # so nobody counts version 2 as live
        replica = world.replicas[0]
        replica.assert_holds(full_weights(1))
        assert not replica.is_paused
        assert not replica.receivers[0].is_dirty
        assert world.coordinator.members == {"r0": "live", "r1": "live"}
        assert world.coordinator.live_versions == {"r0": 1, "r1": 2}
        assert (await world.coordinator.sync(4)).replicas_live == 2
        world.assert_all_hold(4)


# Who reads from whom, after a change that not everybody noticed at once: nobody waits for one who has nothing


def relay_of(replica: LocalReplica) -> Relay:
    epoch = replica.receivers[0]._epoch
    assert epoch is not None
    return epoch.relay


async def assert_step_without_stall(world: World, version: int) -> None:
    report = await world.step(version)
    assert report.num_stalls == 0
    assert report.replicas_live == sum(state == "live" for state in world.coordinator.members.values())


def pull_for_ever(_version: int, _slots: Any, *, deadline: Any) -> None:
    while True:
        deadline.check()
        time.sleep(0.002)


async def test_links_that_come_during_a_pull_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the old links of r3 and the new ones of the others, each would wait for another in a circle."""
    async with opened(2, 4, commit="staged") as world:
        await world.step(1)
        await world.step(2)
        receiver: Any = world.replicas[3].receivers[0]
        with monkeypatch.context() as patch:
            patch.setattr(receiver._epoch, "pull", pull_for_ever)
            receiver.prefetch(2, (), deadline_s=60.0)
            lease = world.coordinator.lease("r0")
            await lease.__aenter__()
        assert receiver._pull is None
        report = await world.step(3)
        assert report.replicas_live == 3
        # Who asks r3 before it has begun version 3 hears that it gave one up, and goes on; in a circle all would wait.
        assert report.pull_s < Patience().stuck_s / 2
        await lease.__aexit__(None, None, None)
        world.assert_all_hold(3)


async def test_nobody_reads_from_a_replica_that_was_lost_at_the_end_of_its_lease() -> None:
    async def fail(*_: object) -> None:
        raise ConnectionError("the engine is gone")

    async with opened(1, 3, commit="staged") as world:
        await world.step(1)
        async with world.coordinator.lease("r0"):
            await world.step(2)
            world.coordinator._members["r0"]._prefetch = fail
        assert world.coordinator.members == {"r0": "dead", "r1": "live", "r2": "live"}
        await assert_step_without_stall(world, 3)


async def test_a_replica_whose_lease_ends_does_not_wait_for_neighbours_that_have_an_older_version() -> None:
    async with opened(1, 3, commit="staged") as world:
        await world.step(1)
        async with world.coordinator.lease("r1"):
            await world.step(2)
            await world.publish(3)
        assert world.coordinator.live_versions == {"r0": 2, "r1": 3, "r2": 2}
        last = world.coordinator._members["r1"]._last
        assert last is not None
        assert last.reports[0].num_stalls == 0
        assert relay_of(world.replicas[1])._link.predecessors, "it is in line again"
        await assert_step_without_stall(world, 4)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_links_that_did_not_reach_everybody_are_sent_again_before_the_next_sync(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(1, 3, commit="staged") as world:
        coordinator = world.coordinator
        await world.step(1)
        link, asked = coordinator._opener.link, list[list[str]]()

        async def lose_one(agreement: Any, members: Any, give_up: float) -> None:
            asked.append([member.name for member in members])
            await link(agreement, members[:1], give_up)  # alone: from the learner
            if len(asked) == 1:
                raise asyncio.CancelledError if is_cancelled else TimeoutError("r1 did not answer")
            await link(agreement, members, give_up)

        monkeypatch.setattr(coordinator._opener, "link", lose_one)
        if is_cancelled:
            with pytest.raises(asyncio.CancelledError):
                await coordinator._relink()
        else:
            await coordinator._relink()
        for version in (2, 3):
            await assert_step_without_stall(world, version)
        assert asked == [["r0", "r1", "r2"]] * 2


async def test_those_behind_a_replica_that_gives_a_version_up_hear_of_it(caplog: pytest.LogCaptureFixture) -> None:
    async with opened(1, 3, commit="staged") as world:
        await world.step(1)
        epoch: Any = world.replicas[0].receivers[0]._epoch
        reader = next(iter(epoch.readers.values()))
        failures, pull = iter([DigestMismatch("broken memory")] * 2), reader.pull

        def fail_twice(*args: Any, **options: Any) -> None:
            for failure in failures:
                raise failure
            pull(*args, **options)

        reader.pull = fail_twice
        caplog.set_level(logging.WARNING, "weight_sync")
        await world.step(2)
        assert world.coordinator.live_versions == {"r0": 1, "r1": 2, "r2": 2}
        assert "r0/0 does not bring version 2 of learner 0: it gave that version up" in caplog.text
        assert "no progress" not in caplog.text


# A member whose successor joins under its name: until that is in, nobody reads from it, and no sync counts on it


class Held(LocalReplica):
    """Opens when it may. What it had is closed by then, as if its process had been started anew."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.is_held = False
        self.has_come, self.may_open = asyncio.Event(), asyncio.Event()

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        if method == "ws_open" and self.is_held:
            await super().call("ws_close", timeout_s=timeout_s)
            self.has_come.set()
            await self.may_open.wait()
        return await super().call(method, *args, timeout_s=timeout_s)


@asynccontextmanager
async def replacing(world: World, replica: Held) -> AsyncIterator[asyncio.Task[int | None]]:
    """In the middle of its join, which goes on at the end."""
    replica.is_held = True
    joining = asyncio.create_task(world.coordinator.join(replica))
    await asyncio.wait_for(replica.has_come.wait(), 20)
    yield joining
    replica.may_open.set()
    await asyncio.wait({joining}, timeout=20)


async def test_who_joins_meanwhile_is_linked_past_it_and_a_sync_passes_it_by() -> None:
    first, *others = Held("r0"), LocalReplica("r1"), LocalReplica("r2")
    async with opened(1, [first, *others], commit="staged") as world:
        await world.step(1)
        async with replacing(world, first):
            newcomer = LocalReplica("r3")
            assert await asyncio.wait_for(world.coordinator.join(newcomer), 20) == 1
            found = [relay_of(each)._link.predecessors for each in (*others, newcomer)]
            assert [next((handle.owner for handle in each), None) for each in found] == [None, "r1/0", "r2/0"]
            report = await asyncio.wait_for(world.step(2), 10)
            assert (report.replicas_live, report.replicas_skipped, report.num_stalls) == (3, 1, 0)
        assert world.coordinator.live_versions == dict.fromkeys(("r0", "r1", "r2", "r3"), 2)
        report = await world.step(3)
        assert (report.replicas_live, report.num_stalls) == (4, 0)
        first.assert_holds(world.full)


async def test_a_sync_waits_where_the_only_live_replica_is_being_replaced() -> None:
    replica = Held("r0")
    async with opened(1, [replica]) as world:
        await world.step(1)
        async with replacing(world, replica):
            syncing = asyncio.create_task(world.step(2))
            await asyncio.wait({syncing}, timeout=0.1)
            assert not syncing.done()
        assert (await asyncio.wait_for(syncing, 20)).replicas_live == 1
        replica.assert_holds(world.full)


async def test_after_a_join_that_fails_syncs_count_on_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    successor = Held("r0")
    async with opened(1, 2) as world:
        await world.step(1)

        def refuse(_: object) -> Any:
            raise WeightSyncError("no way from here")

        monkeypatch.setattr(successor.receivers[0], "open", refuse)
        async with replacing(world, successor) as joining:
            assert (await world.step(2)).replicas_live == 1
        with pytest.raises(WeightSyncError, match="no way from here"):
            await joining
        await assert_step_without_stall(world, 3)
        world.assert_all_hold(3)


async def test_a_lease_that_ends_meanwhile_holds_nobody_up() -> None:
    first = Held("r0")
    async with opened(1, [first, LocalReplica("r1")], commit="staged") as world:
        await world.step(1)
        lease = world.coordinator.lease("r0")
        await lease.__aenter__()
        async with replacing(world, first):
            await asyncio.wait_for(lease.__aexit__(None, None, None), 5)
            assert (await asyncio.wait_for(world.step(2), 5)).replicas_live == 1
        await world.step(3)
        first.assert_holds(world.full)


async def test_a_newcomer_before_the_first_version_takes_it_with_the_others() -> None:
    async with opened(1, 1) as world:
        world.replicas.append(LocalReplica("r1"))
        assert await world.coordinator.join(world.replicas[1]) is None
        assert (await world.step(1)).replicas_live == 2
        world.assert_all_hold(1)
