"""Generalised advantage estimation: the closed form, sums written out, and context that is not there."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.algorithms.advantages import gae_advantages

REWARDS, VALUES, ALL = [0.0, 0.0, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4], [True] * 4
ADVANTAGES = [0.799675, 0.7365, 0.67, 0.6]


def test_the_closed_form() -> None:
    advantages, returns = gae_advantages(REWARDS, VALUES, ALL, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages, ADVANTAGES, atol=1e-9)
    np.testing.assert_allclose(returns, np.add(ADVANTAGES, VALUES), atol=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_inserted_context_changes_nothing(where: int, gamma: float) -> None:
    expected, _ = gae_advantages(REWARDS, VALUES, ALL, gamma=gamma, lam=0.95)
    rewards, values = np.insert(REWARDS, [where] * 3, 0.0), np.insert(VALUES, [where] * 3, [7.0, np.nan, -7.0])
    mask = np.insert(ALL, [where] * 3, False)
    advantages, returns = gae_advantages(rewards, values, mask, gamma=gamma, lam=0.95)
    np.testing.assert_allclose(advantages[mask], expected, atol=1e-12)
    assert not advantages[~mask].any()
    assert not returns[~mask].any()


def written_out(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_t as the double sum over later deltas, quadratic in the length."""
    tokens = [t for t in range(len(mask)) if mask[t]]
    advantages = [0.0] * len(mask)
    for i, t in enumerate(tokens):
        for j in range(i, len(tokens)):
            follows = values[tokens[j + 1]] if j + 1 < len(tokens) else 0.0
            delta = rewards[tokens[j]] + gamma * follows - values[tokens[j]]
            advantages[t] += (gamma * lam) ** (j - i) * delta
    return advantages, [advantages[t] + values[t] if mask[t] else 0.0 for t in range(len(mask))]


@pytest.mark.parametrize("seed", range(8))
def test_ragged_turns_with_rewards_agree_with_the_double_sum(seed: int) -> None:
    rng = np.random.Generator(np.random.PCG64(seed))
    size = int(rng.integers(1, 60))
    mask = rng.random(size) < 0.6
    rewards, values = rng.normal(size=size) * mask, rng.normal(size=size)
    gamma, lam = float(rng.uniform(0.8, 1)), float(rng.uniform(0, 1))
    got = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for array, wanted in zip(got, written_out(rewards, values, mask, gamma, lam), strict=True):
        np.testing.assert_allclose(array, wanted, atol=1e-10)


def test_lambda_1_is_the_return_minus_the_value_and_lambda_0_the_one_step_error() -> None:
    advantages, returns = gae_advantages(REWARDS, VALUES, ALL, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(returns, np.ones(4), atol=1e-12)
    np.testing.assert_allclose(advantages, 1 - np.array(VALUES), atol=1e-12)
    advantages, _ = gae_advantages(REWARDS, VALUES, ALL, gamma=0.5, lam=0.0)
    np.testing.assert_allclose(advantages, [0.0, -0.05, -0.1, 0.6], atol=1e-12)


def test_a_long_answer_keeps_its_precision() -> None:
    size = 40_000
    advantages, _ = gae_advantages(np.eye(1, size, size - 1)[0], np.zeros(size), np.ones(size), gamma=1.0, lam=0.999)
    np.testing.assert_allclose(advantages[[0, -1]], [0.999 ** (size - 1), 1.0], rtol=1e-9)


def test_a_trajectory_without_generated_tokens_has_zeros() -> None:
    advantages, returns = gae_advantages([0.0, 0.0], [1.0, 2.0], [False, False], gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [0.0, 0.0]


def test_a_reward_on_context_a_value_of_nan_and_differing_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"token 1 is context and has reward 2\.0"):
        gae_advantages([0.0, 2.0], [0.0, 0.0], [True, False], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        gae_advantages([0.0, 2.0], [0.0, np.nan], [True, True], gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"one shape \[T\], got \(2,\), \(1,\) and \(2,\)"):
        gae_advantages([0.0, 2.0], [0.0], [True, True], gamma=1.0, lam=1.0)
