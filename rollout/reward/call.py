"""One call of a reward function: whatever it does, the outcome is a result or an error."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.errors import RewardError
from rollout.reward.result import RewardResult, to_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.reward.registry import RewardFn

_NUM_TRACEBACK_FRAMES = 3
_MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The arguments of one reward call."""

    prompt: str
    response: str
    answer: str
    metadata: Mapping[str, object]


def call(function: RewardFn, item: Item) -> RewardResult | RewardError:
    """Calls the function; the error tells what it raised (with the last frames) or what it wrongly returned."""
    if is_async(function):
        return asyncio.run(call_async(function, item))
    try:
        return to_result(function(**_arguments(item)))
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, sys.exit() included
        return _error(error)


async def call_async(function: RewardFn, item: Item) -> RewardResult | RewardError:
    """Calls an `async def` function; as `call` otherwise. Only a cancellation of this call itself is raised."""
    try:
        value: object = await function(**_arguments(item))  # type: ignore[misc]
        return to_result(value)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return _error(error)
    except BaseException as error:  # noqa: BLE001 - user code may raise anything, sys.exit() included
        return _error(error)


def is_async(function: RewardFn) -> bool:
    """Whether calling it gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def _arguments(item: Item) -> dict[str, Any]:
    return {
        "prompt": item.prompt,
        "response": item.response,
        "answer": item.answer,
        "metadata": dict(item.metadata),
    }


def _error(error: BaseException) -> RewardError:
    if isinstance(error, RewardError):
        return RewardError(clip(str(error)))
    tail = "".join(traceback.format_tb(error.__traceback__, limit=-_NUM_TRACEBACK_FRAMES)).rstrip()
    return RewardError(clip(f"raised {type(error).__name__}: {error}\n{tail}"))


def clip(text: str) -> str:
    """The text, cut to a length that fits a log line and the answer pipe."""
    return text if len(text) <= _MAX_MESSAGE_CHARS else f"{text[:_MAX_MESSAGE_CHARS]}..."
