"""Digest and seal a packed slot beside training: the learner waits for its pack only."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, NamedTuple

from weight_sync.errors import PullTimeout, VersionUnavailable, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.arena import Arena
    from weight_sync.device.base import Backend, Digester
    from weight_sync.transports.offer import Offer

log = logging.getLogger(__name__)


class Sealed(NamedTuple):
    """What is known of a sealed slot."""

    digests: tuple[int, ...] = ()
    """One per range; empty if the run does not verify."""
    seconds: float = 0.0


class Sealer:
    """One thread, one slot at a time."""

    def __init__(
        self,
        backend: Backend,
        end: Offer,
        arena: Arena,
        *,
        ranges: Sequence[tuple[int, int]],
        num_slots: int,
        verify: bool,
        clock: Callable[[], float],
        rank: int,
    ) -> None:
        """`ranges` are (offset, bytes) within a slot."""
        self._end = end
        self._arena = arena
        self._ranges = tuple(ranges)
        self._verify = verify
        self._clock = clock
        self._rank = rank
        self._lock = threading.Lock()
        self._version: int | None = None
        self._failed: tuple[int, str] | None = None
        """The last version that could not be sealed, and why."""
        self._future: Future[None] | None = None
        self._sealed: dict[int, Sealed] = {}
        self._digesters: tuple[Digester, ...] = ()
        if self._ranges:
            slots = [end.slot(index) for index in range(num_slots)]
            self._digesters = tuple(
                backend.digester([slot[start : start + size] for start, size in self._ranges]) for slot in slots
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync-seal")

    def start(self, version: int, slot: int) -> None:
        """Seal `slot` in the background. The one before must have ended: call `wait` first."""
        with self._lock:
            self._version, self._failed = version, None
        self._future = self._thread.submit(self._seal, version, slot)

    def wait(self, timeout_s: float) -> None:
        """Until nothing is being sealed.

        Raises:
            PullTimeout: it takes longer than `timeout_s`.
            WeightSyncError: sealing the version before failed, so nobody could read it.
        """
        future, self._future = self._future, None
        if future is None:
            return
        try:
            future.result(timeout_s)
        except FutureTimeout:
            self._future = future
            raise PullTimeout(
                f"learner rank {self._rank} is still sealing version {self._version} after {timeout_s:.1f} s; "
                "is its device stuck?"
            ) from None

    def is_sealing(self, version: int) -> bool:
        with self._lock:
            return self._version == version

    def require_not_failed(self, version: int) -> None:
        """
        Raises:
            VersionUnavailable: `version` could not be sealed; says why. No engine is to blame for that.
        """
        with self._lock:
            failed = self._failed
        if failed is not None and failed[0] == version:
            raise VersionUnavailable(failed[1])

    def sealed(self, slot: int) -> Sealed:
        return self._sealed.get(slot, Sealed())

    def digests_of(self, slot: int) -> tuple[int, ...]:
        """Digest of every range of a slot as it is now."""
        return self._digesters[slot]() if self._ranges else ()

    def close(self) -> None:
        """Waits for a slot that is being sealed. Idempotent."""
        with contextlib.suppress(WeightSyncError):
            self.wait(30.0)
        self._thread.shutdown(wait=False)
        self._digesters = ()

    def _seal(self, version: int, slot: int) -> None:
        started = self._clock()
        try:
            digests = self.digests_of(slot) if self._verify else ()
            if self._ranges:
                self._end.seal(slot)
        except BaseException as error:
            self._arena.abort(slot)
            why = f"learner rank {self._rank} could not seal version {version}: {type(error).__name__}: {error}"
            log.exception("%s", why)
            with self._lock:
                self._version, self._failed = None, (version, why)
            raise WeightSyncError(why) from error
        self._sealed[slot] = Sealed(digests, self._clock() - started)
        with self._lock:
            self._arena.seal(slot, version)
            self._version = None
