"""Advantages of a step's trajectories by every estimator; pure numpy, so that the driver computes them without torch.

`trainer/config/algorithm.py` has what each estimator reads and needs. Shape legend: `G` answers of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from trainer.config.algorithm import ESTIMATORS, traits_of
from trainer.config.own_function import is_own, load_own

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.config.algorithm import AlgorithmConfig, GpgScale


FloatArray = npt.NDArray[np.float64]


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


STD_EPS = 1e-6
"""Added to a standard deviation, so that equal rewards give zeros, not NaN."""
MIN_VARIANCE = 1e-8
"""Smallest variance that tokens are divided by, so that equal returns give zeros, not NaN."""


def mean_baseline(rewards_G: FloatArray, *, normalize_by_std: bool) -> FloatArray:
    """(r - mean) / (std + 1e-6) with the unbiased standard deviation: GRPO (DeepSeekMath, section 4.1).

    Without `normalize_by_std` it is r - mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783, section 3).

    Example:
        [1, 0, 0, 1] gives +-0.8660239, or +-0.5 without the division.
    """
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std(ddof=1) + STD_EPS) if normalize_by_std else centred_G


def leave_one_out(rewards_G: FloatArray) -> FloatArray:
    """r - mean of the others: RLOO (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

    Example:
        [1, 0, 0, 1] gives +-2/3.
    """
    return rewards_G - (rewards_G.sum() - rewards_G) / (rewards_G.size - 1)


def length_weighted_baseline(rewards_G: FloatArray, lengths_G: npt.NDArray[np.int64]) -> FloatArray:
    """r - sum(length x r) / sum(length): OPO (Hao et al. 2025, arXiv:2505.23585, section 3).

    It is the baseline of least gradient variance if the squared gradient norm of an answer grows with its length.

    Args:
        lengths_G: generated tokens of each answer, int64[G]. If no answer has one, the baseline is the plain mean.

    Example:
        rewards [1, 0, 0, 1] of lengths [2, 4, 6, 4] give [.625, -.375, -.375, .625].
    """
    weights_G = lengths_G.astype(np.float64)
    if weights_G.sum() == 0:
        return rewards_G - rewards_G.mean()
    return rewards_G - weights_G @ rewards_G / weights_G.sum()


def greedy_baseline(rewards_G: FloatArray, *, baseline: float) -> FloatArray:
    """r - reward of the greedy answer to the same prompt: ReMax (Li et al. 2023, arXiv:2310.10505, algorithm 2).

    The baseline depends on the prompt and the policy alone, so it moves no expectation. G may be 1.

    Example:
        rewards [1, 0] with a greedy reward of 1 give [0, -1].
    """
    return rewards_G - baseline


def pass_at_k_advantage(rewards_G: FloatArray, *, normalize_by_std: bool) -> FloatArray:
    """max of all - max of the others: pass@k with k = G (Tang et al. 2025, arXiv:2503.19595).

    The group is worth its best reward, so leaving an answer out costs something only if it is the single best one:
    that gets best - second best, every other answer 0. `normalize_by_std` divides as in GRPO.

    Example:
        [1, .5, 0, 0] gives [1.0444638, 0, 0, 0], or [.5, 0, 0, 0] without the division.
    """
    second, best = np.sort(rewards_G)[-2:]
    margin_G = np.where(rewards_G == best, best - second, 0.0)
    return margin_G / (rewards_G.std(ddof=1) + STD_EPS) if normalize_by_std else margin_G


def normalized_over_tokens(values: Sequence[FloatArray], lengths: Sequence[npt.NDArray[np.int64]]) -> list[FloatArray]:
    """(a - mean) / sqrt(max(variance, 1e-8)), mean and variance over all generated tokens of the step.

    REINFORCE++ if the values are returns; its form with a baseline if they are rewards minus the mean of their group
    (Hu et al. 2025, arXiv:2501.03262, global advantage normalization). As in the authors' OpenRLHF a value counts once
    for each of its tokens, and the variance is the biased one.

    Args:
        lengths: generated tokens of each value, int64[G] per group. Without any token in the step all values give 0.
    """
    joined_N, tokens_N = np.concatenate(values), np.concatenate(lengths).astype(np.float64)
    num_tokens = tokens_N.sum()
    if num_tokens == 0:
        return [np.zeros_like(v) for v in values]
    centred_N = joined_N - tokens_N @ joined_N / num_tokens
    variance = tokens_N @ centred_N**2 / num_tokens
    return _split_like(centred_N / np.sqrt(max(variance, MIN_VARIANCE)), values)


def normalized_over_step(values: Sequence[FloatArray]) -> list[FloatArray]:
    """(a - mean) / (std + 1e-6), mean and unbiased standard deviation over all answers of the step.

    An answer counts once, whatever its length. A step of a single answer has no spread and gives 0.
    """
    joined_N = np.concatenate(values)
    centred_N = joined_N - joined_N.mean()
    if joined_N.size > 1:
        centred_N = centred_N / (joined_N.std(ddof=1) + STD_EPS)
    return _split_like(centred_N, values)


def _split_like(joined_N: FloatArray, values: Sequence[FloatArray]) -> list[FloatArray]:
    return np.split(joined_N, np.cumsum([v.size for v in values])[:-1])


def minus_group_mean(rewards: Sequence[FloatArray]) -> list[FloatArray]:
    """r - mean of the group, for every group."""
    return [mean_baseline(rewards_G, normalize_by_std=False) for rewards_G in rewards]


def group_policy_gradient(rewards: Sequence[FloatArray], *, scale: GpgScale) -> list[FloatArray]:
    """alpha x (r - mean of the group): GPG (Chu et al. 2025, arXiv:2504.02546, eq. 6 with F_norm = 1, and eq. 8).

    alpha makes up for the B answers of the step that carry no signal:
    "valid_groups": B / (B - M), with M answers in groups whose rewards are all equal (eq. 7, "accurate gradient
    estimation"). "nonzero_rewards": B / number of answers with a reward other than 0, as in the authors' released
    implementation; it is made for rewards of 0 and 1. An alpha without a denominator is 1.

    Example:
        one group [1, 0, 0, 1] gives [1, -1, -1, 1] with "nonzero_rewards" and half of it with "valid_groups".
    """
    num_answers = sum(rewards_G.size for rewards_G in rewards)
    match scale:
        case "nonzero_rewards":
            num_useful = sum(int(np.count_nonzero(rewards_G)) for rewards_G in rewards)
        case "valid_groups":
            num_useful = sum(rewards_G.size for rewards_G in rewards if rewards_G.min() < rewards_G.max())
        case _:
            raise ValueError(f"algorithm.gpg_scale must be nonzero_rewards or valid_groups, got {scale!r}")
    alpha = num_answers / num_useful if num_useful else 1.0
    return [alpha * centred_G for centred_G in minus_group_mean(rewards)]


def decoupled_rewards(parts: Sequence[Mapping[str, FloatArray]], *, weights: Mapping[str, float]) -> list[FloatArray]:
    """Each part of the reward normalised within its group, weighted, summed, and the sums normalised over the step.

    GDPO (Liu et al. 2026, arXiv:2601.05242): the sum of normalised parts tells apart answers that GRPO's normalised sum
    would value alike.

    Args:
        parts: of each group: name of the part -> float64[G].
        weights: name -> factor; empty takes every part once. With names, the other parts are left out.

    Raises:
        ValueError: there are no parts, groups have different ones, or a weighted one is missing.
    """
    names = _part_names(parts, weights)
    sums: list[FloatArray] = []
    for parts_G in parts:
        sum_G = np.zeros_like(parts_G[names[0]])
        for name in names:
            sum_G += weights.get(name, 1.0) * mean_baseline(parts_G[name], normalize_by_std=True)
        sums.append(sum_G)
    return normalized_over_step(sums)


def _part_names(parts: Sequence[Mapping[str, FloatArray]], weights: Mapping[str, float]) -> Sequence[str]:
    found = sorted(parts[0])
    for parts_G in parts:
        if sorted(parts_G) != found:
            raise ValueError(
                f"advantage 'gdpo' needs the same reward parts for every answer, got {found} and {sorted(parts_G)}; "
                "let the reward function return every part for every answer"
            )
    if not found:
        raise ValueError(
            "advantage 'gdpo' normalises the named parts of the reward, got none; let the reward function return a "
            'dict such as {"reward": total, "correct": .., "format": ..}, or use algorithm.advantage_estimator=grpo'
        )
    if missing := sorted(set(weights) - set(found)):
        raise ValueError(
            f"algorithm.gdpo_weights names the parts {missing}, which the reward function does not return; "
            f"it returns {found}"
        )
    return sorted(weights) if weights else found


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
        _require_peers(groups, config.advantage_estimator)
    rewards = [group.rewards_G for group in groups]
    match config.advantage_estimator:
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
            return [greedy_baseline(g.rewards_G, baseline=_baseline(g)) for g in groups]
        case "opo":
            return [length_weighted_baseline(g.rewards_G, g.lengths_G) for g in groups]
        case "gpg":
            return group_policy_gradient(rewards, scale=config.gpg_scale)
        case "pass_at_k":
            return [pass_at_k_advantage(r, normalize_by_std=config.normalize_by_std) for r in rewards]
        case "gae":
            raise ValueError("advantage 'gae' takes the values of a critic, got rewards alone; the learner finishes it")
        case "zero":
            return [np.zeros_like(r) for r in rewards]
        case "gdpo":
            return decoupled_rewards([g.parts_G for g in groups], weights=config.gdpo_weights)
        case name if is_own(name):
            return _own_advantages(groups, config)
        case _:
            raise ValueError(
                f"algorithm.advantage_estimator must be one of {', '.join(ESTIMATORS)}, "
                f"got {config.advantage_estimator!r}"
            )


def _own_advantages(groups: Sequence[GroupRewards], config: AlgorithmConfig) -> list[FloatArray]:
    """What the user's estimator gives, called as `estimator(groups, **args)`: one finite float[G] per group, in order.

    Raises:
        ConfigurationError: as `load_own`.
        ValueError: it gave something else; the message names it.
    """
    key, path, args = "algorithm.advantage_estimator", config.advantage_estimator, config.advantage_args
    given = load_own(path, key=key, args=args)(groups, **args)
    expected = f"{key}={path} must give a list of one array for each of {len(groups)} groups"
    if not isinstance(given, Sequence):
        raise ValueError(f"{expected}, got an object of type {type(given).__name__}")
    arrays = cast("Sequence[object]", given)
    if len(arrays) != len(groups):
        raise ValueError(f"{expected}, got {len(arrays)} of them")
    return [_checked(one, group, name=f"{key}={path}") for one, group in zip(arrays, groups, strict=True)]


def _checked(given: object, group: GroupRewards, *, name: str) -> FloatArray:
    try:
        advantages_G = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must give arrays of numbers, got a {type(given).__name__}: {error}") from error
    if advantages_G.shape != group.rewards_G.shape:
        raise ValueError(
            f"{name} must give one advantage per answer, shape {group.rewards_G.shape}, got {advantages_G.shape}"
        )
    if not np.isfinite(advantages_G).all():
        raise ValueError(
            f"{name} must give finite advantages, got {advantages_G.tolist()} for the rewards "
            f"{group.rewards_G.tolist()}; guard the division where all rewards are equal"
        )
    return advantages_G


def _baseline(group: GroupRewards) -> float:
    if group.baseline is None:
        raise ValueError(
            "advantage 'remax' takes the reward of a greedy answer off, got a group without one; "
            "roll out with a greedy baseline, or use algorithm.advantage_estimator=reinforce"
        )
    return group.baseline


def _require_peers(groups: Sequence[GroupRewards], name: str) -> None:
    smallest = min(group.rewards_G.size for group in groups)
    if smallest < 2:
        raise ValueError(
            f"advantage {name!r} compares answers of one prompt and needs at least 2, got {smallest}; "
            "raise rollout.group_size or use algorithm.advantage_estimator=reinforce"
        )


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
    mask_T, all_rewards_T, all_values_T = _per_token(loss_mask_T, rewards_T, values_T)
    rewards_K, values_K = all_rewards_T[mask_T], all_values_T[mask_T]
    next_values_K = np.append(values_K, 0.0)[1:]
    advantages_K = _discounted_sums(rewards_K + gamma * next_values_K - values_K, gamma * lam)
    advantages_T, returns_T = np.zeros(mask_T.shape), np.zeros(mask_T.shape)
    advantages_T[mask_T] = advantages_K
    returns_T[mask_T] = advantages_K + values_K
    return advantages_T, returns_T


def _per_token(loss_mask_T: npt.ArrayLike, rewards_T: npt.ArrayLike, *more: npt.ArrayLike) -> tuple[Any, ...]:
    """(mask, rewards, more), checked: one shape [T], finite on generated tokens, no reward on context."""
    mask_T, arrays = np.asarray(loss_mask_T, np.bool_), [np.asarray(one, np.float64) for one in (rewards_T, *more)]
    if mask_T.ndim != 1 or any(one.shape != mask_T.shape for one in arrays):
        shapes = ", ".join(str(one.shape) for one in arrays)
        raise ValueError(f"rewards, values and loss mask must have one shape [T], got {shapes} and {mask_T.shape}")
    if not all(np.isfinite(one[mask_T]).all() for one in arrays):
        raise ValueError(
            "rewards and values of generated tokens must be finite, got NaN or infinity; drop failed trajectories first"
        )
    if (wrong := np.flatnonzero(~mask_T & (arrays[0] != 0))).size:
        raise ValueError(
            f"token {wrong[0]} is context and has reward {arrays[0][wrong[0]]}; put it on the last generated token "
            "before it"
        )
    return mask_T, *arrays


def _discounted_sums(deltas_K: FloatArray, factor: float) -> FloatArray:
    """sum over l >= 0 of factor^l delta_{k + l}. A loop, because powers of the factor would underflow."""
    sums: list[float] = []
    running = 0.0
    for delta in reversed(deltas_K.tolist()):
        running = delta + factor * running
        sums.append(running)
    return np.array(sums[::-1], np.float64)


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
    mask_T, all_rewards_T = _per_token(loss_mask_T, rewards_T)
    return np.where(mask_T, np.cumsum(all_rewards_T[::-1])[::-1], 0.0)
