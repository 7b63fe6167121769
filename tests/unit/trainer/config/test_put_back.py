"""Keys of a file that nothing reads beside what was chosen go back to their defaults; what was asked for is refused."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import pytest

from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.plain import dump_yaml
from trainer.config.schema import all_keys
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

_OF_CRITIC = ("critic.lr", "critic.weight_decay", "critic.cpu_offload")
_OF_EVALUATION = ("trainer.eval_samples", "trainer.eval_temperature", "trainer.eval_top_p")


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["reinforce_pp_7b", "algorithm.kl.coef=0"], ["algorithm.kl.estimator"]),
        (["reinforce_pp_7b", "learner.lr_schedule=constant"], ["learner.min_lr_frac"]),
        (["ppo_7b", "critic.shared_backbone=true"], _OF_CRITIC),
        (["ppo_7b", "algorithm=grpo"], _OF_CRITIC),
        (["dapo_7b", "task.eval_path="], ("task.eval_split", "task.eval_size", *_OF_EVALUATION)),
        (["dapo_7b", "trainer.eval_temperature=0", "trainer.eval_samples=1"], ["trainer.eval_top_p"]),
        (["dapo_7b", "correction=decoupled"], ["algorithm.clip_high"]),
        (["cispo_7b", "correction=decoupled"], ["algorithm.clip_low", "algorithm.clip_high"]),
        (["gspo_7b", "correction=decoupled"], ["algorithm.clip_low", "algorithm.clip_high"]),
    ],
)
def test_what_a_shipped_file_sets_for_what_is_turned_off_goes_back(arguments: list[str], keys: list[str]) -> None:
    told: list[str] = []
    config, problems = resolve(parse(["--config-name", *arguments]), note=told.append)
    assert not problems
    assert all(attrgetter(key)(config) == all_keys()[key].default for key in keys)
    assert all(f"{key}=" in "".join(told) for key in keys)


def test_keys_that_are_read_stay_and_nothing_is_told() -> None:
    told: list[str] = []
    config, _ = resolve(parse(["--config-name", "ppo_7b"]), note=told.append)
    assert config.critic.lr == 5e-6 and not told


@pytest.mark.parametrize("key", ["critic.lr=1e-5", "critic={lr:1e-5}"])
def test_what_the_command_line_names_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=r"critic\.lr = 1e-05\n.*has no effect"):
        load_config(["--config-name", "ppo_7b", "algorithm=grpo", key])


def test_a_file_of_the_user_is_held_to_what_it_says_and_not_to_what_it_builds_on(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    arguments = ["--config-dir", str(tmp_path), "--config-name", "mine"]
    mine.write_text("defaults: [ppo_7b, _self_]\ncritic: {shared_backbone: true}\n")
    assert load_config(arguments).critic.lr is None
    mine.write_text("defaults: [ppo_7b, _self_]\ncritic: {shared_backbone: true, lr: 1.0e-5}\n")
    with pytest.raises(ConfigurationError, match=r"critic\.lr = 1e-05\n.*has no effect"):
        load_config(arguments)
    # The command line turned it off, and the file was right without.
    mine.write_text("defaults: [ppo_7b, _self_]\ncritic: {lr: 1.0e-5}\n")
    assert load_config([*arguments, "critic.shared_backbone=true"]).critic.lr is None


def test_a_key_that_was_read_with_one_that_goes_back_goes_with_it(tmp_path: Path) -> None:
    text = "defaults: [ppo_7b, _self_]\ncritic: {updates_per_step: 4, value_clip: 0.2}\n"
    (tmp_path / "mine.yaml").write_text(text)
    critic = load_config(["--config-dir", str(tmp_path), "--config-name", "mine", "critic.shared_backbone=true"]).critic
    assert critic.updates_per_step == 1 and critic.value_clip is None


def test_the_result_loads_again_as_it_is(tmp_path: Path) -> None:
    config = load_config(["--config-name", "ppo_7b", "algorithm=grpo"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(["--config-dir", str(tmp_path), "--config-name", "config"]) == config
    # All its keys stand in that file, and are those of a run; what is turned off takes them along here, too.
    load_config(["--config-dir", str(tmp_path), "--config-name", "config", "task.eval_path="])


@pytest.mark.parametrize("reader", ["auto", "jsonl"])
def test_the_split_of_a_file_is_refused(tmp_path: Path, reader: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    arguments = [f"task.train_path={rows}", "task.eval_path=", "trainer.stop_at_accuracy=null", f"task.reader={reader}"]
    load_config(arguments)
    for split in ("train", "validation"):
        with pytest.raises(ConfigurationError, match=r"task\.train_split .*\n.*is a file, which has no splits"):
            load_config([*arguments, f"task.train_split={split}"])


def test_the_split_of_a_preset_does_not_hold_for_a_file_in_its_place(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    assert load_config(["--config-name", "dapo_7b", f"task.eval_path={rows}"]).task.eval_split == "test"
