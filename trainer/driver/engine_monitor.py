"""What engines report of themselves: polls, loads, silence, and how idle they are.

An engine is silent while it does not reply to a poll, or gives no token for the requests that it has. Its event loop
replies during commits, pauses, sleep, evaluations and slow steps; while it may not generate its `still_s` is 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from rollout.errors import EngineDead
from rollout.fleet.engine_client import is_actor_lost
from trainer.errors import first_cause, one_line
from trainer.remote import call

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rollout.engine.interface import EngineStatus, EngineTimes
    from rollout.fleet.states import WorkerReport


log = logging.getLogger(__name__)

POLL_S = 0.5
"""Between two polls: many decode steps, so that a poll sees the effect of the one before."""
REPLY_S = 5.0
PROMPT_S = 0.1
"""A live engine has mostly replied by then."""


class EngineProbe:
    """Polls one engine; its restarted successor gets a new probe.

    Args:
        heartbeat_timeout_s: how long the engine may be silent.
        on_lost: (reason) once it has died, or was silent for longer.
    """

    def __init__(self, name: str, actor: Any, *, heartbeat_timeout_s: float, on_lost: Callable[[str], object]) -> None:
        self.load: EngineStatus | None = None
        """What it reported last."""
        self.num_polls = 0
        """Polls with a reply."""
        self.poll: asyncio.Task[None] | None = None
        self._name, self._actor, self._heartbeat_timeout_s, self._lose = name, actor, heartbeat_timeout_s, on_lost
        self._silent_s = 0.0

    @property
    def load_now(self) -> EngineStatus | None:
        """None if it has not replied to the last poll."""
        is_open = self.poll is not None and not self.poll.done()
        return None if is_open or self._silent_s else self.load

    def begin(self) -> None:
        """Poll it, unless it still owes a reply. Does not wait."""
        if self.poll is None or self.poll.done():
            self.poll = asyncio.create_task(self._poll(), name=f"poll {self._name}")

    async def _poll(self) -> None:
        ref = self._actor.load.remote()
        try:
            load = await call(ref, timeout_s=REPLY_S, who=self._name, what="a poll", hint="it counts as silent")
        except Exception as error:  # noqa: BLE001 - whatever one engine raises, all are polled again
            self._on_no_reply(error)
            return
        self.load, self._silent_s = load, 0.0
        self.num_polls += 1
        if load.still_s > self._heartbeat_timeout_s:
            self._lose(f"it has requests and produced no token for {load.still_s:.0f} s")

    def _on_no_reply(self, error: Exception) -> None:
        if isinstance(error, EngineDead) or is_actor_lost(error):
            self._lose(one_line(first_cause(error)))
            return
        waited_s = REPLY_S if isinstance(error, TimeoutError) else 0.0
        if not waited_s and not self._silent_s:
            log.warning("%s did not report its load: %s", self._name, one_line(first_cause(error)))
        # Counted in polls and not by a clock: no engine was silent while this process itself was stopped.
        self._silent_s += POLL_S + waited_s
        if self._silent_s > self._heartbeat_timeout_s:
            self._lose(f"it did not reply to polls for {self._silent_s:.0f} s")


def load_metrics(reports: Sequence[WorkerReport], loads: Mapping[str, EngineStatus]) -> dict[str, float]:
    """Metrics of the engines' load. Limits and requests in flight, queued, migrated and recovered are summed over
    workers; each engine reports its own."""
    limits, in_flight = Counter[str](), Counter[str]()
    for report in reports:
        limits.update(report.limits)
        in_flight.update(report.in_flight)
    record: dict[str, float | None] = {
        "engine/queued": sum(report.num_queued for report in reports),
        "engine/repacked_requests": sum(report.migrated_requests for report in reports),
        "engine/repacked_tokens": sum(report.migrated_tokens for report in reports),
        "engine/migrated_requests": sum(report.recovered_requests for report in reports),
        "engine/migrated_tokens": sum(report.recovered_tokens for report in reports),
        "discarded/failed_attempt_tokens": sum(report.lost_tokens for report in reports),
        **{f"engine/limit/{name}": limit for name, limit in limits.items()},
        **{f"engine/in_flight/{name}": number for name, number in in_flight.items()},
    }
    for name, load in loads.items():
        record |= {
            f"engine/running/{name}": load.running,
            f"engine/waiting/{name}": load.waiting,
            f"engine/kv_usage_frac/{name}": load.kv_usage_frac,
            f"engine/preemptions/{name}": load.num_preemptions,
        }
    if hanging := sum(report.hanging_threads for report in reports):
        record["agent/hanging_threads"] = hanging
    return {name: value for name, value in record.items() if value is not None}


class EngineIdleMeter:
    """Busy and total seconds of each engine. From its loss to the first report of its successor it counts as idle."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, EngineTimes | None]] = {}
        """Engine -> the time that it is counted up to, by our clock, and its last report."""
        self._busy_s, self._up_s = defaultdict[str, float](float), defaultdict[str, float](float)
        """Since the last `take_frac`."""
        self._idle_frac: dict[str, float] = {}

    def add(self, times: Mapping[str, EngineTimes], lost: Collection[str]) -> None:
        """
        Args:
            times: by engine, its last report, which may be an old one.
            lost: engines that are not there now.
        """
        now = self._clock()
        for name in {*times, *lost}:
            counted_to, before = self._last.setdefault(name, (now, None))
            new, passed_s = times.get(name), now - counted_to
            if new is not None and (before is None or new.began_at != before.began_at):
                busy_s, up_s = new.busy_s, passed_s
            elif new is not None and before is not None and new.up_s > before.up_s:
                busy_s, up_s = new.busy_s - before.busy_s, min(new.up_s - before.up_s, passed_s)
            elif name in lost:
                busy_s, up_s = 0.0, passed_s
            else:
                continue
            self._last[name] = now, before if new is None else new
            self._busy_s[name] += min(busy_s, up_s)
            self._up_s[name] += up_s

    def take_frac(self, *, num_replicas: int) -> float | None:
        """Mean over all engines since the last call; None before all have reported twice. An engine without news keeps
        its share."""
        self._idle_frac |= {name: 1.0 - self._busy_s[name] / up_s for name, up_s in self._up_s.items() if up_s > 0}
        self._busy_s.clear()
        self._up_s.clear()
        return sum(self._idle_frac.values()) / num_replicas if len(self._idle_frac) == num_replicas else None
