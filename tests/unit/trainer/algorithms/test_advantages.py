from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.advantages import group_advantages
from trainer.config.schema.algorithm import AlgorithmConfig

GRPO = AlgorithmConfig(advantage="grpo")
DR_GRPO = AlgorithmConfig(advantage="grpo", normalize_by_std=False)
RLOO = AlgorithmConfig(advantage="rloo")
REINFORCE = AlgorithmConfig(advantage="reinforce")
REWARDS = [1.0, 0.0, 0.0, 1.0]
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])


@pytest.mark.parametrize(
    ("config", "size"), [(GRPO, 0.8660239037), (DR_GRPO, 0.5), (RLOO, 2 / 3)], ids=["grpo", "dr_grpo", "rloo"]
)
def test_two_of_four_right_gives_the_closed_form(config: AlgorithmConfig, size: float) -> None:
    np.testing.assert_allclose(group_advantages(REWARDS, config=config), size * SIGNS, rtol=1e-9)


def test_reinforce_is_the_reward_itself() -> None:
    np.testing.assert_array_equal(group_advantages([0.25, 3.0], config=REINFORCE), [0.25, 3.0])


def test_equal_rewards_give_zeros_not_nan() -> None:
    np.testing.assert_array_equal(group_advantages([0.7] * 5, config=RLOO).round(12), np.zeros(5))
    np.testing.assert_allclose(group_advantages([1.0] * 5, config=GRPO), np.zeros(5))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=16), st.floats(-50, 50))
def test_baselines_do_not_see_a_constant_shift_and_sum_to_zero(rewards: list[float], shift: float) -> None:
    for config in (DR_GRPO, RLOO):
        advantages = group_advantages(rewards, config=config)
        shifted = group_advantages(np.array(rewards) + shift, config=config)
        np.testing.assert_allclose(shifted, advantages, atol=1e-9)
        assert abs(advantages.sum()) < 1e-9 * len(rewards) * 100


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9))
def test_rloo_equals_the_loop_over_others(rewards: list[float]) -> None:
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(group_advantages(rewards, config=RLOO), expected, atol=1e-9)


@pytest.mark.parametrize("config", [GRPO, RLOO])
def test_one_answer_is_refused_with_the_key_to_change(config: AlgorithmConfig) -> None:
    with pytest.raises(ValueError, match=r"at least 2, got 1; raise rollout\.group_size"):
        group_advantages([1.0], config=config)


def test_nan_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="must be finite"):
        group_advantages([1.0, float("nan")], config=GRPO)
