"""Keeps a version in the learners' slots while replicas read it: one pin per learner rank, whoever reads."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weight_sync import deadlines
from weight_sync.errors import WeightSyncError
from weight_sync.messages import Ok, Pin, Pinned, SlotAt, Unpin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class VersionPin:
    """One version, pinned at every learner rank while anybody holds it. Owned by one event loop."""

    def __init__(
        self, ask: Callable[..., Awaitable[dict[int, Any]]], version: int, *, clock: Callable[[], float]
    ) -> None:
        """`ask(request, kind, deadline_s=...)` asks every learner; its answers by rank."""
        self.version = version
        self.pinned_at: float | None = None
        """When it could be read everywhere for the first time, on `clock`."""
        self.slots: tuple[SlotAt, ...] = ()
        self.seal_s = 0.0
        """Of the slowest rank."""
        self._ask = ask
        self._clock = clock
        self._holders = set[str]()
        self._lock = asyncio.Lock()
        """Pins and unpins reach the learners in the order in which they were wanted."""
        self._tasks = set[asyncio.Task[None]]()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def holders(self) -> frozenset[str]:
        return frozenset(self._holders)

    async def hold(self, name: str, deadline_s: float) -> None:
        """Until `name` releases it. Waits for the seal.

        Raises:
            VersionUnavailable: a learner does not hold the version any more, or could not seal it; says why.
            PublisherLost: a learner is silent.
            PullTimeout: a learner did not seal it within `deadline_s`.
        """
        if name in self._holders:
            return
        self._holders.add(name)
        try:
            async with self._lock:
                if self._renewing is None:
                    await self._pin(deadline_s)
                    self.pinned_at = self._clock() if self.pinned_at is None else self.pinned_at
                    self._renewing = asyncio.create_task(self._renew())
        except BaseException:
            self.release(name)
            raise

    def release(self, name: str) -> None:
        """The last one to release it unpins, without waiting for the learners. Idempotent."""
        if name not in self._holders:
            return
        self._holders.remove(name)
        if not self._holders:
            task = asyncio.create_task(self._unpin())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """The epoch ends, and the slots with it. Idempotent."""
        tasks = [*self._tasks, *([] if self._renewing is None else [self._renewing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pin(self, deadline_s: float) -> None:
        request = Pin(version=self.version, ttl_s=deadlines.PIN_TTL_S)
        pinned = await self._ask(request, Pinned, deadline_s=deadline_s)
        self.slots = tuple(SlotAt(rank, at.slot, at.generation) for rank, at in pinned.items())
        self.seal_s = max((at.seal_s for at in pinned.values()), default=0.0)

    async def _renew(self) -> None:
        """Consumes: nothing. Waits for: the next renewal. Unblocked by: cancellation, once nobody holds the pin. A
        reader whose pin ran out finds that itself, after its last byte."""
        while True:
            await asyncio.sleep(deadlines.RENEW_S)
            try:
                await self._pin(deadlines.RENEW_S)
            except (WeightSyncError, TimeoutError) as error:
                log.warning("the pin of version %d could not be renewed: %s", self.version, error)

    async def _unpin(self) -> None:
        async with self._lock:
            if self._holders:
                return  # somebody holds it again
            renewing, self._renewing = self._renewing, None
            if renewing is not None:
                renewing.cancel()
            try:
                await self._ask(Unpin(version=self.version), Ok, deadline_s=deadlines.UNPIN_S)
            except (WeightSyncError, TimeoutError) as error:
                log.debug("version %d was not unpinned, its pin runs out: %s", self.version, error)
