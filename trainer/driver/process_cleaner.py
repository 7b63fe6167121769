"""The process that cleans up after a driver that was killed.

A driver that ends without a word (SIGKILL, or Ray, which ends the process when its raylet has died) leaves its last
words to be written here: summary.json, a line in log.txt and on the screen, and what the actors printed.

A small process of its own, started with the run's cluster. It waits for the end of its standard input, which the kernel
closes when the driver dies. All processes of the run carry the run's mark in their environment, or at least (where a
process title has overwritten the environment) have files of the run's scratch directory open. Those that are still
there are killed, and the directory is removed. Without it some of Ray's helpers would outlive a killed driver by half a
minute, and their directory for good.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer import subprograms

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


RUN_ID_VAR = "TANDEM_RUN_ID"
GRACE_S = 1.0
"""For processes that end by themselves when their parent is gone."""
DEADLINE_S = 20.0
_IN_ORDER = b"in order"
"""What the driver says before it closes the pipe, if it is there to say it."""


class ProcessCleaner:
    """The driver's end of it. `close` after an orderly shutdown; SIGKILL needs no call.

    Args:
        last_words: of the run, for `trainer.telemetry.last_words.write`; None writes nothing.
    """

    def __init__(self, run_id: str, scratch: Path, last_words: Mapping[str, object] | None = None) -> None:
        command = subprograms.command("trainer.driver.process_cleaner", run_id, str(scratch), json.dumps(last_words))
        # In a session of its own, so that Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env=subprograms.environment()
        )

    def close(self) -> None:
        """Let it clean up now, and wait until it is done. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed itself
            if not self._process.stdin.closed:
                self._process.stdin.write(_IN_ORDER)
            self._process.stdin.close()
        try:
            self._process.wait(timeout=DEADLINE_S + GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def processes_of(run_id: str, scratch: Path, *, spare: Container[int]) -> list[int]:
    """Ids of the processes that belong to this run, except those in `spare`."""
    mark, inside = f"{RUN_ID_VAR}={run_id}".encode(), f"{scratch}{os.sep}"
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid not in spare and (_has_mark(pid, mark) or _has_open(pid, inside))]


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone meanwhile, or of another user
        return False


def _has_open(pid: int, inside: str) -> bool:
    """Whether the process writes to a file in the directory; somebody who reads a log there is not part of the run."""
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        return any(str(link.readlink()).startswith(inside) and _is_written(pid, link.name) for link in links)
    except OSError:
        return False


def _is_written(pid: int, descriptor: str) -> bool:
    fields = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text().split()
    return bool(int(fields[fields.index("flags:") + 1], 8) & (os.O_WRONLY | os.O_RDWR))


def main(run_id: str, scratch: Path, last_words: dict[str, Any] | None) -> None:
    """Wait for the driver's end, then clean up."""
    spare = (os.getpid(), os.getppid())  # the driver may still be there, and wait for us
    if sys.stdin.buffer.read() != _IN_ORDER and last_words is not None:
        from trainer.telemetry.last_words import write

        try:
            write(Path(last_words["run_dir"]), scratch, last_words)
        except Exception as error:  # noqa: BLE001 - whatever it is, processes are ended below
            with contextlib.suppress(OSError):  # the screen may be gone, too
                sys.stderr.write(f"the end of the run could not be written down: {error!r}\n")
    give_up = time.monotonic() + GRACE_S
    while processes_of(run_id, scratch, spare=spare) and time.monotonic() < give_up:
        time.sleep(0.05)
    give_up += DEADLINE_S
    while (pids := processes_of(run_id, scratch, spare=spare)) and time.monotonic() < give_up:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
