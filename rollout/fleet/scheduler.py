"""Which engine a request goes to, and when: least loaded first, oldest group first.

A group stays with one engine, because its samples share the prompt's prefix cache. A new group goes to the engine with
the fewest outstanding tokens (prompt plus budget of what was sent and has not come back) among those with room, and to
the first one of those that have equally few. A scheduler knows what its own rollout worker has sent, and not what the
others have; so that they do not all begin with the same engine, each has the engines in another order.

Requests above an engine's limit are queued here. The oldest group enters first, and no request takes room that an older
one waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence


Order = tuple[int, int]
"""(start version, group id): sorts groups by the last step at which they may be trained, then by admission."""


class NoReplica(Exception):
    """No engine takes requests; the message has the reason of each."""


def order_of(names: Sequence[str], *, worker: int, num_workers: int) -> list[str]:
    """The engines for the scheduler of one of several rollout workers: they begin evenly spread over all of them.

    Example:
        order_of(["e0", "e1", "e2", "e3"], worker=1, num_workers=2)  # ["e2", "e3", "e0", "e1"]
    """
    first = worker * len(names) // num_workers
    return [*names[first:], *names[:first]]


class Lease(Protocol):
    """Requests of one group that are at one engine."""

    @property
    def group_key(self) -> str: ...

    @property
    def may_leave(self) -> bool:
        """Whether it is worth what it costs to compute them again elsewhere."""
        ...

    def leave(self) -> None:
        """Has the engine give them back, which the holder then notices; does not wait."""
        ...


class _Waiter:
    """A submission that is queued."""

    def __init__(self, group_key: str, tokens: int, num_requests: int) -> None:
        self.group_key, self.tokens, self.num_requests = group_key, tokens, num_requests
        self.engine: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class _Engine:
    """One engine, as this sender sees it."""

    def __init__(self) -> None:
        self.outstanding_tokens = self.num_requests = 0
        self.limit: int | None = None
        self.excluded: str | None = None
        """Why it gets nothing more."""
        self.is_pinned = False
        """It gets nothing new; what it has continues."""
        self.is_drained = False
        """Its groups went elsewhere, and it waits for a new group; others come only if they find no room."""
        self.leases: dict[asyncio.Timeout, Lease] = {}

    @property
    def is_open(self) -> bool:
        return self.excluded is None and not self.is_pinned

    def has_room(self, num_requests: int) -> bool:
        """An empty engine takes a group that is larger than its limit."""
        used = self.num_requests
        return self.is_open and (self.limit is None or used == 0 or used + num_requests <= self.limit)


class RequestScheduler:
    """One per sender, in one event loop. Only `acquire` waits, and its caller bounds that wait.

    Example:
        name = await scheduler.acquire("g7.0", (3, 7), tokens=4096, num_requests=8)
        try:
            async with scheduler.holding(name, lease): ...
        finally:
            scheduler.release(name, tokens=4096, num_requests=8)
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._engines = {name: _Engine() for name in names}
        if not self._engines:
            raise ValueError("a scheduler needs at least one engine, got none")
        self._engine_of: dict[str, str] = {}
        """Group -> where its prefix is cached."""
        self._queue: list[tuple[Order, int, _Waiter]] = []
        self._arrivals = itertools.count()
        self._num_queued = 0
        self.migrated = MigrationCounter()
        """Requests that moved so that their engine is free, and the tokens that the next one computed again."""
        self.recovered = MigrationCounter()
        """Requests whose engine was lost, and the tokens of their responses, which they kept."""

    # Requests

    async def acquire(self, group_key: str, order: Order, *, tokens: int, num_requests: int) -> str:
        """Waits for room and returns the engine, on which the requests are counted from then on.

        Waits for: room on an engine that may take them. Unblocked by: `release`, a higher limit, `unpin`, an engine
        that comes back; by the loss of all engines, with `NoReplica`; and by cancellation.
        """
        if not self._queue:
            name = self._place(group_key, tokens, num_requests)
            if name is not None:
                return name
        waiter = _Waiter(group_key, tokens, num_requests)
        heapq.heappush(self._queue, (order, next(self._arrivals), waiter))
        self._num_queued += num_requests
        try:
            self._admit()
            return await waiter.engine
        except asyncio.CancelledError:
            if waiter.engine.done() and not waiter.engine.cancelled() and waiter.engine.exception() is None:
                self._take_back(waiter.engine.result(), tokens, num_requests)
            raise
        finally:
            self._num_queued -= num_requests
            waiter.engine.cancel()
            self._admit()  # the one behind it may be first now

    def release(self, name: str, *, tokens: int, num_requests: int) -> None:
        """Requests came back, or never will."""
        self._take_back(name, tokens, num_requests)
        self._admit()

    @contextlib.asynccontextmanager
    async def holding(self, name: str, lease: Lease) -> AsyncIterator[None]:
        """Ends the block once `name` is excluded: what it has continues elsewhere, from its prefix.

        Inside the block the holder may be asked to leave.

        Raises:
            EngineDead: with the reason of the exclusion, which may have come between `acquire` and this.
        """
        engine = self._engines[name]
        if engine.excluded is not None:
            raise EngineDead(engine.excluded)
        limit, leases = asyncio.timeout(None), engine.leases
        leases[limit] = lease
        try:
            async with limit:
                try:
                    yield
                finally:
                    leases.pop(limit, None)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineDead(engine.excluded or f"{name} was excluded") from error

    def forget(self, group_key: str) -> None:
        """The group is over; nothing else of it will be sent."""
        self._engine_of.pop(group_key, None)

    # Engines

    def limit(self, name: str, num_requests: int) -> None:
        """From now on `name` gets nothing while it has so many requests, except a group that finds it empty."""
        self._engine(name).limit = num_requests
        self._admit()

    def exclude(self, name: str, reason: str) -> None:
        """Sends nothing more to `name` until `readmit`, and ends every `holding` there. The first reason is kept."""
        engine = self._engine(name)
        if engine.excluded is None:
            engine.excluded = reason
        now = asyncio.get_running_loop().time()
        leases, engine.leases = engine.leases, {}
        for limit in leases:
            limit.reschedule(now)
        self._admit()

    def readmit(self, name: str) -> None:
        """`name` is a new engine, with nothing of the old one's against it."""
        engine = self._engine(name)
        engine.excluded, engine.is_pinned, engine.is_drained = None, False, False
        self._admit()

    def pin(self, name: str) -> None:
        """Sends nothing new to `name` until `unpin`; what it has continues."""
        self._engine(name).is_pinned = True

    def unpin(self, name: str) -> None:
        """`name` takes requests again, unless it is excluded."""
        self._engine(name).is_pinned = False
        self._admit()

    def may_drain(self, name: str) -> bool:
        """Whether everything at `name` may leave now, and nothing may come back there of itself: no group that it
        serves is between two turns, or waits for its rewards."""
        leases = self._engine(name).leases.values()
        groups = {group_key for group_key, engine in self._engine_of.items() if engine == name}
        return groups <= {lease.group_key for lease in leases} and all(lease.may_leave for lease in leases)

    def drain(self, name: str) -> None:
        """Has everything at `name` continue elsewhere, and keeps it empty until there is a new group."""
        engine = self._engine(name)
        engine.is_drained = True
        for lease in engine.leases.values():
            lease.leave()

    # What is known

    @property
    def num_queued(self) -> int:
        """Requests that wait for room."""
        return self._num_queued

    @property
    def in_service(self) -> list[str]:
        """Engines that are neither excluded nor pinned nor drained."""
        return [name for name in self._engines if self._takes_groups(name)]

    @property
    def excluded(self) -> dict[str, str]:
        """Engine to reason."""
        return {name: one.excluded for name, one in self._engines.items() if one.excluded is not None}

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        return {name: one.outstanding_tokens for name, one in self._engines.items()}

    @property
    def num_requests(self) -> dict[str, int]:
        """Engine to requests that were sent there and have not come back."""
        return {name: one.num_requests for name, one in self._engines.items()}

    @property
    def limits(self) -> dict[str, int]:
        """Engine to its limit, for those that have one."""
        return {name: one.limit for name, one in self._engines.items() if one.limit is not None}

    def require_engine(self) -> None:
        """Raises NoReplica if no engine takes requests because some are excluded, and the others pinned."""
        if not self.excluded or any(engine.is_open for engine in self._engines.values()):
            return
        reasons = {name: one.excluded for name, one in self._engines.items() if one.excluded is None}
        reasons = {**dict.fromkeys(reasons, "pinned"), **self.excluded}
        text = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NoReplica(f"all {len(reasons)} engines are excluded or pinned ({text})")

    # Inside

    def _place(self, group_key: str, tokens: int, num_requests: int) -> str | None:
        """Chooses an engine and counts the requests there. None if there is no room now: every engine that may take
        them (the group's own, if it has one) is full or pinned.

        Raises:
            NoReplica: all are excluded.
        """
        name = self._choose(group_key, num_requests)
        if name is None:
            return None
        engine = self._engines[name]
        self._engine_of[group_key] = name
        engine.is_drained = False
        engine.outstanding_tokens += tokens
        engine.num_requests += num_requests
        return name

    def _choose(self, group_key: str, num_requests: int) -> str | None:
        own = self._own_engine(group_key)
        if own is not None:
            return own if self._engines[own].has_room(num_requests) else None
        if len(self.excluded) == len(self._engines):
            self.require_engine()
        usable = [name for name, engine in self._engines.items() if engine.has_room(num_requests)]
        if group_key in self._engine_of:  # a drained engine is kept for new groups
            usable = [name for name in usable if not self._engines[name].is_drained] or usable
        return min(usable, key=lambda name: self._engines[name].outstanding_tokens, default=None)

    def _own_engine(self, group_key: str) -> str | None:
        """The one engine that a group waits for; None if any will do."""
        name = self._engine_of.get(group_key)
        return name if name is not None and self._takes_groups(name) else None

    def _takes_groups(self, name: str) -> bool:
        engine = self._engines[name]
        return engine.is_open and not engine.is_drained

    def _take_back(self, name: str, tokens: int, num_requests: int) -> None:
        engine = self._engines[name]
        if engine.outstanding_tokens < tokens or engine.num_requests < num_requests:
            raise ValueError(
                f"{tokens} tokens came back from {name!r}, but only {engine.outstanding_tokens} were outstanding "
                f"(requests: {num_requests} of {engine.num_requests})"
            )
        engine.outstanding_tokens -= tokens
        engine.num_requests -= num_requests

    def _admit(self) -> None:
        """Every submission for which there is room, oldest first. None takes a place that an older one waits for."""
        full: set[str] = set()
        passed: list[tuple[Order, int, _Waiter]] = []
        while self._queue:
            waiter = self._queue[0][2]
            own = self._own_engine(waiter.group_key)
            if waiter.engine.done() or (own not in full and self._try(waiter)):
                heapq.heappop(self._queue)
                continue
            if own is None:
                break  # it would take any place
            full.add(own)
            passed.append(heapq.heappop(self._queue))
        for entry in passed:
            heapq.heappush(self._queue, entry)

    def _try(self, waiter: _Waiter) -> bool:
        """Whether its wait is over, with an engine or an error."""
        try:
            name = self._place(waiter.group_key, waiter.tokens, waiter.num_requests)
        except NoReplica as error:  # for the one that waits, not for the one that made room
            waiter.engine.set_exception(error)
            return True
        if name is not None:
            waiter.engine.set_result(name)
        return name is not None

    def _engine(self, name: str) -> _Engine:
        if name not in self._engines:
            raise ValueError(f"unknown engine {name!r}; known are {sorted(self._engines)}")
        return self._engines[name]


class QueueTimer:
    """How long each sample of a group has waited for room: all its waits, the current one included. Waits of one sample
    that overlap count once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_open: defaultdict[int, int] = defaultdict(int)
        self._since: defaultdict[int, float] = defaultdict(float)
        self._before_s: defaultdict[int, float] = defaultdict(float)

    @contextlib.contextmanager
    def of(self, samples: Sequence[int]) -> Iterator[None]:
        """These samples wait for as long as the block lasts, however it ends."""
        self._change(samples, 1)
        try:
            yield
        finally:
            self._change(samples, -1)

    def seconds(self, sample: int) -> float:
        """Until now."""
        open_s = self._clock() - self._since[sample] if self._num_open[sample] else 0.0
        return self._before_s[sample] + open_s

    def _change(self, samples: Sequence[int], change: int) -> None:
        for sample in samples:
            self._before_s[sample] = self.seconds(sample)
            self._since[sample] = self._clock()
            self._num_open[sample] += change


class MigrationCounter:
    """Requests that were sent to another engine, and tokens of theirs."""

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """One entry per request."""
        self.num_requests += len(tokens)
        self.num_tokens += sum(tokens)
