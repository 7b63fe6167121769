"""What stands behind an accuracy: its standard error, parts of the reward, and the rewards that judge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.types import Group
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import prompt_set, trajectory
from trainer.driver.datasets import EvalSet
from trainer.driver.evaluation import Answered, break_down, by_prompt, standard_error
from trainer.driver.step_metrics import batch_stats

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = prompt_set(4).prompts


def answered(rewards: Sequence[Sequence[float]], names: Sequence[str] = ("",) * 4) -> list[Answered]:
    """One row of rewards per prompt; `names` of the rewards that judge the prompts."""
    return [
        Answered(
            prompt=replace(prompt, reward=name),
            trajectories=[trajectory(prompt, i, [(2, 1)], reward=reward) for i, reward in enumerate(row)],
        )
        for prompt, name, row in zip(PROMPTS, names, rewards, strict=False)
    ]


def test_the_standard_error_is_that_of_the_means_of_prompts() -> None:
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]  # means 0.5, 1, 0, 0.5
    found = break_down(answered(rewards), reward="math")
    assert found.accuracy_stderr == pytest.approx(np.sqrt((0.25 + 0.25) / 3) / 2)
    assert found.record()["eval/accuracy_stderr"] == found.line()["accuracy_stderr"] == found.accuracy_stderr


def test_more_answers_that_say_the_same_make_it_no_surer() -> None:
    few = break_down(answered([[1.0], [0.0], [0.0], [1.0]]), reward="math")
    many = break_down(answered([[1.0] * 32, [0.0] * 32, [0.0] * 32, [1.0] * 32]), reward="math")
    assert few.accuracy_stderr == many.accuracy_stderr == pytest.approx(np.sqrt(1 / 3) / 2)


def test_the_standard_error_is_how_far_accuracies_of_other_prompts_lie_apart() -> None:
    rng, num_prompts, samples = np.random.default_rng(0), 25, 8
    rates = rng.beta(0.5, 0.5, (4000, num_prompts))  # prompts are easy or hard
    means = rng.binomial(samples, rates) / samples
    apart = float(np.std(means.mean(axis=1)))
    told = float(np.sqrt(np.mean([(standard_error(row) or 0.0) ** 2 for row in means])))
    assert told == pytest.approx(apart, rel=0.05)
    over_answers = np.sqrt(0.25 / (num_prompts * samples))
    assert over_answers < 0.5 * apart


def test_one_prompt_has_no_standard_error() -> None:
    found = break_down(answered([[1.0, 0.0]]), reward="math")
    assert found.line()["accuracy_stderr"] is None
    assert "eval/accuracy_stderr" not in found.record()


def test_parts_of_the_reward_have_the_names_and_the_means_of_training() -> None:
    answers = answered([[1.0, 0.0], [0.5, 0.5]])
    parts = [{"exact": 1.0, "format": 0.5}, {"exact": 0.0}, {"exact": 0.0, "format": 1.0}, {}]
    flat = [replace(t, reward_parts=parts.pop(0)) for one in answers for t in one.trajectories]
    answers = by_prompt([EvalSet(prompts=[one.prompt for one in answers], num_samples=2)], flat)
    found = break_down(answers, reward="math")
    assert found.reward_parts == {"exact": pytest.approx(1 / 3), "format": 0.75}
    groups = [
        Group(group_id=i, prompt=one.prompt, trajectories=one.trajectories, start_version=2)
        for i, one in enumerate(answers)
    ]
    trained = {name: value for name, value in batch_stats(groups, 2).items() if name.startswith("reward/part/")}
    record = {name.removeprefix("eval/"): value for name, value in found.record().items() if "/part/" in name}
    assert record == trained
    check_known(found.record())


def test_prompts_of_several_rewards_have_an_accuracy_and_a_number_each() -> None:
    names = ["math", "", "my/rewards.py:score", "math"]
    found = break_down(answered([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 0.0]], names), reward="arithmetic")
    shares = {name: (share.accuracy, share.num_prompts) for name, share in found.by_reward.items()}
    assert shares == {"arithmetic": (1.0, 1), "math": (0.25, 2), "my/rewards.py:score": (0.0, 1)}
    record = found.record()
    check_known(record)
    assert (record["eval/accuracy/math"], record["eval/num_prompts/math"]) == (0.25, 2)
    assert (record["eval/accuracy/my.rewards.py:score"], record["eval/num_prompts/my.rewards.py:score"]) == (0.0, 1)


def test_prompts_that_name_no_reward_are_not_told_apart() -> None:
    found = break_down(answered([[1.0], [0.0], [0.0], [1.0]]), reward="math")
    assert found.by_reward == {}
    assert found.record().keys() == {"eval/accuracy_stderr"}
