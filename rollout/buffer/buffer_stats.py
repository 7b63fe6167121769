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
    """Of the outstanding groups at the next step, in policy versions; 0 without any."""
    version: int
    admitted: int
    """Different prompts; retries and readmissions after a resume do not count again."""
    finished: int
    trained: int
    """Released after their step: trained, and the weights are live."""
    filtered: Mapping[str, int]
    """By reason."""
    failed: int
    """Attempts, retried or not."""
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
    """Counts groups that led nowhere; its `NoProgress` is for the buffer to raise.

    Args:
        groups_per_step: B.
        max_filtered_batches_per_step: there is no progress once more than this many times B groups were filtered while
            fewer than B worked, or this many prompts in a row were dropped.
    """

    def __init__(self, *, groups_per_step: int, max_filtered_batches_per_step: int) -> None:
        self._groups_per_step, self._max_filtered_batches = groups_per_step, max_filtered_batches_per_step
        self._dropped: list[Exception] = []
        self._start_count()

    def _start_count(self) -> None:
        self._filtered, self._num_finished = Counter[str](), 0
        self._first_failure, self._num_failed = "", 0

    def on_finished(self) -> None:
        """A step's worth of them resets the count of filtered groups, also while a busy learner takes none."""
        self._dropped.clear()
        self._num_finished += 1
        if self._num_finished >= self._groups_per_step:
            self._start_count()

    def on_filtered(self, reason: str, *, failure: str = "") -> NoProgress | None:
        """`failure`: what failed in the group, if that is why it cannot be trained."""
        self._dropped.clear()
        self._filtered[reason] += 1
        self._first_failure = self._first_failure or failure
        self._num_failed += bool(failure)
        total = self._filtered.total()
        if total <= self._max_filtered_batches * self._groups_per_step:
            return None
        advice = ""
        if 2 * self._num_failed < total:
            advice = (
                " Look at the recorded trajectories: the reward may not distinguish responses, or the task be far too "
                "easy or too hard."
            )
        if self._first_failure:
            first_line = self._first_failure.partition("\n")[0]  # a traceback may follow; the trajectories have it
            advice += f" The first failure: {first_line}"
        reasons = ", ".join(f"{name}: {count}" for name, count in self._filtered.most_common())
        return NoProgress(
            f"{total} groups were filtered ({reasons}) without one step of {self._groups_per_step} groups; at most "
            f"max_filtered_batches_per_step={self._max_filtered_batches} times {self._groups_per_step} are allowed."
            f"{advice}"
        )

    def on_dropped(self, error: Exception) -> NoProgress | None:
        self._dropped.append(error)
        if len(self._dropped) < self._max_filtered_batches:
            return None
        first = self._dropped[0]
        no_progress = NoProgress(
            f"{len(self._dropped)} prompts in a row were dropped after all their retries; the first failed with "
            f"{type(first).__name__}: {first}"
        )
        no_progress.__cause__ = first
        return no_progress
