"""What one optimizer step reports, and how it is collected. Plain values only, so it travels through Ray.

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

    from trainer.algorithms.losses import LossStats


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
    `clip_dual_frac`, `entropy` (nats per token), `kl_behaviour` (k3, nats per token), `num_loss_tokens`,
    `num_tokens`."""
    seconds: Mapping[str, float]
    """`forward`, `backward`, `optimizer` (reduction and clipping included) and `step`."""


class StepTotals:
    """Sums over the micro-batches of one step, kept on the device until the one reduction at its end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums = torch.zeros(8, device=device)
        self._max = torch.zeros((), device=device)
        self._num_tokens = 0
        self._num_loss_tokens = 0

    @torch.no_grad()
    def add(self, loss: Tensor, stats: LossStats, entropy_L: Tensor, *, num_tokens: int) -> None:
        """Add one micro-batch. `loss` is its weighted sum, `num_tokens` counts context tokens too."""
        self._sums[:7] += torch.stack(
            (
                loss.detach(),
                stats.ratio_sum,
                stats.kl_sum,
                stats.clipped_low,
                stats.clipped_high,
                stats.clipped_dual,
                entropy_L.sum(),
            )
        )
        self._max = torch.maximum(self._max, stats.ratio_max)
        self._num_tokens += num_tokens
        self._num_loss_tokens += entropy_L.shape[0]

    def reduce(self, grad_sq_sum: Tensor) -> tuple[dict[str, Metric], float]:
        """Sum over ranks: the metrics, and the norm of the whole gradient. Collective; waits for the device."""
        self._sums[7] = grad_sq_sum.to(self._device)
        # float64: token counts beyond 2^24 are not exact in float32.
        counts = torch.tensor([self._num_tokens, self._num_loss_tokens], dtype=torch.float64, device=self._device)
        packed = torch.cat((self._sums.double(), counts))
        dist.all_reduce(packed, op=dist.ReduceOp.SUM)
        dist.all_reduce(self._max, op=dist.ReduceOp.MAX)
        loss, ratio, kl, low, high, dual, entropy, grad_sq, num_tokens, num_loss = packed.tolist()
        per_token = {
            "ratio_mean": ratio,
            "kl_behaviour": kl,
            "clip_low_frac": low,
            "clip_high_frac": high,
            "clip_dual_frac": dual,
            "entropy": entropy,
        }
        metrics = {name: Metric(sum=total, count=num_loss) for name, total in per_token.items()}
        grad_norm = grad_sq**0.5
        for name, value in (
            ("loss", loss),
            ("grad_norm", grad_norm),
            ("ratio_max", float(self._max)),
            ("num_loss_tokens", num_loss),
            ("num_tokens", num_tokens),
        ):
            metrics[name] = Metric(sum=value)
        return metrics, grad_norm


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
