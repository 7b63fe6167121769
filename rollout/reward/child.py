"""Inside of a reward process: imports reward functions, calls them and replies. `call.py` describes the messages.

What user code prints goes to stderr. A plain function is called in the main thread, outside of any event loop, one call
at a time. The first `async def` function opens an event loop; from then on the process serves only that one, many calls
at once. The process never outlives its parent: its guards end it with all that it started, and a closed pipe ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil

from rollout.errors import DataError, RewardError
from rollout.processes import exit_with_parent, fork_under_guards
from rollout.reward.call import (
    Begun,
    Call,
    Cancel,
    Failed,
    Reply,
    Scored,
    call,
    call_async,
    clip,
    decode_call,
    encode,
    is_async,
)
from rollout.reward.registry import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollout.reward.call import RewardRequest
    from rollout.reward.registry import RewardFn

MAX_THREADS = 1024
"""For `asyncio.to_thread` in a reward; they start as they are needed."""


def main(parent_pid: int) -> None:
    """Serves calls until the parent closes the pipe or is gone."""
    if sys.platform == "linux":
        fork_under_guards(parent_pid)
    else:
        exit_with_parent(parent_pid)
    requests, replies = _take_protocol_pipes()
    functions: dict[str, RewardFn] = {}
    for line in requests:
        message = decode_call(line)
        if isinstance(message, Cancel):
            continue
        try:
            if message.target not in functions:
                functions[message.target] = load(message.target)
        except DataError as error:
            _reply(replies, Failed(number=message.number, error=clip(str(error))))
            continue
        function = functions[message.target]
        _reply(replies, Begun(number=message.number, is_async=is_async(function)))
        if is_async(function):
            asyncio.run(_serve_async(function, requests, replies))
        if message.request is not None:
            try:
                with _limits(message):
                    reply = Scored(number=message.number, result=call(function, _request(message)))
            except RewardError as error:
                reply = Failed(number=message.number, error=str(error))
            _reply(replies, reply)


def _take_protocol_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the pipes away from stdin and stdout: a `print` in a reward must not break the protocol."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _reply(replies: BinaryIO, message: Reply) -> None:
    replies.write(encode(message))
    replies.flush()


@contextlib.contextmanager
def _limits(message: Call) -> Iterator[None]:
    """Beyond the processor time a signal ends the process, even within a single operation; beyond the memory an
    allocation raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    if message.memory_limit_bytes is not None:
        limit = psutil.Process().memory_info().vms + message.memory_limit_bytes
        others = [other for other in before if other != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min([limit, *others]), before[1]))
    if message.cpu_limit_s is not None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, message.cpu_limit_s)
    try:
        yield
    finally:
        if message.cpu_limit_s is not None:
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _request(message: Call) -> RewardRequest:
    assert message.request is not None
    try:
        return pickle.loads(message.request)
    except Exception as error:
        raise RewardError(clip(f"cannot take the prompt's metadata: {type(error).__name__}: {error}")) from error


class _Threads(ThreadPoolExecutor):
    """Knows its busy threads: one continues after the call that waited for it was cancelled."""

    def __init__(self) -> None:
        super().__init__(max_workers=MAX_THREADS)
        self.busy: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.busy.add(future)
        future.add_done_callback(self.busy.discard)
        return future


async def _serve_async(function: RewardFn, requests: BinaryIO, replies: BinaryIO) -> None:
    """Consumes: calls. Waits for: the next one. Unblocked by: the end of the pipe.

    Does not return, because threads of the reward may never end.
    """
    loop = asyncio.get_running_loop()
    threads = _Threads()
    loop.set_default_executor(threads)
    messages: asyncio.Queue[Call | Cancel | None] = asyncio.Queue()

    def read() -> None:
        for line in requests:
            loop.call_soon_threadsafe(messages.put_nowait, decode_call(line))
        loop.call_soon_threadsafe(messages.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    running: dict[int, asyncio.Task[None]] = {}

    async def run(message: Call) -> None:
        number = message.number
        try:
            async with asyncio.timeout(message.timeout_s):
                reply = Scored(number=number, result=await call_async(function, _request(message)))
        except RewardError as error:
            reply = Failed(number=number, error=str(error))
        except TimeoutError:
            text = f"the call took longer than {message.timeout_s:g} s; it was cancelled"
            num_stuck = max(0, len(threads.busy) - len(running) + 1)  # this call has ended
            reply = Failed(number=number, error=text, is_timeout=True, num_stuck=num_stuck)
        _reply(replies, reply)

    while (message := await messages.get()) is not None:
        if isinstance(message, Cancel):
            if task := running.get(message.number):
                task.cancel()
            continue
        _reply(replies, Begun(number=message.number, is_async=True))
        if message.request is not None:
            task = running[message.number] = asyncio.create_task(run(message))
            task.add_done_callback(lambda _, number=message.number: running.pop(number))
    os._exit(0)
