"""An asyncio event loop whose clock jumps: hours of waiting take microseconds, and a deadlock is an error.

When nothing is ready to run, the clock goes to the next timer. Without a timer, no task can ever wake up again.
"""

from __future__ import annotations

import asyncio
import functools
import math
import selectors
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits, and no timer will wake one."""


class _JumpingSelector(selectors.SelectSelector):
    """Never blocks; reports to the loop how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("all tasks wait and no timer is set")
        if timeout > 0:  # rounding must not make the clock stand still just before a timer
            self.now = max(self.now + timeout, math.nextafter(self.now, math.inf))
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Use it through `run_virtual`."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Here and now. asyncio would wait for a separate thread, of which the clock knows nothing."""
        executor: Any = getattr(self, "_default_executor", None)
        if executor is not None:
            executor.shutdown()


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, starting at 0.

    Raises:
        Deadlock: from inside the loop, at the moment that no task can continue.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorates an async test that `run_virtual` runs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run
