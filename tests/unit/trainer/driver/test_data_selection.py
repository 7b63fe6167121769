"""What the `task` section makes of the columns of a data set, and what is refused before the run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.errors import DataError
from tests.fakes.scripted_run import config, prompt_set
from trainer.config.schema import TaskConfig
from trainer.driver.actors import make_source
from trainer.driver.datasets import curriculum_of, pass_rates_of

if TYPE_CHECKING:
    from rollout.types import Prompt

CURRICULUM: dict[str, Any] = {"curriculum": "easy_to_hard"}
FILTER: dict[str, Any] = {"pass_rate_min": 0.1, "pass_rate_max": 0.9, "pass_rate_column": "rate"}


def prompts(*columns: dict[str, object]) -> tuple[Prompt, ...]:
    return tuple(replace(p, metadata=c) for p, c in zip(prompt_set(len(columns)).prompts, columns, strict=True))


def test_nothing_is_selected_by_default() -> None:
    assert curriculum_of(TaskConfig(), prompts({})) is None
    assert pass_rates_of(TaskConfig(), prompts({})) is None


def test_difficulty_is_the_column_or_the_rarity_of_a_pass() -> None:
    rows = prompts({"level": 1, "rate": 0.2}, {"level": 2, "rate": 0.8})
    by_level = curriculum_of(TaskConfig(**CURRICULUM, difficulty_column="level", curriculum_epochs=3), rows)
    by_rate = curriculum_of(TaskConfig(**CURRICULUM, pass_rate_column="rate"), rows)
    assert by_level is not None and by_rate is not None
    assert by_level.difficulties.tolist() == [1.0, 2.0]
    assert by_level.num_epochs == 3
    assert by_rate.difficulties.tolist() == [-0.2, -0.8]


def test_a_curriculum_needs_every_difficulty() -> None:
    rows = prompts({"level": 1}, {"level": None})
    with pytest.raises(DataError, match=r"prompt train/1: column 'level' \(task.difficulty_column\) is null"):
        curriculum_of(TaskConfig(**CURRICULUM, difficulty_column="level"), rows)


def test_a_pass_rate_may_be_unknown_but_not_beyond_one() -> None:
    rates = pass_rates_of(TaskConfig(**FILTER), prompts({"rate": 0.0}, {"rate": None}, {"rate": 0.5}))
    assert rates is not None
    assert rates.record()["prompts_excluded"] == 1
    assert rates.record()["pass_rate_mean"] == 0.25
    with pytest.raises(DataError, match=r"prompt train/0: column 'rate' holds 80; .* shares, 0 to 1"):
        pass_rates_of(TaskConfig(**FILTER), prompts({"rate": 80}))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (FILTER, "no column 'rate'; .* set task.pass_rate_column"),
        (CURRICULUM | {"difficulty_column": "level"}, "no column 'level'; .* set task.difficulty_column"),
    ],
)
def test_a_column_that_is_not_there_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        make_source(config(task=keys), prompt_set(), None)


def test_pass_rates_that_leave_no_prompt_are_refused_before_the_run() -> None:
    data = replace(prompt_set(1), prompts=prompts({"rate": 0.0}))
    with pytest.raises(DataError, match="from the start"):
        make_source(config(task=FILTER), data, None)
