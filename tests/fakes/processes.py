"""Objects in processes that a test can really kill or stop, driven through pipes.

Pipes are made beforehand: nothing has a name, and a closed end is noticed. Calls are answered in order, as an engine's
RPC does; methods whose name begins with `see_` are answered concurrently.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from tests.fakes.forks import PARTIES, forks
from tests.fakes.process_life import is_running, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext

PR_SET_PDEATHSIG = 1
TOLD = -1
"""Number of every question whose answer is not waited for."""


def has_effect(pid: int) -> bool:
    """Of SIGKILL or SIGSTOP: the process is gone or stopped."""
    try:
        return not is_running(pid) or psutil.Process(pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.NoSuchProcess:
        return True


def signal_and_see(pid: int, number: int) -> None:
    """Send SIGKILL or SIGSTOP and return when it has had its effect."""
    os.kill(pid, number)
    wait_until(lambda: has_effect(pid), within_s=5.0, what=f"process {pid} runs on after signal {number}")


class Line:
    """One end of a pipe. A late answer to a question that timed out is thrown away."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix=f"line-{name}")

    def ask(self, method: str, *args: object, timeout_s: float = 15.0) -> Any:
        """
        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the process is gone.
            Exception: what the method raised.
        """
        with self._lock:
            number = next(self._ids)
            self._send(number, method, args)
            return self._answer(number, method, timeout_s)

    def tell(self, method: str, *args: object) -> None:
        """Ask without waiting. `told` returns the answer; the next `ask` throws it away."""
        self._send(TOLD, method, args)

    def told(self, timeout_s: float = 15.0) -> Any:
        """What came of the last `tell`. Raises as `ask` does."""
        with self._lock:
            return self._answer(TOLD, "what it was told", timeout_s)

    async def ask_async(self, method: str, *args: object, timeout_s: float) -> Any:
        def ask() -> Any:
            return self.ask(method, *args, timeout_s=timeout_s)

        return await asyncio.get_running_loop().run_in_executor(self._pool, ask)

    def _send(self, number: int, method: str, args: tuple[object, ...]) -> None:
        try:
            self.connection.send((number, method, args))
        except OSError as error:
            raise ConnectionError(f"{self.name} is gone: {error!r}") from error

    def _answer(self, number: int, method: str, timeout_s: float) -> Any:
        until, answered, is_good, value = time.monotonic() + timeout_s, None, False, None
        while answered != number:
            try:
                is_there = self.connection.poll(max(0.0, until - time.monotonic()))
                if is_there:
                    answered, is_good, value = self.connection.recv()
            except (EOFError, OSError) as error:
                raise ConnectionError(f"{self.name} is gone: {error!r}") from error
            if not is_there:
                raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.1f} s")
        if not is_good:
            raise value
        return value

    def close(self) -> None:
        self.connection.close()
        self._pool.shutdown(wait=False)


class Child:
    """`build(*args)` in a process. When `lines[0]` is closed, the object is closed and the process ends."""

    def __init__(
        self,
        name: str,
        build: Callable[..., Any],
        *args: object,
        num_lines: int = 1,
        preload: Sequence[str] = PARTIES,
        context: BaseContext | None = None,
    ) -> None:
        context = forks(*preload) if context is None else context
        pipes = [context.Pipe() for _ in range(num_lines)]
        theirs = [pipe[1] for pipe in pipes]
        self.name = name
        self.lines = [Line(name, pipe[0]) for pipe in pipes]
        self.ask, self.tell, self.told = self.lines[0].ask, self.lines[0].tell, self.lines[0].told
        self.process = context.Process(target=_serve, args=(theirs, build, args), name=name, daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        for connection in theirs:
            connection.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def await_loss(self) -> None:
        """Until the process is dead or stopped; TimeoutError if it lives on, because a trap was not reached."""
        wait_until(self.is_gone_or_stopped, within_s=10.0, what=f"{self.name} is still alive")

    def is_gone_or_stopped(self) -> bool:
        return has_effect(self.pid)

    def signal(self, number: int) -> None:
        signal_and_see(self.pid, number) if number == signal.SIGSTOP else os.kill(self.pid, number)

    def kill(self) -> None:
        """Idempotent."""
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        """Ends it, however it is. Idempotent."""
        for line in self.lines:
            line.close()
        if self.is_gone_or_stopped():
            self.kill()
        self.process.join(20)
        if self.process.is_alive():
            self.kill()


def _serve(connections: list[Connection], build: Callable[..., Any], args: tuple[object, ...]) -> None:
    # A stopped process would outlive a test run that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is shared with the fork server; a collection would copy all of it
    served, turn = build(*args), threading.Lock()
    for connection in connections[1:]:
        threading.Thread(target=_answer_all, args=(connection, served, turn), daemon=True).start()
    _answer_all(connections[0], served, turn)
    served.close()


def _answer_all(connection: Connection, served: Any, turn: threading.Lock) -> None:
    """Until the other end is closed."""
    try:
        while True:
            number, method, args = connection.recv()
            try:
                if method.startswith("see_"):
                    answer = number, True, getattr(served, method)(*args)
                else:
                    with turn:
                        answer = number, True, getattr(served, method)(*args)
            except Exception as error:  # noqa: BLE001 - the process's edge: the asker gets it
                answer = number, False, error
            connection.send(answer)
    except (EOFError, ConnectionError):
        return


class Vitals(NamedTuple):
    """What must not grow in a process."""

    num_files: int
    num_threads: int
    resident_bytes: int

    @classmethod
    def of_this(cls) -> Vitals:
        gc.collect()
        num_files = len(list(Path("/proc/self/fd").iterdir()))
        return cls(num_files, threading.active_count(), psutil.Process().memory_info().rss)
