"""Engines that live and say nothing, or give nothing: when they are lost, and when they must not be; and their load."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineStatus, EngineTimes
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import WorkerReport
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.local_actor import LocalActor, watched
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, generated, item, worker
from trainer.driver.engine_monitor import POLL_S, EngineIdleMeter, load_record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.worker.worker import RolloutWorker
    from trainer.driver.fleet import Fleet

LIMIT_S = 30.0
SOON_S = 10.0
"""No poll takes longer, so a silence is noticed so much after the limit at the latest."""
CALM = EngineStatus(running=4, waiting=0, kv_usage_frac=0.3, num_preemptions=0)


@dataclass
class Stopping(FakeEngine):
    """While `is_stopped` it answers no poll and gives no token, as a process that was sent SIGSTOP."""

    is_stopped: bool = False

    async def load(self) -> EngineStatus:
        while self.is_stopped:
            await asyncio.sleep(0.1)
        return await super().load()

    def stop(self) -> None:
        self.is_stopped = self.hangs = True


@contextlib.asynccontextmanager
async def watching(*engines: FakeEngine, **settings: Any) -> AsyncIterator[tuple[RolloutWorker, Fleet]]:
    busy = worker(*engines)
    async with watched(busy, *engines, heartbeat_timeout_s=LIMIT_S, **settings) as fleet:
        yield busy, fleet


def test_requests_of_an_engine_that_stops_go_on_elsewhere_from_their_prefix() -> None:
    async def main() -> None:
        stopping, other = Stopping("a", said_load=CALM, step_s=2.0), FakeEngine("b", said_load=CALM)
        async with watching(stopping, other) as (busy, fleet):
            running = asyncio.create_task(busy.run_group(item()))
            await asyncio.sleep(5.0)
            assert stopping.calls, "it has the group"
            assert stopping.num_chunks > 0, "and has begun"
            stopping.stop()
            await asyncio.sleep(LIMIT_S / 2)
            assert fleet.lost_engines == {}, "half the time is not over"
            group = await asyncio.wait_for(running, LIMIT_S / 2 + SOON_S)
            assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
            assert min(len(tokens) for tokens in other.calls[0].token_ids) > len(item().prompt.token_ids)
            assert "answered no poll for" in fleet.lost_engines["a"]

    run_virtual(main())


def test_an_engine_that_answers_polls_and_gives_no_token_is_lost() -> None:
    """Its process is well, its device hangs."""

    async def main() -> None:
        hanging, other = FakeEngine("a", said_load=CALM, hangs=True), FakeEngine("b", said_load=CALM)
        async with watching(hanging, other) as (busy, fleet):
            running = asyncio.create_task(busy.run_group(item()))
            await asyncio.sleep(SOON_S)
            hanging.said_load = replace(CALM, still_s=LIMIT_S - 1)
            await asyncio.sleep(SOON_S)
            assert fleet.lost_engines == {}
            hanging.said_load = replace(CALM, still_s=LIMIT_S + 1)
            group = await asyncio.wait_for(running, SOON_S)
            assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
            assert fleet.lost_engines == {"a": "lost (it has requests and gave no token for 31 s)"}

    run_virtual(main())


def test_an_evaluation_on_an_engine_that_stops_ends_so_that_it_can_begin_again_elsewhere() -> None:
    async def main() -> None:
        stopping = Stopping("a", said_load=CALM, step_s=2.0)
        async with watching(stopping, FakeEngine("b", said_load=CALM)) as (busy, _fleet):
            greedy = SamplingParams(max_tokens=20, temperature=0.0)
            running = asyncio.create_task(busy.evaluate([item().prompt], greedy, engine="a"))
            await asyncio.sleep(5.0)
            stopping.stop()
            with pytest.raises(NoReplica, match="answered no poll for"):
                await asyncio.wait_for(running, LIMIT_S + SOON_S)

    run_virtual(main())


def test_an_engine_that_is_dead_is_lost_at_once_although_nobody_generates_there() -> None:
    async def main() -> None:
        dying = FakeEngine("a", said_load=CALM)
        async with watching(dying, FakeEngine("b", said_load=CALM)) as (_busy, fleet):
            await asyncio.sleep(SOON_S)
            dying.said_load = None
            await asyncio.sleep(SOON_S)
            assert fleet.lost_engines == {"a": "retired (EngineDead: a does not answer)"}

    run_virtual(main())


def test_a_poll_that_fails_in_some_other_way_ends_no_watch() -> None:
    @dataclass
    class Broken(FakeEngine):
        is_broken: bool = False

        async def load(self) -> EngineStatus:
            if self.is_broken:
                raise RuntimeError("something else")
            return await super().load()

    async def main() -> None:
        broken, other = Broken("a", said_load=CALM), FakeEngine("b", said_load=CALM)
        async with watching(broken, other, FakeEngine("c", said_load=CALM)) as (_busy, fleet):
            await asyncio.sleep(SOON_S)
            broken.is_broken = True
            await asyncio.sleep(LIMIT_S / 2)
            assert fleet.lost_engines == {}
            other.said_load = replace(CALM, still_s=LIMIT_S + 1)
            await asyncio.sleep(SOON_S)
            assert list(fleet.lost_engines) == ["b"], "it is polled all the while"
            await asyncio.sleep(LIMIT_S)
            assert list(fleet.lost_engines) == ["a", "b"]

    run_virtual(main())


def test_an_engine_that_starts_is_not_polled_and_a_new_one_begins_anew() -> None:
    async def main() -> None:
        stopping, other, new = Stopping("a", said_load=CALM), FakeEngine("b", said_load=CALM), Stopping("a")
        engines: dict[str, Any] = {}

        async def restart(name: str, _number: int) -> int:
            engines[name] = LocalActor(new)
            await asyncio.sleep(20 * LIMIT_S)  # it answers no poll all the while
            new.said_load = CALM
            return 1

        async with watching(stopping, other, restart_engine=restart, max_engine_restarts=1) as (_, fleet):
            engines |= fleet._engines
            fleet._engines = engines
            await asyncio.sleep(SOON_S)
            stopping.stop()
            await asyncio.sleep(20 * LIMIT_S)
            assert fleet.lost_engines["a"].startswith("starting")
            await asyncio.sleep(20 * LIMIT_S)
            assert fleet.lost_engines == {}

    run_virtual(main())


def test_an_engine_that_does_not_answer_delays_no_poll_of_the_others() -> None:
    async def main() -> None:
        mute, other = Stopping("a", said_load=CALM), FakeEngine("b", said_load=CALM)
        async with watching(mute, other) as (_, fleet):
            mute.is_stopped = True
            await asyncio.sleep(SOON_S)
            assert fleet._monitor.num_polls["b"] >= SOON_S / (POLL_S + 0.1) - 1
            assert fleet._monitor.load_now("a") is None
            assert fleet._monitor.load_now("b") == CALM

    run_virtual(main())


def test_silences_that_end_do_not_add_up() -> None:
    async def main() -> None:
        moody = Stopping("a", said_load=CALM)
        async with watching(moody, FakeEngine("b", said_load=CALM)) as (_busy, fleet):
            for _ in range(10):
                moody.is_stopped = False
                await asyncio.sleep(SOON_S)
                moody.is_stopped = True
                await asyncio.sleep(LIMIT_S / 2)
            assert fleet.lost_engines == {}

    run_virtual(main())


def test_a_driver_that_stood_still_itself_blames_no_engine() -> None:
    """Its process was stopped, or something held its event loop: every answer is late then."""

    async def main() -> None:
        loop: Any = asyncio.get_running_loop()
        async with watching(Stopping("a", said_load=CALM), FakeEngine("b", said_load=CALM)) as (_busy, fleet):
            await asyncio.sleep(SOON_S)
            for _ in range(20):
                loop._jumping.now += 3 * LIMIT_S
                await asyncio.sleep(SOON_S)
            assert fleet.lost_engines == {}

    run_virtual(main())


# What they say


def test_what_workers_do_adds_up_and_what_an_engine_says_does_not() -> None:
    def report(in_flight: int, *, queued: int, migrated: tuple[int, int]) -> WorkerReport:
        return WorkerReport(
            limits={"e0": 16},
            in_flight={"e0": in_flight},
            num_queued=queued,
            migrated_requests=migrated[0],
            migrated_tokens=migrated[1],
            recovered_requests=2,
            recovered_tokens=30,
            lost_tokens=7,
            lost_engines={},
        )

    reports = [report(10, queued=2, migrated=(3, 900)), report(20, queued=5, migrated=(4, 1000))]
    load = EngineStatus(running=30, waiting=1, kv_usage_frac=0.5, num_preemptions=None)
    assert load_record(reports, {"e0": load}) == {
        "engine/queued": 7,
        "engine/repacked_requests": 7,
        "engine/repacked_tokens": 1900,
        "engine/migrated_requests": 4,
        "engine/migrated_tokens": 60,
        "discarded/failed_attempt_tokens": 14,
        "engine/limit/e0": 32,
        "engine/in_flight/e0": 30,
        "engine/running/e0": 30,
        "engine/waiting/e0": 1,
        "engine/kv_usage_frac/e0": 0.5,
    }


class Story:
    """Two replicas, a and b; `hear(seconds, a=(began_at, busy_s, up_s), ...)`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engines = EngineIdleMeter(clock=lambda: self.now)

    def hear(self, seconds: float, *lost: str, **said: tuple[float, float, float]) -> None:
        self.now = 100.0 + seconds
        times = {name: EngineTimes(began_at=a, busy_s=busy, up_s=up) for name, (a, busy, up) in said.items()}
        self.engines.hear(times, lost)

    def take(self) -> float | None:
        return self.engines.take_frac(num_replicas=2)


def test_the_idle_share_is_of_the_time_since_the_line_before() -> None:
    story = Story()
    story.hear(0, a=(1, 50, 100))
    assert story.take() is None
    story.hear(10, a=(1, 60, 110), b=(2, 0, 40))
    assert story.take() is None, "b has spoken only once"
    story.hear(20, a=(1, 60, 120), b=(2, 5, 50))
    story.hear(30, a=(1, 60, 130), b=(2, 15, 60))
    assert story.take() == pytest.approx((1 + 0.25) / 2), "a had nothing, b for a quarter of its time"
    story.hear(30.2, a=(1, 60, 130), b=(2, 15, 60))
    assert story.take() == pytest.approx(0.625), "nothing new: as busy as before"


def test_a_loss_costs_the_time_without_an_engine_and_no_other() -> None:
    story = Story()
    story.hear(0, a=(1, 0, 10), b=(2, 0, 10))
    story.hear(90, a=(1, 90, 100), b=(2, 90, 100))
    story.hear(91, "b", a=(1, 91, 101), b=(2, 90, 100))
    story.hear(100, "b", a=(1, 100, 110), b=(2, 90, 100))
    assert story.take() == pytest.approx((0 + 0.1) / 2), "b was there for 90 s of 100"
    story.hear(180, "b", a=(1, 180, 190))
    story.hear(190, a=(1, 190, 200), b=(60, 4, 30))
    story.hear(200, a=(1, 200, 210), b=(60, 14, 40))
    assert story.take() == pytest.approx((0 + 0.86) / 2), "its start is no work, the 14 s after it are"


def test_a_loss_that_nobody_noticed_costs_as_much() -> None:
    story = Story()
    story.hear(0, a=(1, 0, 10), b=(2, 0, 10))
    story.hear(40, a=(1, 40, 50), b=(2, 40, 50))
    story.hear(100, a=(1, 100, 110), b=(60, 30, 35))
    assert story.take() == pytest.approx((0 + 0.3) / 2)


def test_a_replica_that_was_never_there_is_idle() -> None:
    story = Story()
    for seconds in (0, 10, 20):
        story.hear(seconds, "b", a=(1, seconds, seconds + 1))
    assert story.take() == pytest.approx(0.5)
