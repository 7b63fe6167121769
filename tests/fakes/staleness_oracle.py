"""The staleness condition counted out, as the documentation states it: a slow reference that shares no code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def is_kept(start_versions: Iterable[int], step: int, *, groups_per_step: int, max_staleness: int) -> bool:
    """For every k >= 0: at most (k+1)*B of the groups have a deadline <= step + k, and none has one before `step`."""
    deadlines = [version + max_staleness for version in start_versions]
    if any(deadline < step for deadline in deadlines):
        return False
    return all(
        sum(deadline <= step + k for deadline in deadlines) <= (k + 1) * groups_per_step
        for k in range(max(deadlines, default=step) - step + 1)
    )
