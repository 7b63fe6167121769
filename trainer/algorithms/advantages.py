"""Advantages of a step's responses by every estimator, in numpy, so that the driver computes them without torch.

The function of an estimator has its name. It takes the groups of one optimizer step and, as keyword arguments, the keys
that `trainer.config.algorithm.ESTIMATORS` names for it; a user's own gets `algorithm.advantage_args`. It gives one
float64[G] per group. Shape legend: `G` responses of a group, `N` of the step, `T` tokens, `K` generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from trainer.config.algorithm import is_own, load_own, traits_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.algorithm import AlgorithmConfig, GpgScale


FloatArray = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to a standard deviation, so that equal rewards give zeros, not NaN."""
MIN_VARIANCE = 1e-8
"""Smallest variance that tokens are divided by, so that equal returns give zeros, not NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRewards:
    """What an estimator sees of the scored responses to one prompt.

    Estimators of the reward-to-go (`EstimatorTraits.reward_to_go`) see credit spans instead: each turn of each response
    is an entry with what is still to come from there, and gets a separate advantage.

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
    """Name -> float64[G]: the named parts of the rewards, before shaping; 0 where a response lacks one."""
    baseline: float | None = None
    """Reward of the greedy response, after shaping; None unless the estimator takes it."""

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


def step_advantages(groups: Sequence[GroupRewards], *, config: AlgorithmConfig) -> list[FloatArray]:
    """One advantage per response, for the groups of one optimizer step.

    Args:
        groups: scored responses only; may differ in size, and may be none.

    Returns:
        float64[G] for each group. They depend on other groups only where `EstimatorTraits.spans_step`.

    Raises:
        ConfigurationError: as `load_own`.
        ValueError: the estimator compares responses and a group has fewer than 2; a group lacks the reward parts or
            the baseline that it needs; or a user's estimator gave something else.

    Example:
        group = GroupRewards(rewards_G=np.array([1.0, 0, 0, 1]), lengths_G=np.full(4, 9))
        step_advantages([group], config=AlgorithmConfig(normalize_by_std=False))  # [[.5, -.5, -.5, .5]]
    """
    if not groups:
        return []
    name, traits = config.advantage_estimator, traits_of(config)
    smallest = min(group.rewards_G.size for group in groups)
    if traits.needs_peers and smallest < 2:
        raise ValueError(
            f"advantage {name!r} compares responses to one prompt and needs at least 2, got {smallest}; "
            "raise rollout.group_size or use algorithm.advantage_estimator=reinforce"
        )
    if config.uses_critic:
        raise ValueError(f"advantage {name!r} takes the values of a critic, got rewards alone; the learner finishes it")
    if is_own(name):
        return _own_advantages(groups, config)
    return globals()[name](groups, **{key: getattr(config, key) for key in traits.keys})


def _own_advantages(groups: Sequence[GroupRewards], config: AlgorithmConfig) -> list[FloatArray]:
    name = f"algorithm.advantage_estimator={config.advantage_estimator}"
    function = load_own(config.advantage_estimator, key="algorithm.advantage_estimator", args=config.advantage_args)
    given = function(groups, **config.advantage_args)
    expected = f"{name} must give a list of one array for each of {len(groups)} groups"
    if not isinstance(given, Sequence):
        raise ValueError(f"{expected}, got an object of type {type(given).__name__}")
    arrays = cast("Sequence[object]", given)
    if len(arrays) != len(groups):
        raise ValueError(f"{expected}, got {len(arrays)} of them")
    found: list[FloatArray] = []
    for one, group in zip(arrays, groups, strict=True):
        try:
            found.append(np.asarray(one, np.float64))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name} must give arrays of numbers, got a {type(one).__name__}: {error}") from error
        if found[-1].shape != group.rewards_G.shape:
            raise ValueError(
                f"{name} must give one advantage per response, shape {group.rewards_G.shape}, got {found[-1].shape}"
            )
        if not np.isfinite(found[-1]).all():
            raise ValueError(
                f"{name} must give finite advantages, got {found[-1].tolist()} for the rewards "
                f"{group.rewards_G.tolist()}; guard the division where all rewards are equal"
            )
    return found


def grpo(groups: Sequence[GroupRewards], *, normalize_by_std: bool) -> list[FloatArray]:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation: GRPO (DeepSeekMath, section 4.1).

    Without `normalize_by_std` it is r - mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3).

    Example:
        [1, 0, 0, 1] gives +-0.8660239, or +-0.5 without the division.
    """
    return [_over_std(_centred(g.rewards_G), g.rewards_G, when=normalize_by_std) for g in groups]


def rloo(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """r - mean of the others: RLOO (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

    Example:
        [1, 0, 0, 1] gives +-2/3.
    """
    return [r - (r.sum() - r) / (r.size - 1) for r in (g.rewards_G for g in groups)]


def reinforce(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """The reward itself, or what is still to come of it (Williams 1992)."""
    return [g.rewards_G.copy() for g in groups]


def zero(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """0 whatever the reward: only a teacher teaches."""
    return [np.zeros_like(g.rewards_G) for g in groups]


def opo(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """r - sum(length x r) / sum(length): OPO (Hao et al. 2025, arXiv:2505.23585, section 3).

    It is the baseline of least gradient variance if the squared gradient norm of a response grows with its length.
    Without any generated token in the group it is the plain mean.

    Example:
        rewards [1, 0, 0, 1] of lengths [2, 4, 6, 4] give [.625, -.375, -.375, .625].
    """
    weights = [g.lengths_G.astype(np.float64) if g.lengths_G.any() else None for g in groups]
    return [
        _centred(g.rewards_G) if w is None else g.rewards_G - w @ g.rewards_G / w.sum()
        for g, w in zip(groups, weights, strict=True)
    ]


def remax(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """r - reward of the greedy response to the same prompt: ReMax (Li et al. 2023, arXiv:2310.10505, algorithm 2).

    The baseline depends on the prompt and the policy alone, so it moves no expectation. G may be 1.

    Example:
        rewards [1, 0] with a greedy reward of 1 give [0, -1].
    """
    if any(g.baseline is None for g in groups):
        raise ValueError(
            "advantage 'remax' takes the reward of a greedy response off, got a group without one; "
            "roll out with a greedy baseline, or use algorithm.advantage_estimator=reinforce"
        )
    return [g.rewards_G - cast("float", g.baseline) for g in groups]


def pass_at_k(groups: Sequence[GroupRewards], *, normalize_by_std: bool) -> list[FloatArray]:
    """max of all - max of the others: pass@k with k = G (Tang et al. 2025, arXiv:2503.19595).

    The group is worth its best reward, so leaving a response out costs something only if it is the single best one:
    that gets best - second best, every other response 0. `normalize_by_std` divides as in GRPO.

    Example:
        [1, .5, 0, 0] gives [1.0444638, 0, 0, 0], or [.5, 0, 0, 0] without the division.
    """
    found: list[FloatArray] = []
    for r in (g.rewards_G for g in groups):
        second, best = np.sort(r)[-2:]
        found.append(_over_std(np.where(r == best, best - second, 0.0), r, when=normalize_by_std))
    return found


def reinforce_pp(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """(r - mean) / sqrt(max(variance, 1e-8)) over the step: REINFORCE++ (Hu et al. 2025, arXiv:2501.03262).

    Mean and variance are over all generated tokens of the step, as in the authors' OpenRLHF: a reward counts once for
    each of its tokens, and the variance is the biased one. Without any token in the step all advantages are 0.
    """
    return _normalized_over_tokens([g.rewards_G for g in groups], groups)


def reinforce_pp_baseline(groups: Sequence[GroupRewards]) -> list[FloatArray]:
    """`reinforce_pp` of the rewards minus the mean of their group: its form with a baseline."""
    return _normalized_over_tokens([_centred(g.rewards_G) for g in groups], groups)


def gpg(groups: Sequence[GroupRewards], *, gpg_scale: GpgScale) -> list[FloatArray]:
    """alpha x (r - mean of the group): GPG (Chu et al. 2025, arXiv:2504.02546, eq. 6 with F_norm = 1, and eq. 8).

    alpha makes up for the B responses of the step that carry no signal:
    "valid_groups": B / (B - M), with M responses in groups whose rewards are all equal (eq. 7, "accurate gradient
    estimation"). "nonzero_rewards": B / number of responses with a reward other than 0, as in the authors' released
    implementation; it is made for rewards of 0 and 1. An alpha without a denominator is 1.

    Example:
        one group [1, 0, 0, 1] gives [1, -1, -1, 1] with "nonzero_rewards" and half of it with "valid_groups".
    """
    rewards = [g.rewards_G for g in groups]
    match gpg_scale:
        case "nonzero_rewards":
            num_useful = sum(int(np.count_nonzero(r)) for r in rewards)
        case "valid_groups":
            num_useful = sum(r.size for r in rewards if r.min() < r.max())
        case _:
            raise ValueError(f"algorithm.gpg_scale must be nonzero_rewards or valid_groups, got {gpg_scale!r}")
    alpha = sum(r.size for r in rewards) / num_useful if num_useful else 1.0
    return [alpha * _centred(r) for r in rewards]


def gdpo(groups: Sequence[GroupRewards], *, gdpo_weights: Mapping[str, float]) -> list[FloatArray]:
    """Each part of the reward normalised within its group, weighted, summed, and the sums normalised over the step.

    GDPO (Liu et al. 2026, arXiv:2601.05242): the sum of normalised parts tells apart responses that GRPO's normalised
    sum would value alike. Over the step a response counts once, whatever its length; mean and unbiased standard
    deviation, and a step of a single response gives 0. A part that a response lacks counts as 0.

    Args:
        gdpo_weights: name -> factor; empty takes every part once. With names, the other parts are left out.

    Raises:
        ValueError: there are no parts, or no response of the step has a weighted one.
    """
    names = _part_names([g.parts_G for g in groups], gdpo_weights)
    sums: list[FloatArray] = []
    for group in groups:
        sum_G = np.zeros_like(group.rewards_G)
        for name in names:
            part_G = group.parts_G.get(name, np.zeros_like(sum_G))
            sum_G += gdpo_weights.get(name, 1.0) * _over_std(_centred(part_G), part_G)
        sums.append(sum_G)
    joined_N = np.concatenate(sums)
    centred_N = _centred(joined_N)
    return _split_like(_over_std(centred_N, joined_N, when=joined_N.size > 1), sums)


def _part_names(parts: Sequence[Mapping[str, FloatArray]], weights: Mapping[str, float]) -> Sequence[str]:
    found = sorted({name for parts_G in parts for name in parts_G})
    if not found:
        raise ValueError(
            "advantage 'gdpo' normalises the named parts of the reward, got none; let the reward function return a "
            'dict such as {"reward": total, "correct": .., "format": ..}, or use algorithm.advantage_estimator=grpo'
        )
    if missing := sorted(set(weights) - set(found)):
        raise ValueError(
            f"algorithm.gdpo_weights names the parts {missing}, which no response of the step has; "
            f"the reward function returns {found}"
        )
    return sorted(weights) if weights else found


def _centred(values: FloatArray) -> FloatArray:
    return values - values.mean()


def _over_std(values: FloatArray, spread: FloatArray, *, when: bool = True) -> FloatArray:
    """`values` / (unbiased standard deviation of `spread` + 1e-6)."""
    return values / (spread.std(ddof=1) + STD_EPS) if when else values


def _normalized_over_tokens(values: Sequence[FloatArray], groups: Sequence[GroupRewards]) -> list[FloatArray]:
    joined_N = np.concatenate(values)
    tokens_N = np.concatenate([g.lengths_G for g in groups]).astype(np.float64)
    num_tokens = tokens_N.sum()
    if num_tokens == 0:
        return [np.zeros_like(v) for v in values]
    centred_N = joined_N - tokens_N @ joined_N / num_tokens
    variance = tokens_N @ centred_N**2 / num_tokens
    return _split_like(centred_N / np.sqrt(max(variance, MIN_VARIANCE)), values)


def _split_like(joined_N: FloatArray, values: Sequence[FloatArray]) -> list[FloatArray]:
    return np.split(joined_N, np.cumsum([v.size for v in values])[:-1])


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
    mask_T, all_rewards_T = _per_token(loss_mask_T, rewards_T)
    return np.where(mask_T, np.cumsum(all_rewards_T[::-1])[::-1], 0.0)


def gae_advantages(
    rewards_T: npt.ArrayLike, values_T: npt.ArrayLike, loss_mask_T: npt.ArrayLike, *, gamma: float, lam: float
) -> tuple[FloatArray, FloatArray]:
    """A_t = delta_t + gamma lam A_next(t), with delta_t = r_t + gamma V_next(t) - V_t (Schulman et al. 2016, eq. 16).

    `next(t)` is the next *generated* token: context tokens of later turns are no actions, so they are neither
    discounted over nor bootstrapped from. After the last generated token, value and advantage are 0.

    Args:
        rewards_T: float[T], 0 outside `loss_mask_T`. A reward per turn is at the last token of the turn.
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
    mask_T, all_rewards_T, all_values_T = _per_token(loss_mask_T, rewards_T, values_T)
    values_K = all_values_T[mask_T]
    deltas_K = all_rewards_T[mask_T] + gamma * np.append(values_K, 0.0)[1:] - values_K
    sums: list[float] = []
    running, deltas = 0.0, cast("list[float]", deltas_K.tolist())
    for delta in reversed(deltas):  # a loop, because powers of the factor underflow
        running = delta + gamma * lam * running
        sums.append(running)
    advantages_K = np.array(sums[::-1], np.float64)
    advantages_T, returns_T = np.zeros(mask_T.shape), np.zeros(mask_T.shape)
    advantages_T[mask_T], returns_T[mask_T] = advantages_K, advantages_K + values_K
    return advantages_T, returns_T


def _per_token(
    loss_mask_T: npt.ArrayLike, *arrays: npt.ArrayLike
) -> tuple[npt.NDArray[np.bool_], *tuple[FloatArray, ...]]:
    """(mask, rewards, more), checked: one shape [T], finite on generated tokens, no reward on context."""
    mask_T, checked = np.asarray(loss_mask_T, np.bool_), [np.asarray(one, np.float64) for one in arrays]
    if mask_T.ndim != 1 or any(one.shape != mask_T.shape for one in checked):
        shapes = ", ".join(str(one.shape) for one in checked)
        raise ValueError(f"rewards, values and loss mask must have one shape [T], got {shapes} and {mask_T.shape}")
    if not all(np.isfinite(one[mask_T]).all() for one in checked):
        raise ValueError(
            "rewards and values of generated tokens must be finite, got NaN or infinity; drop failed trajectories first"
        )
    if (wrong := np.flatnonzero(~mask_T & (checked[0] != 0))).size:
        raise ValueError(
            f"token {wrong[0]} is context and has reward {checked[0][wrong[0]]}; put it on the last generated token "
            "before it"
        )
    return mask_T, *checked
