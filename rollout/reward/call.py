"""One call of a reward function: its arguments, its result, and the messages that carry it to a process.

Messages are JSON, one per line. To a reward process: a `Call` per response (without a request, only to import the
function), and `Cancel` for an `async def` function. From it, by the number of the call: `Begun` once the function is
imported, then `Scored` or `Failed`; `Failed` alone if it does not import. Requests are pickles, since metadata may be
anything; replies never are, since a user's code can write to the pipe.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import RewardError

if TYPE_CHECKING:
    from rollout.reward.registry import RewardFn

_MAX_PARTS = 256
_NUM_TRACEBACK_FRAMES = 3
_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one reward call."""

    prompt: str
    response: str
    answer: str
    metadata: Mapping[str, object]


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """The reward of one response, and its named parts for the metrics (none if the function returned a number)."""

    reward: float
    parts: dict[str, float] = {}


class Call(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    target: str
    """See `RewardEntry.target`."""
    request: bytes | None = None
    """Pickle of a `RewardRequest`."""
    timeout_s: float = 0.0
    """Wall-clock time until an `async def` call is cancelled. The parent times any other."""
    cpu_limit_s: float | None = None
    memory_limit_bytes: int | None = None
    """See `RewardEntry`."""


class Cancel(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int


class Begun(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    is_async: bool


class Scored(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    result: RewardResult


class Failed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    number: int
    error: str
    is_timeout: bool = False
    num_stuck: int = 0
    """Busy threads beyond one per running call."""


Reply = Begun | Scored | Failed
decode_call = msgspec.json.Decoder(Call | Cancel).decode
decode_reply = msgspec.json.Decoder(Reply).decode
"""Raises msgspec.DecodeError or UnicodeDecodeError for anything else. JSON has no NaN, so numbers are finite."""


def encode(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def call(function: RewardFn, request: RewardRequest) -> RewardResult:
    """Calls the function. Raises RewardError with what it raised and the last frames, or what it wrongly returned."""
    if is_async(function):
        return asyncio.run(call_async(function, request))
    try:
        return to_result(function(**_arguments(request)))
    except BaseException as error:  # user code may raise anything, sys.exit() included
        raise _error(error) from error


async def call_async(function: RewardFn, request: RewardRequest) -> RewardResult:
    """As `call`, for an `async def` function. A cancellation of this task is raised as it is."""
    try:
        return to_result(await function(**_arguments(request)))  # type: ignore[misc]
    except BaseException as error:  # user code may raise anything, sys.exit() included
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _error(error) from error


def is_async(function: RewardFn) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def to_result(value: object) -> RewardResult:
    """Accepts a finite number, or a mapping of finite numbers with the key "reward". Raises RewardError."""
    if not isinstance(value, Mapping):
        return RewardResult(reward=_finite(value))
    if "reward" not in value:
        raise RewardError(f'returned a dict without the key "reward" (keys: {sorted(map(str, value))}); add it')
    if len(value) > _MAX_PARTS:
        raise RewardError(f"returned a dict of {len(value)} entries; at most {_MAX_PARTS} parts are recorded")
    parts = {clip(str(name)): _finite(part, f" as entry {str(name)!r}") for name, part in value.items()}
    return RewardResult(reward=parts.pop("reward"), parts=parts)


def _finite(value: object, where: str = "") -> float:
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # a boolean of NumPy, a tensor of one number
        value = item()
    if not isinstance(value, numbers.Real):
        raise RewardError(
            f"returned {type(value).__name__} {value!r:.80}{where}; a reward is a finite number, or a dict of them "
            'with the key "reward"'
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"returned {number}{where}; a reward must be finite, so guard the division or the log")
    return number


def clip(text: str) -> str:
    """The text, cut to fit a log line and the pipe, without characters that cannot be encoded."""
    text = text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."
    return text.encode(errors="replace").decode()


def _arguments(request: RewardRequest) -> dict[str, Any]:
    names = ("prompt", "response", "answer")
    return {name: getattr(request, name) for name in names} | {"metadata": dict(request.metadata)}


def _error(error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return RewardError(clip(str(error)))
    tail = "".join(traceback.format_tb(error.__traceback__, limit=-_NUM_TRACEBACK_FRAMES)).rstrip()
    return RewardError(clip(f"raised {type(error).__name__}: {error}\n{tail}"))
