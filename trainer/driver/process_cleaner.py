"""The process that cleans up after a driver that was killed.

It starts with the run's cluster and waits for the end of its standard input, which the kernel closes when the driver
dies. Every process of the run has the run's id in its environment, or (where a process title has overwritten that) a
file in the run's scratch directory open, or (where that is not open yet) a parent of the run. Those that remain are
killed, and the directory is removed; Ray alone would take half a minute, and leave the directory. A killed driver's
last words are written here: summary.json, a line in log.txt and on the screen, and the output of the actors.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rollout.processes import is_running
from trainer import subprograms

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


RUN_ID_VAR = "_TANDEM_RUN_ID"
GRACE_S = 1.0
"""For processes that end with their parent."""
DEADLINE_S = 20.0
_CLEAN_SHUTDOWN = b"clean shutdown"
"""What a driver that was not killed writes before it closes the pipe."""


class ProcessCleaner:
    """The driver's end. `last_words` are for `trainer.telemetry.last_words.write`; None writes nothing."""

    def __init__(self, run_id: str, scratch: Path, last_words: Mapping[str, object] | None = None) -> None:
        command = subprograms.command("trainer.driver.process_cleaner", run_id, str(scratch), json.dumps(last_words))
        # In a separate session, so that Ctrl-C in the terminal does not reach it.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, env=subprograms.environment()
        )

    def close(self) -> None:
        """After a clean shutdown: clean up now, and wait for it. Idempotent."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it was killed itself
            if not self._process.stdin.closed:
                self._process.stdin.write(_CLEAN_SHUTDOWN)
            self._process.stdin.close()
        try:
            self._process.wait(timeout=DEADLINE_S + GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def processes_of(run_id: str, scratch: Path, *, spare: Container[int]) -> set[psutil.Process]:
    """The processes of this run and what they have started, except those with the ids `spare`."""
    everyone = [process for process in psutil.process_iter() if process.pid not in spare]
    found = {process for process in everyone if _belongs(process, run_id, f"{scratch}{os.sep}")}
    started: dict[int, list[psutil.Process]] = {}
    for process in everyone:
        with contextlib.suppress(psutil.Error):
            started.setdefault(process.ppid(), []).append(process)
    new = found
    while new := {child for process in new for child in started.get(process.pid, ())} - found:
        found |= new
    return found


def _belongs(process: psutil.Process, run_id: str, inside: str) -> bool:
    """Whether it has the id, or writes to a file `inside`; who only reads a log there is not part of the run."""
    with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or of another user
        if process.environ().get(RUN_ID_VAR) == run_id:
            return True
        files: list[Any] = process.open_files()
        return any(file.path.startswith(inside) and file.flags & (os.O_WRONLY | os.O_RDWR) for file in files)
    return False


def main(run_id: str, scratch: Path, last_words: dict[str, Any] | None) -> None:
    spare = (os.getpid(), os.getppid())  # the driver may be alive and wait for us
    end = sys.stdin.buffer.read()
    known = processes_of(run_id, scratch, spare=spare)  # at once: the parents of some may soon be gone
    if end != _CLEAN_SHUTDOWN and last_words is not None:
        from trainer.telemetry.last_words import write

        try:
            write(Path(last_words["run_dir"]), scratch, last_words)
        except Exception as error:  # noqa: BLE001 - processes must be ended regardless
            with contextlib.suppress(OSError):  # the screen may be gone, too
                sys.stderr.write(f"the end of the run could not be recorded: {error!r}\n")
    began = time.monotonic()
    while (age_s := time.monotonic() - began) < DEADLINE_S:
        known |= processes_of(run_id, scratch, spare=spare)
        known = {process for process in known if is_running(process)}
        if not known:
            break
        for process in known if age_s > GRACE_S else ():
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.05)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
