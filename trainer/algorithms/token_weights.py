"""The weight of each token in the loss, and the tokens that clip_cov and kl_cov select.

Both are computed once, over all sequences of a step, before the step is split over ranks and micro-batches. The loss is
then a plain sum of weight x token loss, which no split can change. Numpy only.

The denominator counts every loss token that enters the step, and every sequence that has one. A token that a
correction rejects later adds 0 to the sum and stays in the denominator: the weights of the others do not move, and how
many are rejected on which rank need not be known before the backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.algorithm import AggregationName


def loss_weights(
    num_loss_tokens: Sequence[int] | npt.NDArray[np.int64], kind: AggregationName, *, norm_tokens: int
) -> npt.NDArray[np.float64]:
    """Weight of every loss token of each sequence of one optimizer step.

    Args:
        num_loss_tokens: loss tokens of each of the step's N sequences, over all ranks and micro-batches.
        kind: "token_mean": 1 / all tokens (DAPO, eq. 12). "token_sum": 1. "seq_mean_token_mean": 1 / (sequences x own
            tokens) (GRPO). "seq_mean_token_sum": 1 / sequences. "seq_mean_token_sum_norm": 1 / (sequences x
            norm_tokens) (Dr. GRPO with its constant).
        norm_tokens: the constant of "seq_mean_token_sum_norm", >= 1; the others do not read it.

    Returns:
        float64[N]: one weight per sequence. Sequences without a loss token count for nothing and get weight 0, so that
        masking truncated responses does not shrink the others.

    Example:
        loss_weights([1, 3], "token_mean", norm_tokens=4)  # [.25, .25]
    """
    counts = np.asarray(num_loss_tokens, np.float64)
    if counts.ndim != 1 or (counts < 0).any():
        raise ValueError(f"num_loss_tokens must be one count >= 0 per sequence, got {counts.tolist()}")
    if norm_tokens < 1:
        raise ValueError(f"norm_tokens must be >= 1, got {norm_tokens}; use the longest response that is allowed")
    has_loss = counts > 0
    num_sequences, num_tokens = float(np.count_nonzero(has_loss)), float(counts.sum())
    weights = np.zeros_like(counts)
    if num_tokens == 0:
        return weights
    match kind:
        case "token_mean":
            weight = 1.0 / num_tokens
        case "token_sum":
            weight = 1.0
        case "seq_mean_token_sum":
            weight = 1.0 / num_sequences
        case "seq_mean_token_mean":
            weight = 1.0 / (num_sequences * counts[has_loss])
        case "seq_mean_token_sum_norm":
            weight = 1.0 / (num_sequences * norm_tokens)
        case _:
            raise ValueError(
                "algorithm.loss_aggregation must be token_mean, token_sum, seq_mean_token_sum, seq_mean_token_mean or "
                f"seq_mean_token_sum_norm, got {kind!r}"
            )
    weights[has_loss] = weight
    return weights


def token_covariances(logprobs_K: npt.ArrayLike, advantages_K: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """(log p - mean log p) (A - mean A) of every token (Cui et al. 2025, arXiv:2505.22617, section 4).

    Their mean is the covariance that drives the entropy down: large where a likely token is rewarded.

    Returns:
        float64[K]
    """
    logprobs, advantages = np.asarray(logprobs_K, np.float64), np.asarray(advantages_K, np.float64)
    if logprobs.size == 0:
        return np.zeros(0)
    return (logprobs - logprobs.mean()) * (advantages - advantages.mean())


def tie_break_draws(num_tokens: int, *, step: int, group_id: int, sample_index: int) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per loss token of a sample, which depends on nothing but the sample's name and the step.

    Returns:
        float64[num_tokens]
    """
    return np.random.default_rng((step, group_id, sample_index)).random(num_tokens)


def select_tokens(
    covariances_K: npt.NDArray[np.float64],
    draws_K: npt.NDArray[np.float64],
    *,
    cov_frac: float,
    cov_min: float | None = None,
    cov_max: float | None = None,
) -> npt.NDArray[np.bool_]:
    """The tokens that a loss with a covariance treats differently: `cov_frac` of all, at least one.

    With bounds (clip_cov) they are drawn at random from those between them, all of those if they are fewer. Without
    (kl_cov) they are those of largest covariance; the draws decide between equals.

    Returns:
        bool[K]

    Example:
        covariances [3, 9, 2, 0], cov_frac .25, cov_min 1, cov_max 5: one of the tokens 0 and 2.
    """
    selected_K = np.zeros(covariances_K.size, np.bool_)
    num_selected = max(1, int(cov_frac * covariances_K.size))
    if cov_min is not None and cov_max is not None:
        eligible = np.flatnonzero((covariances_K > cov_min) & (covariances_K < cov_max))
        order = eligible[np.argsort(draws_K[eligible], kind="stable")]
    else:
        order = np.lexsort((draws_K, -covariances_K))
    selected_K[order[:num_selected]] = True
    return selected_K
