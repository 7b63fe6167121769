"""Asks engines for their load, and finds those that no longer answer.

A replica is silent while it does not answer a look, or has requests that it should generate for and gives no token.
Its event loop answers whatever else goes on: a commit, a pause, sleep, an evaluation, a slow step. While it may not
generate `EngineLoad.still_s` is 0, and before its first answer it is taken to start, which others bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.errors import EngineDead
from rollout.fleet.adaptive_limit import Bounds, Concurrency, Demand
from rollout.fleet.consolidation import Place, replicas_to_free

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from rollout.engine.interface import EngineLoad
    from rollout.fleet.consolidation import Repacking
    from rollout.fleet.generation import EngineClient
    from rollout.fleet.scheduler import Turnstile


log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks: many decode steps, so that a look sees what the one before has led to."""
ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """One replica, as one sender sees it."""

    limit: int | None
    """Most requests that this sender has there at once; None without a limit."""
    in_flight: int
    """Requests of this sender that are there."""
    load: EngineLoad | None
    """What the engine said last; None before its first answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """All replicas, as one sender sees them."""

    replicas: Mapping[str, ReplicaLoad]
    held: int
    """Requests of this sender that wait for room."""
    moved_requests: int
    """How often this sender moved a request since it began, so that its replica is free."""
    moved_tokens: int
    """What was computed again for that."""
    rescued_requests: int
    """Requests of this sender that went on elsewhere when their replica was lost, since it began."""
    rescued_tokens: int
    """Tokens of answers that they kept."""
    quarantined: Mapping[str, str]
    """Replica -> why this sender gave it up."""
    lost_tokens: int = 0
    """Generated for groups that came to nothing here, since the sender began."""


class LoadWatch:
    """Feeds one `Concurrency` per replica and passes its limits on.

    Args:
        engines: the replicas by name; the mapping may change.
        turnstile: gets the limits.
        bounds: of this sender's share of each replica; None for no limit.
        silence_timeout_s: how long a replica may be silent.
        give_up: (name, reason) of one that was silent for longer.
        repacking: when a replica is freed; None for never.
    """

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        turnstile: Turnstile,
        *,
        bounds: Bounds | None,
        silence_timeout_s: float,
        give_up: Callable[[str, str], None],
        repacking: Repacking | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engines = engines
        self._turnstile = turnstile
        self._sleep = sleep
        self._bounds = bounds
        self._silence_timeout_s = silence_timeout_s
        self._give_up = give_up
        self._repacking = repacking
        self._states: dict[str, Concurrency] = {}
        self._loads: dict[str, EngineLoad] = {}
        self._unanswered_s: defaultdict[str, float] = defaultdict(float)
        for name in engines:
            self.start_over(name)

    def start_over(self, name: str) -> None:
        """The replica is a new one: what was learned about the old one is forgotten."""
        self._loads.pop(name, None)
        self._unanswered_s.pop(name, None)
        if self._bounds is not None:
            self._states[name] = Concurrency.start(self._bounds)
            self._turnstile.limit(name, self._states[name].limit)

    async def run(self) -> None:
        """Consumes: the engines' loads. Waits for: its interval, and each answer, which has a deadline. Unblocked by:
        cancellation."""
        while True:
            await self._sleep(LOOK_S)
            lost = self._turnstile.router.quarantined
            await asyncio.gather(*(self._look(name) for name in self._engines if name not in lost))
            if self._repacking is not None and not self._turnstile.num_held:
                self._free_replicas(self._repacking)

    def report(self) -> LoadReport:
        """As things are now; the engines' own figures are of the last look."""
        router = self._turnstile.router
        replicas = {
            name: ReplicaLoad(limit=router.limits.get(name), in_flight=in_flight, load=self._loads.get(name))
            for name, in_flight in router.num_requests.items()
        }
        moved, rescued = self._turnstile.moved, self._turnstile.rescued
        return LoadReport(
            replicas=replicas,
            held=self._turnstile.num_held,
            moved_requests=moved.num_requests,
            moved_tokens=moved.num_tokens,
            rescued_requests=rescued.num_requests,
            rescued_tokens=rescued.num_tokens,
            quarantined=router.quarantined,
        )

    def _free_replicas(self, rule: Repacking) -> None:
        """Among those that take requests and answered the last look."""
        router, places = self._turnstile.router, dict[str, Place]()
        for name in router.in_service:
            load, own = self._loads.get(name), router.num_requests[name]
            if load is None or name in self._unanswered_s:
                continue
            running = max(own, load.running + load.waiting)
            places[name] = Place(
                running=running,
                own=own,
                limit=router.limits.get(name),
                is_queueing=load.waiting > 0,
                kv_frac=load.kv_usage_frac,
                may_leave=running < rule.below and self._turnstile.may_free(name),
            )
        for name in replicas_to_free(places, rule):
            self._turnstile.free(name)

    async def _look(self, name: str) -> None:
        engine = self._engines[name]
        try:
            async with asyncio.timeout(ANSWER_S):
                load = await engine.load()
        except Exception as error:  # noqa: BLE001 - whatever one replica raises, all go on being looked at
            if self._engines[name] is engine and name in self._loads:
                self._on_silence(name, error)
            return  # a limit that is not changed does no harm
        if self._engines[name] is not engine:
            return
        self._loads[name] = load
        self._unanswered_s.pop(name, None)
        if load.still_s > self._silence_timeout_s:
            self._give_up(name, f"it has requests and gave no token for {load.still_s:.0f} s")
        elif self._bounds is not None:
            demand = Demand(in_flight=self._turnstile.router.num_requests[name], held=self._turnstile.num_held)
            self._states[name] = self._states[name].next(load, demand)
            self._turnstile.limit(name, self._states[name].limit)

    def _on_silence(self, name: str, error: Exception) -> None:
        if isinstance(error, EngineDead):
            self._give_up(name, str(error))
            return
        waited_s = ANSWER_S if isinstance(error, TimeoutError) else 0.0
        if not waited_s and name not in self._unanswered_s:
            log.warning("%s did not say how busy it is: %s: %s", name, type(error).__name__, error)
        # Counted in looks and not by a clock: where it is this sender that stood still, no replica was silent.
        self._unanswered_s[name] += LOOK_S + waited_s
        if self._unanswered_s[name] > self._silence_timeout_s:
            self._give_up(name, f"it answered nothing for {self._unanswered_s[name]:.0f} s")
