"""Reward of an outcome that is worth nothing by itself: the environment rewards the turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def score(*, prompt: str, response: str, answer: str, metadata: Mapping[str, object]) -> float:
    """0.0, whatever the response."""
    del prompt, response, answer, metadata
    return 0.0
