"""Processes that must not outlive their owner, nor leave behind what they have started; and their garbage collector.

`fork_under_guards` is for a process that runs users' code, which may start programs; `OrphanReaper` for processes that
a library starts; `exit_with_parent` and `kill_with_parent` for a child that starts none.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GUARD_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_KILL_TREE_S = 5.0
"""To kill a tree; a process that the kernel holds longer stays."""
_PARENT_POLL_S = 0.5
_SHARED_MEMORY = tuple(f"/dev/shm/{name}" for name in ("psm_", "vllm_dist_", "sem.mp-"))


GC_THRESHOLDS = (50_000, 20, 20)
"""See `gc.set_threshold`. The default (700, 10, 10) scans everything each time that the objects in flight grow by a
quarter: in a rollout worker with 10,000 trajectories that was half of all processor time, in pauses of 0.3 s of its
event loop. Groups form no cycles, so there is little to find: tracebacks and cancelled tasks."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """In the block, what exists already is never scanned, and full collections are rare. Objects that were frozen
    before stay so."""
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not was_frozen:
            gc.unfreeze()


def kill_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it ends. Linux only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_running(process: psutil.Process) -> bool:
    """False for a zombie: it holds nothing, and its parent may never ask how it ended."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def exit_with_parent(parent_pid: int | None = None, *, grace_s: float = 0.0) -> None:
    """From now on this process exits `grace_s` and at most half a second after its parent (None: the present one). On
    every system, and whatever thread of the parent started it."""
    parent_pid = os.getppid() if parent_pid is None else parent_pid

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_PARENT_POLL_S)
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---------------------------------------------------------------- guards


def fork_under_guards(parent_pid: int) -> None:
    """Returns in a grandchild. This process and the one between become its guards: when the parent sends SIGTERM or is
    gone, or the grandchild ends, they kill all that it has started, and exit as it did. Call it in a process with one
    thread. Linux only.

    Orphans below the guards become their children ("subreaper"), even if they left the session. Two guards, because one
    may be killed: Ray kills the children of a worker that ends, and a program may kill its parent.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _GUARD_SIGNALS)
    for _ in range(2):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # The signal is for the end of the thread that started us: that of the event loop, which outlives the pool.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
        parent_pid = os.getpid()
        if child := os.fork():
            _guard(child)
    kill_with_parent()
    if os.getppid() != parent_pid:
        os._exit(1)
    os.setsid()  # a signal to the group of the grandchild does not reach the guards
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _GUARD_SIGNALS)


def _guard(child: int) -> NoReturn:
    """Waits for: SIGTERM, or the end of the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in (0, 1):  # the child owns their ends
        os.dup2(nothing, pipe)
    status = _status_at_end(child)
    _kill_descendants()
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # SIGKILL has no action to be set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(1)


def _status_at_end(child: int) -> int:
    """As of `os.waitpid`; after SIGTERM to us that of SIGKILL."""
    while signal.sigwait(_GUARD_SIGNALS) != signal.SIGTERM:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                return ended[1]
    return int(signal.SIGKILL)


def _kill_descendants() -> None:
    """Kills until there are none: children of a killed process become ours. Groups first: a process that forks cannot
    outrun the end of its group."""
    deadline = time.monotonic() + _KILL_TREE_S
    while time.monotonic() < deadline:
        found = _descendants()
        for group in set(found.values()) - {os.getpgrp()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _descendants() -> dict[int, int]:
    """Each with its process group."""
    found: dict[int, int] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            found[process.pid] = os.getpgid(process.pid)
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)


# ---------------------------------------------------------------- the reaper of engine processes


class OrphanReaper:
    """Kills `pids` when this process ends, however it dies, or with `close`, and unlinks their shared memory.

    vLLM's engine process does not notice that its parent was killed (out of memory, `ray.kill`), and keeps its device
    memory; its workers notice, but cannot leave a hanging call to their device. So a small process holds the reading
    end of a pipe, whose other end the kernel closes with this process. Can go when vLLM's processes die with their
    parents. Tensor-parallel engines share hundreds of megabytes of named memory, which outlives killed processes.

    Pids that are gone are left out; one that is reused later is not hit.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        program = f"import sys; sys.path[:] = {sys.path!r}; from rollout.processes import reap; reap({[*pids]})"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={},  # without the mark of the run, whose own cleaner would end it before it is done
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it knows their shared memory, and has no parent
        self._process.wait()
        self._is_closed = False

    def close(self) -> None:
        """Kills those that still run, such as the orphaned workers of a crashed engine. Idempotent; takes
        milliseconds."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self._process.communicate(timeout=5.0)


def reap(pids: Sequence[int]) -> None:
    """The reaper's process: waits for the end of standard input, then kills and unlinks. In a grandchild of the owner:
    Ray kills the children of an actor that it ends."""
    processes: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    segments = _shared_memory(processes)
    if os.fork():
        os._exit(0)
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stdin.read()
    segments |= _shared_memory(processes)
    for process in processes:
        with contextlib.suppress(psutil.Error):  # `kill` checks that the pid is still that process
            process.kill()
    for path in segments:
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()


def _shared_memory(processes: Iterable[psutil.Process]) -> set[str]:
    """From the maps, because psutil reads how much of each mapping is resident: slow for a large process."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines() if process.is_running() else []
            paths = (line.split(None, 5)[5] for line in lines if "/dev/shm/" in line)
            found.update(path for path in paths if path.startswith(_SHARED_MEMORY) and not path.endswith("(deleted)"))
    return found
