"""What a run shows: shares of its time, times of a step, and what could not be known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MATTERS = 0.05
"""A share of the time, or a gain, that is smaller is not worth a word of advice."""

Verdict = Literal[
    "learner_waits", "engines_wait", "sync_waits", "evaluation_waits", "both_wait", "tail_waits", "balanced",
    "take_turns",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Waits as shares of the steady time. They overlap, so they need not add up. None: not recorded."""

    learner_waits_for_data: float
    """Without its waits for evaluations."""
    learner_waits_for_evaluation: float
    learner_waits_for_sync: float
    engines_idle: float | None
    producer_waits_for_slots: float | None
    old_groups_hold_up: float
    """Part of the wait for data in which enough groups were ready, but older ones had to come first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A division of the devices, and the time of a step that the model gives it."""

    num_ranks: int
    num_replicas: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What a run shows."""

    num_steps: int
    num_lost_steps: int
    """Left out because an engine was lost."""
    step_s: float
    shares: Shares
    learning_s: float
    """Learning-bound time of a step."""
    other_s: float
    """Time of a step in which the learner neither computes nor waits for data or sync; it may wait for evaluations."""
    generation_s: float | None
    """Generation-bound time of a step; None if nothing tells when engines were idle."""
    generation_full_s: float | None
    """The same at the full rate of the engines; None without a trace that shows it."""
    verdict: Verdict
    splits: tuple[Split, ...]
    """Best first; of as many devices as the run has."""
    limits: tuple[str, ...]
    unknown: tuple[str, ...]
    """What could not be known, in words."""

    @property
    def has_notable_rest(self) -> bool:
        """Whether the other time is worth a word."""
        return self.other_s >= MATTERS * self.step_s

    @property
    def floor_s(self) -> float:
        """The larger of both sides, the learner's with its other time: by this model no schedule of these devices is
        faster."""
        return max(self.learning_s + self.other_s, at_best(self.generation_s, self.generation_full_s))


def at_best(generation_s: float | None, full_s: float | None) -> float:
    return min([time_s for time_s in (generation_s, full_s) if time_s is not None], default=0.0)
