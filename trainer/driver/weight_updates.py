"""New weights on their way to the engines, and turns on the devices that learner and engines share."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from trainer.errors import first_cause, one_line
from trainer.remote import call, kill_actor
from weight_sync.errors import PublisherLost, VersionUnavailable, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

    from trainer.learner.group import LearnerGroup
    from trainer.telemetry.trace import Tracer
    from weight_sync.control.coordinator import SyncCoordinator
    from weight_sync.messages import SyncReport


log = logging.getLogger(__name__)


class DedicatedDevices:
    """Learners and engines have separate devices, and never wait for each other."""

    must_sync = False
    """Whether engines need a sync after a step that left the policy as it was."""
    offload_s = 0.0
    """Seconds of the last `publish` that moved the learner's memory off the devices."""

    def __init__(self, coordinator: SyncCoordinator) -> None:
        self._coordinator = coordinator

    async def acquire_for_training(self) -> None:
        return

    @asynccontextmanager
    async def engines_active(self) -> AsyncIterator[None]:
        """Around a restart, which needs the engine's device."""
        yield

    async def publish(self, version: int) -> float:
        return await self._coordinator.publish(version)

    async def sync(self, version: int) -> SyncReport:
        return await self._coordinator.sync(version)

    def record(self) -> dict[str, object]:
        """Metrics of the last turns."""
        return {}


class ColocatedDevices(DedicatedDevices):
    """One learner rank and one engine worker on every device, with the memory of one side at a time.

    Two contexts, the arena with the packed weights and captured graphs stay on the device.
    """

    must_sync = True
    """The commit of a new version wakes the engines and replaces the weights that they dropped in sleep mode."""

    def __init__(
        self,
        coordinator: SyncCoordinator,
        learner: LearnerGroup,
        engines: Mapping[str, Any],
        *,
        tracer: Tracer,
        sleep_timeout_s: float,
        kill: Callable[[Any], None] = kill_actor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engines: actors by name; a restart replaces the one in here.
            sleep_timeout_s: deadline of an engine to enter sleep mode.
        """
        super().__init__(coordinator)
        self._learner, self._engines = learner, engines
        self._tracer, self._kill, self._clock = tracer, kill, clock
        self._sleep_timeout_s = sleep_timeout_s
        self._devices = asyncio.Lock()
        """Held by the learner until its version is live, and by restarts."""
        self._engines_updated = asyncio.Event()
        """The engines have the newest published version."""
        self._engines_updated.set()
        self._is_held_by_learner = self._is_learner_onloaded = False
        self._record: dict[str, float] = {}

    async def acquire_for_training(self) -> None:
        """Consumes: nothing. Waits for: the end of the last sync, and of a restart. Unblocked by: `sync`, which has a
        deadline. Idempotent. Raises LearnerError if a rank did not get its memory back."""
        if self._is_learner_onloaded:
            return
        await self._engines_updated.wait()
        await self._devices.acquire()
        self._engines_updated.clear()
        self._record = {}
        self._is_held_by_learner = self._is_learner_onloaded = True
        with self._timed("sleep"):
            await self._put_to_sleep()
        with self._timed("onload"):
            moved = await self._learner.onload()
        self._record["devices/onload_bytes"] = sum(one.nbytes for one in moved)

    async def publish(self, version: int) -> float:
        """As the coordinator's; then the learner's memory is on the host."""
        seconds = await super().publish(version)
        with self._timed("offload"):
            moved = await self._learner.offload()
        self._is_learner_onloaded = False
        self._record["devices/free_frac"] = min(one.free_bytes / one.total_bytes for one in moved)
        return seconds

    async def sync(self, version: int) -> SyncReport:
        """As the coordinator's; then the engines have the devices. After a sync that fails, restarts may use them, but
        the learner waits until another one succeeds."""
        if not self._is_held_by_learner:
            await self._devices.acquire()
        try:
            report = await super().sync(version)
        finally:
            self._is_held_by_learner = False
            self._devices.release()
        self._engines_updated.set()
        return report

    @asynccontextmanager
    async def engines_active(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: the learner to leave the devices. Unblocked by: `sync`."""
        async with self._devices:
            yield

    @property
    def offload_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._record.get("devices/offload_s", 0.0)

    def record(self) -> dict[str, object]:
        return {**self._record}

    async def _put_to_sleep(self) -> None:
        """Kill engines that are lost or do not enter sleep mode, since they would keep their memory."""

        async def sleep(name: str, actor: Any) -> None:
            hint = "increase weight_sync.timeout_s if it was on its way"
            try:
                await call(actor.sleep.remote(), timeout_s=self._sleep_timeout_s, who=name, what="sleep", hint=hint)
            except Exception as error:  # noqa: BLE001 - its memory must be freed in any case
                log.warning("%s did not enter sleep mode and is killed: %s", name, one_line(first_cause(error)))
                self._kill(actor)

        live = list[str]()
        for name, state in self._coordinator.members.items():
            if state == "live":
                live.append(name)
            else:
                self._kill(self._engines[name])
        await asyncio.gather(*(sleep(name, self._engines[name]) for name in live))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = self._clock()
        with self._tracer.span("devices", what):
            yield
        self._record[f"devices/{what}_s"] = self._clock() - began


class WeightUpdater:
    """Publishing blocks the learner for the pack only; `run` moves and commits the weights.

    At most one version is being moved and one waits. A newer version supersedes the one that waits, and goes live for
    both. A version that no engine takes waits until an engine has been restarted.
    """

    def __init__(
        self,
        devices: DedicatedDevices,
        *,
        on_live: Callable[[SyncReport], Awaitable[None]],
        wait_for_engine: Callable[[Exception], Awaitable[None]],
        tracer: Tracer,
        first: SyncReport,
    ) -> None:
        """
        Args:
            wait_for_engine: (why no engine took a version) returns when it may be tried again; raises that error if
                no engine comes back.
            first: of the version that is live already.
        """
        self._devices, self._tracer = devices, tracer
        self._on_live, self._wait_for_engine = on_live, wait_for_engine
        self._waiting: int | None = None
        self._is_packing = False
        self._published = self._live = first.version
        self._changed = asyncio.Condition()
        self.last_report = first
        """Of the last sync that ended."""

    async def publish(self, version: int) -> float:
        """Pack `version` on all learner ranks; returns the seconds that took. Raises WeightSyncError."""
        if self._waiting is not None:
            # No engine reads it yet, so its slot may be taken; `run` must not begin while it is overwritten.
            log.debug("version %d supersedes %d before it was transferred", version, self._waiting)
            self._waiting = None
        # Stays True if the pack fails, so that `run` does not end the run first with an error that follows from it.
        self._is_packing = True
        with self._tracer.span("sync", f"pack v{version}"):
            seconds = await self._devices.publish(version)
        async with self._changed:
            self._waiting = self._published = version
            self._is_packing = False
            self._changed.notify_all()
        return seconds

    async def run(self) -> None:
        """Consumes: the newest published version. Waits for: `publish`, then the engines, or a restart where none is
        left. Unblocked by: cancellation, or the deadlines of sync and restart.

        Raises:
            PublisherLost: a learner is gone, which no engine can replace.
            WeightSyncError, TimeoutError: no engine took a version, and none comes back.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting is not None)
                version, self._waiting = self._waiting, None
            assert version is not None
            report = await self._move(version)
            if report is None:
                continue
            self.last_report = report
            await self._on_live(report)
            async with self._changed:
                self._live = version
                self._changed.notify_all()

    async def _move(self, version: int) -> SyncReport | None:
        """None if a newer version goes live for both."""
        while True:
            try:
                report = await self._devices.sync(version)
            except VersionUnavailable as error:
                if not await self._is_superseded():
                    raise
                log.info("version %d was superseded on its way: %s", version, error)
                return None
            except PublisherLost:
                raise
            except (WeightSyncError, TimeoutError) as error:
                await self._wait_for_engine(error)
                if await self._is_superseded():
                    return None
            else:
                # From its end, since it may have waited for an evaluation before it began.
                self._trace(report, time.time() - report.end_to_end_s)
                return report

    async def _is_superseded(self) -> bool:
        """Whether a newer version waits, also after the pack that is under way and has taken the slot."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_packing)
            return self._waiting is not None

    async def wait_until_live(self) -> None:
        """Wait for the newest published version, at most until the deadline of the sync, which fails the run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._live >= self._published)

    def _trace(self, report: SyncReport, started_at: float) -> None:
        """The sync, and for each replica its pull, its digests and the pause of its generation."""
        span = self._tracer.add_span
        span(
            "sync",
            f"sync v{report.version}",
            start_s=started_at,
            end_s=started_at + report.end_to_end_s,
            overlapping=True,
            bytes=report.nbytes,
            gb_per_s=report.pull_bytes_per_s / 1e9,
            **{f"learner_{rank}_s": seconds for rank, seconds in report.pull_by_source.items()},
        )
        version = f"v{report.version}"
        for name, times in report.replicas.items():
            pulled_at, live_at = started_at + times.pull_at_s, started_at + times.live_at_s
            attested_at = pulled_at + times.pull_s
            attested = attested_at + times.attest_s
            span("sync", f"pull {version} {name}", start_s=pulled_at, end_s=attested_at, overlapping=True)
            span("sync", f"digests {version} {name}", start_s=attested_at, end_s=attested, overlapping=True)
            paused_at = live_at - times.pause_s
            span(f"engine {name}", f"paused for {version}", start_s=paused_at, end_s=live_at, drain_s=times.drain_s)
