"""The learner as users run it: two Ray actors and a `LearnerGroup`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
import ray

from tests.fakes.learner import pack, run_config, save_tiny, sequences
from trainer.data.batch import TrainBatch
from trainer.errors import LearnerError, TrainingDiverged
from trainer.learner.actor import learner_actor
from trainer.learner.checkpoint import begin, commit
from trainer.learner.group import LearnerGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.timing, pytest.mark.asyncio(loop_scope="module")]


def _batch(step: int) -> TrainBatch:
    parts = sequences(8, seed=step)
    return TrainBatch(
        step=step,
        micro_batches=((pack(parts[:3]), pack(parts[3:4])), (pack(parts[4:6]), pack(parts[6:]))),
        num_samples=8,
        num_sequences=8,
        num_tokens=sum(len(p.token_ids) for p in parts),
        num_loss_tokens=sum(int(p.loss_mask.sum()) for p in parts),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LearnerGroup]:
    """Of the whole file: the last test kills a rank."""
    cfg = run_config(save_tiny(tmp_path_factory.mktemp("learner") / "model"), timeout_s=60.0)
    cfg = replace(cfg, device=replace(cfg.device, name="cpu"))
    actor = learner_actor().options(num_cpus=1)
    group = LearnerGroup([actor.remote(cfg, rank=rank, world_size=2) for rank in range(2)], timeout_s=90.0)
    try:
        await group.setup()
        yield group
    finally:
        await group.close()


async def test_group_trains_saves_and_resumes_through_ray(group: LearnerGroup, tmp_path: Path) -> None:
    first = await group.train_step(_batch(0), version=0)
    batch = _batch(0)
    assert first.metrics["num_tokens"].mean == batch.num_tokens
    assert first.metrics["num_loss_tokens"].mean == batch.num_loss_tokens
    tmp = begin(tmp_path / "checkpoints", 1)
    await group.save(tmp, step=1, in_background=True)
    second, _ = await asyncio.gather(group.train_step(_batch(1), version=1), group.wait_saved())
    assert await group.load(commit(tmp, {})) == 1
    again = await group.train_step(_batch(1), version=1)
    assert again.metrics == second.metrics
    described = [await rank.call("ws_describe", timeout_s=30.0) for rank in group.ranks]
    assert [b"model.norm.weight" in info for info in described] == [True, False], "rank 0 names the parameters"
    await group.export_hf(tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors").is_file()


async def test_errors_keep_their_type_and_a_killed_rank_is_named_at_once(group: LearnerGroup) -> None:
    good = _batch(0)
    part = good.micro_batches[1][0]
    bad_part = replace(part, advantages=np.where(part.loss_mask, np.inf, 0).astype(np.float32))
    bad = replace(good, micro_batches=(good.micro_batches[0], (bad_part, bad_part)))
    for _ in range(3):
        result = await group.train_step(bad, version=0)
        assert result.metrics["skipped_steps"].sum == 1, "on both ranks, for one that is bad"
        assert not result.is_policy_changed
    with pytest.raises(TrainingDiverged, match=r"learner rank [01]: gradient norm of step 0"):
        await group.train_step(bad, version=0)
    assert not group.is_broken, "it can still save"
    await group.train_step(good, version=0)
    ray.kill(group.ranks[1].actor)
    with pytest.raises(LearnerError, match=r"learner rank 1 died in train_step"):
        await group.train_step(good, version=0)
