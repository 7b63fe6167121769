"""One engine replica as the coordinator sees it, and the pin that keeps a version in the learners' slots while replicas
read it: one per learner rank, whoever reads."""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec

from weight_sync import deadlines
from weight_sync.errors import PullTimeout, ReplicaDirty, VersionUnavailable, WeightSyncError
from weight_sync.messages import (
    CommitResult,
    Ok,
    Pin,
    Pinned,
    PrefetchRequest,
    PullReport,
    ReceiverInfo,
    ReplicaTimes,
    SlotAt,
    Unpin,
    open_reply,
    reply_state,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from weight_sync.channel import Line, Switchboard
    from weight_sync.messages import Request


log = logging.getLogger(__name__)

ATTEMPTS = 2
R = TypeVar("R")


class ReplicaState(Enum):
    JOINING = "joining"
    """Opening in this epoch; not a member yet."""
    LIVE = "live"
    """Generates, and takes part in syncs. They wait for one that is frozen."""
    HELD = "held"
    """Keeps its version for an evaluation; syncs skip it, and nobody reads from it."""
    REPLACING = "replacing"
    """Its successor is on its way. It may hold nothing any more: syncs and links skip it."""
    DIRTY = "dirty"
    """Failed in the middle of a commit: paused with a mixture."""
    DEAD = "dead"
    LEFT = "left"

    @property
    def public(self) -> MemberState:
        """As users see it: whether it has to be replaced."""
        return self.value if self in (ReplicaState.DIRTY, ReplicaState.DEAD) else "live"


MemberState = Literal["live", "dirty", "dead"]
JOINING, LIVE, HELD, REPLACING, DIRTY, DEAD, LEFT = ReplicaState
TRANSITIONS = {
    **{(state, "open"): LIVE for state in ReplicaState if state is not LEFT},
    (LIVE, "hold"): HELD,
    (HELD, "release"): LIVE,
    (LIVE, "replace"): REPLACING,
    (HELD, "replace"): REPLACING,
    (REPLACING, "replace"): REPLACING,
    (REPLACING, "keep"): LIVE,
    (JOINING, "lose"): DEAD,
    (LIVE, "lose"): DEAD,
    (JOINING, "mix"): DIRTY,
    (LIVE, "mix"): DIRTY,
    **{(state, "leave"): LEFT for state in ReplicaState},
}
"""Everything else is refused."""


async def nothing() -> None:
    """Nobody has to be told."""


class PublisherHandle(Protocol):
    """One learner rank, in whatever process it is. `method` is one of its `ws_*` methods."""

    rank: int

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        """The method's result; its exception; or TimeoutError."""
        ...


class ReplicaHandle(Protocol):
    """One engine replica with all its workers."""

    name: str

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """One result per worker, in rank order."""
        ...

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        """Pause, call, label tokens with `version` if every worker agreed, resume unless dirty."""
        ...


class VersionPin:
    """One version, pinned at every learner rank while anybody holds it. Owned by one event loop."""

    def __init__(
        self, ask: Callable[..., Awaitable[dict[int, Any]]], version: int, *, clock: Callable[[], float]
    ) -> None:
        """`ask(request, kind, deadline_s=...)` asks every learner; its answers by rank."""
        self.version = version
        self.pinned_at: float | None = None
        """When it could be read everywhere for the first time, on `clock`."""
        self.slots: tuple[SlotAt, ...] = ()
        self.seal_s = 0.0
        """Of the slowest rank."""
        self._ask = ask
        self._clock = clock
        self._holders = set[str]()
        self._lock = asyncio.Lock()
        """Pins and unpins reach the learners in the order in which they were wanted."""
        self._tasks = set[asyncio.Task[None]]()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def holders(self) -> frozenset[str]:
        return frozenset(self._holders)

    async def hold(self, name: str, deadline_s: float) -> None:
        """Until `name` releases it. Waits for the seal.

        Raises:
            VersionUnavailable: a learner does not hold the version any more, or could not seal it; says why.
            PublisherLost: a learner is silent.
            PullTimeout: a learner did not seal it within `deadline_s`.
        """
        if name in self._holders:
            return
        self._holders.add(name)
        try:
            async with self._lock:
                if self._renewing is None:
                    await self._pin(deadline_s)
                    self.pinned_at = self._clock() if self.pinned_at is None else self.pinned_at
                    self._renewing = asyncio.create_task(self._renew())
        except BaseException:
            self.release(name)
            raise

    def release(self, name: str) -> None:
        """The last one to release it unpins, without waiting for the learners. Idempotent."""
        if name not in self._holders:
            return
        self._holders.remove(name)
        if not self._holders:
            task = asyncio.create_task(self._unpin())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """The epoch ends, and the slots with it. Idempotent."""
        tasks = [*self._tasks, *([] if self._renewing is None else [self._renewing])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pin(self, deadline_s: float) -> None:
        request = Pin(version=self.version, ttl_s=deadlines.PIN_TTL_S)
        pinned = await self._ask(request, Pinned, deadline_s=deadline_s)
        self.slots = tuple(SlotAt(rank, at.slot, at.generation) for rank, at in pinned.items())
        self.seal_s = max((at.seal_s for at in pinned.values()), default=0.0)

    async def _renew(self) -> None:
        """Consumes: nothing. Waits for: the next renewal. Unblocked by: cancellation, once nobody holds the pin. A
        reader whose pin ran out finds that itself, after its last byte."""
        while True:
            await asyncio.sleep(deadlines.RENEW_S)
            try:
                await self._pin(deadlines.RENEW_S)
            except (WeightSyncError, TimeoutError) as error:
                log.warning("the pin of version %d could not be renewed: %s", self.version, error)

    async def _unpin(self) -> None:
        async with self._lock:
            if self._holders:
                return  # somebody holds it again
            renewing, self._renewing = self._renewing, None
            if renewing is not None:
                renewing.cancel()
            try:
                await self._ask(Unpin(version=self.version), Ok, deadline_s=deadlines.UNPIN_S)
            except (WeightSyncError, TimeoutError) as error:
                log.debug("version %d was not unpinned, its pin runs out: %s", self.version, error)


class ReplicaSync(msgspec.Struct, kw_only=True):
    """What one sync did to one replica."""

    reports: list[PullReport]
    pause_s: float
    drain_s: float
    resume_s: float
    is_staged: bool
    asked_at: float
    """When its workers were asked for the version, on the coordinator's clock."""
    live_at: float
    """When it went on with it, on the same clock."""
    num_retries: int

    def times(self, started: float) -> ReplicaTimes:
        """Since the sync began, at `started` on the coordinator's clock. A pull in place begins with the pause."""
        live_at_s = self.live_at - started
        return ReplicaTimes(
            is_staged=self.is_staged,
            pull_at_s=self.asked_at - started if self.is_staged else live_at_s - self.pause_s,
            pull_s=max(report.pull_s for report in self.reports),
            attest_s=max(report.attest_s for report in self.reports),
            live_at_s=live_at_s,
            drain_s=self.drain_s,
            pause_s=self.pause_s,
        )


class Member:
    """A replica in the sync group."""

    def __init__(
        self, handle: ReplicaHandle, clock: Callable[[], float], *, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.handle = handle
        self._on_change = on_change
        self.state = ReplicaState.JOINING
        self.live_version: int | None = None
        self.workers: tuple[ReceiverInfo, ...] = ()
        self._switchboard: Switchboard | None = None
        self._lines: tuple[Line, ...] = ()
        """To each worker's control thread; made when the epoch opens, like `workers`."""
        self.commit_lock = asyncio.Lock()
        self.num_leases = 0
        """Blocks for which it keeps its version while syncs skip it."""
        self.before_skipped: list[Callable[[], Awaitable[None]]] = []
        """Of those blocks that no sync has passed yet."""
        self._clock = clock
        self._last: ReplicaSync | None = None
        """Of the version that is live."""

    @property
    def name(self) -> str:
        return self.handle.name

    def connect(self, workers: tuple[ReceiverInfo, ...], switchboard: Switchboard) -> None:
        """Dial each worker's control thread."""
        self.disconnect()
        self.workers, self._switchboard = workers, switchboard
        self._lines = tuple(switchboard.dial(f"{self.name}/{info.worker}", info.address) for info in workers)

    def disconnect(self) -> None:
        """Hang up. Idempotent."""
        lines, self._lines, self.workers = self._lines, (), ()
        for line in lines:
            if self._switchboard is not None:
                self._switchboard.hang_up(line)

    async def ask(self, index: int, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """Ask the worker with this index.

        Raises:
            TimeoutError: no answer within `deadline_s`, or none to pings.
            WeightSyncError: (its subclass) it refused, or there is no line to it.
        """
        if self._switchboard is None or index >= len(self._lines):
            raise WeightSyncError(f"{self.name} is not connected; it must join the epoch first")
        return await self._switchboard.ask_patiently(self._lines[index], request, kind, deadline_s=deadline_s)

    async def skip(self) -> None:
        """Say that a sync skips it, to each lease once. Nothing to say without a lease."""
        while self.before_skipped:
            await self.before_skipped.pop()()

    def apply(self, event: str) -> None:
        """The only writer of `state`. One that becomes live while it is leased is held. Tells `on_change`."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise ValueError(f"{self.name} is {self.state.value}, which does not allow {event}")
        self.state = HELD if after is LIVE and self.num_leases else after
        self._on_change()

    def begin_lease(self, before_skipped: Callable[[], Awaitable[None]]) -> None:
        self.num_leases += 1
        self.before_skipped.append(before_skipped)
        if self.state is LIVE:
            self.apply("hold")

    def end_lease(self, before_skipped: Callable[[], Awaitable[None]]) -> None:
        self.num_leases -= 1
        if before_skipped in self.before_skipped:
            self.before_skipped.remove(before_skipped)
        if self.state is HELD:
            self.apply("release")

    def result_of(self, version: int) -> ReplicaSync | None:
        """How this version went live, or a newer one, which came while this one waited; None if neither did."""
        has_it = self.live_version is not None and self.live_version >= version
        return self._last if has_it else None

    async def bring(self, pin: VersionPin, *, deadline: float, commit_slots: asyncio.Semaphore) -> ReplicaSync:
        """Consumes: a version that is pinned for this replica; releases it.
        Waits for: the pull, the freeze lock, its turn to pause.
        Unblocked by: the deadline, of which a first attempt gets half; the end of a freeze.

        Raises:
            VersionUnavailable: the learners do not hold the version any more; the replica is as it was.
            WeightSyncError, TimeoutError: the replica did not take the version and is marked dead or dirty.
        """
        try:
            return await self._bring(pin, deadline, commit_slots)
        finally:
            pin.release(self.name)

    async def _bring(self, pin: VersionPin, deadline: float, commit_slots: asyncio.Semaphore) -> ReplicaSync:
        version = pin.version
        error: Exception = WeightSyncError("not tried")
        is_dirty = False
        for attempt in range(ATTEMPTS):
            try:
                result = await self._prefetch_and_commit(pin, self._attempt_deadline(attempt, deadline), commit_slots)
            except VersionUnavailable:
                if is_dirty:
                    self.apply("mix")
                raise  # a newer version took its place: nobody's failure
            except (WeightSyncError, TimeoutError) as failure:
                error, is_dirty = failure, is_dirty or isinstance(failure, ReplicaDirty)
                log.warning(
                    "%s did not take version %d (attempt %d): %s", self.handle.name, version, attempt + 1, error
                )
                if self._clock() >= deadline:
                    break
            except Exception as failure:  # noqa: BLE001 - the edge of one replica
                error = WeightSyncError(f"{self.handle.name} failed: {type(failure).__name__}: {failure}")
                break
            else:
                self.live_version = version
                result.num_retries += attempt
                self._last = result
                return result
        self.apply("mix" if is_dirty else "lose")
        log.error("%s is %s and left out until it joins again: %s", self.handle.name, self.state.value, error)
        raise error

    async def _prefetch_and_commit(
        self, pin: VersionPin, deadline: float, commit_slots: asyncio.Semaphore
    ) -> ReplicaSync:
        name, handle, version = self.handle.name, self.handle, pin.version
        is_staged = all(info.commit == "staged" for info in self.workers)
        await pin.hold(name, self._left(version, deadline))
        asked_at = self._clock()
        await self._prefetch(pin, deadline)
        waiting_since = self._clock()
        if self.commit_lock.locked():
            pin.release(name)  # it is frozen: the learner does not wait for an evaluation
        async with self.commit_lock, commit_slots:
            # Waiting for an evaluation to end is nobody's failure, so it does not shorten the time to commit.
            left_s = deadline - waiting_since
            if left_s <= 0:
                raise PullTimeout(f"{name}: no time is left to commit version {version}")
            if not is_staged:
                await pin.hold(name, left_s)
            result = await handle.commit(version, "ws_commit", version, left_s, timeout_s=left_s + deadlines.ANSWER_S)
            live_at = self._clock()
        try:
            reports = [open_reply(reply, PullReport, party=f"{name}/{i}") for i, reply in enumerate(result.results)]
        except WeightSyncError as error:
            if reply_state(result.results) == "dirty":
                raise ReplicaDirty(
                    f"{name} failed in the middle of a commit: {type(error).__name__}: {error}"
                ) from error
            raise
        return ReplicaSync(
            reports=reports,
            pause_s=result.pause_s,
            drain_s=result.drain_s,
            resume_s=result.resume_s,
            asked_at=asked_at,
            is_staged=is_staged,
            live_at=live_at,
            num_retries=sum(report.num_retries for report in reports),
        )

    async def _prefetch(self, pin: VersionPin, deadline: float) -> None:
        """Until the version is at every worker. Consumes: their replies. Waits for: the pulls, over the workers' own
        control lines, which do not wait for a turn of the engine's loop. Unblocked by: the deadline; a worker that
        does not answer pings; an engine that its host knows to be dead. A busy engine is none of these."""
        if not self.workers:
            raise WeightSyncError(f"{self.name} is not connected; it must join the epoch first")
        left_s = self._left(pin.version, deadline)
        request = PrefetchRequest(version=pin.version, slots=pin.slots, deadline_s=left_s)
        indices = range(len(self.workers))
        arriving = {asyncio.ensure_future(self.ask(i, request, Ok, deadline_s=left_s)) for i in indices}
        pending: set[asyncio.Future[Any]] = {*arriving}
        watching: set[asyncio.Future[Any]] = set()
        timeout_s: float | None = deadlines.WATCH_AFTER_S
        try:
            while pending:
                done, _ = await asyncio.wait(pending | watching, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                pending, watching = pending - done, watching - done
                if pending and timeout_s is not None:
                    timeout_s = None
                    # The host knows a dead engine. A busy one answers late, which is no failure: it has all the time.
                    asking = self.handle.call("ws_status", timeout_s=left_s + deadlines.ANSWER_S)
                    watching.add(asyncio.ensure_future(asking))
        except WeightSyncError as error:
            raise type(error)(f"{self.handle.name}: {error}") from error
        finally:
            await _cancelled([*arriving, *watching])

    def _attempt_deadline(self, attempt: int, deadline: float) -> float:
        now = self._clock()
        return deadline if attempt == ATTEMPTS - 1 else now + (deadline - now) / 2

    def _left(self, version: int, deadline: float) -> float:
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise PullTimeout(f"{self.handle.name}: version {version} did not arrive within its deadline")
        return left_s


async def _cancelled(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancel, and wait until they have ended; not for a host's call that ignores it."""
    for task in tasks:
        task.cancel()
    done, _ = await asyncio.wait(tasks, timeout=deadlines.ANSWER_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # looked at, or asyncio reports it as lost


async def gather_all(calls: Iterable[Any]) -> list[Any]:
    """All results in order. Waits for every call, then raises the first failure, so that none is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
