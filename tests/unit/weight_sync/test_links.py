"""Who reads from whom, after a change that not everybody noticed at once: nobody waits for one who has nothing."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import opened
from weight_sync.errors import DigestMismatch

if TYPE_CHECKING:
    from tests.unit.weight_sync.test_coordinator import World
    from weight_sync.receive.relay import Relay


def replicas_called(number: int) -> list[LocalReplica]:
    return [LocalReplica(f"r{i}") for i in range(number)]


def relay_of(replica: LocalReplica) -> Relay:
    epoch = replica.receivers[0]._epoch
    assert epoch is not None
    return epoch.relay


async def assert_step_without_stall(world: World, version: int) -> None:
    report: Any = await world.step(version)
    assert report.num_stalls == 0
    assert report.replicas_live == sum(state == "live" for state in world.coordinator.members.values())


async def test_links_that_come_during_a_pull_end_it() -> None:
    """With the old links of r3 and the new ones of the others, each would wait for another in a circle."""
    replicas = replicas_called(4)
    async with opened(2, replicas, commit="staged") as world:
        await world.step(1)
        await world.step(2)
        receiver = replicas[3].receivers[0]
        pull = receiver._epoch.pull

        def pull_for_ever(_version: int, _slots: Any, *, deadline: Any) -> None:
            while True:
                deadline.check()
                time.sleep(0.002)

        receiver._epoch.pull = pull_for_ever
        receiver.prefetch(2, (), deadline_s=60.0)
        async with world.coordinator.lease("r0"):
            assert receiver._pull is None
            receiver._epoch.pull = pull
            report: Any = await world.step(3)
            assert (report.num_stalls, report.replicas_live) == (0, 3)
            for replica in replicas[1:]:
                replica.assert_holds(world.full)


async def test_nobody_reads_from_a_replica_that_was_lost_at_the_end_of_its_lease() -> None:
    async def fail(*_: object) -> None:
        raise ConnectionError("the engine is gone")

    async with opened(1, replicas_called(3), commit="staged") as world:
        await world.step(1)
        async with world.coordinator.lease("r0"):
            await world.step(2)
            world.coordinator._members["r0"]._prefetch = fail
        assert world.coordinator.members == {"r0": "dead", "r1": "live", "r2": "live"}
        await assert_step_without_stall(world, 3)


async def test_a_replica_whose_lease_ends_does_not_wait_for_neighbours_that_have_an_older_version() -> None:
    replicas = replicas_called(3)
    async with opened(1, replicas, commit="staged") as world:
        await world.step(1)
        async with world.coordinator.lease("r1"):
            await world.step(2)
            world.train(3)
            await world.coordinator.publish(3)
        assert world.coordinator.live_versions == {"r0": 2, "r1": 3, "r2": 2}
        last = world.coordinator._members["r1"]._last
        assert last is not None
        assert last.reports[0].num_stalls == 0
        assert relay_of(replicas[1])._link.predecessors, "it is in line again"
        await assert_step_without_stall(world, 4)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_links_that_did_not_reach_everybody_are_sent_again_before_the_next_sync(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(1, replicas_called(3), commit="staged") as world:
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
    replicas = replicas_called(3)
    async with opened(1, replicas, commit="staged") as world:
        await world.step(1)
        reach: Any = next(iter(replicas[0].receivers[0]._epoch.readers.values()))
        failures = iter([DigestMismatch("broken memory")] * 2)
        pull = reach.pull

        def fail_twice(*args: Any, **options: Any) -> None:
            for failure in failures:
                raise failure
            pull(*args, **options)

        reach.pull = fail_twice
        caplog.set_level(logging.WARNING, "weight_sync")
        await world.step(2)
        assert world.coordinator.live_versions == {"r0": 1, "r1": 2, "r2": 2}
        assert "r0/0 does not bring version 2 of learner 0: it gave that version up" in caplog.text
        assert "no progress" not in caplog.text


async def test_a_replica_that_is_leased_behind_a_waiting_sync_takes_its_version_first() -> None:
    replicas = replicas_called(3)
    async with opened(1, replicas, commit="staged") as world:
        coordinator = world.coordinator
        await world.step(1)
        world.train(2)
        await coordinator.publish(2)
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
    replicas = replicas_called(2)
    async with opened(1, replicas, commit="staged") as world:
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
