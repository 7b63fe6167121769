"""One killable reward process, seen from the parent.

Not a `multiprocessing` process: its spawn re-imports the parent's `__main__` (in a Ray worker that is Ray itself),
its fork is unsafe in a process with threads, and its pools cannot end a call that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from typing import TYPE_CHECKING, cast

import msgspec

from rollout.errors import DataError, RewardError, RewardTimeout
from rollout.reward.call import Begun, Call, Cancel, Failed, Reply, Scored, decode_reply, encode
from rollout.reward.child import MAX_THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.reward.call import RewardRequest, RewardResult
    from rollout.reward.registry import RewardEntry

    _Replies = asyncio.Queue[Reply | "ProcessLost"]

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""To start the process and import the reward function, or to begin the next call."""
GRACE_S = 5.0
"""The process itself ends an async call that takes too long; after this much longer, it counts as blocked."""
DRIVER_ONLY = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
"""Keys in the environment that no reward needs."""
MAX_OUTPUT_BYTES = 64 << 20
_OWN_GRACE_S = 0.05
_CLOSE_S = 1.0
"""Between the end of a process and the end of its pipes."""
_MAX_REPLY_BYTES = 1 << 22
_READ_PAUSE_S = 0.002
"""Between two reads of what a process prints; meanwhile the pipe has room for 64 KiB on Linux."""
_KILL_S = 6.0
"""After that the guards, which have 5 s to end everything, are killed too: they were stopped again."""
_STUCK_THREADS_PER_CALL = 4
"""Threads per concurrent call that may be left over from calls that have ended."""
_END = signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL
"""On Linux for the guards (`rollout.processes`), which kill."""
_BOOT = "import sys; sys.path[:] = {path!r}; from rollout.reward.child import main; main({pid})"


class ProcessLost(RewardError):
    """The process hung or died; the next call replaces it. See the message."""


class CpuLimitExceeded(ProcessLost):
    """The call used up its processor time, so the kernel ended the process."""


class Output:
    """Passes what the reward processes of a pool print to our own log, up to one bound for all of them, replaced ones
    included: a reward that prints without end must not fill the disk."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor, self._room = descriptor, MAX_OUTPUT_BYTES

    def pass_on(self, data: bytes) -> None:
        """Writes what there is room for, and drops the remainder."""
        if self._room <= 0:
            return
        data = data[: self._room]
        self._room -= len(data)
        with contextlib.suppress(OSError):  # a full disk or a closed terminal must not fail a reward
            while data:
                data = data[os.write(self._descriptor, data) :]
        if self._room <= 0:
            logger.warning(
                "rewards have printed %d MiB, the limit; further output is dropped, so have the reward print less",
                MAX_OUTPUT_BYTES >> 20,
            )


class _Protocol(SubprocessStreamProtocol):
    """Reports the end of the process, and passes on what it prints."""

    def __init__(self, output: Output) -> None:
        super().__init__(limit=_MAX_REPLY_BYTES, loop=asyncio.get_running_loop())
        self._output = output
        self.on_exit: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        pipe = cast("asyncio.SubprocessTransport", transport).get_pipe_transport(2)
        self._printed = cast("asyncio.ReadTransport", pipe)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        if fd != 2 or not isinstance(data, bytes):
            super().pipe_data_received(fd, data)
            return
        self._output.pass_on(data)
        # Otherwise a process that prints lines without end would keep the event loop busy.
        self._printed.pause_reading()
        asyncio.get_running_loop().call_later(_READ_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if not self._printed.is_closing():
            self._printed.resume_reading()

    def process_exited(self) -> None:
        super().process_exited()
        if self.on_exit is not None:
            self.on_exit()


class RewardProcess:
    """A child that imports reward functions and calls them: plain ones one at a time, an async one concurrently. Use
    `start`."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol, *, max_concurrency: int) -> None:
        self._transport = transport
        self._max_stuck = min(_STUCK_THREADS_PER_CALL * max_concurrency, MAX_THREADS // 2)
        self._process = Process(transport, protocol, asyncio.get_running_loop())
        self._imported: set[str] = set()
        self.is_async = False
        """It has imported an async function, and accepts only calls of that."""
        self._numbers = itertools.count()
        self._calls: dict[int, _Replies] = {}
        self._loss: ProcessLost | None = None
        self._is_worn_out = self._is_killed = False
        protocol.on_exit = self._close_pipes
        if not self.is_alive:
            self._close_pipes()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, output: Output, *, max_concurrency: int) -> RewardProcess:
        """Starts a bare interpreter with our `sys.path`.

        Args:
            output: gets what it prints.
            max_concurrency: calls of an async function at once.
        """
        # `asyncio.create_subprocess_exec` would not report its end while a child of it holds a pipe.
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Protocol(output),
            sys.executable,
            "-c",
            _BOOT.format(path=sys.path, pid=os.getpid()),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,  # not ours, which is a file: it could fill the disk
            start_new_session=True,  # Ctrl-C on the terminal is ours to handle
            # Several of these share the host with engines; a reward has one thread unless the user sets this.
            env={"OMP_NUM_THREADS": "1"} | {key: text for key, text in os.environ.items() if key not in DRIVER_ONLY},
        )
        return cls(transport, protocol, max_concurrency=max_concurrency)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def takes(self, target: str) -> bool:
        """Whether it can import this function, or call it."""
        is_lost = not self.is_alive or self._loss is not None or self._is_killed or self._is_worn_out
        return not is_lost and (not self.is_async or target in self._imported)

    def has_imported(self, target: str) -> bool:
        return target in self._imported

    async def import_function(self, target: str) -> None:
        """Imports the function at `target` (see `RewardEntry.target`).

        Raises:
            DataError: it does not import; the process continues.
            ProcessLost: the import took longer than `LOAD_TIMEOUT_S`, or ended the process.
        """
        try:
            with self._call() as (number, replies):
                self._send(Call(number=number, target=target))
                late = f"the import of {target} took longer than {LOAD_TIMEOUT_S:g} s; its process was killed"
                await self._wait_until_begun(target, replies, LOAD_TIMEOUT_S, ProcessLost(late))
        except asyncio.CancelledError:
            self.kill()
            raise

    async def score(self, entry: RewardEntry, request: RewardRequest, *, timeout_s: float) -> RewardResult:
        """One call of an imported function.

        Raises:
            RewardError: it raised, or returned no finite number; the process continues.
            RewardTimeout: it took longer than `timeout_s`, so it was cancelled, or the process was killed.
            CpuLimitExceeded: it exceeded the limit of `entry`.
            ProcessLost: the process died, or hung before the call.
        """
        with self._call() as (number, replies):
            message = Call(
                number=number,
                target=entry.target,
                request=pickle.dumps(request),
                timeout_s=timeout_s,
                cpu_limit_s=entry.cpu_limit_s,
                memory_limit_bytes=entry.memory_limit_bytes,
            )
            self._send(message)
            try:
                reply = await self._reply_in_time(entry.target, replies, timeout_s)
            except ProcessLost as lost:
                if entry.cpu_limit_s is not None and self._process.returncode == -signal.SIGPROF:
                    text = f"it took longer than {entry.cpu_limit_s:g} s of processor time"
                    raise CpuLimitExceeded(text) from lost
                raise
            except asyncio.CancelledError:
                if self.is_async and self.is_alive:
                    self._send(Cancel(number=number))
                else:
                    self.kill()
                raise
            if isinstance(reply, Scored):
                return reply.result
            self._is_worn_out |= reply.num_stuck > self._max_stuck
        raise (RewardTimeout if reply.is_timeout else RewardError)(reply.error)

    def kill(self) -> None:
        """Kills the process and everything that it started. Idempotent."""
        self._is_killed = True
        if self.is_alive:
            self._signal(_END)
            self._signal(signal.SIGCONT)  # the guards may have been stopped
            asyncio.get_running_loop().call_later(_KILL_S, self._signal, signal.SIGKILL)

    def close(self, reason: str) -> None:
        """Kills it, and ends its calls with this reason."""
        self._lose(reason)
        self._reader.cancel()

    async def wait(self) -> None:
        """Returns once the process is gone and reaped."""
        await self._process.wait()

    @contextlib.contextmanager
    def _call(self) -> Iterator[tuple[int, _Replies]]:
        """Number and replies of a new call. The last call of a worn-out process kills it."""
        if self._loss is not None:
            raise self._loss
        number = next(self._numbers)
        replies: _Replies = asyncio.Queue()
        self._calls[number] = replies
        try:
            yield number, replies
        finally:
            del self._calls[number]
            if self._is_worn_out and not self._calls:
                self.kill()

    def _send(self, message: Call | Cancel) -> None:
        """Without waiting for room in the pipe: the deadline of the reply covers that."""
        assert self._process.stdin is not None, "started with a pipe"
        self._process.stdin.write(encode(message))

    async def _reply_in_time(self, target: str, replies: _Replies, timeout_s: float) -> Scored | Failed:
        too_long = f"the call took longer than {timeout_s:g} s"
        if self.is_async:
            late = hung = RewardTimeout(
                f"{too_long} and could not be cancelled, so its process was killed; an async reward must not block: "
                "await, or use asyncio.to_thread"
            )
            begin_s, grace_s = timeout_s + GRACE_S, GRACE_S
        else:
            late = RewardTimeout(f"{too_long}; its process was killed")
            hung = ProcessLost(f"its process hung between two calls for {LOAD_TIMEOUT_S:g} s, and was killed")
            begin_s, grace_s = LOAD_TIMEOUT_S, _OWN_GRACE_S
        await self._wait_until_begun(target, replies, begin_s, hung)
        reply = await self._next_reply(replies, timeout_s, grace_s, late)
        if not isinstance(reply, Scored | Failed):
            raise self._lose_to_nonsense()
        return reply

    async def _wait_until_begun(self, target: str, replies: _Replies, timeout_s: float, late: RewardError) -> None:
        reply = await self._next_reply(replies, timeout_s, _OWN_GRACE_S, late)
        if isinstance(reply, Failed):
            raise DataError(reply.error)
        if not isinstance(reply, Begun):
            raise self._lose_to_nonsense()
        self.is_async = reply.is_async
        self._imported.add(target)

    async def _next_reply(self, replies: _Replies, timeout_s: float, grace_s: float, late: RewardError) -> Reply:
        # Twice: after our own event loop was blocked, deadline and reply arrive together, and from Python 3.12 on the
        # deadline wins.
        for limit_s in (timeout_s, grace_s):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    reply = await replies.get()
                    if isinstance(reply, ProcessLost):
                        raise reply
                    return reply
        self.kill()
        raise late

    async def _read(self) -> None:
        """Consumes: replies. Waits for: the next one. Unblocked by: the end of the process, `close`."""
        assert self._process.stdout is not None, "started with a pipe"
        try:
            while (line := await self._process.stdout.readline()).endswith(b"\n"):
                reply = decode_reply(line)
                if (replies := self._calls.get(reply.number)) is not None:
                    replies.put_nowait(reply)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._lose_to_nonsense()
        except ValueError:
            self._lose(f"replied with more than {_MAX_REPLY_BYTES} bytes")
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _CLOSE_S)
            match self._process.returncode:
                case None:
                    self._lose("its process closed the pipe")
                case code if code < 0:
                    self._lose(f"its process ended by signal {signal.Signals(-code).name}")
                case code:
                    self._lose(f"its process ended with exit code {code}")

    def _lose_to_nonsense(self) -> ProcessLost:
        return self._lose(
            "its process wrote garbage to its pipe; a reward must not write to descriptors that it has not opened"
        )

    def _lose(self, reason: str) -> ProcessLost:
        """Kills it, and ends its calls with this reason; the first reason counts."""
        self.kill()
        if self._loss is None:
            self._loss = ProcessLost(f"{reason}, with {len(self._calls)} calls in it" if self.is_async else reason)
            for replies in self._calls.values():
                replies.put_nowait(self._loss)
        return self._loss

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _close_pipes(self) -> None:
        """It has ended, and its programs with it: no reply comes any more."""
        asyncio.get_running_loop().call_later(_CLOSE_S, self._transport.close)
