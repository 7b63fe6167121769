"""Runs `python -m trainer` in a child process with a deadline, for tools that compare runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING, NamedTuple

from trainer import subprograms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

END_S = 60.0
"""Time to stop the actors of a run that was asked to stop now, before it is killed."""
TWO_SIGNALS_S = 1.5
"""A run treats signals that are closer together as one."""


class RunOutcome(NamedTuple):
    command: tuple[str, ...]
    started_at: float
    """Unix time."""
    wall_s: float
    timeout_s: float
    exit_code: int
    timed_out: bool
    output: tuple[str, ...]
    """Lines of the console."""

    @property
    def problem(self) -> str:
        """Why it may lack steps; empty if it ended well."""
        if self.timed_out:
            return f"did not end within {self.timeout_s:g} s"
        last_lines = [line.strip() for line in self.output if line.strip()][-3:]
        return "" if self.exit_code == 0 else f"exit code {self.exit_code}: {' | '.join(last_lines)[-600:]}"


def run_trainer(arguments: Sequence[str], *, output: Path, timeout_s: float) -> RunOutcome:
    """One `python -m trainer`, from beginning to end. Its console output goes to the file `output`."""
    command = subprograms.command("trainer", *arguments)
    started_at = time.time()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=subprograms.ROOT, env=subprograms.environment(), stdout=file, stderr=subprocess.STDOUT,
            process_group=0,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            timed_out, wall_s = process.poll() is None, time.time() - started_at
        finally:
            exit_code = _end(process)
    lines = tuple(output.read_text(encoding="utf-8", errors="replace").splitlines())
    return RunOutcome(tuple(command), started_at, wall_s, timeout_s, exit_code, timed_out, lines)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ask the run to end, then kill its process group, which may outlive the driver. Returns the exit code."""
    for _ in range(2):  # the first signal asks for the end after this step, the second for the end now
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TWO_SIGNALS_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
