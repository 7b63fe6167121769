"""An engine on a device, graphs and asynchronous scheduling and all, follows a learner bit for bit: bfloat16 weights as
they are, fp8 weights from the worker's shard, and MLA's matrices."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV2Config, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from tests.fakes.sync_world import LocalPublisher
from tests.fakes.vllm_models import write_checkpoints
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions
from weight_sync.device.select import get_backend
from weight_sync.plan.types import ParamMeta
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.vllm.compat import EXTENSION
from weight_sync.vllm.replica import AsyncLLMReplica

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "eos_token_id": 1,
}  # fmt: skip
CONFIG = Qwen2Config(**_SHAPE)
EXPERTS = Qwen3MoeConfig(**{**_SHAPE, "head_dim": 64}, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
MLA = DeepseekV2Config(
    **{**_SHAPE, "num_key_value_heads": 4}, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
    qk_nope_head_dim=128, v_head_dim=128, moe_intermediate_size=128, n_routed_experts=8, n_shared_experts=1,
    num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1,
)  # fmt: skip
PROMPT = list(range(5, 37))
ENGINE: dict[str, Any] = {"enforce_eager": False, "async_scheduling": True, "gpu_memory_utilization": 0.2}


class Learner(LocalPublisher):
    """The whole model on one rank, on the learner's device."""

    def __init__(self, full: dict[str, torch.Tensor], device: str) -> None:
        params = [ParamMeta(name=n, shape=tuple(t.shape), dtype="bfloat16") for n, t in full.items()]
        super().__init__(0, 1, full, params)
        self.device = device
        self.publisher = WeightPublisher(get_backend("cpu" if device == "cpu" else "auto"), rank=0)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        # float32 masters, as an optimizer holds them: exact, since the checkpoint is bfloat16.
        masters = {name: tensor.to(self.device, torch.float32) for name, tensor in self.full.items()}
        return self.publisher.publish(version, masters, deadline_s=deadline_s)


async def start_engine(folder: Path, changes: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=8,
        worker_extension_cls=EXTENSION, disable_log_stats=True, enable_prefix_caching=False, **changes,
    )  # fmt: skip
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    assert engine.vllm_config.scheduler_config.async_scheduling
    return engine


async def sample(engine: Any, name: str) -> list[tuple[int, float]]:
    """Greedy tokens with their log-probs."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0)
    last: Any = None
    async for output in engine.generate({"prompt_token_ids": PROMPT}, sampling, request_id=name):
        last = output
    chosen = last.outputs[0]
    return [(token, at[token].logprob) for token, at in zip(chosen.token_ids, chosen.logprobs, strict=True)]


async def check(home: Path, config: PretrainedConfig, engine_changes: dict[str, Any], device: str) -> None:
    write_checkpoints(home, config, std=0.2)
    old, new = (load_file(home / which / "model.safetensors") for which in ("old", "new"))
    found: dict[str, list[tuple[int, float]]] = {}
    engine = await start_engine(home / "old", engine_changes)
    try:
        found["loaded old"] = await sample(engine, "loaded-old")
        for commit in ("staged", "inplace"):
            learner = Learner(new, device)
            coordinator = SyncCoordinator(
                [learner], [AsyncLLMReplica(engine, name="r0")], options=SyncOptions(timeout_s=120.0, commit=commit)
            )
            await coordinator.open()
            for version, full in ((1, new), (2, old), (3, new)):
                learner.full = full
                await coordinator.publish(version)
                await coordinator.sync(version)
                await coordinator.self_test()
                found[f"{commit} {version}"] = await sample(engine, f"{commit}-{version}")
            await coordinator.close()
    finally:
        engine.shutdown()
        del engine
        gc.collect()
    engine = await start_engine(home / "new", engine_changes)
    try:
        found["loaded new"] = await sample(engine, "loaded-new")
    finally:
        engine.shutdown()
        del engine
        gc.collect()  # its finalizer must not run after the interpreter has torn vLLM down
    assert found["loaded old"] != found["loaded new"], "both checkpoints give the same responses; nothing was tested"
    for commit in ("staged", "inplace"):
        assert found[f"{commit} 1"] == found["loaded new"], f"{commit}: other log-probs than a fresh engine"
        assert found[f"{commit} 2"] == found["loaded old"]
        assert found[f"{commit} 3"] == found["loaded new"]


@pytest.mark.parametrize("changes", [{}, {"quantization": "fp8"}], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize("config", [CONFIG, EXPERTS, MLA], ids=["dense", "experts", "mla"])
async def test_an_engine_gives_the_log_probs_of_one_that_loaded_the_checkpoint(
    config: PretrainedConfig, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    await check(tmp_path, config, ENGINE | changes, "cuda")
