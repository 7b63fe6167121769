"""Child processes with a pipe each: how they are started in parallel, asked with a deadline, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import socket
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from weight_sync.errors import WeightSyncError
from weight_sync.messages import make_error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable
    from multiprocessing.connection import Connection

END_S = 5.0
"""A child that was told to end gets this long before it is killed; one with children of its own, much longer."""
END_TREE_S = 40.0


PRELOAD = ("weight_sync.bench.hosts", "torch._dynamo")
"""Imported once, in the process that children are forked from. Recording a layout imports the second by itself."""


def prepare_starts() -> None:
    """Let children be forked from one process that has imported everything and touched no device. Returns at once.

    PyTorch allows this start method beside `spawn`; it spares each child the seconds that importing takes.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


class Question(NamedTuple):
    number: int
    method: str
    args: tuple[Any, ...]


class Answer(NamedTuple):
    """What came back. Times are of the host's monotonic clock, taken in the child around the call."""

    number: int
    value: Any
    error: tuple[str, str] | None
    """Type name and message."""
    started: float
    stopped: float

    @property
    def seconds(self) -> float:
        return self.stopped - self.started


class Host(Protocol):
    """What lives in a child: answers calls until its parent hangs up."""

    def call(self, method: str, *args: Any) -> Any: ...

    def close(self) -> None: ...


def serve(pipe: Connection, make_host: Callable[..., Host], args: tuple[Any, ...]) -> None:
    """Body of a child: build the host, say so, answer one call after the other. Ends when the parent closes the pipe.

    Unblocked by: the pipe, which the kernel closes when the parent dies, however it dies.
    """
    hosts: list[Host] = []

    def call(question: Question) -> Any:
        if question.method == "start":
            hosts.append(make_host(*args))
            return None
        return hosts[0].call(question.method, *question.args)

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            pipe.send(answer(pipe.recv(), call))
    for host in hosts:
        host.close()


def answer(question: Question, call: Callable[[Question], Any]) -> Answer:
    started = time.monotonic()
    value, error = None, None
    try:
        value = call(question)
    except Exception as failure:  # noqa: BLE001 - the edge of a process: the parent raises it again
        where = traceback.extract_tb(failure.__traceback__)[-1]
        error = (type(failure).__name__, f"{failure} ({where.filename.rpartition('/')[2]}:{where.lineno})")
    return Answer(question.number, value, error, started, time.monotonic())


class Child:
    """One child process, asked from one event loop. `start` is answered when its host is built."""

    def __init__(
        self,
        name: str,
        make_host: Callable[..., Host],
        *args: Any,
        method: str = "forkserver",
        has_children: bool = False,
    ) -> None:
        """`method` is a start method; a child that starts processes of its own (`has_children`) cannot be a daemon."""
        context: Any = multiprocessing.get_context(method)
        self.name = name
        self._end_s = END_TREE_S if has_children else END_S
        self._pipe, theirs = context.Pipe()
        target = (theirs, make_host, args)
        self._process = context.Process(target=serve, args=target, name=name, daemon=not has_children)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        # One thread: questions to a child go one after the other, and the loop never waits for a pipe.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Answer:
        """
        Raises:
            TimeoutError: no answer in time; a late one will be thrown away.
            WeightSyncError: (or its subclass) what the child raised, or that it died.
        """
        give_up = time.monotonic() + timeout_s
        question = Question(next(self._numbers), method, args)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._exchange, question, give_up)
        if found.error is not None:
            kind, message = found.error
            raise make_error(kind, f"{self.name}: {message}")
        return found

    def end(self) -> None:
        """Hang up, so that the child ends by itself and a question under way fails. `join` waits."""
        # Closing would not wake a thread that waits on the pipe, and its number might be given away under it.
        with socket.socket(fileno=os.dup(self._pipe.fileno())) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until the child is gone; kill it if it does not go. Call it once, after `end`."""
        self._process.join(self._end_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_S)
        self._thread.shutdown(cancel_futures=True)
        self._pipe.close()

    def _exchange(self, question: Question, give_up: float) -> Answer:
        try:
            self._pipe.send(question)
            while self._pipe.poll(max(0.0, give_up - time.monotonic())):
                found: Answer = self._pipe.recv()
                if found.number == question.number:
                    return found
        except (EOFError, OSError) as error:
            self._process.join(1.0)
            raise WeightSyncError(
                f"{self.name} died (exit code {self._process.exitcode}) during {question.method}"
            ) from error
        raise TimeoutError(f"{self.name} did not answer {question.method} in time")


async def all_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """All results in order. Waits for every call, then raises the first failure, so that none is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
