"""Curriculum, pass-rate filter and own group filter: what goes together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.describe import describe_objective
from trainer.config.rules import check_combinations

FILTER = {"task__pass_rate_min": 0.1, "task__pass_rate_max": 0.9}
CURRICULUM = {"task__curriculum": "easy_to_hard", "task__difficulty_column": "level"}


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        (FILTER, []),
        (FILTER | {"task__pass_reward": 0.5, "task__pass_rate_retry_epochs": 4, "task__pass_rate_column": "rate"}, []),
        ({"task__pass_rate_min": 0.1}, []),
        ({"task__pass_rate_min": 0.5, "task__pass_rate_max": 0.5}, []),
        ({"task__pass_rate_min": 0.6, "task__pass_rate_max": 0.5}, ["task.pass_rate_min"]),
        ({"task__pass_rate_min": 0.55, "task__pass_rate_max": 0.6}, ["task.pass_rate_min"]),
        (FILTER | {"rollout__group_size": 1, "algorithm__advantage": "reinforce"}, ["task.pass_rate_min"]),
        ({"task__pass_rate_retry_epochs": 4}, ["task.pass_rate_retry_epochs"]),
        ({"task__pass_reward": 0.5}, ["task.pass_reward"]),
        ({"task__pass_rate_column": "rate"}, ["task.pass_rate_column"]),
        (CURRICULUM, []),
        (CURRICULUM | {"task__curriculum_epochs": 3}, []),
        (CURRICULUM | FILTER | {"task__pass_rate_column": "rate"}, []),
        (CURRICULUM | {"task__pass_rate_column": "rate"}, ["task.pass_rate_column"]),
        ({"task__curriculum": "easy_to_hard", "task__pass_rate_column": "rate"}, []),
        ({"task__curriculum": "easy_to_hard"}, ["task.curriculum"]),
        ({"task__curriculum_epochs": 3}, ["task.curriculum_epochs"]),
        ({"task__difficulty_column": "level"}, ["task.difficulty_column"]),
        (CURRICULUM | {"task__train_path": "builtin:arithmetic"}, ["task.difficulty_column"]),
        (
            FILTER | {"task__train_path": "builtin:arithmetic", "task__pass_rate_column": "rate"},
            ["task.pass_rate_column"],
        ),
        ({"algorithm__group_filter": "my_package.filters.one", "algorithm__group_filter_args": {"a": 1.0}}, []),
        ({"algorithm__group_filter": "one"}, ["algorithm.group_filter"]),
        ({"algorithm__group_filter": "my_package.py:one"}, ["algorithm.group_filter"]),
        ({"algorithm__group_filter_args": {"a": 1.0}}, ["algorithm.group_filter_args"]),
    ],
)
def test_what_is_refused(keys: dict[str, Any], refused: list[str]) -> None:
    keys = {"task__train_path": "train.jsonl", **keys}
    assert keys_refused(config_with(**keys)) == refused


def test_the_filter_by_pass_rates_works_on_the_built_in_task() -> None:
    assert keys_refused(config_with(**FILTER)) == []


def test_bounds_that_no_group_can_meet_are_told_with_the_group_size() -> None:
    (problem,) = check_combinations(config_with(task__pass_rate_min=0.55, task__pass_rate_max=0.6))
    assert "a pass rate is a multiple of 1/8, and none lies in 0.55..0.6" in str(problem)


def test_the_own_filter_stands_in_the_objective() -> None:
    config = config_with(algorithm__group_filter="my.filters.one", algorithm__group_filter_args={"low": 0.5})
    assert "own my.filters.one(low=0.5) filters groups" in describe_objective(config.algorithm)
