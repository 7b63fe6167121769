"""Rewards of single tokens, and what is still to come from each of them. Numpy only.

Shape legend: `T` tokens of a trajectory, context included; `K` turns of a trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from trainer.algorithms.group_baselines import FloatArray


def token_rewards(
    loss_mask_T: npt.ArrayLike, *, turn_rewards_K: npt.ArrayLike, turn_lengths_K: npt.ArrayLike, outcome: float
) -> FloatArray:
    """Each turn's reward at its last generated token, and the outcome's at the last one of all.

    Args:
        loss_mask_T: bool[T], True on generated tokens.
        turn_rewards_K: float[K]; a turn without a generated token must have 0.
        turn_lengths_K: int[K], all tokens of each turn; they sum up to T.

    Returns:
        float64[T], 0 outside `loss_mask_T`. Without a generated token there is nothing to reward: all zeros.

    Raises:
        ValueError: the lengths do not sum up to T, or a turn has a reward and no generated token.
    """
    mask_T, lengths_K = np.asarray(loss_mask_T, np.bool_), np.asarray(turn_lengths_K, np.int64)
    rewards_K, rewards_T = np.asarray(turn_rewards_K, np.float64), np.zeros(mask_T.shape)
    if lengths_K.sum() != mask_T.size or lengths_K.shape != rewards_K.shape:
        raise ValueError(
            f"{lengths_K.size} turns of {int(lengths_K.sum())} tokens with {rewards_K.size} rewards do not make up a "
            f"trajectory of {mask_T.size} tokens; give one length and one reward per turn"
        )
    stop = 0
    for turn, (length, reward) in enumerate(zip(lengths_K.tolist(), rewards_K.tolist(), strict=True)):
        start, stop = stop, stop + length
        generated = start + np.flatnonzero(mask_T[start:stop])
        if generated.size:
            rewards_T[generated[-1]] += reward
        elif reward != 0:
            raise ValueError(f"turn {turn} has reward {reward} and no generated token that could have earned it")
    if mask_T.any():
        rewards_T[np.flatnonzero(mask_T)[-1]] += outcome
    return rewards_T


def reward_to_go(rewards_T: npt.ArrayLike, loss_mask_T: npt.ArrayLike) -> FloatArray:
    """G_t = r_t + the rewards of all later tokens: what token t could still influence, not discounted.

    It is the return of REINFORCE (Williams 1992; Sutton & Barto 2018, section 13.3, with gamma 1).

    Args:
        rewards_T: float[T], 0 outside `loss_mask_T`.
        loss_mask_T: bool[T], True on generated tokens.

    Returns:
        float64[T], 0 outside `loss_mask_T`. Context tokens in between change nothing.

    Raises:
        ValueError: shapes differ, a reward is not finite, or a context token has one.

    Example:
        rewards [0, 2, 0, 0, 1] with context at index 2 give [3, 3, 0, 1, 1].
    """
    all_rewards_T, mask_T = np.asarray(rewards_T, np.float64), np.asarray(loss_mask_T, np.bool_)
    if all_rewards_T.ndim != 1 or all_rewards_T.shape != mask_T.shape:
        raise ValueError(
            f"rewards and loss mask must have one shape [T], got {all_rewards_T.shape} and {mask_T.shape}; "
            "give one entry per token"
        )
    if not np.isfinite(all_rewards_T).all():
        raise ValueError("rewards of tokens must be finite, got NaN or infinity; drop failed trajectories first")
    if all_rewards_T[~mask_T].any():
        first = int(np.flatnonzero(~mask_T & (all_rewards_T != 0))[0])
        raise ValueError(
            f"token {first} is context and has reward {all_rewards_T[first]}; put it on the last generated token before"
        )
    return np.where(mask_T, np.cumsum(all_rewards_T[::-1])[::-1], 0.0)
