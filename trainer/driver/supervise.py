"""Tasks of a run that end together: the first that fails ends the others."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine


class Supervisor:
    """Runs tasks beside a main one. A task that fails ends the main one; so does a loop that ends early.

    Example:
        async with Supervisor() as supervisor:
            supervisor.spawn(prompt_loop(parts), name="prompt_loop")
            supervisor.spawn(evaluate(parts), name="evaluation", may_end=True)
            await supervisor.until(train_loop(parts))
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._may_end: set[asyncio.Task[Any]] = set()
        self._spawned = asyncio.Event()

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Cancel all tasks and wait for their ends. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], *, name: str, may_end: bool = False) -> asyncio.Task[Any]:
        """Start a task. Unless `may_end`, its end before that of the main task is an error."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        if may_end:
            self._may_end.add(task)
        self._spawned.set()
        return task

    async def until(self, main: Coroutine[Any, Any, None]) -> None:
        """Wait for `main`, and only as long as all goes well.

        Raises:
            Exception: the first failure, of whichever task.
            RuntimeError: a loop ended without a failure while `main` still ran.
        """
        task = asyncio.create_task(main, name="main")
        self._tasks.add(task)
        while True:
            self._spawned.clear()
            wake = asyncio.create_task(self._spawned.wait())
            try:
                done, _ = await asyncio.wait({*self._tasks, wake}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                wake.cancel()
            done.discard(wake)
            # A failed helper is the cause of a main task that failed in the same moment.
            for ended in sorted(done, key=lambda t: t is task):
                self._retire(ended, is_main=ended is task)
            if task in done:
                return

    def _retire(self, ended: asyncio.Task[Any], *, is_main: bool) -> None:
        self._tasks.discard(ended)
        ended.result()  # raises what it raised
        if not is_main and ended not in self._may_end:
            raise RuntimeError(f"background task {ended.get_name()} ended early; this is a bug")
        self._may_end.discard(ended)
