"""Advantages of all answers of one optimizer step, by the estimator that the configuration names.

Numpy only: the data side computes them without torch. The formulas are in `group_baselines.py` (one group at a time)
and `step_baselines.py` (the whole step); `trainer/config/estimators.py` says what each estimator needs.
Shape legend: `G` answers of a group.
"""

from __future__ import annotations

import math
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
    minus_greedy,
)
from trainer.algorithms.own_advantage import own_advantages
from trainer.algorithms.step_baselines import (
    decoupled_rewards,
    group_policy_gradient,
    minus_group_mean,
    normalized_over_tokens,
)
from trainer.config.estimators import ESTIMATORS, traits_of
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.config.schema.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """What an estimator sees of the judged answers to one prompt.

    Estimators of the reward-to-go (`ESTIMATORS[...].reward_to_go`) see stretches instead: each turn of each answer is
    an entry with what is still to come from there, and gets an advantage of its own.

    Raises:
        ValueError: a reward is not finite, or shapes differ.

    Example:
        GroupRewards(rewards_G=np.array([1.0, 0.0]), lengths_G=np.array([12, 30]))
    """

    rewards_G: FloatArray
    """float64[G]: after shaping; outcome and turns together."""
    lengths_G: npt.NDArray[np.int64]
    """int64[G]: generated tokens."""
    parts_G: Mapping[str, FloatArray] = field(default_factory=dict[str, FloatArray])
    """Name -> float64[G]: the named parts of the rewards, before shaping."""
    baseline: float | None = None
    """Reward of the greedy answer, after shaping; None unless the estimator takes it."""

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
        if self.baseline is not None and not math.isfinite(self.baseline):
            raise ValueError(f"baseline of a group must be finite, got {self.baseline}; fail the group instead")


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
        ValueError: the estimator compares answers and a group has fewer than 2, or a group lacks the reward parts or
            the baseline that it needs.

    Example:
        group = GroupRewards(rewards_G=np.array([1.0, 0, 0, 1]), lengths_G=np.full(4, 9))
        step_advantages([group], config=AlgorithmConfig(normalize_by_std=False))  # [[.5, -.5, -.5, .5]]
    """
    if not groups:
        return []
    if traits_of(config).needs_peers:
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
            return normalized_over_tokens(rewards, [g.lengths_G for g in groups])
        case "reinforce_pp_baseline":
            return normalized_over_tokens(minus_group_mean(rewards), [g.lengths_G for g in groups])
        case "remax":
            return [minus_greedy(g.rewards_G, baseline=_baseline(g)) for g in groups]
        case "opo":
            return [length_weighted_baseline(g.rewards_G, g.lengths_G) for g in groups]
        case "gpg":
            return group_policy_gradient(rewards, scale=config.gpg_scale)
        case "pass_at_k":
            return [best_answer_margin(r, normalize_by_std=config.normalize_by_std) for r in rewards]
        case "gae":
            raise ValueError("advantage 'gae' takes the values of a critic, got rewards alone; the learner finishes it")
        case "zero":
            return [np.zeros_like(r) for r in rewards]
        case "gdpo":
            return decoupled_rewards([g.parts_G for g in groups], weights=config.gdpo_weights)
        case path if is_own(path):
            return own_advantages(groups, path=path, args=config.advantage_args)
        case _:
            raise ValueError(f"algorithm.advantage must be one of {', '.join(ESTIMATORS)}, got {config.advantage!r}")


def _baseline(group: GroupRewards) -> float:
    if group.baseline is None:
        raise ValueError(
            "advantage 'remax' takes the reward of a greedy answer off, got a group without one; "
            "roll out with a greedy baseline, or use algorithm.advantage=reinforce"
        )
    return group.baseline


def _require_peers(groups: Sequence[GroupRewards], name: str) -> None:
    smallest = min(group.rewards_G.size for group in groups)
    if smallest < 2:
        raise ValueError(
            f"advantage {name!r} compares answers of one prompt and needs at least 2, got {smallest}; "
            "raise rollout.group_size or use algorithm.advantage=reinforce"
        )
