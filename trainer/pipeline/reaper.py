"""Ends every process of a run once its driver is gone, whether it stopped in order or was killed with SIGKILL.

A small process of its own, started with the run's cluster. It waits for the end of its standard input, which the kernel
closes when the driver dies. All processes of the run carry the run's mark in their environment; those that are still
there are killed, and the cluster's scratch directory is removed. Without it some of Ray's helpers would outlive a
killed driver by half a minute, and their directory for good.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "TANDEM_RUN_ID"
GRACE_S = 1.0
"""For processes that end by themselves when their parent is gone."""
DEADLINE_S = 20.0


class Reaper:
    """The driver's end of it. `close` after an orderly shutdown; SIGKILL needs no call."""

    def __init__(self, run_id: str, scratch: Path) -> None:
        command = [sys.executable, "-m", "trainer.pipeline.reaper", run_id, str(scratch)]
        # In a session of its own, so that Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Let it clean up now, and wait until it is done. Idempotent."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=DEADLINE_S + GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def marked_processes(run_id: str) -> list[int]:
    """Process ids, other than our own, whose environment carries the mark of this run."""
    mark = f"{MARK}={run_id}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or of another user
            continue
        if mark in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


def end_processes(run_id: str) -> int:
    """SIGKILL what is left of a run, until nothing is. Returns how many processes that were."""
    ended: set[int] = set()
    give_up = time.monotonic() + DEADLINE_S
    while (pids := marked_processes(run_id)) and time.monotonic() < give_up:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            ended.add(pid)
        time.sleep(0.05)
    return len(ended)


def main(run_id: str, scratch: Path) -> None:
    """Wait for the driver's end, then clean up."""
    sys.stdin.buffer.read()
    give_up = time.monotonic() + GRACE_S
    while marked_processes(run_id) and time.monotonic() < give_up:
        time.sleep(0.05)
    end_processes(run_id)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
