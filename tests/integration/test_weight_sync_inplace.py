"""A slot that an in-place commit reads from belongs to it until it gives its lease back or the lease runs out.

Real processes: a replica is stopped in the middle of a commit for longer than its lease, and goes on when its slot has
been packed again, twice. It must notice, must not generate from what it has then, and must be whole again after a join.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.fakes.publisher_process import PublisherProcess
from tests.fakes.replica_process import Condition, Patience, ReplicaProcess
from weight_sync import members
from weight_sync.coordinator import SyncCoordinator, SyncOptions
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fakes.protocol_traps import State

pytestmark = pytest.mark.timing

TIMEOUT_S = 2.0
"""Of a sync, and so the length of an in-place lease."""


class World:
    def __init__(self, *, verify: bool, num_slots: int = 2, timeout_s: float = TIMEOUT_S) -> None:
        self.learner = PublisherProcess(0, 1)
        self.replicas = [ReplicaProcess(f"r{i}", patience=Patience(lease_s=0.4)) for i in range(2)]
        for party in (self.learner, *self.replicas):
            party.vitals()
        options = SyncOptions(timeout_s=timeout_s, commit="inplace", num_slots=num_slots, verify=verify, relay="off")
        handles = [replica.handle for replica in self.replicas]
        self.coordinator = SyncCoordinator([self.learner], handles, options=options)

    async def publish(self, version: int) -> None:
        self.learner.ask("train", version)
        await self.coordinator.publish(version)

    async def close(self) -> None:
        for party in (self.learner, *self.replicas):
            if party.is_gone_or_stopped():
                party.kill()
        await self.coordinator.close()
        for party in (self.learner, *self.replicas):
            party.close()


@contextlib.asynccontextmanager
async def world_at_1(*, verify: bool = True, num_slots: int = 2, timeout_s: float = TIMEOUT_S) -> AsyncIterator[World]:
    world = World(verify=verify, num_slots=num_slots, timeout_s=timeout_s)
    try:
        await world.coordinator.open()
        await world.publish(1)
        await world.coordinator.sync(1)
        yield world
    finally:
        await world.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "ANSWER_S", 0.3)
    monkeypatch.setattr(members, "QUIET_S", 0.1)


def settled(replica: ReplicaProcess, *seeds: int) -> Condition:
    """What a replica is like when the commit under way has ended. Meanwhile it never generates from a mixture."""
    until = time.monotonic() + 10.0
    while True:
        found = replica.condition(*seeds)
        assert found.is_paused or found.weights is not None, f"generates from a mixture: {found}"
        if not replica.ask("see_is_committing"):
            return found
        assert time.monotonic() < until, f"the commit does not end: {found}"
        time.sleep(0.005)


@pytest.mark.parametrize("verify", [True, False], ids=["digests", "generations"])
@pytest.mark.parametrize("state", ["pulling", "pulled"])
async def test_a_replica_that_slept_through_its_lease_in_a_commit_is_paused_and_joins_again(
    state: State, verify: bool
) -> None:
    """With digests and without: the generation of the slot alone tells that what was read is torn."""
    async with world_at_1(verify=verify) as world:
        sleeper, other = world.replicas
        await world.publish(2)
        sleeper.arm(state, signal.SIGSTOP)
        await world.coordinator.sync(2)
        sleeper.await_loss()  # the trap was reached
        assert world.coordinator.members == {"r0": "dead", "r1": "live"}
        for version in (3, 4, 5):
            await world.publish(version)
            await world.coordinator.sync(version)
        sleeper.signal(signal.SIGCONT)
        found = settled(sleeper, 1, 2, 3, 4, 5)
        assert found.is_paused and found.is_dirty, f"a torn read was taken for a version: {found}"
        assert found.live_versions == (None,)
        assert other.condition(5).weights == 5
        assert await world.coordinator.join(sleeper.handle) == 5
        healed = sleeper.condition(5)
        assert (healed.weights, healed.is_paused, healed.is_dirty) == (5, False, False)
        await world.publish(6)
        assert (await world.coordinator.sync(6)).replicas_live == 2
        assert sleeper.condition(6).weights == 6


async def test_the_learner_waits_with_the_slot_until_the_lease_of_a_stopped_commit_runs_out() -> None:
    """With one slot only, so that the next version needs the very slot that is being read."""
    async with world_at_1(num_slots=1, timeout_s=6.0) as world:
        sleeper, other = world.replicas
        await world.publish(2)
        sleeper.arm("pulling", signal.SIGSTOP)
        syncing = asyncio.create_task(world.coordinator.sync(2))
        async with asyncio.timeout(10):
            while not sleeper.is_gone_or_stopped():
                await asyncio.sleep(0.002)
        # The lease is as long as what the commit has left: nearly half of the deadline, as for every first attempt.
        now, version, ends = world.learner.ask("see_slot")
        assert version == 2 and now < ends["r0/0"], "it was not seen in time"
        looks: list[tuple[float, int | None]] = []
        publishing = asyncio.create_task(world.publish(3))
        while not looks or looks[-1][1] != 3:
            looks.append((await asyncio.to_thread(world.learner.ask, "see_slot"))[:2])
            await asyncio.sleep(0.01)
        await publishing
        assert {version for at, version in looks if at < ends["r0/0"]} == {2}, "the slot was packed under a reader"
        with contextlib.suppress(WeightSyncError, TimeoutError):
            await syncing
        await world.coordinator.sync(3)
        assert other.condition(3).weights == 3
        sleeper.signal(signal.SIGCONT)
        assert settled(sleeper, 1, 2, 3).is_paused


async def test_a_replica_that_slept_for_less_than_its_lease_takes_the_version() -> None:
    async with world_at_1() as world:
        sleeper = world.replicas[0]
        await world.publish(2)
        sleeper.arm("pulling", signal.SIGSTOP)
        waking = _wake_later(sleeper, 0.15)
        report = await world.coordinator.sync(2)
        waking.join(10)
        assert report.replicas_live == 2
        assert sleeper.condition(2).weights == 2
        assert not sleeper.condition(2).is_paused


def _wake_later(replica: ReplicaProcess, seconds: float) -> threading.Thread:
    def wake() -> None:
        replica.await_loss()
        time.sleep(seconds)
        replica.signal(signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    return thread
