"""What the metrics of a step count, and what they leave out: greedy baselines, rewards of turns, turns and calls."""

from __future__ import annotations

from dataclasses import replace

from rollout.types import ToolUse
from tests.fakes.metric_names import check_known
from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.driver.step_metrics import batch_stats


def test_a_baseline_has_a_metric_of_its_own_and_counts_in_no_other() -> None:
    answers = [make_trajectory(0), make_trajectory(1)]
    plain = [make_group(answers), make_group(answers, group_id=1)]
    greedy = make_trajectory(2, reward=0.25, num_tokens=90, version=1, status="truncated")
    with_baselines = [replace(plain[0], baseline=greedy), replace(plain[1], baseline=replace(greedy, reward=0.75))]
    stats = batch_stats(with_baselines, 3)
    assert stats.pop("reward/greedy_mean") == 0.5
    assert stats == batch_stats(plain, 3)


def test_a_group_that_is_worth_what_its_baseline_is_teaches_nothing() -> None:
    right = [make_trajectory(0, reward=1.0), make_trajectory(1, reward=1.0)]
    alike = replace(make_group(right), baseline=make_trajectory(2, reward=1.0))
    better = replace(make_group(right), baseline=make_trajectory(2, reward=0.0))
    assert batch_stats([alike, better], 0)["reward/zero_variance_frac"] == 0.5


def test_rewards_of_turns_count_in_the_mean_and_are_told_apart() -> None:
    turns = make_turn(2, [(0, 3)], reward=0.5), make_turn(1, [(0, 1)], reward=1.5)
    stats = batch_stats([make_group([make_trajectory(0, turns=turns, reward=1.0), make_trajectory(1, reward=1.0)])], 0)
    assert (stats["reward/mean"], stats["reward/turns_mean"]) == (2.0, 1.0)
    assert stats["reward/zero_variance_frac"] == 0.0
    check_known(stats)
    assert "reward/turns_mean" not in batch_stats([make_group([make_trajectory(0), make_trajectory(1)])], 0)


def test_turns_are_those_that_the_policy_generated() -> None:
    last_has_no_answer = make_turn(2, [(0, 3)]), make_turn(1, [(0, 1)]), make_turn(4, [])
    failed = make_trajectory(2, num_tokens=0, reward=float("nan"), status="failed")
    stats = batch_stats([make_group([make_trajectory(0, turns=last_has_no_answer), make_trajectory(1), failed])], 0)
    assert stats["agent/turns_mean"] == 1.5, "a trajectory that failed has none, and does not count"
    assert not {"agent/tool_calls_mean", "agent/tool_errors"} & stats.keys(), "nobody counted any"
    check_known(stats)


def test_answers_of_one_turn_have_no_metrics_of_agents() -> None:
    stats = batch_stats([make_group([make_trajectory(0), make_trajectory(1)])], 0)
    assert not [name for name in stats if name.startswith("agent/")]


def test_calls_are_a_mean_per_trajectory_and_failed_ones_a_number() -> None:
    used = [ToolUse(num_calls=4, num_errors=2), ToolUse(num_calls=1, num_errors=1), ToolUse(), None]
    groups = [make_group([make_trajectory(index, tool_use=one) for index, one in enumerate(used)])]
    stats = batch_stats(groups, 0)
    assert stats["agent/tool_calls_mean"] == 5 / 3, "of those whose agent counts"
    assert (stats["agent/tool_errors"], stats["agent/turns_mean"]) == (3.0, 1.0)
    check_known(stats)
    with_baseline = replace(groups[0], baseline=make_trajectory(9, tool_use=ToolUse(num_calls=9, num_errors=9)))
    assert batch_stats([with_baseline], 0)["agent/tool_errors"] == 3.0


def test_tools_that_nobody_calls_are_seen_to_be_idle() -> None:
    stats = batch_stats([make_group([make_trajectory(index, tool_use=ToolUse()) for index in range(2)])], 0)
    agent = {name: value for name, value in stats.items() if name.startswith("agent/")}
    assert agent == {"agent/turns_mean": 1.0, "agent/tool_calls_mean": 0.0, "agent/tool_errors": 0.0}
