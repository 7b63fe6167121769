"""Critics: the values that GAE needs, and what they learn from the returns.

Shape legend: `T` packed tokens, `L` loss tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trainer.algorithms.advantages import gae_advantages
from trainer.algorithms.losses import value_loss
from trainer.config.algorithm import DEFAULT_LR_RATIO
from trainer.errors import TrainingDiverged
from trainer.learner.attention import to_device
from trainer.learner.fsdp import RootModel
from trainer.learner.model import ValueHead, hidden_size, meta_model, predicting_states, require_tokens, shard_and_load
from trainer.learner.optimizer import ShardedOptimizer, learning_rate, muon_matrices
from trainer.learner.packed_inputs import PackedInputs, scatter_to_tokens
from trainer.learner.step_stats import Metric, sum_over_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transformers import PreTrainedModel

    from trainer.config.algorithm import AlgorithmConfig
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.model import BuiltPolicy
    from trainer.learner.parallel import ParallelContext


MIN_SPREAD = 1e-8
"""Variance of returns below which there is nothing to explain."""


class ValueTargets(NamedTuple):
    """Of one micro-batch, from the values that the critic gave at the start of the step; 0 outside `loss_mask`."""

    values_T: np.ndarray
    """float32[T]"""
    advantages_T: np.ndarray
    """float64[T]"""
    returns_T: np.ndarray
    """float64[T]: what the critic learns."""


@dataclass(slots=True)
class PreparedBatch:
    """A micro-batch, and what stays fixed over all updates that learn from it."""

    batch: MicroBatch
    """With final advantages."""
    reference_T: np.ndarray | None
    """Log-probs of the reference, float32[T]; None where nothing needs them."""
    targets: ValueTargets | None
    """What the critic learns; None without one."""
    proximal_L: Tensor | None = None
    """Log-probs of the policy before the first update, float32[L] on its device. None during that update, and where
    none is needed: see `trainer.algorithms.corrections`."""


def refuse_non_finite(arrays: Iterable[np.ndarray], what: str) -> None:
    """Raises TrainingDiverged on every rank if any of them has such a number: one that raised alone would leave the
    others waiting in their next collective."""
    found = sum(np.count_nonzero(~np.isfinite(array_T)) for array_T in arrays)
    (count,) = sum_over_ranks([float(found)])
    if count > 0:
        raise TrainingDiverged(f"{int(count)} {what}; no weight was changed by this step")


def value_targets(
    batch: MicroBatch, rewards_T: np.ndarray, values_T: np.ndarray, *, config: AlgorithmConfig
) -> ValueTargets:
    """GAE over every sequence alone; a sequence is whole in one micro-batch.

    Args:
        rewards_T: float64[T], 0 outside `loss_mask`.
        values_T: float32[T], of the state in which each token is chosen. One that is not finite counts as 0 here and
            stays in the result, where `refuse_non_finite` finds it on all ranks together.
    """
    known_T = np.where(np.isfinite(values_T), values_T, np.float32(0))
    advantages_T, returns_T = np.zeros(len(rewards_T)), np.zeros(len(rewards_T))
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        one = slice(start, stop)
        advantages_T[one], returns_T[one] = gae_advantages(
            rewards_T[one], known_T[one], batch.loss_mask[one], gamma=config.gae_gamma, lam=config.gae_lambda
        )
    return ValueTargets(values_T, advantages_T, returns_T)


class ValueSums:
    """Sums over the loss tokens of one step, for its metrics."""

    def __init__(self, *, clip: float | None) -> None:
        """`clip` is `critic.value_clip`."""
        self._clip = clip
        self._sums = np.zeros(6)
        self._num_clippable = 0
        self._num_clipped: Tensor | float = 0.0

    def loss(self, values_L: Tensor, batch: MicroBatch, targets: ValueTargets, *, token_weight: float) -> Tensor:
        """The share of a micro-batch in the critic's loss, with gradient; `token_weight` is that of a token, 1 over the
        tokens of the update: the loss is a token mean under every aggregation."""
        mask, device = batch.loss_mask, values_L.device
        old_L = to_device(targets.values_T[mask], device)
        returns_L = to_device(targets.returns_T[mask].astype(np.float32), device)
        loss_L, is_clipped_L = value_loss(values_L, old_L, returns_L, clip=self._clip)
        if self._clip is not None and not batch.is_copy:
            self._num_clipped = self._num_clipped + is_clipped_L.sum()
            self._num_clippable += len(loss_L)
        return loss_L.sum() * token_weight

    def add(self, batch: MicroBatch, targets: ValueTargets) -> None:
        """Count a micro-batch, once per step, with the values from its start."""
        if batch.is_copy:
            return
        returns_L = targets.returns_T[batch.loss_mask]
        values_L = targets.values_T[batch.loss_mask].astype(np.float64)
        errors_L = returns_L - values_L
        summed = (np.ones_like(errors_L), values_L, returns_L, returns_L**2, errors_L, errors_L**2)
        self._sums += [x.sum() for x in summed]

    def reduce(self) -> dict[str, Metric]:
        """Metrics over all ranks. Collective."""
        own = [*self._sums.tolist(), float(self._num_clipped), self._num_clippable]
        tokens, value, total, total_sq, error, error_sq, clipped, clippable = sum_over_ranks(own)
        num = max(1.0, tokens)
        left, spread = error_sq - error**2 / num, total_sq - total**2 / num
        metrics = {
            "value_loss": Metric(sum=0.5 * error_sq, count=tokens),
            "value_mean": Metric(sum=value, count=tokens),
            "return_mean": Metric(sum=total, count=tokens),
        }
        if clippable:
            metrics["value_clip_frac"] = Metric(sum=clipped, count=clippable)
        if spread > MIN_SPREAD * num:
            metrics["value_explained_variance"] = Metric(sum=1.0 - left / spread)
        return metrics


class Critic(ABC):
    """Gives the advantages and returns of a step. What it learns from them is up to the kind."""

    def __init__(self, cfg: RunConfig, *, device: torch.device) -> None:
        self._cfg, self._device = cfg, device

    @abstractmethod
    def _values(self, batch: MicroBatch, *, is_last: bool, learns: bool) -> Tensor:
        """Values of the states in which the loss tokens are chosen, float32[L]; with gradient if a critic of its own
        `learns` from them."""

    def targets(
        self,
        batches: Sequence[MicroBatch],
        rewards: Sequence[np.ndarray],
        values: ValueSums,
        *,
        token_weight: float | None,
    ) -> list[ValueTargets]:
        """GAE from the current values and the rewards, float64[T] of every micro-batch. Collective.

        With a `token_weight` a separate critic keeps the gradients of an update over all of them: one forward pass
        serves both. Raises TrainingDiverged on all ranks if a value is not finite on any.
        """
        found: list[ValueTargets] = []
        for index, (batch, rewards_T) in enumerate(zip(batches, rewards, strict=True)):
            values_L = self._values(batch, is_last=index == len(batches) - 1, learns=token_weight is not None)
            targets = value_targets(batch, rewards_T, scatter_to_tokens(values_L, batch), config=self._cfg.algorithm)
            values.add(batch, targets)
            if token_weight is not None and values_L.requires_grad:
                values.loss(values_L, batch, targets, token_weight=token_weight).backward()
            found.append(targets)
        bad = "values of the critic are not finite; lower critic.lr or critic.max_grad_norm"
        refuse_non_finite([one.values_T for one in found], bad)
        return found


class CriticModel(RootModel):
    """Backbone and value head in one forward; one module for the reason that `PolicyModel` gives."""

    def __init__(self, hf: PreTrainedModel, head: ValueHead) -> None:
        super().__init__()
        self.hf = hf
        self.value_head = head

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Values of the states in which the loss tokens are chosen, float32[L]."""
        return self.value_head(predicting_states(self.hf, inputs))


class SeparateCritic(Critic):
    """A critic with its own backbone and optimizer. Every method is collective."""

    def __init__(self, cfg: RunConfig, *, context: ParallelContext, policy: PreTrainedModel) -> None:
        """Raises ModelError if `critic.path` cannot be trained, or knows fewer tokens than `policy`."""
        super().__init__(cfg, device=context.device)
        path = cfg.model.path if cfg.critic.path is None else cfg.critic.path
        meta = meta_model(path, cfg, dtype=cfg.learner.master_dtype)
        require_tokens(f"critic.path {path!r}", meta.hf, policy, "the critic reads the policy's tokens")
        # Nothing reads its logits, and the matrix would cost memory and moments.
        meta.hf.set_output_embeddings(nn.Identity())  # pyright: ignore[reportArgumentType]
        self._model = CriticModel(meta.hf, ValueHead(hidden_size(meta.hf)))
        self._layout = shard_and_load(self._model, meta, cfg, context=context, cpu_offload=cfg.critic.cpu_offload)
        self._group = context.group
        critic = cfg.critic
        self._schedule = replace(
            cfg.learner,
            lr=DEFAULT_LR_RATIO * cfg.learner.lr if critic.lr is None else critic.lr,
            weight_decay=critic.weight_decay,
            max_grad_norm=critic.max_grad_norm,
            param_groups={},
        )
        params = dict(self._model.named_parameters())
        self.optimizer = ShardedOptimizer(
            params, config=self._schedule, seed=cfg.seed + 1, matrices=muon_matrices(meta.hf, params)
        )

    def grad_norm(self) -> float:
        """Of the whole gradient."""
        return sum_over_ranks(self.optimizer.grad_sq_sum().reshape(1))[0] ** 0.5

    def lr(self, step: int) -> float:
        return learning_rate(step, config=self._schedule, total_steps=self._cfg.trainer.total_steps)

    def learn(self, mini_batch: Sequence[PreparedBatch], values: ValueSums, *, token_weight: float) -> None:
        """Leave the gradients of an update."""
        for index, one in enumerate(mini_batch):
            assert one.targets is not None
            values_L = self._values(one.batch, is_last=index == len(mini_batch) - 1, learns=True)
            values.loss(values_L, one.batch, one.targets, token_weight=token_weight).backward()

    def update(
        self,
        mini_batch: Sequence[PreparedBatch],
        values: ValueSums,
        *,
        token_weight: float,
        lr: float,
        grad_norm: float,
    ) -> list[float]:
        """Apply the gradients that are there, of norm `grad_norm`, then make the further updates over the mini-batch.
        Returns the norms of those made, at most `critic.updates_per_step`.

        The policy has been updated by now, so a later gradient that is not finite fails nothing: that update and those
        after it are skipped on every rank.
        """
        norms: list[float] = []
        while math.isfinite(grad_norm):
            self.optimizer.step(lr=lr, grad_norm=grad_norm)
            norms.append(grad_norm)
            if len(norms) == self._cfg.critic.updates_per_step:
                return norms
            self.learn(mini_batch, values, token_weight=token_weight)
            grad_norm = self.grad_norm()
        self.optimizer.zero_grad()
        return norms

    def _values(self, batch: MicroBatch, *, is_last: bool, learns: bool) -> Tensor:
        inputs = PackedInputs.of(batch, device=self._device, layout=self._layout, group=self._group)
        if learns:
            self._model.expect_backward(is_last=is_last)
        with torch.set_grad_enabled(learns):
            values_L = self._model(inputs)
            if self._group is not None and inputs.owner_L is not None:
                values_L = self._group.gather([values_L], inputs.owner_L)[0]
        if not learns:
            self._model.release()
        return values_L


class SharedCritic(Critic):
    """The critic on the policy's backbone. The policy's own pass trains it; `targets` costs a forward pass, because the
    policy's loss needs all advantages of the step."""

    def __init__(self, cfg: RunConfig, built: BuiltPolicy) -> None:
        super().__init__(cfg, device=built.device)
        self._built = built

    def _values(self, batch: MicroBatch, *, is_last: bool, learns: bool) -> Tensor:
        values_L = self._built.no_grad_forward(batch).values_L
        assert values_L is not None
        return values_L


def build_critic(cfg: RunConfig, built: BuiltPolicy, context: ParallelContext) -> SeparateCritic | SharedCritic | None:
    """The critic that `algorithm.advantage_estimator=gae` needs; None with every other estimator. Raises ModelError if
    `critic.path` cannot be trained."""
    if not cfg.algorithm.uses_critic:
        return None
    if cfg.critic.shared_backbone:
        return SharedCritic(cfg, built)
    return SeparateCritic(cfg, context=context, policy=built.policy.hf)
