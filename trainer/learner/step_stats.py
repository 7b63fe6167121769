"""Sums that a step collects over micro-batches and ranks, and the result they become.

Imports torch only for the collecting side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainer.algorithms.corrections import CorrectionStats
    from trainer.algorithms.losses import LossStats
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
    """One optimizer step, reduced over all ranks and micro-batches (times: of this rank)."""

    step: int
    metrics: Mapping[str, Metric]
    """Equal on every rank. `loss`, `grad_norm`, `lr`, `ratio_mean`, `ratio_max`, `clip_low_frac`, `clip_high_frac`,
    `clip_dual_frac`, `entropy` (nats per token), `kl_behaviour` (k3, nats per token), `num_loss_tokens`, with a
    reference `kl_reference` (k3, nats per token),
    `num_tokens`; `mismatch_engine`, `mismatch_engine_kl`, `mismatch_stale`, `mismatch_stale_kl` (nats per token);
    with a correction `correction_weight_mean`, `correction_weight_max`, `correction_ess_frac`, and of its actions
    `correction_clamped_frac`, `correction_masked_frac`, `correction_rejected_frac`. With a critic `value_loss`,
    `value_mean`, `return_mean`, `value_explained_variance`, `value_clip_frac`, and of one with its own backbone
    `critic_grad_norm` and `critic_lr`. While only the critic is trained, those are all."""
    seconds: Mapping[str, float]
    """`reference` and `critic` (if there is one), `advantages` (where they are finished without a critic), `forward`,
    `backward`, `optimizer` (reduction and clipping included) and `step`."""
    model_flops: float | None = None
    """Operations of the policy's forward and backward (`ModelFlops`): of this rank's micro-batches, from a
    `LearnerGroup` of all ranks. Not counted are the reference, a critic of its own and the optimizer. None where the
    policy was not trained, or its shapes do not tell."""
    peak_flops: float | None = None
    """Operations per second that this rank's device can do, from a `LearnerGroup` all devices together; None if that is
    not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """What one forward leaves to be added up."""

    loss: Tensor
    """Weighted sum of the token losses, with gradient."""
    stats: LossStats
    correction: CorrectionStats
    entropy_L: Tensor
    """float32, without gradient."""
    kl_L: Tensor | None
    """float32, without gradient: KL of the policy to the reference (k3); None without a reference."""


class StepTotals:
    """Sums over the micro-batches of one step, kept on the device until the one reduction at its end."""

    def __init__(self, device: torch.device, *, correction: CorrectionConfig) -> None:
        """`correction` decides which of its actions are reported."""
        self._device, self._correction = device, correction
        self._sums = torch.zeros(len(_SUMS), device=device)
        self._max = torch.zeros(2, device=device)
        self._zero = torch.zeros((), device=device)
        self._num_tokens = 0
        self._num_loss_tokens = 0
        self._has_reference = False

    @torch.no_grad()
    def add(self, part: MicroBatchLoss, *, num_tokens: int) -> None:
        """Add one micro-batch. `num_tokens` counts context tokens too."""
        stats, correction, engine, stale = part.stats, part.correction, part.correction.engine, part.correction.stale
        sums = {
            "loss": part.loss.detach(),
            "entropy": part.entropy_L.sum(),
            "ratio": stats.ratio_sum,
            "clip_low": stats.clipped_low,
            "clip_high": stats.clipped_high,
            "clip_dual": stats.clipped_dual,
            "weight": correction.weight_sum,
            "weight_sq": correction.weight_sq_sum,
            "clamped": correction.clamped,
            "masked": correction.masked,
            "rejected": correction.rejected,
            "engine_tokens": engine.num_tokens,
            "engine_abs": engine.abs_sum,
            "engine_kl": engine.kl_sum,
            "stale_tokens": stale.num_tokens,
            "stale_abs": stale.abs_sum,
            "stale_kl": stale.kl_sum,
            "kl_reference": self._zero if part.kl_L is None else part.kl_L.sum(),
        }
        self._has_reference |= part.kl_L is not None
        self._sums += torch.stack([sums[name] for name in _SUMS])
        self._max = torch.maximum(self._max, torch.stack((stats.ratio_max, correction.weight_max)))
        self._num_tokens += num_tokens
        self._num_loss_tokens += part.entropy_L.shape[0]

    def reduce(self, grad_sq_sum: Tensor) -> tuple[dict[str, Metric], float]:
        """Sum over ranks: the metrics, and the norm of the whole gradient. Collective; waits for the device."""
        # float64: token counts beyond 2^24 are not exact in float32.
        counts = torch.tensor([self._num_tokens, self._num_loss_tokens], dtype=torch.float64, device=self._device)
        packed = torch.cat((self._sums.double(), grad_sq_sum.to(self._device).double().reshape(1), counts))
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._max, op=dist.ReduceOp.MAX)
        *values, grad_sq, num_tokens, num_loss = packed.tolist()
        sums = dict(zip(_SUMS, values, strict=True))
        ratio_max, weight_max = self._max.tolist()
        grad_norm = grad_sq**0.5
        per_token = {
            "ratio_mean": sums["ratio"],
            "kl_behaviour": sums["engine_kl"] + sums["stale_kl"],
            "clip_low_frac": sums["clip_low"],
            "clip_high_frac": sums["clip_high"],
            "clip_dual_frac": sums["clip_dual"],
            "entropy": sums["entropy"],
        }
        if self._has_reference:
            per_token["kl_reference"] = sums["kl_reference"]
        metrics = {name: Metric(sum=total, count=num_loss) for name, total in per_token.items()}
        for name, value in (
            ("loss", sums["loss"]),
            ("ratio_max", ratio_max),
            ("num_loss_tokens", num_loss),
            ("num_tokens", num_tokens),
        ):
            metrics[name] = Metric(sum=value)
        metrics |= _mismatch_metrics(sums)
        metrics |= _correction_metrics(sums, weight_max=weight_max, num_loss=num_loss, config=self._correction)
        return metrics, grad_norm


_SUMS: tuple[str, ...] = (
    "loss", "entropy", "ratio", "clip_low", "clip_high", "clip_dual", "weight", "weight_sq", "clamped", "masked",
    "rejected", "engine_tokens", "engine_abs", "engine_kl", "stale_tokens", "stale_abs", "stale_kl", "kl_reference",
)  # fmt: skip


def _mismatch_metrics(sums: Mapping[str, float]) -> dict[str, Metric]:
    """Absent for a cause without a token in the step."""
    metrics: dict[str, Metric] = {}
    for cause in ("engine", "stale"):
        if num_tokens := sums[f"{cause}_tokens"]:
            metrics[f"mismatch_{cause}"] = Metric(sum=sums[f"{cause}_abs"], count=num_tokens)
            metrics[f"mismatch_{cause}_kl"] = Metric(sum=sums[f"{cause}_kl"], count=num_tokens)
    return metrics


def _correction_metrics(
    sums: Mapping[str, float], *, weight_max: float, num_loss: float, config: CorrectionConfig
) -> dict[str, Metric]:
    """Absent while no correction is active, and for actions that are not."""
    actions = {
        "clamped": config.clamp.is_active,
        "masked": config.mask.is_active,
        "rejected": config.reject.is_active,
    }
    if config.objective == "bypass" and not any(actions.values()):
        return {}
    metrics = {
        "correction_weight_mean": Metric(sum=sums["weight"], count=num_loss),
        "correction_weight_max": Metric(sum=weight_max),
        # Kish 1965: (sum w)^2 / sum w^2 equally weighted tokens would estimate as well; 0 if nothing is left.
        "correction_ess_frac": Metric(sum=sums["weight"] ** 2, count=num_loss * sums["weight_sq"]),
    }
    for name, is_active in actions.items():
        if is_active:
            metrics[f"correction_{name}_frac"] = Metric(sum=sums[name], count=num_loss)
    return metrics


class PhaseTimer:
    """Seconds per phase. On a device that runs behind the host, phases are bounded by events, not by waiting."""

    def __init__(self, device: torch.device, *, clock: Callable[[], float]) -> None:
        self._device, self._clock = device, clock
        self._marks: list[tuple[str, float | torch.Event]] = [("", self._now())]

    def mark(self, phase: str) -> None:
        """What ran since the last mark was `phase`."""
        self._marks.append((phase, self._now()))

    def seconds(self) -> dict[str, float]:
        """Summed per phase, and `step` for all. Call it when the device is done."""
        totals: dict[str, float] = {}
        for (_, before), (phase, after) in zip(self._marks, self._marks[1:], strict=False):
            totals[phase] = totals.get(phase, 0.0) + _elapsed(before, after)
        totals["step"] = sum(totals.values())
        return totals

    def _now(self) -> float | torch.Event:
        if self._device.type == "cpu":
            return self._clock()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event


def _elapsed(before: float | torch.Event, after: float | torch.Event) -> float:
    if isinstance(before, torch.Event) and isinstance(after, torch.Event):
        after.synchronize()
        return before.elapsed_time(after) / 1000.0  # milliseconds
    assert isinstance(before, float) and isinstance(after, float)
    return after - before
