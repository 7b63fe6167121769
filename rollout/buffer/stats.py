"""Numbers of the work buffer for metrics, logs and stall messages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Where the groups are now, and what became of those that left. Counts span resumes, seconds do not."""

    num_slots: int
    """Open now."""
    num_slots_used: int
    num_queued: int
    num_running: int
    num_ready: int
    num_taken: int
    """Taken by a step whose weights are not live yet."""
    oldest_age: int
    """Age at the next step of the oldest outstanding group, in policy versions; 0 without any."""
    version: int
    admitted: int
    """Different prompts admitted; retries and readmissions after a resume do not count again."""
    finished: int
    trained: int
    """Released after their step: trained, and the weights are live."""
    filtered: Mapping[str, int]
    """By reason."""
    failed: int
    """Failed attempts, retried or not."""
    retried: int
    dropped: Mapping[str, int]
    """Groups given up after their last retry, by type of the last error."""
    refilled: int
    """Filtered and dropped groups together: each made room for one more prompt."""
    discarded_tokens: int
    """Generated tokens of finished groups that are neither ready nor taken. Must be 0."""
    take_wait_s: float
    """Total time that `take` waited for groups."""
    forced_wait_s: float
    """Part of `take_wait_s` spent waiting for old groups while B others were ready: the price of the bound."""
    slot_wait_s: float
    """Total time that `wait_for_slot` waited for a slot."""


class Tally:
    """Counts what became of groups, and how long others waited for them. A checkpoint keeps the counts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """admitted, finished, trained, failed, retried."""
        self.filtered: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.seconds = {"take": 0.0, "forced": 0.0, "slot": 0.0}

    def take_waited(self, seconds: float, *, is_forced: bool) -> None:
        self.seconds["take"] += seconds
        self.seconds["forced"] += seconds if is_forced else 0.0

    def stats(self, **now: int) -> BufferStats:
        """`now`: the fields that are about what is in the buffer."""
        return BufferStats(
            admitted=self.counts["admitted"],
            finished=self.counts["finished"],
            trained=self.counts["trained"],
            filtered=dict(self.filtered),
            failed=self.counts["failed"],
            retried=self.counts["retried"],
            dropped=dict(self.dropped),
            refilled=self.filtered.total() + self.dropped.total(),
            take_wait_s=self.seconds["take"],
            forced_wait_s=self.seconds["forced"],
            slot_wait_s=self.seconds["slot"],
            **now,
        )

    def state_dict(self, *, num_trained: int) -> dict[str, Any]:
        """As plain JSON values. `num_trained` groups count as trained, and no others as finished."""
        return {
            "counts": {**self.counts, "finished": num_trained, "trained": num_trained},
            "filtered": dict(self.filtered),
            "dropped": dict(self.dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse, into a new tally."""
        self.counts.update(state["counts"])
        self.filtered.update(state["filtered"])
        self.dropped.update(state["dropped"])
