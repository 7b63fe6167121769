"""Which engine a request goes to, and when: least loaded first, oldest group first.

A group stays with one engine, because its samples share the prompt's prefix cache. A new group goes to the engine with
the fewest outstanding tokens (prompt plus budget of what this sender has there) among those with room; of several to
the first. Each rollout worker has the engines in another order, and what the others have does not count: that number is
as old as the last view, and all would avoid the engine that was the last to finish, or choose it, at the same time.

Requests above an engine's limit are queued here. The oldest group enters first, and no request takes room that an older
one waits for.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.errors import EngineDead
from rollout.fleet.adaptive_limit import AdaptiveLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from rollout.engine.interface import EngineStatus
    from rollout.fleet.adaptive_limit import LimitRange


Order = tuple[int, int]
"""(start version, group id): sorts groups by the last step at which they may be trained, then by admission."""
_EVALUATION: Order = (-1, 0)


class NoReplica(Exception):
    """No engine takes requests; the message has the reason of each."""


def order_of(names: Sequence[str], *, worker: int, num_workers: int) -> list[str]:
    """The engines for the scheduler of one of several rollout workers: they begin evenly spread over all of them.

    Example:
        order_of(["e0", "e1", "e2", "e3"], worker=1, num_workers=2)  # ["e2", "e3", "e0", "e1"]
    """
    first = worker * len(names) // num_workers
    return [*names[first:], *names[:first]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Submission:
    """Requests that need room together."""

    group_key: str
    tokens: int
    num_requests: int
    reserved: str
    """The only engine that an evaluation may use; empty for training."""
    engine: asyncio.Future[str]


class _Engine:
    """One engine, as this sender sees it."""

    def __init__(self, limit: AdaptiveLimit | None) -> None:
        self.outstanding_tokens = self.num_requests = 0
        self.num_reserved = 0
        """Of the requests: those of evaluations."""
        self.num_elsewhere = 0
        """Requests that other senders had there when the driver asked last."""
        self.limit = limit
        self.excluded: str | None = None
        """Why it gets nothing more."""
        self.is_pinned = False
        """It gets nothing new; what it has continues."""
        self.is_drained = False
        """Its groups went elsewhere, and it waits for a new group; others come only if they find no room."""
        self.stays: dict[asyncio.Timeout, tuple[str, Callable[[], bool], Callable[[], None]]] = {}
        """(group, `may_leave`, `leave`) of each `holding`, by what ends it."""

    @property
    def is_open(self) -> bool:
        return self.excluded is None and not self.is_pinned

    def has_room(self, num_requests: int) -> bool:
        """An empty engine takes a group that is larger than its limit."""
        if self.excluded is not None or self.is_pinned:
            return False
        used, limit = self.num_requests, self.limit
        return limit is None or used == 0 or used + num_requests <= limit.limit

    def has_room_for_evaluation(self, most: int) -> bool:
        """An evaluation may have this sender's share of the engine, and what no sender uses of the whole: `most`, if
        this sender's limit is as high as it can be. Others have learned about the same of the engine."""
        used, limit = self.num_requests, self.limit
        if limit is None:
            return True
        if not self.is_pinned and self.num_reserved >= max(1, limit.limit // 2):
            return False  # the other half is for training, which continues there, and whose time runs
        return used < limit.limit or used + self.num_elsewhere < most * limit.limit // limit.bounds.highest


class RequestScheduler:
    """One per sender, in one event loop. Only `acquire` and `reserve` wait, and their callers bound that wait.

    Args:
        concurrency: of the requests that one engine has from this sender at once; None sends everything at once.
        total_concurrency: requests that one engine takes at once, from all senders.

    Example:
        name = await scheduler.acquire("g7.0", (3, 7), tokens=4096, num_requests=8)
        try:
            async with scheduler.holding(name, "g7.0", may_leave=may_leave, leave=leave): ...
        finally:
            scheduler.release(name, tokens=4096, num_requests=8)
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        concurrency: LimitRange | None = None,
        total_concurrency: int = 0,
    ) -> None:
        self._start_limit = None if concurrency is None else AdaptiveLimit.start(concurrency)
        self._total_concurrency = total_concurrency
        self._engines = {name: _Engine(self._start_limit) for name in names}
        if not self._engines:
            raise ValueError("a scheduler needs at least one engine, got none")
        self._engine_of: dict[str, str] = {}
        """Group -> where its prefix is cached."""
        self._queue: list[tuple[Order, int, _Submission]] = []  # sorted
        self._arrivals = itertools.count()
        self.num_queued = 0
        """Requests that wait for room."""
        self.moves = Counter[str]()
        """Requests that migrated or were recovered, and their tokens, by the names of `WorkerReport`."""

    # Requests

    async def acquire(self, group_key: str, order: Order, *, tokens: int, num_requests: int, reserved: str = "") -> str:
        """Waits for room and returns the engine, on which the requests are counted from then on.

        Waits for: room on an engine that may take them. Unblocked by: `release`, a higher limit, the end of a pin, an
        engine that comes back; by the loss of all engines, with `NoReplica`; and by cancellation.
        """
        engine = asyncio.get_running_loop().create_future()
        submission = _Submission(
            group_key=group_key, tokens=tokens, num_requests=num_requests, reserved=reserved, engine=engine
        )
        bisect.insort(self._queue, (order, next(self._arrivals), submission))
        self.num_queued += num_requests
        try:
            self._admit()
            return await engine
        except asyncio.CancelledError:
            if engine.done() and not engine.cancelled() and engine.exception() is None:
                self._take_back(engine.result(), tokens, num_requests, is_reserved=bool(reserved))
            raise
        finally:
            self.num_queued -= num_requests
            engine.cancel()
            self._admit()  # the next one may be first now

    @contextlib.asynccontextmanager
    async def reserve(self, name: str) -> AsyncIterator[None]:
        """Room at `name` for one request of an evaluation, before all that wait, whether it is pinned or not. Waits as
        `acquire`; raises NoReplica if the engine is excluded."""
        await self.acquire("", _EVALUATION, tokens=0, num_requests=1, reserved=name)
        try:
            yield
        finally:
            self._take_back(name, 0, 1, is_reserved=True)
            self._admit()

    def release(self, name: str, *, tokens: int, num_requests: int) -> None:
        """Requests came back, or never will."""
        self._take_back(name, tokens, num_requests)
        self._admit()

    @contextlib.asynccontextmanager
    async def holding(
        self, name: str, group_key: str, *, may_leave: Callable[[], bool], leave: Callable[[], None]
    ) -> AsyncIterator[None]:
        """Around the stay of a group's requests. The block ends once `name` is excluded: raises EngineDead, with the
        reason; the exclusion may also have come between `acquire` and this.

        Args:
            may_leave: whether it is worth what it costs to compute them again elsewhere.
            leave: has the engine return them, which the holder then notices; does not wait.
        """
        engine = self._engines[name]
        if engine.excluded is not None:
            raise EngineDead(engine.excluded)
        limit, stays = asyncio.timeout(None), engine.stays
        stays[limit] = group_key, may_leave, leave
        try:
            async with limit:
                try:
                    yield
                finally:
                    stays.pop(limit, None)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineDead(engine.excluded or f"{name} was excluded") from error

    def forget(self, group_key: str) -> None:
        """The group is over; nothing else of it will be sent."""
        self._engine_of.pop(group_key, None)

    # Engines

    def adapt(self, name: str, load: EngineStatus) -> None:
        """Moves the limit of `name`, if it has one."""
        engine = self._engine(name)
        if engine.limit is not None:
            engine.limit = engine.limit.next(load, in_flight=engine.num_requests, num_queued=self.num_queued)
            self._admit()

    def exclude(self, name: str, reason: str) -> None:
        """Sends nothing more to `name` until `readmit`, and ends every `holding` there. The first reason is kept."""
        engine = self._engine(name)
        if engine.excluded is None:
            engine.excluded = reason
        now = asyncio.get_running_loop().time()
        stays, engine.stays = engine.stays, {}
        for limit in stays:
            limit.reschedule(now)
        self._admit()

    def readmit(self, name: str) -> None:
        """`name` is a new engine, with nothing of the old one's against it."""
        engine = self._engine(name)
        engine.excluded, engine.is_pinned, engine.is_drained = None, False, False
        engine.limit = self._start_limit
        self._admit()

    def set_view(self, name: str, *, is_pinned: bool = False, num_elsewhere: int = 0) -> None:
        """`name` as the driver sees it. A pinned engine gets nothing new of training; what it has continues."""
        engine = self._engine(name)
        engine.is_pinned, engine.num_elsewhere = is_pinned, num_elsewhere
        self._admit()

    def may_drain(self, name: str) -> bool:
        """Whether everything at `name` may leave now, and nothing may come back there: no group that it serves is
        between two turns, or waits for its rewards."""
        stays = self._engine(name).stays.values()
        groups = {group_key for group_key, engine in self._engine_of.items() if engine == name}
        return groups <= {group_key for group_key, *_ in stays} and all(may_leave() for _, may_leave, _ in stays)

    def drain(self, name: str) -> None:
        """Has everything at `name` continue elsewhere, and keeps it empty until there is a new group."""
        engine = self._engine(name)
        engine.is_drained = True
        for *_, leave in engine.stays.values():
            leave()

    # State

    @property
    def in_service(self) -> list[str]:
        """Engines that are neither excluded nor pinned nor drained."""
        return [name for name, engine in self._engines.items() if engine.is_open and not engine.is_drained]

    @property
    def excluded(self) -> dict[str, str]:
        """Engine to reason."""
        return {name: one.excluded for name, one in self._engines.items() if one.excluded is not None}

    @property
    def num_requests(self) -> dict[str, int]:
        """Engine to requests that were sent there and have not come back."""
        return {name: one.num_requests for name, one in self._engines.items()}

    @property
    def limits(self) -> dict[str, int]:
        """Engine to its limit, for those that have one."""
        return {name: one.limit.limit for name, one in self._engines.items() if one.limit is not None}

    def require_engine(self) -> None:
        """Raises NoReplica if no engine takes requests because some are excluded, and the others pinned."""
        if not self.excluded or any(engine.is_open for engine in self._engines.values()):
            return
        reasons = {name: "pinned" for name, one in self._engines.items() if one.excluded is None} | self.excluded
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NoReplica(f"all {len(reasons)} engines are excluded or pinned ({text})")

    # Inside

    def _admit(self) -> None:
        """Every submission for which there is room, oldest first. None takes a place that an older one waits for."""
        full, place = set[str](), 0
        while place < len(self._queue):
            submission = self._queue[place][2]
            own = self._only_engine(submission)
            if submission.engine.done() or (own not in full and self._try(submission, own)):
                del self._queue[place]
            elif own is None:
                return  # it would take any place
            else:
                full.add(own)
                place += 1

    def _try(self, submission: _Submission, own: str | None) -> bool:
        """Whether its wait is over: with an engine, on which its requests count from now on, or with an error."""
        try:
            name = self._choose(submission, own)
        except NoReplica as error:  # for the one that waits, not for the one that made room
            submission.engine.set_exception(error)
            return True
        if name is None:
            return False
        engine = self._engines[name]
        if submission.reserved:
            engine.num_reserved += submission.num_requests
        else:
            self._engine_of[submission.group_key] = name
            engine.is_drained = False
        engine.outstanding_tokens += submission.tokens
        engine.num_requests += submission.num_requests
        submission.engine.set_result(name)
        return True

    def _only_engine(self, submission: _Submission) -> str | None:
        """The one engine that it waits for; None if any will do."""
        if submission.reserved:
            return submission.reserved
        name = self._engine_of.get(submission.group_key)
        if name is None or not self._engines[name].is_open or self._engines[name].is_drained:
            return None
        return name

    def _choose(self, submission: _Submission, own: str | None) -> str | None:
        """None if every engine that may take it is full or pinned; raises NoReplica if all are excluded."""
        num_requests = submission.num_requests
        if submission.reserved:
            engine = self._engine(submission.reserved)
            if engine.excluded is not None:
                raise NoReplica(f"the engine of the evaluation is excluded ({submission.reserved}: {engine.excluded})")
            return own if engine.has_room_for_evaluation(self._total_concurrency) else None
        if own is not None:
            return own if self._engines[own].has_room(num_requests) else None
        usable = [name for name, engine in self._engines.items() if engine.has_room(num_requests)]
        if not usable and len(self.excluded) == len(self._engines):
            self.require_engine()
        if submission.group_key in self._engine_of:  # a drained engine is kept for new groups
            usable = [name for name in usable if not self._engines[name].is_drained] or usable
        return min(usable, key=lambda name: self._engines[name].outstanding_tokens, default=None)

    def _take_back(self, name: str, tokens: int, num_requests: int, *, is_reserved: bool = False) -> None:
        engine = self._engines[name]
        if engine.outstanding_tokens < tokens or engine.num_requests < num_requests:
            raise ValueError(
                f"{tokens} tokens came back from {name!r}, but only {engine.outstanding_tokens} were outstanding "
                f"(requests: {num_requests} of {engine.num_requests})"
            )
        engine.outstanding_tokens -= tokens
        engine.num_requests -= num_requests
        engine.num_reserved -= num_requests * is_reserved

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            raise ValueError(f"unknown engine {name!r}; known engines: {sorted(self._engines)}")
        return self._engines[name]
