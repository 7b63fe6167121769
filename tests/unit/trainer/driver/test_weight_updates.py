"""New weights on their way to the engines. Most of the turns on shared devices is proven by tests/simulation."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from tests.fakes.scripted_run import config, sync_report
from tests.fakes.virtual_time import run_virtual
from trainer.driver import actors, weight_updates
from trainer.driver.placement import plan_placement
from trainer.driver.weight_updates import ColocatedDevices, WeightUpdater
from trainer.telemetry.trace import Tracer
from weight_sync.device.select import get_backend
from weight_sync.errors import PublisherLost, PullTimeout, VersionUnavailable
from weight_sync.messages import ReplicaTimes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from weight_sync.messages import SyncReport


@dataclass
class Coordinator:
    """Packs in `pack_s` and syncs in `sync_s`, into `num_slots` slots of which the oldest is written over from the
    beginning of a pack. No engine is there until `engines_at`."""

    pack_s: dict[int, float] | float = 0.0
    sync_s: float = 10.0
    num_slots: int = 9
    engines_at: float = 0.0
    error: Exception = field(default_factory=lambda: PullTimeout("replica_0: version 1 did not arrive"))
    pack_error: int = -1
    """Version whose pack fails."""
    end_to_end_s: float = 1.0
    held: list[int] = field(default_factory=list)
    begun: list[tuple[float, int]] = field(default_factory=list)
    live: list[tuple[float, int]] = field(default_factory=list)
    members: dict[str, str] = field(default_factory=dict)
    num_waits: int = 0

    async def publish(self, version: int) -> float:
        self.held = self.held[max(0, len(self.held) + 1 - self.num_slots) :]
        seconds = self.pack_s if isinstance(self.pack_s, float) else self.pack_s[version]
        await asyncio.sleep(seconds)
        if version == self.pack_error:
            raise OSError("rank 1 is out of memory")
        self.held.append(version)
        return seconds

    async def sync(self, version: int) -> SyncReport:
        if asyncio.get_running_loop().time() < self.engines_at:
            raise self.error
        self.begun.append((asyncio.get_running_loop().time(), version))
        await asyncio.sleep(self.sync_s)
        if version not in self.held:
            raise VersionUnavailable(f"version {version} is not held here, held: {self.held}")
        return sync_report(version, end_to_end_s=self.end_to_end_s)

    async def on_live(self, report: SyncReport) -> None:
        self.live.append((asyncio.get_running_loop().time(), report.version))

    async def wait_for_engine(self, error: Exception) -> None:
        assert error is self.error
        self.num_waits += 1
        await asyncio.sleep(30.0)

    @property
    def synced(self) -> list[int]:
        return [version for _, version in self.live]


def updater_of(coordinator: Coordinator, tracer: Tracer | None = None) -> WeightUpdater:
    anything: Any = coordinator
    return WeightUpdater(
        anything,
        on_live=coordinator.on_live,
        wait_for_engine=coordinator.wait_for_engine,
        tracer=Tracer(None) if tracer is None else tracer,
        first=sync_report(0),
    )


def updating(coordinator: Coordinator, main: Callable[[WeightUpdater], Awaitable[Any]]) -> Coordinator:
    """`main` next to the updater; the first that fails ends both, with its error."""

    async def run() -> Coordinator:
        updater = updater_of(coordinator)
        moving, body = asyncio.create_task(updater.run()), asyncio.ensure_future(main(updater))
        await asyncio.wait({moving, body}, return_when=asyncio.FIRST_COMPLETED)
        for task in (body, moving):
            if not task.cancel():
                task.result()
        await asyncio.gather(moving, body, return_exceptions=True)
        return coordinator

    return run_virtual(run())


def publishing(*pauses: float) -> Callable[[WeightUpdater], Awaitable[None]]:
    """Versions 1, 2, ... with such pauses after them; then waits until the last is live."""

    async def main(updater: WeightUpdater) -> None:
        for version, pause_s in enumerate(pauses, start=1):
            await updater.publish(version)
            await asyncio.sleep(pause_s)
        await updater.wait_until_live()

    return main


@pytest.mark.parametrize(
    ("coordinator", "pauses", "live"),
    [
        (Coordinator(pack_s=2.0), (0.0,), [(12.0, 1)]),
        (Coordinator(), (), []),
        (Coordinator(), (11.0,) * 4, [(10.0, 1), (21.0, 2), (32.0, 3), (43.0, 4)]),
        (Coordinator(), (1.0,) * 4, [(10.0, 1), (20.0, 4)]),
        # Version 2 waits after 1, which is moved from 4 to 14; 3 is packed over it from 12 to 16.
        (Coordinator(pack_s=4.0), (1.0, 3.0, 0.0), [(14.0, 1), (26.0, 3)]),
        # Nothing is lost where a version has lost its slot by the time of its turn.
        (Coordinator(sync_s=1.0, num_slots=1), (0.1, 0.0), [(2.0, 2)]),
        # Its slot is taken by one that is still being packed.
        (Coordinator(pack_s={1: 1.0, 2: 1.0, 3: 3.0}, sync_s=2.5, num_slots=2), (0.1, 0.0, 0.0), [(7.6, 3)]),
        # Without an engine it waits for one, and newer versions replace the one that waits.
        (Coordinator(engines_at=100.0), (0.0,), [(130.0, 1)]),
        (Coordinator(engines_at=100.0), (10.0,) * 4, [(40.0 + 30.0 * 3, 4)]),
    ],
)
def test_which_versions_become_live_and_when(
    coordinator: Coordinator, pauses: Sequence[float], live: list[tuple[float, int]]
) -> None:
    assert updating(coordinator, publishing(*pauses)).live == [(pytest.approx(at), version) for at, version in live]


def test_publishing_waits_for_its_pack_and_for_no_sync_and_each_sync_is_traced_where_it_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sync that waits for an evaluation takes longer than it runs."""
    traced: list[float] = []
    monkeypatch.setattr(weight_updates, "time", SimpleNamespace(time=lambda: asyncio.get_running_loop().time()))
    monkeypatch.setattr(WeightUpdater, "_trace", lambda _updater, _report, started_at: traced.append(started_at))

    async def main(updater: WeightUpdater) -> None:
        assert await updater.publish(1) == 0.5
        await asyncio.sleep(1.0)
        await updater.publish(2)
        assert asyncio.get_running_loop().time() == pytest.approx(2.0)
        await updater.wait_until_live()
        assert updater.last_report.version == 2

    coordinator = updating(Coordinator(pack_s=0.5, sync_s=10.0, end_to_end_s=4.0), main)
    assert coordinator.begun == [(pytest.approx(0.5), 1), (pytest.approx(10.5), 2)]
    assert traced == [pytest.approx(6.5), pytest.approx(16.5)]


@pytest.mark.parametrize(
    ("coordinator", "pauses", "error", "words"),
    [
        (Coordinator(engines_at=9.0, error=OSError("version 1 was lost")), (0.0,), OSError, "version 1 was lost"),
        (Coordinator(engines_at=9.0, error=PublisherLost("no publisher")), (0.0,), PublisherLost, "no publisher"),
        (Coordinator(num_slots=0), (0.0,), VersionUnavailable, "version 1 is not held here"),
        # The pack is the cause, and not what follows from it.
        (Coordinator(pack_s=2.0, sync_s=3.0, num_slots=1, pack_error=2), (0.1, 0.0), OSError, "out of memory"),
    ],
)
def test_what_no_engine_can_help_ends_the_run_with_its_cause(
    coordinator: Coordinator, pauses: Sequence[float], error: type[Exception], words: str
) -> None:
    if coordinator.num_slots == 0:
        coordinator.held.clear()
        coordinator.publish = _lost  # type: ignore[method-assign]
    with pytest.raises(error, match=words):
        updating(coordinator, publishing(*pauses))
    assert coordinator.num_waits == 0


async def _lost(_version: int) -> float:
    return 0.0


@pytest.mark.parametrize(("is_staged", "pull_at_s"), [(True, 1.0), (False, 6.5)])
def test_the_trace_shows_bytes_where_they_moved(is_staged: bool, pull_at_s: float, tmp_path: Path) -> None:
    times = ReplicaTimes(
        is_staged=is_staged, pull_at_s=pull_at_s, pull_s=2.0, attest_s=0.5, live_at_s=9.0, drain_s=0.1, pause_s=2.5
    )
    tracer = Tracer(tmp_path / "trace.json")
    updater_of(Coordinator(), tracer)._trace(sync_report(1, end_to_end_s=10.0, replicas={"replica_0": times}), 100.0)
    tracer.close()
    events = {(event["name"], event["ph"]): event for event in json.loads((tmp_path / "trace.json").read_text())}
    paused = events["paused for v1", "X"]
    assert (paused["ts"] / 1e6, paused["dur"] / 1e6) == (pytest.approx(106.5), pytest.approx(2.5))
    for what, begin, end in (("pull", 0.0, 2.0), ("digests", 2.0, 2.5)):
        found = [events[f"{what} v1 replica_0", phase]["ts"] / 1e6 - 100.0 - pull_at_s for phase in "be"]
        assert found == [pytest.approx(begin), pytest.approx(end)]


@pytest.mark.parametrize(("timeout_s", "limit_s"), [(120.0, 300.0), (900.0, 1800.0)])
def test_no_engine_is_ended_while_a_sync_may_still_try_again(
    timeout_s: float, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog bounds how long it stays paused."""
    limits: list[float] = []
    engine = SimpleNamespace(begin_imports=SimpleNamespace(remote=lambda: None))
    actor = SimpleNamespace(remote=lambda _spec, *, pause_limit_s: (limits.append(pause_limit_s), engine)[1])
    monkeypatch.setattr(actors, "engine_actor", lambda: SimpleNamespace(options=lambda **_: actor))
    cfg = config(weight_sync={"timeout_s": timeout_s})
    placement = plan_placement(cfg, resource=None)
    actors.new_engine(cfg, placement, get_backend("cpu"), name="replica_0", version=0)
    assert limits == [limit_s]


async def test_on_shared_devices_a_sync_that_fails_frees_them_for_restarts_but_not_for_the_learner() -> None:
    coordinator, log = Coordinator(sync_s=0.0, engines_at=1e12), list[str]()

    async def moves(what: str) -> Any:
        log.append(what)
        return [SimpleNamespace(nbytes=1, free_bytes=1, total_bytes=1)]

    learner = SimpleNamespace(onload=lambda: moves("onload"), offload=lambda: moves("offload"))
    parties = cast("Any", coordinator), cast("Any", learner)
    devices = ColocatedDevices(*parties, {}, tracer=Tracer(None), sleep_timeout_s=5.0)
    await devices.acquire_for_training()
    await devices.publish(1)
    with pytest.raises(PullTimeout):
        await devices.sync(1)
    next_step = asyncio.ensure_future(devices.acquire_for_training())
    async with asyncio.timeout(5), devices.engines_active():
        await asyncio.sleep(0)
        assert log == ["onload", "offload"]
    await asyncio.sleep(0.01)
    assert not next_step.done()
    coordinator.engines_at = 0.0
    await devices.sync(1)
    await asyncio.wait_for(next_step, 5)
    assert log == ["onload", "offload", "onload"]
