"""Whose turn it is on devices that learners and engines share, and the same calls where nobody has to wait.

to_learner   engines sleep ─> learner's memory back from the host                     before a step, and at the end
publish      weights packed ─> learner's memory to the host                           after a step
sync         engines wake with the new weights ─> they have the devices               ends the learner's turn
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rollout.actor import kill_actor
from trainer.config.errors import first_cause, one_line
from trainer.pipeline.handles import answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from trainer.telemetry.spans import Tracer
    from weight_sync.types import SyncReport


log = logging.getLogger(__name__)


class Coordinator(Protocol):
    """The part of `weight_sync.coordinator.SyncCoordinator` that is used here."""

    @property
    def members(self) -> Mapping[str, str]: ...

    async def publish(self, version: int) -> float: ...

    async def sync(self, version: int) -> SyncReport: ...


class Moved(Protocol):
    """What a learner rank says about its move; see `trainer.learner.worker.OffloadReport`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


class Learner(Protocol):
    """The part of `trainer.learner.group.LearnerGroup` that is used here."""

    async def offload(self) -> Sequence[Moved]: ...

    async def onload(self) -> Sequence[Moved]: ...


class OwnDevices:
    """Learners and engines have devices of their own: everything at any time."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    async def to_learner(self) -> None:
        return

    @asynccontextmanager
    async def engines_turn(self) -> AsyncIterator[None]:
        """Around what an engine needs its device for, beside generation."""
        yield

    async def publish(self, version: int) -> float:
        return await self._coordinator.publish(version)

    async def sync(self, version: int) -> SyncReport:
        return await self._coordinator.sync(version)

    @property
    def offload_s(self) -> float:
        """Part of the last `publish` in which the learner's memory left the devices."""
        return 0.0

    def record(self) -> dict[str, object]:
        """Metrics of the last turns."""
        return {}


class SharedDevices(OwnDevices):
    """One learner rank and one engine worker on every device. Either side's memory is there, never both.

    What stays on a device all the time: two contexts, the arena with the packed weights, captured graphs.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        learner: Learner,
        engines: Mapping[str, Any],
        *,
        tracer: Tracer,
        sleep_timeout_s: float,
        kill: Callable[[Any], None] = kill_actor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engines: actors by name; whoever restarts one puts it in here.
            sleep_timeout_s: deadline of an engine that is told to sleep.
        """
        super().__init__(coordinator)
        self._learner, self._engines = learner, engines
        self._tracer, self._kill, self._clock = tracer, kill, clock
        self._sleep_timeout_s = sleep_timeout_s
        self._engines_have_it = asyncio.Lock()
        """Held by whoever wants the engines' turn to last, and by the learner until its version was on its way."""
        self._have_version = asyncio.Event()
        """The engines have taken what the learner published last."""
        self._have_version.set()
        self._is_learners_turn = self._is_learner_here = False
        self._record: dict[str, float] = {}

    async def to_learner(self) -> None:
        """Consumes: nothing. Waits for: the end of the last sync, and of a restart. Unblocked by: `sync`, which has a
        deadline. Does nothing in the learner's turn.

        Raises:
            LearnerError: a rank did not get its memory back.
        """
        if self._is_learner_here:
            return
        await self._have_version.wait()
        await self._engines_have_it.acquire()
        self._have_version.clear()
        self._record = {}
        self._is_learners_turn = self._is_learner_here = True
        with self._timed("sleep"):
            await self._put_to_sleep()
        with self._timed("onload"):
            moved = await self._learner.onload()
        self._record["devices/onload_bytes"] = sum(one.nbytes for one in moved)

    async def publish(self, version: int) -> float:
        """As the coordinator's; the learner's memory is on the host afterwards."""
        seconds = await super().publish(version)
        with self._timed("offload"):
            moved = await self._learner.offload()
        self._is_learner_here = False
        self._record["devices/free_frac"] = min(one.free_bytes / one.total_bytes for one in moved)
        return seconds

    async def sync(self, version: int) -> SyncReport:
        """As the coordinator's; it ends the learner's turn. One that fails leaves the devices to engines that are
        started again, but not to the learner: `sync` must be tried again first."""
        if not self._is_learners_turn:
            await self._engines_have_it.acquire()
        try:
            report = await super().sync(version)
        finally:
            self._is_learners_turn = False
            self._engines_have_it.release()
        self._have_version.set()
        return report

    @asynccontextmanager
    async def engines_turn(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: the end of the learner's turn. Unblocked by: `sync`."""
        async with self._engines_have_it:
            yield

    @property
    def offload_s(self) -> float:
        return self._record.get("devices/offload_s", 0.0)

    def record(self) -> dict[str, object]:
        return {**self._record}

    async def _put_to_sleep(self) -> None:
        """Engines that are lost, or do not fall asleep, are ended: they would keep their memory. The next sync sees who
        is gone, and the others go on."""
        members = self._coordinator.members
        names = [name for name, state in members.items() if state == "live"]
        for name in members.keys() - set(names):
            self._kill(self._engines[name])
        do = "raise weight_sync.timeout_s if it was on its way"
        calls = (
            answer(self._engines[name].sleep.remote(), timeout_s=self._sleep_timeout_s, who=name, call="sleep", do=do)
            for name in names
        )
        failures = {
            name: result
            for name, result in zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True)
            if isinstance(result, BaseException)
        }
        for name, error in failures.items():
            log.warning("%s did not fall asleep and is ended: %s", name, one_line(first_cause(error)))
            self._kill(self._engines[name])

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = self._clock()
        with self._tracer.span("devices", what):
            yield
        self._record[f"devices/{what}_s"] = self._clock() - began
