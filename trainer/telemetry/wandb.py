"""Metrics to Weights & Biases, by a process of its own.

So whatever it does costs the run nothing: asking for a login, waiting for a network that is gone, hooks that run when a
process ends. Each answer of that process has a deadline; one that is late is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

from trainer import subprograms
from trainer.config.convert import to_plain
from trainer.telemetry.run_dir import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainer.config.schema import RunConfig
    from trainer.telemetry.run_dir import RunDir


logger = logging.getLogger(__name__)

BEGIN_S = 150.0
"""The package itself gives the service 90 s."""
WRITE_S = 30.0
"""The package queues what it is given: a write does not wait for the network."""
FINISH_S = 60.0
"""The package waits for the network as long as it takes; this is how long it may."""


class WandbSink:
    """Numbers go to one run of the service per run directory, whose processes all go on with it.

    Files stay in the run directory. `step` is the axis of every chart, and not the service's own count of lines: that
    only grows, and what a resumed run makes again would be left out there.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, run_dir: RunDir, *, begin_s: float = BEGIN_S) -> None:
        """Raises `RuntimeError` with what the package says, or that it says nothing."""
        self._folder = run_dir.path / "wandb"
        self._folder.mkdir(exist_ok=True)
        settings = _settings(config, run_dir)
        self._process, self._socket = _start(self._folder / "process.txt")
        self._answers = self._socket.makefile("rb")
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
        """Raises `RuntimeError` if it is not taken; after one that took too long, none is."""
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        self._ask(numbers, timeout_s=timeout_s)

    def close(self, *, timeout_s: float = FINISH_S) -> None:
        """Send the rest. Raises `RuntimeError` if it is not sent in time; the files stay."""
        if self._process.poll() is not None:
            return  # each record that it did not take has been told
        try:
            self._ask(None, timeout_s=timeout_s)
        except RuntimeError as error:
            raise RuntimeError(f"{error}; `wandb sync` sends what is in {self._folder}") from error
        finally:
            self._end()

    def _ask(self, message: object, *, timeout_s: float) -> str:
        """What the process answers."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the process of wandb has ended; see {self._folder / 'process.txt'}")
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(json.dumps(message).encode() + b"\n")
            line = self._answers.readline()
        except TimeoutError as error:
            self._end()
            raise RuntimeError(f"wandb gave no answer within {timeout_s:g} s; its process is ended") from error
        except OSError:
            line = b""
        if not line:
            self._end()
            raise RuntimeError(f"the process of wandb ended; see {self._folder / 'process.txt'}")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer["done"]

    def _end(self) -> None:
        """Whatever it is in; the package's own helper ends with it. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._socket.close()


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
        "config": to_plain(config),
    }


def _start(output: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process, and our end of the line to it; what the package prints goes to `output`."""
    ours, theirs = socket.socketpair()
    with theirs, output.open("ab") as file:
        process = subprocess.Popen(
            subprograms.command("trainer.telemetry.wandb_process", str(theirs.fileno()), str(FINISH_S)),
            stdin=subprocess.DEVNULL,  # no terminal, no question
            stdout=file,
            stderr=file,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
            # Unbuffered: what the package has said is in the file, however the process ends.
            env={**subprograms.environment(), "PYTHONUNBUFFERED": "1"},
        )
    return process, ours


def run_id(file: Path) -> str:
    """What the service knows the run of this directory by: from `file`, which is written by the first process."""
    if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    new = secrets.token_hex(8)
    write_atomically(file, f"{new}\n")
    return new
