"""Composition: names, groups, overrides, search path; what is reset and what is refused; every problem at once."""

from __future__ import annotations

import logging
import pickle
import re
from dataclasses import asdict, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.plain import RENAMED, dump_yaml, read_stored, to_run_config
from trainer.config.presets import config_names, packaged_configs
from trainer.config.schema import EvalSetConfig, LearnerConfig, RolloutConfig, RunConfig, all_keys
from trainer.driver.named_files import file_problems
from trainer.errors import ConfigurationError

NAMES = config_names(packaged_configs())
MINE = ["--config-dir", ".", "--config-name", "mine"]
ROWS = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)


def mine(text: str, *overrides: str) -> list[str]:
    """The command line for a file of the user with that text."""
    Path("mine.yaml").write_text(text)
    return [*MINE, *overrides]


def problems_of(*argv: str) -> dict[str, str]:
    """Key -> the whole text about it."""
    with pytest.raises(ConfigurationError) as caught:
        load_config(list(argv), check=file_problems)
    return {problem.key: str(problem) for problem in caught.value.problems}


def notes_of(*argv: str) -> tuple[RunConfig, str]:
    notes: list[str] = []
    config, problems = resolve(parse(argv), note=notes.append)
    assert problems == []
    return config, "".join(notes)


# Names, groups, overrides


def test_a_group_of_a_device_may_bring_variables_and_a_user_others() -> None:
    config = load_config(["device=rocm_asymmetric", "+device.env.NCCL_DEBUG=WARN"])
    assert config.device.name == "rocm"
    assert config.device.env == {"NCCL_P2P_LEVEL": "LOC", "NCCL_SHM_DISABLE": "1", "NCCL_DEBUG": "WARN"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.lr=1e-3", 1e-3),
        ("trainer.total_steps=1e3", 1000),
        ("learner.beta1=${learner.beta2}", 0.999),  # which no shipped YAML file sets
        ("run_dir=~/run", "/somewhere/run"),
        ("run_dir='null'", "null"),
        ("rollout.engine_args.cudagraph_capture_sizes=[1,2]", [1, 2]),
        ("+rollout.engine_args.block_size=1", 1),
        ("+device.env.OMP=1,2", "1,2"),
        ("task.eval_sets.odd.path=a[1],b.jsonl", "a[1],b.jsonl"),
        ('rollout.stop=["</search>", "```"]', ["</search>", "```"]),
        ('rollout.stop=["\n\n"]', ["\n\n"]),
        *(
            (f"task.system_prompt={text}", text)
            for text in (
                "/x/a b[1]{2}", "it's", 'say "hi"', "a,b=c", "back\\slash\\", "end\\'", "$HOME 100%", "123",
                r"Put it in \boxed{}, not \text{}: \nabla f",
            )
        ),
    ],
)  # fmt: skip
def test_a_value_is_read_as_it_is_meant_without_a_second_layer_of_quotes(
    override: str, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    config: Any = load_config([override, "task.apply_chat_template=true"])
    for name in override.partition("=")[0].removeprefix("+").split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    assert config == expected and type(config) is type(expected)


def test_files_of_the_user_win_and_can_add_group_options() -> None:
    Path("task").mkdir()
    Path("task/poems.yaml").write_text("name: poems\ntrain_path: builtin:arithmetic\n")
    Path("tiny.yaml").write_text(
        "defaults: [{task: poems}, _self_]\nname: mine\nseed: 5\nlearner: {lr: 1e-6, eps: 2E-8}\n"
        "telemetry: {progress: off}\ncheckpoint:\n"
    )
    config = load_config(["--config-dir", ".", "learner.max_tokens_per_micro_batch=20000"])
    assert (config.name, config.seed, config.task.name) == ("mine", 5, "poems")
    assert (config.learner.lr, config.learner.eps) == (1e-6, 2e-8)
    assert config.telemetry.progress == "off", "a bare off in YAML"
    assert config.checkpoint == RunConfig().checkpoint, "a section without keys"


@pytest.mark.parametrize("text", ["", "learner: {lr: 1e-5}\n", "defaults: []\nlearner: {lr: 1e-5}\n"])
def test_a_file_without_defaults_is_reported_and_composed_over_the_schema(text: str) -> None:
    config, notes = notes_of(*mine(text))
    assert notes == "mine.yaml has no defaults: every other key has the schema's default\n"
    assert config.trainer == RunConfig().trainer
    assert notes_of(*mine("defaults: [tiny, _self_]\n"))[1] == ""


def test_the_dumped_configuration_loads_to_the_same_configuration_without_a_note() -> None:
    for overrides in (
        ["algorithm=dapo", "+device.env.A=1", "learner.lr=3e-7", "+rollout.engine_args.compilation_config={y: 1}"],
        ["--config-name", "ppo_7b", "algorithm=grpo"],
    ):
        config = load_config(overrides)
        assert notes_of(*mine(dump_yaml(config))) == (config, "")
    # All its keys are in that file; what is turned off on the command line takes them along here, too.
    load_config([*MINE, "task.eval_path="])


@pytest.mark.parametrize("override", ["algorithm=grpo", "+algorithm=grpo", "correction=tis"])
def test_an_option_is_not_mixed_with_a_section_of_the_file(override: str) -> None:
    found = problems_of(*mine(dump_yaml(load_config(["algorithm=gspo"]))), override)
    assert "the section algorithm of mine.yaml" in found[override.removeprefix("+").partition("=")[0]]


def test_hydra_leaves_directory_files_and_logging_alone(tmp_path: Path) -> None:
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    load_config(["device=cuda"])
    assert Path.cwd() == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert (logging.getLogger().handlers, logging.getLogger().level) == (handlers, level)


# Problems


def test_all_problems_are_reported_at_once() -> None:
    found = problems_of(
        "device=cda", "learner.lrr=1", "mode.max_staleness=-1", "trainer.total_steps=ten", "rollout.group_size=1",
        "model.path=/does/not/exist", "task.train_path=missing.jsonl", "oops", "learner.lr=1,2", "seed=[1",
    )  # fmt: skip
    assert set(found) == {
        "device", "learner.lrr", "mode.max_staleness", "trainer.total_steps", "rollout.group_size",
        "model.path", "task.train_path", "oops", "learner.lr", "seed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("max_stalenes=1", "max_stalenes", "did you mean mode.max_staleness?"),
        ("learner.zzz=1", "learner.zzz", "keys of learner"),
        ("device=cda", "device", "did you mean device=cuda?"),
        ("learner.lr=nan", "learner.lr", "finite"),
        ("telemetry.progress=of", "telemetry.progress", "did you mean off?"),
        ("algorithm.loss=ppo_clp", "algorithm.loss", "did you mean ppo_clip?"),
        ("rollout.stop='</search>'", "rollout.stop", 'expected list of text, got the text "</search>"; put it in'),
        ("rollout.stop_token_ids=[7, x]", "rollout.stop_token_ids", 'entry 1 expected integer, got the text "x"'),
        ("run_dir=${nope}", "--config-name tiny", "nope"),
    ],
)
def test_a_wrong_override_is_reported_with_what_is_allowed(override: str, key: str, words: str) -> None:
    found = problems_of(override)
    assert list(found) == [key]
    assert words in found[key]


def test_a_wrong_file_is_reported_with_what_is_allowed() -> None:
    found = problems_of(*mine("defaults: [tiny, _self_]\nrollout: {temprature: 0.5}\nname: 3\n"))
    assert "did you mean rollout.temperature?" in found["rollout.temprature"]
    assert "put it in quotes" in found["name"]


def test_the_default_that_replaces_a_refused_value_causes_no_second_problem() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["mode=sync", "mode.max_staleness=x"])
    assert [problem.message for problem in caught.value.problems] == ['expected integer, got the text "x"']


def test_a_value_that_is_wrong_is_refused_when_a_section_is_built_or_changed() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RolloutConfig(group_size=0)
    with pytest.raises(ValueError, match="greater than 0"):
        replace(LearnerConfig(), lr=-1.0)
    with pytest.raises(AttributeError):
        RunConfig().seed = 1  # type: ignore[misc]


# Keys that nothing reads

_OF_CRITIC = ("critic.lr", "critic.weight_decay", "critic.cpu_offload")
_EVALUATION = ("task.eval_split", "task.eval_size", *(f"trainer.eval_{x}" for x in ("samples", "temperature", "top_p")))
_CHAIN = "defaults: [ppo_7b, _self_]\ncritic: {updates_per_step: 4, value_clip: 0.2}\n"
_SETS = "defaults: [tiny, _self_]\ntask: {eval_sets: {hard: {path: 'builtin:arithmetic'}}}\n"
_NO_EVALUATION = ["trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false"]
_OF_PPO = "defaults: [ppo_7b, _self_]\ncritic: "


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["-cn", "reinforce_pp_7b", "algorithm.kl.coef=0"], ["algorithm.kl.estimator"]),
        (["-cn", "ppo_7b", "critic.shared_backbone=true"], _OF_CRITIC),
        (["-cn", "ppo_7b", "algorithm=grpo"], _OF_CRITIC),
        (["-cn", "ppo_7b"], []),
        (["-cn", "dapo_7b", "task.eval_path="], _EVALUATION),
        (["-cn", "dapo_7b", "task.eval_path=rows.jsonl"], ["task.eval_split"]),
        (["-cn", "cispo_7b", "correction=decoupled"], ["algorithm.clip_ratio_low", "algorithm.clip_ratio_high"]),
        # A key that was read with one that is reset is reset with it.
        ([_CHAIN, "critic.shared_backbone=true"], ["critic.updates_per_step", "critic.value_clip"]),
        ([_OF_PPO + "{shared_backbone: true}\n"], _OF_CRITIC),
        # The command line turned it off, and the file was right without.
        ([_OF_PPO + "{lr: 1.0e-5}\n", "critic.shared_backbone=true"], ["critic.lr"]),
        ([_SETS], []),
        ([_SETS, *_NO_EVALUATION, "trainer.stop_at_accuracy=null"], ["task.eval_sets"]),
    ],
)
def test_what_a_file_sets_for_what_is_turned_off_is_reset_and_reported(arguments: list[str], keys: list[str]) -> None:
    config, notes = notes_of(*(arguments if arguments[0] == "-cn" else mine(*arguments)))
    assert all(attrgetter(key)(config) == all_keys()[key].default for key in keys)
    assert all(f"{key}=" in notes for key in keys) and bool(notes) == bool(keys)


@pytest.mark.parametrize(
    ("arguments", "key", "hint"),
    [
        (["-cn", "ppo_7b", "algorithm=grpo", "critic.lr=1e-5"], "critic.lr", "leave it at null"),
        ([_OF_PPO + "{shared_backbone: true, lr: 1.0e-5}\n"], "critic.lr", "at null"),
        (["-cn", "tiny", "algorithm=sapo", "algorithm.clip_ratio_high=0.2"], "algorithm.clip_ratio_high", "out"),
        (["-cn", "tiny", "algorithm=grpo", "++algorithm.whiten_advantages=true"], "algorithm.whiten_advantages", "out"),
    ],
)
def test_what_the_user_sets_by_name_and_nothing_reads_is_refused(arguments: list[str], key: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(arguments if arguments[0] == "-cn" else mine(*arguments))
    (problem,) = caught.value.problems
    assert problem.key == key and "has no effect because" in problem.message and problem.hint.endswith(hint)


@pytest.mark.parametrize(
    "overrides",
    [
        "ray.address=h:1 ray.num_cpus=0",
        "algorithm=dapo correction=decoupled algorithm.clip_ratio_high=0.2",  # takes back what the preset sets
        "algorithm=dapo algorithm.clip_ratio_low=0.2 algorithm.normalize_by_std=true",  # is read
        "algorithm=gdpo algorithm.overlong_buffer_tokens=0 critic.lr=null",  # turns off what is off
    ],
)
def test_a_default_on_the_command_line_is_accepted_where_it_asks_for_nothing(overrides: str) -> None:
    load_config(overrides.split())


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_split_of_a_file_is_refused(split: str) -> None:
    found = problems_of("task.train_path=rows.jsonl", f"task.train_split={split}")
    assert "is a file, which has no splits" in found["task.train_split"]


# Keys of earlier versions, further evaluation sets


def test_a_renamed_key_is_refused_with_its_name_and_read_from_the_file_of_an_earlier_run() -> None:
    assert set(RENAMED.values()) <= all_keys().keys() and RENAMED.keys().isdisjoint(all_keys())
    refused = problems_of(*(f"++{old}=1" for old in RENAMED))
    assert all(refused[old].endswith(f"renamed to {new}") for old, new in RENAMED.items())

    current = load_config(["algorithm=dapo", "algorithm.kl.coef=0.1", "rollout.stream_interval=7"])
    stored = asdict(current)
    for old, new in RENAMED.items():
        (*sections, name), (*new_sections, new_name) = old.split("."), new.split(".")
        value = reduce(dict.__getitem__, new_sections, stored).pop(new_name)
        reduce(dict.__getitem__, sections, stored)[name] = value
    assert read_stored(stored) == (current, [])
    assert load_config(mine(yaml.safe_dump(stored))) == current
    assert load_config([*MINE, "rollout.stream_interval=9"]).rollout.stream_interval == 9, "the command line wins"

    found = problems_of(*mine("defaults: [tiny, _self_]\nrollout: {stream_tokens: 7}\n"))  # of a user
    assert "renamed to rollout.stream_interval" in found["rollout.stream_tokens"]


def test_sets_are_written_whole_or_key_by_key_and_come_back_from_a_file() -> None:
    base, path = ["device=cpu", "trainer.eval_temperature=1"], "task.eval_sets.hard.path=builtin:arithmetic"
    whole = load_config([*base, "task.eval_sets={hard: {path: 'builtin:arithmetic', samples: 8}}"])
    assert whole == load_config([*base, path, "task.eval_sets.hard.samples=8"])
    assert whole.task.eval_sets == {"hard": EvalSetConfig(path="builtin:arithmetic", samples=8)}
    assert to_run_config(asdict(whole)) == (whole, []) and pickle.loads(pickle.dumps(whole)) == whole


# What comes with Tandem. tests/golden (`argv`) holds every number of every preset and option.


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_7b")])
def test_a_7b_configuration_names_its_paper(name: str) -> None:
    comment = "\n".join(re.findall(r"^#.*", (packaged_configs() / f"{name}.yaml").read_text(), re.MULTILINE))
    assert re.search(r"arXiv:\d{4}\.\d{5}", comment)
