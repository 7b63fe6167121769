"""One killable reward process, seen from the parent.

Not a `multiprocessing` process: its spawn re-imports the parent's `__main__` (in a Ray worker that is Ray itself),
its fork is unsafe in a process with threads, and its pools time a whole task, where we need a limit for each item
of a batch. `child.py` describes the wire.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rollout.errors import DataError
from rollout.reward.wire import frame, read_outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.errors import RewardError
    from rollout.reward.call import RewardResult
    from rollout.reward.child import Request
    from rollout.reward.output import Output

LOAD_TIMEOUT_S = 60.0
"""Start of the process and import of the reward function, or what a process that has imported it needs to take the
next request."""
RETRY_S = 60.0
"""For so long a function that does not import is not tried again; its calls fail at once."""
_GRACE_S = 0.05
_CLOSE_S = 1.0
"""From the end of a process to that of its pipes, or the other way round, at most."""
_MAX_ANSWER_BYTES = 1 << 22
_REST_S = 0.002
"""Between two looks at what a process prints. Meanwhile it has the room of a pipe, 64 KiB on Linux, before it waits."""
_KILL_S = 6.0
"""After that the guards, which have 5 s to end everything, are killed like anything else: they were stopped again."""
DRIVER_ONLY = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
"""Keys in the environment that the run itself needs, and no reward."""
_NONSENSE = "its process wrote something else than an outcome to its pipe; a reward must not write to descriptors that "
_NONSENSE += "it has not opened"
_END = signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL
"""On Linux for `guard.py`, which kills."""
_BOOT = "import sys; sys.path[:] = {path!r}; from rollout.reward.child import main; main({pid})"


class ProcessLost(Exception):
    """The process hung or died; it must be killed and replaced. The message says which, for the item at fault."""


class _Protocol(SubprocessStreamProtocol):
    """Tells of the end of the process itself, and takes what it prints."""

    def __init__(self, output: Output) -> None:
        super().__init__(limit=_MAX_ANSWER_BYTES, loop=asyncio.get_running_loop())
        self._output = output
        self._prints: asyncio.BaseTransport | None = None
        self.on_exit: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._prints = cast("asyncio.SubprocessTransport", transport).get_pipe_transport(2)

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        if fd == 2 and isinstance(data, bytes):
            self._output.pass_on(data)
            # Of one that prints line by line without end, the event loop would do nothing but read.
            cast("asyncio.ReadTransport", self._prints).pause_reading()
            asyncio.get_running_loop().call_later(_REST_S, self._read_on)
        else:
            super().pipe_data_received(fd, data)

    def _read_on(self) -> None:
        pipe = cast("asyncio.ReadTransport", self._prints)
        if not pipe.is_closing():
            pipe.resume_reading()

    def process_exited(self) -> None:
        super().process_exited()
        if self.on_exit is not None:
            self.on_exit()


class RewardProcess:
    """A child that scores requests one after the other. Use `start`; after `ProcessLost`, `kill` it."""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        self._transport = transport
        self._process = Process(transport, protocol, asyncio.get_running_loop())
        self._loaded: set[str] = set()
        protocol.on_exit = self._bury
        if not self.is_alive:
            self._bury()

    @classmethod
    async def start(cls, output: Output) -> RewardProcess:
        """Starts a bare interpreter with our `sys.path`; nothing but the standard library is imported yet. What it
        prints goes to `output`."""
        # As `asyncio.create_subprocess_exec`, which would not tell us of its end while a child of it holds a pipe.
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Protocol(output),
            sys.executable,
            "-c",
            _BOOT.format(path=sys.path, pid=os.getpid()),
            stdin=PIPE,
            stdout=PIPE,
            # Not our own, which is a file that it could fill the disk with. Our event loop reads it all the time.
            stderr=PIPE,
            # Its own group: Ctrl-C on the terminal is ours to handle.
            start_new_session=True,
            # Several of these share the host with engines; a reward is one thread unless the user says otherwise.
            env={"OMP_NUM_THREADS": "1"} | {key: text for key, text in os.environ.items() if key not in DRIVER_ONLY},
        )
        return cls(transport, protocol)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_loaded(self, target: str) -> bool:
        """Whether it has said that it imported the function. If `begin` loses it then, that is not for the import."""
        return target in self._loaded

    async def begin(self, request: Request) -> bool:
        """Sends a request and waits until its function is imported; then call `receive` once per item. Whether the
        function is async: then the process takes nothing but calls of it from here on (`send`, `next_answer`).

        Raises:
            DataError: the function does not import. The process is fine.
            ProcessLost: it said nothing for `LOAD_TIMEOUT_S`, or died.
        """
        took = f"the import of {request.target} took"
        if self.has_loaded(request.target):
            took = "its process hung between two calls: to take the next one took"
        # Without waiting for room in the pipe: it answers when it has read all of the request, so one deadline will do.
        self.send_soon(request)
        answer = await self._read_line(LOAD_TIMEOUT_S, took)
        if "load_error" in answer:
            raise DataError(str(answer["load_error"]))
        if not isinstance(answer.get("is_async"), bool):
            raise ProcessLost(_NONSENSE)
        self._loaded.add(request.target)
        return answer["is_async"]

    async def send(self, message: object) -> None:
        """Puts a message into its pipe. Waits for: room in it, which the caller must limit. Raises ProcessLost if it
        died."""
        try:
            self.send_soon(message)
            await self._writer.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ProcessLost(await self._describe_death()) from error

    def send_soon(self, message: object) -> None:
        """As `send`, without waiting until there is room in the pipe."""
        self._writer.write(frame(pickle.dumps(message)))

    @property
    def _writer(self) -> asyncio.StreamWriter:
        writer = self._process.stdin
        assert writer is not None, "started with a pipe"
        return writer

    async def next_answer(self) -> dict[str, Any]:
        """The next line that it says. Waits for: that, or its end. Raises ProcessLost at its end."""
        return await self._parsed(await self._read())

    async def receive(self, timeout_s: float) -> RewardResult | RewardError:
        """The outcome of the next item, or its error if the function raised or returned no finite number.

        Raises:
            ProcessLost: no answer within `timeout_s`, or the process died.
        """
        return self.outcome(await self._read_line(timeout_s, "the call took"))

    @staticmethod
    def outcome(message: dict[str, Any]) -> RewardResult | RewardError:
        """What an answer says. Raises ProcessLost if it is none."""
        try:
            return read_outcome(message)
        except (KeyError, TypeError, ValueError):
            raise ProcessLost(_NONSENSE) from None

    def kill(self) -> None:
        """Kills the process and everything that it started; harmless if it is gone, which all the others are then."""
        if self.is_alive:
            self._signal(_END)
            self._signal(signal.SIGCONT)  # the guards may have been stopped
            asyncio.get_running_loop().call_later(_KILL_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _bury(self) -> None:
        """It has ended, and what it started with it: nobody says anything any more."""
        asyncio.get_running_loop().call_later(_CLOSE_S, self._transport.close)

    async def wait(self) -> None:
        """Returns once the process is gone and reaped."""
        await self._process.wait()

    async def _read_line(self, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._read(), timeout_s)
        except TimeoutError:
            try:
                # If our own loop was blocked, the deadline and the answer arrive together, and from Python 3.12 on the
                # deadline wins: look once more.
                line = await asyncio.wait_for(self._read(), _GRACE_S)
            except TimeoutError:
                raise ProcessLost(f"{what} longer than {timeout_s:g} s; its process was killed") from None
        return await self._parsed(line)

    async def _read(self) -> bytes:
        reader = self._process.stdout
        assert reader is not None, "started with a pipe"
        try:
            return await reader.readline()
        except ValueError as error:
            raise ProcessLost(f"answered with more than {_MAX_ANSWER_BYTES} bytes") from error

    async def _parsed(self, line: bytes) -> dict[str, Any]:
        if not line.endswith(b"\n"):
            raise ProcessLost(await self._describe_death())
        try:
            answer = json.loads(line)
        except ValueError:
            raise ProcessLost(_NONSENSE) from None
        if not isinstance(answer, dict):
            raise ProcessLost(_NONSENSE)
        return cast("dict[str, Any]", answer)

    async def _describe_death(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        code = self._process.returncode
        if code is None:
            return "its process closed the pipe"
        cause = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"its process ended {cause}"
