"""Losses with more than a plain gradient of the log-probs, on one and two real ranks (processes with gloo)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tests.fakes.learner import (
    gradients,
    make_learner,
    pack,
    process_group,
    run_config,
    run_ranks,
    save_tiny,
    sequences,
    without_loss,
)
from trainer.config.algorithm import AlgorithmConfig, ClampConfig, CorrectionConfig, RejectConfig

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema import RunConfig

OBJECTIVES = {
    "gspo": AlgorithmConfig(loss="gspo", clip_low=0.1, clip_high=0.1),
    "gmpo with entropy bonus": AlgorithmConfig(loss="gmpo", clip_low=0.4, clip_high=0.4, entropy_coef=0.3),
    "decoupled with rejection": AlgorithmConfig(
        correction=CorrectionConfig(
            objective="decoupled",
            clamp=ClampConfig(upper=1.5),
            reject=RejectConfig(metric="k2", upper=0.8),
        )
    ),
}


def _config(directory: Path, name: str) -> RunConfig:
    return replace(run_config(directory / "model"), algorithm=OBJECTIVES[name])


def _job(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    parts = sequences(12)
    uneven = ([pack(parts[:1]), pack(parts[1:5])], [pack(parts[5:]), without_loss()])
    return {name: gradients(make_learner(_config(directory, name)), uneven[dist.get_rank()]) for name in OBJECTIVES}


def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    ranks = run_ranks(_job, tmp_path, world_size=2)
    with process_group(tmp_path / "store_of_one"):
        for name in OBJECTIVES:
            expected = gradients(make_learner(_config(tmp_path, name)), [pack(sequences(12))])
            for rank in ranks:
                for param, value in expected.items():
                    error = (rank[name][param] - value).norm() / value.norm()
                    assert error < 1e-5, f"{name}: {param} is off by {error:.1e}"
