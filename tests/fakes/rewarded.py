"""Micro-batches whose advantages the learner finishes: two turns each, rewards on tokens, and what a step knows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.fakes.learner import one_sequence, run_config, weighted, whole, without_loss
from trainer.algorithms.advantages import GroupRewards
from trainer.config.algorithm import AlgorithmConfig, CriticConfig, KlConfig
from trainer.learner.prepare import less_kl

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.policy import PolicyTrainer

GROUP_SIZE = 2


def rewarded(num: int, *, seed: int = 0) -> tuple[list[MicroBatch], dict[str, Any]]:
    """`num` single-sequence batches (prompt, turn, context, turn) in groups of two, and what
    `train_step` has to know of their step."""
    rng = np.random.default_rng(seed)
    parts = weighted([_sequence(rng, response) for response in range(num)])
    sums = np.array([p.token_rewards.astype(np.float64).sum() for p in parts if p.token_rewards is not None])
    lengths = np.array([int(p.loss_mask.sum()) for p in parts])
    groups = tuple(
        GroupRewards(rewards_G=sums[i : i + GROUP_SIZE], lengths_G=lengths[i : i + GROUP_SIZE], baseline=0.25)
        for i in range(0, num, GROUP_SIZE)
    )
    return parts, {"group_rewards": groups}


def _sequence(rng: np.random.Generator, response: int) -> MicroBatch:
    kinds = [(False, 1), (True, 1), (False, 0), (True, 1)]
    mask = np.concatenate([np.full(int(rng.integers(low, 6)), kind) for kind, low in kinds])
    mask[0] = False
    generated, rewards = np.flatnonzero(mask), np.zeros(len(mask), np.float32)
    rewards[generated[len(generated) // 2]] = rng.normal()
    rewards[generated[-1]] += rng.normal()
    return one_sequence(rng, mask, token_rewards=rewards, response_index=np.array([response], np.int32))


def paid(batch: MicroBatch, reference_T: np.ndarray, kl: KlConfig) -> np.ndarray:
    """Its rewards less the KL to the reference."""
    assert batch.token_rewards is not None
    return less_kl(batch.token_rewards.astype(np.float64), batch, reference_T, config=kl)


def filler() -> MicroBatch:
    """What a rank that ran out of samples gets."""
    return replace(without_loss(), token_rewards=np.zeros(2, np.float32), response_index=np.array([-1], np.int32))


def config(model_dir: Path, *, critic: dict[str, Any] | None = None, **algorithm: Any) -> RunConfig:
    """PPO unless `advantage` is given; `kl` takes the keys of its section."""
    keys: dict[str, Any] = {"advantage_estimator": "gae", **algorithm}
    if "kl" in keys:
        keys["kl"] = KlConfig(**keys["kl"])
    values = {"lr": 1e-2, "max_grad_norm": 1e9, **({} if critic is None else critic)}
    return replace(run_config(model_dir), algorithm=AlgorithmConfig(**keys), critic=CriticConfig(**values))


def all_weights(learner: PolicyTrainer) -> dict[str, torch.Tensor]:
    """Of everything that is trained, whole."""
    return {
        f"{prefix}{name}": whole(tensor)
        for prefix, one in learner._optimizers.items()
        for name, tensor in one.weights().items()
    }
