"""Policy losses, one value per token: pure functions of tensors, in float32.

They are not averaged here: the caller sums weight x loss (see `aggregate.py`). Shape legend: `T` loss tokens.
To add a loss: write a function with the signature of `reinforce_loss`, name it in `policy_loss` and in the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from trainer.config.schema.algorithm import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before `exp`: e^20 is far outside any clip range but still finite in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossStats:
    """Sums over tokens of a loss call, as 0-d tensors without gradient; divide by the number of tokens for means."""

    ratio_sum: Tensor
    """Of pi / pi_behaviour."""
    ratio_max: Tensor
    """0 if there is no token."""
    kl_sum: Tensor
    """Of (ratio - 1) - log ratio, the k3 estimate of KL(behaviour || policy) (Schulman 2020); never negative."""
    clipped_low: Tensor
    """Tokens whose gradient the lower bound cut (advantage < 0)."""
    clipped_high: Tensor
    """Tokens whose gradient the upper bound cut (advantage > 0)."""
    clipped_dual: Tensor
    """Tokens whose gradient the dual clip cut (advantage < 0)."""


def policy_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, config: AlgorithmConfig
) -> tuple[Tensor, LossStats]:
    """The loss that `config.loss` names."""
    match config.loss:
        case "ppo_clip":
            return ppo_clip_loss(
                logprobs_T,
                old_logprobs_T,
                advantages_T,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                clip_dual=config.clip_dual,
            )
        case "reinforce":
            return reinforce_loss(logprobs_T, old_logprobs_T, advantages_T, importance_ratio=True)
        case _:
            raise ValueError(f"algorithm.loss must be ppo_clip or reinforce, got {config.loss!r}")


def ppo_clip_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> tuple[Tensor, LossStats]:
    """Clipped surrogate: max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0.

    PPO (Schulman et al. 2017, eq. 7); separate bounds as in DAPO (Yu et al. 2025, eq. 10); dual clip of Ye et al.
    (2020, eq. 5).

    Args:
        logprobs_T: of the policy being trained, float32[T], with gradient.
        old_logprobs_T: of the policy that sampled, float32[T].
        clip_dual: c > 1, or None for no dual clip.

    Returns:
        (loss float32[T], stats).

    Example:
        log-ratio 0.5 and advantage 1 with clip_high 0.28 give -1.28.
    """
    ratio_T, log_ratio_T = _ratio(logprobs_T, old_logprobs_T)
    plain_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_T = torch.maximum(plain_T, clipped_T)
    is_negative_T = advantages_T < 0
    is_cut_T = clipped_T > plain_T
    is_dual_T = torch.zeros_like(is_negative_T)
    if clip_dual is not None:
        bound_T = -advantages_T * clip_dual
        is_dual_T = is_negative_T & (bound_T < loss_T)
        loss_T = torch.where(is_negative_T, torch.minimum(loss_T, bound_T), loss_T)
    stats = _stats(ratio_T, log_ratio_T, low=is_cut_T & is_negative_T, high=is_cut_T & ~is_negative_T, dual=is_dual_T)
    return loss_T, stats


def reinforce_loss(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, *, importance_ratio: bool
) -> tuple[Tensor, LossStats]:
    """Policy gradient: -A log pi, or -A pi / pi_behaviour, which corrects for the age of the sample.

    Both have the same gradient where the two policies agree.

    Returns:
        (loss float32[T], stats).
    """
    ratio_T, log_ratio_T = _ratio(logprobs_T, old_logprobs_T)
    loss_T = -advantages_T * (ratio_T if importance_ratio else logprobs_T.float())
    never_T = torch.zeros_like(ratio_T, dtype=torch.bool)
    return loss_T, _stats(ratio_T, log_ratio_T, low=never_T, high=never_T, dual=never_T)


def _ratio(logprobs_T: Tensor, old_logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    # float32: a bfloat16 log-prob near -10 is rounded by 0.03, which is a 3% error of the ratio.
    log_ratio_T = (logprobs_T.float() - old_logprobs_T.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_T.exp(), log_ratio_T


def _stats(ratio_T: Tensor, log_ratio_T: Tensor, *, low: Tensor, high: Tensor, dual: Tensor) -> LossStats:
    ratio_T, log_ratio_T = ratio_T.detach(), log_ratio_T.detach()
    # The k3 estimate is >= 0 by convexity; float32 rounding can make it -1e-8 where the policies agree.
    kl_T = (ratio_T - 1.0 - log_ratio_T).clamp_min(0.0)
    return LossStats(
        ratio_sum=ratio_T.sum(),
        ratio_max=ratio_T.max() if ratio_T.numel() > 0 else ratio_T.new_zeros(()),
        kl_sum=kl_T.sum(),
        clipped_low=low.sum().float(),
        clipped_high=high.sum().float(),
        clipped_dual=dual.sum().float(),
    )
