"""The load that a real engine reports: requests in the batch, in the queue, the cache, and preemptions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.vllm_engine import VllmEngine
from rollout.fleet.adaptive_limit import LimitRange
from rollout.reward.call import RewardResult
from rollout.types import Prompt, RolloutRequest, SamplingParams
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.local_actor import watched
from tests.fakes.tiny_vllm import make_spec, random_prompt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from rollout.engine.interface import EngineStatus
    from rollout.types import TokenChunk

pytestmark = pytest.mark.timing

LONG = SamplingParams(max_tokens=1500, temperature=1.0, ignore_eos=True)


async def generate(engine: VllmEngine, number: int) -> int:
    num_tokens = 0
    prompt = random_prompt(number)
    async for chunk in engine.generate(f"r{number}", prompt, replace(LONG, seed=number)):
        num_tokens += len(chunk.token_ids)
    return num_tokens


async def looks(engine: VllmEngine, running: list[asyncio.Task[int]]) -> list[EngineStatus]:
    seen = []
    while not all(task.done() for task in running):
        await asyncio.sleep(0.02)
        seen.append(engine.load())
    return seen


class InProcess:
    """The engine as a rollout worker sees it, without Ray."""

    name = "e0"

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine

    def abort(self, request_ids: Sequence[str]) -> None:
        raise AssertionError(f"no request is given up here, but {request_ids} were")

    async def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        queue: asyncio.Queue[tuple[int, TokenChunk]] = asyncio.Queue()

        async def pump(index: int) -> None:
            async for chunk in self.engine.generate(request_ids[index], token_ids[index], params[index]):
                queue.put_nowait((index, chunk))

        async with asyncio.TaskGroup() as pumps:
            for index in range(len(request_ids)):
                pumps.create_task(pump(index))
            num_left = len(request_ids)
            while num_left:
                index, chunk = await queue.get()
                num_left -= chunk.finish_reason is not None
                yield index, chunk

    async def load(self) -> EngineStatus:
        return self.engine.load()


async def adaptive_concurrency_keeps_what_runs_in_the_cache(engine: VllmEngine) -> None:
    """The loop closed, on a real engine: 4 responses of 1,500 tokens at a time where 2 fit. The limit comes down, and
    every response is whole."""
    spec = WorkerSpec(
        group_size=1, sampling=LONG, request_timeout_s=300.0, seed=0, concurrency=LimitRange(lowest=1, highest=4)
    )

    async def score(_prompt: Prompt, _text: str) -> RewardResult:
        return RewardResult(reward=1.0, parts={})

    class Silent:
        def decode(self, _token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            return "" if skip_special_tokens else "?"

    client = InProcess(engine)
    worker = RolloutWorker(spec, [client], tokenizer=Silent(), score=score)
    prompts = [Prompt(prompt_id=f"p{i}", token_ids=random_prompt(i), text="", answer="") for i in range(6)]
    items = [RolloutRequest(group_id=i, prompt=prompt, start_version=0) for i, prompt in enumerate(prompts)]
    groups = [asyncio.create_task(worker.run_group(item)) for item in items]
    most_queued, lowest = 0, 4
    async with watched(worker, client), asyncio.timeout(300):
        while not all(group.done() for group in groups):
            await asyncio.sleep(0.05)
            report = worker.report()
            most_queued, lowest = max(most_queued, report.num_queued), min(lowest, report.limits["e0"])
    assert {t.num_generated_tokens for group in groups for t in group.result().trajectories} == {1500}
    assert most_queued == 2, "what is above the limit waits outside, oldest group first"
    assert lowest < 4


def count_preemptions(engine: VllmEngine) -> list[int]:
    """As vLLM itself reports them, for every step from now on."""
    counts: list[int] = []
    record = engine._meter.record

    def counting(scheduler_stats: Any, iteration_stats: Any) -> None:
        counts.append(getattr(iteration_stats, "num_preempted_reqs", 0))
        record(scheduler_stats, iteration_stats)

    engine._meter.record = counting
    return counts


async def what_commits_recompute_is_no_preemption(engine: VllmEngine) -> None:
    """Two responses that fit into the cache are computed again at each of three commits."""
    before, counts = engine.load().num_preemptions, count_preemptions(engine)
    running = [asyncio.create_task(generate(engine, number)) for number in (10, 11)]
    async with asyncio.timeout(200):
        for version in (1, 2, 3):
            so_far = engine.status().generated_tokens
            while engine.status().generated_tokens < so_far + 200:
                await asyncio.sleep(0.01)
            assert engine.load().running == 2
            await engine.commit(version, "te_commit", 20, 50, "ok", timeout_s=20.0)
        await asyncio.gather(*running)
    assert sum(counts) == 6, "each commit takes both out of the cache"
    assert engine.load().num_preemptions == before


async def test_queue_cache_and_preemptions_show_while_a_small_engine_is_overloaded(vllm_model: Path) -> None:
    # 2 layers x 2 (K, V) x 2 heads x 32 x 4 bytes = 1 KiB per token: room for about 4,096 tokens, where 6 x 1,500 are
    # asked for, 4 at a time.
    spec = make_spec(
        vllm_model,
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_gib=4096 / (1 << 20),
        reports_load=True,
        in_flight="recompute",
    )
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
        done = replace(idle, times=None, num_preemptions=preemptions[-1], generated_tokens=6 * 1500)
        assert replace(engine.load(), times=None) == done
        await adaptive_concurrency_keeps_what_runs_in_the_cache(engine)
        await what_commits_recompute_is_no_preemption(engine)
    finally:
        await engine.close()
