"""Generalised advantage estimation over the tokens of one trajectory. Numpy only.

Shape legend: `T` tokens of a trajectory, context included; `K` generated tokens among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from trainer.algorithms.group_baselines import FloatArray


def gae_advantages(
    rewards_T: npt.ArrayLike, values_T: npt.ArrayLike, loss_mask_T: npt.ArrayLike, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """A_t = delta_t + gamma lam A_next(t), with delta_t = r_t + gamma V_next(t) - V_t (Schulman et al. 2016, eq. 16).

    `next(t)` is the next *generated* token: context tokens of later turns are no actions, so they are neither
    discounted over nor bootstrapped from. After the last generated token, value and advantage are 0.

    Args:
        rewards_T: float[T], 0 outside `loss_mask_T`. A reward per turn stands at the last token of the turn.
        values_T: critic's value of the state in which token t is chosen, float[T]; ignored outside `loss_mask_T`.
        loss_mask_T: bool[T], True on generated tokens.
        gamma: discount per generated token.
        lam: lambda; 0 is the one-step error, 1 the discounted return minus the value.

    Returns:
        (advantages, returns = advantages + values), float64[T] each, 0 outside `loss_mask_T`.

    Raises:
        ValueError: shapes differ, a value is not finite, or a context token has a reward, which no token would get.

    Example:
        rewards [0, 0, 0, 1], values [.1, .2, .3, .4], gamma 1, lam .95 give [.799675, .7365, .67, .6].
    """
    mask_T = np.asarray(loss_mask_T, np.bool_)
    all_rewards_T, all_values_T = np.asarray(rewards_T, np.float64), np.asarray(values_T, np.float64)
    if mask_T.ndim != 1 or not mask_T.shape == all_rewards_T.shape == all_values_T.shape:
        raise ValueError(
            "rewards, values and loss mask must have one shape [T], got "
            f"{all_rewards_T.shape}, {all_values_T.shape} and {mask_T.shape}"
        )
    if all_rewards_T[~mask_T].any():
        first = int(np.flatnonzero(~mask_T & (all_rewards_T != 0))[0])
        raise ValueError(
            f"token {first} is context and has reward {all_rewards_T[first]}; put it on the last generated token before"
        )
    rewards_K, values_K = all_rewards_T[mask_T], all_values_T[mask_T]
    if not (np.isfinite(rewards_K).all() and np.isfinite(values_K).all()):
        raise ValueError("rewards and values of generated tokens must be finite, got NaN or infinity")
    next_values_K = np.append(values_K, 0.0)[1:]
    advantages_K = _discounted_sums(rewards_K + gamma * next_values_K - values_K, gamma * lam)
    advantages_T, returns_T = np.zeros(mask_T.shape), np.zeros(mask_T.shape)
    advantages_T[mask_T] = advantages_K
    returns_T[mask_T] = advantages_K + values_K
    return advantages_T, returns_T


def _discounted_sums(deltas_K: FloatArray, factor: float) -> FloatArray:
    """sum over l >= 0 of factor^l delta_{k + l}. A loop, because powers of the factor would underflow."""
    sums: list[float] = []
    running = 0.0
    for delta in reversed(deltas_K.tolist()):
        running = delta + factor * running
        sums.append(running)
    return np.array(sums[::-1], np.float64)
