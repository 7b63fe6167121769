"""Many syncs: parties that dawdle, memory that does not grow, and bad implementations that are found out."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.lazy_gather import GatheringPublisher, ThreadGroup
from tests.fakes.memory_process import WIRE_BYTES, MemoryProcess, plain_manifest
from tests.fakes.publisher_process import PublisherProcess
from tests.fakes.replica_process import ReplicaProcess
from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from weight_sync.coordinator import SyncCoordinator, SyncOptions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from weight_sync.wire import CommitResult

pytestmark = pytest.mark.timing

NUM_RANKS, NUM_SYNCS = 4, 500
DELAY_S = 0.003
"""Longest sleep before a call; a sync has some ten calls on its way."""
DEADLINE_S = 120.0
"""For all syncs together; they take about 15 s on two idle cores."""
DEADLOCK_S = 8.0

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
        for publisher in publishers:
            if isinstance(publisher, GatheringPublisher):
                publisher._group.abort()
        await coordinator.close()


async def test_five_hundred_syncs_of_parties_that_dawdle_end_in_time_and_bit_for_bit() -> None:
    publishers = [LocalPublisher(rank, NUM_RANKS, full_weights(0)) for rank in range(NUM_RANKS)]
    replicas = [LocalReplica("r0"), LocalReplica("r1")]
    await sync_with_delays(publishers, replicas, num_syncs=NUM_SYNCS, deadline_s=DEADLINE_S)
    for replica in replicas:
        assert replica.versions == list(range(1, NUM_SYNCS + 1))


def gathering(how: Any, **options: int) -> tuple[ThreadGroup, list[GatheringPublisher]]:
    group = ThreadGroup(NUM_RANKS)
    full = full_weights(0)
    ranks = range(NUM_RANKS)
    return group, [GatheringPublisher(rank, NUM_RANKS, full, group=group, how=how, **options) for rank in ranks]


async def test_lazy_gather_deadlocks_and_the_deadline_finds_out() -> None:
    group, publishers = gathering("lazy")
    with pytest.raises(TimeoutError):
        await sync_with_delays(publishers, [LocalReplica("r0"), LocalReplica("r1")], num_syncs=20,
                               deadline_s=DEADLOCK_S)  # fmt: skip
    assert sorted(group.waiting) == list(range(NUM_RANKS)), "every rank waits in a collective"
    assert len(set(group.waiting.values())) > 1, f"and not all in the same one: {group.waiting}"


@pytest.mark.parametrize("how", ["list", "lazy"])
async def test_gather_in_the_same_order_on_every_rank_passes_the_same_test(how: str) -> None:
    """So it is the order that the test above finds, and not the gather."""
    _, publishers = gathering(how, bucket_bytes=1 << 30)
    await sync_with_delays(publishers, [LocalReplica("r0")], num_syncs=5, deadline_s=30.0)


@pytest.mark.parametrize("is_gathering", [False, True], ids=["own shards", "gathering"])
def test_publish_needs_its_own_shards_and_one_slot_and_a_gather_is_found_out(
    tmp_path: Path, is_gathering: bool
) -> None:
    """Slots are shared memory, backed when it is first written: so the first publish of a slot adds that slot."""
    learners = [MemoryProcess(rank, 2, tmp_path / "store", is_gathering=is_gathering) for rank in range(2)]
    try:
        manifest = plain_manifest(2)
        for learner in learners:
            learner.ask("open", manifest)
        peaks: list[list[int]] = []
        for version in range(1, 5):
            with ThreadPoolExecutor(2) as pool:  # a gather needs all ranks at once
                meters = pool.map(lambda learner, v=version: learner.ask("publish", v), learners)
                peaks.append([meter.peak_bytes for meter in meters])
    finally:
        for learner in learners:
            learner.close()
    excess = beyond_the_slots(peaks)
    assert bool(excess) is is_gathering, f"{excess} of {peaks}"


def beyond_the_slots(peaks: list[list[int]]) -> list[int]:
    """The publishes (0-3) after which some rank had used more memory than its two slots explain, and scratch."""
    slot_bytes, made_once, tolerance = WIRE_BYTES // 2, 24 * MIB, 8 * MIB
    limits = [slot_bytes + made_once, slot_bytes + tolerance, tolerance, tolerance]
    return [number for number, (peak, limit) in enumerate(zip(peaks, limits, strict=True)) if max(peak) > limit]


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
            assert made == first, f"version {version} made something anew"
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
