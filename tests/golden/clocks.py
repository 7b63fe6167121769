"""Virtual time for everything that asks for the time, and what is logged meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from types import FunctionType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLOCKS = (time.time, time.monotonic, time.perf_counter)
WATCHED = ("trainer", "rollout", "weight_sync")


class _VirtualClock:
    """Of the event loop that runs. Between two of them it stands still, and the next one goes on from there."""

    def __init__(self) -> None:
        self._now = self._begin = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self) -> float:
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            if loop is not self._loop:
                self._loop, self._begin = loop, self._now - loop.time()
            self._now = self._begin + loop.time()
        return self._now


@contextlib.contextmanager
def virtual_clocks() -> Iterator[None]:
    """Clocks are those of the event loop, also where `clock` is a default of a constructor."""
    now = _VirtualClock()
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in WATCHED]
    classes = [entry for module in modules for entry in vars(module).values() if isinstance(entry, type)]
    functions = {id(entry): entry.__init__ for entry in classes if isinstance(entry.__init__, FunctionType)}.values()
    with pytest.MonkeyPatch.context() as patch:
        for function in functions:
            defaults = function.__kwdefaults__ or {}
            for name in [name for name, default in defaults.items() if default in CLOCKS]:
                patch.setitem(defaults, name, now)
        for clock in CLOCKS:
            patch.setattr(time, clock.__name__, now)
        yield


@contextlib.contextmanager
def logged(run_dir: Path) -> Iterator[list[str]]:
    """What is logged in this block, without times and tracebacks; `run_dir` is called RUN."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name.partition(".")[0] in WATCHED:
                lines.append(f"{record.levelname} {record.getMessage()}".replace(str(run_dir), "RUN"))

    handler, root = Collect(logging.INFO), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
