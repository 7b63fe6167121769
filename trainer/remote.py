"""Calls to Ray actors, each with a deadline that names the actor and what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weight_sync.messages import CommitResult


REPLY_GRACE_S = 5.0
"""The actor bounds its own time by `timeout_s`; a live one has replied this much later."""


ACTOR_OUTPUT = "actor_logs/ (on a joined cluster: the logs of Ray)"
"""Where messages say that the output of an actor is. `actor_logs/` is made when a run on a private cluster fails."""


class RemoteTimeout(TimeoutError):
    """A remote call did not end in time; what it does may still continue."""


async def call(ref: Any, *, timeout_s: float | None, who: str, what: str, hint: str) -> Any:
    """The result of a remote call, or its exception. A limit of None is for a caller with a deadline of its own.

    Raises:
        RemoteTimeout: `what` timed out on `who`, and a `hint` at what to do.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await asyncio.wrap_future(ref.future())
    except TimeoutError as error:
        if not limit.expired():
            raise  # the actor's own
        raise RemoteTimeout(f"{what} timed out after {timeout_s:g} s on {who}; {hint}") from error


async def start_actor(actor: Any, name: str, *, timeout_s: float, **arguments: Any) -> Any:
    """What the actor's `start` returns. `timeout_s` is `trainer.startup_timeout_s`. Raises as `call`."""
    hint = f"increase trainer.startup_timeout_s if it was still loading; its output is in {ACTOR_OUTPUT}"
    return await call(actor.start.remote(**arguments), timeout_s=timeout_s, who=name, what="start", hint=hint)


def kill_actor(actor: Any) -> None:
    """End an actor's process, also one that is stopped. Its pending calls fail at once."""
    import ray

    ray.kill(actor)


def cancel_call(ref: Any) -> None:
    """Have an actor cancel a call whose result is not needed any more. Does not wait; a call that has ended is left."""
    import ray

    ray.cancel(ref)


class EngineReplica:
    """One engine actor as a `weight_sync.control.members.ReplicaHandle`."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """One result per vLLM worker, in rank order."""
        ref = self.actor.call_workers.remote(method, args, timeout_s)
        return await self._call(ref, method, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        """Pause, call, label, resume: all of it inside the actor, so that our death cannot leave it paused."""
        ref = self.actor.commit.remote(version, method, args, timeout_s)
        return await self._call(ref, method, timeout_s=timeout_s)

    async def _call(self, ref: Any, method: str, *, timeout_s: float) -> Any:
        hint = (
            f"its process hangs, or weight_sync.timeout_s is too short for this model; its output is in {ACTOR_OUTPUT}"
        )
        return await call(ref, timeout_s=timeout_s + REPLY_GRACE_S, who=self.name, what=method, hint=hint)
