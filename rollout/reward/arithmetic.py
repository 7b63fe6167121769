"""Reward of `builtin:arithmetic`: the response is the sum, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def score(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """1.0 if the response, without surrounding white space, is exactly the answer; else 0.0."""
    del prompt, metadata
    return 1.0 if response.strip() == answer.strip() else 0.0
