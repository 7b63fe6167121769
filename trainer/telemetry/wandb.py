"""Metrics to Weights & Biases, in a child process that runs this module, so that the package cannot stop the run: by a
login, a lost network, or hooks at the end of a process. A child whose reply is late is killed.

The driver sends the arguments of `wandb.init`, the numbers of each step, and at last None; the child replies to each.
If the pipe breaks before None, the driver was killed, and the child reports a failed run.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

from rollout.processes import exit_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.telemetry.run_dir import RunDir


logger = logging.getLogger(__name__)

BEGIN_S = 150.0
"""The package itself gives the service 90 s."""
WRITE_S = 30.0
"""The package queues records: a write does not wait for the network."""
FINISH_S = 60.0
"""The package would wait for the network indefinitely."""


class WandbSink:
    """One run of the service per run directory, which a resumed run continues. `step` is the axis of every chart: the
    service's count only grows, and would leave out the steps that a resumed run computes again."""

    name = "wandb"

    def __init__(self, config: RunConfig, run_dir: RunDir, *, begin_s: float = BEGIN_S) -> None:
        """Raises `RuntimeError` with the error of the package, or if it does not reply."""
        self._folder = run_dir.path / "wandb"
        self._folder.mkdir(exist_ok=True)
        settings = _settings(config, run_dir)
        self._process, self._pipe = _start(self._folder / "process.txt")
        try:
            url = self._ask(settings, timeout_s=begin_s)
        except RuntimeError:
            self._end()
            raise
        if url:
            logger.info("wandb: %s", url)
        else:
            logger.warning("wandb is not online (no login, or WANDB_MODE); `wandb sync` sends %s", self._folder)

    def write(self, record: Mapping[str, object], *, timeout_s: float = WRITE_S) -> None:
        """Raises `RuntimeError`, after a timeout always."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._ask(numbers, timeout_s=timeout_s)

    def close(self, *, timeout_s: float = FINISH_S) -> None:
        """Raises `RuntimeError` if the rest is not sent in time; the files stay."""
        if self._process.poll() is not None:
            return  # each failed write has been reported
        try:
            self._ask(None, timeout_s=timeout_s)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; `wandb sync` sends what is in {self._folder}") from error
        finally:
            self._end()

    def _ask(self, message: object, *, timeout_s: float) -> str:
        """Returns the address of the run."""
        output = self._folder / "process.txt"
        if self._process.poll() is not None:
            raise RuntimeError(f"the process of wandb has ended; see {output}")
        try:
            self._pipe.send(message)
            is_late = not self._pipe.poll(timeout_s)
            error, url = ("", "") if is_late else self._pipe.recv()
        except (OSError, EOFError) as broken:
            self._end()
            raise RuntimeError(f"the process of wandb ended; see {output}") from broken
        if is_late:
            self._end()
            raise RuntimeError(f"wandb timed out after {timeout_s:g} s; killing its process")
        if error:
            raise RuntimeError(error)
        return url

    def _end(self) -> None:
        """Kill the child and the package's own helper process. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._pipe.close()


def _settings(config: RunConfig, run_dir: RunDir) -> dict[str, object]:
    """Arguments of `wandb.init`."""
    telemetry = config.telemetry
    return {
        "project": telemetry.wandb_project,
        "entity": telemetry.wandb_entity or None,
        "group": telemetry.wandb_group or None,
        "tags": [tag for tag in telemetry.wandb_tags.split("+") if tag] or None,
        "name": config.name,
        "id": run_id(run_dir.wandb_run_id),
        "resume": "allow",
        "dir": str(run_dir.path),
        "config": asdict(config),
    }


def _start(output: Path) -> tuple[subprocess.Popen[bytes], Connection]:
    """The child, which prints to `output`, and our end of the pipe."""
    from trainer import subprograms

    ours, theirs = Pipe()
    with theirs, output.open("ab") as file:
        process = subprocess.Popen(
            subprograms.command("trainer.telemetry.wandb", str(theirs.fileno()), str(FINISH_S)),
            stdin=subprocess.DEVNULL,  # no terminal, no question
            stdout=file,
            stderr=file,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
            # Unbuffered: the file has what the package printed, however the process ends.
            env={**subprograms.environment(), "PYTHONUNBUFFERED": "1"},
        )
    return process, ours


def run_id(file: Path) -> str:
    """At the service, from `file`, which the first process writes."""
    from trainer.files import write_atomically

    if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    new = secrets.token_hex(8)
    write_atomically(file, f"{new}\n")
    return new


def serve(pipe: Connection, *, finish_s: float) -> None:
    """The child, until everything is sent. After the driver's end it exits within `finish_s`, even if the package
    hangs."""
    exit_with_parent(grace_s=finish_s)
    run: Any = None
    with contextlib.suppress(OSError, EOFError):  # an OSError if the driver was killed before it had read a reply
        while True:
            message, error = pipe.recv(), ""
            try:
                if run is None:
                    run = importlib.import_module("wandb").init(**message)
                    run.define_metric("*", step_metric="step")
                else:
                    run.finish() if message is None else run.log(message)
            except Exception as raised:  # noqa: BLE001 - the other side counts it
                error = f"{type(raised).__name__}: {raised}"
            pipe.send((error, (run is not None and run.url) or ""))
            if message is None:
                return
    if run is not None:
        run.finish(exit_code=1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), finish_s=float(sys.argv[2]))
