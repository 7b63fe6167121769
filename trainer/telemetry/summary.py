"""`summary.json`: the end of a run in one small file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from trainer.telemetry.jsonable import to_jsonable
from trainer.telemetry.run_dir import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ExitReason = Literal["completed", "accuracy_reached", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended. Accuracies are those of held-out evaluations; None if there was none."""

    exit_reason: ExitReason
    steps: int
    """Optimizer steps of the whole run, resumes included."""
    version: int
    """Last policy version that was live on the engines."""
    wall_s: float
    """From process start to the end."""
    startup_s: float | None
    """From process start to the first prompt dispatched; None if it never came to that."""
    first_accuracy: float | None
    """Of the first evaluation of this run directory, resumes included."""
    last_accuracy: float | None
    seed: int
    resumed_from_step: int | None = None
    discarded_tokens: int = 0
    num_responses: int = 0
    """Generated for training by the last process, trained or not."""
    num_failed_responses: int = 0
    """Those of them without a reward, because their reward function or agent failed."""
    first_failure: str = ""
    """Why the first of them failed."""
    eval_sets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """First and last accuracy of each of `task.eval_sets`."""
    error: str = ""
    """The first cause, if the run failed."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further JSON-able values; they stand beside the others in the file."""


def write_summary(path: Path, summary: Summary) -> None:
    """Atomically: a reader sees a whole summary or none."""
    plain = to_jsonable(summary)
    assert isinstance(plain, dict)
    extra = plain.pop("extra")
    write_atomically(path, json.dumps({**plain, **extra}, indent=2) + "\n")
