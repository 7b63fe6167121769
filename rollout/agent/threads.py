"""Threads for blocking code of users: tools, and agents that are plain functions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_THREADS = 1024
"""Of one pool in one rollout worker; they start when they are needed."""
_POOLS: weakref.WeakSet[UserThreads] = weakref.WeakSet()


class AllThreadsHang(RuntimeError):
    """No thread is free, and none will be."""


class UserThreads:
    """A thread cannot be killed: one whose caller timed out keeps its slot until its function returns. These are
    counted and logged; once all threads hang, a call fails at once instead of waiting until its timeout.

    A separate pool, because waiting for a thread counts as time of the call and the event loop's pool is small.

    Args:
        what: runs in them, for the log, such as "tool".
    """

    def __init__(self, what: str, *, max_threads: int = MAX_THREADS) -> None:
        self._what, self._max_threads = what, max_threads
        self._pool = ThreadPoolExecutor(max_workers=max_threads, thread_name_prefix=what)
        self.num_hanging = 0
        self._warn_at = 1
        _POOLS.add(self)

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """As `run`; but an async function runs in the event loop."""
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await self.run(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result  # a decorator may hide `async`

    async def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, or raises. Raises AllThreadsHang if no thread can become free."""
        if self.num_hanging >= self._max_threads:
            raise AllThreadsHang(
                f"all {self._max_threads} threads for {self._what}s still run calls that timed out; give their "
                "functions time limits of their own"
            )
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:  # in the thread that hung
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._count, -1)

        work = self._pool.submit(partial(function, *args, **kwargs))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            if work.running():
                self._count(1)
                work.add_done_callback(ended)
            raise

    def close(self) -> None:
        """Does not wait for what still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, change: int) -> None:
        self.num_hanging += change
        if self.num_hanging >= self._warn_at:
            self._warn_at = 2 * self.num_hanging
            log.warning(
                "%d of %d threads for %ss still run calls that timed out; a thread cannot be killed",
                self.num_hanging, self._max_threads, self._what,
            )  # fmt: skip


def num_hanging() -> int:
    """Threads of all pools of this process that still run calls that timed out."""
    return sum(pool.num_hanging for pool in _POOLS)
