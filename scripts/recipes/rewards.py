"""Rewards of the recipes, for `task.reward.name=scripts/recipes/rewards.py:NAME`, and a tool for `task.agent_args`."""

from __future__ import annotations

import re

NUMBER = re.compile(r"-?\d+")
PRODUCT = re.compile(r"\s*(-?\d{1,9})\s*\*\s*(-?\d{1,9})\s*")


def last_integer(*, prompt: str, response: str, answer: str, metadata: dict[str, object]) -> float:
    """1.0 if the last integer in the response is the answer; thousands may be separated by commas."""
    del prompt, metadata
    found = NUMBER.findall(response.replace(",", ""))
    return float(bool(found) and int(found[-1]) == int(answer))


def calculator(expression: str) -> int:
    """The product of two integers.

    Args:
        expression: such as 12 * 34
    """
    found = PRODUCT.fullmatch(expression)
    if found is None:
        raise ValueError(f"{expression!r} is no product of two integers")
    return int(found[1]) * int(found[2])
