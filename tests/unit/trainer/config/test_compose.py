"""Composition: names, groups, overrides, search path; what is reset and what is refused; every problem at once."""

from __future__ import annotations

import logging
import pickle
import re
import sys
from dataclasses import replace
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
from trainer.config.inactive import INACTIVE, inactive_keys, reset_inactive
from trainer.config.plain import RENAMED, dump_yaml, read_stored, to_plain, to_run_config
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import EvalSetConfig, LearnerConfig, RolloutConfig, RunConfig, all_keys
from trainer.driver.named_files import file_problems
from trainer.errors import ConfigurationError

NAMES = config_names(packaged_configs())


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems_of(*argv: str) -> dict[str, str]:
    """Key -> the whole text about it."""
    with pytest.raises(ConfigurationError) as caught:
        load_config(list(argv), check=file_problems)
    return {problem.key: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    "group_option",
    [f"{group}={option}" for group, options in groups([packaged_configs()]).items() for option in options],
)
def test_every_group_option_sets_its_own_name_and_validates(group_option: str) -> None:
    needed = {
        "algorithm=reinforce": "mode=sync",  # it is blind to the age of a sample
        "algorithm=opd": "algorithm.kl.reference_model=builtin:tiny",  # nobody else teaches
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


def test_scientific_notation_is_a_number_on_the_command_line_and_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\nlearner:\n  lr: 1e-6\n  eps: 2E-8\n")
    assert load_config(["learner.lr=1e-3"]).learner.lr == 1e-3
    steps = load_config(["trainer.total_steps=1e3"]).trainer.total_steps
    assert (steps, type(steps)) == (1000, int)
    config = load_config(["--config-dir", str(tmp_path), "--config-name", "mine"])
    assert (config.learner.lr, config.learner.eps) == (1e-6, 2e-8)


def test_open_sections_take_new_names_with_and_without_plus() -> None:
    config = load_config(
        [
            "+rollout.engine_args.block_size=1",
            "rollout.engine_args.cudagraph_capture_sizes=[1,2]",
            "+device.env.OMP=1,2",
        ]
    )
    assert config.rollout.engine_args == {"block_size": 1, "cudagraph_capture_sizes": [1, 2]}
    assert config.device.env == {"OMP": "1,2"}


@pytest.mark.parametrize(
    "text", ["/x/a b[1]{2}", "it's", 'say "hi"', "a,b=c", "back\\slash\\", "end\\'", "$HOME 100%", "123"]
)
def test_text_needs_no_second_layer_of_quotes(text: str) -> None:
    assert load_config([f"task.system_prompt={text}", "task.apply_chat_template=true"]).task.system_prompt == text


def test_home_is_expanded_in_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(["run_dir=~/run"]).run_dir == str(tmp_path / "run")


def test_interpolation_reaches_defaults_that_no_yaml_mentions() -> None:
    # No shipped YAML file sets beta2, so only the schema knows it.
    assert load_config(["learner.beta1=${learner.beta2}"]).learner.beta1 == RunConfig().learner.beta2


def test_a_bare_off_in_yaml_is_the_word_off(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\ntelemetry: {progress: off}\n")
    assert load_config(["-cd", str(tmp_path), "-cn", "mine"]).telemetry.progress == "off"


def test_a_folder_of_the_user_wins_and_can_add_group_options(tmp_path: Path) -> None:
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "poems.yaml").write_text("name: poems\ntrain_path: builtin:arithmetic\n")
    (tmp_path / "tiny.yaml").write_text("defaults: [{task: poems}, _self_]\nname: mine\nseed: 5\n")
    config = load_config(["--config-dir", str(tmp_path), "learner.max_tokens_per_micro_batch=20000"])
    assert (config.name, config.seed, config.task.name) == ("mine", 5, "poems")


def test_the_dumped_configuration_loads_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(
        ["algorithm=dapo", "+device.env.A=1", "learner.lr=3e-7", "+rollout.engine_args.compilation_config={y: 1}"]
    )
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    assert load_config(["--config-dir", str(tmp_path), "--config-name", "again"]) == config


@pytest.mark.parametrize("override", ["algorithm=grpo", "+algorithm=grpo", "correction=tis"])
def test_an_option_is_not_mixed_with_a_section_that_the_file_holds(tmp_path: Path, override: str) -> None:
    (tmp_path / "again.yaml").write_text(dump_yaml(load_config(["algorithm=gspo"])))
    found = problems_of("--config-dir", str(tmp_path), "--config-name", "again", override)
    assert "the section algorithm that again.yaml holds" in found[override.removeprefix("+").partition("=")[0]]


def test_an_option_stands_beside_a_file_that_holds_other_sections(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("learner: {lr: 1e-5}\n")
    config = load_config(["--config-dir", str(tmp_path), "--config-name", "mine", "+algorithm=gspo"])
    assert (config.learner.lr, config.algorithm.loss) == (1e-5, "gspo")


def test_a_backslash_that_is_meant_as_a_line_end_is_not_taken_as_text() -> None:
    found = problems_of(r'rollout.stop=["\n\n"]', r"task.system_prompt=Think.\nAnswer.")
    assert set(found) == {"rollout.stop", "task.system_prompt"}
    assert "a backslash and the letter n" in found["rollout.stop"]
    config = load_config(['rollout.stop=["\n\n"]', r"task.system_prompt=Put it in \boxed{}, not \text{}: \nabla f"])
    assert config.rollout.stop == ["\n\n"]
    assert config.task.system_prompt == r"Put it in \boxed{}, not \text{}: \nabla f"


def test_hydra_leaves_directory_files_and_logging_alone(tmp_path: Path) -> None:
    handlers, level = list(logging.getLogger().handlers), logging.getLogger().level
    load_config(["device=cuda"])
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []
    assert (logging.getLogger().handlers, logging.getLogger().level) == (handlers, level)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    found = problems_of(
        "device=cda", "learner.lrr=1", "mode.max_staleness=-1", "trainer.total_steps=ten", "rollout.group_size=1",
        "model.path=/does/not/exist", "task.train_path=missing.jsonl", "oops", "learner.lr=1,2", "seed=[1",
    )  # fmt: skip
    assert set(found) == {
        "device", "learner.lrr", "mode.max_staleness", "trainer.total_steps", "rollout.group_size",
        "model.path", "task.train_path", "oops", "learner.lr", "seed",
    }  # fmt: skip
    assert "did you mean device=cuda?" in found["device"]
    assert "did you mean learner.lr?" in found["learner.lrr"]
    assert "must be >= 0" in found["mode.max_staleness"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("lr=1", "lr", "did you mean critic.lr or learner.lr?"),
        ("max_stalenes=1", "max_stalenes", "did you mean mode.max_staleness?"),
        ("+nonsense=1", "nonsense", "keys of the top level"),
        ("learner.zzz=1", "learner.zzz", "keys of learner"),
        ("learner=3", "learner", "section"),
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
        ("run_dir=${nope}", "--config-name tiny", "nope"),
        ("~learner.nope", "--config-name tiny", "cannot be composed"),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(override: str, key: str, words: str) -> None:
    found = problems_of(override)
    assert list(found) == [key]
    assert words in found[key]


def test_the_default_that_stands_in_for_a_refused_value_causes_no_second_problem() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["mode=sync", "mode.max_staleness=x"])
    assert [problem.message for problem in caught.value.problems] == ['expected integer, got the text "x"']


def test_an_unknown_key_in_yaml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\nrollout: {temprature: 0.5}\nname: 3\n")
    found = problems_of("--config-dir", str(tmp_path), "--config-name", "mine")
    assert "did you mean rollout.temperature?" in found["rollout.temprature"]
    assert "put it in quotes" in found["name"]


def test_broken_yaml_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: [1\nb: }")
    assert (
        "cannot be composed"
        in problems_of("--config-dir", str(tmp_path), "--config-name", "mine")["--config-name mine"]
    )


def test_a_list_is_written_in_brackets_and_every_entry_is_checked() -> None:
    config = load_config(['rollout.stop=["</search>", "```"]', "rollout.stop_token_ids=[7, 8]"])
    assert (config.rollout.stop, config.rollout.stop_token_ids) == (["</search>", "```"], [7, 8])
    assert yaml.safe_load(dump_yaml(config))["rollout"]["stop"] == ["</search>", "```"]
    found = problems_of("rollout.stop='</search>'", "rollout.stop_token_ids=[7, x]")
    assert 'expected a list of text, got the text "</search>"; put it in brackets' in found["rollout.stop"]
    assert 'entry 1 expected integer, got the text "x"' in found["rollout.stop_token_ids"]


def test_unknown_names_and_folders_list_what_there_is() -> None:
    assert "did you mean dapo_7b?" in problems_of("--config-name", "dapo7b")["--config-name"]
    assert "folder" in problems_of("--config-dir", "nowhere")["--config-dir"]


@pytest.mark.parametrize(
    ("overrides", "is_compiled"),
    [(["device=cpu"], False), (["device=cpu", "learner.compile=true"], True), (["device=cuda"], True)],
)
def test_a_cpu_compiles_only_what_the_command_line_asks_for(overrides: list[str], is_compiled: bool) -> None:
    notes: list[str] = []
    config, _ = resolve(parse(["--config-name", "grpo_7b", *overrides]), note=notes.append)
    assert config.learner.compile is is_compiled
    assert any("learner.compile is off" in line for line in notes) is not is_compiled


@pytest.mark.parametrize(
    ("text", "is_compiled"),
    [
        ("defaults: [grpo_7b, _self_]", False),
        ("defaults: [grpo_7b, _self_]\nlearner: {compile: true}", True),
        ("defaults: [base, _self_]\nlearner: {lr: 1e-5}", True),
    ],
)
def test_a_file_of_the_user_may_ask_a_cpu_to_compile(tmp_path: Path, text: str, is_compiled: bool) -> None:
    (tmp_path / "base.yaml").write_text("defaults: [grpo_7b, _self_]\nlearner: {compile: true}")
    (tmp_path / "mine.yaml").write_text(text)
    config, _ = resolve(parse(["--config-dir", str(tmp_path), "--config-name", "mine", "device=cpu"]))
    assert config.learner.compile is is_compiled


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


def test_a_value_that_is_wrong_is_refused_when_a_section_is_built_or_changed() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        RolloutConfig(group_size=0)
    with pytest.raises(ValueError, match="greater than 0"):
        replace(LearnerConfig(), lr=-1.0)
    with pytest.raises(AttributeError):
        RunConfig().seed = 1  # type: ignore[misc]


def test_a_section_that_holds_nothing_is_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [tiny, _self_]\ntelemetry:\n")
    assert load_config(["-cd", str(tmp_path), "-cn", "mine"]).telemetry == RunConfig().telemetry


# Keys that nothing reads


_OF_CRITIC = ("critic.lr", "critic.weight_decay", "critic.cpu_offload")
_OF_EVALUATION = ("trainer.eval_samples", "trainer.eval_temperature", "trainer.eval_top_p")


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["reinforce_pp_7b", "algorithm.kl.coef=0"], ["algorithm.kl.estimator"]),
        (["reinforce_pp_7b", "learner.lr_schedule=constant"], ["learner.min_lr_ratio"]),
        (["ppo_7b", "critic.shared_backbone=true"], _OF_CRITIC),
        (["ppo_7b", "algorithm=grpo"], _OF_CRITIC),
        (["dapo_7b", "task.eval_path="], ("task.eval_split", "task.eval_size", *_OF_EVALUATION)),
        (["dapo_7b", "trainer.eval_temperature=0", "trainer.eval_samples=1"], ["trainer.eval_top_p"]),
        (["dapo_7b", "correction=decoupled"], ["algorithm.clip_ratio_high"]),
        (["cispo_7b", "correction=decoupled"], ["algorithm.clip_ratio_low", "algorithm.clip_ratio_high"]),
        (["gspo_7b", "correction=decoupled"], ["algorithm.clip_ratio_low", "algorithm.clip_ratio_high"]),
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


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm=reinforce", "mode=sync", "algorithm.clip_ratio_high=0.2"], "algorithm.clip_ratio_high"),
        (["algorithm=rloo", "algorithm.normalize_by_std=true"], "algorithm.normalize_by_std"),
        (["algorithm=grpo", "++algorithm.whiten_advantages=true"], "algorithm.whiten_advantages"),
        (["algorithm=ppo", "critic.shared_backbone=true", "critic.max_grad_norm=1.0"], "critic.max_grad_norm"),
        (
            ["algorithm.advantage_estimator=my.own_estimator", "algorithm.normalize_by_std=true"],
            "algorithm.normalize_by_std",
        ),
        (["algorithm.overlong_penalty=1.0"], "algorithm.overlong_penalty"),
        (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator"),
    ],
)
def test_a_default_that_is_asked_for_and_not_read_is_refused(overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(overrides)
    (problem,) = caught.value.problems
    assert problem.key == key and "has no effect" in problem.message and problem.hint == "leave it out"


@pytest.mark.parametrize(
    "overrides",
    [
        # Takes back what the preset says.
        ["algorithm=dapo", "correction=decoupled", "algorithm.clip_ratio_high=0.2"],
        # Is read.
        ["algorithm=dapo", "algorithm.clip_ratio_low=0.2", "algorithm.normalize_by_std=true"],
        # Turns off what is off.
        ["algorithm=gdpo", "algorithm.overlong_buffer_tokens=0", "critic.lr=null", "algorithm.gdpo_weights={}"],
        # Nobody asks for the defaults of keys that no override names.
        ["algorithm=reinforce", "mode=sync"],
    ],
)
def test_a_default_that_says_what_happens_is_accepted(overrides: list[str]) -> None:
    load_config(overrides)


def test_sets_of_a_file_go_back_where_the_command_line_turns_evaluation_off(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [tiny, _self_]\ntask: {eval_sets: {hard: {path: 'builtin:arithmetic'}}}\n"
    )
    mine = ["device=cpu", "--config-dir", str(tmp_path), "--config-name", "mine"]
    assert list(load_config(mine).task.eval_sets) == ["hard"]
    off = ["trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false"]
    config = load_config([*mine, *off, "trainer.stop_at_accuracy=null"])
    assert config.task.eval_sets == {}


@pytest.mark.parametrize("name", NAMES)
def test_one_pass_over_the_rows_resets_everything(name: str) -> None:
    """What a row looks at may be reset by rows before it alone."""
    start = load_config([f"--config-name={name}", "device=cpu"])
    for overrides in (
        {"algorithm": {**to_plain(start)["algorithm"], "advantage_estimator": "zero", "overlong_penalty": 0.5}},
        {"critic": {"updates_per_step": 4, "value_clip": 0.2, "lr": 1e-5}},
        {"task": {**to_plain(start)["task"], "eval_path": "", "curriculum_epochs": 3, "difficulty_column": "level"}},
        {"algorithm": {"loss": "reinforce", "correction": {"clamp": {"upper": 2.0}, "level": "sequence"}}},
    ):
        config, _ = to_run_config({**to_plain(start), **overrides})
        once, _, problems = reset_inactive(config, asked_for=(), written=())
        assert problems == [] and inactive_keys(once) == set()


def test_every_row_is_about_keys_that_there_are() -> None:
    assert {key for row in INACTIVE for key in (*row.keys, *row.because)} <= all_keys().keys()


# Keys of earlier versions and of other sets


def test_a_renamed_key_is_refused_with_its_name_and_read_from_the_file_of_an_earlier_run(tmp_path: Path) -> None:
    assert set(RENAMED.values()) <= all_keys().keys() and RENAMED.keys().isdisjoint(all_keys())
    refused = problems_of(*(f"++{old}=1" for old in RENAMED))
    assert all(refused[old].endswith(f"renamed to {new}") for old, new in RENAMED.items())

    current = load_config(["algorithm=dapo", "algorithm.kl.coef=0.1", "rollout.stream_interval=7"])
    stored = to_plain(current)
    for old, new in RENAMED.items():
        (*above, name), (*sections, new_name) = old.split("."), new.split(".")
        values = reduce(dict.__getitem__, sections, stored)
        reduce(dict.__getitem__, above, stored)[name] = values.pop(new_name)
    assert read_stored(stored) == (current, [])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored))
    repeat = ["--config-dir", str(tmp_path), "--config-name", "config"]
    assert load_config(repeat) == current
    assert load_config([*repeat, "rollout.stream_interval=9"]).rollout.stream_interval == 9, "the command line wins"

    (tmp_path / "users.yaml").write_text("defaults: [tiny, _self_]\nrollout: {stream_tokens: 7}\n")
    with pytest.raises(ConfigurationError, match=r"renamed to rollout\.stream_interval"):
        load_config(["--config-dir", str(tmp_path), "--config-name", "users"])


def test_sets_are_written_whole_or_key_by_key_and_come_back_from_a_file() -> None:
    whole = load_config(
        ["device=cpu", "trainer.eval_temperature=1", "task.eval_sets={hard: {path: 'builtin:arithmetic', samples: 8}}"]
    )
    single = load_config(
        [
            "device=cpu",
            "trainer.eval_temperature=1",
            "task.eval_sets.hard.path=builtin:arithmetic",
            "task.eval_sets.hard.samples=8",
        ]
    )
    assert whole == single
    assert whole.task.eval_sets == {"hard": EvalSetConfig(path="builtin:arithmetic", samples=8)}
    again, problems = to_run_config(to_plain(whole))
    assert (again, problems) == (whole, []) and pickle.loads(pickle.dumps(whole)) == whole


def test_a_path_with_special_characters_needs_no_second_quotes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a[1],b.jsonl").write_text("")
    config = load_config(["device=cpu", "task.eval_sets.odd.path=a[1],b.jsonl"])
    assert config.task.eval_sets["odd"].path == "a[1],b.jsonl"


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


def config_of(name: str) -> RunConfig:
    return load_config([f"--config-name={name}", "device=cuda"])


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_loads_and_has_its_own_name(name: str) -> None:
    config = load_config([f"--config-name={name}", "device=cpu"])
    assert config.name == name
    assert describe_objective(config.algorithm)


def test_every_algorithm_of_a_7b_run_is_here() -> None:
    assert {name for name in NAMES if name.endswith("_7b")} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_has_the_published_numbers(name: str) -> None:
    config = config_of(name)
    got = {key: attrgetter(key)(config) for key in PUBLISHED[name]}
    assert got == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_names_the_paper_that_its_numbers_come_from(name: str) -> None:
    comment = "\n".join(re.findall(r"^#.*", (packaged_configs() / f"{name}.yaml").read_text(), re.MULTILINE))
    assert re.search(r"arXiv:\d{4}\.\d{5}", comment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_small_recipe_takes_one_device_and_compiles_nothing(device: str) -> None:
    config = load_config(["--config-name=grpo_small", f"device={device}", "model.path=owner/mine"])
    assert (config.learner.num_ranks, config.rollout.num_replicas, config.rollout.num_workers) == (1, 1, 1)
    assert config.mode.shares_devices and not config.learner.compile
    assert config.ray.object_store_gib < 1
