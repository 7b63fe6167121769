"""Ends a reward process together with everything that it started.

Two guards stand between the rollout worker and the reward process, and outlive both: whether the worker asks for the
end, is gone, or the reward process ends by itself, nothing stays. Orphans below them become their children (they are
"subreapers"), also those that have left the session, as the programs that a reward for code runs often do. There are
two because one of them may be killed: Ray kills the children of a worker that ends, and a program may kill its parent.
Whichever is left does the work.
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
    """Returns in a grandchild. This process and the one between become its guards, which SIGTERM asks for the end, and
    end as it does.

    To be called in a process with one thread. Linux only.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for _ in range(2):
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # "Parent" is the thread that started us. That is the thread of the event loop, which lives as long as the pool.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # it died before the line above
            os._exit(1)
        parent_pid = os.getpid()
        if child := os.fork():
            _stand_by(child)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    os.setsid()  # a reward that signals its own group does not mean the guards
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


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
    """Kills all descendants until there are none: those of a killed one become ours. Groups first, since nothing that
    forks outruns the end of its whole group."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        found = _descendants()
        for group in set(found.values()) - {os.getpgrp()}:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _descendants() -> dict[int, int]:
    """Children, their children and so on, each with its process group."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            _, parent, group, _ = path.read_bytes().rpartition(b")")[2].split(maxsplit=3)
            children.setdefault(int(parent), []).append((int(path.parent.name), int(group)))
    found: dict[int, int] = {}
    new = [os.getpid()]
    while new:
        born = children.pop(new.pop(), [])
        found.update(born)
        new += [pid for pid, _ in born]
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
