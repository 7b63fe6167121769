"""Who may end a pause, and in which order commits and sleep come: the rules that every engine shares."""

from __future__ import annotations

import asyncio

import pytest

from rollout.engine.actor import PauseWatchdog
from rollout.engine.interface import EngineSpec
from rollout.engine.weight_commit import AdmissionGate, GateTurns, Pause
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.wire import Reply, encode


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_pause_is_as_long_as_its_first_commit_says_until_it_is_lifted() -> None:
    clock = Clock()
    pause = Pause(clock)
    assert (pause.seconds, pause.is_on, pause.remedy()) == (0.0, False, "none")
    clock.now = 5.0
    pause.begin()
    clock.now = 8.0
    assert (pause.seconds, pause.is_on) == (3.0, True)
    pause.end(is_dirty=True)
    clock.now = 20.0
    pause.begin()  # the commit that repairs: the engine has stood still all the while
    assert pause.seconds == 15.0
    pause.end(is_dirty=False)
    pause.lift()
    assert (pause.seconds, pause.is_on) == (0.0, False)


def test_a_commit_under_way_is_left_alone_however_long_it_takes() -> None:
    clock = Clock()
    pause = Pause(clock)
    for is_dirty in (False, True):
        pause.is_dirty = is_dirty
        pause.begin()
        clock.now += 1e6
        assert pause.remedy() == "none"
        pause.end(is_dirty=is_dirty)
        assert pause.remedy() == ("die" if is_dirty else "resume")
        pause.lift()
        assert pause.remedy() == "none"


class World:
    """A gate, its turns, and what happened in which order."""

    def __init__(self) -> None:
        self.gate = AdmissionGate()
        self.turns = GateTurns(self.gate)
        self.log: list[str] = []

    async def commit(self, *, wakes: bool = True) -> None:
        async with self.turns.commit():
            self.log.append("commit begins")
            await asyncio.sleep(0.01)
            if wakes:
                self.turns.is_asleep = False
            self.log.append("commit ends")

    async def sleep(self, *, fails: bool = False) -> None:
        async with self.turns.sleep():
            self.log.append("sleep begins")
            await asyncio.sleep(0.01)
            if fails:
                raise RuntimeError("no")
            self.log.append("sleep ends")

    async def enter(self) -> None:
        async with self.gate.passage():
            self.log.append("enters")


@pytest.fixture
async def world() -> World:
    return World()


async def test_commit_and_sleep_never_overlap_whoever_comes_first(world: World) -> None:
    turns = asyncio.gather(world.commit(), world.sleep(), world.commit(), world.sleep())
    await asyncio.wait_for(turns, 5)
    steps = [entry.split()[0] for entry in world.log]
    assert steps == ["commit", "commit", "sleep", "sleep"] * 2
    assert world.turns.is_asleep


async def test_the_gate_stays_shut_from_sleep_to_the_commit_that_wakes(world: World) -> None:
    await world.sleep()
    entering = asyncio.create_task(world.enter())
    await world.commit(wakes=False)
    await asyncio.sleep(0.02)
    assert not entering.done()
    assert world.turns.is_asleep
    await asyncio.wait_for(world.commit(), 5)
    await asyncio.wait_for(entering, 5)
    assert world.log[-1] == "enters"
    assert not world.turns.is_asleep


async def test_a_sleep_that_fails_opens_the_gate_and_frees_the_turn(world: World) -> None:
    with pytest.raises(RuntimeError):
        await world.sleep(fails=True)
    assert not world.turns.is_asleep
    await asyncio.wait_for(world.enter(), 5)
    await asyncio.wait_for(world.commit(), 5)
    assert world.log[-1] == "commit ends"


async def test_the_watchdog_waits_for_a_commit_that_takes_longer_than_a_pause_may() -> None:
    """The coordinator may be dead by then: a commit has a deadline of its own and ends its pause itself."""
    clock, ticks = Clock(), 0

    async def tick(seconds: float) -> None:
        nonlocal ticks
        ticks, clock.now = ticks + 1, clock.now + seconds
        await asyncio.sleep(0)

    async def work(_: float) -> None:
        until = ticks + 100
        while ticks < until:
            await asyncio.sleep(0)

    engine = ScriptedEngine(EngineSpec(model="scripted"), sleep=work, clock=clock)
    await engine.start()
    watchdog = PauseWatchdog(engine, limit_s=10.0, sleep=tick)
    watching = asyncio.create_task(watchdog.run())
    committing = asyncio.create_task(engine.commit(1, "ws_commit", timeout_s=1e6))
    async with asyncio.timeout(5):
        while watchdog.num_interventions < 3:
            await asyncio.sleep(0)
        assert engine.stats().paused_s > 10.0, "generation runs while the workers write"
        assert not committing.done()
        committing.cancel()  # the caller is gone
        while engine.version == 0:
            await asyncio.sleep(0)
    assert engine.stats().paused_s == 0
    assert not engine.stats().is_dead
    watching.cancel()


async def test_the_watchdog_spares_a_mixture_while_a_commit_repairs_it() -> None:
    replies = [Reply(ok=False, dirty=True), Reply(ok=True)]
    engine = ScriptedEngine(EngineSpec(model="scripted"), workers=lambda *_: [encode(replies.pop(0))], worker_s=0.02)
    await engine.start()
    await engine.commit(1, "ws_commit", timeout_s=5.0)
    repairing = asyncio.create_task(engine.commit(1, "ws_commit", timeout_s=5.0))
    await asyncio.sleep(0.005)
    await engine.end_pause("paused for too long")
    await repairing
    assert not engine.stats().is_dead
    assert engine.version == 1


async def test_the_watchdog_tries_again_where_a_pause_could_not_be_ended(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(ScriptedEngine):
        num_tries = 0

        async def end_pause(self, reason: str) -> None:
            self.num_tries += 1
            if self.num_tries == 1:
                raise RuntimeError("the engine's process refused")
            await super().end_pause(reason)

    async def tick(_: float) -> None:
        await asyncio.sleep(0)

    engine = Stuck(EngineSpec(model="scripted"), workers=lambda *_: [encode(Reply(ok=False, dirty=True))])
    await engine.start()
    await engine.commit(1, "ws_commit", timeout_s=5.0)
    watching = asyncio.create_task(PauseWatchdog(engine, limit_s=0.0, sleep=tick).run())
    async with asyncio.timeout(5):
        while not engine.stats().is_dead:
            await asyncio.sleep(0)
    assert "the engine's process refused" in caplog.text
    watching.cancel()
