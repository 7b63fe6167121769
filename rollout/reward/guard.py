"""Ends a reward process together with everything that it started.

The guard stands between the rollout worker and the reward process, and outlives both: whether the worker asks for the
end, is gone, or the reward process ends by itself, nothing stays. Orphans below it become its children (it is their
"subreaper"), also those that have left the session, as the programs that a reward for code runs often do.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
_END_S = 5.0
"""For so long it goes on killing; what the kernel does not let go of by then stays."""


def fork_under_guard(parent_pid: int) -> None:
    """Returns in a child. This process becomes its guard, which SIGTERM asks for the end, and ends as the child does.

    To be called in a process with one thread. Linux only.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # "Parent" is the thread that started us. That is the thread of the event loop, which lives as long as the pool.
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    guard = os.getpid()
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)
    child = os.fork()
    if child == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.setsid()  # a reward that signals its own group does not mean the guard
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return
    _stand_by(child)


def _stand_by(child: int) -> NoReturn:
    """Waits for: SIGTERM, or the end of the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for pipe in (0, 1):  # their ends are those of the child
        os.dup2(nothing, pipe)
    status = _status_at_end(child)
    _end_all()
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no action to be set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(1)


def _status_at_end(child: int) -> int:
    """How the child ended, as `os.waitpid` tells it; as if by SIGKILL if it is to end."""
    while signal.sigwait(_SIGNALS) != signal.SIGTERM:
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            if ended[0] == child:
                return ended[1]
    return int(signal.SIGKILL)


def _end_all() -> None:
    """Kills the children until there are none: those of a killed one become ours."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _children() -> list[int]:
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state_and_parent = path.read_bytes().rpartition(b")")[2].split(maxsplit=2)
            if int(state_and_parent[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
