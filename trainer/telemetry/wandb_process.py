"""The process that talks to Weights & Biases.

A line of JSON comes in over a socket, and one goes out for each: first the arguments of `wandb.init`, then the numbers
of each step, at last null. If the line breaks before that, the driver was killed, and the run is told to have failed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import sys
import threading
import time
from typing import Any


def serve(connection: socket.socket, *, finish_s: float) -> None:
    """Returns when everything is sent. Once the line breaks, the process ends within `finish_s`, whatever it is in."""
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
        with contextlib.suppress(OSError):  # nobody is there any more, which the next line tells
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
    """This process, also where the package or one of its hooks keeps it from its end."""
    broken = select.poll()
    broken.register(connection, 0)  # a broken line is told in any case
    broken.poll()
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), finish_s=float(sys.argv[2]))
