"""The loss of a critic. Shape legend: `L` tokens with a value."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.losses.inputs import at_least_float32


def value_loss(
    values_L: Tensor, old_values_L: Tensor, returns_L: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2): the critic may not gain by leaving its old value.

    PPO with value clipping (Schulman et al. 2017, as released in baselines; Huang et al. 2022, "The 37 implementation
    details", 9).

    Args:
        values_L: of the critic being trained, float32[L], with gradient.
        old_values_L: when the advantages were computed, float32[L].
        clip: c > 0, or None for the plain square.

    Returns:
        (loss float32[L], where the clip cut the gradient bool[L]).

    Example:
        value .5, old value .2, return 1 and clip .2 give .18.
    """
    values_L, old_values_L = at_least_float32(values_L), at_least_float32(old_values_L)
    plain_L = 0.5 * (values_L - returns_L).square()
    if clip is None:
        return plain_L, torch.zeros_like(plain_L, dtype=torch.bool)
    near_L = torch.clamp(values_L, min=old_values_L - clip, max=old_values_L + clip)
    clipped_L = 0.5 * (near_L - returns_L).square()
    return torch.maximum(plain_L, clipped_L), clipped_L > plain_L
