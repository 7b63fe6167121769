"""Rewards of the recipes, for `task.reward.name=scripts/recipes/rewards.py:NAME`."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")


def last_integer(*, prompt: str, response: str, answer: str, metadata: dict[str, object]) -> float:
    """1.0 if the last integer in the response is the answer; thousands may be separated by commas."""
    del prompt, metadata
    found = NUMBER.findall(response.replace(",", ""))
    return float(bool(found) and int(found[-1]) == int(answer))
