"""Runs one case as a process of its own, with a deadline, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
END_S = 60.0
"""A run that is told to stop at once may take so long to stop its actors; then it is killed."""
TWO_SIGNALS_S = 1.5
"""A run takes signals that come closer together for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a run ended."""

    command: tuple[str, ...]
    started_at: float
    """Unix time."""
    wall_s: float
    timeout_s: float
    """Its limit."""
    exit_code: int
    timed_out: bool
    last_words: str
    """The last lines that it wrote to the screen."""

    @property
    def problem(self) -> str:
        """Why it cannot be trusted to have done all its steps; empty if it can."""
        if self.timed_out:
            return f"did not end within {self.timeout_s:g} s"
        return "" if self.exit_code == 0 else f"exit code {self.exit_code}: {self.last_words}"


def run_case(config_dir: Path, run_dir: Path, overrides: Sequence[str], *, timeout_s: float) -> Ended:
    """One `python -m trainer`, from beginning to end. An older `run_dir` is removed; its output is beside it."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    chosen = ["--config-dir", str(config_dir), "--config-name", "bench", *overrides, f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "trainer", *chosen]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    output = output_of(run_dir)
    started_at = time.time()
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            timed_out = False
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
            timed_out = process.poll() is None
            wall_s = time.time() - started_at
        finally:
            code = _end(process)
    return Ended(
        command=tuple(command),
        started_at=started_at,
        wall_s=wall_s,
        timeout_s=timeout_s,
        exit_code=code,
        timed_out=timed_out,
        last_words=_last_words(output),
    )


def output_of(run_dir: Path) -> Path:
    """What the run wrote to the screen."""
    return run_dir.with_name(f"{run_dir.name}.output.txt")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Ends the run, first in order, then by force with its whole process group. Returns the exit code."""
    for _ in range(2):  # the first signal asks for the end after this step, the second for the end now
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TWO_SIGNALS_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    # Also when the driver has ended: its group may have outlived it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _last_words(output: Path) -> str:
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-3:])[-600:]
