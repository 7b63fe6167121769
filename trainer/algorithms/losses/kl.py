"""Estimators of KL(policy || other) from one sampled token, for a penalty in the loss.

Value and gradient of an estimator are two choices: k1 and k3 are unbiased as values, but of the gradients only that of
k2 is that of the KL when tokens are drawn from the policy. The straight-through forms take the value of one and the
gradient of k2 (Tang and Munos 2025, arXiv:2506.09477). Shape legend: `L` loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainer.algorithms.losses.inputs import MAX_LOG_RATIO, at_least_float32

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.config.schema.kl import KlEstimator


def kl_penalty(logprobs_L: Tensor, reference_logprobs_L: Tensor, estimator: KlEstimator) -> Tensor:
    """One estimate per token of KL(policy || reference) (Schulman 2020, "Approximating KL divergence").

    With d = log pi - log pi_ref: "k1": d. "k2": d^2 / 2. "k3": exp(-d) - 1 + d. "k1_straight_through" and
    "k3_straight_through" have the value of k1 and k3 and the gradient of k2.

    Args:
        logprobs_L: of the policy being trained, float32[L], with gradient.
        reference_logprobs_L: float32[L].

    Returns:
        float32[L]

    Example:
        d = 0.5 gives 0.5 (k1), 0.125 (k2) and 0.1065307 (k3); d = -0.5 gives -0.5, 0.125 and 0.1487213.
    """
    difference_L = at_least_float32(logprobs_L) - at_least_float32(reference_logprobs_L)
    half_square_L = 0.5 * difference_L.square()
    # float32 exp overflows at 88; a token that the policy made e^20 times rarer than the reference is lost anyway.
    bounded_L = difference_L.clamp_min(-MAX_LOG_RATIO)
    # Not exp(-d) - 1: beside the 1 float32 has no digits left for a difference of 1e-4.
    k3_L = torch.expm1(-bounded_L) + bounded_L
    match estimator:
        case "k1":
            return difference_L
        case "k2":
            return half_square_L
        case "k3":
            return k3_L
        case "k1_straight_through":
            return _straight_through(difference_L, half_square_L)
        case "k3_straight_through":
            return _straight_through(k3_L, half_square_L)
        case _:
            raise ValueError(
                f"kl estimator must be k1, k2, k3, k1_straight_through or k3_straight_through, got {estimator!r}"
            )


def _straight_through(value_L: Tensor, gradient_L: Tensor) -> Tensor:
    return value_L.detach() + (gradient_L - gradient_L.detach())
