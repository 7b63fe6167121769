"""What an engine is started with: arguments, environment, end tokens; and which tokens it takes."""

from __future__ import annotations

import json
import os
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import (
    check_token_ids,
    engine_args,
    engine_config,
    engine_environ,
    known_end_tokens,
    process_env,
    vllm_sampling,
)
from rollout.types import SamplingParams
from weight_sync.vllm.compat import has_float32_head

if TYPE_CHECKING:
    from pathlib import Path

ABSENT = object()


@pytest.mark.parametrize(
    ("fields", "args", "env"),
    [
        (  # one worker on "cpu" is the engine's own process
            {"kv_cache_gib": 0.25},
            {"distributed_executor_backend": "uni", "kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": ABSENT},
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": ABSENT},
        ),
        # Workers are processes: vLLM would choose Ray by itself for an engine in a placement group.
        ({"tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
        ({"tensor_parallel_size": 2, "num_threads": 3}, {}, {"VLLM_CPU_OMP_THREADS_BIND": "0-2|3-5"}),
        ({"device": "cuda", "tensor_parallel_size": 2}, {"distributed_executor_backend": "mp"}, {}),
        ({"enforce_eager": True}, {}, {"TORCHDYNAMO_DISABLE": "1"}),
        (  # an accelerator keeps vLLM's own layout of processes and its plugins
            {"device": "npu", "enforce_eager": True, "gpu_memory_utilization": 0.5},
            {"gpu_memory_utilization": 0.5, "distributed_executor_backend": ABSENT, "kv_cache_memory_bytes": ABSENT},
            {"VLLM_PLUGINS": ABSENT, "TORCHDYNAMO_DISABLE": ABSENT},
        ),
        (
            {"device": "cuda", "kv_cache_gib": 1.5},
            {"kv_cache_memory_bytes": 3 << 29, "gpu_memory_utilization": 0.85},
            {},
        ),
        (  # arguments of the user win
            {"engine_args": {"stream_interval": 1, "swap": 2}, "extension": "a.B"},
            {"stream_interval": 1, "swap": 2, "worker_extension_cls": "a.B", "enable_lora": ABSENT},
            {},
        ),
        (  # one adapter, of a rank that the kernels know
            {"lora_rank": 12, "lora_targets": ("q_proj", "v_proj")},
            {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16, "lora_target_modules": ["q_proj", "v_proj"]},
            {},
        ),
    ],
)
def test_what_a_spec_means_for_vllm(fields: dict[str, Any], args: dict[str, Any], env: dict[str, Any]) -> None:
    spec = EngineSpec(model="m", **fields)
    for found, expected in ((engine_args(spec), args), (process_env(spec), env)):
        assert {name: found.get(name, ABSENT) for name in expected} == expected


def test_the_environment_of_the_user_wins_over_ours_and_the_spec_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("DO_NOT_TRACK", raising=False)
    environ = engine_environ(EngineSpec(model="m", env={"OMP_NUM_THREADS": "3"}))
    names = ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS", "DO_NOT_TRACK")
    assert [environ[name] for name in names] == ["DEBUG", "3", "1"]


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_model_len", "max_num_seqs", "stream_interval"])
def test_a_spec_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        EngineSpec(model="m", **{name: 0})


@pytest.mark.parametrize(
    ("token_ids", "problem"),
    [
        (np.array([], np.int32), ""),
        (np.array([0, 9, 5], np.int64), ""),
        (np.array([0, 9], np.uint32), ""),
        (np.array([0, 10], np.int32), "token id 10, must be >= 0 and < 10, the vocabulary"),
        (np.array([12, 3, 11], np.int32), "token id 12,"),
        (np.array([-3, 0, -1], np.int32), "token id -3,"),
        (np.array([-1, 10], np.int32), "token id 10,"),
        (np.array([1.0, 2.0]), "got float64 of shape (2,)"),
        (np.array([True, False]), "got bool of shape (2,)"),
        (np.array([[1, 2]], np.int32), "got int32 of shape (1, 2)"),
    ],
)
def test_token_ids_are_integers_of_the_vocabulary_and_the_furthest_other_is_named(
    token_ids: np.ndarray, problem: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) if problem else nullcontext():
        check_token_ids(token_ids, 10)


def test_requests_have_sampling_parameters_of_their_own() -> None:
    """vLLM fills in those that it gets."""
    ours = SamplingParams(max_tokens=5, temperature=0.5, top_k=3, stop=("x",), seed=1)
    first, second = vllm_sampling(ours, [7]), vllm_sampling(replace(ours, seed=2, num_prefix_tokens=1), [7])
    assert (first.seed, second.seed, first.max_tokens, first.stop_token_ids) == (1, 2, 5, [7])
    first.max_tokens = 1
    assert vllm_sampling(ours, [7]).max_tokens == second.max_tokens == 5
    assert vllm_sampling(ours, [8]).stop_token_ids == [8]
    assert vllm_sampling(replace(ours, temperature=1.0), [7]).temperature == 1.0


def test_vllm_understands_what_a_spec_says(tmp_path: Path) -> None:
    """A configuration is all that is read of the model."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "torch_dtype": "float32", "vocab_size": 128}
    lengths = {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**model, **sizes, **lengths}))

    def spec_of(**changes: Any) -> EngineSpec:
        return EngineSpec(model=str(tmp_path), enforce_eager=True, kv_cache_gib=0.125, **changes)

    def step_tokens(**changes: Any) -> int:
        spec = spec_of(dtype="float32", **changes)
        config = engine_config(spec).scheduler_config
        assert config.max_num_seqs == spec.max_num_seqs
        return config.max_num_batched_tokens

    before = dict(os.environ)  # vLLM sets variables of this process when it makes a configuration
    try:
        assert step_tokens() == 2048
        assert step_tokens(max_num_seqs=3000) == 3000
        assert step_tokens(engine_args={"max_num_batched_tokens": 512}) == 512
        assert has_float32_head() and engine_config(spec_of(float32_head=True)).model_config.head_dtype == torch.float32
        assert engine_config(spec_of()).model_config.head_dtype == torch.bfloat16
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_end_tokens_that_the_model_cannot_sample_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert known_end_tokens({7, 0}, 128) == [0, 7]
    assert caplog.text == ""
    assert known_end_tokens({7, 0, 127, 128, -1}, 128) == [0, 7, 127]
    assert "[-1, 128] are not in the model's vocabulary of 128" in caplog.text
