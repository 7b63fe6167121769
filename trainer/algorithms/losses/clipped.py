"""Losses that look at one token at a time: PPO clip, CISPO, SAPO, DRO and the unclipped policy gradients.

Every function gives (loss float32[L], stats); nothing is averaged here. Shape legend: `L` loss tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.losses.inputs import (
    LossInputs,
    LossStats,
    at_least_float32,
    clip_stats,
    log_ratio,
    loss_stats,
    ratio_and_log,
)


def ppo_clip_loss(
    inputs: LossInputs, *, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> tuple[Tensor, LossStats]:
    """Clipped surrogate: max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0.

    PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7); separate bounds as in DAPO (Yu et al. 2025, arXiv:2503.14476,
    eq. 10); dual clip of Ye et al. (2020, arXiv:1912.09729, eq. 5).

    Args:
        clip_dual: c > 1, or None for no dual clip.

    Example:
        log-ratio 0.5 and advantage 1 with clip_high 0.28 give -1.28.
    """
    ratio_L, _ = ratio_and_log(inputs)
    loss_L, low_L, high_L = clipped_surrogate(ratio_L, inputs.advantages_L, clip_low=clip_low, clip_high=clip_high)
    if clip_dual is None:
        return loss_L, loss_stats(inputs, low=low_L, high=high_L)
    bound_L = -inputs.advantages_L * clip_dual
    is_dual_L = (inputs.advantages_L < 0) & (bound_L < loss_L)
    return torch.where(is_dual_L, bound_L, loss_L), clip_stats(inputs, low=low_L, high=high_L, dual=is_dual_L)


def clipped_surrogate(
    ratio_L: Tensor, advantages_L: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) for any ratio.

    Returns:
        (loss float32[L], where the lower bound cut the gradient bool[L], where the upper bound did bool[L]).
    """
    plain_L = -advantages_L * ratio_L
    clipped_L = -advantages_L * ratio_L.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_cut_L, is_negative_L = clipped_L > plain_L, advantages_L < 0
    return torch.maximum(plain_L, clipped_L), is_cut_L & is_negative_L, is_cut_L & ~is_negative_L


def reinforce_loss(inputs: LossInputs) -> tuple[Tensor, LossStats]:
    """Policy gradient -A log pi (Williams 1992). Blind to the age of a sample: only right where pi = pi_old."""
    return -inputs.advantages_L * at_least_float32(inputs.logprobs_L), loss_stats(inputs)


def importance_sampling_loss(inputs: LossInputs) -> tuple[Tensor, LossStats]:
    """Policy gradient corrected for the age of the sample: -A r, unbiased and without a bound on its variance."""
    ratio_L, _ = ratio_and_log(inputs)
    return -inputs.advantages_L * ratio_L, loss_stats(inputs)


def cispo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, LossStats]:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi: the weight is clipped, so no token loses its gradient.

    CISPO (MiniMax-M1 2025, arXiv:2506.13585, eq. 4 and 5).

    Example:
        old log-prob -1.5, new -1, advantage 1 and clip_high 0.28 give 1.28.
    """
    ratio_L, _ = ratio_and_log(inputs)
    ratio_L = ratio_L.detach()
    low, high = 1.0 - clip_low, 1.0 + clip_high
    loss_L = -ratio_L.clamp(low, high) * inputs.advantages_L * at_least_float32(inputs.logprobs_L)
    return loss_L, loss_stats(inputs, low=ratio_L < low, high=ratio_L > high)


def sapo_loss(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> tuple[Tensor, LossStats]:
    """-A (4 / tau) sigmoid(tau (r - 1)): a gate that closes smoothly where PPO's clip cuts.

    SAPO (Gao et al. 2025, arXiv:2511.20347). At r = 1 its slope is 1, as that of r.

    Args:
        tau_positive: temperature where A > 0.
        tau_negative: temperature elsewhere; a larger one lets bad tokens fade out sooner.

    Example:
        log-ratio 0.5, tau 1 and advantage 1 give -2.6268890.
    """
    ratio_L, _ = ratio_and_log(inputs)
    tau_L = torch.where(inputs.advantages_L > 0, torch.full_like(ratio_L, tau_positive), tau_negative)
    gate_L = torch.sigmoid(tau_L * (ratio_L - 1.0)) * (4.0 / tau_L)
    return -inputs.advantages_L * gate_L, loss_stats(inputs)


def dro_loss(inputs: LossInputs, *, beta: float) -> tuple[Tensor, LossStats]:
    """-A log pi + beta / 2 (log r)^2: a policy gradient held near pi_old by a square instead of a clip.

    DRO (Richemond et al. 2024, arXiv:2405.19107): the gradient of its 1/2 (reward - value - beta log r)^2
    with respect to the policy, over beta, with A in place of reward - value; per token instead of per answer.
    """
    logprobs_L = at_least_float32(inputs.logprobs_L)
    return -inputs.advantages_L * logprobs_L + 0.5 * beta * log_ratio(inputs).square(), loss_stats(inputs)
