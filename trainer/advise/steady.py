"""Which steps of a run tell who waits for whom. Pure functions over records."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from trainer.advise.facts import Evaluation

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from trainer.advise.facts import Setup, StepLine

MIN_STEPS = 3
"""Fewer steady steps say nothing."""


class TooFewSteps(Exception):
    """The run has not enough steady steps to say anything."""


def steady(
    lines: Sequence[StepLine], *, max_staleness: int, has_ended: bool = False, lost: Collection[int] = ()
) -> list[StepLine]:
    """Without the first S + 2 steps: until then slots fill up for the first time, kernels compile and caches warm up.
    Without the last S of a run that `has_ended`: no prompt is left for its engines. Without the steps `lost`, in which
    an engine was away. Without those until the last time that slots were opened, if enough steps have come after it.

    Raises:
        TooFewSteps: nearly nothing is left.
    """
    num_last = max_staleness if has_ended else 0
    inner = sorted(lines, key=lambda line: line.step)[max_staleness + 2 : len(lines) - num_last]
    left = [line for line in inner if line.step not in lost]
    since = next((i for i in range(len(left) - 1, 0, -1) if left[i].num_slots != left[i - 1].num_slots), 0)
    if len(left) - since >= MIN_STEPS:
        return left[since:]
    if len(left) < MIN_STEPS:
        last, do = (f", the last {num_last} empty it", "give a longer run") if num_last else ("", "let the run go on")
        away = f", {len(inner) - len(left)} of the others had a lost engine" if len(left) < len(inner) else ""
        raise TooFewSteps(
            f"{len(lines)} steps since the start were recorded; the first {max_staleness + 2} fill the pipeline{last}"
            f"{away}, and at least {MIN_STEPS} more are needed; {do}{' with all its engines' if away else ''}"
        )
    return left


def steps_with_lost_engine(
    lines: Sequence[StepLine], evaluations: Sequence[Evaluation], *, max_staleness: int
) -> frozenset[int]:
    """Steps in which an engine was away. An engine that an evaluation had is not lost.

    - A line tells of the sync before it, so an engine that this left out may have been lost in the step before, too.
    - One whose requests went on elsewhere, even if it was back before the next sync.
    - The only one: its groups begin anew, so tokens are lost although no group failed. (Workers tell what they lost a
      moment after a failure, hence the lines beside it.) No more than S steps have their groups then; the next one
      waits until the engine is back.
    """
    lines = sorted(lines, key=lambda line: line.step)
    found: set[int] = set()
    for line in lines:
        num_with_evaluation = int(any(evaluation.may_pass_by(line.step) for evaluation in evaluations))
        if line.num_skipped > num_with_evaluation:
            found |= {line.step - 1, line.step}
    for before, line in itertools.pairwise(lines):
        if line.num_rescued > before.num_rescued:
            found.add(line.step)
    for first, before, line, after in zip(lines, lines[1:], lines[2:], lines[3:], strict=False):
        if line.attempt_tokens > before.attempt_tokens and after.num_failed == first.num_failed:
            found |= set(range(line.step, line.step + max_staleness + 2))
    return frozenset(found & {line.step for line in lines})


def evaluation_under_way(ended: Sequence[Evaluation], setup: Setup) -> Evaluation | None:
    """One beside training that may be under way, or ended with the run; nobody has written of it."""
    every, first = setup.eval_every, setup.resumed_from_step
    if not ended and setup.eval_at_start:
        return Evaluation(version=first)
    if not every:
        return None
    newest, last_step = max(((one.version, one.last_step or 0) for one in ended), default=(first, first))
    return Evaluation(version=max((newest // every + 1) * every, last_step))
