"""Every reward that a prompt names is tried before anything is started, and compared with what the estimator reads."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from rollout.errors import DataError
from trainer.config.compose import load_config
from trainer.driver.preflight import check_inputs, log_inputs
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.driver.datasets import DataSets

PARTS = """
def reward(*, prompt, response, answer, metadata):
    return {"reward": 1.0, "correct": 1.0, "format": 0.5}
"""
OWN = """
from trainer.config.algorithm import EstimatorTraits, with_traits

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


def load(reward: str, *overrides: str, algorithm: str = "algorithm=gdpo") -> DataSets:
    return check_inputs(load_config(["device=cpu", algorithm, f"task.reward.name={reward}", *overrides]))


def test_parts_that_are_there_pass() -> None:
    assert load("with_parts.py:reward").train.prompts
    assert load("with_parts.py:reward", "algorithm.gdpo_weights={correct: 1, format: 0.5}").train.prompts


def test_an_estimator_of_the_total_needs_no_parts() -> None:
    assert load("plain.py:reward", algorithm="algorithm=grpo").train.prompts


def test_a_reward_without_parts_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigurationError, match="returns none") as caught:
        load("plain.py:reward")
    assert [problem.key for problem in caught.value.problems] == ["algorithm.advantage_estimator"]
    with pytest.raises(ConfigurationError, match="returns none"):
        load("plain.py:reward", "algorithm.advantage_estimator=own_estimator_of_parts.of_parts")


def test_a_weight_of_a_part_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match="correct, format") as caught:
        load("with_parts.py:reward", "algorithm.gdpo_weights={correct: 1, fromat: 0.5}")
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("algorithm.gdpo_weights", "fromat")


def load_mixed(tmp_path: Path, *rewards: str | None, algorithm: str = "algorithm=grpo") -> DataSets:
    rows = [{"prompt": f"{number}+1=", "answer": "2", "by": reward} for number, reward in enumerate(rewards)]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load("with_parts.py:reward", "task.train_path=mixed.jsonl", "task.reward.column=by", algorithm=algorithm)


def test_prompts_come_with_the_rewards_that_their_rows_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loaded = load_mixed(tmp_path, None, "plain.py:reward", "plain.py:reward", "arithmetic")
    assert [p.reward for p in loaded.train.prompts] == ["", "plain.py:reward", "plain.py:reward", "arithmetic"]
    assert {p.reward for p in loaded.evaluation[0].prompts} == {""}
    num_held_out = len(loaded.evaluation[0].prompts)
    rewards = ["task.reward.name=with_parts.py:reward", "task.reward.column=by"]
    log_inputs(load_config(["device=cpu", *rewards]), loaded)
    expected = f"prompts by reward: with_parts.py:reward {1 + num_held_out}, plain.py:reward 2, arithmetic 1"
    assert expected in caplog.text


@pytest.mark.parametrize("reward", ["plain.py:rewards", "nowhere.py:reward", "maths"])
def test_a_reward_of_a_row_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, reward: str) -> None:
    with pytest.raises(DataError, match=f"column 'by' of prompt mixed/2: .*{reward.split(':')[0]}"):
        load_mixed(tmp_path, None, reward)


def test_every_reward_has_to_give_the_parts_that_the_estimator_reads(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"plain\.py:reward returns none"):
        load_mixed(tmp_path, None, "plain.py:reward", algorithm="algorithm=gdpo")
