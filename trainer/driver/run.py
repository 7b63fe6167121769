"""One run, from the checked configuration to its exit code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from rollout.errors import DataError
from rollout.processes import rare_collections
from trainer.builtin.tiny_model import ensure_model
from trainer.config.describe import describe_run
from trainer.driver import actors as compose
from trainer.driver.actors import start_actors, start_phase
from trainer.driver.checkpointing import log_resumed, prepare_run_dir
from trainer.driver.cluster import Cluster
from trainer.driver.datasets import make_source
from trainer.driver.evaluation import pinned_versions
from trainer.driver.loops import TrainingRun
from trainer.driver.preflight import EnginePlan, PreflightResult, log_inputs, plan_engines, preflight, recheck_resume
from trainer.driver.state import RunState
from trainer.errors import CheckpointError, ConfigurationError, ModelError, first_cause, note_log, one_line
from trainer.learner import checkpoint
from trainer.telemetry import session
from trainer.telemetry.last_words import ACTOR_LOGS
from trainer.telemetry.session import ExitReason, Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainer.config.schema import RunConfig
    from trainer.driver.scratch import Scratch
    from trainer.driver.weight_updates import DedicatedDevices
    from trainer.telemetry.run_dir import RunDir
    from trainer.telemetry.session import Telemetry
    from weight_sync.control.coordinator import SyncCoordinator
    from weight_sync.messages import SyncReport


log = logging.getLogger(__name__)

EXIT_CODES: dict[ExitReason, int] = {"completed": 0, "accuracy_reached": 0, "failed": 1, "interrupted": 130}

START_ERRORS = (ConfigurationError, DataError, ModelError, CheckpointError)
"""A run cannot begin as it is configured (exit code 2)."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a scheduler that ends the job, and a terminal that closes (not under `nohup`, which ignores that)."""
SAME_SIGNAL_S = 1.0
"""Signals closer together count as one: a terminal and a parent process may both pass on the same Ctrl-C."""
_MIN_STEPS = 5
"""`advise` needs this many, and two more for each step of staleness."""


def run(cfg: RunConfig, scratch: Scratch, *, started_at: float) -> int:
    """Run to the end. Returns the exit code: 0 done, 130 interrupted after a clean save.

    Args:
        scratch: may be begun already; the caller closes it.
        started_at: Unix time of the process start.

    Raises:
        ConfigurationError, DataError: nothing but `scratch` is there yet (exit code 2).
        Exception: the first cause of a failure (exit code 1); everything is stopped and written by then.
    """
    checked = preflight(cfg, on_device=partial(scratch.set_device, cfg))
    console = Console(file=sys.stdout)
    state = RunState(started_at=started_at, wall_clock=time.time)
    with session.claimed_run_dir(cfg, console) as run_dir:
        checked = recheck_resume(cfg, checked, run_dir.checkpoints)
        run_dir.write_config(cfg)  # last, since it sets the config of the last start aside
        log_inputs(cfg, checked.inputs)
        if checked.resumed is not None:
            log_resumed(cfg, checked.resumed)
            state.load_state_dict(checked.resumed.state["run"])
        with (
            # Earlier records are not cut yet: see `prepare_run_dir`.
            session.opened(cfg, run_dir, console, age_s=state.time_s) as sinks,
            _summary(cfg, state, run_dir),
        ):
            started = session.describe(device=checked.backend.name, resumed_from_step=state.resumed_from_step)
            session.append(run_dir.environment, started)
            sinks.progress.update(step=state.step)
            sinks.progress.note(f"run directory: {run_dir.path}")
            for text in describe_run(cfg):
                sinks.progress.note(text)
            try:
                asyncio.run(Driver(cfg, state, sinks, checked, scratch).run())
            finally:
                sinks.progress.end(_exit_reason(state).replace("_", " "))
    _say_goodbye(console, state, run_dir, max_staleness=cfg.mode.max_staleness)
    return EXIT_CODES[_exit_reason(state)]


class TrainingFailed(RuntimeError):
    """Training had begun, so whatever its type, the error is not one of the configuration (exit code 1)."""


class Driver:
    """Starts the parts of a run in order, runs the loops, and stops everything, however it ends."""

    def __init__(
        self, cfg: RunConfig, state: RunState, sinks: Telemetry, checked: PreflightResult, scratch: Scratch
    ) -> None:
        self._cfg, self._state, self._telemetry, self._checked = cfg, state, sinks, checked
        self._scratch = scratch
        self._cluster: Cluster | None = None
        self._is_training = False
        self._failure: Exception | None = None
        self._interrupted_at = -math.inf
        self._listen: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Returns when everything is stopped, also after an interrupt."""
        work = asyncio.create_task(self._work(), name="work")
        with _on_signals(partial(self._interrupt, work)) as self._listen:
            try:
                await work
            except asyncio.CancelledError:
                if self._failure is not None:
                    raise self._failure  # noqa: B904 - interrupted while it handled this failure
                if self._state.stop_reason != "interrupted":
                    raise

    def _interrupt(self, work: asyncio.Task[None]) -> None:
        """First Ctrl-C: end after this step, with a checkpoint. Second, or before training: end now."""
        now = asyncio.get_running_loop().time()
        if now - self._interrupted_at < SAME_SIGNAL_S:
            return
        self._interrupted_at = now
        if self._is_training and not self._state.interrupted.is_set():
            log.warning("interrupted: finishing this step and saving; interrupt again to stop at once")
            self._state.stop("interrupted")
            return
        log.warning("interrupted: stopping now")
        if self._failure is None:
            self._state.stop_reason = "interrupted"
        work.cancel()

    async def _work(self) -> None:
        cfg, progress = self._cfg, self._telemetry.progress
        model = asyncio.create_task(ensure_model(cfg), name="model")
        planning = asyncio.create_task(asyncio.to_thread(plan_engines, cfg, self._checked), name="plan of the engines")
        try:
            with start_phase(progress, self._telemetry.tracer, "starting Ray"):
                known = {
                    "run_dir": str(self._telemetry.run_dir.path),
                    "seed": cfg.seed,
                    "started_at": self._state.started_at,
                }
                self._cluster = cluster = await _start_cluster(cfg, self._checked, self._scratch, known)
                self._checked = replace(self._checked, placement=cluster.placement)
                self._listen()  # Ray has installed a SIGTERM handler that ends the process
            try:
                await self._with_cluster(model, planning)
            finally:
                is_orderly = self._state.stop_reason in ("accuracy_reached", "completed")
                logs = None if is_orderly else self._telemetry.run_dir.path / ACTOR_LOGS
                await asyncio.to_thread(cluster.stop, keep_logs_in=logs)
        finally:
            model.cancel()
            await asyncio.gather(model, planning, return_exceptions=True)

    async def _with_cluster(self, model: asyncio.Task[None], planning: asyncio.Task[EnginePlan]) -> None:
        progress, tracer, backend = self._telemetry.progress, self._telemetry.tracer, self._checked.backend
        creating = asyncio.create_task(compose.create_learner(self._cfg, self._checked.placement, backend))
        await asyncio.sleep(0)  # so that the actors of the learner are created before those of the engines
        try:
            # What engines import takes longer than the plan.
            version = self._state.version - 1
            engines = compose.create_engines(self._cfg, self._checked.placement, backend, version=version)
            plan = await planning
            learner, placement = await creating
        finally:
            creating.cancel()
        placement = replace(placement, cache_bytes=plan.cache_bytes)
        self._checked = checked = replace(self._checked, placement=placement)
        self._cfg = cfg = replace(self._cfg, rollout=replace(self._cfg.rollout, max_num_seqs=plan.seats.number))
        if backend.ray_resource is None and cfg.rollout.engines_per_device > 1:
            many = f"rollout.engines_per_device={cfg.rollout.engines_per_device}"
            progress.note(f"{many} has no effect on {backend.name}, whose cores all engines share")
        if plan.seats.why:
            progress.note(f"engines: {plan.seats}")
        actors = compose.Actors(learner=learner, engines=engines, workers=[])
        coordinator = compose.make_coordinator(cfg, actors)
        try:
            with start_phase(progress, tracer, "preparing the model"):
                await model
            actors = compose.with_workers(cfg, checked.placement, actors)
            with start_phase(progress, tracer, "starting engines and learners"):
                await actors.learner.check_directory(self._telemetry.run_dir.path)
                await start_actors(cfg, placement, actors, checked.resumed, tracer, in_turns=plan.in_turns)
            devices = compose.make_devices(cfg, actors, coordinator, tracer)
            with start_phase(progress, tracer, "opening weight sync"):
                await coordinator.open()
                await devices.acquire_for_training()
                await devices.publish(self._state.version)
                live = await devices.sync(self._state.version)
                if cfg.weight_sync.self_test:
                    await coordinator.self_test()
            # Only now, since a start that fails must not cost the work of earlier processes.
            await asyncio.to_thread(prepare_run_dir, cfg, self._telemetry.run_dir, checked.resumed)
            with rare_collections():
                await self._train(actors, coordinator, devices, live)
        finally:
            with progress.phase("stopping"):
                await coordinator.close()
                await actors.close(timeout_s=cfg.trainer.shutdown_timeout_s)

    async def _train(
        self, actors: compose.Actors, coordinator: SyncCoordinator, devices: DedicatedDevices, live: SyncReport
    ) -> None:
        state = self._state
        training = self._training_run(actors, coordinator, devices, live)
        self._is_training = True
        try:
            await training.run(*([] if self._cluster is None else [self._cluster.watch()]))
            state.stop("completed")
        except Exception as error:  # noqa: BLE001 - it is raised again once the steps are saved
            self._is_training = False  # from here an interrupt ends the process at once
            log.error("training failed after %d steps: %s", state.step, one_line(first_cause(error)))
            self._failure, state.stop_reason = error, "failed"
            if isinstance(error, START_ERRORS):
                self._failure = TrainingFailed(f"training failed after {state.step} steps")
                self._failure.__cause__ = error
            await training.emergency_save()
            raise self._failure  # noqa: B904 - it has a cause, or is the error itself
        finally:
            state.discarded_tokens = training.buffer.stats().discarded_tokens
            training.workers.close()
            training.buffer.close()

    def _training_run(
        self, actors: compose.Actors, coordinator: SyncCoordinator, devices: DedicatedDevices, live: SyncReport
    ) -> TrainingRun:
        cfg, state, checked = self._cfg, self._state, self._checked
        source = make_source(cfg, checked.inputs.train, checked.resumed)
        workers = compose.make_fleet(
            cfg, checked.placement, checked.backend, actors, coordinator, devices, lambda: state.live_version
        )
        return TrainingRun(
            cfg,
            state,
            self._telemetry,
            source=source,
            buffer=compose.make_buffer(cfg, checked.resumed, source),
            workers=workers,
            learner=actors.learner,
            devices=devices,
            eval_sets=checked.inputs.evaluation,
            pin_versions=partial(pinned_versions, coordinator=coordinator, workers=workers),
            live=live,
        )


async def _start_cluster(
    cfg: RunConfig, checked: PreflightResult, scratch: Scratch, last_words: Mapping[str, object]
) -> Cluster:
    """Start Ray in a thread that the process does not wait for, since Ray has no deadline for an address that accepts
    connections and does not respond. The kernel ends Ray's processes with the thread that started them, so it stays.

    A cancelled start may finish within `trainer.shutdown_timeout_s`, so that the cluster can be stopped.

    Raises:
        TimeoutError: after `trainer.startup_timeout_s`, and `ray.placement_timeout_s` more on a cluster that is joined.
    """
    limit_s = cfg.trainer.startup_timeout_s + (cfg.ray.placement_timeout_s if cfg.ray.address != "local" else 0.0)
    outcome: concurrent.futures.Future[Cluster] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(
                Cluster.start(cfg, checked.placement, checked.backend, scratch=scratch, last_words=last_words)
            )
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            outcome.set_exception(error)
        threading.Event().wait()

    threading.Thread(target=work, name="ray", daemon=True).start()
    start = asyncio.wrap_future(outcome)
    try:
        await asyncio.wait({start}, timeout=limit_s)
    except asyncio.CancelledError:
        await asyncio.wait({start}, timeout=cfg.trainer.shutdown_timeout_s)
        if start.done() and start.exception() is None:
            await asyncio.to_thread(start.result().stop, keep_logs_in=None)
        raise
    if not start.done():
        raise TimeoutError(
            f"Ray at ray.address={cfg.ray.address} timed out after {limit_s:g} s; check its host and port, or increase "
            "trainer.startup_timeout_s"
        )
    return start.result()


@contextlib.contextmanager
def _on_signals(interrupt: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """`SIGNALS` call `interrupt` in the event loop while the block runs. Yields a function that installs the handlers
    again after others have replaced them."""
    loop = asyncio.get_running_loop()
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heard = [number for number in SIGNALS if not (is_nohup and number == signal.SIGHUP)]

    def listen() -> None:
        for number in heard:
            loop.add_signal_handler(number, interrupt)

    listen()
    try:
        yield listen
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _summary(cfg: RunConfig, state: RunState, run_dir: RunDir) -> Iterator[None]:
    """Write summary.json however the block ends. A disk that refuses it is logged."""
    error = ""
    try:
        yield
    except BaseException as failure:
        error = one_line(first_cause(failure))
        state.stop_reason = "failed"
        log.exception("the run failed")
        note_log(failure, run_dir.log)
        raise
    finally:
        evaluation = state.last_evaluation
        summary = Summary(
            exit_reason=_exit_reason(state),
            steps=state.step,
            version=state.live_version,
            wall_s=state.time_s,
            startup_s=state.startup_s,
            first_accuracy=state.first_accuracy,
            last_accuracy=None if evaluation is None else evaluation.accuracy,
            seed=cfg.seed,
            resumed_from_step=state.resumed_from_step,
            discarded_tokens=state.discarded_tokens,
            num_responses=state.failed_responses.num_responses,
            num_failed_responses=state.failed_responses.num_failed,
            first_failure=state.failed_responses.first_error,
            eval_sets={
                name: {"first_accuracy": first, "last_accuracy": last}
                for name, (first, last) in state.set_accuracies.items()
            },
            error=error,
        )
        try:
            session.write_summary(run_dir.summary, summary)
        except OSError as refused:  # the checkpoints are safe
            log.warning("%s is not written: %s", run_dir.summary, refused)


def _exit_reason(state: RunState) -> ExitReason:
    return "failed" if state.stop_reason is None else state.stop_reason


def _say_goodbye(console: Console, state: RunState, run_dir: RunDir, *, max_staleness: int) -> None:
    """The last line is how it ended; before it the command of `advise`, if there are enough steps for it."""
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    last = state.reached if state.stop_reason == "accuracy_reached" else state.last_evaluation
    own = state.step - (state.resumed_from_step or 0)
    steps = f"{state.step} steps in" if own == state.step else f"{state.step} steps, {own} of them in this process, in"
    parts = [f"{_exit_reason(state).replace('_', ' ')}: {steps} {state.time_s:.0f} s"]
    if state.stop_reason == "completed" and state.step == state.resumed_from_step:
        parts.append("nothing left to train; increase trainer.total_steps to continue")
    if last is not None and state.first_accuracy is not None:
        of_sets = [f", {name} {begin:.3f} -> {end:.3f}" for name, (begin, end) in state.set_accuracies.items()]
        parts.append(
            f"held-out accuracy {state.first_accuracy:.3f} -> {last.accuracy:.3f} (v{last.version}){''.join(of_sets)}"
        )
    if state.stop_reason == "interrupted":
        saved = checkpoint.find_latest(run_dir.checkpoints)
        if saved is None:
            say("no checkpoint was saved, so the same command starts from the beginning")
        else:
            say(f"to resume from {saved.name}: the same command with run_dir={shlex.quote(str(run_dir.path))}")
    if state.failed_responses.num_failed:
        say(f"warning: {state.failed_responses}")
    parts.append(f"see {run_dir.path}")
    if own >= _MIN_STEPS + 2 * max_staleness:
        say(f"which side waited: python -m trainer advise {shlex.quote(str(run_dir.path))}")
    say("; ".join(parts))
