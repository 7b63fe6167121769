"""Which tokens of a step Clip-Cov and KL-Cov hold back. Numpy only: chosen before the step is split.

The rule looks at all tokens of a step (two means and a rank), so a micro-batch cannot apply it alone: it would choose
other tokens for every split. The covariance is therefore taken with the log-probs recorded while sampling, which the
data side has for the whole step. The paper takes those of the policy being trained, which are the same at the first
step on fresh data; staleness makes them differ by what the policy learned since. Shape legend: `K` loss tokens of a
step, all samples end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from trainer.config.schema.algorithm import AlgorithmConfig

Floats = npt.NDArray[np.float64]


def token_covariances(logprobs_K: npt.ArrayLike, advantages_K: npt.ArrayLike) -> Floats:
    """(log p - mean log p) (A - mean A) of every token (Cui et al. 2025, arXiv:2505.22617, section 4).

    Their mean is the covariance that drives the entropy down: large where a likely token is rewarded.

    Returns:
        float64[K]
    """
    logprobs, advantages = np.asarray(logprobs_K, np.float64), np.asarray(advantages_K, np.float64)
    if logprobs.size == 0:
        return np.zeros(0)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def lottery(num_tokens: int, *, step: int, group_id: int, sample_index: int) -> Floats:
    """One number in [0, 1) per loss token of a sample, which depends on nothing but the sample's name and the step.

    Returns:
        float64[num_tokens]
    """
    return np.random.default_rng((step, group_id, sample_index)).random(num_tokens)


def select_tokens(covariances_K: Floats, lottery_K: Floats, *, config: AlgorithmConfig) -> npt.NDArray[np.bool_]:
    """The tokens that `config.loss` holds back: `cov_frac` of all, at least one.

    "clip_cov": drawn by lottery from those between `cov_min` and `cov_max`, all of them if they are fewer.
    "kl_cov": those of largest covariance; the lottery decides between equals.

    Returns:
        bool[K]

    Example:
        covariances [3, 9, 2, 0], clip_cov, cov_frac .25: one of the tokens 0 and 2.
    """
    num_tokens = covariances_K.size
    selected_K = np.zeros(num_tokens, np.bool_)
    if num_tokens == 0:
        return selected_K
    num_selected = max(1, int(config.cov_frac * num_tokens))
    match config.loss:
        case "clip_cov":
            eligible = np.flatnonzero((covariances_K > config.cov_min) & (covariances_K < config.cov_max))
            order = eligible[np.argsort(lottery_K[eligible], kind="stable")]
        case "kl_cov":
            order = np.lexsort((lottery_K, -covariances_K))
        case _:
            raise ValueError(f"algorithm.loss must be clip_cov or kl_cov to select tokens, got {config.loss!r}")
    selected_K[order[:num_selected]] = True
    return selected_K
