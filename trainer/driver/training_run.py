"""The loops of one run around its parties, from the first prompt to the last checkpoint."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from rollout.errors import BufferClosed
from trainer.driver.checkpointing import Checkpointer
from trainer.driver.evaluation import EvaluationSchedule
from trainer.driver.loops import Batches, RolloutLoop, TrainLoop, build_batches, feed_prompts
from trainer.driver.state import Phase
from trainer.driver.step_metrics import StepMetrics
from trainer.driver.weight_updates import WeightUpdater, raise_error
from trainer.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from trainer.config.schema import RunConfig
    from trainer.driver.evaluation import Evaluator
    from trainer.driver.fleet import Fleet
    from trainer.driver.state import RunState
    from trainer.driver.weight_updates import DedicatedDevices, WaitForEngine
    from trainer.learner.group import LearnerGroup
    from trainer.telemetry.session import Telemetry
    from weight_sync.types import SyncReport


log = logging.getLogger(__name__)


class TrainingRun:
    """Wires the loops. All tasks of a run end together: the first that fails cancels the others."""

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
        evaluator: Evaluator,
        live: SyncReport,
        wait_for_engine: WaitForEngine = raise_error,
    ) -> None:
        """`live` is the report of the version that is live already."""
        self.cfg, self.state, self.telemetry = cfg, state, telemetry
        self.source, self.buffer, self.workers, self.evaluator = source, buffer, workers, evaluator
        self.tasks = asyncio.TaskGroup()
        self.metrics = StepMetrics()
        self.evaluations = EvaluationSchedule(cfg.trainer, evaluator, state, telemetry, tasks=self.tasks)
        self.weights = WeightUpdater(
            devices, on_live=self.on_live, tracer=telemetry.tracer, first=live, wait_for_engine=wait_for_engine
        )
        self._batches: Batches = asyncio.Queue(maxsize=1)
        self.train_loop = TrainLoop(
            cfg,
            state,
            telemetry,
            self.metrics,
            batches=self._batches,
            buffer=buffer,
            source=source,
            workers=workers,
            learner=learner,
            devices=devices,
            weights=self.weights,
            evaluator=evaluator,
            evaluations=self.evaluations,
            checkpointer=Checkpointer(cfg, telemetry, learner=learner, buffer=buffer, source=source, state=state),
        )

    async def run(self, *watches: Coroutine[Any, Any, None]) -> None:
        """Until the last step is saved and evaluated. `watches` run meanwhile, and end the run where they fail.

        Raises:
            Exception: the first failure, of whichever task; the others have ended by then.
            CancelledError: the run was cancelled, even if a task failed because of that: a task group would raise
                the failure instead.
        """
        run = asyncio.create_task(self._run(*watches), name="run")
        try:
            await asyncio.wait({run})
        except asyncio.CancelledError:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            raise
        run.result()

    async def _run(self, *watches: Coroutine[Any, Any, None]) -> None:
        training: asyncio.Task[None] | None = None
        failures: tuple[Exception, ...] = ()
        try:
            async with self.tasks as tasks:
                fleet = self.workers.watch(
                    needs_groups=lambda: self.state.needs_groups, needs_engines=lambda: self.state.needs_engines
                )
                background = [tasks.create_task(watch) for watch in (fleet, *watches)]
                self.workers.exclude_lost_engines()  # one may have missed the first version
                await self.evaluations.at_start()
                background += [tasks.create_task(loop) for loop in (*self._producers(), self.weights.run())]
                training = tasks.create_task(self.train_loop.run(), name="train_loop")
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
        """A version is live: free the slots of its step, which wakes `feed_prompts`, and evaluate it if that is due."""
        self.workers.exclude_lost_engines()
        self.state.live_version = report.version
        self.buffer.release(report.version - 1, version=report.version)
        await self.evaluations.after_sync(report.version)

    def _producers(self) -> list[Coroutine[Any, Any, None]]:
        state, telemetry, metrics, buffer = self.state, self.telemetry, self.metrics, self.buffer
        rollouts = RolloutLoop(
            self.cfg.algorithm, state, telemetry, metrics, buffer=buffer, workers=self.workers, source=self.source
        )
        batches = build_batches(self.cfg, state, telemetry, metrics.queue, buffer=buffer, batches=self._batches)
        loops = (feed_prompts(self.source, buffer, state, metrics.queue), rollouts.run(), batches)
        return [self._while_needed(loop) for loop in loops]

    async def _while_needed(self, loop: Coroutine[Any, Any, None]) -> None:
        """Once no group is needed, nothing that makes batches fails the run: a policy that reached its accuracy gives
        the filters little to keep."""
        try:
            await loop
        except Exception as error:
            if self.state.needs_groups:
                raise
            if not isinstance(first_cause(error), BufferClosed):
                log.warning("no more groups, while the run ends anyway: %s", one_line(first_cause(error)))
            self.state.advance(Phase.DRAINING)
            if self._batches.empty():  # else the train loop has one to take, and ends after it
                self._batches.put_nowait(None)
