"""The loops of a run: prompts in, groups generated, batches built, steps taken.

    prompt_loop   source ──prompt──> buffer.admit              waits for a free slot        <──────────────┐
    rollout_loop  buffer.claim ──item──> rollout worker ──group──> buffer.finish | filter | fail           │ release
    batch_loop    buffer.take(step) ──groups──> advantages, packing ──> queue(1)                           │
    train_loop    queue ──batch──> age check ──> learner ──> SyncPump.publish ──> engines live ──> on_live ┘

Nothing flows backwards except `release`, which frees the slots of a step once its weights are live.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.errors import BufferClosed, NoProgress
from rollout.types import Group
from trainer.algorithms.group_filter import GroupFilterError, own_group_filter
from trainer.data.batch import TrainBatch
from trainer.data.build import build_train_batch
from trainer.driver.evaluation import EvaluationFailed, keep_answers
from trainer.driver.step_metrics import (
    DataWait,
    GroupFlow,
    StepRecorder,
    StepTimes,
    buffer_record,
    evaluation_line,
    failed_evaluation_line,
    sync_record,
)
from trainer.errors import GradientsDiverged, first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Sequence

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from rollout.types import RolloutRequest
    from trainer.algorithms.group_filter import OwnFilter
    from trainer.config.schema import RunConfig
    from trainer.driver.checkpointing import Checkpointer, RunState
    from trainer.driver.evaluation import Evaluator
    from trainer.driver.fleet import Fleet
    from trainer.driver.supervise import Supervisor
    from trainer.driver.weight_updates import OwnDevices, SyncPump
    from trainer.learner.group import LearnerGroup
    from trainer.learner.step_stats import StepResult
    from trainer.telemetry.console import Progress
    from trainer.telemetry.session import Telemetry
    from weight_sync.types import SyncReport


log = logging.getLogger(__name__)


class StalenessBroken(RuntimeError):
    """A group is older than the bound when it is about to be trained: a bug, never a condition to live with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    groups: Sequence[Group]
    built: TrainBatch
    result: StepResult
    waited: DataWait
    ended_at: float
    """On the monotonic clock."""


class Stepper:
    """Takes the steps of a run one after the other, and knows what became of the last one."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._unwritten: _Trained | None = None
        self._line: dict[str, object] | None = None

    async def take(self, parts: Parts, groups: Sequence[Group], built: TrainBatch, waited: DataWait) -> None:
        """One step of the learner. Once begun it goes on where the caller is cancelled: see `ended`."""
        check_ages(groups, step=built.step, max_staleness=parts.cfg.mode.max_staleness)
        await parts.devices.to_learner()
        self._task = asyncio.create_task(self._take(parts, groups, built, waited), name="step")
        await asyncio.shield(self._task)

    async def _take(self, parts: Parts, groups: Sequence[Group], built: TrainBatch, waited: DataWait) -> None:
        step = built.step
        with parts.telemetry.tracer.span("learner", f"step {step}", tokens=built.num_tokens):
            result = await parts.learner.train_step(built)
        if (left_out := result.metrics.get("critic_skipped_updates")) is not None and left_out.sum:
            log.warning(
                "%d updates of the critic in step %d were left out: their gradient is not finite; lower critic.lr or "
                "critic.max_grad_norm",
                left_out.sum,
                step + 1,
            )
        if (skipped := result.metrics.get("skipped_steps")) is not None and skipped.sum:
            log.warning(
                "step %d was skipped: a gradient is not finite, so no weight has changed; look for wrong rewards and "
                "log-probs in its trajectories, or lower the learning rate (learner.max_skipped_steps says how often)",
                step + 1,
            )
        parts.state.step = step + 1
        self._unwritten = _Trained(
            groups=groups,
            built=built,
            result=result,
            waited=waited,
            ended_at=asyncio.get_running_loop().time(),
        )

    async def ended(self, progress: Progress) -> bool:
        """Whether the learner stands with whole weights: after a step that went well, or one that was refused before it
        changed any. Waits for the one that it is in, which has a deadline."""
        if self._task is None:
            return True
        if not self._task.done():
            with progress.phase("finishing the step that the learner is in"):
                await asyncio.wait({self._task})
        return not self._task.cancelled() and isinstance(self._task.exception(), GradientsDiverged | None)

    def close_line(self, parts: Parts) -> None:
        """The new weights are on their way: make the line of the step, as things are now."""
        done, cfg = self._unwritten, parts.cfg
        assert done is not None
        waited_for_sync_s = asyncio.get_running_loop().time() - done.ended_at - parts.devices.offload_s
        times = StepTimes(waited_for_data=done.waited, waited_for_sync_s=waited_for_sync_s)
        step, max_staleness = done.built.step, cfg.mode.max_staleness
        record = parts.recorder.step_record(done.groups, done.built, done.result, times, max_staleness=max_staleness)
        passed = _surroundings(parts, done.groups)
        self._line = {"step": step + 1, "version": step + 1, "time_s": parts.state.time_s, **record, **passed}

    async def write_line(self, parts: Parts) -> None:
        """The line of the last step, with an evaluation that waits for one; nothing if it is written. It is written to
        its end where the caller is cancelled, and the next one waits for that."""
        if self._unwritten is not None:
            if self._line is None:
                self.close_line(parts)
            line, self._line, self._unwritten = self._line, None, None
            assert line is not None
            self._writing = asyncio.create_task(parts.telemetry.write_step(with_evaluation(parts, line)), name="line")
        if self._writing is not None:
            await asyncio.shield(self._writing)


async def rescue(parts: Parts) -> None:
    """After a failure elsewhere: the step that the learner is in comes to its end, is written and saved.

    Nothing is saved after a failure of the learner, whose weights are whatever they are. Raises nothing: a failure is
    being told already, so what goes wrong here is logged.

    Waits for: the step, and the save. Unblocked by: their deadlines; cancellation.
    """
    state = parts.state
    went_well = await parts.stepper.ended(parts.telemetry.progress)
    await _try(parts.stepper.write_line(parts), "the line of the last step could not be written")
    if went_well and not parts.learner.is_broken and state.step > (state.resumed_from_step or 0):
        save = parts.checkpointer.at_end(state.step, is_interrupted=True)
        await _try(save, "what came after the last checkpoint could not be saved")


async def _try(todo: Awaitable[None], else_say: str) -> None:
    try:
        await todo
    except Exception as error:  # noqa: BLE001 - the failure that came first is the one to be told
        log.warning("%s: %s", else_say, one_line(first_cause(error)))


def check_ages(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """The promise, asserted where it counts; a baseline is no older than what is compared with it.

    Raises:
        StalenessBroken: with every group that is too old.
    """
    old = {g.group_id: g.start_version for g in groups if step - g.start_version > max_staleness}
    tokens = {g.group_id: min(v) for g in groups if (v := [v for t in g.generated for v in t.policy_versions])}
    old |= {group: version for group, version in tokens.items() if step - version > max_staleness}
    if old:
        raise StalenessBroken(
            f"step {step} with max_staleness={max_staleness} got groups that began at version "
            f"{', '.join(f'{version} (group {group})' for group, version in sorted(old.items()))}; "
            "this is a bug in the work buffer"
        )


def _surroundings(parts: Parts, groups: Sequence[Group]) -> dict[str, object]:
    """Buffer and weight sync as they are now, and how the groups of the step got here."""
    telemetry = parts.telemetry
    stats, num_replicas = parts.buffer.stats(), parts.cfg.rollout.num_replicas
    record = {
        **buffer_record(stats),
        **parts.flow.step_record(
            groups,
            num_replicas=num_replicas,
            slot_wait_s=stats.slot_wait_s,
            engines_idle_frac=parts.workers.idle_engines.take_frac(num_replicas=num_replicas),
        ),
        "response/failed_frac": parts.state.failed_responses.take_frac(),
        "telemetry/sink_errors": telemetry.writer.num_errors,
        "telemetry/trace_dropped": telemetry.tracer.num_dropped,
    }
    if telemetry.recorder is not None:
        record["telemetry/trajectory_errors"] = telemetry.recorder.num_errors
        record["telemetry/trajectories_left_out"] = telemetry.recorder.num_skipped
    report = parts.pump.last_report
    record |= {f"data/{name}": value for name, value in parts.source.record(groups).items()}
    record |= parts.workers.load_record | parts.devices.record()
    return record | sync_record(report, version_lag=parts.state.step - report.version + report.version_lag)


Ready = tuple[list[Group], TrainBatch]
MIN_USABLE = 2
"""A group with fewer judged answers has nothing to compare."""
REWARDS_FAILED = "rewards_failed"
CLOCK_S = 1e-3


class Stalled(RuntimeError):
    """No optimizer step ended for longer than `trainer.stall_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loops work with; built by `Driver`."""

    cfg: RunConfig
    state: RunState
    telemetry: Telemetry
    source: PromptSource
    buffer: RolloutBuffer
    workers: Fleet
    learner: LearnerGroup
    pump: SyncPump
    devices: OwnDevices
    evaluator: Evaluator
    checkpointer: Checkpointer
    batches: asyncio.Queue[Ready] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    recorder: StepRecorder = field(default_factory=StepRecorder)
    flow: GroupFlow = field(default_factory=GroupFlow)
    stepper: Stepper = field(default_factory=Stepper)
    evaluations: set[asyncio.Task[None]] = field(default_factory=set)
    """Those that run beside training."""
    batches_over: asyncio.Event = field(default_factory=asyncio.Event)
    """The batch of the last step is made."""
    generation_over: asyncio.Event = field(default_factory=asyncio.Event)
    """No more groups come, and none is needed."""

    @property
    def needs_groups(self) -> bool:
        """Not any more once the last batch is made or the run is to end; what makes groups cannot fail it then."""
        return not (self.batches_over.is_set() or self.generation_over.is_set() or self.state.stop_reason is not None)

    @property
    def is_trained(self) -> bool:
        """All steps are trained and the last version is live: from here on engines do nothing but evaluate."""
        return self.generation_over.is_set() and self.pump.live_version >= self.state.step


def start(parts: Parts, supervisor: Supervisor) -> None:
    """All loops but the one that trains."""
    supervisor.spawn(_while_needed(parts, prompt_loop(parts)), name="prompt_loop", may_end=True)
    supervisor.spawn(_while_needed(parts, rollout_loop(parts)), name="rollout_loop", may_end=True)
    supervisor.spawn(_while_needed(parts, batch_loop(parts)), name="batch_loop", may_end=True)
    supervisor.spawn(parts.pump.run(), name="sync_loop")


async def _while_needed(parts: Parts, loop: Coroutine[Any, Any, None]) -> None:
    """Once no group is needed, nothing that makes batches fails the run: a policy that reached its accuracy gives the
    filters little to keep."""
    try:
        await loop
    except Exception as error:
        if parts.needs_groups:
            raise
        if not isinstance(first_cause(error), BufferClosed):
            log.warning("no more groups, while the run ends anyway: %s", one_line(first_cause(error)))
        parts.generation_over.set()


async def prompt_loop(parts: Parts) -> None:
    """Consumes: the prompt source. Waits for: a free slot. Unblocked by: release, filter, drop; close."""
    while True:
        await parts.buffer.wait_for_slot()
        item = parts.buffer.readmit()
        if item is None:
            item = parts.buffer.admit(parts.source.next(parts.state.live_version))
        parts.flow.admitted(item.group_id)


async def rollout_loop(parts: Parts) -> None:
    """Consumes: admitted prompts. Waits for: an admission. Unblocked by: admit, a retry; close.

    Groups run side by side; their number is bounded by the buffer's slots.
    """
    own = own_group_filter(parts.cfg.algorithm)
    async with asyncio.TaskGroup() as groups:
        while True:
            item = await parts.buffer.claim()
            parts.state.mark_dispatched()
            groups.create_task(_roll_out(parts, item, own), name=f"group {item.group_id}")


async def _roll_out(parts: Parts, item: RolloutRequest, own: OwnFilter | None) -> None:
    started_at = time.time()
    parts.flow.claimed(item.group_id)
    try:
        group = await parts.workers.run_group(item)
    except Exception as error:  # noqa: BLE001 - the edge of one group: its failure is counted and retried, not the run's
        await _give_back(parts, item, error)
        return
    name, tokens = f"group {item.group_id}", group.num_generated_tokens
    parts.telemetry.tracer.add_span(
        "groups", name, start_s=started_at, end_s=time.time(), overlapping=True, tokens=tokens
    )
    parts.recorder.count_generated(group)
    parts.state.failed_responses.count(group)
    parts.source.observe(group)
    try:
        reason = filter_reason(group, filter_zero_variance=parts.cfg.algorithm.filter_zero_variance, own=own)
    except GroupFilterError:  # ends the run; what it was given is written down
        await parts.telemetry.record_group(group, "filtered", "group_filter_failed")
        raise
    await parts.telemetry.record_group(group, "filtered" if reason else "ready", reason)
    if reason:
        parts.flow.filtered(group)
        failure = next((t.error for t in group.trajectories if t.error), "") if reason == REWARDS_FAILED else ""
        parts.buffer.filter(item.group_id, reason, failure=failure)
    else:
        parts.flow.finished(group)
        parts.buffer.finish(group)


async def _give_back(parts: Parts, item: RolloutRequest, error: Exception) -> None:
    """An attempt raised: its group is tried again or dropped, and written down with the reason.

    Raises:
        NoProgress: it was one too many.
    """
    reason = one_line(first_cause(error))
    try:
        outcome = parts.buffer.fail(item.group_id, error)
    except NoProgress:
        await parts.telemetry.record_failure(item, "dropped", reason)
        raise
    parts.flow.failed(item.group_id, outcome)
    log.warning("group %d (%s) failed and was %s: %s", item.group_id, item.prompt.prompt_id, outcome, reason)
    await parts.telemetry.record_failure(item, outcome, reason)


def filter_reason(group: Group, *, filter_zero_variance: bool, own: OwnFilter | None = None) -> str:
    """Why a finished group is replaced before it costs a training slot; empty if it is to be trained."""
    num_judged = sum(t.status != "failed" for t in group.trajectories)
    if num_judged < min(MIN_USABLE, len(group.trajectories)):
        return REWARDS_FAILED
    if filter_zero_variance and group.has_equal_rewards:
        return "zero_variance"
    return "" if own is None else own(group)


async def batch_loop(parts: Parts) -> None:
    """Consumes: finished groups. Waits for: the groups of the next step, then room in the queue. Unblocked by:
    finish; the train loop taking a batch; close."""
    cfg = parts.cfg
    for step in range(parts.state.step, cfg.trainer.total_steps):
        groups = await parts.buffer.take(step)
        parts.flow.taken(groups)
        with parts.telemetry.tracer.span("batch_loop", f"build {step}"):
            built = await asyncio.to_thread(
                build_train_batch,
                groups,
                step=step,
                algorithm=cfg.algorithm,
                num_ranks=cfg.learner.num_ranks,
                max_tokens_per_micro_batch=cfg.learner.max_tokens_per_micro_batch,
                max_response_tokens=cfg.rollout.max_response_tokens,
            )
        await parts.batches.put((groups, built))
    parts.batches_over.set()


async def train_loop(parts: Parts) -> None:
    """Consumes: batches. Waits for: a batch, the learner, the pack. Unblocked by: the batch loop; a request to stop,
    which takes effect between two steps.

    A run that reached its accuracy trains one more step, if it finds groups for it, whose line carries that evaluation
    or a newer one.
    """
    state, total = parts.state, parts.cfg.trainer.total_steps
    while state.step < total and not state.stop_requested.is_set():
        began, evaluated_s = asyncio.get_running_loop().time(), parts.evaluator.running_s
        parts.telemetry.progress.update(waiting_for="groups")
        ready = await _next_batch(parts)
        if ready is None:
            break
        parts.telemetry.progress.update(waiting_for="")
        waited = DataWait(
            whole_s=asyncio.get_running_loop().time() - began,
            beside_evaluation_s=parts.evaluator.running_s - evaluated_s,
        )
        await parts.stepper.take(parts, *ready, waited)
        await parts.pump.publish(state.step)
        parts.stepper.close_line(parts)
        is_last = state.step >= total or state.stop_reason is not None
        if is_last:
            parts.generation_over.set()
        else:  # the last line waits for the last evaluation
            await evaluate_if_blocking(parts)
            # Before the checkpoint: a run that goes on from there does not come back for the line.
            await parts.stepper.write_line(parts)
        await parts.checkpointer.after_step(state.step)
        if is_last:
            break
    await finish(parts)


async def _next_batch(parts: Parts) -> Ready | None:
    """The next batch, or None once the run is asked to stop or none comes. Fails when nothing comes for too long."""
    if parts.batches.empty():
        parts.buffer.grow_slots()
    get = asyncio.create_task(parts.batches.get())
    stops = [asyncio.create_task(event.wait()) for event in (parts.state.stop_requested, parts.generation_over)]
    limit_s, now = parts.cfg.trainer.stall_timeout_s, asyncio.get_running_loop().time
    began = now()
    try:
        # An evaluation keeps weights from its engine, and groups may have to wait for these; it has its own deadline.
        # A timer may be early by the resolution of its clock.
        while (left_s := limit_s - min(now() - began, parts.evaluator.idle_s)) > CLOCK_S:
            await asyncio.wait({get, *stops}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if get.done():
                return get.result()
            if any(stop.done() for stop in stops):
                return None
        if parts.state.stop_reason is not None:
            return None  # one step more was welcome, and not needed
        raise Stalled(
            f"no batch for step {parts.state.step} within trainer.stall_timeout_s={limit_s:g}: "
            f"{parts.buffer.waiting_for or 'the buffer waits for nothing'}; {parts.buffer.stats()}"
            + (f"; engines lost: {parts.workers.lost_engines}" if parts.workers.lost_engines else "")
        )
    finally:
        for task in (get, *stops):
            task.cancel()


async def finish(parts: Parts) -> None:
    """After the last step: generation ends; the step is saved, goes live, is evaluated, written and exported.

    An interrupt leaves out the last evaluation and the export, and the run says then that it was interrupted. Engines
    that are lost once the last version is live, and rollout workers, cost an evaluation at most: see `is_trained`.

    Waits for: the last sync, and each evaluation. Unblocked by: their deadlines; an interrupt shortens those of the
    evaluations to `trainer.shutdown_timeout_s`. A process that is killed meanwhile has saved the step, not its line.
    """
    step, interrupt = parts.state.step, parts.state.stop_requested
    parts.generation_over.set()
    parts.buffer.close()  # what is being generated ends, and is owed by the checkpoint
    try:
        await parts.checkpointer.at_end(step, is_interrupted=interrupt.is_set())
        with parts.telemetry.progress.phase("bringing the last weights to the engines"):
            await parts.pump.drained()
        if parts.evaluations:
            with parts.telemetry.progress.phase("waiting for the evaluation beside training"):
                await asyncio.wait(parts.evaluations)
        await evaluate_at_end(parts)
    finally:
        await parts.stepper.write_line(parts)
    if interrupt.is_set():
        parts.state.stop_reason = "interrupted"  # also where the accuracy was reached before: there is no export
    else:
        await parts.devices.to_learner()  # an export gathers whole parameters on the device
        await parts.checkpointer.export()
    await parts.checkpointer.at_end(step, is_interrupted=interrupt.is_set())  # it may have come meanwhile


async def on_live(parts: Parts, supervisor: Supervisor, report: SyncReport) -> None:
    """A version is live: free the slots of its step, which wakes the prompt loop, and evaluate it if that is due."""
    version = report.version
    parts.state.live_version = version
    parts.buffer.release(version - 1, version=version)
    await evaluate_if_beside(parts, supervisor, version)


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
