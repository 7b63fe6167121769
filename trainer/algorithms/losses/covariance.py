"""Clip-Cov and KL-Cov: hold back the few tokens whose update lowers the entropy most.

Which tokens these are depends on all tokens of a step, so they are chosen once, before the step is split
(`trainer.algorithms.selection`). Shape legend: `L` loss tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.losses.clipped import clipped_surrogate
from trainer.algorithms.losses.inputs import LossInputs, LossStats, loss_stats, ratio_and_log


def clip_cov_loss(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, LossStats]:
    """The PPO clip loss, and 0 on selected tokens: Clip-Cov of Cui et al. (2025, arXiv:2505.22617, section 4).

    Raises:
        ValueError: no selection was given.
    """
    selected_L = _selection(inputs)
    ratio_L, _ = ratio_and_log(inputs)
    loss_L, low_L, high_L = clipped_surrogate(ratio_L, inputs.advantages_L, clip_low=clip_low, clip_high=clip_high)
    is_negative_L = inputs.advantages_L < 0
    stats = loss_stats(inputs, low=low_L | (selected_L & is_negative_L), high=high_L | (selected_L & ~is_negative_L))
    return loss_L.masked_fill(selected_L, 0.0), stats


def kl_cov_loss(inputs: LossInputs, *, kl_coef: float) -> tuple[Tensor, LossStats]:
    """-A r, and + kl_coef |log r| on selected tokens: KL-Cov of Cui et al. (2025, arXiv:2505.22617, section 4).

    The distance |log r| stands for KL(pi_old || pi) as in the authors' implementation. It has no gradient where the
    policies agree: the penalty holds a token near the policy that sampled it, it does not stop the first step away.

    Raises:
        ValueError: no selection was given.
    """
    selected_L = _selection(inputs)
    ratio_L, log_ratio_L = ratio_and_log(inputs)
    penalty_L = torch.where(selected_L, kl_coef * log_ratio_L.abs(), 0.0)
    return -inputs.advantages_L * ratio_L + penalty_L, loss_stats(inputs)


def _selection(inputs: LossInputs) -> Tensor:
    if inputs.selected_L is None:
        raise ValueError(
            "LossInputs.selected_L is None; clip_cov and kl_cov need the tokens that "
            "trainer.algorithms.selection.select_tokens chose over the whole step"
        )
    return inputs.selected_L
