"""Responses that have no reward because their reward function or agent failed: counted, and warned about."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.types import Group

log = logging.getLogger(__name__)


class FailedResponses:
    """Of one process. Warns at the first failure and at every doubling of their number, so that a judge that is down
    for an hour leaves some lines and not thousands."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.num_responses = 0
        self.first_error = ""
        self._warn_at = 1
        self._told = (0, 0)

    def count(self, group: Group) -> None:
        """A group came back, whatever becomes of it."""
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.status == "failed"]
        self.num_responses += len(group.trajectories)
        self.num_failed += len(errors)
        if errors and not self.first_error:
            self.first_error = errors[0]
        if errors and self.num_failed >= self._warn_at:
            self._warn_at = 2 * self.num_failed
            log.warning("%s", self)

    @property
    def frac(self) -> float:
        """Share of all responses so far; 0 without any."""
        return self.num_failed / self.num_responses if self.num_responses else 0.0

    def take_frac(self) -> float:
        """Share of the responses that came since the last call, those of groups that are not trained included."""
        before, self._told = self._told, (self.num_failed, self.num_responses)
        return (self.num_failed - before[0]) / max(self.num_responses - before[1], 1)

    def __str__(self) -> str:
        plural = "" if self.num_failed == 1 else "s"
        first_line = self.first_error.partition("\n")[0]  # a traceback may follow; summary.json has it
        return (
            f"{self.num_failed} response{plural} of {self.num_responses} ({self.frac:.0%}) failed and got no reward; "
            f"means are over the others. First failure: {first_line}"
        )
