"""Actors as weight sync sees them. Knows actor handles only by their `.method.remote(...)`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync.wire import CommitResult

ANSWER_GRACE_S = 5.0
"""The actor bounds its own time by `timeout_s`; a live one has answered this much later."""


async def answer(ref: Any, *, timeout_s: float) -> Any:
    """The result of a remote call, its exception, or TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(ref.future())


class EngineReplica:
    """One engine actor as a `weight_sync.members.ReplicaHandle`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """One result per vLLM worker, in rank order."""
        ref = self.actor.call_workers.remote(method, args, timeout_s)
        return await answer(ref, timeout_s=timeout_s + ANSWER_GRACE_S)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        """Pause, call, label, resume: all of it inside the actor, so that our death cannot leave it paused."""
        ref = self.actor.commit.remote(version, method, args, timeout_s)
        return await answer(ref, timeout_s=timeout_s + ANSWER_GRACE_S)
