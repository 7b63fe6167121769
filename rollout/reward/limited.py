"""Calls of one function in a process of its own, which ends where a call takes too long.

For functions that hang inside a single operation, such as a power of large integers, where no Python signal handler
runs. The kernel ends the child: the action of its timer is the default one.
"""

from __future__ import annotations

import multiprocessing
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


class CallEnded(Exception):
    """The process of a call ended before the call did."""


class LimitedCalls:
    """A function with a limit for each call. Not for threads: the process is forked, at the first call.

    Example:
        calls = LimitedCalls(compare, cpu_s=3.0)
        calls("2^{10}", "1024")
    """

    def __init__(self, function: Callable[..., object], *, cpu_s: float) -> None:
        """Starts nothing yet. `cpu_s` is processor time of one call, so what else the host does has no part in it."""
        self._function, self._cpu_s = function, cpu_s
        self._running: tuple[Any, Connection] | None = None

    def __call__(self, *args: object) -> Any:
        """What the function returns or raises. Waits for as long as the process lives, so `cpu_s` of work at most.

        Raises:
            CallEnded: the call took longer, or crashed. The next one has a new process.
        """
        if self._running is None or not self._running[0].is_alive():
            self._running = self._start()
        process, pipe = self._running
        try:
            pipe.send(args)
            outcome = pipe.recv()
        except (EOFError, OSError) as error:
            pipe.close()
            process.join()
            self._running = None
            is_late = process.exitcode == -signal.SIGPROF
            how = f"took longer than {self._cpu_s:g} s" if is_late else f"ended with exit code {process.exitcode}"
            raise CallEnded(f"the process of the call {how}") from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _start(self) -> tuple[Any, Connection]:
        context = multiprocessing.get_context("fork")  # what is imported and cached here is there at once
        ours, theirs = context.Pipe()
        process = context.Process(target=self._serve, args=(theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def _serve(self, requests: Connection, parents_end: Connection) -> None:
        """In the child, until the parent closes its end or is gone."""
        parents_end.close()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        while True:
            try:
                args = requests.recv()
            except EOFError:
                return
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
            try:
                outcome = self._function(*args)
            except Exception as error:  # noqa: BLE001 - it is raised where the call was made
                outcome = error
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            requests.send(outcome)
