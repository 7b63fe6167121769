"""A receiver's lines to the learners it reads from, and its leases on the version it wants."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from weight_sync.control import (
    Dropped,
    DropRequest,
    LeaseGranted,
    LeaseRequest,
    Pending,
    Released,
    ReleaseRequest,
    Renewed,
    RenewRequest,
)
from weight_sync.errors import LeaseExpired, PublisherLost, PullTimeout, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from weight_sync.control import Request
    from weight_sync.control_client import ControlClient
    from weight_sync.transports.base import Piece
    from weight_sync.wire import PublisherInfo

SILENCE_S = 10.0
"""Publishers answer from a thread of their own, at once; one that is silent for this long is lost."""
LAST_WORD_S = 0.2
"""For a question at the end of a deadline, or after a failure."""
PENDING_S = 0.001
"""Between two looks at a version that is being sealed, which takes milliseconds."""

R = TypeVar("R")


def _is_wanted() -> None:
    pass


@dataclass(slots=True)
class Deadline:
    """How long something is waited for."""

    at: float
    """By the receiver's clock. May still be moved, by a retry that joins what its first attempt began."""
    check: Callable[[], None] = _is_wanted
    """Raises once nobody wants it any more; looked at all the while."""


class Source(NamedTuple):
    """One publisher this worker reads from."""

    info: PublisherInfo
    client: ControlClient
    pieces: tuple[Piece, ...]
    runs: tuple[int, ...]
    """Indices into the plan's runs."""


class Leases:
    """Leases on one version at all sources. Used by one thread at a time."""

    def __init__(
        self, sources: Mapping[int, Source], *, worker: int, holder: str, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        self._sources = sources
        self._worker = worker
        self._holder = holder
        self._ttl_s = ttl_s
        self._clock = clock
        self._granted: dict[int, LeaseGranted] = {}
        self._asked = set[int]()
        """Sources that may hold a lease for us, with or without our having waited for it."""
        self._version: int | None = None
        self._renew_at = 0.0
        self._held_s = ttl_s

    def __getitem__(self, rank: int) -> LeaseGranted:
        return self._granted[rank]

    def take(self, version: int, *, give_up: Deadline, ttl_s: float | None = None) -> None:
        """Hold `version` at every source, so that it is not superseded before it is pulled. What is held already and
        still alive is renewed.

        Raises:
            VersionUnavailable, PublisherLost, PullTimeout.
        """
        if self._version == version:
            with contextlib.suppress(LeaseExpired):
                self.renew(give_up, ttl_s=ttl_s)
                return
        self.drop()
        self._held_s = self._ttl_s if ttl_s is None else ttl_s
        for rank in self._sources:
            self._granted[rank] = self._lease(rank, version, give_up)
        self._version = version
        self._renew_at = self._clock() + self._ttl_s / 2

    def renew_if_due(self, give_up: Deadline) -> None:
        """
        Raises:
            LeaseExpired, PublisherLost, PullTimeout.
        """
        if self._clock() >= self._renew_at:
            self.renew(give_up)

    def renew(self, give_up: Deadline, *, ttl_s: float | None = None) -> None:
        """Let what is held live `ttl_s` from now; None keeps the length it was taken with."""
        self._held_s = self._held_s if ttl_s is None else max(self._held_s, ttl_s)
        for rank, lease in self._granted.items():
            self._ask(rank, RenewRequest(lease_id=lease.lease_id, ttl_s=self._held_s), Renewed, give_up)
        self._renew_at = self._clock() + self._ttl_s / 2

    def settle(self, version: int, give_up: Deadline) -> None:
        """Give everything back and learn whether what was read is whole.

        Raises:
            LeaseExpired: a slot was packed again while we read it.
            PublisherLost, PullTimeout: that cannot be known.
        """
        for rank, lease in list(self._granted.items()):
            ask = ReleaseRequest(lease_id=lease.lease_id, slot=lease.slot, generation=lease.generation)
            released = self._ask(rank, ask, Released, give_up)
            del self._granted[rank]
            self._asked.discard(rank)
            if not released.is_intact:
                raise LeaseExpired(
                    f"{self._holder} read version {version} from slot {lease.slot} of learner {rank} for longer than "
                    "its lease, and the slot was packed again meanwhile; what was read is torn and is not committed"
                )
        self._version = None

    def drop(self) -> None:
        """Give back what is held, or granted to a question that was given up, as far as publishers still answer; the
        rest expires."""
        for rank in self._asked:
            with contextlib.suppress(WeightSyncError):
                self._sources[rank].client.ask(DropRequest(), Dropped, deadline_s=LAST_WORD_S)
        self._asked.clear()
        self._granted.clear()
        self._version = None

    def _lease(self, rank: int, version: int, give_up: Deadline) -> LeaseGranted:
        ask = LeaseRequest(version=version, worker=self._worker, ttl_s=self._held_s)
        self._asked.add(rank)
        while True:
            answer = self._ask(rank, ask, msgspec.Struct, give_up)
            if isinstance(answer, LeaseGranted):
                return answer
            if not isinstance(answer, Pending):
                raise WeightSyncError(f"learner {rank} answered a lease request with {type(answer).__name__}")
            give_up.check()
            if self._clock() >= give_up.at:
                raise PullTimeout(f"{self._holder}: learner {rank} did not seal version {version} in time")
            time.sleep(PENDING_S)

    def _ask(self, rank: int, request: Request, kind: type[R], give_up: Deadline) -> R:
        """
        Raises:
            PublisherLost: no answer within `SILENCE_S`.
            PullTimeout: none either, and there was less time than that.
            Exception: what `give_up.check` raises.
        """
        patience_s = min(SILENCE_S, max(give_up.at - self._clock(), LAST_WORD_S))
        try:
            return self._sources[rank].client.ask(request, kind, deadline_s=patience_s, check=give_up.check)
        except PublisherLost as error:
            if patience_s >= SILENCE_S:
                raise
            raise PullTimeout(
                f"{self._holder}: only {patience_s:.1f} s were left to ask learner {rank}, which says nothing about "
                f"whether it lives: {error}"
            ) from error
