"""What is said to those who write a command line as they would for another program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainer.config.compose import load_config
from trainer.config.plain import OTHER_NAMES
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "seed=1,2"], "write a loop: for value in 1 2 3"),
        (["seed=1,2"], "write a loop: for value in ...; do python -m trainer seed=$value"),
        (["--learner.lr=1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--learner.lr", "seed=1"], "keys have no dashes: learner.lr=VALUE"),
        (["--max-steps", "10"], "keys have no dashes: trainer.total_steps=10"),
        (["--learning-rate=1e-5"], "keys have no dashes: learner.lr=1e-5"),
        (["--verbose"], "see python -m trainer --help"),
        (["max_steps=10"], "did you mean trainer.total_steps?"),
        (["trainer.max_steps=10"], "did you mean trainer.total_steps?"),
        (["device=gpu"], "device=cuda (NVIDIA) or device=rocm (AMD)"),
        (["device=tpu"], "must be one of auto, cpu, cuda, npu, rocm"),
        (["--config-path", "x"], "--config-dir DIR"),
        (["--resume"], "the same run_dir=PATH"),
        (["learner.lr", "=", "1e-5"], "without spaces around ="),
        (["+algorithm=dapo"], "leave the plus out"),
        (["algorithm=GRPO"], "did you mean algorithm=grpo?"),
        (["hydra.run.dir=/tmp/x"], "where a run writes is run_dir=PATH"),
        (["hydra/launcher=slurm"], "where a run writes is run_dir=PATH"),
        (["algorithm.kl_coef=0.1"], "did you mean algorithm.kl.coef?"),
        (["trainer.stop_at_accuracy=None"], "nothing is written null"),
        (["rollout.stop=</answer>"], """rollout.stop='["VALUE"]'"""),
        (["model=Qwen/X"], "-> set its keys one by one: model.path=..."),
        (["data.train_files=x"], "docs/coming_from.md has the names of other systems"),
    ],
)
def test_a_habit_from_elsewhere_is_answered_with_what_to_write(arguments: list[str], words: str) -> None:
    assert words in refusal(*arguments)


def test_keys_of_another_system_are_named_in_full() -> None:
    told = refusal("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.optim.lr=1e-6")
    assert "actor_rollout_ref.rollout.n = 8" in told
    assert "actor_rollout_ref.actor.optim.lr = 1e-06" in told and "learner.lr" in told


@pytest.mark.parametrize("key", ["run_dir", "task.eval_path", "model.tokenizer_path", "algorithm.group_filter"])
def test_null_is_no_text_of_four_letters(key: str) -> None:
    told = refusal(f"{key}=null")
    assert f"{key} = null" in told and "no text is written as nothing behind the =" in told


def test_null_in_quotes_is_text() -> None:
    assert load_config(["run_dir='null'"]).run_dir == "null"


def test_the_path_of_a_file_is_split_into_folder_and_name(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\n")
    for given in (tmp_path / "mine.yaml", tmp_path / "mine"):
        assert f"write --config-dir {tmp_path} --config-name mine" in refusal("--config-name", str(given))


def test_a_file_with_another_suffix_is_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("defaults: [tiny, _self_]\n")
    told = refusal("--config-dir", str(tmp_path), "--config-name", "mine")
    assert "rename mine.yml to mine.yaml" in told


def test_every_name_of_elsewhere_stands_for_a_key_and_is_none() -> None:
    leaves = {key.rpartition(".")[2] for key in all_keys()}
    assert set(OTHER_NAMES.values()) <= all_keys().keys()
    assert not OTHER_NAMES.keys() & leaves


@pytest.mark.parametrize("word", ["gpu", "tpu", "GPU"])
@pytest.mark.parametrize("key", ["device", "device.name"])
def test_another_kind_of_device_is_not_taken_for_one_of_three_letters(key: str, word: str) -> None:
    assert "npu?" not in refusal(f"{key}={word}")
