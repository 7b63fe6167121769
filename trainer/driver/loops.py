"""The loops of a run around its parties: prompts in, groups generated, batches built, steps taken.

    feed_prompts   source ──prompt──> buffer.admit              waits for a free slot        <──────────────┐
    run_rollouts   buffer.claim ──item──> rollout worker ──group──> buffer.finish | filter | fail           │ release
    build_batches  buffer.take(step) ──groups──> advantages, packing ──> queue(1)                           │
    take_steps     queue ──batch──> age check ──> learner ──> WeightUpdater.publish ──> engines live ───────┘

Nothing flows backwards except `release`, which frees the slots of a step once its weights are live.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.buffer.staleness import StalenessViolation
from rollout.errors import BufferClosed, NoProgress
from rollout.types import Group
from trainer.algorithms.group_filter import GroupFilterError, own_group_filter
from trainer.data.batch import TrainBatch
from trainer.data.build import build_train_batch
from trainer.driver.checkpointing import Checkpointer
from trainer.driver.evaluation import Evaluator
from trainer.driver.state import Phase
from trainer.driver.step_metrics import StepMetrics, batch_record, buffer_record, sync_record
from trainer.driver.weight_updates import WeightUpdater
from trainer.errors import GradientsDiverged, first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from rollout.types import Prompt, RolloutRequest
    from trainer.algorithms.group_filter import OwnFilter
    from trainer.config.schema import RunConfig
    from trainer.driver.datasets import EvalSet
    from trainer.driver.evaluation import PinVersions
    from trainer.driver.fleet import Fleet
    from trainer.driver.state import RunState
    from trainer.driver.weight_updates import DedicatedDevices
    from trainer.learner.group import LearnerGroup
    from trainer.learner.step_stats import StepResult
    from trainer.telemetry.session import Telemetry
    from weight_sync.messages import SyncReport


log = logging.getLogger(__name__)

MIN_SCORED = 2
"""A group with fewer scored responses has nothing to compare."""
REWARDS_FAILED = "rewards_failed"
CLOCK_RESOLUTION_S = 1e-3
"""A timer may be this early."""
SEND_S = 0.01
"""The learner has its batch by then, most likely, and what is known of the step is counted while it computes."""


class StallTimeout(RuntimeError):
    """No batch came for longer than `trainer.stall_timeout_s`."""


class TrainingRun:
    """All tasks of a run. They end together: the first that fails cancels the others."""

    def __init__(
        self,
        cfg: RunConfig,
        state: RunState,
        telemetry: Telemetry,
        *,
        source: PromptSource,
        buffer: RolloutBuffer,
        workers: Fleet,
        learner: LearnerGroup,
        devices: DedicatedDevices,
        eval_sets: Sequence[EvalSet],
        pin_versions: PinVersions,
        live: SyncReport,
    ) -> None:
        """`live` is the report of the version that is live already."""
        self.cfg, self.state, self.telemetry = cfg, state, telemetry
        self.source, self.buffer, self.workers, self.learner, self.devices = source, buffer, workers, learner, devices
        self.tasks = asyncio.TaskGroup()
        self.metrics = StepMetrics()
        self.evaluator = Evaluator(
            cfg, eval_sets, state, telemetry, workers=workers, pin_versions=pin_versions, tasks=self.tasks
        )
        self.weights = WeightUpdater(
            devices, on_live=self.on_live, wait_for_engine=workers.wait_for_engine, tracer=telemetry.tracer, first=live
        )
        self._checkpointer = Checkpointer(
            cfg, telemetry, learner=learner, buffer=buffer, source=source, state=state, tasks=self.tasks
        )
        self._filter_zero_variance = cfg.algorithm.dynamic_sampling
        self._custom_filter = own_group_filter(cfg.algorithm)
        self._batches = asyncio.Queue[tuple[list[Group], TrainBatch] | None](maxsize=1)
        """None means that no further batch comes."""
        self._last_steps: dict[int, int] = {}
        """Version -> the last step that ended with it, until it is live."""
        self._step: asyncio.Task[bool] | None = None
        """The last step of the learner; it continues where `take_steps` is cancelled."""
        self._record: Callable[[], dict[str, object]] | None = None
        """Makes the record of the last step, except for the evaluation; None once that is written."""
        self._writing: asyncio.Task[None] | None = None

    async def run(self, *watches: Coroutine[Any, Any, None]) -> None:
        """Until the last step is saved and evaluated. `watches` run meanwhile; one that fails ends the run.

        Raises:
            Exception: the first failure of any task; the others have ended by then.
        """
        run = asyncio.create_task(self._run(*watches), name="run")
        try:
            await asyncio.wait({run})
        except asyncio.CancelledError:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            raise  # the task group would raise what fails because of it instead
        run.result()

    async def _run(self, *watches: Coroutine[Any, Any, None]) -> None:
        training: asyncio.Task[None] | None = None
        failures: tuple[Exception, ...] = ()
        state = self.state
        fleet = self.workers.watch(needs_groups=lambda: state.needs_groups, needs_engines=lambda: state.needs_engines)
        try:
            async with self.tasks as tasks:
                background = [tasks.create_task(watch) for watch in (fleet, *watches)]
                await self.evaluator.at_start()
                producers = (self.feed_prompts(), self.run_rollouts(), self.build_batches())
                loops = (*map(self._while_needed, producers), self.weights.run())
                background += [tasks.create_task(loop) for loop in loops]
                training = tasks.create_task(self.take_steps(), name="take_steps")
                await training
                for task in background:
                    task.cancel()
        except ExceptionGroup as group:
            failures = group.exceptions
        if training is not None and not training.cancelled() and training.exception() is None:
            for failure in failures:
                log.warning("a task failed as the run ended: %s", one_line(first_cause(failure)))
        elif failures:
            raise failures[0]

    async def on_live(self, report: SyncReport) -> None:
        """Free the slots of the version's steps, which wakes `feed_prompts`, and evaluate it if that is due."""
        self.state.live_version = report.version
        self._release(report.version)
        await self.evaluator.after_sync(report.version)

    async def _while_needed(self, loop: Coroutine[Any, Any, None]) -> None:
        """A loop that may fail once no group is needed: filters keep little of a policy that reached its accuracy."""
        try:
            await loop
        except Exception as error:
            if self.state.needs_groups:
                raise
            if not isinstance(first_cause(error), BufferClosed):
                log.warning("no more groups; the run ends anyway: %s", one_line(first_cause(error)))
            self.state.advance(Phase.DRAINING)
            if self._batches.empty():  # else `take_steps` takes that batch and ends after it
                self._batches.put_nowait(None)

    # Prompts and groups

    async def feed_prompts(self) -> None:
        """Consumes: the prompt source. Waits for: a free slot. Unblocked by: release, filter, drop; close."""
        while True:
            await self.buffer.wait_for_slot()
            item = self.buffer.readmit()
            if item is None:
                item = self.buffer.admit(self.source.next(self.state.live_version))
            self.metrics.queue.admitted(item.group_id)

    async def run_rollouts(self) -> None:
        """Consumes: admitted prompts. Waits for: an admission. Unblocked by: admit, a retry; close.

        Groups run concurrently; their number is bounded by the buffer's slots.
        """
        async with asyncio.TaskGroup() as groups:
            while True:
                item = await self.buffer.claim()
                self.state.mark_dispatched()
                groups.create_task(self._run_group(item), name=f"group {item.group_id}")

    async def _run_group(self, item: RolloutRequest) -> None:
        """Have one group generated and rewarded, and return the result to the buffer."""
        telemetry, queue, started_at = self.telemetry, self.metrics.queue, time.time()
        queue.claimed(item.group_id)
        try:
            group = await self.workers.run_group(item)
        except Exception as error:  # noqa: BLE001 - it fails one group, which is counted and retried, not the run
            self._fail(item, error)
            return
        name, tokens = f"group {item.group_id}", group.num_generated_tokens
        telemetry.tracer.add_span(
            "groups", name, start_s=started_at, end_s=time.time(), overlapping=True, tokens=tokens
        )
        self.metrics.count_generated(group)
        self.state.failed_responses.count(group)
        self.source.observe(group)
        try:
            reason = filter_reason(
                group, item.prompt, dynamic_sampling=self._filter_zero_variance, custom=self._custom_filter
            )
        except GroupFilterError:  # ends the run; its input is recorded
            telemetry.record_group(group, item.prompt, "filtered", "group_filter_failed")
            raise
        telemetry.record_group(group, item.prompt, "filtered" if reason else "ready", reason)
        if reason:
            queue.filtered(group)
            failure = next((t.error for t in group.trajectories if t.error), "") if reason == REWARDS_FAILED else ""
            self.buffer.filter(item.group_id, reason, failure=failure)
        else:
            queue.finished(group)
            self.buffer.finish(group)

    def _fail(self, item: RolloutRequest, error: Exception) -> None:
        """Retry or drop the group of an attempt that raised. Raises NoProgress if it was one too many."""
        reason = one_line(first_cause(error))
        try:
            outcome = self.buffer.fail(item.group_id, error)
        except NoProgress:
            self.telemetry.record_failure(item, "dropped", reason)
            raise
        self.metrics.queue.failed(item.group_id, outcome)
        log.warning("group %d (%s) failed and was %s: %s", item.group_id, item.prompt.prompt_id, outcome, reason)
        self.telemetry.record_failure(item, outcome, reason)

    # Batches and steps

    async def build_batches(self) -> None:
        """Consumes: finished groups. Waits for: the groups of the next step, then room in the queue. Unblocked by:
        finish; `take_steps` taking a batch; close."""
        cfg = self.cfg
        for step in range(self.state.step, cfg.trainer.total_steps):
            groups = await self.buffer.take(step)
            share_prefix = cfg.learner.share_prefix
            if share_prefix == "auto" and not self.learner.shares_prefix:
                share_prefix = False
            self.metrics.queue.taken(groups)
            with self.telemetry.tracer.span("batch_loop", f"build {step}"), self.telemetry.records_held():
                batch = await asyncio.to_thread(
                    build_train_batch,
                    groups,
                    step=step,
                    algorithm=cfg.algorithm,
                    num_ranks=cfg.learner.num_batches,
                    max_tokens_per_micro_batch=self.learner.max_tokens_per_micro_batch
                    * cfg.learner.context_parallel_size,
                    max_response_tokens=cfg.rollout.max_response_tokens,
                    cost=None if self.learner.flops is None else self.learner.flops.of_sequence,
                    share_prefix=share_prefix,
                    num_mini_batches=cfg.learner.num_mini_batches,
                    updates_per_batch=cfg.learner.updates_per_batch,
                    seed=cfg.seed,
                )
            await self._batches.put((groups, batch))
        self.state.advance(Phase.DRAINING)

    async def take_steps(self) -> None:
        """Consumes: batches. Waits for: a batch, the learner, the pack. Unblocked by: `build_batches`; a request to
        stop, which takes effect between two steps.

        A run that reached its accuracy trains one more step, if it finds groups for it; that step's record carries the
        evaluation or a newer one.
        """
        state, total, progress = self.state, self.cfg.trainer.total_steps, self.telemetry.progress
        now = asyncio.get_running_loop().time
        is_last = False
        while state.step < total and not state.interrupted.is_set() and not is_last:
            began, evaluated_s = now(), self.evaluator.running_s
            progress.update(waiting_for="groups")
            ready = await self._next_batch()
            if ready is None:
                break
            progress.update(waiting_for="")
            await self._train(*ready, waits_s=(now() - began, self.evaluator.running_s - evaluated_s))
            is_last = state.step >= total or state.stop_reason is not None
            if is_last:
                state.advance(Phase.TRAINED)
            else:  # the last record waits for the last evaluation
                await self.evaluator.after_step(self.weights.wait_until_live)
                # Before the checkpoint: a run that resumes from there would never write it.
                await self._write_record()
            await self._checkpointer.after_step(state.step)
        await self._finish()

    async def _next_batch(self) -> tuple[list[Group], TrainBatch] | None:
        """The next batch; None if the run is asked to stop or none comes. Raises StallTimeout."""
        if self._batches.empty():
            self.buffer.grow_slots()
        get = asyncio.create_task(self._batches.get())
        stop = asyncio.create_task(self.state.interrupted.wait())
        limit_s, now = self.cfg.trainer.stall_timeout_s, asyncio.get_running_loop().time
        began = now()
        try:
            # Groups may wait for weights while an evaluation pins their engine, which has its own deadline.
            while (left_s := limit_s - min(now() - began, self.evaluator.idle_s)) > CLOCK_RESOLUTION_S:
                await asyncio.wait({get, stop}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return get.result()
                if stop.done():
                    return None
            if self.state.stop_reason is not None:
                return None  # one more step was welcome but not needed
            raise StallTimeout(
                f"no batch for step {self.state.step} within trainer.stall_timeout_s={limit_s:g}: "
                f"{self.buffer.waiting_for or 'the buffer waits for nothing'}; {self.buffer.stats()}"
                + (f"; engines lost: {self.workers.lost_engines}" if self.workers.lost_engines else "")
            )
        finally:
            get.cancel()
            stop.cancel()

    async def _train(self, groups: list[Group], batch: TrainBatch, *, waits_s: tuple[float, float]) -> None:
        """One step of the learner, the pack of its weights, and its record. A step that changed no weight of the policy
        makes no version. Once begun, the step continues where the caller is cancelled: see `emergency_save`.

        Args:
            waits_s: for the batch, and how much of it during an evaluation.
        """
        state, step = self.state, batch.step
        check_staleness(groups, version=state.version, max_staleness=self.cfg.mode.max_staleness)
        await self.devices.acquire_for_training()

        async def train_step() -> bool:
            trained = state.version
            with self.telemetry.tracer.span("learner", f"step {step}", tokens=batch.num_tokens):
                limit = self.cfg.mode.max_staleness
                of_batch = functools.cache(partial(batch_record, groups, batch, version=trained, max_staleness=limit))
                early = asyncio.get_running_loop().call_later(SEND_S, of_batch)
                result = await self.learner.train_step(batch, version=trained)
                early.cancel()
            _warn_of_skipped(result)
            is_new = result.is_policy_changed or self.devices.must_sync
            state.step, state.version = step + 1, trained + is_new
            self._last_steps[state.version] = step
            ended_at = asyncio.get_running_loop().time()
            self._record = partial(self._step_record, groups, batch, result, of_batch, trained, waits_s, ended_at)
            return is_new

        self._step = asyncio.create_task(train_step(), name="step")
        if await asyncio.shield(self._step):
            await self.weights.publish(state.version)
        elif state.live_version == state.version:
            self._release(state.version)
        if self._record is not None:
            record = self._record()
            self._record = lambda: record

    def _release(self, version: int) -> None:
        """Free the slots of the steps up to this version, which is live."""
        steps = [self._last_steps.pop(made) for made in sorted(self._last_steps) if made <= version]
        if steps:
            self.buffer.release(steps[-1], version=version)

    def _step_record(
        self,
        groups: list[Group],
        batch: TrainBatch,
        result: StepResult,
        of_batch: Callable[[], Mapping[str, object]],
        trained: int,
        waits_s: tuple[float, float],
        ended_at: float,
    ) -> dict[str, object]:
        """The record of a step whose weights are on their way. `trained` is the version before it."""
        state, report, stats = self.state, self.weights.last_report, self.buffer.stats()
        num_replicas = self.cfg.rollout.num_replicas
        return {
            "step": batch.step + 1,
            "version": state.version,
            "time_s": state.time_s,
            **of_batch(),
            **self.metrics.step_record(
                groups,
                batch,
                result,
                version=trained,
                max_staleness=self.cfg.mode.max_staleness,
                wait_for_batch_s=waits_s[0],
                wait_for_eval_s=waits_s[1],
                wait_for_sync_s=asyncio.get_running_loop().time() - ended_at - self.devices.offload_s,
            ),
            **buffer_record(stats),
            **self.metrics.queue.step_record(
                groups,
                num_replicas=num_replicas,
                backpressure_s=stats.slot_wait_s,
                engines_idle_frac=self.workers.idle_engines.take_frac(num_replicas=num_replicas),
            ),
            **state.failed_responses.take_record(),
            **self.telemetry.record(),
            **{f"data/{name}": value for name, value in self.source.record(groups).items()},
            **self.workers.take_record(),
            **self.devices.record(),
            **(sync_record(report) if state.version > trained else {}),
            "sync/version_lag": state.version - report.version + report.version_lag,
        }

    async def _write_record(self) -> None:
        """Write the record of the last step, with the newest unreported evaluation, once. A cancelled caller does not
        end the write; the next caller waits for it."""
        if self._record is not None:
            record, self._record = self._record() | self._checkpointer.take_record(), None
            if self.evaluator.is_possible:
                record |= self.state.take_evaluation()
                record["eval/failed_runs"] = self.state.num_failed_evaluations
            self._writing = asyncio.create_task(self.telemetry.write_step(record), name="record")
        if self._writing is not None:
            await asyncio.shield(self._writing)

    # The end

    async def _finish(self) -> None:
        """After the last step: generation ends; the step is saved, goes live, is evaluated, recorded and exported.

        An interrupt skips the last evaluation and the export, and the run is reported as interrupted. Once the last
        version is live, lost engines and workers cost an evaluation at most: see `RunState.needs_engines`. A process
        that is killed meanwhile has saved the step, but not recorded it.

        Waits for: the last sync, and each evaluation. Unblocked by: their deadlines, which an interrupt shortens.
        """
        state, phase, interrupted = self.state, self.telemetry.progress.phase, self.state.interrupted
        state.advance(Phase.TRAINED)
        self.buffer.close()  # what is being generated ends, and is owed by the checkpoint
        try:
            await self._checkpointer.at_end(state.step, is_interrupted=interrupted.is_set())
            with phase("sending the last weights to the engines"):
                await self.weights.wait_until_live()
            await self.evaluator.at_end()
        finally:
            await self._write_record()
        if interrupted.is_set():
            state.stop_reason = "interrupted"  # also after the accuracy was reached: there is no export
        else:
            await self.devices.acquire_for_training()  # an export gathers whole parameters on the device
            await self._checkpointer.export()
        await self._checkpointer.at_end(state.step, is_interrupted=interrupted.is_set())  # it may have come meanwhile

    async def emergency_save(self) -> None:
        """After a failure elsewhere, finish, record and save the step that the learner is in. Save nothing after a
        failure of the learner, whose weights are undefined. Failures here are only logged.

        Waits for: the step, and the save. Unblocked by: their deadlines; cancellation.
        """
        state = self.state
        if self._step is not None and not self._step.done():
            with self.telemetry.progress.phase("finishing the step that the learner is in"):
                await asyncio.wait({self._step})
        # A step that was refused changed no weight.
        has_whole_weights = self._step is None or (
            not self._step.cancelled() and isinstance(self._step.exception(), GradientsDiverged | None)
        )
        await _log_failure(self._write_record(), "the last step could not be recorded")
        if has_whole_weights and not self.learner.is_broken and state.step > (state.resumed_from_step or 0):
            save = self._checkpointer.at_end(state.step, is_interrupted=True)
            await _log_failure(save, "the steps after the last checkpoint could not be saved")


def filter_reason(group: Group, prompt: Prompt, *, dynamic_sampling: bool, custom: OwnFilter | None = None) -> str:
    """Why a finished group is not trained but replaced; empty if it is trained."""
    num_scored = sum(t.status != "failed" for t in group.trajectories)
    if num_scored < min(MIN_SCORED, len(group.trajectories)):
        return REWARDS_FAILED
    if dynamic_sampling and group.has_equal_rewards:
        return "zero_variance"
    return "" if custom is None else custom(group, prompt)


def check_staleness(groups: Sequence[Group], *, version: int, max_staleness: int) -> None:
    """Assert the staleness bound before `version` is trained, for baselines too.

    Raises:
        StalenessViolation: names every group that is too old.
    """
    oldest = {g.group_id: min([g.start_version, *(v for t in g.generated for v in t.policy_versions)]) for g in groups}
    old = [f"{v} (group {group})" for group, v in sorted(oldest.items()) if version - v > max_staleness]
    if old:
        raise StalenessViolation(
            f"a step of version {version} with max_staleness={max_staleness} got groups that began at version "
            f"{', '.join(old)}; this is a bug in the rollout buffer"
        )


def _warn_of_skipped(result: StepResult) -> None:
    step = result.step + 1
    if (critic := result.metrics.get("critic_skipped_updates")) is not None and critic.sum:
        log.warning(
            "%d updates of the critic in step %d were skipped: their gradient is not finite; lower critic.lr or "
            "critic.max_grad_norm",
            critic.sum,
            step,
        )
    cause = "look for wrong rewards and log-probs in its trajectories, or lower the learning rate"
    if (skipped := result.metrics.get("skipped_steps")) is not None and skipped.sum:
        log.warning(
            "step %d was skipped: a gradient is not finite, so no weight has changed; %s (learner.max_skipped_steps is "
            "the limit)",
            step,
            cause,
        )
    elif (updates := result.metrics.get("skipped_updates")) is not None and updates.sum:
        log.warning("%d updates of step %d were skipped: a gradient is not finite; %s", updates.sum, step, cause)
    if (tokens := result.metrics.get("num_loss_tokens")) is not None and not tokens.sum:
        log.warning("step %d changed no weight: no token of its responses carries loss (response/excluded/*)", step)


async def _log_failure(todo: Awaitable[None], message: str) -> None:
    try:
        await todo
    except Exception as error:  # noqa: BLE001 - the failure that came first is the one to be reported
        log.warning("%s: %s", message, one_line(first_cause(error)))
