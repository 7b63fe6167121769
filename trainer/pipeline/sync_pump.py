"""Brings published versions to the engines, one after the other, beside training."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from weight_sync.errors import PublisherLost, VersionUnavailable, WeightSyncError
from weight_sync.types import ReplicaTimes, SyncReport

if TYPE_CHECKING:
    from trainer.telemetry.spans import Tracer

log = logging.getLogger(__name__)


class Coordinator(Protocol):
    """`trainer.pipeline.device_turns.OwnDevices`, or a `weight_sync.coordinator.SyncCoordinator` by itself."""

    async def publish(self, version: int) -> float: ...

    async def sync(self, version: int) -> SyncReport: ...


OnLive = Callable[[SyncReport], Awaitable[None]]
AwaitEngine = Callable[[Exception], Awaitable[None]]
"""(why no engine took a version): returns when it may be tried again; raises that error if nothing has changed."""


async def no_engine_returns(error: Exception) -> None:
    """Where nobody starts engines again."""
    raise error


class SyncPump:
    """Publishing blocks the learner for the pack only; moving and committing happens in `run`.

    At most one version is on its way and at most one waits. A newer version replaces the one that waits: its steps
    become live together with the newer one. Where no engine takes a version, it waits until one has been started again.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        on_live: OnLive,
        tracer: Tracer,
        first: SyncReport,
        await_engine: AwaitEngine = no_engine_returns,
    ) -> None:
        """`first` is the report of the version that is live already."""
        self._coordinator = coordinator
        self._on_live = on_live
        self._await_engine = await_engine
        self._tracer = tracer
        self._waiting: int | None = None
        self._is_packing = False
        self._published = self._live = first.version
        self._changed = asyncio.Condition()
        self.num_superseded = 0
        self.last_report = first
        """Of the last sync that ended."""

    @property
    def live_version(self) -> int:
        """Newest version that every healthy engine generates from."""
        return self._live

    async def publish(self, version: int) -> float:
        """Pack `version` on all learner ranks; returns the seconds that took.

        Raises:
            WeightSyncError: a rank could not pack.
        """
        if self._waiting is not None:
            # Nobody has begun to read it, so its slot may be taken; `run` must not begin while it is overwritten.
            log.debug("version %d supersedes %d before it was moved", version, self._waiting)
            self._waiting = None
            self.num_superseded += 1
        # Stays so if the pack fails: that ends the run, and `run` must not end it first with what followed from it.
        self._is_packing = True
        with self._tracer.span("sync", f"pack v{version}"):
            seconds = await self._coordinator.publish(version)
        async with self._changed:
            self._waiting = self._published = version
            self._is_packing = False
            self._changed.notify_all()
        return seconds

    async def run(self) -> None:
        """Consumes: the newest published version. Waits for: `publish`, then the engines; without any, for one that is
        started again. Unblocked by: cancellation, or the deadlines of sync and restart.

        Raises:
            PublisherLost: a learner is gone; no engine can help.
            WeightSyncError, TimeoutError: no engine took a version, and none comes back.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting is not None)
                version, self._waiting = self._waiting, None
            assert version is not None
            report = await self._bring(version)
            if report is None:
                self.num_superseded += 1
                continue
            self.last_report = report
            await self._on_live(report)
            async with self._changed:
                self._live = version
                self._changed.notify_all()

    async def _bring(self, version: int) -> SyncReport | None:
        """None if a newer version has taken its place: that one goes live for both."""
        while True:
            try:
                report = await self._coordinator.sync(version)
            except VersionUnavailable as error:
                # It waited too long for its turn.
                if not await self._is_superseded():
                    raise
                log.info("version %d was superseded on its way: %s", version, error)
                return None
            except PublisherLost:
                raise
            except (WeightSyncError, TimeoutError) as error:
                await self._await_engine(error)
                if await self._is_superseded():
                    return None
            else:
                # It may have waited for an evaluation before it began.
                self._trace(report, time.time() - report.end_to_end_s)
                return report

    async def _is_superseded(self) -> bool:
        """Whether a newer version waits. One that is being packed is waited for: its slot is already taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_packing)
            return self._waiting is not None

    async def drained(self) -> None:
        """Wait until the newest published version is live. Bounded by the deadline of the sync, which fails the run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._live >= self._published)

    def _trace(self, report: SyncReport, started_at: float) -> None:
        self._tracer.add_span(
            "sync",
            f"sync v{report.version}",
            start_s=started_at,
            end_s=started_at + report.end_to_end_s,
            overlapping=True,
            bytes=report.nbytes,
            gb_per_s=report.pull_bytes_per_s / 1e9,
            **{f"learner_{rank}_s": seconds for rank, seconds in report.pull_by_source.items()},
        )
        for name, times in report.replicas.items():
            self._trace_replica(f"v{report.version}", name, times, started_at)

    def _trace_replica(self, version: str, name: str, times: ReplicaTimes, started_at: float) -> None:
        """Where a replica was: bytes and digests on the way to it, and the pause of its generation."""
        pulled_at = started_at + times.pull_at_s
        attested_at = pulled_at + times.pull_s
        live_at = started_at + times.live_at_s
        for what, begin, end in (
            ("pull", pulled_at, attested_at),
            ("digests", attested_at, attested_at + times.attest_s),
        ):
            self._tracer.add_span("sync", f"{what} {version} {name}", start_s=begin, end_s=end, overlapping=True)
        self._tracer.add_span(
            f"engine {name}",
            f"paused for {version}",
            start_s=live_at - times.pause_s,
            end_s=live_at,
            drain_s=times.drain_s,
        )
