"""Starts vLLM's processes, waits for them, and ends them.

    RunServer (of the driver)   ── forks ──> engine process of every engine on its host
    own fork server of an actor ── forks ──> its engine process, where there is no other (another host; tools)

A fork server has imported vLLM, which takes longer than all else in a start with warm caches. Each actor imports only
the part in front of the engine.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rollout.engine.vllm_config import engine_config, known_end_tokens, stat_logger
from rollout.processes import kill_with_parent
from rollout.rendering import load_tokenizer
from weight_sync.vllm import compat as vllm_compat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.interface import EngineSpec
    from rollout.engine.load_meter import LoadMeter


log = logging.getLogger(__name__)

PRELOAD = ("rollout.engine.preload",)
SERVER_VAR = "TANDEM_ENGINE_SERVER"
"""Of the environment of a run's processes: `pid:socket` of its `RunServer`."""
_STREAMS = (1, 2)
_END_TIMEOUT_S = 30.0
"""Of a process that was killed. It ends when its current call to the device does."""
_END_POLL_S = 0.05


class EngineProcess(ForkServerProcess):
    """Has what its parent has at the start, as a spawned process would, and not what the server has: environment,
    priority, stdout and stderr. It is killed with its parent, and with the server."""

    _streams: list[Any]

    def start(self) -> None:
        self._environment, self._niceness = dict(os.environ), os.getpriority(os.PRIO_PROCESS, 0)
        super().start()

    def __getstate__(self) -> dict[str, Any]:  # on its way to the server
        return {**self.__dict__, "_streams": [reduction.DupFd(stream) for stream in _STREAMS]}

    def run(self) -> None:
        for stream, sent in zip(_STREAMS, self._streams, strict=True):
            given = sent.detach()
            os.dup2(given, stream)
            os.close(given)
        with contextlib.suppress(PermissionError):  # the server may have a lower priority
            os.setpriority(os.PRIO_PROCESS, 0, self._niceness)
        _die_with_the_server()
        threading.Thread(target=_die_with_the_parent, daemon=True).start()
        # Only what differs changes: code that sets the process's title looks for it next to the original environment.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update({name: v for name, v in self._environment.items() if os.environ.get(name) != v})
        torch: Any = sys.modules.get("torch")
        if torch is not None:  # OpenMP read the variable in the server, where it may have been different
            with contextlib.suppress(KeyError, ValueError):
                torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class EngineContext(ForkServerContext):
    """What vLLM takes for its `multiprocessing` context."""

    Process = EngineProcess  # pyright: ignore[reportAssignmentType]


class RunServer:
    """The fork server of a run for the engines on this host: it imports vLLM once, from the start of the run on.

    Args:
        folder: of its socket and its log, which is deleted with the run. Engines print where their actors do.
        environ: the whole environment in which vLLM is imported.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        socket_path = folder / "engines"  # short: a socket's path has at most 107 bytes
        with socket.socket(socket.AF_UNIX) as listener, (folder / "engines.log").open("wb") as log_file:
            listener.bind(str(socket_path))
            listener.listen()
            alive_r, self._alive_w = os.pipe()  # the server ends when our end is closed, so with this process
            program = f"main({listener.fileno()}, {alive_r}, {[*PRELOAD]!r})"
            # In a session of its own: Ctrl-C in the terminal is for the driver. Unbuffered: what is in a buffer at a
            # fork, the engine would print as well.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", f"from multiprocessing.forkserver import main; {program}"],
                pass_fds=(listener.fileno(), alive_r),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(alive_r)
        self.address = f"{self._process.pid}:{socket_path}"

    def close(self) -> None:
        """Ends the server, and the engines that are left."""
        self._process.kill()
        self._process.wait()
        os.close(self._alive_w)


def begin_imports() -> None:
    """Use the server of the run, or start one, if there is none yet; does not wait for its imports. Its socket is next
    to those of vLLM if the run places them: this process ends by a kill, and would leave one in the temporary
    directory."""
    if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
        multiprocessing.current_process()._config["tempdir"] = folder  # pyright: ignore[reportAttributeAccessIssue]
    pid, _, address = os.environ.get(SERVER_VAR, "").partition(":")
    if address and Path(address).exists() and _is_running(int(pid)):  # else it is of another host, or was killed
        server: Any = forkserver._forkserver  # pyright: ignore[reportAttributeAccessIssue]
        if server._forkserver_address != address:
            server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
            server.ensure_running = resource_tracker.ensure_running
        return
    multiprocessing.set_forkserver_preload([*PRELOAD])
    forkserver.ensure_running()


def _die_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()  # it is ready when the kernel closes the parent's end of a pipe
        os.kill(os.getpid(), signal.SIGKILL)


def _die_with_the_server() -> None:
    kill_with_parent()
    # The server waits for the end of all processes that hold this pipe open: of its owner alone, from here on.
    alive_fd = getattr(forkserver._forkserver, "_forkserver_alive_fd", None)  # pyright: ignore[reportAttributeAccessIssue]
    if alive_fd is not None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, alive_fd)
        os.close(nothing)


def launch(spec: EngineSpec, meter: LoadMeter) -> tuple[AsyncLLM, list[int], Any]:
    """Import vLLM and start its processes (blocking). The engine, the tokens that end a response, and the tokenizer of
    `spec`, if any, which finds stop strings in front of the engine. `meter` gets the load of every step, with
    `spec.reports_load`."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.vllm_scheduler import receive_step_logprobs, send_step_logprobs

    vllm_compat.check_vllm_version()
    vllm_compat.start_engines_in(EngineContext() if spec.forks else None)
    config = engine_config(spec)
    send_step_logprobs(config)
    stop = set(spec.stop_token_ids)
    found = config.model_config.try_get_generation_config().get("eos_token_id")
    if found is not None:
        stop.update([found] if isinstance(found, int) else found)
    tokenizer: Any = None
    if spec.tokenizer:
        tokenizer = load_tokenizer(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
        stop.update(set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id})
    listeners: list[Any] | None = [stat_logger(meter)] if spec.reports_load else None
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=listeners)
    llm.output_processor.tokenizer = tokenizer
    receive_step_logprobs(llm)
    return llm, known_end_tokens(stop, config.model_config.get_vocab_size()), tokenizer


def engine_pids(llm: AsyncLLM) -> list[int]:
    """vLLM's engine process and all below it: the workers of tensor parallelism hold the devices. Call it while the
    engine runs: processes that outlive it get another parent."""
    return [process.pid for process in _process_tree(_processes(llm))]


def shut_down(llm: AsyncLLM) -> None:
    """Stop vLLM's processes and wait until they are gone (blocking). Logs an error if one is not. vLLM does not wait
    for a process that it had to kill: its memory is not free yet, and its entry in the table of processes stays."""
    processes = _processes(llm)
    tree = _process_tree(processes)
    llm.shutdown()
    deadline = time.monotonic() + _END_TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    while (left := [process.pid for process in tree if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(_END_POLL_S)
    if left:
        text = "engine processes %s still run %.0f s after they were killed; their device memory is not free"
        log.error(text, left, _END_TIMEOUT_S)


def _processes(llm: AsyncLLM) -> list[Any]:
    manager: Any = llm.engine_core.resources.engine_manager
    return list(getattr(manager, "processes", ()))


def _process_tree(processes: list[Any]) -> list[psutil.Process]:
    tree: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(process.pid)
            tree += [engine, *engine.children(recursive=True)]
    return tree


def _is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return _runs(psutil.Process(pid))
    return False


def _runs(process: psutil.Process) -> bool:
    """False for a zombie: it holds nothing, and its new parent may never reap it."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
