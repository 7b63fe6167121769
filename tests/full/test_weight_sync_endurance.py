"""Many syncs: slow parties, and memory that does not grow."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.processes import Child
from tests.fakes.row_shards import row_shards
from tests.fakes.sync_world import record_layout
from tests.fakes.weight_job import opened_job
from weight_sync.channel import make_run_keys
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import OpenPublisher, PackReport, decode, encode
from weight_sync.plan.agreement import share
from weight_sync.plan.planner import build_plan
from weight_sync.plan.types import ParamMeta
from weight_sync.publish.publisher import WeightPublisher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

pytestmark = pytest.mark.timing

DELAY_S = 0.003
"""Longest sleep before a call; a sync has some ten calls on its way."""
TRAFFIC = {
    "control_answered", "control_refused", "versions_superseded",
    "pins_expired", "relays", "relayed_bytes",
}  # fmt: skip
"""Counters of what was done, which grow with every sync. All others count what was made, and must not."""
MIB = 1 << 20


NUM_PARAMS, ROWS, COLUMNS = 10, 2500, 2000
"""50 million elements: 200 MB in float32, 100 MB on the wire."""
WIRE_BYTES = NUM_PARAMS * ROWS * COLUMNS * 2
PARAMS = tuple(ParamMeta(name=f"w{i}", shape=(ROWS, COLUMNS), dtype="bfloat16") for i in range(NUM_PARAMS))


class PlainModel(torch.nn.Module):
    """An engine that takes the checkpoint as it is."""

    def __init__(self) -> None:
        super().__init__()
        for param in PARAMS:
            value = torch.nn.Parameter(torch.zeros(param.shape, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(param.name, value)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class LargeRank:
    """A learner rank that holds its rows in float32 and measures the memory that publishing takes."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._shards = {param.name: torch.full((ROWS // num_ranks, COLUMNS), 1.0 + rank) for param in PARAMS}
        self._publisher = WeightPublisher(CpuBackend(), rank=rank)
        self.close = self._publisher.close

    def open(self, plan: bytes) -> None:
        opening = OpenPublisher(
            keys=make_run_keys("run"), epoch=1, plan=plan, transport="shm", num_slots=2, verify=True,
            host="127.0.0.1",
        )  # fmt: skip
        self._publisher.open(encode(opening))

    def publish(self, version: int) -> int:
        """Publish, and measure how many bytes that added while it ran."""
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
        report = decode(self._publisher.publish(version, self._shards, deadline_s=30.0), PackReport)
        self._publisher.digests(version, deadline_s=30.0)  # sealed, that is
        assert report.version == version
        return _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of a row of proc(5) status."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(rows[name].split()[0]) * 1024


def test_publish_needs_its_own_shards_and_one_slot() -> None:
    """Slots are shared memory, backed when it is first written: so the first publish of a slot adds that slot."""
    layout = record_layout(PlainModel(), PARAMS, worker=0)
    plan = share(build_plan(epoch=1, params=PARAMS, shards=row_shards(PARAMS, 2), workers=[layout]))
    learners = [Child(f"learner {rank}", LargeRank, rank, 2) for rank in range(2)]
    try:
        for learner, part in zip(learners, plan.for_learner.values(), strict=True):
            learner.ask("open", part)
        peaks = [[learner.ask("publish", version) for learner in learners] for version in range(1, 5)]
    finally:
        for learner in learners:
            learner.close()
    slot_bytes, made_once, tolerance = WIRE_BYTES // 2, 24 * MIB, 8 * MIB
    limits = [slot_bytes + made_once, slot_bytes + tolerance, tolerance, tolerance]
    assert all(max(peak) <= limit for peak, limit in zip(peaks, limits, strict=True)), peaks


def tardily(call: Callable[..., Awaitable[Any]], rng: random.Random) -> Callable[..., Awaitable[Any]]:
    async def sleep_and_call(*args: object, **options: Any) -> Any:
        await asyncio.sleep(rng.uniform(0.0, DELAY_S))
        return await call(*args, **options)

    return sleep_and_call


async def test_three_hundred_syncs_of_slow_parties_leave_counters_files_threads_and_memory_flat() -> None:
    """Every call comes late by chance; every version arrives bit for bit."""
    async with opened_job(num_learners=4, num_workers=2, timeout_s=30.0, commit="staged") as job:
        first: dict[str, int] = {}
        for number, party in enumerate([*job.learners, *(replica.handle for replica in job.replicas)]):
            party.call = tardily(party.call, random.Random(number))
        for version in range(1, 301):
            await job.publish(version)
            report = await job.coordinator.sync(version)
            made = {name: count for name, count in report.counters.items() if name not in TRAFFIC}
            first = first or made
            assert made == first, f"version {version} made something again"
            assert (report.num_retries, report.replicas_live) == (0, 2)
            assert job.weights(version) == [version, version]
            if version == 50:  # allocators and pools have warmed up
                early = [party.ask("see_vitals") for party in job.parties]
        for party, then in zip(job.parties, early, strict=True):
            now = party.ask("see_vitals")
            assert now.num_files == then.num_files, f"{party.name}: {then} -> {now}"
            assert now.num_threads == then.num_threads, f"{party.name}: {then} -> {now}"
            assert now.resident_bytes - then.resident_bytes < 4 * MIB, f"{party.name}: {then} -> {now}"
