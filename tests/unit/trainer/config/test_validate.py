"""Combinations that cannot work or do nothing, and what lies outside of the configuration."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trainer.config.environment import check_environment, looks_local
from trainer.config.inactive import reset_inactive
from trainer.config.plain import to_run_config
from trainer.config.rules import check_combinations
from trainer.config.schema import RunConfig, all_keys

if TYPE_CHECKING:
    from collections.abc import Collection

    from trainer.errors import Problem


def config_with(**keys: Any) -> RunConfig:
    """`section__key=value` for a nested key."""
    data: dict[str, Any] = {}
    for path, value in keys.items():
        *sections, name = path.split("__")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    config, problems = to_run_config(data)
    assert problems == []
    return config


def problems_in(config: RunConfig, *, written: Collection[str] = ()) -> list[Problem]:
    """Of every key that has an inactive value, or cannot have the one that it has."""
    _, _, inactive = reset_inactive(config, asked_for=all_keys(), written=written)
    return [*inactive, *check_combinations(config)]


def keys_refused(config: RunConfig, *, written: Collection[str] = ()) -> list[str]:
    return [problem.key for problem in problems_in(config, written=written)]


def keys_unusable(config: RunConfig) -> list[str]:
    return [problem.key for problem in check_environment(config)]


def test_the_defaults_have_no_problem() -> None:
    assert check_combinations(RunConfig()) == []


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"name": "a/b"}, "name"),
        ({"model__lora__alpha": 8.0}, "model.lora.alpha"),
        ({"model__lora__target_modules": "q_proj"}, "model.lora.target_modules"),
        ({"model__lora__rank": 12}, "model.lora.rank"),
        ({"model__lora__rank": 8, "model__lora__target_modules": "q_proj,v_proj"}, "model.lora.target_modules"),
        ({"device__env": {"NOT A NAME": "1"}}, "device.env"),
        ({"task__train_path": "", "task__eval_path": "builtin:arithmetic"}, "task.train_path"),
        ({"task__reader": "arithmetic", "task__train_path": "a.jsonl"}, "task.reader"),
        ({"task__reader": "jsonl", "task__train_path": "a.jsonl"}, "task.reader"),
        ({"task__reader": "jsonl", "task__eval_path": ""}, "task.reader"),
        ({"task__train_path": "a/b", "task__eval_path": "a/b", "task__max_operand": 20}, "task.max_operand"),
        ({"task__eval_path": "", "task__eval_size": 5}, "task.eval_size"),
        ({"rollout__group_size": 1}, "rollout.group_size"),
        ({"rollout__group_size": 1, "algorithm__advantage": "rloo"}, "rollout.group_size"),
        (
            {"rollout__group_size": 1, "algorithm__advantage": "reinforce", "algorithm__filter_zero_variance": True},
            "algorithm.filter_zero_variance",
        ),
        ({"algorithm__advantage": "rloo", "algorithm__normalize_by_std": False}, "algorithm.normalize_by_std"),
        ({"algorithm__loss": "importance_sampling", "algorithm__clip_low": 0.1}, "algorithm.clip_low"),
        ({"algorithm__loss": "importance_sampling", "algorithm__clip_high": 0.1}, "algorithm.clip_high"),
        ({"algorithm__loss": "importance_sampling", "algorithm__clip_dual": 3.0}, "algorithm.clip_dual"),
        ({"algorithm__overlong_penalty": 0.5}, "algorithm.overlong_penalty"),
        ({"algorithm__overlong_buffer_tokens": 2000}, "algorithm.overlong_buffer_tokens"),
        ({"mode__name": "sync"}, "mode.max_staleness"),
        ({"mode__name": "one_step_off", "mode__max_staleness": 2}, "mode.max_staleness"),
        ({"rollout__max_model_len": 1535}, "rollout.max_model_len"),
        ({"learner__max_tokens_per_micro_batch": 1535}, "learner.max_tokens_per_micro_batch"),
        ({"learner__num_ranks": 257}, "learner.num_ranks"),
        ({"learner__min_lr_frac": 0.1}, "learner.min_lr_frac"),
        ({"learner__lr_schedule": "cosine", "learner__warmup_steps": 100}, "learner.warmup_steps"),
        ({"trainer__stop_at_accuracy": 0.9, "task__eval_path": ""}, "trainer.stop_at_accuracy"),
        (
            {
                "trainer__stop_at_accuracy": 0.9,
                "trainer__eval_every": 0,
                "trainer__eval_at_start": False,
                "trainer__eval_at_end": False,
            },
            "trainer.stop_at_accuracy",
        ),
        ({"checkpoint__every_steps": 50, "checkpoint__keep_every": 75}, "checkpoint.keep_every"),
        ({"checkpoint__every_steps": 50, "checkpoint__keep_every": 10}, "checkpoint.keep_every"),
        ({"checkpoint__every_steps": 0, "checkpoint__keep_every": 50}, "checkpoint.keep_every"),
        ({"ray__address": ""}, "ray.address"),
        ({"telemetry__wandb_project": "mine"}, "telemetry.wandb_project"),
        ({"telemetry__wandb_entity": "team"}, "telemetry.wandb_entity"),
        ({"telemetry__wandb_group": "sweep"}, "telemetry.wandb_group"),
        ({"telemetry__wandb_tags": "a+b"}, "telemetry.wandb_tags"),
    ],
)
def test_an_impossible_or_ineffective_combination_is_refused(keys: dict[str, Any], refused: str) -> None:
    assert keys_refused(config_with(**keys)) == [refused]


@pytest.mark.parametrize(
    "keys",
    [
        {"rollout__group_size": 1, "algorithm__advantage": "reinforce"},
        {"mode__max_staleness": 0},
        {"rollout__max_model_len": 1536},
        {"learner__max_tokens_per_micro_batch": 1536},
        {"learner__num_ranks": 256},
        {"learner__lr_schedule": "cosine", "learner__warmup_steps": 99, "learner__min_lr_frac": 0.1},
        {"algorithm__overlong_buffer_tokens": 1024, "algorithm__overlong_penalty": 0.5},
        {"ray__address": "auto"},
        {"checkpoint__every_steps": 50, "checkpoint__keep_every": 150},
        {"checkpoint__every_steps": 0},
    ],
)
def test_the_nearest_possible_combination_is_allowed(keys: dict[str, Any]) -> None:
    assert keys_refused(config_with(**keys)) == []


def test_what_is_named_and_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    missing = str(tmp_path / "missing")
    config = config_with(
        run_dir=str(tmp_path / "file"),
        model__path=missing,
        model__tokenizer_path=missing,
        task__train_path=missing + ".jsonl",
        task__eval_path="also_missing.parquet",
        task__reward__name=f"{missing}.py:score",
        checkpoint__resume=missing,
    )
    assert keys_unusable(config) == [
        "run_dir", "model.path", "model.tokenizer_path", "task.train_path", "task.eval_path", "task.reward.name",
        "checkpoint.resume",
    ]  # fmt: skip


def test_hub_names_need_no_network() -> None:
    config = config_with(
        model__path="Qwen/Qwen2.5-7B", task__train_path="openai/gsm8k:main", task__eval_path="owner/name"
    )
    assert keys_unusable(config) == []
    assert not looks_local("gpt2")
    assert looks_local("a/b/c")
    assert looks_local("./b")


def test_a_learner_that_would_need_loss_scaling_is_refused_by_its_type() -> None:
    _, problems = to_run_config({"model": {"compute_dtype": "float16", "rollout_dtype": "float16"}})
    assert [problem.key for problem in problems] == ["model.compute_dtype"]
    assert problems[0].allowed.startswith("must be one of float32, bfloat16")


def test_unknown_builtins_are_refused() -> None:
    config = config_with(model__path="builtin:huge", task__train_path="builtin:poems")
    assert keys_unusable(config) == ["model.path", "task.train_path"]


def test_a_run_dir_below_a_file_is_refused_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert keys_unusable(config_with(run_dir=str(tmp_path / "file" / "run"))) == ["run_dir"]
    assert keys_unusable(config_with(run_dir="/proc/run")) == ["run_dir"]
    assert keys_unusable(config_with(run_dir=str(tmp_path / "new" / "run"))) == []
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def model_directory(path: Path, **described: Any) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(described))
    (path / "tokenizer.json").write_text("{}")
    return str(path)


def test_a_model_directory_must_be_whole_and_must_fit(tmp_path: Path) -> None:
    good = model_directory(tmp_path / "good", num_attention_heads=4, max_position_embeddings=1536)
    assert keys_unusable(config_with(model__path=good)) == []
    assert keys_unusable(config_with(model__path=good, rollout__tensor_parallel_size=3)) == [
        "rollout.tensor_parallel_size"
    ]
    assert keys_unusable(config_with(model__path=good, rollout__max_response_tokens=1025)) == [
        "rollout.max_response_tokens"
    ]
    (Path(good) / "tokenizer.json").unlink()
    assert keys_unusable(config_with(model__path=good)) == ["model.path"]
    (Path(good) / "tokenizer.json").write_text("{}")
    (Path(good) / "config.json").write_text("{broken")
    assert keys_unusable(config_with(model__path=good)) == ["model.path"]
    (Path(good) / "config.json").unlink()
    assert keys_unusable(config_with(model__path=good)) == ["model.path"]


@pytest.mark.parametrize(("kv_heads", "fitting"), [(4, [1, 2, 4, 28]), (8, [1, 2, 4]), (28, [1, 2, 4, 7, 14, 28])])
def test_key_value_heads_are_split_evenly_or_copied_evenly(tmp_path: Path, kv_heads: int, fitting: list[int]) -> None:
    heads = {"num_attention_heads": 28, "num_key_value_heads": kv_heads}
    for name, described in (("flat", heads), ("nested", {"vision_config": {}, "text_config": heads})):
        path = model_directory(tmp_path / name, **described)
        configs = {tp: config_with(model__path=path, rollout__tensor_parallel_size=tp) for tp in range(1, 29)}
        assert [tp for tp, cfg in configs.items() if not keys_unusable(cfg)] == fitting


def test_the_critic_needs_a_model_of_its_own_only_if_it_is_read(tmp_path: Path) -> None:
    good, missing = model_directory(tmp_path / "good"), str(tmp_path / "missing")
    assert keys_unusable(config_with(algorithm__advantage="gae", critic__path=missing)) == ["critic.path"]
    assert keys_unusable(config_with(algorithm__advantage="gae", critic__path=good)) == []
    assert keys_unusable(config_with(critic__path=missing)) == []


def test_a_teacher_is_there_and_sees_the_longest_answer(tmp_path: Path) -> None:
    def refused(path: str, **keys: Any) -> list[str]:
        return keys_unusable(config_with(algorithm__kl__path=path, algorithm__kl__coef=0.1, **keys))

    teacher = Path(model_directory(tmp_path / "teacher"))
    assert refused(str(teacher)) == []
    assert refused("builtin:tiny") == [] and refused("builtin:large") == ["algorithm.kl.path"]
    assert refused("some/teacher") == [], "of the hub"
    assert refused(str(tmp_path / "missing")) == ["algorithm.kl.path"]
    (teacher / "config.json").write_text(json.dumps({"max_position_embeddings": 100, "num_attention_heads": 3}))
    assert refused(str(teacher), task__max_prompt_tokens=60, rollout__max_response_tokens=41) == [
        "rollout.max_response_tokens"
    ]
    fits = {"task__max_prompt_tokens": 60, "rollout__max_response_tokens": 40}
    assert refused(str(teacher), **fits, rollout__tensor_parallel_size=2) == [], "no engine has it"


def test_an_argument_that_the_engine_does_not_have_is_told_before_the_start() -> None:
    found = check_environment(config_with(rollout__engine_args={"block_sizee": 16, "enable_prefix_caching": True}))
    assert [problem.got for problem in found] == ["block_sizee: 16"]
    assert found[0].do == "did you mean block_size?"


@pytest.mark.parametrize(
    ("described", "refused"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, ["rollout.max_response_tokens"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, []),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, []),
        ({"rope_scaling": None}, ["rollout.max_response_tokens"]),
    ],
)
def test_a_context_is_a_limit_unless_it_is_stretched(
    tmp_path: Path, described: dict[str, Any], refused: list[str]
) -> None:
    path = model_directory(tmp_path / "model", max_position_embeddings=1000, **described)
    assert keys_unusable(config_with(model__path=path)) == refused


def test_a_port_in_use_is_refused_only_for_a_private_cluster() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = config_with(learner__port=port)
        assert keys_unusable(config) == ["learner.port"]
        assert keys_unusable(replace(config, ray=replace(config.ray, address="auto"))) == []
    assert keys_unusable(config) == []
