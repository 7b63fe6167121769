"""Metrics to Weights & Biases, in a child process: this module is run by `python -m` there.

So nothing that the package does can stop the run: asking for a login, waiting for a network that is gone, hooks that
run when a process ends. Each answer of the child has a deadline; if it is late, the child is killed.

The protocol: a line of JSON goes to the child over a socket, and one comes back for each. First the arguments of
`wandb.init`, then the numbers of each step, at last null. If the socket breaks before that, the driver was killed, and
the child reports the run as failed. The child imports the standard library and `wandb` alone, so it starts fast.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

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
            raise RuntimeError(f"wandb gave no answer within {timeout_s:g} s; its process is killed") from error
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
        """Kill the child and the package's own helper process. Idempotent."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._socket.close()


def _settings(config: RunConfig, run_dir: RunDir) -> dict[str, object]:
    """Arguments of `wandb.init`."""
    from trainer.config.plain import to_plain

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
    """The child, and our end of the socket to it; what the package prints goes to `output`."""
    from trainer import subprograms

    ours, theirs = socket.socketpair()
    with theirs, output.open("ab") as file:
        process = subprocess.Popen(
            subprograms.command("trainer.telemetry.wandb", str(theirs.fileno()), str(FINISH_S)),
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
    """The id of this run directory's run at the service: from `file`, which the first process writes."""
    from trainer.telemetry.run_dir import write_atomically

    if file.exists() and (known := file.read_text(encoding="utf-8").strip()):
        return known
    new = secrets.token_hex(8)
    write_atomically(file, f"{new}\n")
    return new


def serve(connection: socket.socket, *, finish_s: float) -> None:
    """The child. Returns when everything is sent. Once the socket breaks, the process ends within `finish_s`."""
    threading.Thread(target=_end_after, args=(connection, finish_s), name="end", daemon=True).start()
    run: Any = None
    for line in connection.makefile("rb"):
        message = json.loads(line)
        try:
            if run is None:
                run = _begin(message)
                answer = {"done": run.url or ""}
            elif message is None:
                run.finish()
                answer = {"done": ""}
            else:
                run.log(message)
                answer = {"done": ""}
        except Exception as error:  # noqa: BLE001 - the other side counts it
            answer = {"failed": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):  # the driver is gone, which the next read shows
            connection.sendall(json.dumps(answer).encode() + b"\n")
        if message is None:
            return
    if run is not None:
        run.finish(exit_code=1)


def _begin(settings: dict[str, Any]) -> Any:
    run = importlib.import_module("wandb").init(**settings)
    run.define_metric("*", step_metric="step")
    return run


def _end_after(connection: socket.socket, seconds: float) -> None:
    """Also where the package or one of its hooks would keep the process alive."""
    broken = select.poll()
    broken.register(connection, 0)  # a broken socket is reported in any case
    broken.poll()
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), finish_s=float(sys.argv[2]))
