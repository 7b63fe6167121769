"""The way to the replicas: requests beyond a replica's limit wait here, the oldest group first.

`Router` decides, this waits. All requests of one submission enter together or not at all. A waiting submission is
passed by a younger one only where it could not go anyway: it waits for the replica that has its prefix, and the
younger one goes to another.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from rollout.engine.router import NoReplica
from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from rollout.engine.router import Router

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
