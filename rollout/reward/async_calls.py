"""The calls of one `async def` reward: many at once, all in one killable process, seen from the parent."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from rollout.errors import DataError, RewardError
from rollout.reward.async_child import MOST_THREADS, AsyncCall
from rollout.reward.child import Request
from rollout.reward.process import LOAD_TIMEOUT_S, RETRY_S, ProcessLost, RewardProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollout.reward.call import Item
    from rollout.reward.result import RewardResult

GRACE_S = 5.0
"""The process itself ends a call that takes too long. One that says nothing for so long after that is blocked."""

_STUCK_PER_CALL = 4
"""So many threads for every call at once may be left over from calls that are no more."""


class _Served:
    """A process and the calls that are in it."""

    def __init__(self, process: RewardProcess, most_stuck: int) -> None:
        self.process, self._most_stuck = process, most_stuck
        self.is_worn_out = False
        """It gets no more calls, and is killed when those that are in it have ended."""
        self.is_lost = False
        """It gets no more calls."""
        self.waiting: dict[int, asyncio.Future[RewardResult | RewardError]] = {}
        self.reader = asyncio.create_task(self._read())

    def give_up(self) -> None:
        """Its other calls learn from the reader that it is gone."""
        self.is_lost = True
        self.process.kill()

    def leave(self, number: int) -> None:
        """The call is no longer in it."""
        del self.waiting[number]
        self._end_if_worn_out()

    def _end_if_worn_out(self) -> None:
        if self.is_worn_out and not self.waiting:
            self.give_up()

    def end(self, reason: str) -> None:
        """Its calls end with this reason, unless they have ended."""
        for outcome in self.waiting.values():
            if not outcome.done():
                outcome.set_result(RewardError(reason))

    async def _read(self) -> None:
        """Consumes: answers. Waits for: the next one. Unblocked by: the end of the process, `AsyncCalls.close`."""
        while True:
            try:
                message = await self.process.next_answer()
                number, said = message.get("number"), self.process.outcome(message)
            except ProcessLost as lost:
                self.give_up()
                self.end(f"{lost}, with {len(self.waiting)} calls in it")
                return
            stuck = message.get("stuck", 0)
            self.is_worn_out |= not isinstance(stuck, int) or stuck > self._most_stuck
            self._end_if_worn_out()
            outcome = self.waiting.get(number) if isinstance(number, int) else None
            if outcome is not None and not outcome.done():
                outcome.set_result(said)


class AsyncCalls:
    """Runs the calls of the function at `target`. Its process is replaced by the next call after it was lost.

    Args:
        target: see `RewardEntry.target`.
        process: one that has imported the function.
        start: a bare process, to take its place; raises DataError once there are to be no more.
        timeout_s: of one call.
        max_concurrency: calls at once; the others wait.
        queue_timeout_s: for at most so long.
    """

    def __init__(
        self,
        target: str,
        process: RewardProcess,
        *,
        start: Callable[[], Awaitable[RewardProcess]],
        timeout_s: float,
        max_concurrency: int,
        queue_timeout_s: float,
    ) -> None:
        self._target, self._start, self._timeout_s = target, start, timeout_s
        self._max_concurrency, self._queue_timeout_s = max_concurrency, queue_timeout_s
        self._room = asyncio.Semaphore(max_concurrency)
        self._starting = asyncio.Lock()
        self._refused = (-RETRY_S, "")
        """When a new process could not import the function, and why."""
        self._numbers = itertools.count()
        self._most_stuck = min(_STUCK_PER_CALL * max_concurrency, MOST_THREADS // 2)
        self._served = _Served(process, self._most_stuck)
        self._worn_out: list[_Served] = []

    async def run(self, item: Item) -> RewardResult | RewardError:
        """The outcome of one call.

        Raises:
            DataError: a new process could not import the function, or could not a while ago.
            RewardError: others were at it for too long.
        """
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                await self._room.acquire()
        except TimeoutError:
            return RewardError(
                f"{self._max_concurrency} calls (task.reward.max_concurrency) were under way for all of "
                f"{self._queue_timeout_s:g} s (task.reward.queue_timeout_s): raise one of them, or make the function "
                "faster"
            )
        try:
            return await self._run(item)
        finally:
            self._room.release()

    async def close(self) -> None:
        """Kills the process and ends the calls that are in it."""
        for served in (self._served, *self._worn_out):
            served.give_up()
            served.end("the reward pipeline was closed")
            served.reader.cancel()
            await asyncio.gather(served.reader, return_exceptions=True)

    async def _run(self, item: Item) -> RewardResult | RewardError:
        served, number = await self._alive(), next(self._numbers)
        served.waiting[number] = outcome = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                await served.process.send(AsyncCall(number=number, item=item, timeout_s=self._timeout_s))
                return await outcome
        except TimeoutError:
            served.give_up()
            return RewardError(
                f"the call took longer than {self._timeout_s:g} s and could not be cancelled, so its process was "
                "killed; an async reward must not block: await, or use asyncio.to_thread"
            )
        except ProcessLost as lost:
            return RewardError(str(lost))
        except asyncio.CancelledError:
            if not served.is_lost:
                served.process.send_soon(AsyncCall(number=number, item=None, timeout_s=0.0))
            raise
        finally:
            served.leave(number)

    async def _alive(self) -> _Served:
        limit_s = LOAD_TIMEOUT_S + GRACE_S  # longer than one import may take, so as to hear why it failed
        try:
            async with asyncio.timeout(limit_s):
                await self._starting.acquire()
        except TimeoutError:
            raise RewardError(
                f"its process was lost, and for all of {limit_s:g} s other calls tried to import {self._target} in a "
                "new one; make the import faster"
            ) from None
        try:
            if self._served.is_lost or self._served.is_worn_out:
                process = await self._replacement()
                self._worn_out = [served for served in (*self._worn_out, self._served) if not served.is_lost]
                self._served = _Served(process, self._most_stuck)
            return self._served
        finally:
            self._starting.release()

    async def _replacement(self) -> RewardProcess:
        refused_at, reason = self._refused
        if asyncio.get_running_loop().time() - refused_at < RETRY_S:
            raise DataError(reason)
        process = await self._start()
        try:
            await process.begin(Request(target=self._target, items=()))
        except BaseException as error:  # cancelled, for one: nobody else knows of the process
            process.kill()
            if not isinstance(error, (DataError, ProcessLost)):
                raise
            reason = str(error)
            if isinstance(error, ProcessLost):
                reason = f"reward {self._target!r} does not import: {error}"
            # The calls that wait for us, and those of the next minute, hear it at once.
            self._refused = (asyncio.get_running_loop().time(), reason)
            raise DataError(reason) from error
        return process
