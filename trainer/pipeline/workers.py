"""The rollout workers as the driver sees them: which one gets the next group, and calls with a deadline."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from trainer.pipeline.handles import answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.buffer.items import WorkItem
    from rollout.types import Group, Prompt, SamplingParams, Trajectory

GROUP_GRACE_S = 60.0
"""A worker bounds generation and rewards itself; a live one has answered this much later."""


class WorkerPool:
    """Rollout worker actors; each group goes to the one with the fewest groups in flight."""

    def __init__(self, actors: Sequence[Any], *, group_timeout_s: float) -> None:
        self._actors = tuple(actors)
        self._in_flight = [0] * len(self._actors)
        self._group_timeout_s = group_timeout_s + GROUP_GRACE_S

    async def run_group(self, item: WorkItem) -> Group:
        """Generate and reward one group. Raises what the worker raised, or TimeoutError."""
        index = min(range(len(self._actors)), key=self._in_flight.__getitem__)
        self._in_flight[index] += 1
        try:
            return await answer(self._actors[index].run_group.remote(item), timeout_s=self._group_timeout_s)
        finally:
            self._in_flight[index] -= 1

    async def evaluate(self, prompts: Sequence[Prompt], params: SamplingParams, engine: str) -> list[Trajectory]:
        """One trajectory per prompt, all from the replica `engine`."""
        ref = self._actors[0].evaluate.remote(list(prompts), params, engine)
        return await answer(ref, timeout_s=self._group_timeout_s)

    async def replace(self, name: str, engine: Any) -> None:
        """All workers send to this engine actor what is meant for the replica `name`, quarantined or not."""
        calls = (answer(actor.replace.remote(name, engine), timeout_s=GROUP_GRACE_S) for actor in self._actors)
        await asyncio.gather(*calls)

    async def quarantine(self, name: str, reason: str) -> None:
        """No worker sends anything new to this replica."""
        calls = (answer(actor.quarantine.remote(name, reason), timeout_s=GROUP_GRACE_S) for actor in self._actors)
        await asyncio.gather(*calls)
