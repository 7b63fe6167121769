"""Many syncs: parties that dawdle, and memory that does not grow."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.memory_process import WIRE_BYTES, MemoryProcess, plain_manifest
from tests.fakes.publisher_process import PublisherProcess
from tests.fakes.replica_process import ReplicaProcess
from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.messages import CommitResult

pytestmark = pytest.mark.timing

NUM_RANKS, NUM_SYNCS = 4, 500
DELAY_S = 0.003
"""Longest sleep before a call; a sync has some ten calls on its way."""
DEADLINE_S = 120.0
"""For all syncs together; they take about 15 s on two idle cores."""

TRAFFIC = {
    "control_answered", "control_refused", "control_retried", "control_replayed", "versions_superseded",
    "leases_expired", "relays", "relayed_bytes",
}  # fmt: skip
"""Counters of what was done, which grow with every sync. All others count what was made, and must not."""
MIB = 1 << 20


class Tardy:
    """A party that sleeps for a random time before it does anything."""

    def __init__(self, party: Any, seed: int) -> None:
        self._party = party
        self._random = random.Random(seed)
        self.rank = getattr(party, "rank", None)
        self.name = getattr(party, "name", None)

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        await self._dawdle()
        return await self._party.call(method, *args, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        await self._dawdle()
        return await self._party.commit(version, method, *args, timeout_s=timeout_s)

    async def _dawdle(self) -> None:
        await asyncio.sleep(self._random.uniform(0.0, DELAY_S))


async def sync_with_delays(
    publishers: Sequence[LocalPublisher], replicas: Sequence[LocalReplica], *, num_syncs: int, deadline_s: float
) -> None:
    """Train, publish and sync, with every party late by chance.

    Raises:
        TimeoutError: the deadline of all of it came first.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
    coordinator = SyncCoordinator(
        [Tardy(publisher, publisher.rank) for publisher in publishers],
        [Tardy(replica, 100 + number) for number, replica in enumerate(replicas)],
        options=SyncOptions(timeout_s=deadline_s, commit="staged"),
    )
    try:
        async with asyncio.timeout(deadline_s):
            await coordinator.open()
            for version in range(1, num_syncs + 1):
                full = full_weights(version)
                for publisher in publishers:
                    publisher.full = full
                await coordinator.publish(version)
                report = await coordinator.sync(version)
                assert (report.replicas_live, report.num_retries) == (len(replicas), 0)
                for replica in replicas:
                    replica.assert_holds(full)
    finally:
        await coordinator.close()


async def test_five_hundred_syncs_of_parties_that_dawdle_end_in_time_and_bit_for_bit() -> None:
    publishers = [LocalPublisher(rank, NUM_RANKS, full_weights(0)) for rank in range(NUM_RANKS)]
    replicas = [LocalReplica("r0"), LocalReplica("r1")]
    await sync_with_delays(publishers, replicas, num_syncs=NUM_SYNCS, deadline_s=DEADLINE_S)
    for replica in replicas:
        assert replica.versions == list(range(1, NUM_SYNCS + 1))


def test_publish_needs_its_own_shards_and_one_slot() -> None:
    """Slots are shared memory, backed when it is first written: so the first publish of a slot adds that slot."""
    learners = [MemoryProcess(rank, 2) for rank in range(2)]
    try:
        manifest = plain_manifest(2)
        for learner in learners:
            learner.ask("open", manifest)
        peaks: list[list[int]] = []
        for version in range(1, 5):
            peaks.append([learner.ask("publish", version) for learner in learners])
    finally:
        for learner in learners:
            learner.close()
    slot_bytes, made_once, tolerance = WIRE_BYTES // 2, 24 * MIB, 8 * MIB
    limits = [slot_bytes + made_once, slot_bytes + tolerance, tolerance, tolerance]
    assert all(max(peak) <= limit for peak, limit in zip(peaks, limits, strict=True)), peaks


async def test_two_hundred_syncs_leave_counters_files_threads_and_memory_flat() -> None:
    learners = [PublisherProcess(rank, 2) for rank in range(2)]
    replicas = [ReplicaProcess(f"r{i}", 2) for i in range(2)]
    parties = [*learners, *replicas]
    options = SyncOptions(timeout_s=30.0, commit="staged")
    coordinator = SyncCoordinator(learners, [replica.handle for replica in replicas], options=options)
    try:
        await coordinator.open()
        first: dict[str, int] = {}
        for version in range(1, 201):
            for learner in learners:
                learner.ask("train", version)
            await coordinator.publish(version)
            report = await coordinator.sync(version)
            made = {name: count for name, count in report.counters.items() if name not in TRAFFIC}
            first = first or made
            assert made == first, f"version {version} made something again"
            assert (report.num_retries, report.replicas_live) == (0, 2)
            if version == 50:  # allocators and pools have warmed up
                early = [party.vitals() for party in parties]
        for party, then in zip(parties, early, strict=True):
            now = party.vitals()
            assert now.num_files == then.num_files, f"{party.name}: {then} -> {now}"
            assert now.num_threads == then.num_threads, f"{party.name}: {then} -> {now}"
            assert now.resident_bytes - then.resident_bytes < 4 * MIB, f"{party.name}: {then} -> {now}"
        for replica in replicas:
            assert replica.condition(200).weights == 200
    finally:
        await coordinator.close()
        for party in parties:
            party.close()
