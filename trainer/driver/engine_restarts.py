"""Restarts of engines that are lost.

    live ──lost──> starting again, beside the others ──> live              its restarts are forgotten after `HEALTHY_S`
                      └──failed──> once more, or out of this run

With no engine left, groups and syncs wait for the one that comes back first (`wait`). Once training is over, a loss is
told and no more, and restarts are given up: an evaluation uses what is left, and would not wait for another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from trainer.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from trainer.driver.fleet import WorkerPool
    from weight_sync.coordinator import SyncCoordinator


log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the replicas."""
HEALTHY_S = 3600.0
"""A replica that has lived so long has all its restarts again: the few faults of a run of weeks are not to add up."""
PATIENCE_S = 5.0
"""Longest single wait for an engine; whoever waits tries again then, and asks again."""


async def leave_out(coordinator: SyncCoordinator, workers: WorkerPool) -> None:
    """Workers send nothing to a replica that weight sync has lost: its weights are old, or no version at all."""
    for name in coordinator.members:
        state = coordinator.members.get(name, "live")  # as of now: it may have come back meanwhile
        if state != "live":
            await workers.quarantine(name, f"weight sync: {state}")


class NoEngine(Exception):
    """No engine is left, and none may be started any more."""


class EngineKeeper:
    """Restarts go on side by side; on shared devices `restart` itself waits for its turn.

    A replica is lost once weight sync says so: it died, did not answer in time, or holds a mixture of versions. What it
    was generating went on elsewhere at once; this is about having its throughput back, or with the last one, any.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[str, str]],
        restart: Callable[[str], Awaitable[int | None]],
        *,
        max_restarts: int,
        is_over: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            members: replica -> "live", or how it was lost.
            restart: replaces a replica by a new engine with the newest weights; returns their version.
            max_restarts: of each replica, until it has been well for `HEALTHY_S`; 0 leaves lost ones out for good.
            is_over: whether training needs no engine any more. No restart begins or goes on then, and a run without any
                engine goes on.
        """
        self._members = members
        self._restart = restart
        self._max_restarts = max_restarts
        self._is_over = is_over
        self._sleep = sleep
        self._clock = clock
        self._attempts: Counter[str] = Counter()
        self._healthy_since: dict[str, float] = {}
        self._restarts: dict[str, asyncio.Task[None]] = {}
        """Under way, by replica."""
        self._has_returned = asyncio.Event()
        """Replaced by a new one when it is set."""
        self.num_restarts = 0
        """That worked."""

    async def run(self) -> None:
        """Consumes: the states of the replicas. Waits for: its interval. Unblocked by: cancellation, which ends the
        restarts too; each of them has a deadline.

        Raises:
            NoEngine: none is left, none may be started again, and training is not over.
        """
        try:
            while True:
                await self._sleep(LOOK_S)
                self._look()
        finally:
            restarts = list(self._restarts.values())
            for task in restarts:
                task.cancel()
            await asyncio.gather(*restarts, return_exceptions=True)

    async def wait(self, error: Exception) -> None:
        """For whoever found no engine to work with: returns when one has come back, or after a moment; then try again.

        Consumes: nothing. Waits for: the end of a restart. Unblocked by: that, and `PATIENCE_S`.

        Raises:
            Exception: `error`, if none is left and none may be started again. `run` says so first, with the reasons.
        """
        has_returned = self._has_returned
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await has_returned.wait()
        if not has_returned.is_set() and self._is_hopeless(self._members()):
            raise error

    def _look(self) -> None:
        members, now, is_over = self._members(), self._clock(), self._is_over()
        if not is_over and self._is_hopeless(members):
            states = "; ".join(f"{name} is {state}" for name, state in members.items())
            raise NoEngine(
                f"no engine is left, and each had its {self._max_restarts} restarts (rollout.max_engine_restarts): "
                f"{states}; what they printed is in actor_logs/; start again with the same run_dir"
            )
        for name, state in members.items():
            if (restart := self._restarts.get(name)) is not None:
                if is_over and restart.cancel():
                    log.warning("the restart of %s is given up: training is over", name)
                continue
            if state == "live":
                self._forgive(name, now)
                continue
            was_live = self._healthy_since.pop(name, None) is not None
            if is_over:
                if was_live:
                    log.warning("%s is %s; training is over, so it is not started again", name, state)
            elif self._attempts[name] < self._max_restarts:
                self._begin(name, state, is_last="live" not in members.values())

    def _is_hopeless(self, members: Mapping[str, str]) -> bool:
        return not self._restarts and all(
            state != "live" and self._attempts[name] >= self._max_restarts for name, state in members.items()
        )

    def _forgive(self, name: str, now: float) -> None:
        since = self._healthy_since.setdefault(name, now)
        if self._attempts[name] and now - since >= HEALTHY_S:
            del self._attempts[name]
            log.info("%s has been well for %.0f s: its restarts are forgotten", name, now - since)

    def _begin(self, name: str, state: str, *, is_last: bool) -> None:
        self._attempts[name] += 1
        number = f"{self._attempts[name]} of {self._max_restarts}"
        if is_last:
            log.warning("no engine is left; waiting for %s (%s) to start again (attempt %s)", name, state, number)
        else:
            log.warning("%s is %s: restart %s", name, state, number)
        self._restarts[name] = asyncio.create_task(self._try(name, number), name=f"restart {name}")

    async def _try(self, name: str, number: str) -> None:
        try:
            version = await self._restart(name)
        except Exception as error:  # noqa: BLE001 - the run goes on without this replica, whatever is wrong with it
            left = not self._is_over() and self._attempts[name] < self._max_restarts
            next_step = "it is tried again" if left else "it stays out of this run"
            log.error("restart %s failed (%s): %s; %s", number, name, one_line(first_cause(error)), next_step)
            return
        finally:
            del self._restarts[name]
        self.num_restarts += 1
        log.info("%s is back with version %s", name, version)
        self._has_returned.set()
        self._has_returned = asyncio.Event()
