"""Sending through a communicator of two processes.

Work runs in a thread that exists only while there is some, so a receiver that vanished leaves no thread behind: what
was being sent to it fails when the connection does, or after `Timing.stall_s`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from weight_sync.device.collectives import LinkBroken
from weight_sync.errors import DeviceError, VersionUnavailable
from weight_sync.messages import PairDrop, PairMeet, PairMet, PairSend, PairState, PairWatch
from weight_sync.transports.base import BATCHES_IN_FLIGHT
from weight_sync.transports.pair import BUILDS_AT_ONCE, CHECK_S, ReplicatedStore, Timing, batches, in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from weight_sync.device.base import Backend
    from weight_sync.device.collectives import PairGroup, Transfer
    from weight_sync.messages import TransportRequest, TransportResponse


log = logging.getLogger(__name__)


class Readable(Protocol):
    """Slots that can be sent."""

    owner: Backend
    num_slots: int

    def readable(self, index: int) -> torch.Tensor: ...


class SenderPool:
    """Every receiver's pair with one publisher. A receiver that meets under a new group leaves its old one."""

    def __init__(self, slots: Readable, *, host: str, timing: Timing) -> None:
        self.timing = timing
        self.num_connected = 0
        """Groups that were created so far."""
        self._slots = slots
        self._host = host
        self._lock = threading.Lock()
        self._building = threading.BoundedSemaphore(BUILDS_AT_ONCE)
        self._pairs: dict[str, PairSender] = {}
        self._is_closed = False

    def answer(self, peer: str, request: TransportRequest) -> TransportResponse:
        """
        Raises:
            VersionUnavailable: the group is not the receiver's current one, or the publisher closed.
            ValueError: a slot or range that does not exist.
        """
        match request:
            case PairMeet():
                return self._meeting(peer, request.group).meet(request.entries)
            case PairSend():
                self._require(request)
                return self._current(peer, request.group).order(request)
            case PairWatch():
                return self._current(peer, request.group).state()
            case PairDrop():
                pair = self._current(peer, request.group)
                pair.drop()
                return pair.state()
            case _:
                raise ValueError(f"{peer} sent a {type(request).__name__}, which this transport does not answer")

    def forget(self, replica: str) -> None:
        """Drop the pairs of this replica's workers. A killed one did not, and an idle connection does not notice."""
        with self._lock:
            gone = [self._pairs.pop(peer) for peer in [*self._pairs] if peer.rpartition("/")[0] == replica]
        for pair in gone:
            pair.drop()

    def close(self, *, join_s: float) -> None:
        with self._lock:
            self._is_closed = True
            pairs, self._pairs = list(self._pairs.values()), {}
        for pair in pairs:
            pair.drop(join_s=join_s)

    def connect(self, replica: ReplicatedStore, require_wanted: Callable[[], None]) -> PairGroup:
        """
        Raises:
            DeviceError: no such group, or the receiver did not join.
            LinkBroken: it is not wanted any more, while it waits for others to be built.
        """
        while not self._building.acquire(timeout=CHECK_S):
            require_wanted()
        try:
            require_wanted()
            return self._slots.owner.connect_pair(
                replica.store, rank=0, timeout_s=self.timing.connect_s, host=self._host
            )
        finally:
            self._building.release()

    def send(self, group: PairGroup, order: PairSend) -> None:
        """
        Raises:
            LinkBroken: the receiver is gone, silent, or left the group.
        """
        data = self._slots.readable(order.slot)
        under_way: deque[Transfer] = deque()

        def finish() -> None:
            if not under_way.popleft().is_done(self.timing.stall_s):
                raise LinkBroken(f"no progress within {self.timing.stall_s:.1f} s")

        for batch in batches(order.ranges, lambda message: message[1]):
            if len(under_way) == BATCHES_IN_FLIGHT:
                finish()
            under_way.append(group.send([data[offset : offset + nbytes] for offset, nbytes in batch]))
        while under_way:
            finish()

    def count(self) -> None:
        with self._lock:
            self.num_connected += 1

    def _require(self, order: PairSend) -> None:
        num_slots = self._slots.num_slots
        if not 0 <= order.slot <= num_slots:
            raise ValueError(f"slot must be in [0, {num_slots}] (the last is the probe), got {order.slot}")
        size = self._slots.readable(order.slot).numel()
        for offset, nbytes in order.ranges:
            if offset < 0 or nbytes < 1 or offset + nbytes > size:
                raise ValueError(f"range {offset}+{nbytes} is not inside a slot of {size} bytes")

    def _meeting(self, peer: str, group_id: bytes) -> PairSender:
        with self._lock:
            if self._is_closed:
                raise VersionUnavailable("this publisher closed; open the receiver again")
            known = self._pairs.get(peer)
            if known is not None and known.group_id == group_id:
                return known
            pair = self._pairs[peer] = PairSender(group_id, self, peer=peer)
        if known is not None:
            known.drop()
        return pair

    def _current(self, peer: str, group_id: bytes) -> PairSender:
        with self._lock:
            pair = self._pairs.get(peer)
        if pair is None or pair.group_id != group_id:
            raise VersionUnavailable(f"{peer} speaks of a group that is not its current one; meet again")
        return pair


class PairSender:
    """One group, from its first meeting until it falls. Safe to use from several threads."""

    def __init__(self, group_id: bytes, pool: SenderPool, *, peer: str) -> None:
        self.group_id = group_id
        self._pool = pool
        self._peer = peer
        self._replica = ReplicatedStore()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._working: Future[None] | None = None
        self._group: PairGroup | None = None
        self._num_ordered = 0
        self._num_sent = 0
        self._error = ""
        self._submit(self._connect)

    def meet(self, entries: dict[str, bytes]) -> PairMet:
        self._replica.learn(entries)
        return PairMet(entries=self._replica.own(), error=self._error)

    def order(self, request: PairSend) -> PairState:
        if request.number > self._num_ordered:
            raise ValueError(f"order {request.number} came before order {self._num_ordered}")
        if request.number == self._num_ordered:
            self._num_ordered += 1
            self._submit(lambda: self._send(request))
        return self.state()

    def state(self) -> PairState:
        return PairState(num_sent=self._num_sent, error=self._error)

    def drop(self, *, join_s: float = 0.0) -> None:
        """Abort the group, whatever it is doing. Does not wait for that, unless asked to."""
        working = self._working
        aborting = self._fall(f"the group with {self._peer} was dropped")
        for future in (aborting, working):
            if future is not None:
                with contextlib.suppress(TimeoutError):
                    future.exception(join_s)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._error:
                return
            self._jobs.append(job)
            if self._working is None:
                self._working = in_thread(f"weight-sync-to-{self._peer}", self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._working = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever it was, the receiver must learn of it
                if not self._error:
                    log.warning("sending to %s failed, the group is dropped: %s", self._peer, error)
                self._fall(f"{type(error).__name__}: {error}")

    def _connect(self) -> None:
        group = self._pool.connect(self._replica, self._require_wanted)
        with self._lock:
            is_wanted = not self._error
            if is_wanted:
                self._group = group
        if not is_wanted:
            _abort(group)
            return
        self._pool.count()

    def _send(self, request: PairSend) -> None:
        group = self._group
        if group is not None:
            self._pool.send(group, request)
            self._num_sent += 1

    def _require_wanted(self) -> None:
        if self._error:
            raise LinkBroken(self._error)

    def _fall(self, error: str) -> Future[None] | None:
        """The first error stays. Returns the abort, if there is something to abort."""
        with self._lock:
            self._error = self._error if self._error else error
            self._jobs.clear()
            group, self._group = self._group, None
        return None if group is None else in_thread("weight-sync-drop", lambda: _abort(group))


def _abort(group: PairGroup) -> None:
    with contextlib.suppress(DeviceError):
        group.abort()
