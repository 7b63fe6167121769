"""Versions that lose their slots on the way, and learners that get no slot: who is told, and who has what then."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import World, opened
from weight_sync.errors import DeviceError, PullTimeout, VersionUnavailable, WeightSyncError
from weight_sync.publish.slots import SlotState

if TYPE_CHECKING:
    from weight_sync.publish.publisher import Epoch


def epoch_of(world: World) -> Epoch:
    epoch = world.publishers[0].publisher._epoch
    assert epoch is not None
    return epoch


async def test_a_version_that_one_replica_missed_does_not_count_as_live() -> None:
    """It is pinned until each replica has it, but for one that is frozen with it staged: the learner may go on then. If
    its commit fails afterwards, there is nothing left to try again with."""
    prompt, late = LocalReplica("r0"), LocalReplica("r1")
    async with opened(1, [prompt, late], commit="staged", rolling=False) as world:
        await world.step(1)
        commit, failures = late.commit, iter([TimeoutError("the engine was busy")])

        async def fail_once(*args: Any, **options: Any) -> Any:
            for failure in failures:
                raise failure
            return await commit(*args, **options)

        late.commit = fail_once
        async with world.coordinator.freeze("r1"):
            syncing = asyncio.create_task(world.step(2))
            slots = epoch_of(world).table.slots
            while prompt.versions != [1, 2] or any(slot.state is SlotState.PINNED for slot in slots):
                await asyncio.sleep(0.01)
            for version in (3, 4):
                world.train(version)
                await world.coordinator.publish(version)
        with pytest.raises(VersionUnavailable, match="version 2 is not held here"):
            await syncing
        assert world.coordinator.members == {"r0": "live", "r1": "live"}, "it is nobody's failure"
        report = await world.coordinator.sync(4)
        assert (report.version_lag, report.replicas_live) == (0, 2)
        for replica in (prompt, late):
            replica.assert_holds(world.full)


async def test_a_newcomer_waits_for_the_version_that_is_being_packed_over_the_last_one() -> None:
    async with opened(1, [LocalReplica("r0")], num_slots=1) as world:
        await world.step(1)
        packer, has_begun, may_go_on = epoch_of(world).packer, threading.Event(), threading.Event()
        pack = packer.pack

        def pack_slowly(*args: Any) -> None:
            has_begun.set()
            assert may_go_on.wait(20)
            pack(*args)

        packer.pack = pack_slowly  # type: ignore[method-assign]
        world.train(2)
        publishing = asyncio.create_task(world.coordinator.publish(2))
        await asyncio.to_thread(has_begun.wait, 20)
        newcomer = LocalReplica("r1")
        joining = asyncio.create_task(world.coordinator.join(newcomer))
        await asyncio.sleep(0.5)
        assert not joining.done()
        may_go_on.set()
        await publishing
        assert await asyncio.wait_for(joining, 20) == 2
        newcomer.assert_holds(world.full)


async def test_a_replica_that_has_the_version_already_is_not_asked_again() -> None:
    first, second = LocalReplica("r0"), LocalReplica("r1")
    async with opened(1, [first], num_slots=1) as world:
        await world.step(1)
        await world.coordinator.join(second)
        report = await world.coordinator.sync(1)
        assert (report.version, report.replicas_live) == (1, 2)
        assert (first.versions, second.versions) == ([1], [1])


async def test_a_learner_that_gets_no_slot_says_who_reads_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = LocalReplica("r0")
    async with opened(2, [replica], num_slots=1, commit="inplace", timeout_s=1.0) as world:
        await world.step(1)
        publish, has_begun, may_end = world.publishers[0].ws_publish, asyncio.Event(), asyncio.Event()

        async def commit_slowly(*_: Any, **__: Any) -> Any:
            has_begun.set()
            await may_end.wait()
            raise TimeoutError("the engine was busy")

        def answer_late(version: int, deadline_s: float) -> bytes:
            try:
                return publish(version, deadline_s)
            finally:
                time.sleep(0.3)  # on its way to the driver

        replica.commit = commit_slowly
        syncing = asyncio.create_task(world.step(2))
        await has_begun.wait()
        monkeypatch.setattr(world.publishers[0], "ws_publish", answer_late)
        with pytest.raises(PullTimeout, match=r"version 2 in slot 0 is pinned .*; version 2 is still read by r0"):
            await world.coordinator.publish(3)
        may_end.set()
        await asyncio.gather(syncing, return_exceptions=True)


async def test_a_version_that_could_not_be_sealed_says_why_and_harms_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = LocalReplica("r0")
    async with opened(1, [replica]) as world:
        await world.step(1)
        epoch = epoch_of(world)

        def fail(_: int) -> None:
            raise DeviceError("no page-locked memory")

        monkeypatch.setattr(epoch.end, "seal", fail)
        with pytest.raises(VersionUnavailable, match="rank 0 could not seal version 2: DeviceError: no page-locked"):
            await world.step(2)
        assert "could not seal version 2" in caplog.text
        assert world.coordinator.members == {"r0": "live"}
        with pytest.raises(WeightSyncError, match="could not seal version 2"):
            await world.coordinator.publish(2)
        monkeypatch.undo()
        await world.step(2)
        assert world.coordinator.members == {"r0": "live"}


class Ticking:
    """A clock that goes on a little whenever somebody looks at it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


async def test_the_seal_and_the_slot_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(1, [LocalReplica("r0")], num_slots=1) as world:
        await world.step(1)
        await asyncio.sleep(0.1)  # version 1 is unpinned
        epoch, clock = epoch_of(world), Ticking()
        monkeypatch.setattr(world.publishers[0].publisher, "_clock", clock)
        monkeypatch.setattr(epoch.table, "_clock", clock)
        epoch.table.pin(1, 60.0)
        monkeypatch.setattr(epoch.sealer, "wait", lambda _deadline_s: clock.pass_by(0.6))
        with pytest.raises(PullTimeout):
            world.publishers[0].ws_publish(2, 0.8)
        assert 0.8 <= clock.now < 1.0


async def test_a_sync_has_all_its_time_after_it_waited_for_somebody_to_join() -> None:
    replica = LocalReplica("r0")
    async with opened(1, [replica], timeout_s=1.0) as world:
        await world.step(1)
        async with world.coordinator._membership_lock:
            syncing = asyncio.create_task(world.step(2))
            await asyncio.sleep(1.1)
        assert (await asyncio.wait_for(syncing, 10)).replicas_live == 1
        assert replica.versions == [1, 2]
