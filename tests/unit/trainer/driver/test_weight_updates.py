"""New versions on their way to the engines, and who uses shared devices."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.fakes.scripted_run import sync_report
from tests.fakes.virtual_time import run_virtual
from trainer.driver import weight_updates
from trainer.driver.weight_updates import ColocatedDevices, WeightUpdater
from trainer.telemetry.trace import Tracer
from weight_sync.errors import PublisherLost, PullTimeout, VersionUnavailable
from weight_sync.types import ReplicaTimes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from weight_sync.types import SyncReport


@dataclass
class Coordinator:
    """As the real one, it keeps the newest published version only, and moves one at a time."""

    pack_s: float = 0.0
    sync_s: float = 10.0
    fails_at: int = -1
    published: int = -1
    packing: bool = False
    synced: list[int] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)

    async def publish(self, version: int) -> float:
        self.packing = True
        await asyncio.sleep(self.pack_s)
        self.packing, self.published = False, version
        return self.pack_s

    async def sync(self, version: int) -> SyncReport:
        assert not self.packing, "a version is moved while its slot is written"
        assert version == self.published, "this version is not there any more"
        self.begun.append(asyncio.get_running_loop().time())
        if version == self.fails_at:
            raise OSError(f"version {version} was lost")
        await asyncio.sleep(self.sync_s)
        self.synced.append(version)
        return sync_report(version)


def updating(
    coordinator: Coordinator,
    main: Callable[[WeightUpdater], Awaitable[Any]],
    *,
    live_at: list[tuple[float, int]],
    **options: Any,
) -> WeightUpdater:
    async def on_live(report: SyncReport) -> None:
        live_at.append((asyncio.get_running_loop().time(), report.version))

    async def run() -> WeightUpdater:
        anything: Any = coordinator
        updater = WeightUpdater(anything, on_live=on_live, tracer=Tracer(None), first=sync_report(0), **options)
        moving, body = asyncio.create_task(updater.run()), asyncio.ensure_future(main(updater))
        await asyncio.wait({moving, body}, return_when=asyncio.FIRST_COMPLETED)
        for task in (body, moving):
            if not task.cancel():
                task.result()
        await asyncio.gather(moving, body, return_exceptions=True)
        return updater

    return run_virtual(run())


def test_publishing_waits_for_the_pack_and_not_for_the_engines() -> None:
    async def main(updater: WeightUpdater) -> None:
        assert await updater.publish(1) == 2.0
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        assert updater.live_version == 0
        await updater.wait_until_live()
        assert updater.live_version == 1

    live: list[tuple[float, int]] = []
    updating(Coordinator(pack_s=2.0), main, live_at=live)
    assert live == [(pytest.approx(12.0), 1)]


def test_versions_that_come_slowly_are_all_brought_in_order() -> None:
    async def main(updater: WeightUpdater) -> None:
        for version in range(1, 5):
            await updater.publish(version)
            await asyncio.sleep(11)

    coordinator = Coordinator()
    updater = updating(coordinator, main, live_at=[])
    assert coordinator.synced == [1, 2, 3, 4]
    assert updater.num_superseded == 0
    assert updater.last_report.version == 4


def test_a_newer_version_replaces_the_one_that_waits() -> None:
    async def main(updater: WeightUpdater) -> None:
        for version in range(1, 5):
            await updater.publish(version)
            await asyncio.sleep(1)
        await updater.wait_until_live()

    coordinator = Coordinator()
    live: list[tuple[float, int]] = []
    updater = updating(coordinator, main, live_at=live)
    assert coordinator.synced == [1, 4]
    assert updater.num_superseded == 2
    assert [version for _, version in live] == [1, 4]


def test_a_sync_does_not_begin_with_a_version_that_is_being_overwritten() -> None:
    """Version 2 waits behind 1; 3 is being packed over it at the moment when 1 is live."""

    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)  # packed at 4, moved from 4 to 14
        await asyncio.sleep(1)
        await updater.publish(2)  # packed at 9
        await asyncio.sleep(3)
        await updater.publish(3)  # packed from 12 to 16
        await updater.wait_until_live()

    coordinator = Coordinator(pack_s=4.0)
    updating(coordinator, main, live_at=[])
    assert coordinator.synced == [1, 3]
    assert coordinator.begun == [pytest.approx(4.0), pytest.approx(16.0)]


def test_publishing_goes_on_while_a_sync_is_on_its_way() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await asyncio.sleep(1)
        await updater.publish(2)
        assert asyncio.get_running_loop().time() == pytest.approx(1.0 + 2 * 0.5)
        await updater.wait_until_live()

    coordinator = Coordinator(pack_s=0.5)
    updating(coordinator, main, live_at=[])
    assert coordinator.begun == [pytest.approx(0.5), pytest.approx(10.5)]


def test_waiting_returns_at_once_when_nothing_was_published() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.wait_until_live()

    updater = updating(Coordinator(), main, live_at=[])
    assert (updater.live_version, updater.last_report.version) == (0, 0)


def test_waiting_lasts_until_everybody_was_told() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()
        assert [version for _, version in live] == [1]

    live: list[tuple[float, int]] = []
    updating(Coordinator(), main, live_at=live)


def test_a_sync_that_fails_ends_whoever_waits_for_it() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()

    with pytest.raises(OSError, match="version 1 was lost"):
        updating(Coordinator(fails_at=1), main, live_at=[])


def test_version_that_lost_its_slot_while_it_waited_goes_live_with_the_next() -> None:
    class Overtaken(Coordinator):
        async def sync(self, version: int) -> SyncReport:
            if version == 1:
                await asyncio.sleep(1.0)
                raise VersionUnavailable("version 1 is not held here, held: [2, 3]")
            return await super().sync(version)

    live: list[tuple[float, int]] = []

    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await asyncio.sleep(0.1)
        await updater.publish(2)
        await updater.wait_until_live()
        assert (updater.live_version, updater.num_superseded) == (2, 1)

    updating(Overtaken(), main, live_at=live)
    assert [version for _, version in live] == [2]


def test_version_that_is_lost_with_nothing_in_its_place_is_an_error() -> None:
    class Forgetful(Coordinator):
        async def sync(self, version: int) -> SyncReport:
            raise VersionUnavailable("version 1 is not held here, held: []")

    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()

    with pytest.raises(VersionUnavailable):
        updating(Forgetful(), main, live_at=[])


class Slots(Coordinator):
    """Two slots, the older one is written over from the beginning of a pack; every sync waits for `sync_s` first."""

    def __init__(self, *, sync_s: float, last_pack_s: float) -> None:
        super().__init__(sync_s=sync_s)
        self.last_pack_s = last_pack_s
        self.held: list[int] = []

    async def publish(self, version: int) -> float:
        self.held = self.held[-1:]
        await asyncio.sleep(self.last_pack_s if version == 3 else 1.0)
        self.held.append(version)
        return 1.0

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(self.sync_s)
        if version not in self.held:
            raise VersionUnavailable(f"version {version} is not held here, held: {self.held}")
        self.synced.append(version)
        return sync_report(version)


def test_version_that_lost_its_slot_to_one_that_is_still_being_packed_goes_live_with_that() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)  # asked for at 1, its turn comes at 3.5
        await asyncio.sleep(0.1)
        await updater.publish(2)
        await updater.publish(3)  # packed from 2.1 to 5.1, over version 1
        await updater.wait_until_live()
        assert (updater.live_version, updater.num_superseded) == (3, 2)

    live: list[tuple[float, int]] = []
    updating(Slots(sync_s=2.5, last_pack_s=3.0), main, live_at=live)
    assert [version for _, version in live] == [3]


def test_a_pack_that_fails_is_the_cause_and_not_what_follows_from_it() -> None:
    class Broken(Slots):
        async def publish(self, version: int) -> float:
            await super().publish(version)
            if version == 3:
                raise OSError("rank 1 is out of memory")
            return 1.0

    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await asyncio.sleep(0.1)
        for version in (2, 3):
            await updater.publish(version)

    with pytest.raises(OSError, match="rank 1 is out of memory"):
        updating(Broken(sync_s=2.5, last_pack_s=3.0), main, live_at=[])


@dataclass
class Engines(Coordinator):
    """None is there from the beginning until `back_at`."""

    back_at: float = 100.0
    error: Exception = field(default_factory=lambda: PullTimeout("replica_0: version 1 did not arrive"))
    num_waits: int = 0

    async def sync(self, version: int) -> SyncReport:
        if asyncio.get_running_loop().time() < self.back_at:
            raise self.error
        return await super().sync(version)

    async def wait_for_engine(self, error: Exception) -> None:
        assert error is self.error
        self.num_waits += 1
        await asyncio.sleep(30.0)


def test_a_version_waits_for_an_engine_that_is_started_again() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()

    engines, live = Engines(), list[tuple[float, int]]()
    updating(engines, main, live_at=live, wait_for_engine=engines.wait_for_engine)
    assert (engines.num_waits, live) == (4, [(pytest.approx(130.0), 1)])


def test_newer_versions_replace_the_one_that_waits_for_an_engine() -> None:
    async def main(updater: WeightUpdater) -> None:
        for version in range(1, 5):
            await updater.publish(version)
            await asyncio.sleep(10)
        await updater.wait_until_live()

    engines, live = Engines(), list[tuple[float, int]]()
    updater = updating(engines, main, live_at=live, wait_for_engine=engines.wait_for_engine)
    assert [version for _, version in live] == [4]
    assert updater.num_superseded == 3


def test_a_learner_that_is_lost_ends_the_run_whatever_the_engines_do() -> None:
    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()

    engines = Engines(error=PublisherLost("publisher did not answer"))
    with pytest.raises(PublisherLost):
        updating(engines, main, live_at=[], wait_for_engine=engines.wait_for_engine)
    assert engines.num_waits == 0


def test_a_sync_that_waited_for_an_evaluation_is_traced_where_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting(Coordinator):
        async def sync(self, version: int) -> SyncReport:
            await super().sync(version)
            return sync_report(version, end_to_end_s=4.0)

    traced: list[float] = []
    monkeypatch.setattr(weight_updates, "time", SimpleNamespace(time=lambda: asyncio.get_running_loop().time()))
    monkeypatch.setattr(WeightUpdater, "_trace", lambda _updater, _report, started_at: traced.append(started_at))

    async def main(updater: WeightUpdater) -> None:
        await updater.publish(1)
        await updater.wait_until_live()

    waiting = Waiting(sync_s=10.0)
    updating(waiting, main, live_at=[])
    assert traced == [waiting.begun[0] + 6.0]


@pytest.mark.parametrize(("is_staged", "pull_at_s"), [(True, 1.0), (False, 6.5)])
def test_the_trace_shows_bytes_where_they_moved(is_staged: bool, pull_at_s: float, tmp_path: Path) -> None:
    times = ReplicaTimes(
        is_staged=is_staged, pull_at_s=pull_at_s, pull_s=2.0, attest_s=0.5, live_at_s=9.0, drain_s=0.1, pause_s=2.5
    )
    report = sync_report(1, end_to_end_s=10.0, replicas={"replica_0": times})
    tracer = Tracer(tmp_path / "trace.json")
    updater = WeightUpdater(cast("Any", Coordinator()), on_live=_nothing, tracer=tracer, first=sync_report(0))
    updater._trace(report, 100.0)
    tracer.close()
    events = {(event["name"], event["ph"]): event for event in json.loads((tmp_path / "trace.json").read_text())}
    paused = events["paused for v1", "X"]
    assert (paused["ts"] / 1e6, paused["dur"] / 1e6) == (pytest.approx(106.5), pytest.approx(2.5))
    moved = events["pull v1 replica_0", "b"]["ts"] / 1e6, events["pull v1 replica_0", "e"]["ts"] / 1e6
    assert moved == (pytest.approx(100.0 + pull_at_s), pytest.approx(102.0 + pull_at_s))
    compared = events["digests v1 replica_0", "b"]["ts"] / 1e6, events["digests v1 replica_0", "e"]["ts"] / 1e6
    assert compared == (pytest.approx(102.0 + pull_at_s), pytest.approx(102.5 + pull_at_s))


async def _nothing(_report: SyncReport) -> None: ...


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

    def devices(self) -> ColocatedDevices:
        anything: Any = self
        return ColocatedDevices(
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
        await devices.acquire_for_training()
        await devices.acquire_for_training()
        assert await devices.publish(version) == 0.5
        await devices.sync(version)
    turn = ["r0 sleeps", "r1 sleeps", "onload"]
    assert world.log == [*turn, "publish 1", "offload", "sync 1", *turn, "publish 2", "offload", "sync 2"]
    record = devices.record()
    assert (record["devices/onload_bytes"], record["devices/free_frac"]) == (200, 0.25)
    assert {"devices/sleep_s", "devices/onload_s", "devices/offload_s"} < set(record)
    assert devices.offload_s == record["devices/offload_s"] == OFFLOAD_S
    await devices.acquire_for_training()
    assert devices.offload_s == 0, "this turn's is still to come"


async def test_the_next_step_waits_until_the_engines_have_the_version_of_the_last() -> None:
    world = World()
    devices = world.devices()
    await devices.acquire_for_training()
    await devices.publish(1)
    waiting = asyncio.ensure_future(devices.acquire_for_training())
    await asyncio.sleep(0.02)
    assert not waiting.done() and not world.is_learner_here
    await devices.sync(1)
    await asyncio.wait_for(waiting, 5)
    assert world.log[-4:] == ["sync 1", "r0 sleeps", "r1 sleeps", "onload"]


async def test_a_restart_and_the_learner_wait_for_each_other() -> None:
    world = World()
    devices = world.devices()
    async with devices.engines_active():
        learner = asyncio.ensure_future(devices.acquire_for_training())
        await asyncio.sleep(0.01)
        assert world.log == []
    await asyncio.wait_for(learner, 5)
    entered = asyncio.Event()

    async def restart() -> None:
        async with devices.engines_active():
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
    await devices.acquire_for_training()
    assert world.log == ["r1 sleeps", "onload"]
    assert world.killed == [world.engines["r2"], world.engines["r0"]], "lost ones would keep their memory"
    world = World()
    world.broken = {"r0", "r1"}
    await world.devices().acquire_for_training()
    assert world.log == ["onload"]
    assert world.killed == [world.engines[name] for name in ("r2", "r0", "r1")]


async def test_a_sync_that_fails_lets_engines_start_again_and_the_learner_waits_for_its_second_attempt() -> None:
    world = World()
    devices = world.devices()
    await devices.acquire_for_training()
    await devices.publish(1)
    world.lost = TimeoutError("no engine took it")
    restarts: list[str] = []

    async def restart() -> None:
        async with devices.engines_active():
            restarts.append("begun")
            await asyncio.sleep(0.02)
            world.lost = None
            restarts.append("ended")

    restarting = asyncio.ensure_future(restart())
    await asyncio.sleep(0.01)
    assert not restarts, "the devices are not free yet"
    with pytest.raises(TimeoutError, match="no engine took it"):
        await devices.sync(1)
    learner = asyncio.ensure_future(devices.acquire_for_training())
    await asyncio.sleep(0.01)
    assert restarts == ["begun"]
    await asyncio.wait_for(devices.sync(1), 5)
    assert restarts == ["begun", "ended"], "it would have met an engine that is not ready"
    await asyncio.wait_for(asyncio.gather(restarting, learner), 5)
    assert world.log[-4:] == ["sync 1", "r0 sleeps", "r1 sleeps", "onload"]
