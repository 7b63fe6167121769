"""The evaluations of a run: when they take place, and what becomes of their results.

Beside training they are tasks of their own; with `trainer.eval_blocking`, and at the end, the caller waits. Either way
one that fails is counted and told, and ends nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from trainer.pipeline.evaluate import EvaluationFailed
from trainer.pipeline.evaluation_answers import keep_answers
from trainer.pipeline.records import evaluation_line, failed_evaluation_line

if TYPE_CHECKING:
    from trainer.pipeline.loops import Parts
    from trainer.pipeline.supervise import Supervisor

log = logging.getLogger(__name__)


def with_evaluation(parts: Parts, record: dict[str, object]) -> dict[str, object]:
    """The record with the newest evaluation that ended since the last line, if any, and how many have failed."""
    if not parts.evaluator.is_possible:
        return record
    ended, parts.state.unreported[:] = list(parts.state.unreported), []
    newest = ended[-1] if ended else {}
    return {**record, **newest, "eval/failed_runs": parts.state.num_failed_evaluations}


async def evaluate_now(parts: Parts, entered: asyncio.Event | None = None, *, is_shared: bool = False) -> None:
    """One evaluation, from beginning to end; its result goes into the state and onto a line, and its answers into a
    file, which nobody waits for. One that fails is counted and told, and training goes on."""
    state, hurrying = parts.state, asyncio.create_task(_hurry_when_interrupted(parts))
    try:
        with parts.telemetry.tracer.span("evaluation", "evaluate", overlapping=True):
            evaluated = await parts.evaluator.run(entered or asyncio.Event(), is_shared=is_shared)
    except EvaluationFailed as error:
        await _report_failure(parts, error)
        return
    finally:
        hurrying.cancel()
    evaluation = evaluated.summary
    of_sets = {name: one.summary for name, one in evaluated.sets.items()}
    state.add_evaluation(evaluation, evaluated.record(), {name: one.accuracy for name, one in of_sets.items()})
    line = {**evaluation_line(evaluation, step=state.step, time_s=state.time_s), **evaluated.line()}
    line["answers"] = await keep_answers(parts.telemetry, evaluated.answers, version=evaluation.version)
    await parts.telemetry.write_evaluation(line)
    log.info("version %d: held-out accuracy %.3f", evaluation.version, evaluation.accuracy)
    for name, one in of_sets.items():
        log.info("version %d: accuracy on %s %.3f", one.version, name, one.accuracy)
    parts.telemetry.progress.update(accuracy=evaluation.accuracy, accuracy_version=evaluation.version)
    target = parts.cfg.trainer.stop_at_accuracy
    if target is not None and evaluation.accuracy >= target:
        state.reached = state.reached or evaluation
        state.stop("accuracy_reached")


async def _report_failure(parts: Parts, error: EvaluationFailed) -> None:
    state = parts.state
    state.num_failed_evaluations += 1
    version = state.live_version if error.version is None else error.version
    line = failed_evaluation_line(
        str(error), version=version, step=state.step, time_s=state.time_s, seconds=error.time_s
    )
    file = await keep_answers(parts.telemetry, error.answers, version=version, failed=str(error))
    kept = "none of its answers is kept" if file is None else f"its answers are in {file}"
    log.error("the evaluation of version %d failed and gives no accuracy: %s (%s)", version, error, kept)
    await parts.telemetry.write_evaluation({**line, "answers": file})


async def _hurry_when_interrupted(parts: Parts) -> None:
    """Consumes: nothing. Waits for: an interrupt. Unblocked by: cancellation, when the evaluation has ended."""
    await parts.state.stop_requested.wait()
    limit_s = parts.cfg.trainer.shutdown_timeout_s
    parts.evaluator.hurry(limit_s, f"the run was interrupted, which leaves trainer.shutdown_timeout_s={limit_s:g}")


async def evaluate_if_blocking(parts: Parts) -> None:
    """With `trainer.eval_blocking`: a due evaluation of exactly this step's version, while the learner waits."""
    if parts.cfg.trainer.eval_blocking and _is_due(parts, parts.state.step):
        await parts.pump.drained()
        await evaluate_now(parts, is_shared=True)


async def evaluate_if_beside(parts: Parts, supervisor: Supervisor, version: int) -> None:
    """Without `trainer.eval_blocking`: a due evaluation of the version that has just become live, but not of the last
    one, which `evaluate_at_end` looks after."""
    trainer = parts.cfg.trainer
    if not trainer.eval_blocking and version < trainer.total_steps and _is_due(parts, version):
        await begin_evaluation(parts, supervisor)


def _is_due(parts: Parts, version: int) -> bool:
    """An interrupted run does not begin another one."""
    return parts.evaluator.is_due(version) and not parts.state.stop_requested.is_set()


async def evaluate_at_start(parts: Parts, supervisor: Supervisor) -> None:
    """The version that the run begins with, if that is asked for: beside training, or before it."""
    trainer = parts.cfg.trainer
    if not (parts.evaluator.is_possible and trainer.eval_at_start):
        return
    if trainer.eval_blocking:
        await evaluate_now(parts, is_shared=True)
    else:
        await begin_evaluation(parts, supervisor)


async def evaluate_at_end(parts: Parts) -> None:
    """The last version, once: because that is asked for, or a periodic evaluation is due. Not of an interrupted run."""
    evaluator, step = parts.evaluator, parts.state.step
    is_asked_for = parts.cfg.trainer.eval_at_end and evaluator.is_possible and evaluator.last_version < step
    if (is_asked_for or evaluator.is_due(step)) and not parts.state.stop_requested.is_set():
        with parts.telemetry.progress.phase(f"evaluating version {step}"):
            await evaluate_now(parts, is_shared=True)


async def begin_evaluation(parts: Parts, supervisor: Supervisor) -> None:
    """Evaluate beside training. Returns once no commit can change the version any more, so that it is the one that
    is live now."""
    entered = asyncio.Event()
    task = supervisor.spawn(evaluate_now(parts, entered), name="evaluation", may_end=True)
    parts.evaluations.add(task)
    task.add_done_callback(parts.evaluations.discard)
    await entered.wait()
