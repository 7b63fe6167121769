"""What a real engine says of its load: requests in the batch, in the queue, the cache, and preemptions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams
from tests.integration.test_vllm_engine import make_spec, model_dir, random_prompt  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.engine.base import EngineLoad

LONG = SamplingParams(max_tokens=1500, temperature=1.0, ignore_eos=True)


async def generate(engine: VllmEngine, number: int) -> int:
    num_tokens = 0
    prompt = random_prompt(number)
    async for chunk in engine.generate(f"r{number}", prompt, replace(LONG, seed=number)):
        num_tokens += len(chunk.token_ids)
    return num_tokens


async def looks(engine: VllmEngine, running: list[asyncio.Task[int]]) -> list[EngineLoad]:
    seen = []
    while not all(task.done() for task in running):
        await asyncio.sleep(0.02)
        seen.append(engine.load())
    return seen


async def test_queue_cache_and_preemptions_show_while_a_small_engine_is_overloaded(
    model_dir: Path,  # noqa: F811
) -> None:
    # 2 layers x 2 (K, V) x 2 heads x 32 x 4 bytes = 1 KiB per token: room for about 4,096 tokens, where 6 x 1,500 are
    # asked for, 4 at a time.
    spec = make_spec(model_dir, max_model_len=2048, max_num_seqs=4, kv_cache_gib=4096 / (1 << 20), reports_load=True)
    engine = VllmEngine(spec)
    await engine.start()
    try:
        idle = engine.load()
        assert (idle.running, idle.waiting, idle.kv_usage_frac) == (0, 0, 0.0)
        running = [asyncio.create_task(generate(engine, number)) for number in range(6)]
        async with asyncio.timeout(200):
            seen = await looks(engine, running)
        assert [task.result() for task in running] == [1500] * 6
        assert max(load.running for load in seen) == 4
        assert max(load.waiting for load in seen) >= 2
        kv = [load.kv_usage_frac for load in seen if load.kv_usage_frac is not None]
        assert max(kv) > 0.9
        assert np.all((np.array(kv) >= 0) & (np.array(kv) <= 1))
        preemptions = [load.num_preemptions for load in seen if load.num_preemptions is not None]
        assert preemptions == sorted(preemptions)
        assert preemptions[-1] >= 1
        assert engine.load() == replace(idle, num_preemptions=preemptions[-1])
    finally:
        await engine.close()
