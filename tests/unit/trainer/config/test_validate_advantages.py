"""Keys and combinations that mean nothing to the chosen advantage estimator are refused, not ignored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.algorithm import ESTIMATORS
from trainer.config.compose import load_config

WITH_PEERS = [name for name, traits in ESTIMATORS.items() if traits.needs_peers]
WITHOUT_PEERS = [name for name, traits in ESTIMATORS.items() if not traits.needs_peers]


def chosen(name: str) -> dict[str, Any]:
    """The estimator, with the teacher that `zero` leaves everything to."""
    teacher = {"algorithm__kl__path": "some/teacher", "algorithm__kl__coef": 1.0}
    return {"algorithm__advantage": name, **(teacher if name == "zero" else {})}


@pytest.mark.parametrize("name", WITH_PEERS)
def test_a_group_estimator_with_one_answer_is_refused(name: str) -> None:
    assert keys_refused(config_with(algorithm__advantage=name, rollout__group_size=1)) == ["rollout.group_size"]
    assert keys_refused(config_with(algorithm__advantage=name, rollout__group_size=2)) == []


@pytest.mark.parametrize("name", WITHOUT_PEERS)
def test_one_answer_is_enough_without_peers(name: str) -> None:
    assert keys_refused(config_with(**chosen(name), rollout__group_size=1)) == []


@pytest.mark.parametrize("name", [name for name in WITHOUT_PEERS if not ESTIMATORS[name].greedy_baseline])
def test_dynamic_sampling_is_refused_where_equal_rewards_teach(name: str) -> None:
    config = config_with(**chosen(name), algorithm__filter_zero_variance=True)
    assert keys_refused(config) == ["algorithm.filter_zero_variance"]


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"advantage": "rloo", "normalize_by_std": False}, "normalize_by_std"),
        ({"advantage": "reinforce_pp_baseline", "normalize_by_std": False}, "normalize_by_std"),
        ({"advantage": "gdpo", "normalize_by_std": False}, "normalize_by_std"),
        ({"advantage": "grpo", "gpg_scale": "valid_groups"}, "gpg_scale"),
        ({"advantage": "grpo", "gdpo_weights": {"format": 2.0}}, "gdpo_weights"),
        ({"advantage": "gdpo", "gdpo_weights": {"format": 0.0}}, "gdpo_weights"),
        ({"advantage": "gdpo", "gdpo_weights": {"format": float("nan")}}, "gdpo_weights"),
        ({"advantage": "gdpo", "overlong_buffer_tokens": 64}, "overlong_buffer_tokens"),
        ({"advantage": "gdpo", "filter_zero_variance": True}, "filter_zero_variance"),
    ],
)
def test_a_key_without_effect_or_meaning_is_refused(keys: dict[str, Any], refused: str) -> None:
    config = config_with(**{f"algorithm__{name}": value for name, value in keys.items()})
    assert keys_refused(config) == [f"algorithm.{refused}"]


@pytest.mark.parametrize(
    "keys",
    [
        {"advantage": "grpo", "normalize_by_std": False},
        {"advantage": "pass_at_k", "normalize_by_std": False},
        {"advantage": "gpg", "gpg_scale": "valid_groups"},
        {"advantage": "gdpo", "gdpo_weights": {"format": 0.5, "correct": -1}},
        {"advantage": "reinforce_pp", "overlong_buffer_tokens": 64},
        {"advantage": "reinforce_pp_baseline", "filter_zero_variance": True},
    ],
)
def test_the_nearest_meaningful_combination_is_allowed(keys: dict[str, Any]) -> None:
    assert keys_refused(config_with(**{f"algorithm__{name}": value for name, value in keys.items()})) == []


def test_a_step_of_one_answer_cannot_be_normalised() -> None:
    sizes = {"rollout__group_size": 1, "trainer__groups_per_step": 1, "learner__num_ranks": 1}
    assert keys_refused(config_with(algorithm__advantage="reinforce", **sizes)) == []
    assert keys_refused(config_with(algorithm__advantage="reinforce_pp", **sizes)) == ["trainer.groups_per_step"]


def test_weights_of_reward_parts_come_from_the_command_line() -> None:
    config = load_config(["algorithm=gdpo", "algorithm.gdpo_weights={correct: 1, format: 0.5}"])
    assert config.algorithm.gdpo_weights == {"correct": 1.0, "format": 0.5}
