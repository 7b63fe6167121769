"""Groups at one rollout worker, as the driver sees them: many in a call there, many in a call back."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

from rollout.errors import WorkerLost
from rollout.group_server import EVERY_S

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from rollout.buffer.items import WorkItem
    from rollout.types import Group


RETRY_S = 1.0
"""After a call that failed though the worker lives."""


class GroupCalls:
    """The other end of a worker's `GroupServer`. Of use until the worker is lost.

    Args:
        actor: the rollout worker's actor.
        ask: the result of a remote call to it; raises what it raised, or WorkerLost if the actor is gone.
    """

    def __init__(self, actor: Any, ask: Callable[[Any], Awaitable[Any]]) -> None:
        self._actor = actor
        self._ask = ask
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Group]] = {}
        self._to_begin: dict[int, WorkItem] = {}
        self._given_up: list[int] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: WorkerLost | None = None

    async def run(self, item: WorkItem) -> Group:
        """Generate and reward one group. Cancelled, it ends in the worker too.

        Waits for: the worker's answer. Unblocked by: its caller's deadline; the loss of the worker.

        Raises:
            WorkerLost: the worker died with the group, or never had it.
            Exception: what the worker raised.
        """
        if self._lost is not None:
            raise self._lost
        ticket, future = next(self._tickets), asyncio.get_running_loop().create_future()
        self._waiting[ticket], self._to_begin[ticket] = future, item
        self._keep_running("send", self._send)
        self._keep_running("receive", self._receive)
        try:
            return await future
        finally:
            del self._waiting[ticket]
            if future.cancelled() and self._to_begin.pop(ticket, None) is None and self._lost is None:
                self._given_up.append(ticket)
                self._keep_running("send", self._send)

    def close(self) -> None:
        """The run is over: nobody waits for this worker any more, and nothing is said when it ends."""
        self._fail((), WorkerLost("the run is over"))
        for task in self._tasks.values():
            task.cancel()

    def _keep_running(self, name: str, coroutine: Callable[[], Any]) -> None:
        task = self._tasks.get(name)
        if task is None or task.done():
            self._tasks[name] = asyncio.create_task(coroutine(), name=f"groups {name}")

    async def _send(self) -> None:
        """Consumes: groups to begin and to give up. Waits for: the worker to take them, and `EVERY_S`.

        Unblocked by: the loss of the worker, which the pool watches.
        """
        while self._to_begin or self._given_up:
            items, self._to_begin = self._to_begin, {}
            given_up, self._given_up = self._given_up, []
            try:
                await self._ask(self._actor.submit.remote(items, given_up))
            except Exception as error:  # noqa: BLE001 - each of these groups gets it
                self._given_up += given_up  # with the next call
                self._fail(items, error)
                await asyncio.sleep(RETRY_S)
            await asyncio.sleep(EVERY_S)

    async def _receive(self) -> None:
        """Consumes: what has ended in the worker. Waits for: it. Unblocked by: the loss of the worker, as `_send`."""
        while self._waiting and self._lost is None:
            try:
                self._settle(await self._ask(self._actor.ended.remote()))
            except Exception as error:  # noqa: BLE001 - whose answer it was is unknown, so each that waits gets it
                begun = self._waiting.keys() - self._to_begin.keys()
                self._given_up += begun
                self._fail(begun, error)
                self._keep_running("send", self._send)
                await asyncio.sleep(RETRY_S)

    def _settle(self, ended: Mapping[int, Group | Exception]) -> None:
        for ticket, outcome in ended.items():
            future = self._waiting.get(ticket)
            if future is None or future.done():
                continue  # it was given up, with the reason, while the answer was on its way
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    def _fail(self, tickets: Iterable[int], error: Exception) -> None:
        """A lost worker is never called again, and all its groups fail."""
        if isinstance(error, WorkerLost):
            self._lost = error
            self._to_begin.clear()
            self._given_up.clear()
            tickets = self._waiting
        for ticket in tickets:
            future = self._waiting.get(ticket)
            if future is not None and not future.done():
                future.set_exception(error)
