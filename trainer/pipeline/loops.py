"""The four loops of a run, and who wakes whom.

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
from typing import TYPE_CHECKING

from rollout.types import Group
from trainer.data.batcher import BatchLimits, BuiltBatch, build_train_batch
from trainer.pipeline.flow import GroupFlow
from trainer.pipeline.records import StepRecorder, StepTimes, buffer_record, sync_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.buffer.items import WorkItem
    from rollout.buffer.work_buffer import WorkBuffer
    from rollout.prompts.source import PromptSource
    from trainer.config.schema import RunConfig
    from trainer.learner.worker import LearnerGroup
    from trainer.pipeline.device_turns import OwnDevices
    from trainer.pipeline.evaluate import Evaluator
    from trainer.pipeline.resume import Checkpointer
    from trainer.pipeline.state import RunState
    from trainer.pipeline.supervise import Supervisor
    from trainer.pipeline.sync_pump import SyncPump
    from trainer.pipeline.telemetry import Telemetry
    from trainer.pipeline.workers import WorkerPool
    from weight_sync.types import SyncReport

log = logging.getLogger(__name__)

Ready = tuple[list[Group], BuiltBatch]
MIN_USABLE = 2
"""A group with fewer judged answers has nothing to compare."""


class StalenessBroken(RuntimeError):
    """A group is older than the bound when it is about to be trained: a bug, never a condition to live with."""


class Stalled(RuntimeError):
    """No optimizer step ended for longer than `trainer.stall_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loops work with; built by `compose`."""

    cfg: RunConfig
    state: RunState
    telemetry: Telemetry
    source: PromptSource
    buffer: WorkBuffer
    workers: WorkerPool
    learner: LearnerGroup
    pump: SyncPump
    devices: OwnDevices
    evaluator: Evaluator
    checkpointer: Checkpointer
    batches: asyncio.Queue[Ready] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    recorder: StepRecorder = field(default_factory=StepRecorder)
    flow: GroupFlow = field(default_factory=GroupFlow)


async def prompt_loop(parts: Parts) -> None:
    """Consumes: the prompt source. Waits for: a free slot. Unblocked by: release, filter, drop; close."""
    while True:
        await parts.buffer.wait_for_slot()
        item = parts.buffer.readmit()
        if item is None:
            item = parts.buffer.admit(parts.source.next())
        parts.flow.admitted(item.group_id)


async def rollout_loop(parts: Parts) -> None:
    """Consumes: admitted prompts. Waits for: an admission. Unblocked by: admit, a retry; close.

    Groups run side by side; their number is bounded by the buffer's slots.
    """
    async with asyncio.TaskGroup() as groups:
        while True:
            item = await parts.buffer.claim()
            parts.state.mark_dispatched()
            groups.create_task(_roll_out(parts, item), name=f"group {item.group_id}")


async def _roll_out(parts: Parts, item: WorkItem) -> None:
    started_at = time.time()
    parts.flow.claimed(item.group_id)
    try:
        group = await parts.workers.run_group(item)
    except Exception as error:  # noqa: BLE001 - the edge of one group: its failure is counted and retried, not the run's
        outcome = parts.buffer.fail(item.group_id, error)
        parts.flow.failed(item.group_id, outcome)
        log.warning("group %d (%s) failed and was %s: %s", item.group_id, item.prompt.prompt_id, outcome, error)
        return
    parts.telemetry.tracer.add_span(
        "groups", f"group {item.group_id}", start_s=started_at, end_s=time.time(), overlapping=True
    )
    parts.recorder.count_generated(group)
    reason = filter_reason(group, filter_zero_variance=parts.cfg.algorithm.filter_zero_variance)
    await parts.telemetry.record_group(group, "filtered" if reason else "ready", reason)
    if reason:
        parts.flow.filtered(group)
        parts.buffer.filter(item.group_id, reason)
    else:
        parts.flow.finished(group)
        parts.buffer.finish(group)


def filter_reason(group: Group, *, filter_zero_variance: bool) -> str:
    """Why a finished group is replaced before it costs a training slot; empty if it is to be trained."""
    num_judged = sum(t.status != "failed" for t in group.trajectories)
    if num_judged < min(MIN_USABLE, len(group.trajectories)):
        return "rewards_failed"
    if filter_zero_variance and group.has_equal_rewards:
        return "zero_variance"
    return ""


async def batch_loop(parts: Parts) -> None:
    """Consumes: finished groups. Waits for: the groups of the next step, then room in the queue. Unblocked by:
    finish; the train loop taking a batch; close."""
    cfg = parts.cfg
    limits = BatchLimits(
        num_ranks=cfg.learner.num_ranks,
        max_tokens_per_micro_batch=cfg.learner.max_tokens_per_micro_batch,
        max_response_tokens=cfg.rollout.max_response_tokens,
    )
    for step in range(parts.state.step, cfg.trainer.total_steps):
        groups = await parts.buffer.take(step)
        parts.flow.taken(groups)
        with parts.telemetry.tracer.span("batch_loop", f"build {step}"):
            built = await asyncio.to_thread(
                build_train_batch, groups, step=step, algorithm=cfg.algorithm, limits=limits
            )
        await parts.batches.put((groups, built))


async def train_loop(parts: Parts) -> None:
    """Consumes: batches. Waits for: a batch, the learner, the pack. Unblocked by: the batch loop; a request to stop,
    which takes effect between two steps.

    A run that reached its accuracy trains one more step, whose line carries that evaluation or a newer one.
    """
    state, total = parts.state, parts.cfg.trainer.total_steps
    while state.step < total and not state.stop_requested.is_set():
        waited_from = time.monotonic()
        parts.telemetry.progress.update(waiting_for="groups")
        ready = await _next_batch(parts)
        if ready is None:
            break
        parts.telemetry.progress.update(waiting_for="")
        waited_for_data_s = time.monotonic() - waited_from
        record = await _train_step(parts, *ready, waited_for_data_s=waited_for_data_s)
        is_last = state.step >= total or state.stop_reason is not None
        if not is_last:  # the last line waits for the last evaluation
            await evaluate_if_blocking(parts)
            # Before the checkpoint: a run that goes on from there does not come back for the line.
            await parts.telemetry.write_step(with_evaluation(parts, record))
        await parts.checkpointer.after_step(state.step)
        if is_last:
            await finish(parts, record)
            return
    await finish(parts, None)


async def _next_batch(parts: Parts) -> Ready | None:
    """The next batch, or None once the run is asked to stop. Fails when nothing comes for too long."""
    get = asyncio.create_task(parts.batches.get())
    stop = asyncio.create_task(parts.state.stop_requested.wait())
    limit_s = parts.cfg.trainer.stall_timeout_s
    try:
        await asyncio.wait({get, stop}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if get.done():
            return get.result()
        if stop.done():
            return None
        raise Stalled(
            f"no batch for step {parts.state.step} within trainer.stall_timeout_s={limit_s:g}: "
            f"{parts.buffer.waiting_for or 'the buffer waits for nothing'}; {parts.buffer.stats()}"
        )
    finally:
        get.cancel()
        stop.cancel()


async def _train_step(
    parts: Parts, groups: Sequence[Group], built: BuiltBatch, *, waited_for_data_s: float
) -> dict[str, object]:
    step, tracer = built.batch.step, parts.telemetry.tracer
    check_ages(groups, step=step, max_staleness=parts.cfg.mode.max_staleness)
    await parts.devices.to_learner()
    with tracer.span("learner", f"step {step}", tokens=built.batch.num_tokens):
        result = await parts.learner.train_step(built.batch)
    waited_from = time.monotonic()
    await parts.pump.publish(step + 1)
    parts.state.step = step + 1
    times = StepTimes(waited_for_data_s=waited_for_data_s, waited_for_sync_s=time.monotonic() - waited_from)
    record = parts.recorder.step_record(groups, built, result, times, max_staleness=parts.cfg.mode.max_staleness)
    passed = _surroundings(parts, groups)
    return {"step": step + 1, "version": step + 1, "time_s": parts.state.time_s, **record, **passed}


def check_ages(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """The promise, asserted where it counts; a baseline is no older than what is compared with it.

    Raises:
        StalenessBroken: with every group that is too old.
    """
    old = {g.group_id: g.start_version for g in groups if step - g.start_version > max_staleness}
    tokens = {g.group_id: min(v) for g in groups if (v := [v for t in g.generated for v in t.versions])}
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
    stats = parts.buffer.stats()
    record = {
        **buffer_record(stats),
        **parts.flow.step_record(groups, num_replicas=parts.cfg.rollout.num_replicas, slot_wait_s=stats.slot_wait_s),
        "telemetry/sink_errors": telemetry.writer.num_errors,
        "telemetry/trace_dropped": telemetry.tracer.num_dropped,
    }
    if telemetry.recorder is not None:
        record["telemetry/trajectory_errors"] = telemetry.recorder.num_errors
    report = parts.pump.last_report
    record |= parts.workers.load_record | parts.devices.record()
    return record | sync_record(report, version_lag=parts.state.step - report.version + report.version_lag)


def with_evaluation(parts: Parts, record: dict[str, object]) -> dict[str, object]:
    """The record with the newest evaluation that ended since the last line, if any."""
    ended, parts.state.unreported[:] = list(parts.state.unreported), []
    return {**record, **ended[-1].record()} if ended else record


async def finish(parts: Parts, record: dict[str, object] | None) -> None:
    """After the last step: the last version goes live, is evaluated and saved. `record` is the last line, unwritten."""
    evaluator, interrupted = parts.evaluator, parts.state.stop_reason == "interrupted"
    try:
        with parts.telemetry.progress.phase("bringing the last weights to the engines"):
            await parts.pump.drained()
        is_new = evaluator.last_version < parts.state.step
        if evaluator.is_possible and parts.cfg.trainer.eval_at_end and is_new and not interrupted:
            with parts.telemetry.progress.phase(f"evaluating version {parts.state.step}"):
                await evaluate_now(parts)
    finally:
        if record is not None:
            await parts.telemetry.write_step(with_evaluation(parts, record))
    await parts.devices.to_learner()  # an export gathers whole parameters on the device
    await parts.checkpointer.at_end(parts.state.step, wants_export=not interrupted)


async def evaluate_now(parts: Parts, entered: asyncio.Event | None = None) -> None:
    """One evaluation, from beginning to end; its result goes into the state."""
    with parts.telemetry.tracer.span("evaluation", "evaluate", overlapping=True):
        evaluation = await parts.evaluator.run(asyncio.Event() if entered is None else entered)
    parts.state.add_evaluation(evaluation)
    log.info("version %d: held-out accuracy %.3f", evaluation.version, evaluation.accuracy)
    parts.telemetry.progress.update(accuracy=evaluation.accuracy, accuracy_version=evaluation.version)
    target = parts.cfg.trainer.stop_at_accuracy
    if target is not None and evaluation.accuracy >= target:
        parts.state.stop("accuracy_reached")


async def on_live(parts: Parts, supervisor: Supervisor, report: SyncReport) -> None:
    """A version is live: free the slots of its step, which wakes the prompt loop, and evaluate it if that is due."""
    version = report.version
    parts.state.live_version = version
    parts.buffer.release(version - 1, version=version)
    trainer = parts.cfg.trainer
    if parts.evaluator.is_due(version) and version < trainer.total_steps and not trainer.eval_blocking:
        await begin_evaluation(parts, supervisor)


async def evaluate_if_blocking(parts: Parts) -> None:
    """With `trainer.eval_blocking`: a due evaluation of exactly this step's version, while the learner waits."""
    if parts.cfg.trainer.eval_blocking and parts.evaluator.is_due(parts.state.step):
        await parts.pump.drained()
        await evaluate_now(parts)


async def evaluate_at_start(parts: Parts, supervisor: Supervisor) -> None:
    """The version that the run begins with, if that is asked for: beside training, or before it."""
    trainer = parts.cfg.trainer
    if not (parts.evaluator.is_possible and trainer.eval_at_start):
        return
    if trainer.eval_blocking:
        await evaluate_now(parts)
    else:
        await begin_evaluation(parts, supervisor)


async def begin_evaluation(parts: Parts, supervisor: Supervisor) -> None:
    """Evaluate beside training. Returns once no commit can change the version any more, so that it is the one that
    is live now."""
    entered = asyncio.Event()
    supervisor.spawn(evaluate_now(parts, entered), name="evaluation", may_end=True)
    await entered.wait()
