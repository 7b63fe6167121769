"""The engine contract on a CUDA device: device graphs, bfloat16, asynchronous scheduling where vLLM has it, sleep."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from rollout.engine.vllm_engine import VllmEngine
from tests.fakes import tiny_vllm
from tests.integration import test_vllm_engine as on_cpu

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from rollout.engine.interface import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
_SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": tiny_vllm.STOP, "bos_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_DENSE = Qwen2Config(**_SHAPE)
_EXPERTS = Qwen3MoeConfig(**{**_SHAPE, "head_dim": 32}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass(frozen=True)
class Case:
    config: PretrainedConfig
    changes: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    "dense": Case(_DENSE),
    # vLLM has two model runners. The second is new, and many kinds of models are left to the first.
    "first-runner": Case(_DENSE, {"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}),
    "experts": Case(_EXPERTS),
    "drafts": Case(_DENSE, {"engine_args": {"speculative_config": _DRAFTS}}),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def model_dir(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(case.config, dtype=torch.bfloat16).save_pretrained(path)
    tiny_vllm.hex_tokenizer(case.config.vocab_size).save_pretrained(path)
    return path


async def start(model_dir: Path, case: Case, **changes: Any) -> Engine:
    on_device = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False}
    on_device |= {"kv_cache_gib": None, "gpu_memory_utilization": 0.2}
    engine = VllmEngine(tiny_vllm.make_spec(model_dir, **on_device, **case.changes, **changes))
    await engine.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path, case: Case) -> AsyncIterator[Engine]:
    on_cpu.ENDING.clear()
    engine = await start(model_dir, case)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_sleeper(model_dir: Path, case: Case, engine: Engine) -> AsyncIterator[Engine]:
    # After the engine that the other tests share: memory that comes and goes next to it would end its start.
    sleeper = await start(model_dir, case, sleep_level=2)
    await on_cpu.TestVllmEngine().commit(sleeper, 1)
    yield sleeper
    await sleeper.close()


@on_cpu.ONE_LOOP
class TestVllmEngineOnDevice(on_cpu.TestVllmEngine):
    """Every promise of the engine, labels of every token included."""

    @pytest.fixture
    def sleeper(self, module_sleeper: Engine) -> Engine:
        return module_sleeper

    async def test_a_sleeping_engine_gives_its_memory_back_and_wakes_with_the_weights_of_the_commit(
        self, sleeper: Engine
    ) -> None:
        before = sleeper.version
        params = on_cpu.SamplingParams(max_tokens=2000, seed=1, ignore_eos=True)
        running = asyncio.ensure_future(on_cpu.collect(sleeper, "asleep", params))
        await self.wait_for_tokens(sleeper, 50)
        free_before, total = torch.cuda.mem_get_info()
        await sleeper.sleep()
        free_asleep, _ = torch.cuda.mem_get_info()
        assert free_asleep - free_before > 0.15 * total, "the cache takes a fifth of the device and must be given back"
        response = await asyncio.wait_for(running, 30)
        assert response.finish_reason == "abort"
        self.assert_labels(response)
        waiting = asyncio.ensure_future(on_cpu.collect(sleeper, "waits", on_cpu.SamplingParams(max_tokens=20, seed=2)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await self.commit(sleeper, before + 1)
        after = await asyncio.wait_for(waiting, 30)
        assert set(after.labels) == {before + 1}
        self.assert_labels(after)
