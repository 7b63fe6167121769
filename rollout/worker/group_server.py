"""Many groups in one call of the driver.

A remote call costs about a millisecond of the driver, whatever it brings; a group of one response costs it far less.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import TYPE_CHECKING

from rollout.errors import AgentError, BaselineError
from rollout.fleet.scheduler import NoReplica

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from rollout.types import Group, RolloutRequest


log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""At most one call per worker and direction in this time; what comes sooner travels together. Nothing else waits."""
MAX_BYTES = 100_000
"""Returned by one call, unless a single group is larger. Ray sends up to 100 kB to the driver itself. A larger result
stays in the object store until the last of its groups is trained, because they are views of it; so it has one group."""
EXPECTED = (NoReplica, TimeoutError, AgentError, BaselineError)
"""What a group may fail with; anything else is a defect, and its traceback goes to the log."""


class GroupServer:
    """Runs groups concurrently with `run_group`, each under the call id that its caller gave it."""

    def __init__(self, run_group: Callable[[RolloutRequest], Awaitable[Group]]) -> None:
        self._run_group = run_group
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ended: dict[int, tuple[Group | Exception, int]] = {}
        """With the size of each in bytes."""
        self._num_bytes = 0
        self._logged: set[type[Exception]] = set()
        """Errors whose traceback is in the log."""
        self._has_ended = asyncio.Event()
        self._not_before_s = 0.0

    def submit(self, items: Mapping[int, RolloutRequest], cancelled: Iterable[int]) -> None:
        """Begin these groups, and end those without a caller; one that has ended is left out."""
        for call_id, item in items.items():
            self._running[call_id] = asyncio.create_task(self._run(call_id, item), name=f"group {item.group_id}")
        for call_id in cancelled:
            if task := self._running.pop(call_id, None):
                task.cancel()
            elif ended := self._ended.pop(call_id, None):
                self._num_bytes -= ended[1]

    async def ended(self) -> dict[int, Group | Exception]:
        """What has ended since the last call, the oldest first, or why it failed; at most `MAX_BYTES`, or one group.

        Waits for: the end of a group, and `FLUSH_S` after the last call. Unblocked by: cancellation; its caller
        watches whether the worker lives.
        """
        loop = asyncio.get_running_loop()
        taken: dict[int, Group | Exception] = {}
        while not taken:
            await self._has_ended.wait()
            if self._num_bytes < MAX_BYTES:
                await asyncio.sleep(self._not_before_s - loop.time())
            num_bytes = 0
            for call_id, (outcome, size) in list(self._ended.items()):
                if taken and num_bytes + size > MAX_BYTES:
                    break
                del self._ended[call_id]
                taken[call_id] = outcome
                num_bytes += size
            self._num_bytes -= num_bytes
            if not self._ended:
                self._has_ended.clear()
        self._not_before_s = loop.time() + FLUSH_S
        return taken

    def close(self) -> None:
        """Cancel what runs."""
        running, self._running = self._running, {}
        for task in running.values():
            task.cancel()

    async def _run(self, call_id: int, item: RolloutRequest) -> None:
        outcome: Group | Exception
        size = 0
        try:
            outcome = await self._run_group(item)
            size = outcome.nbytes
        except asyncio.CancelledError:
            if call_id not in self._running:
                raise  # it was cancelled
            outcome = RuntimeError("something that an agent loop or a reward waited for was cancelled")
        except Exception as error:
            if not isinstance(error, EXPECTED) and type(error) not in self._logged:
                self._logged.add(type(error))
                log.exception("group %d failed, the first with this error", item.group_id)
            outcome = _portable(error)
        self._running.pop(call_id, None)
        self._ended[call_id] = outcome, size
        self._num_bytes += size
        self._has_ended.set()


def _portable(error: Exception) -> Exception:
    """The error, or its text where it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
