"""Counters of the buffer, and the guard that ends a run in which no group becomes trainable."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.errors import NoProgress

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
    num_training: int
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
    """After their last retry, by type of the last error."""
    replaced: int
    """Filtered and dropped groups together: each made room for one more prompt."""
    discarded_tokens: int
    """Generated tokens of finished groups that are neither ready nor taken. Must be 0."""
    batch_wait_s: float
    """Total time that `take` waited for groups."""
    oldest_wait_s: float
    """Part of `batch_wait_s` spent waiting for old groups while B others were ready: the price of the bound."""
    slot_wait_s: float
    """Total time that `wait_for_slot` waited for a slot."""


class StarvationGuard:
    """Counts groups that led nowhere, and decides when there is no progress; the buffer acts on it.

    Args:
        groups_per_step: B.
        max_filtered_batches_per_step: more than this many times B filtered groups while fewer than B worked, or as many
            dropped prompts in a row without a group that worked, mean that there is no progress.
    """

    def __init__(self, *, groups_per_step: int, max_filtered_batches_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_filtered_batches = max_filtered_batches_per_step
        self._filtered: Counter[str] = Counter()
        self._num_finished = 0
        self._dropped: list[Exception] = []
        self._first_failure, self._num_failed = "", 0

    def on_finished(self) -> None:
        """A group worked, so dropped ones are not in a row; a step's worth of them resets the count of filtered ones,
        also while the learner is busy and takes none."""
        self._dropped.clear()
        self._num_finished += 1
        if self._num_finished >= self._groups_per_step:
            self._num_finished = 0
            self._filtered.clear()
            self._first_failure, self._num_failed = "", 0

    def on_filtered(self, reason: str, *, failure: str = "") -> NoProgress | None:
        """`failure`: what failed in the group, if that is why it cannot be trained."""
        self._dropped.clear()
        self._filtered[reason] += 1
        self._first_failure = self._first_failure or failure
        self._num_failed += bool(failure)
        total = self._filtered.total()
        if total <= self._max_filtered_batches * self._groups_per_step:
            return None
        reasons = ", ".join(f"{name}: {count}" for name, count in self._filtered.most_common())
        why = ""
        if 2 * self._num_failed < total:
            why = (
                "Look at the recorded trajectories: the reward may not tell answers apart, or the task be far too easy "
                "or too hard. "
            )
        if self._first_failure:
            first_line = self._first_failure.partition("\n")[0]  # a traceback may follow; the trajectories have it
            why += f"The first failure: {first_line}"
        return NoProgress(
            f"{total} groups were filtered ({reasons}) without one step of {self._groups_per_step} groups; at most "
            f"max_filtered_batches_per_step={self._max_filtered_batches} times {self._groups_per_step} are allowed. "
            f"{why.rstrip()}"
        )

    def on_dropped(self, error: Exception) -> NoProgress | None:
        self._dropped.append(error)
        if len(self._dropped) < self._max_filtered_batches:
            return None
        first = self._dropped[0]
        no_progress = NoProgress(
            f"{len(self._dropped)} prompts in a row were dropped after all their retries, without one group that "
            f"worked between them; the first failed with {type(first).__name__}: {first}"
        )
        no_progress.__cause__ = first
        return no_progress
