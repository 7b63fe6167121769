"""Optimizer steps: each comes to its end once it has begun, has its line of metrics, and is saved if the run fails."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.errors import first_cause, one_line
from trainer.learner.errors import GradientsDiverged
from trainer.pipeline.evaluation_runs import with_evaluation
from trainer.pipeline.records import StepTimes, buffer_record, sync_record

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from rollout.types import Group
    from trainer.data.batcher import BuiltBatch
    from trainer.learner.result import StepResult
    from trainer.pipeline.loops import Parts
    from trainer.pipeline.records import DataWait
    from trainer.telemetry.progress import Progress

log = logging.getLogger(__name__)


class StalenessBroken(RuntimeError):
    """A group is older than the bound when it is about to be trained: a bug, never a condition to live with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    groups: Sequence[Group]
    built: BuiltBatch
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

    async def take(self, parts: Parts, groups: Sequence[Group], built: BuiltBatch, waited: DataWait) -> None:
        """One step of the learner. Once begun it goes on where the caller is cancelled: see `ended`."""
        check_ages(groups, step=built.batch.step, max_staleness=parts.cfg.mode.max_staleness)
        await parts.devices.to_learner()
        self._task = asyncio.create_task(self._take(parts, groups, built, waited), name="step")
        await asyncio.shield(self._task)

    async def _take(self, parts: Parts, groups: Sequence[Group], built: BuiltBatch, waited: DataWait) -> None:
        step = built.batch.step
        with parts.telemetry.tracer.span("learner", f"step {step}", tokens=built.batch.num_tokens):
            result = await parts.learner.train_step(built.batch)
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
        step, max_staleness = done.built.batch.step, cfg.mode.max_staleness
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
        record["telemetry/trajectories_left_out"] = telemetry.recorder.num_left_out
    report = parts.pump.last_report
    record |= {f"data/{name}": value for name, value in parts.source.record(groups).items()}
    record |= parts.workers.load_record | parts.devices.record()
    return record | sync_record(report, version_lag=parts.state.step - report.version + report.version_lag)
