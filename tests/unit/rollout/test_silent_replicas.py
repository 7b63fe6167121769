"""Replicas that live and say nothing, or give nothing: when a worker gives them up, and when it must not."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineLoad, EngineSpec
from rollout.fleet.scheduler import NoReplica
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, generated, item, worker
from weight_sync.wire import Reply, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.worker.worker import RolloutWorker

LIMIT_S = 30.0
SOON_S = 10.0
"""No look takes longer, so a silence is noticed so much after the limit at the latest."""
CALM = EngineLoad(running=4, waiting=0, kv_usage_frac=0.3, num_preemptions=0)


@dataclass
class Stopping(FakeEngine):
    """While `is_stopped` it answers no look and gives no token, as a process that was sent SIGSTOP."""

    is_stopped: bool = False

    async def load(self) -> EngineLoad:
        while self.is_stopped:
            await asyncio.sleep(0.1)
        return await super().load()

    def stop(self) -> None:
        self.is_stopped = self.hangs = True


@contextlib.asynccontextmanager
async def watching(*engines: FakeEngine) -> AsyncIterator[RolloutWorker]:
    busy = worker(*engines, silence_timeout_s=LIMIT_S)
    task = asyncio.create_task(busy.watch_loads())
    try:
        yield busy
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_requests_of_a_replica_that_stops_go_on_elsewhere_from_their_prefix() -> None:
    async def main() -> None:
        stopping, other = Stopping("a", said_load=CALM, step_s=2.0), FakeEngine("b", said_load=CALM)
        async with watching(stopping, other) as busy:
            running = asyncio.create_task(busy.run_group(item()))
            await asyncio.sleep(5.0)
            assert stopping.calls, "it has the group"
            assert stopping.num_chunks > 0, "and has begun"
            stopping.stop()
            await asyncio.sleep(LIMIT_S / 2)
            assert busy.quarantined == {}, "half the time is not over"
            group = await asyncio.wait_for(running, LIMIT_S / 2 + SOON_S)
            assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
            assert min(len(tokens) for tokens in other.calls[0].token_ids) > len(item().prompt.token_ids)
            assert "answered nothing for" in busy.quarantined["a"]
            assert busy.loads().quarantined == busy.quarantined, "the driver is told, and starts it again"

    run_virtual(main())


def test_a_replica_that_answers_looks_and_gives_no_token_is_given_up() -> None:
    """Its process is well, its device hangs."""

    async def main() -> None:
        hanging, other = FakeEngine("a", said_load=CALM, hangs=True), FakeEngine("b", said_load=CALM)
        async with watching(hanging, other) as busy:
            running = asyncio.create_task(busy.run_group(item()))
            await asyncio.sleep(SOON_S)
            hanging.said_load = replace(CALM, still_s=LIMIT_S - 1)
            await asyncio.sleep(SOON_S)
            assert busy.quarantined == {}
            hanging.said_load = replace(CALM, still_s=LIMIT_S + 1)
            group = await asyncio.wait_for(running, SOON_S)
            assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
            assert busy.quarantined == {"a": "it has requests and gave no token for 31 s"}

    run_virtual(main())


def test_an_evaluation_on_a_replica_that_stops_ends_so_that_it_can_begin_again_elsewhere() -> None:
    async def main() -> None:
        stopping = Stopping("a", said_load=CALM, step_s=2.0)
        async with watching(stopping, FakeEngine("b", said_load=CALM)) as busy:
            greedy = SamplingParams(max_tokens=20, temperature=0.0)
            running = asyncio.create_task(busy.evaluate([item().prompt], greedy, engine="a"))
            await asyncio.sleep(5.0)
            stopping.stop()
            with pytest.raises(NoReplica, match="answered nothing for"):
                await asyncio.wait_for(running, LIMIT_S + SOON_S)

    run_virtual(main())


def test_a_replica_that_is_dead_is_given_up_at_once_although_nobody_generates_there() -> None:
    async def main() -> None:
        dying = FakeEngine("a", said_load=CALM)
        async with watching(dying, FakeEngine("b", said_load=CALM)) as busy:
            await asyncio.sleep(SOON_S)
            dying.said_load = None
            await asyncio.sleep(SOON_S)
            assert busy.quarantined == {"a": "a does not answer"}

    run_virtual(main())


def test_a_look_that_fails_in_some_other_way_ends_no_watch() -> None:
    @dataclass
    class Broken(FakeEngine):
        is_broken: bool = False

        async def load(self) -> EngineLoad:
            if self.is_broken:
                raise RuntimeError("something else")
            return await super().load()

    async def main() -> None:
        broken, other = Broken("a", said_load=CALM), FakeEngine("b", said_load=CALM)
        async with watching(broken, other) as busy:
            await asyncio.sleep(SOON_S)
            broken.is_broken = True
            await asyncio.sleep(LIMIT_S / 2)
            assert busy.quarantined == {}
            other.said_load = replace(CALM, still_s=LIMIT_S + 1)
            await asyncio.sleep(SOON_S)
            assert list(busy.quarantined) == ["b"], "it is looked at all the while"
            await asyncio.sleep(LIMIT_S)
            assert list(busy.quarantined) == ["b", "a"]

    run_virtual(main())


def test_a_replica_that_starts_may_be_silent_for_as_long_as_it_takes() -> None:
    async def main() -> None:
        starting, mute = FakeEngine("a", said_load=None), Stopping("b", said_load=CALM, is_stopped=True)
        async with watching(starting, mute) as busy:
            await asyncio.sleep(20 * LIMIT_S)
            assert busy.quarantined == {}

    run_virtual(main())


def test_a_replica_that_was_replaced_begins_anew() -> None:
    async def main() -> None:
        stopping = Stopping("a", said_load=CALM)
        async with watching(stopping, FakeEngine("b", said_load=CALM)) as busy:
            await asyncio.sleep(SOON_S)
            stopping.stop()
            await asyncio.sleep(LIMIT_S - SOON_S)
            busy.replace(FakeEngine("a", said_load=CALM))
            await asyncio.sleep(20 * LIMIT_S)
            assert busy.quarantined == {}

    run_virtual(main())


def test_silences_that_end_do_not_add_up() -> None:
    async def main() -> None:
        moody = Stopping("a", said_load=CALM)
        async with watching(moody, FakeEngine("b", said_load=CALM)) as busy:
            for _ in range(10):
                moody.is_stopped = False
                await asyncio.sleep(SOON_S)
                moody.is_stopped = True
                await asyncio.sleep(LIMIT_S / 2)
            assert busy.quarantined == {}

    run_virtual(main())


def test_a_worker_that_stood_still_itself_blames_no_replica() -> None:
    """Its own process was stopped, or an agent loop held its event loop: every answer is late then."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with watching(Stopping("a", said_load=CALM), FakeEngine("b", said_load=CALM)) as busy:
            await asyncio.sleep(SOON_S)
            for _ in range(20):
                loop._jumping.now += 3 * LIMIT_S
                await asyncio.sleep(SOON_S)
            assert busy.quarantined == {}

    run_virtual(main())


# --- what an engine says of itself ------------------------------------------------------------------------------------


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

    spec = EngineSpec(model="", stream_tokens=1, sleep_level=0)
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
