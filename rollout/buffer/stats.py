"""Numbers of the work buffer for metrics, logs and stall messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """Where the groups are now, and what became of those that left. Counts span resumes, seconds do not."""

    num_slots: int
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
