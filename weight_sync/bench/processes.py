"""The parties of a sync as child processes: started in parallel, asked with a deadline, and never left behind."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from weight_sync.control.members import gather_all
from weight_sync.errors import WeightSyncError
from weight_sync.messages import CommitResult, PullReport, ReceiverInfo, make_error, open_reply, reply_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

END_S, END_TREE_S = 5.0, 40.0
"""A child that is hung up on gets this long before it is killed; one with children of its own, much longer."""


class Answer(NamedTuple):
    """What a call returned. Times are of the host's monotonic clock, taken in the child around the call."""

    number: int
    value: Any
    error: tuple[str, str] | None
    """Type name and message."""
    started: float
    stopped: float


def _serve(pipe: Connection, make_host: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Body of a child: answer one call after the other, of which the first, "start", builds the host.

    Unblocked by: the pipe, which the kernel closes when the parent dies, however it dies.
    """
    host: Any = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            number, method, passed = pipe.recv()
            started, value, error = time.monotonic(), None, None
            try:
                if method == "start":
                    host = make_host(*args)
                else:
                    value = getattr(host, method)(*passed)
            except Exception as failure:  # noqa: BLE001 - the edge of a process: the parent raises it again
                where = traceback.extract_tb(failure.__traceback__)[-1]
                error = (type(failure).__name__, f"{failure} ({where.filename.rpartition('/')[2]}:{where.lineno})")
            pipe.send(Answer(number, value, error, started, time.monotonic()))
    if host is not None:
        host.close()


class Child:
    """One child process, asked from one event loop. `start` is answered when its host is built."""

    def __init__(self, name: str, make_host: Callable[..., Any], *args: Any, has_children: bool = False) -> None:
        """A child that starts processes (`has_children`) is spawned, since vLLM looks at the state of its process to
        decide how it starts its own, and cannot be a daemon."""
        context: Any = multiprocessing.get_context("spawn" if has_children else "forkserver")
        self.name = name
        self._end_s = END_TREE_S if has_children else END_S
        self._pipe, theirs = context.Pipe()
        target = (theirs, make_host, args)
        self.process = context.Process(target=_serve, args=target, name=name, daemon=not has_children)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()
        # One thread: questions to a child go one after the other, and the loop never waits for a pipe.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Answer:
        """
        Raises:
            TimeoutError: no answer in time; a late one is thrown away.
            WeightSyncError: (or its subclass) what the child raised, or that it died.
        """
        give_up = time.monotonic() + timeout_s
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._exchange, method, args, give_up)
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
        self.process.join(self._end_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(END_S)
        self._thread.shutdown(cancel_futures=True)
        self._pipe.close()

    def _exchange(self, method: str, args: tuple[Any, ...], give_up: float) -> Answer:
        number = next(self._numbers)
        try:
            self._pipe.send((number, method, args))
            while self._pipe.poll(max(0.0, give_up - time.monotonic())):
                found: Answer = self._pipe.recv()
                if found.number == number:
                    return found
        except (EOFError, OSError) as error:
            self.process.join(1.0)
            raise WeightSyncError(f"{self.name} died (exit code {self.process.exitcode}) during {method}") from error
        raise TimeoutError(f"{self.name} did not answer {method} in time")


class Span(NamedTuple):
    """One phase of one party, on the host's monotonic clock."""

    party: str
    phase: str
    started: float
    stopped: float


class Learner(Child):
    """A `PublisherHandle`."""

    def __init__(self, rank: int, make_host: Callable[..., Any], *args: Any) -> None:
        super().__init__(f"learner {rank}", make_host, *args)
        self.rank = rank
        self.spans: list[Span] = []

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        answer = await self.ask(method, *args, timeout_s=timeout_s)
        if method == "ws_publish":
            self.spans.append(Span(self.name, "publish", answer.started, answer.stopped))
        return answer.value


class Replica:
    """A `ReplicaHandle`: one child per worker, or (`is_engine`) one for an engine with its workers. Where nothing
    generates, a pause is the commit itself."""

    def __init__(self, name: str, children: Sequence[Child], *, is_engine: bool = False) -> None:
        self.name, self.children, self._is_engine = name, children, is_engine
        self.spans: list[Span] = []
        self.pulls: dict[str, PullReport] = {}
        """Worker ("r0/1") -> what bringing the version cost it."""
        self.receivers: dict[str, ReceiverInfo] = {}
        """Worker -> how it opened."""

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        asked = (child.ask("call", method, args, timeout_s, timeout_s=timeout_s) for child in self.children)
        replies = [reply for answer in await gather_all(asked) for reply in answer.value]
        if method == "ws_open":
            with contextlib.suppress(WeightSyncError):  # a refusal is the coordinator's to report
                self.receivers = self._by_worker(replies, ReceiverInfo)
        return replies

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        started = time.monotonic()
        if self._is_engine:
            asked = self.children[0].ask("commit", version, method, args, timeout_s, timeout_s=timeout_s)
            result: CommitResult = (await asked).value
        else:
            replies = await self.call(method, *args, timeout_s=timeout_s)
            result = CommitResult(results=replies, pause_s=time.monotonic() - started)
        if reply_state(result.results) == "ok":
            self.spans.append(Span(self.name, "commit", started, time.monotonic()))
            self.pulls = self._by_worker(result.results, PullReport)
        return result

    def _by_worker(self, replies: Sequence[bytes], kind: type[Any]) -> dict[str, Any]:
        values = (open_reply(reply, kind, party=self.name) for reply in replies)
        return {f"{self.name}/{worker}": value for worker, value in enumerate(values)}
