"""Values of a step: what advantages and returns they give, the critic's loss, and how good they were.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trainer.algorithms.gae import gae_advantages
from trainer.algorithms.losses.values import value_loss
from trainer.learner.inputs import to_device
from trainer.learner.result import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.schema.algorithm import AlgorithmConfig
    from trainer.data.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """Of one micro-batch, from the values that the critic gave at the start of the step; 0 outside `loss_mask`."""

    values_T: np.ndarray
    """float32[T]"""
    advantages_T: np.ndarray
    """float64[T]"""
    returns_T: np.ndarray
    """float64[T]: what the critic learns."""


def value_targets(
    batch: MicroBatch, rewards_T: np.ndarray, values_T: np.ndarray, *, config: AlgorithmConfig
) -> ValueTargets:
    """GAE over every sequence by itself; a sequence is whole in one micro-batch.

    Args:
        rewards_T: float64[T], 0 outside `loss_mask`.
        values_T: float32[T], of the state in which each token is chosen.

    A value that is not finite counts as 0 here and stays in `values_T`, where `Preparation` finds it on all ranks
    together: an error on one of them would leave the others waiting.
    """
    known_T = np.where(np.isfinite(values_T), values_T, np.float32(0))
    advantages_T, returns_T = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        one = slice(start, stop)
        advantages_T[one], returns_T[one] = gae_advantages(
            rewards_T[one], known_T[one], batch.loss_mask[one], gamma=config.gae_gamma, lam=config.gae_lambda
        )
    return ValueTargets(values_T=values_T, advantages_T=advantages_T, returns_T=returns_T)


class ValueTotals:
    """Sums over the loss tokens of one step, for its metrics and for the weight of a token."""

    def __init__(self, *, num_loss_tokens: int) -> None:
        """`num_loss_tokens` counts those of the whole step."""
        self.token_weight = 1.0 / max(1, num_loss_tokens)
        """Of a token in the critic's loss, which is a token mean over the step under every aggregation."""
        self._sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)

    def loss(self, values_L: Tensor, batch: MicroBatch, targets: ValueTargets, *, clip: float | None) -> Tensor:
        """The share of a micro-batch in the critic's loss, with gradient."""
        mask, device = batch.loss_mask, values_L.device
        old_L = to_device(targets.values_T[mask], device)
        returns_L = to_device(targets.returns_T[mask].astype(np.float32), device)
        loss_L, is_clipped_L = value_loss(values_L, old_L, returns_L, clip=clip)
        if clip is not None:
            self._sums["clipped"] += float(is_clipped_L.sum())
            self._sums["clip_tokens"] += len(loss_L)
        return loss_L.sum() * self.token_weight

    def add(self, batch: MicroBatch, targets: ValueTargets) -> None:
        """Count a micro-batch, once per step, with the values from its start."""
        returns_L = targets.returns_T[batch.loss_mask]
        values_L = targets.values_T[batch.loss_mask].astype(np.float64)
        errors_L = returns_L - values_L
        for name, values in (
            ("tokens", np.ones_like(errors_L)), ("value", values_L), ("return", returns_L),
            ("return_sq", returns_L**2), ("error", errors_L), ("error_sq", errors_L**2),
        ):  # fmt: skip
            self._sums[name] += float(values.sum())

    def reduce(self, device: torch.device) -> dict[str, Metric]:
        """Sum over ranks. Collective."""
        packed = torch.tensor(list(self._sums.values()), dtype=torch.float64, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        return _metrics(dict(zip(_SUMS, packed.tolist(), strict=True)))


_SUMS = ("tokens", "value", "return", "return_sq", "error", "error_sq", "clipped", "clip_tokens")


def _metrics(sums: dict[str, float]) -> dict[str, Metric]:
    tokens = max(1.0, sums["tokens"])
    left = sums["error_sq"] - sums["error"] ** 2 / tokens
    spread = sums["return_sq"] - sums["return"] ** 2 / tokens
    metrics = {
        "value_loss": Metric(sum=0.5 * sums["error_sq"], count=sums["tokens"]),
        "value_mean": Metric(sum=sums["value"], count=sums["tokens"]),
        "return_mean": Metric(sum=sums["return"], count=sums["tokens"]),
    }
    if sums["clip_tokens"]:
        metrics["value_clip_frac"] = Metric(sum=sums["clipped"], count=sums["clip_tokens"])
    if spread > MIN_SPREAD * tokens:
        metrics["value_explained_variance"] = Metric(sum=1.0 - left / spread)
    return metrics


MIN_SPREAD = 1e-8
"""Variance of returns below which there is nothing to explain."""
