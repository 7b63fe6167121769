"""Scores responses in processes that may crash or hang without harm.

A reward that raises, hangs, kills its process or returns nonsense costs its own call, never the run; an `async def`
that kills or blocks its process costs the calls that run in it.

A slot holds one process, or none yet. Plain functions share `num_processes` slots, each for one call at a time. An
async function has one slot for `max_concurrency` calls: its queue holds that slot as many times.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Self, TypeVar

from rollout.errors import DataError, RewardError, RewardTimeout
from rollout.reward.call import RewardRequest, RewardResult, call
from rollout.reward.process import GRACE_S, LOAD_TIMEOUT_S, CpuLimitExceeded, Output, ProcessLost, RewardProcess
from rollout.reward.registry import RewardEntry, load, lookup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from rollout.types import Prompt

T = TypeVar("T")

RETRY_S = 60.0
"""A function that does not import is not tried again for so long; its calls fail at once."""
CLOSE_S = 10.0
"""For the end of killed processes."""
QUEUE_TIMEOUT_S = 600.0
"""`task.reward.queue_timeout_s` by default."""
MAX_CONCURRENCY = 32
"""`task.reward.max_concurrency` by default."""
_CLOSED = "the reward pool was closed"


class _Slot:
    def __init__(self, process: RewardProcess | None = None) -> None:
        self.process = process
        self.replacing = asyncio.Lock()


_Queue = asyncio.LifoQueue[_Slot]
"""The last slot freed is the first taken: one with a warm process."""


def _queue(slots: list[_Slot]) -> _Queue:
    queue = _Queue()
    for slot in slots:
        queue.put_nowait(slot)
    return queue


class RewardPool:
    """A pool of reward processes that belongs to one event loop.

    Processes start on first use (or in `start`) and are replaced when they are lost. Rewards marked `inline` in the
    registry run in the caller's process.

    Args:
        timeout_s: of one call.
        queue_timeout_s: longest wait for a slot.
        max_concurrency: calls of an async function at once.
        directory: base of relative paths of rewards; None is the working directory.

    Raises:
        DataError: there is no such reward. Nothing is imported or started yet.

    Example:
        async with RewardPool("math", timeout_s=10.0, num_processes=2) as rewards:
            result = await rewards.score(prompt, "\\boxed{4}")
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
        if timeout_s <= 0 or num_processes < 1 or max_concurrency < 1:
            raise ValueError(
                "RewardPool needs timeout_s > 0, num_processes >= 1 and max_concurrency >= 1, got "
                f"{timeout_s}, {num_processes} and {max_concurrency}; set task.reward"
            )
        self._name, self._timeout_s, self._queue_timeout_s = name, timeout_s, queue_timeout_s
        self._num_processes, self._max_concurrency = num_processes, max_concurrency
        self._lookup, self._load = cache(partial(lookup, directory=directory)), cache(load)
        self._lookup(name)
        self._plain = _queue([_Slot() for _ in range(num_processes)])
        self._queues: dict[str, _Queue] = {}
        """Target -> the queue of its slots, once it was imported."""
        self._first_imports: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._refused: dict[str, tuple[float, str]] = {}
        """Target -> when it did not import, and why."""
        self._good_answers: set[tuple[str, str]] = set()
        """Target and answer for which a cheap response was scored in time."""
        self._processes: set[RewardProcess] = set()
        self._output = Output()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Imports the task's reward function wherever it will run, so that no call pays for it.

        Raises:
            DataError: it does not import, or not within `process.LOAD_TIMEOUT_S`.
        """
        entry = self._lookup(self._name)
        if entry.inline:
            self._load(entry.target)
            return
        try:
            if await self._queue_of(entry) is self._plain:
                await asyncio.gather(*(self._import_in_slot(entry) for _ in range(self._num_processes)))
        except DataError:
            await self.close()
            raise

    async def num_at_once(self, prompt: Prompt) -> tuple[str, int]:
        """Name of the queue for responses to the prompt, and how many of it are scored at once. Plain functions share a
        queue. May import the function."""
        with contextlib.suppress(DataError, RewardError):  # its calls will report it
            entry = self._lookup(self._name_of(prompt))
            if not entry.inline and await self._queue_of(entry) is not self._plain:
                return entry.target, self._max_concurrency
        return "", self._num_processes

    async def score(self, prompt: Prompt, response: str) -> RewardResult:
        """The reward of one response. Waits for a slot, first come, first served, for at most `queue_timeout_s`.

        Raises:
            RewardTimeout: the call hung.
            RewardError: the call raised, or returned something that is not a finite number; or no slot was free for
                too long.
        """
        request = RewardRequest(prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata)
        try:
            entry = self._lookup(self._name_of(prompt))
            return call(self._load(entry.target), request) if entry.inline else await self._score(entry, request)
        except (DataError, RewardError) as error:
            kind = RewardTimeout if isinstance(error, RewardTimeout) else RewardError
            raise kind(f"reward {self._name_of(prompt)!r}, prompt {prompt.prompt_id!r}: {error}") from error

    async def close(self) -> None:
        """Kills every process and waits at most `CLOSE_S` for their ends. Running calls end with a RewardError."""
        self._is_closed = True
        for process in self._processes:
            process.close(_CLOSED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(process.wait() for process in self._processes))
        self._processes.clear()

    def _name_of(self, prompt: Prompt) -> str:
        return prompt.reward if prompt.reward else self._name

    async def _score(self, entry: RewardEntry, request: RewardRequest) -> RewardResult:
        try:
            return await self._call(entry, request)
        except CpuLimitExceeded:
            key = entry.target, request.answer
            if key not in self._good_answers:
                try:
                    await self._call(entry, replace(request, response=entry.cheap_response))
                except CpuLimitExceeded as error:
                    raise RewardError(
                        f"the answer {request.answer!r:.80} cannot be evaluated: {error}; check task.answer_column"
                    ) from error
                self._good_answers.add(key)
            return RewardResult(reward=0.0)

    async def _call(self, entry: RewardEntry, request: RewardRequest) -> RewardResult:
        async with self._slot(await self._queue_of(entry), entry) as (_, process):
            return await process.score(entry, request, timeout_s=self._timeout_s)

    async def _queue_of(self, entry: RewardEntry) -> _Queue:
        """May import the function.

        Raises:
            DataError: it does not import, or did not recently.
            RewardError: no process was free.
        """
        target = entry.target
        if target not in self._queues:
            limit_s = self._queue_timeout_s + LOAD_TIMEOUT_S
            async with _locked(self._first_imports[target], limit_s, self._busy_text(self._plain)):
                if target not in self._queues:
                    self._queues[target] = await self._import_in_slot(entry)
        return self._queues[target]

    async def _import_in_slot(self, entry: RewardEntry) -> _Queue:
        """The queue for the function, which is imported in a plain slot first."""
        async with self._slot(self._plain, entry) as (slot, process):
            if not process.is_async:
                return self._plain
            own, slot.process = _Slot(process), None
        return _queue([own] * self._max_concurrency)

    @contextlib.asynccontextmanager
    async def _slot(self, queue: _Queue, entry: RewardEntry) -> AsyncIterator[tuple[_Slot, RewardProcess]]:
        """A slot out of the queue, and its process, which has imported the function."""
        slot = await _in_time(queue.get(), self._queue_timeout_s, self._busy_text(queue))
        try:
            yield slot, await self._process_in(slot, entry)
        finally:
            queue.put_nowait(slot)

    def _busy_text(self, queue: _Queue) -> str:
        limit = f"{self._queue_timeout_s:g} s (task.reward.queue_timeout_s)"
        if queue is self._plain:
            return (
                f"no reward process was free for {limit}: {self._num_processes} of them cannot keep up; raise "
                "task.reward.num_processes or rollout.num_workers, or make the function faster"
            )
        return (
            f"{self._max_concurrency} calls (task.reward.max_concurrency) ran for all of {limit}: raise one of them, "
            "or make the function faster"
        )

    async def _process_in(self, slot: _Slot, entry: RewardEntry) -> RewardProcess:
        """The slot's process, with the function imported; a new one if that is lost.

        Raises:
            DataError: the function does not import, or did not a while ago, or the pool was closed.
            RewardError: other calls tried to import it for too long.
        """
        limit_s = LOAD_TIMEOUT_S + GRACE_S  # longer than one import may take, to learn why it failed
        text = f"its process was lost, and {entry.target} did not import in a new one within {limit_s:g} s"
        async with _locked(slot.replacing, limit_s, text):
            if slot.process is None or not slot.process.takes(entry.target):
                slot.process = await self._start_process()
            if not slot.process.has_imported(entry.target):
                await self._import(slot.process, entry)
            return slot.process

    async def _import(self, process: RewardProcess, entry: RewardEntry) -> None:
        now = asyncio.get_running_loop().time
        refused_at, reason = self._refused.get(entry.target, (-RETRY_S, ""))
        if now() - refused_at < RETRY_S:
            raise DataError(reason)
        try:
            await process.import_function(entry.target)
        except (DataError, ProcessLost) as error:
            reason = f"reward {entry.name!r} does not import: {error}" if isinstance(error, ProcessLost) else str(error)
            self._refused[entry.target] = now(), reason  # waiting calls, and those of the next minute, fail at once
            raise DataError(reason) from error

    async def _start_process(self) -> RewardProcess:
        if self._is_closed:
            raise DataError(_CLOSED)
        process = await RewardProcess.start(self._output, max_concurrency=self._max_concurrency)
        self._processes = {other for other in self._processes if other.is_alive} | {process}
        if self._is_closed:  # while it started
            process.close(_CLOSED)
            raise DataError(_CLOSED)
        return process


async def _in_time(waiting: Awaitable[T], timeout_s: float, text: str) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await waiting
    except TimeoutError:
        raise RewardError(text) from None


@contextlib.asynccontextmanager
async def _locked(lock: asyncio.Lock, timeout_s: float, text: str) -> AsyncIterator[None]:
    await _in_time(lock.acquire(), timeout_s, text)
    try:
        yield
    finally:
        lock.release()


def check_reward(name: str, *, sample: Prompt, timeout_s: float) -> RewardResult:
    """Scores the sample's answer once, in a killable process with the run's time limit. Call it from the main thread,
    outside of any event loop.

    Raises:
        DataError: the reward does not import, raises, hangs, or returns something that is not a finite number.
    """

    async def check() -> RewardResult:
        async with RewardPool(name, timeout_s=timeout_s, num_processes=1) as rewards:
            return await rewards.score(sample, sample.answer)

    try:
        return asyncio.run(check())
    except RewardError as error:
        raise DataError(
            f"{error}\nThis was a trial call with response={sample.answer!r:.80}; the run was not started. "
            "Fix the function, or raise task.reward.timeout_s if it is only slow."
        ) from error
