"""One call of a reward function, and what it may return."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.errors import RewardError

if TYPE_CHECKING:
    from rollout.reward.registry import RewardFn


_MAX_PARTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The reward of one response, and named parts of it for the metrics (empty if the function returned a number)."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


def to_result(value: object) -> RewardResult:
    """Accepts a finite number, or a mapping of finite numbers with the key "reward".

    Raises:
        RewardError: anything else, saying what was returned.
    """
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


_NUM_TRACEBACK_FRAMES = 3
_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """The arguments of one reward call."""

    prompt: str
    response: str
    answer: str
    metadata: Mapping[str, object]


def call(function: RewardFn, request: RewardRequest) -> RewardResult:
    """Calls the function.

    Raises:
        RewardError: what it raised, with the last frames, or what it wrongly returned.
    """
    if is_async(function):
        return asyncio.run(call_async(function, request))
    try:
        return to_result(function(**_arguments(request)))
    except BaseException as error:  # user code may raise anything, sys.exit() included
        raise _error(error) from error


async def call_async(function: RewardFn, request: RewardRequest) -> RewardResult:
    """Calls an `async def` function; as `call` otherwise. A cancellation of this call itself is raised as it is."""
    try:
        value: object = await function(**_arguments(request))  # type: ignore[misc]
        return to_result(value)
    except BaseException as error:  # user code may raise anything, sys.exit() included
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _error(error) from error


def is_async(function: RewardFn) -> bool:
    """Whether calling it gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _arguments(request: RewardRequest) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "response": request.response,
        "answer": request.answer,
        "metadata": dict(request.metadata),
    }


def _error(error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return RewardError(clip(str(error)))
    tail = "".join(traceback.format_tb(error.__traceback__, limit=-_NUM_TRACEBACK_FRAMES)).rstrip()
    return RewardError(clip(f"raised {type(error).__name__}: {error}\n{tail}"))


def clip(text: str) -> str:
    """The text, cut to a length that fits a log line and the pipe, and without what cannot be encoded."""
    text = text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."
    return text.encode(errors="replace").decode()
