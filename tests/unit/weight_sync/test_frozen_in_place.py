"""A replica that is evaluated in the middle of an in-place sync: its version is not kept, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.fakes.sync_world import LocalReplica, full_weights
from tests.unit.weight_sync.test_coordinator import World, opened
from weight_sync.errors import VersionUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUT_S = 1.0


@contextlib.asynccontextmanager
async def world_at_1() -> AsyncIterator[World]:
    replicas = [LocalReplica(f"r{i}") for i in range(2)]
    async with opened(1, replicas, commit="inplace") as world:
        await world.step(1)  # imports of the first one take longer than what comes
        world.coordinator._options = msgspec.structs.replace(world.coordinator._options, timeout_s=TIMEOUT_S)
        yield world


async def wait_in_freeze(world: World) -> asyncio.Task[Any]:
    """r1 takes version 2. r0, which is frozen, knows of it, for longer than the deadline of the sync."""
    syncing = asyncio.create_task(world.step(2))
    await asyncio.sleep(1.5 * TIMEOUT_S)
    assert not syncing.done()
    world.replicas[0].assert_holds(full_weights(1))
    world.replicas[1].assert_holds(full_weights(2))
    return syncing


async def test_the_version_of_a_thawed_replica_is_pinned_again_and_it_takes_it() -> None:
    async with world_at_1() as world:
        async with world.coordinator.freeze("r0"):
            syncing = await wait_in_freeze(world)
        assert (await syncing).replicas_live == 2
        world.replicas[0].assert_holds(full_weights(2))


async def test_a_version_whose_slot_is_needed_passes_a_frozen_replica_by_and_the_next_one_reaches_it() -> None:
    """The learner does not wait for an evaluation; the replica writes nothing of a version that is gone."""
    async with world_at_1() as world:
        async with world.coordinator.freeze("r0"):
            syncing = await wait_in_freeze(world)
            for version in (3, 4):
                world.train(version)
                await world.coordinator.publish(version)
        with pytest.raises(VersionUnavailable, match=r"version 2 .* held: \[3, 4\]"):
            await syncing  # so nobody counts version 2 as live
        replica = world.replicas[0]
        replica.assert_holds(full_weights(1))
        assert not replica.is_paused
        assert not replica.receivers[0].is_dirty
        assert world.coordinator.members == {"r0": "live", "r1": "live"}
        assert world.coordinator.live_versions == {"r0": 1, "r1": 2}
        assert (await world.coordinator.sync(4)).replicas_live == 2
        replica.assert_holds(full_weights(4))
