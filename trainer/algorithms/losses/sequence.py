"""Losses whose ratio belongs to a whole sequence: GSPO and GMPO.

The papers define one objective per sequence and take its mean over sequences. Here every token gets the objective of
its sequence as value, and only its own log-prob carries gradient, so that the losses compose with any aggregation and
with advantages that differ between the turns of a sequence: `seq_mean_token_mean` is the published objective,
`token_mean` weights each sequence by its length.

Every function gives (loss float32[L], stats). Shape legend: `L` loss tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.losses.clipped import clipped_surrogate
from trainer.algorithms.losses.inputs import (
    MAX_LOG_RATIO,
    LossInputs,
    LossStats,
    at_least_float32,
    log_ratio,
    loss_stats,
    sequence_mean,
)


def gspo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, LossStats]:
    """max(-A s, -A clip(s, 1 - low, 1 + high)) with s the geometric mean of the ratios of the sequence.

    GSPO-token (Zheng et al. 2025, arXiv:2507.18071, section 4.3): s_t = sg(s) pi_t / sg(pi_t), whose gradient with
    equal advantages is that of GSPO (section 4.1).

    Example:
        one sequence with log-ratios [.3, -.1, .2], advantage 1 and clip_high 4e-4 gives -1.0004 on every token.
    """
    ratio_L = _value_with_own_gradient(sequence_mean(log_ratio(inputs), inputs), inputs.logprobs_L)
    loss_L, low_L, high_L = clipped_surrogate(ratio_L, inputs.advantages_L, clip_low=clip_low, clip_high=clip_high)
    return loss_L, loss_stats(inputs, low=low_L, high=high_L)


def gmpo_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, LossStats]:
    """-A times the geometric mean of the clipped ratios of the sequence; the bounds are of the log-ratio.

    GMPO (Zhao et al. 2025, arXiv:2507.20673): each token's log-ratio is clipped to [-low, high], only upwards
    where A > 0 and only downwards where A < 0, and clipped tokens have no gradient.
    """
    log_ratio_L = log_ratio(inputs).detach()
    is_negative_L = inputs.advantages_L < 0
    is_low_L, is_high_L = is_negative_L & (log_ratio_L < -clip_low), ~is_negative_L & (log_ratio_L > clip_high)
    kept_L = log_ratio_L.masked_fill(is_low_L, -clip_low).masked_fill(is_high_L, clip_high)
    logprobs_L = inputs.logprobs_L
    open_L = torch.where(is_low_L | is_high_L, logprobs_L.detach(), logprobs_L)
    loss_L = -inputs.advantages_L * _value_with_own_gradient(sequence_mean(kept_L, inputs), open_L)
    return loss_L, loss_stats(inputs, low=is_low_L, high=is_high_L)


def _value_with_own_gradient(log_value_L: Tensor, logprobs_L: Tensor) -> Tensor:
    """exp(log_value) as value, and as derivative by the token's own log-prob."""
    logprobs_L = at_least_float32(logprobs_L)
    value_L = log_value_L.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return value_L * (logprobs_L - logprobs_L.detach()).exp()
