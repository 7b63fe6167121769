"""Greedy baselines and agent loops: what goes together with them, and what the printed objective says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.compose import load_config
from trainer.config.describe import describe_objective


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"agent_args": {"max_turns": 3}}, "task.agent_args"),
        ({"agent_timeout_s": 5.0}, "task.agent_timeout_s"),
        ({"agent_max_sequences": 2}, "task.agent_max_sequences"),
        ({"reward__name": "zero"}, "task.reward.name"),
    ],
)
def test_a_key_of_agent_loops_is_refused_without_one(keys: dict[str, Any], refused: str) -> None:
    keys = {f"task__{name}": value for name, value in keys.items()}
    assert keys_refused(config_with(**keys)) == [refused]
    assert keys_refused(config_with(**keys, task__agent="my_agents.make")) == []


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"advantage": "gae"}, True),
        ({"advantage": "reinforce", "kl__coef": 0.1, "kl__placement": "reward", "kl__estimator": "k1"}, True),
        ({"advantage": "grpo", "kl__coef": 0.1, "kl__placement": "reward", "kl__estimator": "k1"}, False),
        ({"advantage": "reinforce"}, False),
    ],
)
def test_what_the_learner_adds_up_within_a_sequence_needs_trajectories_of_one(
    keys: dict[str, Any], refused: bool
) -> None:
    keys = {f"algorithm__{name}": value for name, value in keys.items()}
    keys["task__agent"] = "my_agents.make"
    assert keys_refused(config_with(**keys)) == []
    assert keys_refused(config_with(**keys, task__agent_max_sequences=2)) == ["task.agent_max_sequences"] * refused


def test_arguments_of_the_factory_come_from_the_command_line() -> None:
    config = load_config(["task.agent=my_agents.make", "task.agent_args={max_turns: 4, tools: [a, b]}"])
    assert config.task.agent_args == {"max_turns": 4, "tools": ["a", "b"]}


@pytest.mark.parametrize("group_size", [1, 8])
def test_dynamic_sampling_with_a_greedy_baseline_has_a_meaning_for_any_size(group_size: int) -> None:
    keys = {"rollout__group_size": group_size, "algorithm__filter_zero_variance": True}
    assert keys_refused(config_with(algorithm__advantage="remax", **keys)) == []


def test_the_objective_names_the_greedy_answer() -> None:
    config = load_config(["algorithm=remax", "algorithm.filter_zero_variance=true"])
    assert describe_objective(config.algorithm) == (
        "remax (one more, greedy answer per group) -> ppo_clip(clip_low=0.2, clip_high=0.2, clip_dual=null) -> "
        "token_mean; engine's log-probs as old policy; groups of rewards equal to the greedy one are filtered and "
        "refilled"
    )
