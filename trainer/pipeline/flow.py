"""How groups pass through the driver: how long each stands in every queue, and how busy the engines are.

    admitted ──> claimed ──room at an engine, generation, rewards──> finished ──waits for its step──> taken ──> trained

Pure bookkeeping for metrics; no decision depends on it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.types import Group


@dataclass(slots=True, kw_only=True)
class Passage:
    """When one group came where, by the clock of the flow. Of a group that was retried: its last attempt."""

    admitted_at: float
    claimed_at: float
    finished_at: float
    taken_at: float


class GroupFlow:
    """Follows every group from its admission to its step. One event loop, no threads."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._passages: dict[int, Passage] = {}
        self._num_running = 0
        self._changed_at = clock()
        self._seconds_with: defaultdict[int, float] = defaultdict(float)  # by number of groups with the engines
        self._lost: defaultdict[str, float] = defaultdict(float)
        self._slot_wait_s = 0.0

    def admitted(self, group_id: int) -> None:
        now = self._clock()
        self._passages[group_id] = Passage(admitted_at=now, claimed_at=now, finished_at=now, taken_at=now)

    def claimed(self, group_id: int) -> None:
        """A rollout worker has it from now on. Its requests may wait there, for room at an engine."""
        self._count(1)
        self._passages[group_id].claimed_at = self._clock()

    def finished(self, group: Group) -> None:
        """It waits for its step. Nothing will be learned from answers without a reward, nor from what agent loops gave
        up of the others: both are counted here."""
        self._count(-1)
        self._passages[group.group_id].finished_at = self._clock()
        for trajectory in group.generated:
            if trajectory.status == "failed":
                self._lost["failed_tokens"] += trajectory.num_generated_tokens + trajectory.num_lost_tokens
            else:
                self._lost["given_up_tokens"] += trajectory.num_lost_tokens

    def filtered(self, group: Group) -> None:
        """It is replaced by another; all that was generated for it is lost."""
        self._count(-1)
        del self._passages[group.group_id]
        self._lost["filtered_tokens"] += group.num_generated_tokens

    def failed(self, group_id: int, outcome: Literal["retried", "dropped"]) -> None:
        """An attempt raised. Its tokens stayed where it failed, so the time that it took is counted instead."""
        self._count(-1)
        passage, now = self._passages[group_id], self._clock()
        self._lost[f"{outcome}_s"] += now - passage.claimed_at
        if outcome == "dropped":
            del self._passages[group_id]
        else:
            passage.admitted_at = now

    def taken(self, groups: Sequence[Group]) -> None:
        """They are trained next. A group that was never admitted here is for the age check to find, not for this."""
        for passage in self._of(groups):
            passage.taken_at = self._clock()

    def step_record(
        self,
        groups: Sequence[Group],
        *,
        num_replicas: int,
        slot_wait_s: float,
        engines_idle_frac: float | None,
    ) -> dict[str, float]:
        """Metrics since the last line; the `groups` of this step are forgotten.

        Args:
            slot_wait_s: total wait of the producer for free slots so far.
            engines_idle_frac: see `IdleEngines`; if that does not know, `n` groups are taken to keep `n` engines busy.
        """
        self._count(0)
        seconds, self._seconds_with = self._seconds_with, defaultdict(float)
        elapsed_s = max(sum(seconds.values()), 1e-9)
        idle_frac = engines_idle_frac
        if idle_frac is None:
            idle_frac = sum(s * max(0, num_replicas - n) / num_replicas for n, s in seconds.items()) / elapsed_s
        passages = self._of(groups)
        for group in groups:
            self._passages.pop(group.group_id, None)
        lost, self._lost = self._lost, defaultdict(float)
        waited_s, self._slot_wait_s = slot_wait_s - self._slot_wait_s, slot_wait_s
        return {
            "wait/engines_idle_s": idle_frac * elapsed_s,
            "wait/producer_for_slots_s": waited_s,
            "perf/engines_busy_frac": 1 - idle_frac,
            "perf/groups_running": sum(s * n for n, s in seconds.items()) / elapsed_s,
            "discarded/filtered_tokens": lost["filtered_tokens"],
            "discarded/failed_tokens": lost["failed_tokens"],
            "discarded/given_up_tokens": lost["given_up_tokens"],
            "discarded/retried_s": lost["retried_s"],
            "discarded/dropped_s": lost["dropped_s"],
            **_queue_times(passages, groups),
        }

    def _of(self, groups: Sequence[Group]) -> list[Passage]:
        return [self._passages[group.group_id] for group in groups if group.group_id in self._passages]

    def _count(self, change: int) -> None:
        now = self._clock()
        self._seconds_with[self._num_running] += now - self._changed_at
        self._changed_at = now
        self._num_running += change


def _queue_times(passages: Sequence[Passage], groups: Sequence[Group]) -> dict[str, float]:
    """Mean and maximum of each wait, in seconds: over groups, and of the wait for an engine over answers."""
    waits = {
        "admitted_to_claimed_s": [p.claimed_at - p.admitted_at for p in passages],
        "claimed_to_finished_s": [p.finished_at - p.claimed_at for p in passages],
        "finished_to_taken_s": [p.taken_at - p.finished_at for p in passages],
        "for_engine_s": [
            t.timings["engine_wait_s"] for group in groups for t in group.trajectories if "engine_wait_s" in t.timings
        ],
    }
    means = {f"queue/{name}": sum(times) / len(times) for name, times in waits.items() if times}
    return means | {f"queue/{name}_max": max(times) for name, times in waits.items() if times}
