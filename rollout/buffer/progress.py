"""Notices that generation works and works, but produces nothing that can be trained."""

from __future__ import annotations

from collections import Counter

from rollout.errors import NoProgress


class ProgressGuard:
    """Counts groups that led nowhere; pure policy, the buffer acts on it.

    Args:
        groups_per_step: B.
        max_refills_per_step: more than this many times B filtered groups while fewer than B worked, or this many
            dropped prompts in a row without a group that worked, mean that there is no progress.
    """

    def __init__(self, *, groups_per_step: int, max_refills_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_refills_per_step = max_refills_per_step
        self._filtered: Counter[str] = Counter()
        self._num_finished = 0
        self._dropped: list[Exception] = []
        self._first_failure, self._num_failed = "", 0

    def on_finished(self) -> None:
        """A group worked, so dropped ones are not in a row; with a step's worth of them filtered ones are forgiven,
        also while the learner is busy and takes none."""
        self._dropped.clear()
        self._num_finished += 1
        if self._num_finished >= self._groups_per_step:
            self._num_finished = 0
            self._filtered.clear()
            self._first_failure, self._num_failed = "", 0

    def on_filtered(self, reason: str, *, failure: str = "") -> NoProgress | None:
        """
        Args:
            failure: what failed in the group, if that is why it cannot be trained.
        """
        self._dropped.clear()
        self._filtered[reason] += 1
        self._first_failure = self._first_failure or failure
        self._num_failed += bool(failure)
        total = self._filtered.total()
        if total <= self._max_refills_per_step * self._groups_per_step:
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
            f"max_refills_per_step={self._max_refills_per_step} times {self._groups_per_step} are allowed. "
            f"{why.rstrip()}"
        )

    def on_dropped(self, error: Exception) -> NoProgress | None:
        self._dropped.append(error)
        if len(self._dropped) < self._max_refills_per_step:
            return None
        first = self._dropped[0]
        no_progress = NoProgress(
            f"{len(self._dropped)} prompts in a row were given up after all their retries, without one group that "
            f"worked between them; the first failed with {type(first).__name__}: {first}"
        )
        no_progress.__cause__ = first
        return no_progress
