"""What tests of reward processes share: the functions of `behaviour.py`, and calls of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import RewardError
from rollout.types import Prompt
from tests.fakes.process_life import is_running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollout.reward.pool import RewardPool

_FILE = Path(__file__).with_name("behaviour.py")
PLAIN, ASYNC, OTHER, OTHER_ASYNC = (f"{_FILE}:{name}" for name in ("reward", "judge", "other", "other_judge"))


def a_prompt(**changes: Any) -> Prompt:
    values: dict[str, Any] = {
        "prompt_id": "train/17",
        "token_ids": np.array([1, 2], np.int32),
        "text": "12+7=",
        "answer": "19",
        "metadata": {"level": 3},
    }
    return Prompt(**(values | changes))


async def outcome(pool: RewardPool, response: str, **prompt: Any) -> float | str:
    """The reward, or the text of the error."""
    try:
        return (await pool.score(a_prompt(**prompt), response)).reward
    except RewardError as error:
        return str(error)


async def outcomes(pool: RewardPool, responses: Iterable[str], **prompt: Any) -> list[float | str]:
    """All at once."""
    return list(await asyncio.gather(*(outcome(pool, response, **prompt) for response in responses)))


async def until(condition: Callable[[], object], *, timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def all_gone(pids: Iterable[int | str]) -> bool:
    return not any(is_running(int(pid)) for pid in pids)
