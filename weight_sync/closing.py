"""Closes the parties of an epoch in such an order that nobody frees memory which somebody else still maps.

    replicas apart (they unmap each other's shadow blocks) ─> replicas (they unmap the slots) ─> learners

Drivers ask for it: an exporter that closes before its importers is an error in CANN and undefined in CUDA and HIP.
All steps share one deadline, and each is best effort: a party that is dead or hangs keeps no other from closing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from weight_sync.wire import open_reply

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterable, Sequence

    from weight_sync.members import Member, PublisherHandle, ReplicaHandle
    from weight_sync.opening import Agreement, EpochOpener

log = logging.getLogger(__name__)
_HANDLE_FIRST_S = 0.05
"""A handle that keeps its own limit has the first word: it knows what to make of a party that is silent."""

CLOSE_S = 10.0
PART_S = 2.0
"""Control threads answer at once, and unmapping takes milliseconds."""


async def close_parties(
    opener: EpochOpener,
    agreement: Agreement | None,
    members: Sequence[Member],
    publishers: Sequence[PublisherHandle],
    *,
    timeout_s: float,
) -> None:
    """Close everyone, all steps together within `timeout_s`. `agreement` is what they were linked by, None if they were
    not. Raises nothing of theirs."""
    now = asyncio.get_running_loop().time
    give_up = now() + timeout_s
    least_s = min(PART_S, timeout_s / 3)  # of each step, whoever hangs in another
    if len(members) > 1:
        await part(opener, agreement, members, timeout_s=least_s)
    for member in members:
        member.disconnect()
    replicas = [member.handle for member in members]
    await close_replicas(replicas, timeout_s=max(least_s, give_up - now() - least_s))
    await _quietly((_close_learner(one, max(least_s, give_up - now())) for one in publishers), "did not close")


async def part(
    opener: EpochOpener, agreement: Agreement | None, members: Sequence[Member], *, timeout_s: float
) -> None:
    """Let none of `members` read from another replica. Raises nothing of theirs."""
    if agreement is not None:
        await _quietly([opener.part(agreement, members, min(PART_S, timeout_s))], "did not unmap what it read from")


async def close_replicas(replicas: Iterable[ReplicaHandle], *, timeout_s: float) -> None:
    """Close replicas that do not read from each other, all at once. Raises nothing of theirs."""
    await _quietly((_close_replica(replica, timeout_s) for replica in replicas), "did not close")


async def _close_replica(replica: ReplicaHandle, timeout_s: float) -> None:
    replies = await _within(timeout_s, replica.call("ws_close", timeout_s=timeout_s), f"replica {replica.name}")
    for worker, reply in enumerate(replies):
        open_reply(reply, type(None), party=f"{replica.name}/{worker}")


async def _close_learner(publisher: PublisherHandle, timeout_s: float) -> None:
    await _within(timeout_s, publisher.call("ws_close", timeout_s=timeout_s), f"learner rank {publisher.rank}")


async def _within(timeout_s: float, call: Coroutine[Any, Any, Any], who: str) -> Any:
    """The result. A handle may wait longer than it was told, for an answer that is on its way; this does not."""
    limit = asyncio.timeout(timeout_s + _HANDLE_FIRST_S)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise  # the party's own
        raise TimeoutError(f"{who} did not answer within {timeout_s:.1f} s") from error


async def _quietly(calls: Iterable[Awaitable[Any]], what: str) -> None:
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, Exception):
            # An error that Ray carried has the real one behind `cause`, and a traceback for a text.
            cause = getattr(result, "cause", result)
            log.warning("a party of weight sync %s: %s: %s", what, type(cause).__name__, cause)
