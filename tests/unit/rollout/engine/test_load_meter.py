"""What an engine reports of its load: preemptions, how long it is stalled, and how busy it has been."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.load_meter import Activity, LoadMeter
from rollout.types import SamplingParams
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.messages import Reply, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


class Scheduler:
    """vLLM's scheduler as the meter sees it."""

    def __init__(self) -> None:
        self.meter = LoadMeter()

    def step(self, running: int, preempted: int, *, inside: int | None = None) -> int | None:
        """The preemptions that the engine reports after the step."""
        inside = running if inside is None else inside
        stats = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=inside - running, kv_cache_usage=0.5)
        self.meter.record(stats, SimpleNamespace(num_preempted_reqs=preempted))
        return self.meter.load(inside).num_preemptions


def test_what_a_commit_takes_out_is_no_preemption() -> None:
    engine = Scheduler()
    assert engine.step(4, 1) == 1
    engine.meter.before_commit("recompute")
    assert [engine.step(2, 2), engine.step(4, 1), engine.step(4, 2)] == [1, 1, 2], (
        "four were taken out, one lacked room"
    )
    engine.meter.before_commit("recompute")
    engine.meter.before_commit("recompute")
    assert engine.step(3, 5) == 3, "one that ended without a report does not excuse the next"
    engine.meter.before_commit("keep")
    assert engine.step(3, 1) == 4


def test_commits_in_quick_succession_count_no_preemption_either() -> None:
    engine = Scheduler()
    engine.step(64, 0)
    for _ in range(3):  # each time eight are resumed, reported as preempted, and preempted again
        engine.meter.before_commit("recompute")
        assert engine.meter.load(64).running > 0, "it has not lost them"
        assert engine.step(8, 8, inside=64) == 0
    assert [engine.step(running, 8, inside=64) for running in range(16, 72, 8)] == [0] * 7
    assert engine.meter.load(0).num_preemptions == 0
    assert engine.step(64, 1) == 1


def test_it_is_never_busier_than_it_is_old() -> None:
    activity = Activity(itertools.count().__next__)
    activity.begin()
    first, second = activity.times(), activity.times()
    assert second.busy_s - first.busy_s == second.up_s - first.up_s > 0
    activity.end()
    busy_s = activity.times().busy_s
    activity.end()
    assert activity.times().busy_s == busy_s, "there was nothing to end"
    assert activity.times().began_at == first.began_at == 0


# Stalled engines


TOKEN, WORKERS = 1.0, 2.0
"""Seconds that a token and a call to the workers take; they tell the two apart."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@contextlib.asynccontextmanager
async def generating(**how: Any) -> AsyncIterator[tuple[ScriptedEngine, Clock, Callable[[float], Any]]]:
    """An engine with one request. The third thing lets it do one thing more: a token, or a call to its workers."""
    clock = Clock()
    turns = {TOKEN: asyncio.Semaphore(0), WORKERS: asyncio.Semaphore(0)}

    async def turn(seconds: float) -> None:
        await turns[seconds].acquire()

    spec = EngineSpec(model="", stream_interval=1, sleep_level=0)
    engine = ScriptedEngine(spec, clock=clock, sleep=turn, token_s=TOKEN, worker_s=WORKERS, **how)
    await engine.start()
    clock.now = 500.0
    assert engine.load().still_s == 0.0, "it has no requests"

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


async def test_an_engine_is_stalled_from_its_last_token_on() -> None:
    async with generating() as (engine, clock, do):
        clock.now += 5.0
        assert engine.load().still_s == 5.0
        await do(TOKEN)
        assert engine.load().still_s == 0.0
        clock.now += 200.0
        assert engine.load().still_s == 200.0


@pytest.mark.parametrize("what", ["commit", "sleep"])
async def test_an_engine_that_may_not_generate_is_not_stalled(what: str) -> None:
    """During a commit and in the pause that a mixture leaves, and asleep."""
    torn = encode(Reply(ok=False, dirty=True, error="WeightSyncError", message="half of it"))
    async with generating(workers=lambda _method, _args: [torn]) as (engine, clock, do):
        task = asyncio.create_task(engine.sleep() if what == "sleep" else engine.commit(1, "anything", timeout_s=10.0))
        await asyncio.sleep(0.01)
        clock.now += 100.0
        assert what == "sleep" or engine.load().still_s == 0.0
        await do(WORKERS)
        await task
        clock.now += 100.0
        assert engine.load().still_s == 0.0
        assert (engine.status().paused_s > 0) == (what == "commit")
