"""An evaluation that runs out of time, with Ray between driver, rollout worker and engine: nobody goes on with it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import ray

from rollout.types import Prompt, SamplingParams
from rollout.worker.actor import rollout_worker_actor
from rollout.worker.worker import WorkerSpec
from tests.fakes.killable_engine import KillableEngine
from trainer.driver.fleet import Fleet

pytestmark = pytest.mark.timing

NUM_PROMPTS = 6
TOKEN_S = 0.5
NOTICED_S = 40.0
"""Much less than the 75 s of a long answer."""


async def running_at(engine: Any) -> int:
    return (await engine.load.remote()).running


async def test_an_evaluation_that_nobody_waits_for_leaves_its_engine_idle(cluster: None, tokenizer_path: str) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)  # pyright: ignore[reportCallIssue]
    engine = engine_class.options(num_cpus=0).remote(1, TOKEN_S)
    await engine.start.remote()
    spec = WorkerSpec(
        group_size=1,
        sampling=SamplingParams(max_tokens=8),
        request_timeout_s=600.0,
        evaluation_window=4,
        seed=0,
        tokenizer_path=tokenizer_path,
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, {"e0": engine})
    await worker.start.remote()
    fleet = Fleet({}, [worker], group_timeout_s=600.0)
    prompts = [
        Prompt(prompt_id=f"p{i}", token_ids=np.array([7, 8, 9 + i], np.int32), text="1+2=", answer="3")
        for i in range(NUM_PROMPTS)
    ]
    numbers = range(NUM_PROMPTS)

    short = SamplingParams(max_tokens=2, temperature=0.0)
    assert len(await fleet.evaluate(prompts, short, "e0", numbers)) == NUM_PROMPTS

    evaluating = asyncio.create_task(
        fleet.evaluate(prompts, SamplingParams(max_tokens=150, temperature=0.0), "e0", numbers)
    )
    async with asyncio.timeout(NOTICED_S):
        while await running_at(engine) < spec.evaluation_window:
            await asyncio.sleep(0.05)
    evaluating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluating
    async with asyncio.timeout(NOTICED_S):
        while await running_at(engine):
            await asyncio.sleep(0.05)
    for actor in (worker, engine):
        ray.kill(actor)
