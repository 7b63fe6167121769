from __future__ import annotations

import os

import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_args, process_env


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


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_model_len", "max_num_seqs", "stream_tokens"])
def test_a_spec_that_cannot_work_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        EngineSpec(model="m", **{name: 0})


def test_the_environment_is_set_only_while_processes_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollout.engine.vllm_process import environment

    monkeypatch.setenv("TANDEM_A", "user")
    monkeypatch.setenv("TANDEM_B", "user")
    before = dict(os.environ)
    with environment({"TANDEM_A": "ours", "TANDEM_C": "ours"}, {"TANDEM_B": "spec"}):
        assert (os.environ["TANDEM_A"], os.environ["TANDEM_B"], os.environ["TANDEM_C"]) == ("user", "spec", "ours")
    assert dict(os.environ) == before
