"""Which engine a request goes to, and when: least loaded first, oldest group first.

A group stays with one replica, because its samples share the prompt's prefix cache. A new group goes to the replica
with the fewest outstanding tokens (prompt plus budget of what was sent and has not come back) among those with room,
and to the first one of those that have equally few. A router knows what its own rollout worker has sent, and not what
the others have; so that they do not all begin with the same replica, each has the replicas in another order.
A replica that is set aside gives its groups up, and takes none of another one that has begun; new groups end that.
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


class NoReplica(Exception):
    """No replica takes requests; the message has the reason of each."""


def order_of(names: Sequence[str], *, worker: int, num_workers: int) -> list[str]:
    """The replicas for the router of one of several rollout workers: they begin evenly spread over all of them.

    Example:
        order_of(["e0", "e1", "e2", "e3"], worker=1, num_workers=2)  # ["e2", "e3", "e0", "e1"]
    """
    first = worker * len(names) // num_workers
    return [*names[first:], *names[:first]]


class Router:
    """Least outstanding tokens, sticky per group, around replicas that are quarantined, at rest or full.

    Example:
        router = Router(["engine-0", "engine-1"])
        name = router.route("group 7", 4096)
        ...
        router.done(name, 4096)
        router.forget("group 7")
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._outstanding_tokens = dict.fromkeys(names, 0)
        if not self._outstanding_tokens:
            raise ValueError("a router needs at least one replica, got none")
        self._num_requests = dict.fromkeys(self._outstanding_tokens, 0)
        self._limits: dict[str, int] = {}
        self._quarantined: dict[str, str] = {}
        self._resting: set[str] = set()
        self._aside: set[str] = set()
        self._sticky: dict[str, str] = {}

    def route(self, group_key: str, tokens: int, *, num_requests: int = 1) -> str | None:
        """Chooses a replica for `tokens` more tokens of a group, in `num_requests` requests, and counts them there.

        Returns:
            None if there is no room now: every replica that may take them (the group's own, if it has one) is full or
            at rest. Nothing is counted then.

        Raises:
            NoReplica: all are quarantined.
        """
        name = self._choose(group_key, num_requests)
        if name is None:
            return None
        self._sticky[group_key] = name
        self._aside.discard(name)
        self._outstanding_tokens[name] += tokens
        self._num_requests[name] += num_requests
        return name

    def home(self, group_key: str) -> str | None:
        """The one replica that a group waits for; None if any will do."""
        name = self._sticky.get(group_key)
        return name if name is not None and self._takes_groups(name) else None

    def done(self, name: str, tokens: int, *, num_requests: int = 1) -> None:
        """`tokens` of `num_requests` requests that were routed to `name` came back, or never will."""
        left = self._outstanding_tokens[name] - tokens
        if left < 0 or self._num_requests[name] < num_requests:
            raise ValueError(
                f"{tokens} tokens came back from {name!r}, but only {self._outstanding_tokens[name]} were outstanding "
                f"(requests: {num_requests} of {self._num_requests[name]})"
            )
        self._outstanding_tokens[name] = left
        self._num_requests[name] -= num_requests

    def forget(self, group_key: str) -> None:
        """The group is over; nothing else of it will be routed."""
        self._sticky.pop(group_key, None)

    def limit(self, name: str, num_requests: int) -> None:
        """From now on `name` gets nothing while it has so many requests, except a group that finds it empty."""
        self._require_known(name)
        self._limits[name] = num_requests

    def quarantine(self, name: str, reason: str) -> None:
        """Sends nothing more to `name` until `restore`. The first reason is kept."""
        self._require_known(name)
        self._quarantined.setdefault(name, reason)

    def restore(self, name: str) -> None:
        """`name` works again, and is not at rest."""
        self._require_known(name)
        self._quarantined.pop(name, None)
        self._resting.discard(name)
        self._aside.discard(name)

    def rest(self, name: str) -> None:
        """Sends nothing new to `name` until `resume`; it is well, and what it has goes on."""
        self._require_known(name)
        self._resting.add(name)

    def resume(self, name: str) -> None:
        """`name` takes requests again, unless it is quarantined."""
        self._require_known(name)
        self._resting.discard(name)

    def set_aside(self, name: str) -> None:
        """Its groups go on elsewhere, and `name` waits for a new group; others come only if they find no room."""
        self._require_known(name)
        self._aside.add(name)

    def groups(self, name: str) -> set[str]:
        """Those whose next requests go to `name`, if it takes any."""
        return {group_key for group_key, home in self._sticky.items() if home == name}

    @property
    def in_service(self) -> list[str]:
        """Replicas that are neither quarantined nor at rest nor set aside."""
        return [name for name in self._num_requests if self._takes_groups(name)]

    def require_service(self) -> None:
        """Raises NoReplica if nobody takes requests because some replicas are quarantined, and the others rest."""
        lost = {**dict.fromkeys(self._resting, "at rest"), **self._quarantined}
        if self._quarantined and len(lost) == len(self._num_requests):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in lost.items())
            raise NoReplica(f"all {len(lost)} engine replicas are quarantined or at rest ({reasons})")

    @property
    def quarantined(self) -> dict[str, str]:
        """Replica to reason."""
        return dict(self._quarantined)

    @property
    def outstanding_tokens(self) -> dict[str, int]:
        """Replica to tokens."""
        return dict(self._outstanding_tokens)

    @property
    def num_requests(self) -> dict[str, int]:
        """Replica to requests that were sent there and have not come back."""
        return dict(self._num_requests)

    @property
    def limits(self) -> dict[str, int]:
        """Replica to its limit, for those that have one."""
        return dict(self._limits)

    def _choose(self, group_key: str, num_requests: int) -> str | None:
        home = self.home(group_key)
        if home is not None:
            return home if self._has_room(home, num_requests) else None
        if len(self._quarantined) == len(self._outstanding_tokens):
            self.require_service()
        usable = [name for name in self._outstanding_tokens if self._has_room(name, num_requests)]
        if group_key in self._sticky:
            usable = [name for name in usable if name not in self._aside] or usable
        return min(usable, key=self._outstanding_tokens.__getitem__, default=None)

    def _takes_groups(self, name: str) -> bool:
        return name not in self._quarantined and name not in self._resting and name not in self._aside

    def _has_room(self, name: str, num_requests: int) -> bool:
        if name in self._quarantined or name in self._resting:
            return False
        limit, used = self._limits.get(name), self._num_requests[name]
        return limit is None or used == 0 or used + num_requests <= limit

    def _require_known(self, name: str) -> None:
        if name not in self._outstanding_tokens:
            raise ValueError(f"unknown replica {name!r}; known are {sorted(self._outstanding_tokens)}")


Order = tuple[int, int]
"""(start version, group id): sorts groups by the last step at which they may be trained, then by admission."""


class Guest(Protocol):
    """Requests of one group that are at one replica."""

    @property
    def group_key(self) -> str: ...

    @property
    def may_leave(self) -> bool:
        """Whether it is worth what it costs to compute them again elsewhere."""
        ...

    def leave(self) -> None:
        """Has the replica give them back, which the guest then notices; does not wait."""
        ...


class _Waiter:
    """A submission on its way in."""

    def __init__(self, group_key: str, tokens: int, num_requests: int) -> None:
        self.group_key, self.tokens, self.num_requests = group_key, tokens, num_requests
        self.replica: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Waits:
    """How long each answer of a group has waited, e.g. for room: all its waits, the one that goes on included. Waits of
    one answer that overlap count once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_open: defaultdict[int, int] = defaultdict(int)
        self._since: defaultdict[int, float] = defaultdict(float)
        self._before_s: defaultdict[int, float] = defaultdict(float)

    @contextlib.contextmanager
    def of(self, samples: Sequence[int]) -> Iterator[None]:
        """These answers wait for as long as the block lasts, however it ends."""
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


class SentOn:
    """Requests that were sent to another replica, and tokens of theirs."""

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = 0

    def add(self, tokens: Sequence[int]) -> None:
        """One entry per request."""
        self.num_requests += len(tokens)
        self.num_tokens += sum(tokens)


class Turnstile:
    """One per sender. Use it in one event loop; only `enter` waits, and its caller bounds that wait.

    Example:
        name = await turnstile.enter("g7.0", (3, 7), tokens=4096, num_requests=8)
        try:
            async with turnstile.stay(name, guest): ...
        finally:
            turnstile.leave(name, tokens=4096, num_requests=8)
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._waiting: list[tuple[Order, int, _Waiter]] = []
        self._arrivals = itertools.count()
        self._stays: dict[str, dict[asyncio.Timeout, Guest]] = {}
        self._num_held = 0
        self.moved = SentOn()
        """Because their replica was to be free; tokens are those that the other one computed again."""
        self.rescued = SentOn()
        """Because their replica was lost; tokens are those of their answers, which they kept."""

    @property
    def router(self) -> Router:
        """To look at; whoever changes it wakes nobody."""
        return self._router

    @property
    def num_held(self) -> int:
        """Requests that wait."""
        return self._num_held

    async def enter(self, group_key: str, order: Order, *, tokens: int, num_requests: int) -> str:
        """Waits for room and returns the replica, on which the requests are counted then.

        Waits for: room on a replica that may take them. Unblocked by: `leave`, a higher limit, the end of a rest, a
        replica that comes back; by the end of all replicas, with `NoReplica`; and by cancellation.
        """
        if not self._waiting:
            name = self._router.route(group_key, tokens, num_requests=num_requests)
            if name is not None:
                return name
        waiter = _Waiter(group_key, tokens, num_requests)
        heapq.heappush(self._waiting, (order, next(self._arrivals), waiter))
        self._num_held += num_requests
        try:
            self._let_in()
            return await waiter.replica
        except asyncio.CancelledError:
            if waiter.replica.done() and not waiter.replica.cancelled() and waiter.replica.exception() is None:
                self._router.done(waiter.replica.result(), tokens, num_requests=num_requests)
            raise
        finally:
            self._num_held -= num_requests
            waiter.replica.cancel()
            self._let_in()  # whoever waited behind it may be first now

    def leave(self, name: str, *, tokens: int, num_requests: int) -> None:
        """Requests came back, or never will."""
        self._router.done(name, tokens, num_requests=num_requests)
        self._let_in()

    @contextlib.asynccontextmanager
    async def stay(self, name: str, guest: Guest) -> AsyncIterator[None]:
        """Ends the block once `name` is quarantined: what it has goes on elsewhere, from its prefix.

        Inside the block the guest may be asked to leave.

        Raises:
            EngineDead: with the reason of the quarantine, which may have come between `enter` and this.
        """
        if name in self._router.quarantined:
            raise EngineDead(self._router.quarantined[name])
        limit, stays = asyncio.timeout(None), self._stays.setdefault(name, {})
        stays[limit] = guest
        try:
            async with limit:
                try:
                    yield
                finally:
                    stays.pop(limit, None)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EngineDead(self._router.quarantined.get(name, f"{name} was quarantined")) from error

    def limit(self, name: str, num_requests: int) -> None:
        """See `Router.limit`."""
        self._router.limit(name, num_requests)
        self._let_in()

    def rest(self, name: str) -> None:
        """See `Router.rest`."""
        self._router.rest(name)

    def resume(self, name: str) -> None:
        """See `Router.resume`."""
        self._router.resume(name)
        self._let_in()

    def restore(self, name: str) -> None:
        """See `Router.restore`."""
        self._router.restore(name)
        self._let_in()

    def quarantine(self, name: str, reason: str) -> None:
        """Sends nothing more to `name`, and ends every stay there."""
        self._router.quarantine(name, reason)
        now = asyncio.get_running_loop().time()
        for limit in self._stays.pop(name, {}):
            limit.reschedule(now)
        self._let_in()

    def may_free(self, name: str) -> bool:
        """Whether everything at `name` may leave now, and nothing may come back there of itself: no group that it
        serves is between two turns, or waits for its rewards."""
        guests = self._stays.get(name, {}).values()
        are_all_here = self._router.groups(name) <= {guest.group_key for guest in guests}
        return are_all_here and all(guest.may_leave for guest in guests)

    def free(self, name: str) -> None:
        """Has everything at `name` go on elsewhere, and keeps it empty until there is a new group."""
        self._router.set_aside(name)
        for guest in self._stays.get(name, {}).values():
            guest.leave()

    def forget(self, group_key: str) -> None:
        """See `Router.forget`."""
        self._router.forget(group_key)

    def _let_in(self) -> None:
        """Everyone for whom there is room, oldest first. Nobody takes a place that an older one waits for."""
        full: set[str] = set()
        passed: list[tuple[Order, int, _Waiter]] = []
        while self._waiting:
            waiter = self._waiting[0][2]
            home = self._router.home(waiter.group_key)
            if waiter.replica.done() or self._try(waiter, is_full=home in full):
                heapq.heappop(self._waiting)
                continue
            if home is None:
                break  # it would take any place
            full.add(home)
            passed.append(heapq.heappop(self._waiting))
        for entry in passed:
            heapq.heappush(self._waiting, entry)

    def _try(self, waiter: _Waiter, *, is_full: bool) -> bool:
        """Whether its wait is over, for better or worse."""
        if is_full:
            return False
        try:
            name = self._router.route(waiter.group_key, waiter.tokens, num_requests=waiter.num_requests)
        except NoReplica as error:  # it is told to whoever waits, not to whoever made room
            waiter.replica.set_exception(error)
            return True
        if name is not None:
            waiter.replica.set_result(name)
        return name is not None
