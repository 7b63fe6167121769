"""Who may generate while new weights go live.

No request may enter an engine while its weights change, and nothing may be sampled then. Every engine keeps these rules
by using this file.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


class AdmissionGate:
    """Many requests pass an open gate at once; `closed` waits until nobody is in the passage and holds it shut.

    A request that crosses a commit in the middle of its admission would carry the label and the cache salt of one
    version and the KV of another.
    """

    def __init__(self) -> None:
        self._closer = asyncio.Lock()
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._num_passing = 0
        self.num_waiting = 0
        """Requests that stand before the closed gate."""

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: an open gate. Unblocked by: the end of `closed`."""
        self.num_waiting += 1
        try:
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self.num_waiting -= 1
        # Neither way in nor way out waits for anything: a cancelled request must not stay in the passage for ever.
        self._num_passing += 1
        try:
            yield
        finally:
            self._num_passing -= 1
            if not self._num_passing:
                self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: another closer, then an empty passage. Unblocked by: the ends of both."""
        async with self._closer:
            self._open.clear()
            try:
                while self._num_passing:
                    self._empty.clear()
                    await self._empty.wait()
                yield
            finally:
                self._open.set()


class GateTurns:
    """Commits and sleep, one after the other, with the gate shut.

    Sleep leaves the gate shut behind it, and the commit that wakes the engine opens it. A sleep that arrives during a
    commit waits for its end; a commit that arrives during a sleep waits until the engine sleeps, and wakes it.
    """

    def __init__(self, gate: AdmissionGate) -> None:
        self.is_asleep = False
        """A commit sets it to False once the engine is awake."""
        self._gate = gate
        self._turn = asyncio.Lock()
        self._kept_shut = AsyncExitStack()
        """Holds the gate while the engine sleeps."""

    @asynccontextmanager
    async def commit(self) -> AsyncIterator[None]:
        """Consumes: nothing. Waits for: its turn, then an empty passage. Unblocked by: the ends of both."""
        async with self._turn:
            shut, self._kept_shut = self._kept_shut, AsyncExitStack()
            if not self.is_asleep:
                await shut.enter_async_context(self._gate.closed())
            try:
                yield
            finally:
                if self.is_asleep:
                    self._kept_shut = shut
                else:
                    await shut.aclose()

    @asynccontextmanager
    async def sleep(self) -> AsyncIterator[None]:
        """Around what puts the engine to sleep; the gate opens again if that raises. Nothing to do if `is_asleep`.

        Consumes: nothing. Waits for: its turn, then an empty passage. Unblocked by: the ends of both.
        """
        async with self._turn, AsyncExitStack() as shut:
            if self.is_asleep:
                yield
                return
            await shut.enter_async_context(self._gate.closed())
            yield
            self.is_asleep, self._kept_shut = True, shut.pop_all()


@dataclass(slots=True)
class Attempt:
    """A commit under way."""

    state: Literal["ok", "failed", "dirty"]
    """What is known of the weights: "failed" are whole and old, "dirty" a mixture."""


class Pause:
    """Since when an engine stands still, and whether a watchdog may end that. Knows no engine and no clock of its own.

    begin ─> (workers write) ─> end ─> lift        a mixture is not lifted: the next commit begins in the same pause
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.is_dirty = False
        """The weights are a mixture of versions, or gone."""
        self._clock = clock
        self._since: float | None = None
        self._is_committing = False

    @property
    def seconds(self) -> float:
        """0 while the engine runs."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def is_on(self) -> bool:
        """Nothing may be sampled."""
        return self._since is not None

    @asynccontextmanager
    async def commit(
        self, *, is_asleep: Callable[[], bool], resume: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[Attempt]:
        """A pause around what a commit does. `resume` lets the engine go on and calls `lift`; not after a mixture."""
        attempt = Attempt("dirty" if self.is_dirty else "failed")
        self.begin()
        try:
            yield attempt
        finally:
            # Sleep threw the weights away, so whatever happened, an engine that still sleeps holds none.
            self.end(is_dirty=attempt.state == "dirty" or is_asleep())
            if not self.is_dirty:
                await resume()

    def begin(self) -> None:
        """A commit begins."""
        self._since = self._clock() if self._since is None else self._since
        self._is_committing = True

    def end(self, *, is_dirty: bool) -> None:
        """The commit is over; `lift` must follow unless it left a mixture."""
        self.is_dirty, self._is_committing = is_dirty, False

    def lift(self) -> None:
        """The engine runs again."""
        self._since = None

    def remedy(self) -> Literal["none", "resume", "die"]:
        """What a watchdog has to do about a pause that lasts too long.

        A commit under way is left alone: it has a deadline of its own, and its workers may be writing. A pause that a
        commit left behind is lifted if the weights are whole. A mixture cannot generate: its engine must be given up.
        """
        if self._since is None or self._is_committing:
            return "none"
        return "die" if self.is_dirty else "resume"

    async def cut_short(
        self, reason: str, *, resume: Callable[[], Awaitable[None]], give_up: Callable[[str], None]
    ) -> None:
        """Do what `remedy` says."""
        match self.remedy():
            case "none":
                return
            case "resume":
                await resume()
            case "die":
                give_up(f"its weights are a mixture of versions and no commit repaired them: {reason}")
