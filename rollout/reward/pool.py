"""Rewards of trajectories, by processes that may crash or hang without harm.

A reward that raises, hangs, kills its process or returns nonsense costs its own item, never the run. One that is `async
def` is called many times at once, in one process; if it kills or blocks that, it costs the items that are in it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Self

from rollout.errors import DataError, RewardError
from rollout.reward.async_child import MOST_THREADS, AsyncCall
from rollout.reward.call import Item, call
from rollout.reward.child import Request
from rollout.reward.output import Output
from rollout.reward.process import LOAD_TIMEOUT_S, RETRY_S, ProcessLost, RewardProcess
from rollout.reward.registry import RewardEntry, RewardFn, load, lookup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from rollout.reward.call import RewardResult
    from rollout.types import Prompt


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


_CLOSED = "the reward pipeline was closed"
CLOSE_S = 10.0
"""For the end of processes that were killed; longer only what the kernel itself does not let go of."""
QUEUE_TIMEOUT_S = 600.0
"""`task.reward.queue_timeout_s` by default."""
MAX_CONCURRENCY = 32
"""`task.reward.max_concurrency` by default."""


class RewardPipeline:
    """A pool of reward processes that belongs to one event loop.

    Processes start on first use (or in `start`) and are replaced when they are killed. Rewards marked `inline` in the
    registry run in the caller's process and start none.

    Example:
        async with RewardPipeline("math", timeout_s=10.0, num_processes=2) as rewards:
            outcomes = await rewards.score_batch(prompt, ["\\boxed{4}", "no idea"])
    """

    def __init__(
        self,
        name: str,
        *,
        timeout_s: float,
        num_processes: int,
        queue_timeout_s: float = QUEUE_TIMEOUT_S,
        max_concurrency: int = MAX_CONCURRENCY,
        directory: Path | None = None,
    ) -> None:
        """Raises DataError if there is no such reward; nothing is imported or started yet.

        Args:
            timeout_s: of one call.
            queue_timeout_s: longest wait for a free process, or for room among the calls of an async function.
            max_concurrency: calls of an async function at once.
            directory: what relative paths of rewards are relative to; None is the working directory.
        """
        if timeout_s <= 0 or num_processes < 1 or max_concurrency < 1:
            raise ValueError(
                "RewardPipeline needs timeout_s > 0, num_processes >= 1 and max_concurrency >= 1, got "
                f"{timeout_s}, {num_processes} and {max_concurrency}; set task.reward"
            )
        self._name, self._timeout_s, self._queue_timeout_s = name, timeout_s, queue_timeout_s
        self._max_concurrency = max_concurrency
        self._async: dict[str, AsyncCalls | None] = {}
        """Target -> its calls; None if it is a plain function. Not there until it was imported."""
        self._telling: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refused: dict[str, tuple[float, str]] = {}
        """Target -> when it did not import, and why."""
        self._directory = directory
        self._entries: dict[str, RewardEntry] = {name: lookup(name, directory=directory)}
        self._inline: dict[str, RewardFn] = {}
        # A slot is None while it has no process. The last slot freed is the first taken: a warm one.
        self._slots: asyncio.LifoQueue[RewardProcess | None] = asyncio.LifoQueue()
        for _ in range(num_processes):
            self._slots.put_nowait(None)
        self._num_processes = num_processes
        self._processes: set[RewardProcess] = set()
        self._output = Output()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Imports the task's reward function wherever it will run, so that no call pays for it.

        Raises:
            DataError: it does not import, or not within `process.LOAD_TIMEOUT_S`.
        """
        entry = self._entries[self._name]
        if entry.inline:
            self._inline[entry.target] = load(entry.target)
            return
        try:
            if await self._calls_of(entry) is None:
                await asyncio.gather(*(self._warm_up(entry) for _ in range(self._num_processes)))
        except DataError:
            await self.close()
            raise

    async def num_at_once(self, prompt: Prompt) -> tuple[str, int]:
        """The queue that responses to the prompt wait in, and how many out of it are judged at the same time. All plain
        functions have one, every async one has its own. Imports the function if nothing is known of it yet."""
        try:
            entry = self._entry(prompt.reward if prompt.reward else self._name)
            if not entry.inline and await self._calls_of(entry) is not None:
                return entry.target, self._max_concurrency
        except (DataError, RewardError):
            pass  # as its calls will say
        return "", self._num_processes

    async def score(self, prompt: Prompt, response: str) -> RewardResult:
        """The reward of one response.

        Raises:
            RewardError: the call raised, hung, or returned something that is not a finite number; or no process was
                free for too long.
        """
        (outcome,) = await self.score_batch(prompt, [response])
        if isinstance(outcome, RewardError):
            raise outcome
        return outcome

    async def score_batch(self, prompt: Prompt, responses: Sequence[str]) -> list[RewardResult | RewardError]:
        """The rewards of several responses to one prompt; one outcome per response. A plain function gets them in one
        process and one message, one after the other, an async one all at once.

        Each call has the time limit to itself. A call that hangs costs its process; the calls after it run in a new
        one. Waits for a free process, first come, first served, for at most `queue_timeout_s`.
        """
        name = prompt.reward if prompt.reward else self._name
        try:
            entry = self._entry(name)
            items = tuple(
                Item(prompt=prompt.text, response=r, answer=prompt.answer, metadata=prompt.metadata) for r in responses
            )
            outcomes = self._call_inline(entry, items) if entry.inline else await self._call(entry, items)
        except (DataError, RewardError) as error:
            outcomes = [RewardError(str(error)) for _ in responses]
        return [_named(name, prompt, o) if isinstance(o, RewardError) else o for o in outcomes]

    async def close(self) -> None:
        """Kills every process and waits until they are gone, for at most `CLOSE_S`. Calls that are under way end with a
        RewardError."""
        self._is_closed = True
        processes = tuple(self._processes)
        for process in processes:
            process.kill()
        gone = [asyncio.ensure_future(process.wait()) for process in processes]
        if gone:
            _, still_there = await asyncio.wait(gone, timeout=CLOSE_S)
            for waiting in still_there:
                waiting.cancel()
        await asyncio.gather(*(calls.close() for calls in self._async.values() if calls is not None))
        self._processes.clear()

    def _entry(self, name: str) -> RewardEntry:
        if name not in self._entries:
            self._entries[name] = lookup(name, directory=self._directory)
        return self._entries[name]

    def _call_inline(self, entry: RewardEntry, items: tuple[Item, ...]) -> list[RewardResult | RewardError]:
        if entry.target not in self._inline:
            self._inline[entry.target] = load(entry.target)
        return [call(self._inline[entry.target], item) for item in items]

    async def _call(self, entry: RewardEntry, items: tuple[Item, ...]) -> list[RewardResult | RewardError]:
        calls = await self._calls_of(entry)
        if calls is None:
            return await self._call_in_process(entry, items)
        return list(await asyncio.gather(*(calls.run(item) for item in items)))

    async def _calls_of(self, entry: RewardEntry) -> AsyncCalls | None:
        """Imports the function if nothing is known of it yet; None for a plain one.

        Raises:
            DataError: it does not import, or did not a while ago.
            RewardError: no process was free for that.
        """
        target = entry.target
        if target in self._async:
            return self._async[target]
        try:
            async with asyncio.timeout(self._queue_timeout_s + LOAD_TIMEOUT_S):
                await self._telling[target].acquire()
        except TimeoutError:
            raise RewardError(self._queue_text) from None
        try:
            if target not in self._async:
                refused_at, reason = self._refused.get(target, (-RETRY_S, ""))
                if asyncio.get_running_loop().time() - refused_at < RETRY_S:
                    raise DataError(reason)
                await self._warm_up(entry)
            return self._async[target]
        finally:
            self._telling[target].release()

    async def _call_in_process(self, entry: RewardEntry, items: tuple[Item, ...]) -> list[RewardResult | RewardError]:
        outcomes: list[RewardResult | RewardError] = []
        process = await self._free_slot()
        try:
            while len(outcomes) < len(items):
                process = await self._alive(process)
                try:
                    await self._call_until_lost(process, entry, items, outcomes)
                except ProcessLost as lost:
                    outcomes.append(RewardError(_CLOSED if self._is_closed else str(lost)))
                    process = self._killed(process)
        except BaseException:
            # Cancelled, or the function does not import. Answers may still be under way, so the process is of no use.
            process = self._killed(process)
            raise
        finally:
            self._slots.put_nowait(process)
        return outcomes

    async def _free_slot(self) -> RewardProcess | None:
        try:
            async with asyncio.timeout(self._queue_timeout_s):
                return await self._slots.get()
        except TimeoutError:
            raise RewardError(self._queue_text) from None

    @property
    def _queue_text(self) -> str:
        return (
            f"no reward process was free for {self._queue_timeout_s:g} s (task.reward.queue_timeout_s): "
            f"{self._num_processes} of them cannot keep up; raise task.reward.num_processes or rollout.num_workers, "
            "or make the function faster"
        )

    async def _call_until_lost(
        self,
        process: RewardProcess,
        entry: RewardEntry,
        items: tuple[Item, ...],
        outcomes: list[RewardResult | RewardError],
    ) -> None:
        """Scores the items that have no outcome yet, appending each outcome as it comes.

        Raises:
            DataError: the function does not import.
            ProcessLost: the process hung or died in the call that is next, or before it.
        """
        try:
            await process.begin(Request(target=entry.target, items=items[len(outcomes) :]))
        except ProcessLost as lost:
            if process.has_loaded(entry.target):
                raise
            raise DataError(f"reward {entry.target!r} does not import: {lost}") from lost
        while len(outcomes) < len(items):
            outcomes.append(await process.receive(self._timeout_s))

    async def _warm_up(self, entry: RewardEntry) -> None:
        """Imports the function in a free process, which an async one keeps for itself."""
        process = await self._free_slot()
        try:
            process = await self._alive(process)
            if not await process.begin(Request(target=entry.target, items=())):
                self._async[entry.target] = None
                return
            self._async[entry.target] = AsyncCalls(
                entry.target,
                process,
                start=partial(self._alive, None),
                timeout_s=self._timeout_s,
                max_concurrency=self._max_concurrency,
                queue_timeout_s=self._queue_timeout_s,
            )
            process = None
        except DataError as error:  # the process is fine
            self._refuse(entry, str(error))
            raise
        except BaseException as error:
            # Cancelled, for one. What it says of this function may still be under way, so the process is of no use.
            had_loaded = process is not None and process.has_loaded(entry.target)
            process = self._killed(process)
            if isinstance(error, ProcessLost):
                what = "was imported, but then" if had_loaded else "does not import:"
                reason = f"reward {entry.name!r} {what} {error}"
                self._refuse(entry, reason)
                raise DataError(reason) from error
            raise
        finally:
            self._slots.put_nowait(process)

    def _refuse(self, entry: RewardEntry, reason: str) -> None:
        self._refused[entry.target] = (asyncio.get_running_loop().time(), reason)

    async def _alive(self, process: RewardProcess | None) -> RewardProcess:
        if process is not None and process.is_alive:
            return process
        if self._is_closed:
            raise DataError(_CLOSED)
        started = await RewardProcess.start(self._output)
        if self._is_closed:  # while it started
            started.kill()
        self._processes = {p for p in self._processes if p.is_alive} | {started}
        return started

    def _killed(self, process: RewardProcess | None) -> None:
        """What is left in the slot of a process that is of no further use: nothing. `close` waits until it is gone."""
        if process is not None:
            process.kill()


def _named(name: str, prompt: Prompt, error: RewardError) -> RewardError:
    return RewardError(f"reward {name!r}, prompt {prompt.prompt_id!r}: {error}")


def check_reward(name: str, *, sample: Prompt, timeout_s: float) -> RewardResult:
    """Imports the reward and calls it once, in a killable process with the run's time limit.

    The response is the sample's own answer. Call it from the main thread, outside of any event loop.

    Raises:
        DataError: the reward does not import, raises, hangs, or returns something that is not a finite number.
    """
    return asyncio.run(_check(name, sample, timeout_s))


async def _check(name: str, sample: Prompt, timeout_s: float) -> RewardResult:
    async with RewardPipeline(name, timeout_s=timeout_s, num_processes=1) as rewards:
        try:
            return await rewards.score(sample, sample.answer)
        except RewardError as error:
            raise DataError(
                f"{error}\nThis was a trial call with response={sample.answer!r:.80}; the run was not started. "
                "Fix the function, or raise task.reward.timeout_s if it is only slow."
            ) from error
