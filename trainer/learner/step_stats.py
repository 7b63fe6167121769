"""Sums that a step collects over micro-batches and ranks, and the result that they become."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.algorithm import CorrectionConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A mean that can still be combined with others: its sum and its count."""

    sum: float
    count: float = 1.0

    @property
    def mean(self) -> float:
        """0 if nothing was counted."""
        return self.sum / self.count if self.count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step, reduced over all ranks, updates and micro-batches (times: of this rank)."""

    step: int
    metrics: Mapping[str, Metric]
    """Equal on every rank; docs/metrics.md describes each. A metric is absent where it means nothing: while
    only the critic is trained, of a policy that sampled no token, of a reference or a correction that is off."""
    seconds: Mapping[str, float]
    """`reference` and `critic` (if there is one), `advantages` (where they are finished without a critic), `proximal`
    (where a correction needs those log-probs ahead), `forward`, `backward`, `optimizer` (reduction and clipping
    included) and `step`."""
    time_imbalance: float | None = None
    """Of a `LearnerGroup` of several ranks: seconds of forward and backward passes of the slowest one over the mean of
    all. None of one rank, and where neither pass was made."""
    is_policy_changed: bool = True
    """Not where only the critic is trained, or every update was skipped."""
    model_flops: float | None = None
    """Operations of the policy's forward and backward (`ModelFlops`), of this rank or of a whole `LearnerGroup`. None
    where the policy was not trained, or its shapes are not enough to know."""
    peak_flops: float | None = None
    """Operations per second that the device (of a group: all devices) can do; None if unknown."""


def sum_over_ranks(values: Tensor | Sequence[float] | np.ndarray) -> list[float]:
    """[n] in float64: token counts beyond 2^24 are not exact in float32. Collective; waits for the device.

    In host memory, whose library (gloo) takes float64: not every device's does, HCCL among them.
    """
    on_host = values.cpu() if isinstance(values, Tensor) else np.asarray(values, np.float64)
    summed = torch.as_tensor(on_host).to(torch.float64, copy=True)
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    return summed.tolist()


class UpdateSums:
    """Named sums over the micro-batches of one update, kept on the device until the one reduction at its end. Of a name
    that ends in `_max` it is the largest value, and at least 0."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._names: list[str] = []
        self._max_names: list[str] = []
        self._sums = self._maxima = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, values: Mapping[str, Tensor], *, is_copy: bool = False) -> None:
        """Add those of one micro-batch: 0-d tensors, of the same names every time; of a copy only the names."""
        self._max_names = [name for name in values if name.endswith("_max")]
        self._names = [name for name in values if name not in self._max_names]
        own = torch.stack([values[name] for name in self._names])
        self._sums = self._sums + (torch.zeros_like(own) if is_copy else own)
        self._maxima = torch.maximum(self._maxima, torch.stack([values[name] for name in self._max_names]))

    def reduce(self, grad_sq_sum: Tensor, counts: Mapping[str, int]) -> dict[str, float]:
        """All of them over all ranks, and `grad_sq` and `counts` likewise. Collective; waits for the device."""
        own = [*self._sums.cpu().tolist(), grad_sq_sum.item(), *counts.values()]
        maxima = self._maxima.cpu()
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        names = (*self._names, "grad_sq", *counts, *self._max_names)
        return dict(zip(names, sum_over_ranks(own) + maxima.tolist(), strict=True))


def policy_metrics(updates: Sequence[Mapping[str, float]], *, correction: CorrectionConfig) -> dict[str, Metric]:
    """Metrics of a step from the reduced sums of its updates, at least one: see `StepResult.metrics`. `passes` of an
    update is the share of the step's micro-batches that it visited.

    Means are over the tokens of all updates. What separates learner and engine, and `first_*` if there are several
    updates, are of the first one, whose policy is still the version that the step started with.
    """
    first = updates[0]
    sums = {name: (max if name.endswith("_max") else sum)(one[name] for one in updates) for name in first}
    num_loss = sums["num_loss_tokens"]
    per_token = {
        "ratio_mean": sums["ratio"],
        "kl_behavior": sums["fresh_kl"] + sums["stale_kl"],
        "clip_low_frac": sums["clip_ratio_low"],
        "clip_high_frac": sums["clip_ratio_high"],
        "clip_dual_frac": sums["dual_clip"],
        "entropy": sums["entropy"],
    }
    if "kl_reference" in sums:
        per_token["kl_reference"] = sums["kl_reference"]
    metrics = {
        "loss": Metric(sum=sums["loss"], count=len(updates)),
        "grad_norm": Metric(sum=sum(one["grad_sq"] ** 0.5 for one in updates), count=len(updates)),
        "ratio_max": Metric(sum=sums["ratio_max"]),
        "num_loss_tokens": Metric(sum=num_loss, count=sums["passes"]),
        "num_tokens": Metric(sum=sums["num_tokens"], count=sums["passes"]),
    }
    for cause in ("fresh", "stale"):
        if num_tokens := first[f"{cause}_tokens"]:
            metrics[f"mismatch/{cause}"] = Metric(sum=first[f"{cause}_abs"], count=num_tokens)
            metrics[f"mismatch/{cause}_kl"] = Metric(sum=first[f"{cause}_kl"], count=num_tokens)
    if len(updates) > 1:
        metrics["first_ratio_max"] = Metric(sum=first["ratio_max"])
        for name, of_first in (
            ("ratio_mean", "ratio"),
            ("clip_low_frac", "clip_ratio_low"),
            ("clip_high_frac", "clip_ratio_high"),
        ):
            metrics[f"first_{name}"] = Metric(sum=first[of_first], count=first["num_loss_tokens"])
    actions = {"clamped": correction.clamp, "masked": correction.mask, "rejected": correction.reject}
    active = [name for name, action in actions.items() if action.is_active]
    if active or correction.objective != "bypass":
        per_token |= {"correction_weight_mean": sums["weight"]}
        per_token |= {f"correction_{name}_frac": sums[name] for name in active}
        metrics["correction_weight_max"] = Metric(sum=sums["weight_max"])
        # Kish 1965: (sum w)^2 / sum w^2 equally weighted tokens estimate as well; 0 if nothing is left.
        metrics["correction_ess_frac"] = Metric(sum=sums["weight"] ** 2, count=num_loss * sums["weight_sq"])
    return metrics | {name: Metric(sum=total, count=num_loss) for name, total in per_token.items()}


class PhaseTimer:
    """Seconds per phase. On a device that runs behind the host, phases are bounded by events, not by waiting."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, phase: str) -> None:
        """What ran since the last mark was `phase`."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Summed per phase, and `step` for all. Call it when the device is done."""
        totals: dict[str, float] = {}
        for (_, before), (phase, after) in pairwise(self._marks):
            totals[phase] = totals.get(phase, 0.0) + _elapsed(before, after)
        totals["step"] = sum(totals.values())
        return totals

    def _now(self) -> float | torch.Event:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event


def _elapsed(before: Any, after: Any) -> float:
    if not isinstance(after, torch.Event):
        return after - before
    after.synchronize()
    return before.elapsed_time(after) / 1000.0  # milliseconds
