"""Which requests may generate while new weights go live: none enters then, and nothing is sampled."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


log = logging.getLogger(__name__)

Outcome = Literal["ok", "failed", "dirty"]
"""Of a commit. After "failed" the weights are whole and old; after "dirty" they are a mixture of versions, or gone."""
_RETRY_S = 1.0
"""After an attempt to end a pause failed."""


class EngineGate:
    """Admission, commits, sleep and pauses of one engine.

    running ── closed, pause ──> committing ── ok, failed ──> running
       │ closed                       │ dirty, or still asleep
       v                              v
    asleep ── closed, pause ──> (as above)     paused: the next commit, or the pause limit, ends it

    Many requests pass an open gate at once. A request that crossed a commit in the middle of its admission would carry
    the label and the cache salt of one version and the KV of another, so `closed` waits until none is inside. Commits
    and sleep come one after the other; sleep leaves the gate closed, and the commit that wakes the engine opens it.

    Args:
        resume: lets the engine generate again.
        give_up: declares the engine dead, with a reason.
        pause_limit_s: of a pause that a commit left behind; a commit under way has its own deadline. Then whole weights
            generate again, and an engine whose mixture no commit repaired dies: its requests continue elsewhere.
    """

    def __init__(
        self,
        *,
        resume: Callable[[], Awaitable[None]],
        give_up: Callable[[str], None],
        pause_limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resume, self._give_up = resume, give_up
        self._pause_limit_s, self._clock = pause_limit_s, clock
        self._turn = asyncio.Lock()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._num_inside = 0
        self._is_dirty = False
        self._paused_at: float | None = None
        self._limit: asyncio.Task[None] | None = None
        self.is_asleep = False
        """Set by the engine once it sleeps, and once a commit has woken it."""
        self.outcome: Outcome = "failed"
        """Set by the engine during `pause`, as soon as the workers have replied."""
        self.num_waiting = 0
        """Requests that wait for admission."""

    @property
    def is_paused(self) -> bool:
        """Nothing may be sampled."""
        return self._paused_at is not None

    @property
    def paused_s(self) -> float:
        """0 while the engine runs."""
        return 0.0 if self._paused_at is None else self._clock() - self._paused_at

    @asynccontextmanager
    async def admission(self) -> AsyncIterator[None]:
        """Waits for: an open gate. Unblocked by: the end of `closed`."""
        self.num_waiting += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self.num_waiting -= 1
        # Neither way in nor way out waits: a cancelled request must not stay inside.
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Around a commit, and around what puts the engine to sleep. The gate opens again unless `is_asleep`. Waits
        for: its turn, then until no request is inside. Unblocked by: the ends of both."""
        async with self._turn:
            self._open.clear()
            try:
                while self._num_inside:
                    self._empty.clear()
                    await self._empty.wait()
                yield
            finally:
                if not self.is_asleep:
                    self._open.set()

    @asynccontextmanager
    async def pause(self) -> AsyncIterator[None]:
        """Around what a commit does, inside `closed`. Generation resumes at the end, unless the weights are a mixture;
        then the next commit begins in the same pause."""
        self.end_limit()
        self.outcome = "dirty" if self._is_dirty else "failed"
        if self._paused_at is None:
            self._paused_at = self._clock()
        try:
            yield
        finally:
            # Sleep threw the weights away, so whatever happened, an engine that still sleeps holds none.
            self._is_dirty = self.outcome == "dirty" or self.is_asleep
            try:
                if not self._is_dirty:
                    await self._end_pause()
            finally:
                if self.is_paused:
                    self._limit = asyncio.ensure_future(self._enforce_limit(self._pause_limit_s - self.paused_s))

    def end_limit(self) -> None:
        """A commit begins, or the engine has ended: the pause so far no longer matters."""
        if self._limit is not None:
            self._limit.cancel()

    async def _end_pause(self) -> None:
        await self._resume()
        self._paused_at = None

    async def _enforce_limit(self, delay_s: float) -> None:
        while self.is_paused:
            await asyncio.sleep(delay_s)
            async with self._turn:  # a commit that has begun in the meantime may end the pause itself
                if not self.is_paused:
                    return
                why = f"paused for {self.paused_s:.1f} s, at most {self._pause_limit_s:.1f} s are allowed"
                if self._is_dirty:
                    self._give_up(f"its weights are a mixture of versions and no commit repaired them: {why}")
                    return
                try:
                    await self._end_pause()
                except Exception:
                    log.exception("a pause could not be ended (%s); trying again", why)
                    delay_s = _RETRY_S
