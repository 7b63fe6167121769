"""Advantages that also depend on the other groups of the optimizer step. Numpy only.

Every function takes and returns one array per group of the step. Rewards are finite float64[G]; groups may differ in
size. Shape legend: `G` answers of a group (or stretches of tokens with a reward-to-go of their own), `N` of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainer.algorithms.group_baselines import STD_EPS, FloatArray, mean_baseline

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from trainer.config.estimators import GpgScale


MIN_VARIANCE = 1e-8
"""Smallest variance that tokens are divided by, so that equal returns give zeros, not NaN."""


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
            'dict such as {"reward": total, "correct": .., "format": ..}, or use algorithm.advantage=grpo'
        )
    if missing := sorted(set(weights) - set(found)):
        raise ValueError(
            f"algorithm.gdpo_weights names the parts {missing}, which the reward function does not return; "
            f"it returns {found}"
        )
    return sorted(weights) if weights else found
