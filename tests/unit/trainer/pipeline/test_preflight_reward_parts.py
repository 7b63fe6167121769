"""An estimator of the parts of a reward is compared with what the reward returns, before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.config.errors import ConfigurationError
from trainer.config.load import load_config
from trainer.pipeline import inputs

if TYPE_CHECKING:
    from pathlib import Path

PARTS = """
def reward(*, prompt, response, answer, metadata):
    return {"reward": 1.0, "correct": 1.0, "format": 0.5}
"""
OWN = """
from trainer.config.estimators import EstimatorTraits, with_traits

@with_traits(EstimatorTraits(needs_peers=True, uses_parts=True))
def of_parts(groups):
    return [group.rewards_G for group in groups]
"""
PLAIN = """
def reward(*, prompt, response, answer, metadata):
    return 1.0
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("with_parts.py", PARTS), ("plain.py", PLAIN), ("own_estimator_of_parts.py", OWN)):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


def load(reward: str, *overrides: str, algorithm: str = "algorithm=gdpo") -> inputs.Inputs:
    return inputs.load_inputs(load_config(["device=cpu", algorithm, f"task.reward.name={reward}", *overrides]))


def test_parts_that_are_there_pass() -> None:
    assert load("with_parts.py:reward").train.prompts
    assert load("with_parts.py:reward", "algorithm.gdpo_weights={correct: 1, format: 0.5}").train.prompts


def test_an_estimator_of_the_total_needs_no_parts() -> None:
    assert load("plain.py:reward", algorithm="algorithm=grpo").train.prompts


def test_a_reward_without_parts_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match="returns none") as caught:
        load("plain.py:reward")
    assert [problem.key for problem in caught.value.problems] == ["algorithm.advantage"]
    with pytest.raises(ConfigurationError, match="returns none"):
        load("plain.py:reward", "algorithm.advantage=own_estimator_of_parts.of_parts")


def test_a_weight_of_a_part_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="correct, format") as caught:
        load("with_parts.py:reward", "algorithm.gdpo_weights={correct: 1, fromat: 0.5}")
    (problem,) = caught.value.problems
    assert (problem.key, problem.got) == ("algorithm.gdpo_weights", "fromat")
