"""The loops of a run: prompts in, groups generated, batches built, steps taken.

    feed_prompts   source ──prompt──> buffer.admit              waits for a free slot        <──────────────┐
    RolloutLoop    buffer.claim ──item──> rollout worker ──group──> buffer.finish | filter | fail           │ release
    build_batches  buffer.take(step) ──groups──> advantages, packing ──> queue(1)                           │
    TrainLoop      queue ──batch──> age check ──> learner ──> WeightUpdater.publish ──> engines live ───────┘

Nothing flows backwards except `release`, which frees the slots of a step once its weights are live.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rollout.errors import NoProgress
from rollout.types import Group
from trainer.algorithms.group_filter import GroupFilterError, own_group_filter
from trainer.data.batch import TrainBatch
from trainer.data.build import build_train_batch
from trainer.driver.state import Phase
from trainer.driver.step_metrics import StepMetrics, buffer_record, sync_record
from trainer.errors import GradientsDiverged, first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from rollout.types import Prompt, RolloutRequest
    from trainer.algorithms.group_filter import OwnFilter
    from trainer.config.algorithm import AlgorithmConfig
    from trainer.config.schema import RunConfig
    from trainer.driver.checkpointing import Checkpointer
    from trainer.driver.evaluation import EvaluationSchedule, Evaluator
    from trainer.driver.fleet import Fleet
    from trainer.driver.state import RunState
    from trainer.driver.step_metrics import QueueTimer
    from trainer.driver.weight_updates import DedicatedDevices, WeightUpdater
    from trainer.learner.group import LearnerGroup
    from trainer.learner.step_stats import StepResult
    from trainer.telemetry.session import Telemetry


log = logging.getLogger(__name__)

Ready = tuple[list[Group], TrainBatch]
Batches = asyncio.Queue[Ready | None]
"""Of one entry. None: no further batch comes."""
MIN_SCORED = 2
"""A group with fewer scored responses has nothing to compare."""
REWARDS_FAILED = "rewards_failed"
CLOCK_RESOLUTION_S = 1e-3
"""A timer may be early by so much."""


class StalenessViolation(RuntimeError):
    """A group is older than the bound when it is about to be trained: a bug, never a condition to live with."""


class StallTimeout(RuntimeError):
    """No batch came for longer than `trainer.stall_timeout_s`."""


async def feed_prompts(source: PromptSource, buffer: RolloutBuffer, state: RunState, queue: QueueTimer) -> None:
    """Consumes: the prompt source. Waits for: a free slot. Unblocked by: release, filter, drop; close."""
    while True:
        await buffer.wait_for_slot()
        item = buffer.readmit()
        if item is None:
            item = buffer.admit(source.next(state.live_version))
        queue.admitted(item.group_id)


class RolloutLoop:
    """Has groups generated and rewarded, and puts back into the buffer what came of them."""

    def __init__(
        self,
        algorithm: AlgorithmConfig,
        state: RunState,
        telemetry: Telemetry,
        metrics: StepMetrics,
        *,
        buffer: RolloutBuffer,
        workers: Fleet,
        source: PromptSource,
    ) -> None:
        self._filter_zero_variance = algorithm.dynamic_sampling
        self._own_filter = own_group_filter(algorithm)
        self._state, self._telemetry, self._metrics = state, telemetry, metrics
        self._buffer, self._workers, self._source = buffer, workers, source

    async def run(self) -> None:
        """Consumes: admitted prompts. Waits for: an admission. Unblocked by: admit, a retry; close.

        Groups run concurrently; their number is bounded by the buffer's slots.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                item = await self._buffer.claim()
                self._state.mark_dispatched()
                groups.create_task(self._run_group(item), name=f"group {item.group_id}")

    async def _run_group(self, item: RolloutRequest) -> None:
        telemetry, queue, started_at = self._telemetry, self._metrics.queue, time.time()
        queue.claimed(item.group_id)
        try:
            group = await self._workers.run_group(item)
        except Exception as error:  # noqa: BLE001 - the edge of one group: its failure is counted and retried, not the run's
            self._fail(item, error)
            return
        name, tokens = f"group {item.group_id}", group.num_generated_tokens
        telemetry.tracer.add_span(
            "groups", name, start_s=started_at, end_s=time.time(), overlapping=True, tokens=tokens
        )
        self._metrics.count_generated(group)
        self._state.failed_responses.count(group)
        self._source.observe(group)
        try:
            reason = filter_reason(
                group, item.prompt, dynamic_sampling=self._filter_zero_variance, own=self._own_filter
            )
        except GroupFilterError:  # ends the run; what it was given is written down
            telemetry.record_group(group, item.prompt, "filtered", "group_filter_failed")
            raise
        telemetry.record_group(group, item.prompt, "filtered" if reason else "ready", reason)
        if reason:
            queue.filtered(group)
            failure = next((t.error for t in group.trajectories if t.error), "") if reason == REWARDS_FAILED else ""
            self._buffer.filter(item.group_id, reason, failure=failure)
        else:
            queue.finished(group)
            self._buffer.finish(group)

    def _fail(self, item: RolloutRequest, error: Exception) -> None:
        """An attempt raised: its group is tried again or dropped, and written down with the reason.

        Raises:
            NoProgress: it was one too many.
        """
        reason = one_line(first_cause(error))
        try:
            outcome = self._buffer.fail(item.group_id, error)
        except NoProgress:
            self._telemetry.record_failure(item, "dropped", reason)
            raise
        self._metrics.queue.failed(item.group_id, outcome)
        log.warning("group %d (%s) failed and was %s: %s", item.group_id, item.prompt.prompt_id, outcome, reason)
        self._telemetry.record_failure(item, outcome, reason)


def filter_reason(group: Group, prompt: Prompt, *, dynamic_sampling: bool, own: OwnFilter | None = None) -> str:
    """Why a finished group is replaced before it costs a training slot; empty if it is to be trained."""
    num_scored = sum(t.status != "failed" for t in group.trajectories)
    if num_scored < min(MIN_SCORED, len(group.trajectories)):
        return REWARDS_FAILED
    if dynamic_sampling and group.has_equal_rewards:
        return "zero_variance"
    return "" if own is None else own(group, prompt)


async def build_batches(
    cfg: RunConfig, state: RunState, telemetry: Telemetry, queue: QueueTimer, *, buffer: RolloutBuffer, batches: Batches
) -> None:
    """Consumes: finished groups. Waits for: the groups of the next step, then room in the queue. Unblocked by:
    finish; the train loop taking a batch; close."""
    for step in range(state.step, cfg.trainer.total_steps):
        groups = await buffer.take(step)
        queue.taken(groups)
        with telemetry.tracer.span("batch_loop", f"build {step}"):
            batch = await asyncio.to_thread(
                build_train_batch,
                groups,
                step=step,
                algorithm=cfg.algorithm,
                num_ranks=cfg.learner.num_ranks,
                max_tokens_per_micro_batch=cfg.learner.max_tokens_per_micro_batch,
                max_response_tokens=cfg.rollout.max_response_tokens,
            )
        await batches.put((groups, batch))
    state.advance(Phase.DRAINING)


def check_staleness(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """The promise, asserted where it counts; a baseline is no older than what is compared with it.

    Raises:
        StalenessViolation: with every group that is too old.
    """
    old = {g.group_id: g.start_version for g in groups if step - g.start_version > max_staleness}
    tokens = {g.group_id: min(v) for g in groups if (v := [v for t in g.generated for v in t.policy_versions])}
    old |= {group: version for group, version in tokens.items() if step - version > max_staleness}
    if old:
        raise StalenessViolation(
            f"step {step} with max_staleness={max_staleness} got groups that began at version "
            f"{', '.join(f'{version} (group {group})' for group, version in sorted(old.items()))}; "
            "this is a bug in the work buffer"
        )


class TrainLoop:
    """Takes the steps of a run one after the other, publishes each, and ends the run."""

    def __init__(
        self,
        cfg: RunConfig,
        state: RunState,
        telemetry: Telemetry,
        metrics: StepMetrics,
        *,
        batches: Batches,
        buffer: RolloutBuffer,
        source: PromptSource,
        workers: Fleet,
        learner: LearnerGroup,
        devices: DedicatedDevices,
        weights: WeightUpdater,
        evaluator: Evaluator,
        evaluations: EvaluationSchedule,
        checkpointer: Checkpointer,
    ) -> None:
        self._cfg, self._state, self._telemetry, self._metrics = cfg, state, telemetry, metrics
        self._batches, self._buffer, self._source, self._workers = batches, buffer, source, workers
        self._learner, self._devices, self._weights = learner, devices, weights
        self._evaluator, self._evaluations, self._checkpointer = evaluator, evaluations, checkpointer
        self._step: asyncio.Task[None] | None = None
        """The last one; it goes on where the loop is cancelled."""
        self._trained: tuple[Ready, StepResult, tuple[float, float], float] | None = None
        """A step without its line: batch, result, waits for batch and evaluation, and when it ended."""
        self._record: dict[str, object] | None = None
        """Its line, but for the evaluation."""
        self._writing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Consumes: batches. Waits for: a batch, the learner, the pack. Unblocked by: `build_batches`; a request to
        stop, which takes effect between two steps.

        A run that reached its accuracy trains one more step, if it finds groups for it, whose line carries that
        evaluation or a newer one.
        """
        state, total, progress = self._state, self._cfg.trainer.total_steps, self._telemetry.progress
        now = asyncio.get_running_loop().time
        while state.step < total and not state.interrupted.is_set():
            began, evaluated_s = now(), self._evaluator.running_s
            progress.update(waiting_for="groups")
            ready = await self._next_batch()
            if ready is None:
                break
            progress.update(waiting_for="")
            await self._train(ready, waits_s=(now() - began, self._evaluator.running_s - evaluated_s))
            await self._weights.publish(state.step)
            self._build_record()
            is_last = state.step >= total or state.stop_reason is not None
            if is_last:
                state.advance(Phase.TRAINED)
            else:  # the last line waits for the last evaluation
                await self._evaluations.after_step(self._weights.wait_until_live)
                # Before the checkpoint: a run that resumes from there does not come back for the line.
                await self.write_record()
            await self._checkpointer.after_step(state.step)
            if is_last:
                break
        await self._finish()

    async def _next_batch(self) -> Ready | None:
        """The next batch, or None once the run is asked to stop or none comes.

        Raises:
            StallTimeout: nothing came for too long.
        """
        if self._batches.empty():
            self._buffer.grow_slots()
        get = asyncio.create_task(self._batches.get())
        stop = asyncio.create_task(self._state.interrupted.wait())
        limit_s, now = self._cfg.trainer.stall_timeout_s, asyncio.get_running_loop().time
        began = now()
        try:
            # An evaluation pins the weights of its engine, and groups may have to wait for new ones; it has its own
            # deadline.
            while (left_s := limit_s - min(now() - began, self._evaluator.idle_s)) > CLOCK_RESOLUTION_S:
                await asyncio.wait({get, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return get.result()
                if stop.done():
                    return None
            if self._state.stop_reason is not None:
                return None  # one step more was welcome, and not needed
            raise StallTimeout(
                f"no batch for step {self._state.step} within trainer.stall_timeout_s={limit_s:g}: "
                f"{self._buffer.waiting_for or 'the buffer waits for nothing'}; {self._buffer.stats()}"
                + (f"; engines lost: {self._workers.lost_engines}" if self._workers.lost_engines else "")
            )
        finally:
            get.cancel()
            stop.cancel()

    async def _train(self, ready: Ready, *, waits_s: tuple[float, float]) -> None:
        """One step of the learner. Once begun it goes on where the caller is cancelled: see `emergency_save`."""
        groups, batch = ready
        step = batch.step
        check_staleness(groups, step=step, max_staleness=self._cfg.mode.max_staleness)
        await self._devices.acquire_for_training()

        async def train_step() -> None:
            with self._telemetry.tracer.span("learner", f"step {step}", tokens=batch.num_tokens):
                result = await self._learner.train_step(batch)
            _warn_of_skipped(result)
            self._state.step = step + 1
            self._trained = ready, result, waits_s, asyncio.get_running_loop().time()

        self._step = asyncio.create_task(train_step(), name="step")
        await asyncio.shield(self._step)

    def _build_record(self) -> None:
        """The new weights are on their way: make the line of the step, as things are now."""
        assert self._trained is not None
        (groups, batch), result, (wait_for_batch_s, wait_for_eval_s), ended_at = self._trained
        state, telemetry, report = self._state, self._telemetry, self._weights.last_report
        stats, num_replicas = self._buffer.stats(), self._cfg.rollout.num_replicas
        self._record = {
            "step": batch.step + 1,
            "version": batch.step + 1,
            "time_s": state.time_s,
            **self._metrics.step_record(
                groups,
                batch,
                result,
                max_staleness=self._cfg.mode.max_staleness,
                wait_for_batch_s=wait_for_batch_s,
                wait_for_eval_s=wait_for_eval_s,
                wait_for_sync_s=asyncio.get_running_loop().time() - ended_at - self._devices.offload_s,
            ),
            **buffer_record(stats),
            **self._metrics.queue.step_record(
                groups,
                num_replicas=num_replicas,
                backpressure_s=stats.slot_wait_s,
                engines_idle_frac=self._workers.idle_engines.take_frac(num_replicas=num_replicas),
            ),
            "response/failed_frac": state.failed_responses.take_frac(),
            **telemetry.record(),
            **{f"data/{name}": value for name, value in self._source.record(groups).items()},
            **self._workers.load_record,
            **self._devices.record(),
            **sync_record(report, version_lag=state.step - report.version + report.version_lag),
        }

    async def write_record(self) -> None:
        """The line of the last step, with an evaluation that waits for one; nothing if it is written. It is written to
        its end where the caller is cancelled, and the next one waits for that."""
        if self._trained is not None:
            if self._record is None:
                self._build_record()
            record, self._record, self._trained = self._record, None, None
            assert record is not None
            if self._evaluator.is_possible:
                record |= self._state.take_evaluation()
                record["eval/failed_runs"] = self._state.num_failed_evaluations
            self._writing = asyncio.create_task(self._telemetry.write_step(record), name="line")
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def _finish(self) -> None:
        """After the last step: generation ends; the step is saved, goes live, is evaluated, written and exported.

        An interrupt leaves out the last evaluation and the export, and the run is reported as interrupted. Once the
        last version is live, lost engines and rollout workers cost an evaluation at most: see `RunState.needs_engines`.

        Waits for: the last sync, and each evaluation. Unblocked by: their deadlines; an interrupt shortens those of the
        evaluations to `trainer.shutdown_timeout_s`. A process that is killed meanwhile has saved the step, not its
        line.
        """
        state, progress, interrupted = self._state, self._telemetry.progress, self._state.interrupted
        state.advance(Phase.TRAINED)
        self._buffer.close()  # what is being generated ends, and is owed by the checkpoint
        try:
            await self._checkpointer.at_end(state.step, is_interrupted=interrupted.is_set())
            with progress.phase("bringing the last weights to the engines"):
                await self._weights.wait_until_live()
            await self._evaluations.at_end()
        finally:
            await self.write_record()
        if interrupted.is_set():
            state.stop_reason = "interrupted"  # also where the accuracy was reached before: there is no export
        else:
            await self._devices.acquire_for_training()  # an export gathers whole parameters on the device
            await self._checkpointer.export()
        await self._checkpointer.at_end(state.step, is_interrupted=interrupted.is_set())  # it may have come meanwhile

    async def emergency_save(self) -> None:
        """After a failure elsewhere: the step that the learner is in comes to its end, is written and saved.

        Nothing is saved after a failure of the learner, whose weights are undefined. Raises nothing: a failure is being
        reported already, so what goes wrong here is logged.

        Waits for: the step, and the save. Unblocked by: their deadlines; cancellation.
        """
        state = self._state
        if self._step is not None and not self._step.done():
            with self._telemetry.progress.phase("finishing the step that the learner is in"):
                await asyncio.wait({self._step})
        # A step that was refused before it changed any weight leaves whole ones.
        has_whole_weights = self._step is None or (
            not self._step.cancelled() and isinstance(self._step.exception(), GradientsDiverged | None)
        )
        await _log_failure(self.write_record(), "the line of the last step could not be written")
        if has_whole_weights and not self._learner.is_broken and state.step > (state.resumed_from_step or 0):
            save = self._checkpointer.at_end(state.step, is_interrupted=True)
            await _log_failure(save, "what came after the last checkpoint could not be saved")


def _warn_of_skipped(result: StepResult) -> None:
    step = result.step + 1
    if (critic := result.metrics.get("critic_skipped_updates")) is not None and critic.sum:
        log.warning(
            "%d updates of the critic in step %d were left out: their gradient is not finite; lower critic.lr or "
            "critic.max_grad_norm",
            critic.sum,
            step,
        )
    if (skipped := result.metrics.get("skipped_steps")) is not None and skipped.sum:
        log.warning(
            "step %d was skipped: a gradient is not finite, so no weight has changed; look for wrong rewards and "
            "log-probs in its trajectories, or lower the learning rate (learner.max_skipped_steps says how often)",
            step,
        )


async def _log_failure(todo: Awaitable[None], message: str) -> None:
    try:
        await todo
    except Exception as error:  # noqa: BLE001 - the failure that came first is the one to be reported
        log.warning("%s: %s", message, one_line(first_cause(error)))
