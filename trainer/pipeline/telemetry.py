"""Everything a run writes and shows, in one bundle that opens and closes together."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from trainer.config.errors import ConfigurationError
from trainer.telemetry.log import logging_to
from trainer.telemetry.progress import Progress
from trainer.telemetry.run_dir import RunDir, cannot_be_written, open_run_dir
from trainer.telemetry.sinks.build import MetricWriter, build_writer
from trainer.telemetry.spans import Tracer
from trainer.telemetry.trajectories import TrajectoryRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.console import Console

    from rollout.buffer.items import WorkItem
    from rollout.types import Group
    from trainer.config.schema import RunConfig
    from trainer.telemetry.trajectories import FailureStatus

T = TypeVar("T")

QUIET_S = 1.0
"""The end of a run may take as long without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Sinks of one run. A thread of its own writes, in order, so the event loop never waits for a disk."""

    run_dir: RunDir
    progress: Progress
    writer: MetricWriter
    tracer: Tracer
    recorder: TrajectoryRecorder | None
    """None with `telemetry.record_trajectories=false`."""
    thread: ThreadPoolExecutor
    slow_thread: ThreadPoolExecutor
    """For what takes long and nobody waits for."""

    async def write_step(self, record: Mapping[str, object]) -> None:
        """One line of metrics, to all sinks and the display. Raises `RunDirLost` if they have no place any more."""
        self.progress.step(record)
        await self._in_thread(self.run_dir.check)
        await self._in_thread(self.writer.write, record)

    async def write_evaluation(self, line: Mapping[str, object]) -> None:
        """One evaluation that ended, for better or worse."""
        await self._in_thread(self.writer.write_evaluation, line)

    async def record_group(self, group: Group, status: Any, reason: str) -> None:
        """One finished group, before any filter."""
        if self.recorder is not None:
            await self._in_thread(lambda recorder: recorder.write(group, status, reason=reason), self.recorder)

    async def record_failure(self, item: WorkItem, status: FailureStatus, reason: str) -> None:
        """An attempt at a group that raised."""
        if self.recorder is not None:
            await self._in_thread(lambda recorder: recorder.write_failure(item, status, reason=reason), self.recorder)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *args)


@contextlib.contextmanager
def claimed_run_dir(cfg: RunConfig, console: Console) -> Iterator[RunDir]:
    """The run directory with its lock, its configuration file and its log, until the block ends."""
    run_dir = open_run_dir(cfg)
    with contextlib.ExitStack() as stack:
        stack.callback(run_dir.close)
        try:
            stack.enter_context(logging_to(run_dir.log, level=cfg.telemetry.log_level, console=console))
            run_dir.write_config(cfg)
        except OSError as error:
            run_dir.discard()
            raise ConfigurationError([cannot_be_written(run_dir.path, error)]) from error
        yield run_dir


@contextlib.contextmanager
def opened(cfg: RunConfig, run_dir: RunDir, console: Console) -> Iterator[Telemetry]:
    """All sinks, until the block ends; then everything is flushed and closed."""
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(contextlib.closing(Progress(cfg, console=console)))
        writer = stack.enter_context(contextlib.closing(build_writer(cfg, run_dir)))
        tracer = stack.enter_context(contextlib.closing(Tracer(run_dir.trace if cfg.telemetry.trace else None)))
        gib = cfg.telemetry.trajectories_gib
        max_bytes = None if gib is None else int(gib * 2**30)
        recorder = (
            TrajectoryRecorder(run_dir.trajectories, max_bytes=max_bytes) if cfg.telemetry.record_trajectories else None
        )
        thread, slow_thread = (
            stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=name)) for name in ("telemetry", "answers")
        )
        stack.callback(_tell_of_answers, progress, slow_thread)
        yield Telemetry(
            run_dir=run_dir,
            progress=progress,
            writer=writer,
            tracer=tracer,
            recorder=recorder,
            thread=thread,
            slow_thread=slow_thread,
        )


def _tell_of_answers(progress: Progress, slow_thread: ThreadPoolExecutor) -> None:
    """Wait for what is still to be written of evaluations, which can be gigabytes, and say so if that takes time."""
    end = slow_thread.submit(lambda: None)  # it has one thread: this comes last
    if wait([end], timeout=QUIET_S).not_done:
        with progress.phase("writing what was answered in evaluations"):
            wait([end])
