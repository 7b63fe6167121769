"""What docs/checkpoints.md says of the size of a checkpoint: it counts, to the byte, in a real one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from torch.distributed.checkpoint import FileSystemReader

from tests.fakes.learner import make_learner, run_config
from trainer.config.algorithm import AlgorithmConfig, CriticConfig
from trainer.config.schema import LoraConfig
from trainer.learner.checkpoint import begin
from trainer.tools.memory_plan import MASTER_BYTES, MOMENTS_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("one_rank")
COUNTER_BYTES = 8
PER_TENSOR_BYTES = 2048
"""At most, of what torch writes around a tensor, and of its row in the index."""


def _kinds(directory: Path) -> dict[str, RunConfig]:
    cfg = run_config(directory)
    model = cfg.model
    gae = replace(cfg, algorithm=AlgorithmConfig(advantage_estimator="gae"))
    return {
        "float32": cfg,
        "bfloat16": replace(cfg, model=replace(model, compute_dtype="bfloat16", rollout_dtype="bfloat16")),
        "cpu_offload": replace(cfg, learner=replace(cfg.learner, cpu_offload=True)),
        "lora": replace(cfg, model=replace(model, lora=LoraConfig(rank=8, target_modules="q_proj+up_proj"))),
        "critic": gae,
        "shared critic": replace(gae, critic=CriticConfig(shared_backbone=True)),
    }


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "cpu_offload", "lora", "critic", "shared critic"])
def test_a_checkpoint_has_twelve_bytes_per_trained_parameter(kind: str, tiny_dir: Path, tmp_path: Path) -> None:
    learner = make_learner(_kinds(tiny_dir)[kind])
    tmp = begin(tmp_path, 1)
    learner.save(tmp, step=1)
    optimizers = learner._optimizers.values()
    num_trained = sum(weight.numel() for optimizer in optimizers for weight in optimizer.weights().values())
    stored = FileSystemReader(tmp / "learner").read_metadata().state_dict_metadata
    nbytes = sum(one.size.numel() * one.properties.dtype.itemsize for one in stored.values())  # type: ignore[union-attr]
    counters = (len(optimizers) + 1) * COUNTER_BYTES
    assert (MASTER_BYTES, MOMENTS_BYTES) == (4, 8)
    assert nbytes - counters == 12 * num_trained
    on_disk = sum(file.stat().st_size for file in (tmp / "learner").iterdir())
    assert 0 < on_disk - nbytes < PER_TENSOR_BYTES * len(stored)
