"""An `AsyncLLM` as a replica.

    commit:  pause ─> the step under way ends ─> every worker commits ─> label ─> resume, unless they hold a mixture

Nothing here knows how requests are made, so it fits around any engine that was started with
`worker_extension_cls=weight_sync.EXTENSION`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from weight_sync.messages import CommitResult, reply_state
from weight_sync.vllm.compat import InFlight, pause_engine, resume_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from contextlib import AbstractAsyncContextManager


RESUME_S = 30.0
"""The engine goes on within this time, whatever is left of the commit's own."""


LeftS = Callable[[], float]
"""Seconds that are left of a commit's own time."""


async def commit_between_steps(
    pause: AbstractAsyncContextManager[None],
    *,
    drain: Callable[[LeftS], Awaitable[None]],
    write: Callable[[LeftS], Awaitable[list[bytes]]],
    go_live: Callable[[LeftS], Awaitable[None]],
    timeout_s: float,
    clock: Callable[[], float],
) -> CommitResult:
    """What every host of an engine does to commit a version, and what it takes.

    Args:
        pause: around all of it; its end lets the engine go on, unless the workers hold a mixture.
        drain: stops the engine; returns once no step runs.
        write: the workers' replies.
        go_live: labels what is sampled from here on, if every worker took the version.
    """
    asked = clock()

    def left_s() -> float:
        return max(0.0, timeout_s - (clock() - asked))

    async with pause:
        await drain(left_s)
        drained = clock()
        results = await write(left_s)
        if reply_state(results) == "ok":
            await go_live(left_s)
        answered = clock()
    resumed = clock()
    return CommitResult(
        results=results, pause_s=resumed - drained, drain_s=drained - asked, resume_s=resumed - answered
    )


def _nobody(version: int) -> None:
    """Nobody labels tokens."""


class AsyncLLMReplica:
    """A `ReplicaHandle`.

    While the engine is paused, new requests wait inside it. vLLM's prefix cache does not know of versions: give every
    prompt `cache_salt`, or turn the cache off, else the keys and values of old weights serve new requests. With
    `in_flight="keep"` they also serve a request that got its salt before a commit ended and has its first token after
    it: where that matters, send none during `commit`, and abort and send again what has no token when it ends.

    Example: `SyncCoordinator(learners, [AsyncLLMReplica(engine, name="r0")], options=SyncOptions())`
    """

    def __init__(
        self,
        engine: Any,
        *,
        name: str,
        in_flight: InFlight = "keep",
        on_live: Callable[[int], None] = _nobody,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            engine: an `AsyncLLM`.
            in_flight: what becomes of running requests at a commit; with "abort" they end with that finish reason.
            on_live: called with every version that all workers took, before the next step: tokens that come out later
                were sampled from it.
        """
        self.name = name
        self.version: int | None = None
        """What it generates from; None before the first commit."""
        self.is_dirty = False
        """The workers hold a mixture, or nobody knows what: the engine stays paused until a commit succeeds."""
        self._engine = engine
        self._in_flight: InFlight = in_flight
        self._on_live = on_live
        self._clock = clock
        self._turn = asyncio.Lock()

    @property
    def cache_salt(self) -> str:
        """For the prompts of requests that start now. During a commit it is that of the version before."""
        return f"v{self.version}"

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """The method's result on every worker, in rank order.

        Raises:
            TimeoutError: not all answered in time.
        """
        # Not with vLLM's own timeout: it would leave a late answer in the workers' queue, for the next call to read.
        return await self._within(timeout_s, self._engine.collective_rpc(method, args=args), f"answer {method}")

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        """Pause, call `method` on the workers, label, resume unless dirty.

        Raises:
            TimeoutError: the step under way did not end, or the workers did not answer, within `timeout_s`.
        """
        # A task of its own: a caller that is cancelled half-way must not leave the engine paused.
        return await asyncio.shield(asyncio.ensure_future(self._commit(version, method, args, timeout_s)))

    async def _within(self, timeout_s: float, step: Awaitable[Any], what: str) -> Any:
        try:
            return await asyncio.wait_for(step, timeout_s)
        except TimeoutError as error:
            hint = "its workers hang, or the step under way is longer than SyncOptions.timeout_s allows"
            raise TimeoutError(f"engine {self.name} did not {what} within {timeout_s:g} s; {hint}") from error

    async def _commit(self, version: int, method: str, args: tuple[object, ...], timeout_s: float) -> CommitResult:
        async def drain(left_s: LeftS) -> None:
            await self._within(timeout_s, pause_engine(self._engine, mode=self._in_flight), "pause")

        async def write(left_s: LeftS) -> list[bytes]:
            was_dirty, self.is_dirty = self.is_dirty, True  # until all have answered, one may be in the middle of it
            results = await self.call(method, *args, timeout_s=left_s())
            state = reply_state(results)
            # Only a commit that succeeds everywhere makes a mixture whole.
            self.is_dirty = state == "dirty" or (was_dirty and state == "failed")
            return results

        async def go_live(left_s: LeftS) -> None:
            self.version = version
            self._on_live(version)

        async with self._turn:
            return await commit_between_steps(
                self._pause(), drain=drain, write=write, go_live=go_live, timeout_s=timeout_s, clock=self._clock
            )

    @asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if not self.is_dirty:
                await self._within(RESUME_S, resume_engine(self._engine), "resume")
