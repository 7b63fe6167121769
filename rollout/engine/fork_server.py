"""The engine's process, forked from a server that imports vLLM while this process is still importing it too.

vLLM spawns that process once it has been imported here, and there the same imports begin again: of every start they
take ten seconds and more, one after the other. A server of the standard library's `multiprocessing` makes them run side
by side. It only imports, so no device is touched before the fork. It ends with the processes that it has forked.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from weight_sync import vllm_compat

FORK_SAFE = ("cpu", "cuda")
"""Devices on which importing vLLM touches none, as vLLM itself relies on there. On others its processes are spawned."""
PRELOAD = ("rollout.engine.core_imports",)

_server_runs = False


class EngineProcess(ForkServerProcess):
    """Gets the environment of its parent as it is at the start, as a spawned process would; the server is older."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        _set_threads(self._environment.get("OMP_NUM_THREADS", ""))
        super().run()


class EngineContext(ForkServerContext):
    """What vLLM takes for its `multiprocessing` context."""

    Process = EngineProcess  # pyright: ignore[reportAssignmentType]


def begin_imports(device: str) -> None:
    """Start the server for engines on `device` (a backend's name), where that is safe. Its imports are not waited for."""
    global _server_runs
    if _server_runs or device not in FORK_SAFE:
        return
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()
    _server_runs = True


def fork_engines() -> None:
    """Let vLLM fork its engine processes from the server from here on, if there is one. Imports vLLM."""
    if _server_runs:
        vllm_compat.start_engines_in(EngineContext())


def _set_threads(text: str) -> None:
    """OpenMP has read the variable in the server, where it may have been another."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(ValueError):
            torch.set_num_threads(int(text))
