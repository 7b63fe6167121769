"""Advantages from the rewards of one group alone: each answer against the others to the same prompt. Numpy only.

Every function takes finite float64[G], with G >= 2 unless it says otherwise, and returns float64[G].
Shape legend: `G` answers of a group.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to a standard deviation, so that equal rewards give zeros, not NaN."""


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


def minus_greedy(rewards_G: FloatArray, *, baseline: float) -> FloatArray:
    """r - reward of the greedy answer to the same prompt: ReMax (Li et al. 2023, arXiv:2310.10505, algorithm 2).

    The baseline depends on the prompt and the policy alone, so it moves no expectation. G may be 1.

    Example:
        rewards [1, 0] with a greedy reward of 1 give [0, -1].
    """
    return rewards_G - baseline


def best_answer_margin(rewards_G: FloatArray, *, normalize_by_std: bool) -> FloatArray:
    """max of all - max of the others: pass@k with k = G (Tang et al. 2025, arXiv:2503.19595).

    The group is worth its best reward, so leaving an answer out costs something only if it is the single best one:
    that gets best - second best, every other answer 0. `normalize_by_std` divides as in GRPO.

    Example:
        [1, .5, 0, 0] gives [1.0444638, 0, 0, 0], or [.5, 0, 0, 0] without the division.
    """
    second, best = np.sort(rewards_G)[-2:]
    margin_G = np.where(rewards_G == best, best - second, 0.0)
    return margin_G / (rewards_G.std(ddof=1) + STD_EPS) if normalize_by_std else margin_G
