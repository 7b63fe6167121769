"""Which start of a run made its last steps: the newest may have ended before its first one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainer.advise.facts import StepLine

CLOCKS_AGREE_S = 0.1
"""The time of a process and that between two of its steps are taken this close to each other. Two processes that need
about as long to start may be a second apart."""


def read_starts(path: Path) -> list[Mapping[str, Any]]:
    """The lines of `environment.jsonl`, oldest first; none if it cannot be read. Torn lines are passed over."""
    found: list[Mapping[str, Any]] = []
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return found
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            found.append(line)
    return found


def latest_start(starts: Sequence[Mapping[str, Any]], lines: Sequence[StepLine]) -> Mapping[str, Any]:
    """The newest start that made a step and is not refuted by those behind its checkpoint; empty without any.

    A process cuts what is behind its checkpoint when nothing can refuse it any more. What stands there although it goes
    on from the line before, by the clock of its process, is the work of an earlier one.
    """
    by_step = {line.step: line for line in lines}

    def is_refuted(start: Mapping[str, Any]) -> bool:
        step = start.get("resumed_from_step")
        if not isinstance(step, int):
            return False
        if max(by_step, default=0) <= step:
            return True  # it has made no step
        if step not in by_step or step + 1 not in by_step:
            return False
        return _goes_on(by_step[step], by_step[step + 1])

    return next((start for start in reversed(starts) if not is_refuted(start)), {})


def _goes_on(before: StepLine, line: StepLine) -> bool:
    """Whether both are steps of one process."""
    if before.time_s is None or line.time_s is None:
        return False
    return abs(line.time_s - before.time_s - line.step_s) < CLOCKS_AGREE_S
