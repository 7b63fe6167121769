"""What the metrics of a step count, and what they leave out: greedy baselines and rewards of turns."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.trainer.data.conftest import make_group, make_trajectory, make_turn
from trainer.data.batcher import batch_stats
from trainer.telemetry.catalog import check_known


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
