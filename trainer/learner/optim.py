"""AdamW over this rank's shards, the learning-rate schedule, and clipping.

The optimizer sees the plain local tensors behind the DTensors: the update is elementwise, so it needs no communication,
and a step of a small model is not drowned in DTensor dispatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.learner.parallel import sharded_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema.learner import LearnerConfig


def learning_rate(step: int, *, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear warm-up, then the schedule down to the last step.

    A pure function of the step, so a resumed run needs no scheduler state.

    Example:
        warmup_steps=4: 0.25, 0.5, 0.75, 1.0 times `lr`, then the schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"learner.lr_schedule must be constant, cosine or linear, got {config.lr_schedule!r}")
    return config.lr * (config.min_lr_frac + (1.0 - config.min_lr_frac) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One parameter as the model and as the optimizer see it; both share memory."""

    name: str
    param: nn.Parameter
    local: Tensor


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only: not on norms and biases."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, config: LearnerConfig) -> None:
        """`params` by the names that they have in checkpoints; all of them are trained."""
        self._config = config
        self._slots = [
            _Slot(name=name, param=param, local=_local(param.detach()).requires_grad_())
            for name, param in params.items()
        ]
        decayed = [slot.local for slot in self._slots if slot.param.ndim >= 2]
        plain = [slot.local for slot in self._slots if slot.param.ndim < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for slot in self._slots:  # allocated at once: a checkpoint is loaded into these tensors
            self._adamw.state[slot.local] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.local.device),
                "exp_avg": torch.zeros_like(slot.local),
                "exp_avg_sq": torch.zeros_like(slot.local),
            }

    def grad_sq_sum(self) -> Tensor:
        """Sum of squares over this rank's shards, float32[], on the gradients' device. Sum it over ranks for the
        squared norm of the whole gradient."""
        grads = [_local(slot.param.grad) for slot in self._slots if slot.param.grad is not None]
        return get_total_norm(grads).square()

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` by the given norm of the whole gradient, update, and drop the gradients."""
        for slot in self._slots:
            slot.local.grad = None if slot.param.grad is None else _local(slot.param.grad)
        if grad_norm > self._config.max_grad_norm:
            locals_ = [slot.local for slot in self._slots]
            clip_grads_with_norm_(locals_, self._config.max_grad_norm, torch.tensor(grad_norm))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for slot in self._slots:
            slot.local.grad = None
            slot.param.grad = None

    def weights(self) -> dict[str, Tensor]:
        """What is trained, by parameter name, for checkpoints."""
        return {slot.name: slot.param.detach() for slot in self._slots}

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, as (D)Tensors that share memory with the optimizer, for checkpoints."""
        state: dict[str, Tensor] = {}
        for slot in self._slots:
            moments = self._adamw.state[slot.local]
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{slot.name}"] = sharded_like(slot.param, moments[key])
        return state

    def tensors(self) -> Iterator[Tensor]:
        """This rank's shards of what is trained and of the moments: all that takes memory between two steps."""
        for slot in self._slots:
            moments = self._adamw.state[slot.local]
            yield from (slot.local, moments["exp_avg"], moments["exp_avg_sq"])

    @property
    def num_updates(self) -> int:
        """Updates made so far, the same for every parameter."""
        return int(self._adamw.state[self._slots[0].local]["step"].item())

    def set_num_updates(self, count: int) -> None:
        """Of a loaded checkpoint: Adam's bias correction depends on it."""
        for slot in self._slots:
            self._adamw.state[slot.local]["step"].fill_(count)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
