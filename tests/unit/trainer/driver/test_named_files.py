"""Files, directories, packages and ports that a configuration names and that cannot be used."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainer.config.schema import RunConfig
from trainer.driver.named_files import file_problems, looks_local


def config_with(**keys: Any) -> RunConfig:
    """`section__key=value` for a nested key."""
    config: Any = RunConfig()
    for path, value in keys.items():
        config = _changed(config, path.split("__"), value)
    return config


def _changed(node: Any, path: list[str], value: Any) -> Any:
    name, *deeper = path
    return replace(node, **{name: _changed(getattr(node, name), deeper, value) if deeper else value})


def keys_unusable(config: RunConfig) -> list[str]:
    return [problem.key for problem in file_problems(config)]


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
    assert keys_unusable(config_with(algorithm__advantage_estimator="gae", critic__path=missing)) == ["critic.path"]
    assert keys_unusable(config_with(algorithm__advantage_estimator="gae", critic__path=good)) == []
    assert keys_unusable(config_with(critic__path=missing)) == []


def test_a_teacher_is_there_and_sees_the_longest_answer(tmp_path: Path) -> None:
    def refused(path: str, **keys: Any) -> list[str]:
        return keys_unusable(config_with(algorithm__kl__path=path, algorithm__kl__coef=0.1, **keys))

    teacher = Path(model_directory(tmp_path / "teacher"))
    assert refused(str(teacher)) == []
    assert refused("builtin:tiny") == [] and refused("builtin:large") == ["algorithm.kl.reference_model"]
    assert refused("some/teacher") == [], "of the hub"
    assert refused(str(tmp_path / "missing")) == ["algorithm.kl.reference_model"]
    (teacher / "config.json").write_text(json.dumps({"max_position_embeddings": 100, "num_attention_heads": 3}))
    assert refused(str(teacher), task__max_prompt_tokens=60, rollout__max_response_tokens=41) == [
        "rollout.max_response_tokens"
    ]
    fits = {"task__max_prompt_tokens": 60, "rollout__max_response_tokens": 40}
    assert refused(str(teacher), **fits, rollout__tensor_parallel_size=2) == [], "no engine has it"


def test_an_argument_that_the_engine_does_not_have_is_told_before_the_start() -> None:
    found = file_problems(config_with(rollout__engine_args={"block_sizee": 16, "enable_prefix_caching": True}))
    assert [problem.value for problem in found] == ["block_sizee: 16"]
    assert found[0].hint == "did you mean block_size?"


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
