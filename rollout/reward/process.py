"""One killable reward process, seen from the parent.

Not a `multiprocessing` process: its spawn re-imports the parent's `__main__` (in a Ray worker that is Ray itself),
its fork is unsafe in a process with threads, and its pools cannot end a call that hangs. `wire.py` describes the
messages.
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

from rollout.errors import DataError, RewardError
from rollout.reward.call import RewardResult
from rollout.reward.child import MAX_THREADS
from rollout.reward.wire import Begun, Call, Cancel, Failed, NotImported, Scored, decode_answer, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.reward.call import RewardRequest
    from rollout.reward.wire import Answer

    _Answers = asyncio.Queue[Answer | "ProcessLost"]

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Start of the process and import of the reward function, or what a process that has imported it needs to begin the
next call."""
GRACE_S = 5.0
"""The process itself ends an async call that takes too long. If it does not for so long after that, it is blocked."""
DRIVER_ONLY = ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RAY_AUTH_TOKEN")
"""Keys in the environment that the run itself needs, and no reward."""
MAX_OUTPUT_BYTES = 64 << 20
_OWN_GRACE_S = 0.05
_CLOSE_S = 1.0
"""From the end of a process to that of its pipes, or the other way round, at most."""
_MAX_ANSWER_BYTES = 1 << 22
_READ_PAUSE_S = 0.002
"""Between two reads of what a process prints. Meanwhile it has the room of a pipe, 64 KiB on Linux, before it waits."""
_KILL_S = 6.0
"""After that the guards, which have 5 s to end everything, are killed like anything else: they were stopped again."""
_STUCK_THREADS_PER_CALL = 4
"""So many threads for every call at once may be left over from calls that have ended."""
_NONSENSE = (
    "its process wrote something else than an outcome to its pipe; a reward must not write to descriptors that it has "
    "not opened"
)
_END = signal.SIGTERM if sys.platform == "linux" else signal.SIGKILL
"""On Linux for the guards (`rollout.processes`), which kill."""
_BOOT = "import sys; sys.path[:] = {path!r}; from rollout.reward.child import main; main({pid})"


class ProcessLost(Exception):
    """The process hung or died, and is replaced by the next call. The message says which."""


class CpuLimitExceeded(ProcessLost):
    """The call used up its processor time, so the kernel ended the process."""


class Output:
    """What the reward processes of a pool print: passed on to our own log, up to a bound for all of them together,
    replaced ones included, so that a reward that prints without end fills no disk."""

    def __init__(self, descriptor: int = 2) -> None:
        self._descriptor, self._room = descriptor, MAX_OUTPUT_BYTES

    def pass_on(self, data: bytes) -> None:
        """Writes what there is room for, and drops the rest. The processes can always go on printing."""
        if self._room <= 0:
            return
        data = data[: self._room]
        self._room -= len(data)
        with contextlib.suppress(OSError):  # a disk that is full, a terminal that is gone: no reason to fail a reward
            while data:
                data = data[os.write(self._descriptor, data) :]
        if self._room <= 0:
            logger.warning(
                "rewards have printed %d MiB, as much as is kept: what they print from here on is dropped; have the "
                "reward function print less",
                MAX_OUTPUT_BYTES >> 20,
            )


class _Protocol(SubprocessStreamProtocol):
    """Reports the end of the process itself, and takes what it prints."""

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
            asyncio.get_running_loop().call_later(_READ_PAUSE_S, self._read_on)
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
    """A child that imports reward functions and calls them: plain ones one at a time, an async one many times at once.
    Use `start`. It ends itself when a call hangs;"""

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        self._transport = transport
        self._process = Process(transport, protocol, asyncio.get_running_loop())
        self._imported: set[str] = set()
        self._is_async = False
        self._numbers = itertools.count()
        self._calls: dict[int, _Answers] = {}
        self._loss: ProcessLost | None = None
        self._is_worn_out = self._is_killed = False
        protocol.on_exit = self._close_pipes
        if not self.is_alive:
            self._close_pipes()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, output: Output) -> RewardProcess:
        """Starts a bare interpreter with our `sys.path`. What it prints goes to `output`."""
        # As `asyncio.create_subprocess_exec`, which would not report its end while a child of it holds a pipe.
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
    def is_async(self) -> bool:
        """Whether it has imported an async function, and so takes calls of that alone."""
        return self._is_async

    def takes(self, target: str) -> bool:
        """Whether it can be asked to import this function, or to call it."""
        is_lost = not self.is_alive or self._loss is not None or self._is_killed or self._is_worn_out
        return not is_lost and (not self._is_async or target in self._imported)

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_imported(self, target: str) -> bool:
        return target in self._imported

    async def import_function(self, target: str) -> None:
        """Imports the function at `target` (see `RewardEntry.target`).

        Raises:
            DataError: it does not import. The process is fine.
            ProcessLost: the import took longer than `LOAD_TIMEOUT_S`, or ended the process.
        """
        try:
            with self._call() as (number, answers):
                self._send(Call(number=number, target=target))
                late = f"the import of {target} took longer than {LOAD_TIMEOUT_S:g} s; its process was killed"
                await self._wait_until_begun(target, answers, LOAD_TIMEOUT_S, late)
        except asyncio.CancelledError:
            self.kill()
            raise

    async def score(
        self,
        target: str,
        request: RewardRequest,
        *,
        timeout_s: float,
        cpu_limit_s: float | None = None,
        max_concurrency: int = 1,
    ) -> RewardResult:
        """One call of an imported function.

        Raises:
            RewardError: it raised, or returned no finite number, or was cancelled since it took longer than
                `timeout_s`. The process is fine.
            CpuLimitExceeded: it took longer than `cpu_limit_s`.
            ProcessLost: it could not be ended after `timeout_s`, or the process died.
        """
        call = Call(
            number=-1, target=target, request=pickle.dumps(request), timeout_s=timeout_s, cpu_limit_s=cpu_limit_s
        )
        with self._call() as (number, answers):
            try:
                self._send(msgspec.structs.replace(call, number=number))
                answer = await self._answer_in_time(target, answers, timeout_s)
            except ProcessLost as lost:
                if cpu_limit_s is not None and self._process.returncode == -signal.SIGPROF:
                    raise CpuLimitExceeded(f"it took longer than {cpu_limit_s:g} s of processor time") from lost
                raise
            except asyncio.CancelledError:
                if self._is_async and self.is_alive:
                    self._send(Cancel(number=number))
                else:
                    self.kill()
                raise
            if isinstance(answer, Scored):
                return RewardResult(reward=answer.reward, parts=answer.parts)
            most_stuck = min(_STUCK_THREADS_PER_CALL * max_concurrency, MAX_THREADS // 2)
            self._is_worn_out |= answer.num_stuck > most_stuck
        raise RewardError(answer.error)

    def kill(self) -> None:
        """Kills the process and everything that it started; harmless if it is gone, which all the others are then."""
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
    def _call(self) -> Iterator[tuple[int, _Answers]]:
        """The number and the answers of a new call. The last one that leaves a worn-out process ends it."""
        if self._loss is not None:
            raise self._loss
        number = next(self._numbers)
        answers: _Answers = asyncio.Queue()
        self._calls[number] = answers
        try:
            yield number, answers
        finally:
            del self._calls[number]
            if self._is_worn_out and not self._calls:
                self.kill()

    def _send(self, message: Call | Cancel) -> None:
        """Without waiting for room in the pipe: each call waits for its answer, so one deadline will do."""
        assert self._process.stdin is not None, "started with a pipe"
        self._process.stdin.write(encode(message))

    async def _answer_in_time(self, target: str, answers: _Answers, timeout_s: float) -> Scored | Failed:
        if self._is_async:
            late = (
                f"the call took longer than {timeout_s:g} s and could not be cancelled, so its process was killed; an "
                "async reward must not block: await, or use asyncio.to_thread"
            )
            await self._wait_until_begun(target, answers, timeout_s + GRACE_S, late)
            answer = await self._next_answer(answers, timeout_s, GRACE_S, late)
        else:
            late = f"its process hung between two calls: to take the next one took longer than {LOAD_TIMEOUT_S:g} s"
            await self._wait_until_begun(target, answers, LOAD_TIMEOUT_S, f"{late}; its process was killed")
            late = f"the call took longer than {timeout_s:g} s; its process was killed"
            answer = await self._next_answer(answers, timeout_s, _OWN_GRACE_S, late)
        if not isinstance(answer, Scored | Failed):
            raise self._lose(_NONSENSE)
        return answer

    async def _wait_until_begun(self, target: str, answers: _Answers, timeout_s: float, late: str) -> None:
        answer = await self._next_answer(answers, timeout_s, _OWN_GRACE_S, late)
        if isinstance(answer, NotImported):
            raise DataError(answer.error)
        if not isinstance(answer, Begun):
            raise self._lose(_NONSENSE)
        self._is_async = answer.is_async
        self._imported.add(target)

    async def _next_answer(self, answers: _Answers, timeout_s: float, grace_s: float, late: str) -> Answer:
        # Twice: if our own loop was blocked, the deadline and the answer arrive together, and from Python 3.12 on the
        # deadline wins.
        for limit_s in (timeout_s, grace_s):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    answer = await answers.get()
                    if isinstance(answer, ProcessLost):
                        raise answer
                    return answer
        self.kill()
        raise ProcessLost(late)

    async def _read(self) -> None:
        """Consumes: answers. Waits for: the next one. Unblocked by: the end of the process, `close`."""
        assert self._process.stdout is not None, "started with a pipe"
        try:
            while (line := await self._process.stdout.readline()).endswith(b"\n"):
                answer = decode_answer(line)
                if (answers := self._calls.get(answer.number)) is not None:
                    answers.put_nowait(answer)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._lose(_NONSENSE)
        except ValueError:
            self._lose(f"answered with more than {_MAX_ANSWER_BYTES} bytes")
        else:
            await self._lose_ended()

    async def _lose_ended(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        code = self._process.returncode
        if code is None:
            self._lose("its process closed the pipe")
        else:
            cause = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            self._lose(f"its process ended {cause}")

    def _lose(self, reason: str) -> ProcessLost:
        """Kills it, and ends its calls with this reason, unless they were told another one before."""
        self.kill()
        if self._loss is None:
            self._loss = ProcessLost(f"{reason}, with {len(self._calls)} calls in it" if self._is_async else reason)
            for answers in self._calls.values():
                answers.put_nowait(self._loss)
        return self._loss

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _close_pipes(self) -> None:
        """It has ended, and what it started with it: no answer comes any more."""
        asyncio.get_running_loop().call_later(_CLOSE_S, self._transport.close)
