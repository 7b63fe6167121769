"""The engine contract on a CUDA device: device graphs, bfloat16, asynchronous scheduling where vLLM has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch

from rollout.engine.vllm_engine import VllmEngine
from tests.integration import test_vllm_engine as on_cpu

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollout.engine.base import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
model_dir = on_cpu.model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model_dir: Path) -> AsyncIterator[Engine]:
    on_cpu.ENDING.clear()
    changes = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    engine = VllmEngine(on_cpu.make_spec(model_dir, **changes))
    await engine.start()
    yield engine
    await engine.close()


@on_cpu.ONE_LOOP
async def test_sleeping_engine_gives_its_memory_back_and_wakes_with_the_weights_of_the_commit(model_dir: Path) -> None:
    # Before the tests that share an engine: the memory of that one would come and go while this one is started.
    changes = {"device": "cuda", "dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.2}
    engine = VllmEngine(on_cpu.make_spec(model_dir, sleep_level=2, **changes))
    contract = on_cpu.TestVllmEngine()
    await engine.start()
    try:
        await contract.commit(engine, 1)
        params = on_cpu.SamplingParams(max_tokens=2000, seed=1, ignore_eos=True)
        running = asyncio.ensure_future(on_cpu.collect(engine, "asleep", params))
        await contract.wait_for_tokens(engine, 50)
        free_before, total = torch.cuda.mem_get_info()
        await engine.sleep()
        free_asleep, _ = torch.cuda.mem_get_info()
        assert free_asleep - free_before > 0.15 * total, "the cache takes a fifth of the device and must be given back"
        answer = await asyncio.wait_for(running, 30)
        assert answer.finish_reason == "abort"
        contract.assert_labels(answer)
        waiting = asyncio.ensure_future(on_cpu.collect(engine, "waits", on_cpu.SamplingParams(max_tokens=20, seed=2)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await contract.commit(engine, 2)
        after = await asyncio.wait_for(waiting, 30)
        assert set(after.labels) == {2}
        contract.assert_labels(after)
    finally:
        await engine.close()


class TestVllmEngineOnDevice(on_cpu.TestVllmEngine):
    """Every promise of the engine, labels of every token included."""
