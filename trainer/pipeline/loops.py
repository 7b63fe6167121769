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
from typing import TYPE_CHECKING, Any

from rollout.errors import BufferClosed, NoProgress
from rollout.types import Group
from trainer.algorithms.group_filter import GroupFilterError, own_group_filter
from trainer.config.errors import first_cause, one_line
from trainer.data.batcher import BatchLimits, BuiltBatch, build_train_batch
from trainer.pipeline.evaluation_runs import evaluate_at_end, evaluate_if_beside, evaluate_if_blocking
from trainer.pipeline.flow import GroupFlow
from trainer.pipeline.records import DataWait, StepRecorder
from trainer.pipeline.stepping import Stepper
from trainer.pipeline.workers import NoWorker

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rollout.buffer.items import WorkItem
    from rollout.buffer.work_buffer import WorkBuffer
    from rollout.prompts.source import PromptSource
    from trainer.algorithms.group_filter import OwnFilter
    from trainer.config.schema import RunConfig
    from trainer.learner.group import LearnerGroup
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


async def watch_workers(parts: Parts) -> None:
    """As `WorkerPool.watch_loads`, whose end is a failure only while groups are needed. Later an evaluation that waits
    for a worker fails, and nothing else."""
    try:
        await parts.workers.watch_loads()
    except NoWorker as error:
        if parts.needs_groups:
            raise
        log.error("no more evaluations, while the run ends anyway: %s", error)
        parts.workers.close()


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


async def _roll_out(parts: Parts, item: WorkItem, own: OwnFilter | None) -> None:
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


async def _give_back(parts: Parts, item: WorkItem, error: Exception) -> None:
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
        parts.buffer.learner_waits()
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
