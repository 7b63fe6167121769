"""The inside of a reward process: reads requests, calls reward functions, answers one line per item.

Wire, over two pipes that belong to the protocol alone (what user code prints goes to stderr):
  in    8 bytes length, then pickle of `Request`       (the parent's own objects; metadata may be anything)
  out   one JSON line "loaded" or "load_error", then one JSON line per item, in order
A function that is `async def` is asked for with no item first, and has its process for itself then: `async_child.py`.
The process never outlives its parent: `guard.py` ends it with all that it started, and a closed pipe ends it.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from rollout.errors import DataError
from rollout.reward.async_child import serve
from rollout.reward.call import Item, call, clip, is_async
from rollout.reward.guard import fork_under_guard
from rollout.reward.registry import load
from rollout.reward.wire import answer, outcome_message, read_frame

if TYPE_CHECKING:
    from rollout.reward.registry import RewardFn


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    target: str
    items: tuple[Item, ...]


def main(parent_pid: int) -> None:
    """Serves requests until the parent closes the pipe or is gone; after one for an async function its calls alone."""
    _die_with_parent(parent_pid)
    requests, answers = _take_protocol_pipes()
    functions: dict[str, RewardFn] = {}
    while (payload := read_frame(requests)) is not None:
        request: Request = pickle.loads(payload)
        try:
            if request.target not in functions:
                functions[request.target] = load(request.target)
        except DataError as error:
            answer(answers, {"load_error": clip(str(error))})
            continue
        function = functions[request.target]
        answer(answers, {"loaded": True, "is_async": is_async(function)})
        if is_async(function):
            serve(function, requests, answers)
        for item in request.items:
            answer(answers, outcome_message(call(function, item)))


def _take_protocol_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the pipes away from stdin and stdout, so that a `print` in a reward cannot break the protocol."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, answers


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        fork_under_guard(parent_pid)
    else:
        threading.Thread(target=_watch_parent, args=(parent_pid,), daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(1.0)
    os._exit(1)
