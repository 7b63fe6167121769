"""What every policy loss gets, what it reports, and the two quantities that all of them need.

Shape legend: `L` loss tokens of a micro-batch, `N` sequences in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 is far outside any clip range but still finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The loss tokens of one micro-batch, sequence after sequence. A sequence is always whole in one micro-batch.

    Example:
        two sequences of 2 and 1 loss tokens: sequence_L = [0, 0, 1], num_sequences = 2
    """

    logprobs_L: Tensor
    """float32, of the policy being trained, with gradient."""
    old_logprobs_L: Tensor
    """float32, of the policy that the trust region is around: the one that sampled, unless a correction replaced it."""
    advantages_L: Tensor
    """float32"""
    sequence_L: Tensor
    """int64, ascending: which sequence the token is of. A sequence may have no loss token."""
    num_sequences: int
    selected_L: Tensor | None = None
    """bool: tokens chosen for their covariance over the whole step (`trainer.algorithms.selection`); only the losses
    clip_cov and kl_cov need it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over tokens of a loss call, as 0-d tensors without gradient; divide by the number of tokens for means."""

    ratio_sum: Tensor
    """Of pi / pi_old, per token also where the loss uses the ratio of the sequence."""
    ratio_max: Tensor
    """0 if there is no token."""
    clipped_low: Tensor
    """Tokens with a negative advantage whose update the loss cut (CISPO: tokens whose weight was raised)."""
    clipped_high: Tensor
    """Tokens with a positive advantage whose update the loss cut (CISPO: tokens whose weight was lowered)."""
    clipped_dual: Tensor
    """Tokens whose gradient the dual clip cut (advantage < 0)."""


def ratio_and_log(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """(pi / pi_old, its logarithm), both float32[L]; beyond +-20 the logarithm is constant and has no gradient."""
    # float32: a bfloat16 log-prob near -10 is rounded by 0.03, which is a 3% error of the ratio.
    log_ratio_L = log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_L.exp(), log_ratio_L


def log_ratio(inputs: LossInputs) -> Tensor:
    """log pi - log pi_old, not clamped: float32[L], or float64 if the inputs are."""
    return at_least_float32(inputs.logprobs_L) - at_least_float32(inputs.old_logprobs_L)


def at_least_float32(values: Tensor) -> Tensor:
    """Half precision becomes float32; float64 stays, so that gradients can be checked numerically."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def sequence_mean(values_L: Tensor, inputs: LossInputs) -> Tensor:
    """Mean over the loss tokens of each sequence, given back to each of its tokens, as `sequence_sum`.

    Returns:
        float32[L]
    """
    return sequence_sum(values_L, inputs) / sequence_sum(torch.ones_like(values_L), inputs)


def sequence_sum(values_L: Tensor, inputs: LossInputs) -> Tensor:
    """Sum over the loss tokens of each sequence, given back to each of its tokens. No gradient; independent of the
    other sequences, so the same bits on every split of a step.

    Returns:
        float32[L]
    """
    boundaries = torch.arange(inputs.num_sequences + 1, device=inputs.sequence_L.device)
    # Not index_add: its atomic additions on a GPU have no fixed order.
    offsets = torch.searchsorted(inputs.sequence_L, boundaries)
    # unsafe: no check of the offsets, which would wait for the device; they are right by construction.
    sums_N = torch.segment_reduce(values_L.detach(), "sum", offsets=offsets, unsafe=True, initial=0)
    return sums_N[inputs.sequence_L]


def loss_stats(inputs: LossInputs, *, low: Tensor | None = None, high: Tensor | None = None) -> LossStats:
    """Statistics of a loss whose update was cut at `low` and `high` (bool[L]; None: nowhere), without dual clip."""
    none = torch.zeros_like(inputs.sequence_L, dtype=torch.bool)
    return clip_stats(inputs, low=none if low is None else low, high=none if high is None else high, dual=none)


@torch.no_grad()
def clip_stats(inputs: LossInputs, *, low: Tensor, high: Tensor, dual: Tensor) -> LossStats:
    """Statistics of a loss; `low`, `high` and `dual` are bool[L]."""
    ratio_L, _ = ratio_and_log(inputs)
    return LossStats(
        ratio_sum=ratio_L.sum(),
        ratio_max=ratio_L.max() if ratio_L.numel() > 0 else ratio_L.new_zeros(()),
        clipped_low=low.sum().float(),
        clipped_high=high.sum().float(),
        clipped_dual=dual.sum().float(),
    )
