"""The part of a reward's contract that only its own process sees."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from rollout.errors import RewardError
from rollout.reward.registry import load


def call_watched(*, prompt: str, response: str, answer: str, metadata: dict[str, Any]) -> float:
    """A reward that calls another one; 0.0.

    Args:
        metadata: "target" of the other one, and the "metadata" that it gets.

    Raises:
        RewardError: that changed it.
    """
    passed = metadata["metadata"]
    before = repr(passed)
    outcome = load(metadata["target"])(prompt=prompt, response=response, answer=answer, metadata=passed)
    if inspect.iscoroutine(outcome):
        asyncio.run(outcome)
    if repr(passed) != before:
        raise RewardError(f"metadata was {before:.80} and is {passed!r:.80}; work on a copy")
    return 0.0
