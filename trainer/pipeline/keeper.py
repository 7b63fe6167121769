"""Restarts engines that were lost, and lets them back into the run."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

from trainer.config.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the replicas."""


class EngineKeeper:
    """One restart at a time; the other replicas go on meanwhile.

    A replica is lost once weight sync says so: it died, did not answer in time, or holds a mixture of versions. What it
    was generating went on elsewhere at once; this is about having its throughput back.
    """

    def __init__(
        self,
        members: Callable[[], Mapping[str, str]],
        restart: Callable[[str], Awaitable[int | None]],
        *,
        max_restarts: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """
        Args:
            members: replica -> "live", or how it was lost.
            restart: replaces a replica by a new engine with the newest weights; returns their version.
            max_restarts: of each replica; 0 leaves lost ones out for good.
        """
        self._members = members
        self._restart = restart
        self._max_restarts = max_restarts
        self._sleep = sleep
        self._attempts: Counter[str] = Counter()
        self.num_restarts = 0
        """That worked."""

    async def run(self) -> None:
        """Consumes: the states of the replicas. Waits for: its interval, and each restart, which has a deadline.
        Unblocked by: cancellation."""
        while True:
            await self._sleep(LOOK_S)
            for name, state in self._members().items():
                if state != "live" and self._attempts[name] < self._max_restarts:
                    await self._try(name, state)

    async def _try(self, name: str, state: str) -> None:
        self._attempts[name] += 1
        attempt = f"restart {self._attempts[name]} of {self._max_restarts}"
        log.warning("%s is %s: %s", name, state, attempt)
        try:
            version = await self._restart(name)
        except Exception as error:  # noqa: BLE001 - the run goes on without this replica, whatever is wrong with it
            left = self._max_restarts - self._attempts[name]
            next_step = "it is tried again" if left else "it stays out of this run"
            log.error("%s failed (%s): %s; %s", attempt, name, one_line(first_cause(error)), next_step)
            return
        self.num_restarts += 1
        log.info("%s is back with version %s", name, version)
