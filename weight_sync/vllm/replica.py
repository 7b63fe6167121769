"""An `AsyncLLM` as a replica.

    commit:  pause ─> the step under way ends ─> every worker commits ─> label ─> resume, unless they hold a mixture

Nothing here knows how requests are made, so it fits around any engine that was started with
`worker_extension_cls=weight_sync.EXTENSION`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Literal

from weight_sync.messages import CommitResult, reply_state
from weight_sync.vllm.compat import InFlight, pause_engine, resume_engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


RESUME_S = 30.0
"""The engine goes on within this time, whatever is left of the commit's own."""


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
        self, engine: Any, *, name: str, in_flight: InFlight = "keep", on_live: Callable[[int], None] = _nobody
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
        async with self._turn:
            asked, state = time.monotonic(), self._settled("failed")
            try:
                await self._within(timeout_s, pause_engine(self._engine, mode=self._in_flight), "pause")
                drained = time.monotonic()
                state = "dirty"  # until everybody has answered, somebody may be in the middle of it
                results = await self.call(method, *args, timeout_s=max(0.0, asked + timeout_s - drained))
                state = self._settled(reply_state(results))
                if state == "ok":
                    self.version = version
                    self._on_live(version)
            finally:
                self.is_dirty = state == "dirty"
                answered = time.monotonic()
                if not self.is_dirty:
                    await self._within(RESUME_S, resume_engine(self._engine), "resume")
            resumed = time.monotonic()
        return CommitResult(
            results=results, pause_s=resumed - drained, drain_s=drained - asked, resume_s=resumed - answered
        )

    def _settled(self, state: Literal["ok", "failed", "dirty"]) -> Literal["ok", "failed", "dirty"]:
        """Only a commit that succeeds everywhere makes a mixture whole."""
        return "dirty" if self.is_dirty and state == "failed" else state
