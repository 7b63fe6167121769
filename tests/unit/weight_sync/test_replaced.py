"""A member whose successor joins under its name: until that is in, nobody reads from it, and no sync counts on it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import World, opened
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


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


def predecessor_of(replica: LocalReplica) -> str | None:
    epoch = replica.receivers[0]._epoch
    assert epoch is not None
    return next((handle.owner for handle in epoch.relay._link.predecessors), None)


async def test_who_joins_meanwhile_is_linked_past_it_and_a_sync_passes_it_by() -> None:
    first, others = Held("r0"), [LocalReplica("r1"), LocalReplica("r2")]
    async with opened(1, [first, *others], commit="staged") as world:
        await world.step(1)
        async with replacing(world, first):
            newcomer = LocalReplica("r3")
            assert await asyncio.wait_for(world.coordinator.join(newcomer), 20) == 1
            assert [predecessor_of(each) for each in (*others, newcomer)] == [None, "r1/0", "r2/0"]
            report: Any = await asyncio.wait_for(world.step(2), 10)
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
            await asyncio.wait({syncing}, timeout=0.2)
            assert not syncing.done()
        report: Any = await asyncio.wait_for(syncing, 20)
        assert report.replicas_live == 1
        replica.assert_holds(world.full)


async def test_after_a_join_that_fails_syncs_count_on_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    old, successor = LocalReplica("r0"), Held("r0")
    async with opened(1, [old, LocalReplica("r1")]) as world:
        await world.step(1)

        def refuse(_: object) -> Any:
            raise WeightSyncError("no way from here")

        monkeypatch.setattr(successor.receivers[0], "open", refuse)
        async with replacing(world, successor) as joining:
            report: Any = await world.step(2)
            assert report.replicas_live == 1
        with pytest.raises(WeightSyncError, match="no way from here"):
            await joining
        report = await world.step(3)
        assert (report.replicas_live, report.num_stalls) == (2, 0)
        old.assert_holds(world.full)


async def test_a_lease_that_ends_meanwhile_holds_nobody_up() -> None:
    first, other = Held("r0"), LocalReplica("r1")
    async with opened(1, [first, other], commit="staged", timeout_s=20.0) as world:
        await world.step(1)
        lease = world.coordinator.lease("r0")
        await lease.__aenter__()
        async with replacing(world, first):
            await asyncio.wait_for(lease.__aexit__(None, None, None), 5)
            report: Any = await asyncio.wait_for(world.step(2), 5)
            assert report.replicas_live == 1
        await world.step(3)
        first.assert_holds(world.full)
