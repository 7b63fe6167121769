"""Advantages of all answers of one optimizer step, by the estimator that the configuration names.

Numpy only: the data side computes them without torch. The formulas are in `group_baselines.py` (one group at a time)
and `step_baselines.py` (the whole step); `trainer/config/estimators.py` says what each estimator needs.
Shape legend: `G` answers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from trainer.algorithms.group_baselines import (
    FloatArray,
    best_answer_margin,
    leave_one_out,
    length_weighted_baseline,
    mean_baseline,
)
from trainer.algorithms.step_baselines import (
    decoupled_rewards,
    group_policy_gradient,
    minus_group_mean,
    normalized_over_step,
)
from trainer.config.estimators import ESTIMATORS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """What an estimator sees of the judged answers to one prompt.

    Raises:
        ValueError: a reward is not finite, or shapes differ.

    Example:
        GroupRewards(rewards_G=np.array([1.0, 0.0]), lengths_G=np.array([12, 30]))
    """

    rewards_G: FloatArray
    """float64[G]: after shaping."""
    lengths_G: npt.NDArray[np.int64]
    """int64[G]: generated tokens."""
    parts_G: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])
    """Name -> float64[G]: the named parts of the rewards, before shaping."""

    def __post_init__(self) -> None:
        shape = self.rewards_G.shape
        if len(shape) != 1 or shape == (0,):
            raise ValueError(f"rewards of a group must have shape [G] with G >= 1, got {shape}")
        for name, values in {"lengths": self.lengths_G, **self.parts_G}.items():
            if values.shape != shape:
                raise ValueError(f"{name} of a group must have the shape of its rewards, {shape}, got {values.shape}")
        for name, values in {"rewards": self.rewards_G, **self.parts_G}.items():
            if not np.isfinite(values).all():
                raise ValueError(
                    f"{name} of a group must be finite, got {values.tolist()}; drop failed trajectories first"
                )


class AdvantageFn(Protocol):
    """The signature of an advantage estimator."""

    def __call__(self, groups: Sequence[GroupRewards], *, config: AlgorithmConfig) -> list[FloatArray]:
        """One float64[G] for each group, in the same order."""
        ...


def step_advantages(groups: Sequence[GroupRewards], *, config: AlgorithmConfig) -> list[FloatArray]:
    """One advantage per answer, for the groups of one optimizer step.

    Args:
        groups: judged answers only; may differ in size, and may be none.

    Returns:
        float64[G] for each group. They depend on other groups only where `ESTIMATORS[...].spans_step`.

    Raises:
        ValueError: the estimator compares answers and a group has fewer than 2, or lacks the reward parts it needs.

    Example:
        group = GroupRewards(rewards_G=np.array([1.0, 0, 0, 1]), lengths_G=np.full(4, 9))
        step_advantages([group], config=AlgorithmConfig(normalize_by_std=False))  # [[.5, -.5, -.5, .5]]
    """
    if not groups:
        return []
    if ESTIMATORS[config.advantage].needs_peers:
        _require_peers(groups, config.advantage)
    rewards = [group.rewards_G for group in groups]
    match config.advantage:
        case "grpo":
            return [mean_baseline(r, normalize_by_std=config.normalize_by_std) for r in rewards]
        case "rloo":
            return [leave_one_out(r) for r in rewards]
        case "reinforce":
            return [r.copy() for r in rewards]
        case "reinforce_pp":
            return normalized_over_step(rewards)
        case "reinforce_pp_baseline":
            return normalized_over_step(minus_group_mean(rewards))
        case "opo":
            return [length_weighted_baseline(g.rewards_G, g.lengths_G) for g in groups]
        case "gpg":
            return group_policy_gradient(rewards, scale=config.gpg_scale)
        case "pass_at_k":
            return [best_answer_margin(r, normalize_by_std=config.normalize_by_std) for r in rewards]
        case "gdpo":
            return decoupled_rewards([g.parts_G for g in groups], weights=config.gdpo_weights)
        case _:
            raise ValueError(f"algorithm.advantage must be one of {', '.join(ESTIMATORS)}, got {config.advantage!r}")


def _require_peers(groups: Sequence[GroupRewards], name: str) -> None:
    smallest = min(group.rewards_G.size for group in groups)
    if smallest < 2:
        raise ValueError(
            f"advantage {name!r} compares answers of one prompt and needs at least 2, got {smallest}; "
            "raise rollout.group_size or use algorithm.advantage=reinforce"
        )
