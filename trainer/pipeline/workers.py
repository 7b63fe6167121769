"""The rollout workers as the driver sees them: which one gets the next group, and calls with a deadline."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from trainer.pipeline.handles import answer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.buffer.items import WorkItem
    from rollout.load_watch import LoadReport, ReplicaLoad
    from rollout.types import Group, Prompt, SamplingParams, Trajectory

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between two looks at the engines' load."""
GROUP_GRACE_S = 60.0
"""A worker bounds generation and rewards itself; a live one has answered this much later."""


class WorkerPool:
    """Rollout worker actors; each group goes to the one with the fewest groups in flight."""

    def __init__(self, actors: Sequence[Any], *, group_timeout_s: float) -> None:
        self._actors = tuple(actors)
        self._in_flight = [0] * len(self._actors)
        self._group_timeout_s = group_timeout_s + GROUP_GRACE_S
        self.load_record: dict[str, float] = {}
        """Metrics of the engines' load as they were last; empty before the first look."""

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
        await self._tell_all(lambda actor: actor.replace.remote(name, engine))

    async def rest(self, name: str) -> None:
        """No worker sends anything new to this replica until `resume`; what runs there goes on."""
        await self._tell_all(lambda actor: actor.rest.remote(name))

    async def resume(self, name: str) -> None:
        """Ends a rest."""
        await self._tell_all(lambda actor: actor.resume.remote(name))

    async def watch_loads(self) -> None:
        """Keeps `load_record` new. Consumes: the workers' reports. Waits for: its interval, and each answer, which has
        a deadline. Unblocked by: cancellation."""
        while True:
            await asyncio.sleep(LOOK_S)
            calls = (answer(actor.loads.remote(), timeout_s=GROUP_GRACE_S) for actor in self._actors)
            reports = await asyncio.gather(*calls, return_exceptions=True)
            for report in reports:
                if isinstance(report, Exception):  # figures only: who needs the worker itself finds out by itself
                    log.warning("a rollout worker did not say how busy the engines are: %s", report)
            good = [report for report in reports if not isinstance(report, BaseException)]
            self.load_record = load_record(good) if good else {}

    async def quarantine(self, name: str, reason: str) -> None:
        """No worker sends anything more to this replica; what runs there goes on elsewhere, from what it has."""
        await self._tell_all(lambda actor: actor.quarantine.remote(name, reason))

    async def _tell_all(self, call: Callable[[Any], Any]) -> None:
        await asyncio.gather(*(answer(call(actor), timeout_s=GROUP_GRACE_S) for actor in self._actors))


def load_record(reports: Sequence[LoadReport]) -> dict[str, float]:
    """Metrics of the engines' load, from what each worker sees. Pure.

    Limits, requests in flight and held are summed over workers; what an engine says of itself is the same for all.
    """
    record: dict[str, float] = {"engine/held": sum(report.held for report in reports)}
    for name in reports[0].replicas:
        shares = [report.replicas[name] for report in reports]
        limits = [share.limit for share in shares if share.limit is not None]
        if limits:
            record[f"engine/limit/{name}"] = sum(limits)
        record[f"engine/in_flight/{name}"] = sum(share.in_flight for share in shares)
        record |= _said(name, shares)
    return record


def _said(name: str, shares: Sequence[ReplicaLoad]) -> dict[str, float]:
    load = next((share.load for share in shares if share.load is not None), None)
    if load is None:
        return {}
    said = {
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage_frac": load.kv_usage_frac,
        "preemptions": load.num_preemptions,
    }
    return {f"engine/{figure}/{name}": value for figure, value in said.items() if value is not None}
