"""Looks up columns of a data set, and checks those that have to be numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.errors import DataError

if TYPE_CHECKING:
    from rollout.types import Prompt

MISSING = object()
"""What `find` gives where there is no such column."""


def find(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, `a.b` reaching into a struct; `MISSING` if there is none."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def numbers(prompts: Sequence[Prompt], name: str, *, setting: str) -> list[float | None]:
    """A column of the prompts' metadata as one finite number per prompt; None where the data set has null.

    Args:
        setting: the configuration key that names the column, for messages.

    Raises:
        DataError: a prompt has no such column, or something else in it.
    """
    return [_number(prompt, name, setting) for prompt in prompts]


def _number(prompt: Prompt, name: str, setting: str) -> float | None:
    value = find(prompt.metadata, name)
    if value is MISSING:
        existing = ", ".join(prompt.metadata) if prompt.metadata else "none"
        raise DataError(
            f"prompt {prompt.prompt_id}: no column {name!r}; the columns beside prompt and answer are: {existing}; "
            f"set {setting}"
        )
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise DataError(
            f"prompt {prompt.prompt_id}: column {name!r} holds {type(value).__name__} {value!r:.80}; {setting} names a "
            "column of finite numbers"
        )
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False
