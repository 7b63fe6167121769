"""What the one taker of the work buffer waits for, and when it is worth a look again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.buffer.staleness import Wait

MOST_NAMES = 8


class Taker:
    """Wakes `take` no earlier than what its `Wait` asks for has come: a look costs time in proportion to the slots."""

    def __init__(self) -> None:
        self._wait: Wait | None = None
        self._due: set[int] = set()
        self._num_missing = 0
        self._may_look = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        """And not about to look again."""
        return self._wait is not None and not self._may_look.is_set()

    async def wait(self, choice: Wait) -> None:
        """Waits for: what `choice` asks for. Unblocked by: `wake`; cancellation."""
        self._wait = choice
        self._due, self._num_missing = set(choice.group_ids), choice.num_needed
        self._may_look.clear()
        try:
            await self._may_look.wait()
        finally:
            self._wait = None

    def on_ended(self, group_id: int) -> None:
        """A running group finished, or left the buffer."""
        if group_id in self._due:
            self._due.remove(group_id)
            self._num_missing -= 1

    def may_go_on(self, *, has_step: bool) -> bool:
        """`has_step`: as many groups are ready as a step trains."""
        if self._wait is not None and self._wait.is_forced:
            return self._num_missing <= 0
        return has_step

    def wake(self) -> None:
        self._may_look.set()


def describe(wait: Wait, step: int, *, num_ready: int) -> str:
    """In words for a person or a stall message."""
    old = f" that are due, although {num_ready} are ready" if wait.is_forced else ""
    names = ", ".join(str(group_id) for group_id in wait.group_ids[:MOST_NAMES]) or "none admitted"
    more = f" and {len(wait.group_ids) - MOST_NAMES} more" if len(wait.group_ids) > MOST_NAMES else ""
    return f"step {step} waits for {wait.num_needed} of the unfinished groups{old} ({names}{more})"
