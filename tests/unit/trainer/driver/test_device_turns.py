"""Who is on shared devices, and when: real turns over parties that only take notes."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import sync_report
from trainer.driver.weight_updates import SharedDevices
from trainer.telemetry.trace import Tracer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.types import SyncReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    nbytes: int = 100
    free_bytes: int = 60
    total_bytes: int = 80


OFFLOAD_S = 3.0


class World:
    """Learner, coordinator and two engines. Fails when both sides are on the devices."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []
        self.asleep: set[str] = set()
        self.is_learner_here = False
        self.members: Mapping[str, str] = {"r0": "live", "r1": "live", "r2": "dead"}
        self.engines = {
            name: SimpleNamespace(sleep=SimpleNamespace(remote=self._sleeper(name))) for name in ["r0", "r1"]
        }
        self.broken: set[str] = set()
        self.engines["r2"] = SimpleNamespace()
        self.killed: list[Any] = []
        self.lost: Exception | None = None

    def _sleeper(self, name: str) -> Any:
        def sleep() -> Any:
            future: Future[None] = Future()
            if name in self.broken:
                future.set_exception(RuntimeError(f"{name} is broken"))
            else:
                self.asleep.add(name)
                self.log.append(f"{name} sleeps")
                future.set_result(None)
            return SimpleNamespace(future=lambda: future)

        return sleep

    async def onload(self) -> list[Moved]:
        assert self.asleep | self.broken == {"r0", "r1"}, "an engine is still there"
        self.is_learner_here = True
        self.log.append("onload")
        return [Moved(), Moved(free_bytes=20)]

    async def offload(self) -> list[Moved]:
        self.is_learner_here = False
        self.now += OFFLOAD_S
        self.log.append("offload")
        return [Moved(), Moved(free_bytes=20)]

    async def publish(self, version: int) -> float:
        assert self.is_learner_here
        self.log.append(f"publish {version}")
        return 0.5

    async def sync(self, version: int) -> SyncReport:
        assert not self.is_learner_here, "the learner is still there"
        await asyncio.sleep(0.01)
        if self.lost is not None:
            raise self.lost
        self.asleep.clear()
        self.log.append(f"sync {version}")
        return sync_report(version)

    def devices(self) -> SharedDevices:
        anything: Any = self
        return SharedDevices(
            anything,
            anything,
            self.engines,
            tracer=Tracer(None),
            sleep_timeout_s=5.0,
            kill=self.killed.append,
            clock=lambda: self.now,
        )


async def test_a_step_takes_the_devices_and_gives_them_back() -> None:
    world = World()
    devices = world.devices()
    for version in (1, 2):
        await devices.to_learner()
        await devices.to_learner()
        assert await devices.publish(version) == 0.5
        await devices.sync(version)
    turn = ["r0 sleeps", "r1 sleeps", "onload"]
    assert world.log == [*turn, "publish 1", "offload", "sync 1", *turn, "publish 2", "offload", "sync 2"]
    record = devices.record()
    assert (record["devices/onload_bytes"], record["devices/free_frac"]) == (200, 0.25)
    assert {"devices/sleep_s", "devices/onload_s", "devices/offload_s"} < set(record)
    assert devices.offload_s == record["devices/offload_s"] == OFFLOAD_S
    await devices.to_learner()
    assert devices.offload_s == 0, "this turn's is still to come"


async def test_the_next_step_waits_until_the_engines_have_the_version_of_the_last() -> None:
    world = World()
    devices = world.devices()
    await devices.to_learner()
    await devices.publish(1)
    waiting = asyncio.ensure_future(devices.to_learner())
    await asyncio.sleep(0.02)
    assert not waiting.done() and not world.is_learner_here
    await devices.sync(1)
    await asyncio.wait_for(waiting, 5)
    assert world.log[-4:] == ["sync 1", "r0 sleeps", "r1 sleeps", "onload"]


async def test_a_restart_and_the_learner_wait_for_each_other() -> None:
    world = World()
    devices = world.devices()
    async with devices.engines_turn():
        learner = asyncio.ensure_future(devices.to_learner())
        await asyncio.sleep(0.01)
        assert world.log == []
    await asyncio.wait_for(learner, 5)
    entered = asyncio.Event()

    async def restart() -> None:
        async with devices.engines_turn():
            assert not world.is_learner_here
            entered.set()

    restarting = asyncio.ensure_future(restart())
    await asyncio.sleep(0.01)
    assert not entered.is_set()
    await devices.publish(1)
    await asyncio.sleep(0.01)
    assert not entered.is_set(), "engines still sleep"
    await devices.sync(1)
    await asyncio.wait_for(restarting, 5)


async def test_engines_that_do_not_fall_asleep_are_ended_and_stop_nobody() -> None:
    world = World()
    devices = world.devices()
    world.broken = {"r0"}
    await devices.to_learner()
    assert world.log == ["r1 sleeps", "onload"]
    assert world.killed == [world.engines["r2"], world.engines["r0"]], "lost ones would keep their memory"
    world = World()
    world.broken = {"r0", "r1"}
    await world.devices().to_learner()
    assert world.log == ["onload"]
    assert world.killed == [world.engines[name] for name in ("r2", "r0", "r1")]


async def test_a_sync_that_fails_lets_engines_start_again_and_the_learner_waits_for_its_second_attempt() -> None:
    world = World()
    devices = world.devices()
    await devices.to_learner()
    await devices.publish(1)
    world.lost = TimeoutError("no engine took it")
    restarts: list[str] = []

    async def restart() -> None:
        async with devices.engines_turn():
            restarts.append("begun")
            await asyncio.sleep(0.02)
            world.lost = None
            restarts.append("ended")

    restarting = asyncio.ensure_future(restart())
    await asyncio.sleep(0.01)
    assert not restarts, "the devices are not free yet"
    with pytest.raises(TimeoutError, match="no engine took it"):
        await devices.sync(1)
    learner = asyncio.ensure_future(devices.to_learner())
    await asyncio.sleep(0.01)
    assert restarts == ["begun"]
    await asyncio.wait_for(devices.sync(1), 5)
    assert restarts == ["begun", "ended"], "it would have met an engine that is not ready"
    await asyncio.wait_for(asyncio.gather(restarting, learner), 5)
    assert world.log[-4:] == ["sync 1", "r0 sleeps", "r1 sleeps", "onload"]
