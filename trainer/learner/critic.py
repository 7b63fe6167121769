"""The critic of PPO: a backbone of its own, or the policy's. Shape legend: `T` packed tokens, `L` loss tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from trainer.config.schema.critic import DEFAULT_LR_RATIO
from trainer.learner.errors import ModelError
from trainer.learner.inputs import PackedInputs
from trainer.learner.model import hidden_size, hollow_model, settle, source_states, vocab_size
from trainer.learner.optim import ShardedAdamW, learning_rate
from trainer.learner.result import Metric
from trainer.learner.scoring import over_tokens, score
from trainer.learner.value_head import ValueHead
from trainer.learner.values import ValueTargets, ValueTotals, value_targets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.inputs import LayoutFn
    from trainer.learner.model import BuiltPolicy, Site
    from trainer.learner.preparation import PreparedStep


class Critic(Protocol):
    """Gives the advantages and returns of a step. What it learns from them is up to the kind."""

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """GAE from the current values. Collective.

        Args:
            rewards: float64[T] of every micro-batch.
        """
        ...


class CriticModel(nn.Module):
    """Backbone and value head in one forward; one module for the reason that `PolicyModel` gives."""

    def __init__(self, hf: PreTrainedModel, head: ValueHead) -> None:
        super().__init__()
        self.hf = hf
        self.value_head = head

    def forward(self, inputs: PackedInputs) -> Tensor:
        """Values of the states in which the loss tokens are chosen, float32[L]."""
        return self.value_head(source_states(self.hf, inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAt:
    """When the critic is updated, and the norm of the gradient that it has then."""

    step: int
    grad_norm: float


class OwnCritic:
    """A critic with its own backbone and optimizer. Every method is collective.

    The values that give the advantages are those of the first update's forward pass: one pass serves both.
    """

    def __init__(self, cfg: RunConfig, *, site: Site, policy: PreTrainedModel) -> None:
        """Raises ModelError if `critic.path` cannot be trained, or knows fewer tokens than `policy`."""
        path = cfg.model.path if cfg.critic.path is None else cfg.critic.path
        hollow = hollow_model(path, cfg)
        known, needed = vocab_size(hollow.hf), vocab_size(policy)
        if known < needed:
            raise ModelError(
                f"critic.path {path!r} has {known} tokens, the policy {needed}; the critic reads the policy's tokens, "
                "use a model of the same family"
            )
        # Nothing reads its logits, and the matrix would cost memory and moments.
        hollow.hf.set_output_embeddings(nn.Identity())  # pyright: ignore[reportArgumentType]
        self._model = CriticModel(hollow.hf, ValueHead(hidden_size(hollow.hf)))
        self._layout: LayoutFn = settle(self._model, hollow, cfg, site=site, cpu_offload=cfg.critic.cpu_offload)
        self._cfg, self._device = cfg, site.device
        critic = cfg.critic
        self._schedule = replace(
            cfg.learner,
            lr=DEFAULT_LR_RATIO * cfg.learner.lr if critic.lr is None else critic.lr,
            weight_decay=critic.weight_decay,
            max_grad_norm=critic.max_grad_norm,
        )
        self.optimizer = ShardedAdamW(dict(self._model.named_parameters()), config=self._schedule)

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """See `Critic.targets`. Leaves the gradients of the first update."""
        found: list[ValueTargets] = []
        for index, (batch, rewards_T) in enumerate(zip(batches, rewards, strict=True)):
            values_L = self._forward(batch, is_last=index == len(batches) - 1)
            targets = value_targets(batch, rewards_T, over_tokens(values_L, batch), config=self._cfg.algorithm)
            totals.add(batch, targets)
            totals.loss(values_L, batch, targets, clip=self._cfg.critic.value_clip).backward()
            found.append(targets)
        return found

    def grad_norm(self) -> float:
        """Of the whole gradient."""
        grad_sq = self.optimizer.grad_sq_sum().to(self._device).double().reshape(1)
        dist.all_reduce(grad_sq, op=dist.ReduceOp.SUM)
        return float(grad_sq) ** 0.5

    def update(self, prepared: PreparedStep, at: UpdateAt) -> dict[str, Metric]:
        """Take the gradients that `targets` left, then make the other updates of the step towards the same returns.

        The policy has been updated by now, so a later gradient that is not finite fails nothing: that update and those
        after it are left out, on every rank, and `critic_skipped_updates` counts them.
        """
        lr = learning_rate(at.step, config=self._schedule, total_steps=self._cfg.trainer.total_steps)
        norms = [at.grad_norm]
        self.optimizer.step(lr=lr, grad_norm=at.grad_norm)
        num_updates, num_skipped = self._cfg.critic.updates_per_step, 0
        for done in range(1, num_updates):
            for index, (batch, of_batch) in enumerate(zip(prepared.batches, prepared.targets, strict=True)):
                values_L = self._forward(batch, is_last=index == len(prepared.batches) - 1)
                prepared.totals.loss(values_L, batch, of_batch, clip=self._cfg.critic.value_clip).backward()
            norm = self.grad_norm()
            if not math.isfinite(norm):
                self.optimizer.zero_grad()
                num_skipped = num_updates - done
                break
            norms.append(norm)
            self.optimizer.step(lr=lr, grad_norm=norm)
        return {
            "critic_grad_norm": Metric(sum=sum(norms), count=len(norms)),
            "critic_lr": Metric(sum=lr),
            **({"critic_skipped_updates": Metric(sum=float(num_skipped))} if num_updates > 1 else {}),
        }

    def _forward(self, batch: MicroBatch, *, is_last: bool) -> Tensor:
        self._model.set_is_last_backward(is_last)  # pyright: ignore[reportCallIssue]
        return self._model(PackedInputs.of(batch, device=self._device, layout=self._layout))


class SharedCritic:
    """The critic on the policy's backbone. The policy's own pass trains it."""

    def __init__(self, cfg: RunConfig, built: BuiltPolicy, *, device: torch.device) -> None:
        self._cfg, self._built, self._device = cfg, built, device

    def targets(
        self, batches: Sequence[MicroBatch], rewards: Sequence[np.ndarray], *, totals: ValueTotals
    ) -> list[ValueTargets]:
        """See `Critic.targets`. Costs a forward pass: the policy's loss needs all advantages of the step."""
        found: list[ValueTargets] = []
        for batch, rewards_T in zip(batches, rewards, strict=True):
            values_L = score(self._built.policy, batch, layout=self._built.layout, device=self._device).values_L
            assert values_L is not None
            targets = value_targets(batch, rewards_T, over_tokens(values_L, batch), config=self._cfg.algorithm)
            totals.add(batch, targets)
            found.append(targets)
        return found


def build_critic(cfg: RunConfig, built: BuiltPolicy, site: Site) -> OwnCritic | SharedCritic | None:
    """The critic that `algorithm.advantage=gae` needs; None with every other estimator.

    Raises:
        ModelError: `critic.path` cannot be trained.
    """
    if not cfg.algorithm.uses_critic:
        return None
    if cfg.critic.shared_backbone:
        return SharedCritic(cfg, built, device=site.device)
    return OwnCritic(cfg, site=site, policy=built.policy.hf)
