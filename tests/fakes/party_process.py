"""A party of weight sync in a process of its own, so that it can really be killed or stopped.

Processes are forked from a server that has imported everything, so one starts in milliseconds. They are spoken to over
pipes made beforehand: nothing has a name, and an end that is gone is noticed. Calls are answered in order, as an
engine's RPC does; what a test wants to know of a process (`vitals`, `arm`) is answered concurrently.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tests.fakes.forks import PARTIES, forks
from tests.fakes.protocol_traps import State, Traps, process_state, signal_and_see, watch_protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PR_SET_PDEATHSIG = 1
TOLD = -1
"""The number of every question whose answer is not waited for."""


def settle(node: str, host: str) -> None:
    """Make this process one of `node`, reached at `host`: a loopback address for every node."""
    os.environ |= {"TANDEM_NODE": node, "TANDEM_HOST": host}


class Vitals(NamedTuple):
    """What must not grow."""

    num_files: int
    num_threads: int
    resident_bytes: int


class Party(Protocol):
    """What lives in the process. Other methods are called by name."""

    def close(self) -> None: ...


class Line:
    """One end of a pipe to a party: a late answer to a question that was given up is thrown away."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name = name
        self.connection = connection
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix=f"line-{name}")

    def ask(self, method: str, *args: object, timeout_s: float = 15.0) -> Any:
        """
        Raises:
            TimeoutError: no answer in time.
            ConnectionError: the process is gone.
            Exception: what the party raised.
        """
        with self._lock:
            number = next(self._ids)
            try:
                self.connection.send((number, method, args))
            except OSError as error:
                raise ConnectionError(f"{self.name} is gone: {error!r}") from error
            return self._answer(number, method, timeout_s)

    def answer(self, number: int, *, timeout_s: float) -> Any:
        """Of a question that was sent already. Raises as `ask` does."""
        with self._lock:
            return self._answer(number, f"question {number}", timeout_s)

    def _answer(self, number: int, method: str, timeout_s: float) -> Any:
        until = time.monotonic() + timeout_s
        try:
            while True:
                if not self.connection.poll(max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.1f} s")
                answered, is_good, value = self.connection.recv()
                if answered == number:
                    break
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise ConnectionError(f"{self.name} is gone: {error!r}") from error
        if not is_good:
            raise value
        return value

    async def ask_async(self, method: str, *args: object, timeout_s: float) -> Any:
        def ask() -> Any:
            return self.ask(method, *args, timeout_s=timeout_s)

        return await asyncio.get_running_loop().run_in_executor(self._pool, ask)

    def close(self) -> None:
        self.connection.close()
        self._pool.shutdown(wait=False)


class PartyProcess:
    """Starts `build(*args)` in a process. `lines[0]` belongs to the test; when it is closed, the process ends."""

    def __init__(self, name: str, build: Callable[..., Party], *args: object, num_lines: int = 2) -> None:
        context = forks(*PARTIES)
        pipes = [context.Pipe() for _ in range(num_lines)]
        theirs = [pipe[1] for pipe in pipes]
        self.name = name
        self.lines = [Line(name, pipe[0]) for pipe in pipes]
        self._trappers: list[PartyProcess] = []
        self.process = context.Process(target=_serve, args=(theirs, build, args), name=name, daemon=True)
        self.process.start()
        for connection in theirs:
            connection.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, method: str, *args: object, timeout_s: float = 15.0) -> Any:
        return self.lines[0].ask(method, *args, timeout_s=timeout_s)

    def tell(self, method: str, *args: object) -> None:
        """Ask without waiting. `told` is the answer; the next `ask` throws it away."""
        self.lines[0].connection.send((TOLD, method, args))

    def told(self, timeout_s: float = 15.0) -> Any:
        """What came of the last `tell`. Raises as `ask` does."""
        return self.lines[0].answer(TOLD, timeout_s=timeout_s)

    def await_loss(self, timeout_s: float = 10.0) -> None:
        """Until the process is dead or stopped.

        Raises:
            TimeoutError: it lives on: a trap was not reached.
        """
        until = time.monotonic() + timeout_s
        while not self.is_gone_or_stopped():
            if time.monotonic() > until:
                raise TimeoutError(f"{self.name} is still alive after {timeout_s:.1f} s")
            time.sleep(0.005)

    def arm(self, state: State, number: int, *, target: PartyProcess | None = None) -> None:
        """When this process reaches `state`, signal `number` goes to `target` (default: itself)."""
        if target is not None:
            target._trappers.append(self)
        self.ask("arm", state, number, (self if target is None else target).pid)

    def vitals(self) -> Vitals:
        return self.ask("vitals")

    def signal(self, number: int) -> None:
        if number == signal.SIGSTOP:
            signal_and_see(self.pid, number)
        else:
            os.kill(self.pid, number)

    def wake(self) -> None:
        """SIGCONT, once the process whose trap stopped this one knows that it did."""
        for trapper in self._trappers:
            trapper.ask("await_effect")
        self.signal(signal.SIGCONT)

    def is_gone_or_stopped(self) -> bool:
        return process_state(self.pid) in "TtZX"

    def kill(self) -> None:
        """Idempotent."""
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        """Ends it, however it is. Idempotent."""
        for line in self.lines:
            line.close()
        if process_state(self.pid) in "Tt":
            self.kill()
        self.process.join(10)
        if self.process.is_alive():
            self.kill()


def _serve(connections: list[Connection], build: Callable[..., Party], args: tuple[object, ...]) -> None:
    # A stopped process would outlive a test run that was killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is shared with the fork server; a collection would copy all of it
    traps = Traps()
    watch_protocol(traps)
    desk = _Desk(build(*args, traps), traps)
    for connection in connections[1:]:
        threading.Thread(target=desk.serve, args=(connection,), daemon=True).start()
    desk.serve(connections[0])
    desk.party.close()


class _Desk:
    def __init__(self, party: Party, traps: Traps) -> None:
        self.party = party
        self._traps = traps
        self._turn = threading.Lock()

    def serve(self, connection: Connection) -> None:
        """Until the other end is closed."""
        try:
            while True:
                number, method, args = connection.recv()
                try:
                    answer = number, True, self._answer(method, args)
                except Exception as error:  # noqa: BLE001 - the process's edge: the asker gets it
                    answer = number, False, error
                connection.send(answer)
        except (EOFError, ConnectionError):
            return

    def _answer(self, method: str, args: tuple[Any, ...]) -> object:
        match method:
            case "arm":
                return self._traps.arm(*args)
            case "await_effect":
                return self._traps.await_effect()
            case "vitals":
                return vitals()
            case "stacks":
                return {str(k): "".join(traceback.format_stack(f)) for k, f in sys._current_frames().items()}
            case _ if method.startswith("see_"):
                return getattr(self.party, method)(*args)
            case _:
                with self._turn:
                    return getattr(self.party, method)(*args)


def vitals() -> Vitals:
    """Of this process."""
    gc.collect()
    return Vitals(
        num_files=len(list(Path("/proc/self/fd").iterdir())),
        num_threads=threading.active_count(),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )
