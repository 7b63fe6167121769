"""Advantages of one group of answers to the same prompt. Numpy only: the data side computes them without torch.

Shape legend: `G` answers of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trainer.config.schema.algorithm import AlgorithmConfig

STD_EPS = 1e-6
"""Added to the standard deviation, so that a group of equal rewards gives zeros, not NaN."""


def group_advantages(rewards_G: npt.ArrayLike, *, config: AlgorithmConfig) -> npt.NDArray[np.float64]:
    """Turn the rewards of one group into one advantage per answer.

    Args:
        rewards_G: finite rewards, float[G].

    Returns:
        float64[G].
        "grpo": (r - mean) / (std + 1e-6) with the unbiased standard deviation (DeepSeekMath, eq. 1 of section 4.1), or
        r - mean without `normalize_by_std` (Dr. GRPO). "rloo": r - mean of the others (Ahmadian et al. 2024, eq. 8).
        "reinforce": r.

    Raises:
        ValueError: a reward is not finite, the shape is not [G], or the estimator needs more answers than there are.

    Example:
        group_advantages([1, 0, 0, 1], config=AlgorithmConfig(normalize_by_std=False))  # [.5, -.5, -.5, .5]
    """
    rewards = np.asarray(rewards_G, np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards of a group must have shape [G] with G >= 1, got {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards of a group must be finite, got {rewards.tolist()}; drop failed trajectories first")
    match config.advantage:
        case "grpo":
            _require_peers(rewards, "grpo")
            centred = rewards - rewards.mean()
            return centred / (rewards.std(ddof=1) + STD_EPS) if config.normalize_by_std else centred
        case "rloo":
            _require_peers(rewards, "rloo")
            num_others = rewards.size - 1
            return rewards - (rewards.sum() - rewards) / num_others
        case "reinforce":
            return rewards.copy()
        case _:
            raise ValueError(f"algorithm.advantage must be grpo, rloo or reinforce, got {config.advantage!r}")


def _require_peers(rewards: npt.NDArray[np.float64], name: str) -> None:
    if rewards.size < 2:
        raise ValueError(
            f"advantage {name!r} compares answers of one prompt and needs at least 2, got {rewards.size}; "
            "raise rollout.group_size or use algorithm.advantage=reinforce"
        )
