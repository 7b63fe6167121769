"""A replica that keeps its version while syncs pass it by, and catches up."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import opened

pytestmark = pytest.mark.parametrize("commit", ["staged", "inplace"])


async def test_syncs_pass_a_leased_replica_by_and_it_catches_up_at_the_end(commit: str) -> None:
    replicas = [LocalReplica("r0"), LocalReplica("r1")]
    async with opened(2, replicas, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0") as version:
            assert version == 1
            for number in (2, 3):
                report = await asyncio.wait_for(world.step(number), 10)
                assert (report.replicas_live, report.replicas_skipped) == (1, 1)
            assert (replicas[0].versions, replicas[1].versions) == ([1], [1, 2, 3])
            assert world.coordinator.live_versions == {"r0": 1, "r1": 3}
        assert replicas[0].versions == [1, 3], "the newest, not every one it missed"
        replicas[0].assert_holds(world.full)
        report = await world.step(4)
        assert report.replicas_live == 2
        replicas[0].assert_holds(world.full)


async def test_a_block_that_fails_leaves_a_replica_with_the_newest_version(commit: str) -> None:
    replicas = [LocalReplica("r0"), LocalReplica("r1")]
    async with opened(1, replicas, commit=commit) as world:
        await world.step(1)
        with pytest.raises(OSError, match="the evaluation failed"):
            async with world.coordinator.lease("r0"):
                await world.step(2)
                raise OSError("the evaluation failed")
        replicas[0].assert_holds(world.full)
        assert (await world.step(3)).replicas_live == 2


async def test_while_the_only_live_replica_is_leased_a_sync_waits_and_a_newcomer_joins_and_takes_it(
    commit: str,
) -> None:
    replicas = [LocalReplica("r0")]
    told: list[dict[str, int | None]] = []

    async def before_skipped() -> None:
        told.append(world.coordinator.live_versions)

    async with opened(1, replicas, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0", before_skipped=before_skipped):
            syncing = asyncio.create_task(world.step(2))
            await asyncio.sleep(0.1)
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


async def test_a_lease_that_nobody_passed_by_says_so_to_nobody_afterwards(commit: str) -> None:
    async def never() -> None:
        raise AssertionError("the lease is over")

    replicas = [LocalReplica("r0"), LocalReplica("r1")]
    async with opened(1, replicas, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0", before_skipped=never):
            pass
        async with world.coordinator.lease("r0"):
            await asyncio.wait_for(world.step(2), 10)


async def test_a_sync_that_waited_for_a_lease_does_not_take_a_newer_version_back(commit: str) -> None:
    replicas = [LocalReplica("r0")]
    async with opened(1, replicas, commit=commit) as world:
        await world.step(1)
        async with world.coordinator.lease("r0"):
            world.train(2)
            await world.coordinator.publish(2)
            syncing = asyncio.create_task(world.coordinator.sync(2))
            await asyncio.sleep(0)  # it has begun to wait
            world.train(3)
            await world.coordinator.publish(3)
            # Joins with version 3, and whoever waits may go on.
            newcomer = LocalReplica("r1")
            await asyncio.wait_for(world.coordinator.join(newcomer), 10)
            await asyncio.wait_for(syncing, 10)
            assert newcomer.versions == [3]
        assert replicas[0].versions == [1, 3]
        for replica in (*replicas, newcomer):
            replica.assert_holds(world.full)


async def test_a_lease_whose_end_is_cancelled_keeps_nobody_waiting(commit: str) -> None:
    async with opened(1, [LocalReplica("r0")], commit=commit) as world:
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
            await asyncio.sleep(0.1)
            leasing.cancel()
            await asyncio.gather(leasing, return_exceptions=True)
        assert (await asyncio.wait_for(world.step(2), 10)).replicas_live == 1
