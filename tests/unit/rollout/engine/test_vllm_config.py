"""What an engine is started with: arguments, environment, end tokens; and which tokens it takes."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import (
    check_token_ids,
    engine_args,
    engine_config,
    foreign_token,
    known_end_tokens,
    process_env,
)
from rollout.engine.vllm_process import environment as process_environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_cpu_engine_of_one_worker_runs_in_one_process() -> None:
    spec = EngineSpec(model="m", kv_cache_gib=0.25)
    args, env = engine_args(spec), process_env(spec)
    assert args["distributed_executor_backend"] == "uni"
    assert args["kv_cache_memory_bytes"] == 1 << 28
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "gpu_memory_utilization" not in args


def test_cpu_workers_of_one_engine_get_disjoint_cores() -> None:
    assert process_env(EngineSpec(model="m", tensor_parallel_size=2))["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    two = EngineSpec(model="m", tensor_parallel_size=2, num_threads=3)
    assert process_env(two)["VLLM_CPU_OMP_THREADS_BIND"] == "0-2|3-5"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_are_processes_of_the_engine_whoever_it_shares_its_cluster_with(device: str) -> None:
    """vLLM chooses Ray by itself for an engine in a placement group."""
    two = EngineSpec(model="m", device=device, tensor_parallel_size=2, gpu_memory_utilization=0.5)
    assert engine_args(two)["distributed_executor_backend"] == "mp"


def test_the_compiler_is_off_only_where_nothing_needs_it() -> None:
    assert process_env(EngineSpec(model="m", enforce_eager=True))["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in process_env(EngineSpec(model="m", enforce_eager=False))
    assert "TORCHDYNAMO_DISABLE" not in process_env(EngineSpec(model="m", device="cuda", enforce_eager=True))


def test_an_accelerator_keeps_vllms_own_process_layout_and_plugins() -> None:
    spec = EngineSpec(model="m", device="npu", gpu_memory_utilization=0.5)
    assert engine_args(spec)["gpu_memory_utilization"] == 0.5
    assert "distributed_executor_backend" not in engine_args(spec)
    assert "VLLM_PLUGINS" not in process_env(spec)


def test_engine_args_of_the_user_win() -> None:
    spec = EngineSpec(model="m", engine_args={"stream_interval": 1, "swap": 2}, extension="a.B")
    args = engine_args(spec)
    assert (args["stream_interval"], args["swap"], args["worker_extension_cls"]) == (1, 2, "a.B")


def test_an_engine_for_adapters_has_one_slot_of_a_rank_its_kernels_know() -> None:
    args = engine_args(EngineSpec(model="m", lora_rank=12, lora_targets=("q_proj", "v_proj")))
    assert (args["enable_lora"], args["max_loras"], args["max_lora_rank"]) == (True, 1, 16)
    assert args["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "enable_lora" not in engine_args(EngineSpec(model="m"))


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_model_len", "max_num_seqs", "stream_interval"])
def test_a_spec_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        EngineSpec(model="m", **{name: 0})


def test_the_environment_is_set_only_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_A", "user")
    monkeypatch.setenv("TANDEM_B", "user")
    before = dict(os.environ)
    with process_environment({"TANDEM_A": "ours", "TANDEM_C": "ours"}, {"TANDEM_B": "spec"}):
        assert (os.environ["TANDEM_A"], os.environ["TANDEM_B"], os.environ["TANDEM_C"]) == ("user", "spec", "ours")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("token_ids", "foreign"),
    [
        ([], None),
        ([0, 9, 5], None),
        ([0, 10], 10),
        ([12, 3, 11], 12),
        ([4, -1], -1),
        ([-3, 0, -1], -3),
        ([-1, 10], 10),
    ],
)
def test_the_furthest_token_outside_the_vocabulary_is_named(token_ids: list[int], foreign: int | None) -> None:
    tokens = np.array(token_ids, np.int32)
    assert foreign_token(tokens, 10) == foreign
    if foreign is None:
        check_token_ids(tokens, 10)
    else:
        with pytest.raises(ValueError, match=f"token id {foreign}, must be >= 0 and < 10, the vocabulary"):
            check_token_ids(tokens, 10)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_integers_of_any_size_are_token_ids(dtype: type[np.integer]) -> None:
    check_token_ids(np.array([0, 9], dtype), 10)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (np.array([1.0, 2.0]), r"got float64 of shape \(2,\)"),
        (np.array([True, False]), r"got bool of shape \(2,\)"),
        (np.array([[1, 2]], np.int32), r"got int32 of shape \(1, 2\)"),
    ],
)
def test_what_is_no_row_of_integers_is_refused(token_ids: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_token_ids(token_ids, 10)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration is all that is read of the model."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "float32",
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def environment() -> Iterator[None]:
    """vLLM sets variables of this process when it makes a configuration."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def step_tokens(model_dir: Path, **changes: Any) -> int:
    spec = EngineSpec(model=str(model_dir), dtype="float32", enforce_eager=True, kv_cache_gib=0.125, **changes)
    config = engine_config(spec).scheduler_config
    assert config.max_num_seqs == spec.max_num_seqs
    return config.max_num_batched_tokens


@pytest.mark.usefixtures("environment")
def test_a_step_holds_a_token_of_every_sequence_or_what_the_user_says(model_dir: Path) -> None:
    assert step_tokens(model_dir) == 2048
    assert step_tokens(model_dir, max_num_seqs=3000) == 3000
    assert step_tokens(model_dir, engine_args={"max_num_batched_tokens": 512}) == 512


def test_end_tokens_that_the_model_cannot_sample_are_left_out_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert known_end_tokens({7, 0, 127, 128, -1}, 128) == [0, 7, 127]
    assert "[-1, 128] are not in the model's vocabulary of 128" in caplog.text
    caplog.clear()
    assert known_end_tokens({7, 0}, 128) == [0, 7]
    assert caplog.text == ""
