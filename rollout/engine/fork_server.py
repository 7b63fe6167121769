"""The engine's process, forked from a server that imports vLLM while this process is still importing it too.

vLLM spawns that process once it has been imported here, and there the same imports begin again: of every start they
take ten seconds and more, one after the other. A server of the standard library's `multiprocessing` makes them run side
by side. It only imports, so no device is touched before the fork (`Capabilities.engine_forks` says where that holds;
elsewhere vLLM spawns, as ever).

The server ends with its owner, however that ends, and the kernel then kills what it has forked: Ray, which kills the
children of an actor when it ends one, does not know of grandchildren. (`OrphanReaper` does the same for an engine that
was spawned and for the workers of any, and is a second net for one that was forked.)
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

PR_SET_PDEATHSIG = 1
"""Of `prctl(2)`: the signal that a process gets when its parent has died."""
PRELOAD = ("rollout.engine.core_imports",)


class EngineProcess(ForkServerProcess):
    """Gets the environment of its parent as it is at the start, as a spawned process would; the server is older."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        _die_with_the_server()
        _become(self._environment)
        _set_threads(self._environment.get("OMP_NUM_THREADS", ""))
        super().run()


class EngineContext(ForkServerContext):
    """What vLLM takes for its `multiprocessing` context."""

    Process = EngineProcess  # pyright: ignore[reportAssignmentType]


def begin_imports() -> None:
    """Start the server, if there is none yet. Does not wait for its imports.

    Its socket lies where those of vLLM do, if the run has set that: this process ends by a kill, and would leave one in
    the temporary directory.
    """
    if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
        multiprocessing.current_process()._config["tempdir"] = folder  # pyright: ignore[reportAttributeAccessIssue]
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


def _die_with_the_server() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The server waits for the end of all who hold this pipe open: of its owner alone, from here on.
    alive_fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)  # pyright: ignore[reportAttributeAccessIssue]
    if alive_fd is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, alive_fd)
        os.close(nothing)


def _become(environment: Mapping[str, str]) -> None:
    """Changes only what differs: whoever sets the process's title looks for it beside the environment it began with."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})


def _set_threads(text: str) -> None:
    """OpenMP has read the variable in the server, where it may have been another."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        with contextlib.suppress(ValueError):
            torch.set_num_threads(int(text))
