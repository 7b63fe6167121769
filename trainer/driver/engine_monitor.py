"""How the engines are by their own words: polls, loads, silence, and how idle they are.

An engine is silent while it does not answer a poll, or has requests that it should generate for and gives no token. Its
event loop answers whatever else happens: a commit, a pause, sleep, an evaluation, a slow step. While it may not
generate `EngineStatus.still_s` is 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
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
"""Between two polls: many decode steps, so that a poll sees what the one before has led to."""
ANSWER_S = 5.0
PROMPT_S = 0.1
"""A live engine has mostly answered by then."""
SILENCE_S = 120.0
"""Longer than any step of a model and whatever is compiled on the way; far shorter than a request's deadline."""


class EngineMonitor:
    """Polls engines, each independently of the others.

    Args:
        heartbeat_timeout_s: how long an engine may be silent.
        on_lost: (engine, its incarnation, reason) of one that died, or was silent for longer.
    """

    def __init__(self, *, heartbeat_timeout_s: float, on_lost: Callable[[str, int, str], object]) -> None:
        self._silence_timeout_s = heartbeat_timeout_s
        self._on_lost = on_lost
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._incarnations: dict[str, int] = {}
        self._unanswered_s: defaultdict[str, float] = defaultdict(float)
        self.loads: dict[str, EngineStatus] = {}
        """What each engine said last."""
        self.num_polls: Counter[str] = Counter()
        """Answers of the present incarnation."""

    def load_now(self, name: str) -> EngineStatus | None:
        """None if it has not answered the last poll."""
        poll = self._polls.get(name)
        is_open = poll is not None and not poll.done()
        return None if is_open or name in self._unanswered_s else self.loads.get(name)

    def poll(self, name: str, incarnation: int, actor: Any) -> None:
        """Poll this engine, unless it still owes an answer. Does not wait."""
        if self._incarnations.get(name) != incarnation:
            self._forget(name)
            self._incarnations[name] = incarnation
        if name in self._polls and not self._polls[name].done():
            return
        self._polls[name] = asyncio.create_task(self._poll(name, incarnation, actor), name=f"poll {name}")

    async def heard(self) -> None:
        """Waits for: the answers to the polls. Unblocked by: `PROMPT_S`, after which others are not held up."""
        if polls := [poll for poll in self._polls.values() if not poll.done()]:
            await asyncio.wait(polls, timeout=PROMPT_S)

    async def close(self) -> None:
        polls = list(self._polls.values())
        for task in polls:
            task.cancel()
        await asyncio.gather(*polls, return_exceptions=True)

    def _forget(self, name: str) -> None:
        """The engine is a new one."""
        self.loads.pop(name, None)
        self._unanswered_s.pop(name, None)
        self.num_polls.pop(name, None)
        if (poll := self._polls.pop(name, None)) is not None:
            poll.cancel()

    async def _poll(self, name: str, incarnation: int, actor: Any) -> None:
        try:
            hint = "it counts as silent"
            load = await call(actor.load.remote(), timeout_s=ANSWER_S, who=name, what="a poll", hint=hint)
        except Exception as error:  # noqa: BLE001 - whatever one engine raises, all are polled again
            self._on_no_answer(name, incarnation, error)
            return
        self.loads[name] = load
        self.num_polls[name] += 1
        self._unanswered_s.pop(name, None)
        if load.still_s > self._silence_timeout_s:
            self._on_lost(name, incarnation, f"it has requests and gave no token for {load.still_s:.0f} s")

    def _on_no_answer(self, name: str, incarnation: int, error: Exception) -> None:
        if isinstance(error, EngineDead) or is_actor_lost(error):
            self._on_lost(name, incarnation, one_line(first_cause(error)))
            return
        waited_s = ANSWER_S if isinstance(error, TimeoutError) else 0.0
        if not waited_s and name not in self._unanswered_s:
            log.warning("%s did not report its load: %s", name, one_line(first_cause(error)))
        # Counted in polls and not by a clock: where this process itself stood still, no engine was silent.
        self._unanswered_s[name] += POLL_S + waited_s
        if self._unanswered_s[name] > self._silence_timeout_s:
            self._on_lost(name, incarnation, f"it answered no poll for {self._unanswered_s[name]:.0f} s")


def load_record(reports: Sequence[WorkerReport], loads: Mapping[str, EngineStatus]) -> dict[str, float]:
    """Metrics of the engines' load, from what each worker reports and what each engine said last. Pure.

    Limits and requests in flight, queued, migrated and recovered are summed over workers.
    """
    record: dict[str, float] = {
        "engine/queued": sum(report.num_queued for report in reports),
        "engine/repacked_requests": sum(report.migrated_requests for report in reports),
        "engine/repacked_tokens": sum(report.migrated_tokens for report in reports),
        "engine/migrated_requests": sum(report.recovered_requests for report in reports),
        "engine/migrated_tokens": sum(report.recovered_tokens for report in reports),
        "discarded/failed_attempt_tokens": sum(report.lost_tokens for report in reports),
    }
    limits, in_flight = Counter[str](), Counter[str]()
    for report in reports:
        limits.update(report.limits)
        in_flight.update(report.in_flight)
    record |= {f"engine/limit/{name}": limit for name, limit in limits.items()}
    record |= {f"engine/in_flight/{name}": number for name, number in in_flight.items()}
    for name, load in loads.items():
        said = {
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage_frac": load.kv_usage_frac,
            "preemptions": load.num_preemptions,
        }
        record |= {f"engine/{figure}/{name}": value for figure, value in said.items() if value is not None}
    return record


@dataclass(slots=True, kw_only=True)
class _Account:
    """Of one engine, over all incarnations."""

    at: float
    """Up to when it is kept, by our clock."""
    said: EngineTimes | None = None
    """What it said last."""
    busy_s: float = 0.0
    up_s: float = 0.0
    told_busy_s: float = 0.0
    """Of `busy_s`, what was asked for already; so with `told_up_s`."""
    told_up_s: float = 0.0
    idle_frac: float | None = None

    def add(self, busy_s: float, up_s: float, now: float) -> None:
        self.busy_s, self.up_s, self.at = self.busy_s + min(busy_s, up_s), self.up_s + up_s, now

    def take(self) -> float | None:
        """The idle share since it was asked for last; nothing new: as it was before."""
        busy_s, up_s = self.busy_s - self.told_busy_s, self.up_s - self.told_up_s
        self.told_busy_s, self.told_up_s = self.busy_s, self.up_s
        if up_s > 0:
            self.idle_frac = 1.0 - busy_s / up_s
        return self.idle_frac


class EngineIdleMeter:
    """An account per engine. The time from its loss to the first word of the next incarnation is idle time.

    One event loop, no threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def hear(self, times: Mapping[str, EngineTimes], lost: Collection[str]) -> None:
        """
        Args:
            times: by engine, as it said last; may be what it said before.
            lost: engines that are not there now.
        """
        now = self._clock()
        for name in {*times, *lost}:
            account = self._accounts.setdefault(name, _Account(at=now))
            said, before = times.get(name), account.said
            account.said = said if said is not None else before
            if said is not None and before is not None and said.began_at == before.began_at and said.up_s > before.up_s:
                account.add(said.busy_s - before.busy_s, min(said.up_s - before.up_s, now - account.at), now)
            elif said is not None and (before is None or said.began_at != before.began_at):
                account.add(said.busy_s, now - account.at, now)  # nothing, where it is the first one we hear of
            elif name in lost:
                account.add(0.0, now - account.at, now)

    def take_frac(self, *, num_replicas: int) -> float | None:
        """Mean over all engines since the call before; None before all were heard of twice."""
        fracs = [frac for account in self._accounts.values() if (frac := account.take()) is not None]
        return sum(fracs) / num_replicas if len(fracs) == num_replicas else None
