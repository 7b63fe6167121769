"""Looks at processes that may end at any moment: one that is gone when it is asked about is not there, and no error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable


def is_running(process: psutil.Process | int) -> bool:
    """Given as itself or by its id. A zombie that waits for its parent does not run."""
    try:
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """Empty if it is gone or a zombie."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_until(condition: Callable[[], object], *, within_s: float, what: str) -> None:
    """
    Raises:
        TimeoutError: with `what`.
    """
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} ({within_s:.1f} s)")
        time.sleep(0.002)
