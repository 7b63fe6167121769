"""Which tokens Clip-Cov and KL-Cov hold back."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.algorithms.token_weights import select_tokens, tie_break_draws, token_covariances
from trainer.config.algorithm import AlgorithmConfig


def config_for(loss: str, **keys: float) -> AlgorithmConfig:
    return AlgorithmConfig(loss=loss, **keys)  # type: ignore[arg-type]


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
    selected = select_tokens(covariances, rng.random(200), config=config_for("kl_cov", cov_frac=0.05))
    assert set(np.flatnonzero(selected)) == set(np.argsort(covariances)[-10:])


def test_clip_cov_draws_between_its_bounds_and_all_if_they_are_few() -> None:
    covariances = np.array([0.5, 1.5, 2.0, 4.9, 5.1, 3.0])
    tickets = np.array([0.0, 0.9, 0.1, 0.2, 0.0, 0.8])
    half = config_for("clip_cov", cov_frac=1 / 3)
    assert np.flatnonzero(select_tokens(covariances, tickets, config=half)).tolist() == [2, 3]
    every = config_for("clip_cov", cov_frac=1.0)
    assert np.flatnonzero(select_tokens(covariances, tickets, config=every)).tolist() == [1, 2, 3, 5]
    assert not select_tokens(covariances - 10, tickets, config=half).any()


def test_at_least_one_token_is_held_back_and_none_of_none() -> None:
    for loss in ("clip_cov", "kl_cov"):
        assert select_tokens(np.array([2.0, 3.0]), np.array([0.5, 0.4]), config=config_for(loss)).sum() == 1
        assert select_tokens(np.zeros(0), np.zeros(0), config=config_for(loss)).shape == (0,)


def test_tickets_depend_on_the_name_of_the_sample_only() -> None:
    name = {"step": 3, "group_id": 7, "sample_index": 1}
    np.testing.assert_array_equal(tie_break_draws(4, **name), tie_break_draws(4, **name))
    for key in name:
        assert (tie_break_draws(4, **name) != tie_break_draws(4, **{**name, key: 9})).all()


def test_another_loss_cannot_select() -> None:
    with pytest.raises(ValueError, match="must be clip_cov or kl_cov"):
        select_tokens(np.ones(2), np.ones(2), config=config_for("ppo_clip"))
