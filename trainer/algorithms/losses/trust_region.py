"""DPPO: a trust region on the divergence of the two policies at a token, in place of a bound on their ratio.

A ratio of 100 from 1e-5 to 1e-3 moves almost no probability and passes; a ratio of 0.8 from 0.99 moves much and does
not. The divergence is that of the two-outcome distribution "this token or another". Shape legend: `L` loss tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.losses.inputs import LossInputs, LossStats, at_least_float32, loss_stats, ratio_and_log

Divergence = Literal["tv", "kl"]


def dppo_loss(inputs: LossInputs, *, divergence: Divergence, threshold: float) -> tuple[Tensor, LossStats]:
    """-M A r, where M = 0 on tokens that are further than `threshold` from pi_old and would move further still.

    DPPO (Qi et al. 2026, arXiv:2602.04879): M = 0 if the divergence exceeds the threshold and (A > 0 and r > 1, or
    A < 0 and r < 1), else 1.

    Returns:
        (loss float32[L], 0 on masked tokens; stats).
    """
    ratio_L, _ = ratio_and_log(inputs)
    is_far_L = binary_divergence(inputs, divergence) > threshold
    is_high_L = is_far_L & (inputs.advantages_L > 0) & (ratio_L > 1)
    is_low_L = is_far_L & (inputs.advantages_L < 0) & (ratio_L < 1)
    loss_L = (-inputs.advantages_L * ratio_L).masked_fill(is_high_L | is_low_L, 0.0)
    return loss_L, loss_stats(inputs, low=is_low_L, high=is_high_L)


@torch.no_grad()
def binary_divergence(inputs: LossInputs, divergence: Divergence) -> Tensor:
    """Divergence of "this token or another" between the policies, without gradient.

    Returns:
        float32[L]. "tv": |pi - pi_old|. "kl": KL(pi_old || pi) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    """
    new_L, old_L = at_least_float32(inputs.logprobs_L), at_least_float32(inputs.old_logprobs_L)
    match divergence:
        case "tv":
            return (new_L.exp() - old_L.exp()).abs()
        case "kl":
            return old_L.exp() * (old_L - new_L) + _rest(old_L).exp() * (_rest(old_L) - _rest(new_L))
        case _:
            raise ValueError(f"divergence must be tv or kl, got {divergence!r}")


def _rest(logprobs_L: Tensor) -> Tensor:
    """log(1 - p), finite also where p rounds to 1 (engines report log-probs of 0 there)."""
    return torch.log((-torch.expm1(logprobs_L)).clamp_min(torch.finfo(logprobs_L.dtype).eps))
