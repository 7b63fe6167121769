"""Real FSDP2 meshes of 2 x 2 gloo processes, and a replica of two workers that must hold what torch gathers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fakes.patience import PATIENT_S
from tests.fakes.ranks import RankProcess, toy_rank
from tests.fakes.sync_world import SHAPES, LocalReplica
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions
from weight_sync.errors import PlanMismatch
from weight_sync.messages import PackReport, decode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from typing import Any

TOTAL_BYTES = sum(2 * shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in SHAPES.values())


@asynccontextmanager
async def learners(sharding: str, folder: Path) -> AsyncIterator[list[RankProcess]]:
    ranks = [RankProcess(toy_rank, rank, sharding, folder / "store") for rank in range(4)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


async def everyone(ranks: list[RankProcess], method: str, *args: object) -> list[Any]:
    """Collectives need all ranks at once."""
    return await asyncio.gather(*(rank.call(method, *args) for rank in ranks))


@pytest.mark.parametrize("sharding", ["replicas", "tensor parallel"])
async def test_an_engine_gets_what_torch_gathers_and_replicas_share_the_work(sharding: str, tmp_path: Path) -> None:
    replica = LocalReplica("r0", 2)
    async with learners(sharding, tmp_path) as ranks:
        coordinator = SyncCoordinator(ranks, [replica], options=SyncOptions(timeout_s=PATIENT_S))
        await everyone(ranks, "train", 0)
        await coordinator.open()
        try:
            for version in (1, 2):
                for full in await everyone(ranks, "train", version):
                    assert {name: tuple(tensor.shape) for name, tensor in full.items()} == SHAPES
                await coordinator.publish(version)
                await coordinator.sync(version)
                replica.assert_holds(full)
            await coordinator.self_test()
            reports = [decode(report, PackReport) for report in await everyone(ranks, "ws_publish", 2, PATIENT_S)]
        finally:
            await coordinator.close()
        packed = [report.nbytes for report in reports]
        assert sum(packed) == TOTAL_BYTES, "no replica sends what another one sends"
        if sharding == "replicas":
            row = 2 * max(shape[-1] for shape in SHAPES.values())
            assert all(abs(packed[rank] - packed[rank + 2]) <= row for rank in range(2)), packed


@pytest.mark.parametrize(
    ("sharding", "name", "pair"), [("replicas", "down.weight", (1, 3)), ("tensor parallel", "norm.weight", (2, 3))]
)
async def test_replicas_that_differ_are_refused_before_a_byte_moves(
    sharding: str, name: str, pair: tuple[int, int], tmp_path: Path
) -> None:
    async with learners(sharding, tmp_path) as ranks:
        await everyone(ranks, "train", 1)
        await ranks[3].call("disturb", name)
        coordinator = SyncCoordinator(ranks, [LocalReplica("r0")], options=SyncOptions(timeout_s=PATIENT_S))
        words = f"ranks {pair[0]} and {pair[1]} are replicas, but hold different values of {name}"
        with pytest.raises(PlanMismatch, match=words):
            await coordinator.open()
        await coordinator.close()
