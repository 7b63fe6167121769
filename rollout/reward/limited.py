"""Calls of one function in a process of its own, which ends where a call takes too long.

For functions that hang inside a single operation, such as a power of large integers, where no Python signal handler
runs. The kernel ends the child: the action of its timer is the default one.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


class CallEnded(Exception):
    """The process of a call ended before the call did."""


class CallTooLong(CallEnded):
    """It had used up its processor time."""


class LimitedCalls:
    """A function with a limit for each call. Calls of several threads come one after the other. The process is forked,
    at the first call.

    Example:
        calls = LimitedCalls(compare, cpu_s=3.0)
        calls("2^{10}", "1024")
    """

    def __init__(self, function: Callable[..., object], *, cpu_s: float) -> None:
        """Starts nothing yet. `cpu_s` is processor time of one call, so what else the host does has no part in it."""
        self._function, self._cpu_s = function, cpu_s
        self._running: tuple[Any, Connection] | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: object) -> Any:
        """What the function returns or raises. Waits for as long as the process lives, so `cpu_s` of work at most.

        Raises:
            CallTooLong: the call used up its time. The next one has a new process, as after `CallEnded`.
            CallEnded: the process crashed.
        """
        with self._lock:
            if self._running is None or not self._running[0].is_alive():
                self._running = self._start()
            outcome = self._exchange(*self._running, args)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _exchange(self, process: Any, pipe: Connection, args: tuple[object, ...]) -> object:
        try:
            pipe.send(args)
            return pipe.recv()
        except (EOFError, OSError) as error:
            self._drop(process, pipe)
            if process.exitcode == -signal.SIGPROF:
                raise CallTooLong(f"the process of the call took longer than {self._cpu_s:g} s") from error
            raise CallEnded(f"the process of the call ended with exit code {process.exitcode}") from error
        except BaseException:
            # As an alarm of the caller: the next call must not find the outcome of this one.
            process.kill()
            self._drop(process, pipe)
            raise

    def _drop(self, process: Any, pipe: Connection) -> None:
        pipe.close()
        process.join()
        self._running = None

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
            try:
                requests.send(outcome)
            except Exception as error:  # noqa: BLE001 - whatever keeps it from being pickled; nothing was sent
                requests.send(RuntimeError(f"{outcome!r:.200} cannot be passed on: {error}"))
