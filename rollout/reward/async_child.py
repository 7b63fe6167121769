"""The inside of a reward process whose function is `async def`: many calls at once in one event loop.

Wire, over the pipes of `child.py`, once that has said that the function is async:
  in    8 bytes length, then pickle of `AsyncCall`     (an item begins a call, None gives it up)
  out   one JSON line per call that was not given up, with its number, in the order in which they end; that of a call
        that took too long says how many threads are "stuck": busy for no call that still runs, if each has one
"""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from rollout.errors import RewardError
from rollout.reward.call import Item, call_async
from rollout.reward.wire import answer, outcome_message, read_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.reward.registry import RewardFn

MOST_THREADS = 1024
"""For `asyncio.to_thread` in a reward; they start as they are needed."""


class _Threads(ThreadPoolExecutor):
    """Knows what runs in it: a thread goes on after the call that waited for it was cancelled."""

    def __init__(self) -> None:
        super().__init__(max_workers=MOST_THREADS)
        self.busy: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.busy.add(future)
        future.add_done_callback(self.busy.discard)
        return future


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncCall:
    number: int
    item: Item | None
    timeout_s: float


def serve(function: RewardFn, requests: BinaryIO, answers: BinaryIO) -> None:
    """Serves calls until the parent closes the pipe. Does not return: threads of the reward may never end."""
    asyncio.run(_serve(function, requests, answers))


async def _serve(function: RewardFn, requests: BinaryIO, answers: BinaryIO) -> None:
    """Consumes: calls. Waits for: the next one. Unblocked by: the end of the pipe."""
    loop = asyncio.get_running_loop()
    threads = _Threads()
    loop.set_default_executor(threads)
    calls: asyncio.Queue[AsyncCall | None] = asyncio.Queue()

    def read() -> None:
        while (payload := read_frame(requests)) is not None:
            loop.call_soon_threadsafe(calls.put_nowait, pickle.loads(payload))
        loop.call_soon_threadsafe(calls.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    running: dict[int, asyncio.Task[None]] = {}

    def stuck() -> int:
        return max(0, len(threads.busy) - len(running) + 1)  # the call that asks has ended

    while (one := await calls.get()) is not None:
        if one.item is None:
            if task := running.get(one.number):
                task.cancel()
            continue
        task = asyncio.create_task(_run(function, one, one.item, answers, stuck))
        running[one.number] = task
        task.add_done_callback(lambda _, number=one.number: running.pop(number))
    os._exit(0)


async def _run(function: RewardFn, one: AsyncCall, item: Item, answers: BinaryIO, stuck: Callable[[], int]) -> None:
    limit, more = asyncio.timeout(one.timeout_s), dict[str, int]()
    try:
        async with limit:
            outcome = await call_async(function, item)
    except TimeoutError:
        outcome = RewardError(f"the call took longer than {one.timeout_s:g} s; it was cancelled")
        more = {"stuck": stuck()}
    answer(answers, {"number": one.number, **outcome_message(outcome), **more})
