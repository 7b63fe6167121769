"""Which steps of a run tell who waits for whom. Pure functions over records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.advise.facts import Evaluation

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from trainer.advise.facts import Setup, StepLine

MIN_STEPS = 3
"""Fewer steady steps say nothing."""


class TooFewSteps(Exception):
    """The run has not enough steady steps to say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Steps that tell who waits for whom."""

    lines: list[StepLine]
    num_lost: int
    """Steps that would be among them if they had had all engines."""


def steady(
    lines: Sequence[StepLine], *, max_staleness: int, has_ended: bool = False, lost: Collection[int] = ()
) -> Steady:
    """Without the first S + 2 steps: until then slots fill up for the first time, kernels compile and caches warm up.
    Without the last S of a run that `has_ended`: no prompt is left for its engines. Without the steps `lost`, in which
    an engine was away. Without those until the last time that slots were opened, if enough steps have come after it.

    Raises:
        TooFewSteps: nearly nothing is left.
    """
    num_last = max_staleness if has_ended else 0
    inner = sorted(lines, key=lambda line: line.step)[max_staleness + 2 : len(lines) - num_last]
    since = next((i for i in range(len(inner) - 1, 0, -1) if inner[i].num_slots != inner[i - 1].num_slots), 0)
    found = _without(lost, inner[since:])
    if len(found.lines) < MIN_STEPS:
        found = _without(lost, inner)
    if len(found.lines) < MIN_STEPS:
        last, do = (f", the last {num_last} empty it", "give a longer run") if num_last else ("", "let the run go on")
        away = f", {found.num_lost} of the others had a lost engine" if found.num_lost else ""
        raise TooFewSteps(
            f"{len(lines)} steps since the start were recorded; the first {max_staleness + 2} fill the pipeline{last}"
            f"{away}, and at least {MIN_STEPS} more are needed; {do}{' with all its engines' if away else ''}"
        )
    return found


def _without(lost: Collection[int], lines: Sequence[StepLine]) -> Steady:
    left = [line for line in lines if line.step not in lost]
    return Steady(lines=left, num_lost=len(lines) - len(left))


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
    found |= {lines[i].step for i in _rises(line.num_rescued for line in lines)}
    told = [line for line in lines if line.attempt_tokens is not None]
    for i in _rises(line.attempt_tokens for line in told):
        if 2 <= i < len(told) - 1 and told[i + 1].num_failed == told[i - 2].num_failed:
            found |= set(range(told[i].step, told[i].step + max_staleness + 2))
    return frozenset(found & {line.step for line in lines})


def _rises(totals: Iterable[float | None]) -> list[int]:
    """Where a total is above all before it. One below them only lacks what some worker did not tell this time."""
    found, highest = list[int](), 0.0
    for i, total in enumerate(totals):
        if total is not None and total > highest:
            found.append(i)
            highest = total
    return found


def evaluation_under_way(ended: Sequence[Evaluation], setup: Setup) -> Evaluation | None:
    """One beside training that may be under way, or ended with the run; nobody has written of it. `ended` are those of
    the latest process."""
    every, first = setup.eval_every, setup.resumed_from_step
    if not ended and setup.eval_at_start:
        return Evaluation(version=first)
    if not every:
        return None
    newest, last_step = max(((one.version, one.last_step or 0) for one in ended), default=(first, first))
    return Evaluation(version=max((newest // every + 1) * every, last_step))
