"""Composition: names, groups, overrides, search path; what is reset and what is refused; every problem at once."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from dataclasses import asdict, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trainer.__main__ import main
from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.describe import describe_objective
from trainer.config.plain import RENAMED, dump_yaml, read_stored, to_run_config
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import EvalSetConfig, LearnerConfig, RolloutConfig, RunConfig, all_keys
from trainer.driver.named_files import file_problems
from trainer.errors import ConfigurationError

NAMES = config_names(packaged_configs())
OPTIONS = [f"{group}={option}" for group, names in groups([packaged_configs()]).items() for option in names]
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


@pytest.mark.parametrize("group_option", OPTIONS)
def test_every_group_option_sets_its_own_name_and_validates(group_option: str) -> None:
    needed = {
        "algorithm=reinforce": "mode=sync",  # it ignores the age of a sample
        "algorithm=opd": "algorithm.kl.reference_model=builtin:tiny",  # there is no other teacher
    }.get(group_option, "seed=0")
    config = load_config([group_option, needed, "learner.max_tokens_per_micro_batch=65536"])
    group, option = group_option.split("=")
    if group != "correction":  # a part of the section `algorithm`, which has a name already
        assert getattr(config, group).name == option


def test_overrides_win_over_groups_which_win_over_the_schema() -> None:
    config = load_config(["algorithm=dapo", "algorithm.clip_ratio_high=0.4", "mode=sync"])
    assert config.algorithm.clip_ratio_high == 0.4
    assert config.algorithm.dynamic_sampling
    assert config.mode.max_staleness == 0


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


def test_an_option_goes_with_a_file_that_has_other_sections() -> None:
    config = load_config(mine("learner: {lr: 1e-5}\n", "+algorithm=gspo"))
    assert (config.learner.lr, config.algorithm.loss) == (1e-5, "gspo")


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
        ("lr=1", "lr", "did you mean critic.lr or learner.lr?"),
        ("learner.lrr=1", "learner.lrr", "did you mean learner.lr?"),
        ("max_stalenes=1", "max_stalenes", "did you mean mode.max_staleness?"),
        ("+nonsense=1", "nonsense", "keys of the top level"),
        ("learner.zzz=1", "learner.zzz", "keys of learner"),
        ("learner=3", "learner", "section"),
        ("device=cda", "device", "did you mean device=cuda?"),
        ("trainer.total_steps=1.5", "trainer.total_steps", "expected integer"),
        ("trainer.total_steps=null", "trainer.total_steps", "expected integer, got null"),
        ("trainer.total_steps=true", "trainer.total_steps", "expected integer, got the boolean"),
        ("learner.lr=nan", "learner.lr", "finite"),
        ("learner.beta2=1", "learner.beta2", ">= 0 and < 1"),
        ("seed=4294967296", "seed", "<= 4294967295"),
        ("telemetry.tensorboard=1", "telemetry.tensorboard", "true or false"),
        ("telemetry.progress=of", "telemetry.progress", "did you mean off?"),
        ("algorithm.loss=ppo_clp", "algorithm.loss", "did you mean ppo_clip?"),
        ("device.env=3", "device.env", "map"),
        ("rollout.stop='</search>'", "rollout.stop", 'expected a list of text, got the text "</search>"; put it in'),
        ("rollout.stop_token_ids=[7, x]", "rollout.stop_token_ids", 'entry 1 expected integer, got the text "x"'),
        (r'rollout.stop=["\n\n"]', "rollout.stop", "a backslash and the letter n"),
        (r"task.system_prompt=Think.\nAnswer.", "task.system_prompt", "a backslash and the letter n"),
        ("run_dir=${nope}", "--config-name tiny", "nope"),
        ("~learner.nope", "--config-name tiny", "cannot be composed"),
        ("--config-name=dapo7b", "--config-name", "did you mean dapo_7b?"),
        ("--config-dir=nowhere", "--config-dir", "folder"),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override: str, key: str, words: str) -> None:
    found = problems_of(override)
    assert list(found) == [key]
    assert words in found[key]


def test_a_wrong_file_is_named_with_what_is_allowed() -> None:
    found = problems_of(*mine("defaults: [tiny, _self_]\nrollout: {temprature: 0.5}\nname: 3\n"))
    assert "did you mean rollout.temperature?" in found["rollout.temprature"]
    assert "put it in quotes" in found["name"]
    assert "cannot be composed" in problems_of(*mine("a: [1\nb: }"))["--config-name mine"]


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


# torch.compile on a CPU


@pytest.mark.parametrize(
    ("text", "overrides", "is_compiled"),
    [
        ("", [], False),
        ("", ["learner.compile=true"], True),
        ("learner: {compile: true}", [], True),
        ("BASE", [], True),
    ],
)
def test_a_cpu_compiles_only_what_the_user_asks_for(text: str, overrides: list[str], is_compiled: bool) -> None:
    Path("base.yaml").write_text("defaults: [grpo_7b, _self_]\nlearner: {compile: true}")
    file = "defaults: [base, _self_]" if text == "BASE" else f"defaults: [grpo_7b, _self_]\n{text}"
    config, notes = notes_of(*mine(file), "device=cpu", *overrides)
    assert config.learner.compile is is_compiled
    assert ("learner.compile is off" in notes) is not is_compiled


@pytest.mark.parametrize(
    ("resource", "arguments", "is_compiled"),
    [
        (None, [], False),
        (None, ["learner.compile=true"], True),
        (None, ["ray.address=auto"], True),
        (None, ["--dry-run", "--device-memory-gib", "80"], True),
        ("GPU", [], True),
    ],
)
def test_auto_that_finds_a_cpu_compiles_only_what_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, resource: str | None, arguments: list[str], is_compiled: bool
) -> None:
    ran: list[RunConfig] = []
    fake = SimpleNamespace(run=lambda config, **_: ran.append(config), dry_run=lambda config, **_: ran.append(config))
    monkeypatch.setitem(sys.modules, "trainer.driver.run", fake)
    monkeypatch.setitem(sys.modules, "trainer.tools.dry_run", fake)
    monkeypatch.setattr("weight_sync.device.select.get_backend", lambda: SimpleNamespace(ray_resource=resource))
    main(["--config-name", "grpo_7b", *arguments])
    (config,) = ran
    assert config.learner.compile is is_compiled


# Keys that nothing reads


_OF_CRITIC = ("critic.lr", "critic.weight_decay", "critic.cpu_offload")
_OF_EVALUATION = ("trainer.eval_samples", "trainer.eval_temperature", "trainer.eval_top_p")
_UNREAD_CHAIN = "defaults: [ppo_7b, _self_]\ncritic: {updates_per_step: 4, value_clip: 0.2}\n"
_SETS = "defaults: [tiny, _self_]\ntask: {eval_sets: {hard: {path: 'builtin:arithmetic'}}}\n"


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["-cn", "reinforce_pp_7b", "algorithm.kl.coef=0"], ["algorithm.kl.estimator"]),
        (["-cn", "reinforce_pp_7b", "learner.lr_schedule=constant"], ["learner.min_lr_ratio"]),
        (["-cn", "ppo_7b", "critic.shared_backbone=true"], _OF_CRITIC),
        (["-cn", "ppo_7b", "algorithm=grpo"], _OF_CRITIC),
        (["-cn", "ppo_7b"], []),
        (["-cn", "dapo_7b", "task.eval_path="], ("task.eval_split", "task.eval_size", *_OF_EVALUATION)),
        (["-cn", "dapo_7b", "task.eval_path=rows.jsonl"], ["task.eval_split"]),
        (["-cn", "dapo_7b", "trainer.eval_temperature=0", "trainer.eval_samples=1"], ["trainer.eval_top_p"]),
        (["-cn", "dapo_7b", "correction=decoupled"], ["algorithm.clip_ratio_high"]),
        (["-cn", "cispo_7b", "correction=decoupled"], ["algorithm.clip_ratio_low", "algorithm.clip_ratio_high"]),
        # A key that was read with one that is reset is reset with it.
        ([_UNREAD_CHAIN, "critic.shared_backbone=true"], ["critic.updates_per_step", "critic.value_clip"]),
        (["defaults: [ppo_7b, _self_]\ncritic: {shared_backbone: true}\n"], _OF_CRITIC),
        # The command line turned it off, and the file was right without.
        (["defaults: [ppo_7b, _self_]\ncritic: {lr: 1.0e-5}\n", "critic.shared_backbone=true"], ["critic.lr"]),
        ([_SETS], []),
        (
            [
                _SETS, "trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false",
                "trainer.stop_at_accuracy=null",
            ],
            ["task.eval_sets"],
        ),
    ],
)  # fmt: skip
def test_what_a_file_sets_for_what_is_turned_off_is_reset_and_reported(arguments: list[str], keys: list[str]) -> None:
    config, notes = notes_of(*(arguments if arguments[0] == "-cn" else mine(*arguments)))
    assert all(attrgetter(key)(config) == all_keys()[key].default for key in keys)
    assert all(f"{key}=" in notes for key in keys) and bool(notes) == bool(keys)


@pytest.mark.parametrize(
    ("arguments", "key", "hint"),
    [
        (["-cn", "ppo_7b", "algorithm=grpo", "critic.lr=1e-5"], "critic.lr", "leave it at null"),
        (["defaults: [ppo_7b, _self_]\ncritic: {shared_backbone: true, lr: 1.0e-5}\n"], "critic.lr", "at null"),
        (["-cn", "tiny", "algorithm=sapo", "algorithm.clip_ratio_high=0.2"], "algorithm.clip_ratio_high", "out"),
        (["-cn", "tiny", "algorithm=grpo", "++algorithm.whiten_advantages=true"], "algorithm.whiten_advantages", "out"),
        (
            ["-cn", "tiny", "algorithm=ppo", "critic.shared_backbone=true", "critic.max_grad_norm=1.0"],
            "critic.max_grad_norm", "out",
        ),
        (["-cn", "tiny", "algorithm.overlong_penalty=1.0"], "algorithm.overlong_penalty", "out"),
        (["-cn", "tiny", "algorithm.kl.estimator=k3"], "algorithm.kl.estimator", "out"),
        (["-cn", "tiny", "ray.address=h:1", "ray.num_cpus=0"], "", ""),
        # A default that takes back what the preset sets, or that is read, or that turns off what is off.
        (["-cn", "tiny", "algorithm=dapo", "correction=decoupled", "algorithm.clip_ratio_high=0.2"], "", ""),
        (["-cn", "tiny", "algorithm=dapo", "algorithm.clip_ratio_low=0.2", "algorithm.normalize_by_std=true"], "", ""),
        (["-cn", "tiny", "algorithm=gdpo", "algorithm.overlong_buffer_tokens=0", "critic.lr=null"], "", ""),
    ],
)  # fmt: skip
def test_what_the_user_sets_by_name_and_nothing_reads_is_refused(arguments: list[str], key: str, hint: str) -> None:
    arguments = arguments if arguments[0] == "-cn" else mine(*arguments)
    if not key:
        load_config(arguments)
        return
    with pytest.raises(ConfigurationError) as caught:
        load_config(arguments)
    (problem,) = caught.value.problems
    assert problem.key == key and "has no effect because" in problem.message and problem.hint.endswith(hint)


@pytest.mark.parametrize("reader", ["auto", "jsonl"])
def test_the_split_of_a_file_is_refused(reader: str) -> None:
    arguments = ["task.train_path=rows.jsonl", "task.eval_path=", "trainer.stop_at_accuracy=null"]
    load_config([*arguments, f"task.reader={reader}"])
    for split in ("train", "validation"):
        found = problems_of(*arguments, f"task.reader={reader}", f"task.train_split={split}")
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


# What comes with Tandem

PUBLISHED: dict[str, dict[str, Any]] = {
    "ppo_7b": {
        "algorithm.advantage_estimator": "gae", "algorithm.gae_gamma": 1.0, "algorithm.gae_lambda": 1.0,
        "algorithm.kl.coef": 0.0,
        "critic.lr": 5e-6, "critic.weight_decay": 0.0, "learner.lr": 1e-6, "learner.warmup_steps": 50,
        "learner.weight_decay": 0.0, "learner.beta2": 0.95, "rollout.group_size": 64, "trainer.groups_per_step": 128,
        "task.max_prompt_tokens": 2048, "rollout.max_response_tokens": 8000,
    },
    "grpo_7b": {
        "algorithm.kl.coef": 0.04, "algorithm.kl.apply_to": "loss", "algorithm.kl.estimator": "k3",
        "algorithm.normalize_by_std": True, "algorithm.loss_aggregation": "seq_mean_token_mean", "learner.lr": 1e-6,
        "rollout.group_size": 64, "trainer.groups_per_step": 16, "rollout.max_response_tokens": 1024,
    },
    "dapo_7b": {
        "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.28, "algorithm.kl.coef": 0.0,
        "algorithm.loss_aggregation": "token_mean", "algorithm.dynamic_sampling": True,
        "algorithm.overlong_buffer_tokens": 4096, "algorithm.overlong_penalty": 1.0, "task.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480, "rollout.group_size": 16, "trainer.groups_per_step": 32,
        "learner.lr": 1e-6, "learner.warmup_steps": 10, "learner.weight_decay": 0.1,
        "task.dedup": True, "task.eval_size": 0,
        "trainer.eval_samples": 32, "trainer.eval_temperature": 1.0, "trainer.eval_top_p": 0.7,
    },
    "gspo_7b": {
        "algorithm.loss": "gspo", "algorithm.clip_ratio_low": 3e-4, "algorithm.clip_ratio_high": 4e-4,
        "algorithm.kl.coef": 0.0,
        "algorithm.loss_aggregation": "seq_mean_token_mean", "mode.max_staleness": 3, "learner.lr": 1e-6,
        "learner.weight_decay": 0.1, "rollout.group_size": 16, "trainer.groups_per_step": 128,
    },
    "cispo_7b": {
        "algorithm.loss": "cispo", "algorithm.clip_ratio_low": 1.0, "algorithm.clip_ratio_high": 4.0,
        "algorithm.kl.coef": 0.0,
        "algorithm.dynamic_sampling": True, "rollout.group_size": 16, "learner.beta2": 0.95, "learner.eps": 1e-15,
    },
    "reinforce_pp_7b": {
        "algorithm.advantage_estimator": "reinforce_pp_baseline",
        "algorithm.kl.coef": 1e-5, "algorithm.kl.estimator": "k2",
        "algorithm.correction.mask.lower": 0.5, "algorithm.correction.mask.upper": 5.0, "learner.lr": 5e-7,
        "learner.lr_schedule": "cosine", "learner.min_lr_ratio": 0.1, "learner.warmup_steps": 15,
        "learner.weight_decay": 0.0, "learner.beta2": 0.95, "rollout.group_size": 8, "trainer.groups_per_step": 128,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_loads_and_has_its_own_name(name: str) -> None:
    config = load_config([f"--config-name={name}", "device=cpu"])
    assert config.name == name
    assert describe_objective(config.algorithm)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_7b")])
def test_a_7b_configuration_has_the_numbers_of_the_paper_that_it_names(name: str) -> None:
    config = load_config([f"--config-name={name}", "device=cuda"])
    assert {key: attrgetter(key)(config) for key in PUBLISHED[name]} == PUBLISHED[name]
    comment = "\n".join(re.findall(r"^#.*", (packaged_configs() / f"{name}.yaml").read_text(), re.MULTILINE))
    assert re.search(r"arXiv:\d{4}\.\d{5}", comment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_small_recipe_takes_one_device_and_compiles_nothing(device: str) -> None:
    config = load_config(["--config-name=grpo_small", f"device={device}", "model.path=owner/mine"])
    assert (config.learner.num_ranks, config.rollout.num_replicas, config.rollout.num_workers) == (1, 1, 1)
    assert config.mode.shares_devices and not config.learner.compile
    assert config.ray.object_store_gib < 1
