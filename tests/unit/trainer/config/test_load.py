"""Composition: names, groups, overrides, search path, and every problem at once."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from trainer.__main__ import main
from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.plain import dump_yaml
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.schema import RunConfig, all_keys
from trainer.errors import ConfigurationError


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def problems_of(*argv: str) -> dict[str, str]:
    """Key -> the whole text about it."""
    with pytest.raises(ConfigurationError) as caught:
        load_config(list(argv))
    return {problem.key: str(problem) for problem in caught.value.problems}


def test_without_arguments_the_configuration_is_tiny() -> None:
    config = load_config([])
    assert config.name == "tiny"
    assert config.model.path == "builtin:tiny"
    assert config.model.rollout_dtype == "float32"


@pytest.mark.parametrize("name", config_names(packaged_configs()))
def test_every_shipped_configuration_validates_without_the_device_it_names(name: str) -> None:
    config = load_config(["--config-name", name, "device=cuda"])
    assert config.name == name
    assert config.device.name == "cuda"


@pytest.mark.parametrize(
    "group_option",
    [f"{group}={option}" for group, options in groups([packaged_configs()]).items() for option in options],
)
def test_every_group_option_sets_its_own_name_and_validates(group_option: str) -> None:
    needed = {
        "algorithm=reinforce": "mode=sync",  # it is blind to the age of a sample
        "algorithm=opd": "algorithm.kl.path=builtin:tiny",  # nobody else teaches
    }.get(group_option, "seed=0")
    config = load_config([group_option, needed, "learner.max_tokens_per_micro_batch=65536"])
    group, option = group_option.split("=")
    if group != "correction":  # a part of the section `algorithm`, which has a name already
        assert getattr(config, group).name == option


def test_thirty_held_out_problems_are_answered_many_times_and_not_greedily() -> None:
    config = load_config(["--config-name=dapo_7b", "device=cuda"])
    assert (config.task.dedup, config.task.eval_size) == (True, 0)
    trainer = config.trainer
    assert (trainer.eval_samples, trainer.eval_temperature, trainer.eval_top_p) == (32, 1.0, 0.7)


def test_dapo_7b_has_the_published_hyper_parameters() -> None:
    config = load_config(["--config-name=dapo_7b", "device=cuda"])
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.aggregation == "token_mean"
    assert config.algorithm.filter_zero_variance
    assert config.algorithm.overlong_buffer_tokens == 4096
    assert (config.task.max_prompt_tokens, config.rollout.max_response_tokens) == (2048, 20480)
    assert config.rollout.group_size == 16
    assert (config.learner.lr, config.learner.warmup_steps, config.learner.weight_decay) == (1e-6, 10, 0.1)


def test_overrides_win_over_groups_which_win_over_the_schema() -> None:
    config = load_config(["algorithm=dapo", "algorithm.clip_high=0.4", "mode=sync"])
    assert config.algorithm.clip_high == 0.4
    assert config.algorithm.filter_zero_variance
    assert config.mode.max_staleness == 0


def test_async_mode_with_staleness_zero_is_allowed() -> None:
    assert load_config(["mode.max_staleness=0"]).mode.name == "async"


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


def test_the_dump_names_every_key() -> None:
    dumped = yaml.safe_load(dump_yaml(RunConfig()))
    for path in all_keys():
        node = dumped
        for part in path.split("."):
            node = node[part]


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
    assert [problem.allowed for problem in caught.value.problems] == ['expected integer, got the text "x"']


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


def test_unknown_options_are_refused() -> None:
    assert "--nope" in problems_of("--nope")["command line"]
    assert "--cfg" in problems_of("--cfg", "hydra")["command line"]


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
