"""The weight of a token under every aggregation, and the tokens that Clip-Cov and KL-Cov select."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainer.algorithms.token_weights import loss_weights, select_tokens, token_covariances
from trainer.config.compose import load_config


def test_dr_grpo_divides_every_response_by_the_longest_allowed_one() -> None:
    """The authors' masked sum over the generation budget, meaned over responses: no length counts, and the gradient has
    the size of a mean over tokens, which `learner.max_grad_norm` is made for."""
    config = load_config(["algorithm=dr_grpo", "rollout.max_response_tokens=8", "device=cpu"])
    algorithm, norm = config.algorithm, config.rollout.max_response_tokens
    assert not algorithm.normalize_by_std
    losses, lengths = np.array([[1.0, 2, 3, 0], [4, 0, 0, 0]]), [3, 1]
    weights = loss_weights(lengths, algorithm.loss_aggregation, norm_tokens=norm)
    assert (weights[:, None] * losses).sum() == pytest.approx((6 / 8 + 4 / 8) / 2)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 10_000))
@example([0, 0], 0)
def test_weighted_sum_equals_the_textbook_mean(counts: list[int], seed: int) -> None:
    if sum(counts) == 0:  # has no loss
        assert not loss_weights(counts, "token_mean", norm_tokens=50).any()
        return
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=n) for n in counts]
    nonempty = [x for x in losses if len(x)]
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "seq_mean_token_mean": np.mean([x.mean() for x in nonempty]),
        "seq_mean_token_sum": np.mean([x.sum() for x in nonempty]),
        "token_sum": np.concatenate(losses).sum(),
        "seq_mean_token_sum_norm": np.mean([x.sum() / 50 for x in nonempty]),
    }
    for kind, value in expected.items():
        weights = loss_weights(counts, kind, norm_tokens=50)
        assert sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) == pytest.approx(value)


def test_an_unknown_kind_or_a_divisor_below_1_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="norm_tokens must be >= 1, got 0"):
        loss_weights([1], "token_mean", norm_tokens=0)
    with pytest.raises(ValueError, match="seq_mean_token_sum_norm, got 'mean'"):
        loss_weights([1], "mean", norm_tokens=1)


BAND = {"cov_min": 1.0, "cov_max": 5.0}


def test_covariances_are_centred_products_whose_mean_is_the_covariance() -> None:
    rng = np.random.default_rng(0)
    logprobs, advantages = rng.normal(size=50), rng.normal(size=50)
    got = token_covariances(logprobs.astype(np.float32), advantages.astype(np.float32))
    assert got.mean() == pytest.approx(np.cov(logprobs, advantages, bias=True)[0, 1], abs=1e-6)
    np.testing.assert_allclose(token_covariances([-1, -3], [1, -1]), [1, 1])
    np.testing.assert_allclose(token_covariances([-3, -1], [1, -1]), [-1, -1])


def test_kl_cov_takes_the_largest_covariances() -> None:
    rng = np.random.default_rng(1)
    covariances = rng.normal(size=200)
    selected = select_tokens(covariances, rng.random(200), cov_frac=0.05)
    assert set(np.flatnonzero(selected)) == set(np.argsort(covariances)[-10:])


def test_clip_cov_draws_between_its_bounds_and_all_if_they_are_few() -> None:
    covariances = np.array([0.5, 1.5, 2.0, 4.9, 5.1, 3.0])
    draws = np.array([0.0, 0.9, 0.1, 0.2, 0.0, 0.8])
    half, every = {"cov_frac": 1 / 3, **BAND}, {"cov_frac": 1.0, **BAND}
    assert np.flatnonzero(select_tokens(covariances, draws, **half)).tolist() == [2, 3]
    assert np.flatnonzero(select_tokens(covariances, draws, **every)).tolist() == [1, 2, 3, 5]
    assert not select_tokens(covariances - 10, draws, **half).any()


def test_at_least_one_token_is_selected_and_none_of_none() -> None:
    for band in ({}, BAND):
        assert select_tokens(np.array([2.0, 3.0]), np.array([0.5, 0.4]), cov_frac=2e-4, **band).sum() == 1
        assert select_tokens(np.zeros(0), np.zeros(0), cov_frac=2e-4, **band).shape == (0,)
