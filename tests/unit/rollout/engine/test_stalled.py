"""For how long an engine says that it has had requests and given no token."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engine.interface import EngineSpec
from rollout.types import SamplingParams
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.wire import Reply, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


TOKEN, WORKERS = 1.0, 2.0
"""Seconds that a token and a call to the workers take; they tell the two apart."""


@contextlib.asynccontextmanager
async def generating(**how: Any) -> AsyncIterator[tuple[ScriptedEngine, _Clock, Callable[[float], Any]]]:
    """An engine with one request. The third thing lets it do one thing more: a token, or a call to its workers."""
    clock = _Clock()
    turns = {TOKEN: asyncio.Semaphore(0), WORKERS: asyncio.Semaphore(0)}

    async def turn(seconds: float) -> None:
        await turns[seconds].acquire()

    spec = EngineSpec(model="", stream_interval=1, sleep_level=0)
    engine = ScriptedEngine(spec, clock=clock, sleep=turn, token_s=TOKEN, worker_s=WORKERS, **how)
    await engine.start()

    async def consume() -> None:
        async for _ in engine.generate("r", np.array([1, 2], np.int32), SamplingParams(max_tokens=1000)):
            pass

    async def do(what: float) -> None:
        turns[what].release()
        for _ in range(20):
            await asyncio.sleep(0)

    task = asyncio.create_task(consume())
    await do(TOKEN)
    yield engine, clock, do
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_an_engine_is_still_from_its_last_token_on() -> None:
    async with generating() as (engine, clock, do):
        clock.now = 5.0
        assert engine.load().still_s == 5.0
        await do(TOKEN)
        assert engine.load().still_s == 0.0
        clock.now = 205.0
        assert engine.load().still_s == 200.0


async def test_an_engine_without_requests_is_not_still() -> None:
    clock = _Clock()
    engine = ScriptedEngine(EngineSpec(model=""), clock=clock)
    await engine.start()
    clock.now = 500.0
    assert engine.load().still_s == 0.0


async def test_an_engine_is_not_still_during_a_commit_and_in_the_pause_that_a_mixture_leaves() -> None:
    torn = encode(Reply(ok=False, dirty=True, error="WeightSyncError", message="half of it"))
    async with generating(workers=lambda _method, _args: [torn]) as (engine, clock, do):
        committing = asyncio.create_task(engine.commit(1, "anything", timeout_s=10.0))
        await asyncio.sleep(0.01)
        clock.now = 100.0
        assert not committing.done()
        assert engine.load().still_s == 0.0
        await do(WORKERS)
        await committing
        clock.now = 200.0
        assert engine.status().paused_s > 0, "its limit looks after that"
        assert engine.load().still_s == 0.0


async def test_an_engine_is_not_still_while_it_sleeps() -> None:
    async with generating() as (engine, clock, do):
        falling = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.01)
        await do(WORKERS)
        await falling
        clock.now = 500.0
        assert engine.load().still_s == 0.0
