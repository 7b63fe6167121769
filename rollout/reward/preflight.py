"""Tries a reward function once, before a run starts anything expensive."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollout.errors import DataError, RewardError
from rollout.reward.pipeline import RewardPipeline

if TYPE_CHECKING:
    from rollout.reward.result import RewardResult
    from rollout.types import Prompt


def check_reward(name: str, *, sample: Prompt, timeout_s: float) -> RewardResult:
    """Imports the reward and calls it once, in a killable process with the run's time limit.

    The response is the sample's own answer. Call it from the main thread, outside of any event loop.

    Raises:
        DataError: the reward does not import, raises, hangs, or returns something that is not a finite number.
    """
    return asyncio.run(_check(name, sample, timeout_s))


async def _check(name: str, sample: Prompt, timeout_s: float) -> RewardResult:
    async with RewardPipeline(name, timeout_s=timeout_s, num_processes=1) as rewards:
        try:
            return await rewards.score(sample, sample.answer)
        except RewardError as error:
            raise DataError(
                f"{error}\nThis was a trial call with response={sample.answer!r:.80}; the run was not started. "
                "Fix the function, or raise task.reward.timeout_s if it is only slow."
            ) from error
