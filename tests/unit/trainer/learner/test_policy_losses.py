"""Losses, selection and entropy bonus inside the learner: against a plain model, and over any split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.learner import gradients, make_learner, pack, run_config, sequences, without_loss
from trainer.algorithms.losses import policy_loss
from trainer.config.algorithm import AlgorithmConfig
from trainer.learner.packed_inputs import loss_inputs

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer.data.batch import MicroBatch

pytestmark = pytest.mark.usefixtures("one_rank")

OBJECTIVES: list[dict[str, Any]] = [
    {"loss": "gspo", "clip_ratio_low": 0.1, "clip_ratio_high": 0.1},
    {"loss": "gmpo", "clip_ratio_low": 0.4, "clip_ratio_high": 0.4, "entropy_coef": 0.3},
    {"loss": "cispo"},
    {"loss": "kl_cov"},
    {"loss": "ppo_clip", "entropy_coef": 0.05},
    {"loss": "reinforce", "entropy_coef": 2.0},
]


def with_selection(parts: Sequence[MicroBatch]) -> list[MicroBatch]:
    rng = np.random.default_rng(5)
    return [replace(p, cov_selected=p.loss_mask & (rng.random(len(p.loss_mask)) < 0.3)) for p in parts]


def packed(parts: Sequence[MicroBatch]) -> MicroBatch:
    return replace(pack(parts), cov_selected=np.concatenate([p.cov_selected for p in parts]))  # type: ignore[arg-type]


def plain_gradients(
    directory: Path, parts: Sequence[MicroBatch], algorithm: AlgorithmConfig
) -> dict[str, torch.Tensor]:
    """Full softmax, autograd through everything, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    for part in parts:
        ids = torch.from_numpy(part.token_ids.astype(np.int64))
        positions = torch.from_numpy(np.flatnonzero(part.loss_mask))
        logp = torch.log_softmax(model(ids[None]).logits[0] / 0.8, -1)[positions - 1]
        chosen_L = logp.gather(1, ids[positions, None]).squeeze(1)
        loss_L, _ = policy_loss(loss_inputs(part, chosen_L), config=algorithm)
        loss_L = loss_L + algorithm.entropy_coef * (logp.exp() * logp).sum(-1)
        (loss_L * torch.from_numpy(part.loss_weights[part.loss_mask])).sum().backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("keys", OBJECTIVES, ids=lambda keys: keys["loss"])
def test_gradients_equal_a_plain_model_for_every_split(keys: dict[str, Any], tiny_dir: Path) -> None:
    cfg = replace(run_config(tiny_dir), algorithm=AlgorithmConfig(**keys))
    parts = with_selection(sequences(9))
    expected = plain_gradients(tiny_dir, parts, cfg.algorithm)
    learner = make_learner(cfg)
    empty = without_loss()
    empty = replace(empty, cov_selected=np.zeros_like(empty.loss_mask))
    for split in ([parts], [parts[5:], parts[:5]], [[p] for p in parts]):
        got = gradients(learner, [*(packed(s) for s in split), empty])
        for name, value in expected.items():
            scale = value.abs().max()
            torch.testing.assert_close(got[name] / scale, value / scale, rtol=1e-4, atol=1e-5)


def test_an_entropy_bonus_raises_the_entropy(tiny_dir: Path) -> None:
    entropies = {}
    for coefficient in (0.0, 1.0):
        cfg = replace(run_config(tiny_dir, lr=3e-3), algorithm=AlgorithmConfig(entropy_coef=coefficient))
        learner, batch = make_learner(cfg), pack(sequences(6))
        results = [learner.train_step([batch], step=step).metrics["entropy"].mean for step in range(5)]
        entropies[coefficient] = results[-1] - results[0]
    assert entropies[1.0] > entropies[0.0] and entropies[1.0] > 0
