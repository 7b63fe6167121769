"""Sending through a communicator of two processes.

Work runs in a thread that exists only while there is some, so a receiver that vanished leaves no thread behind: what
was being sent to it fails when the connection does, or after `Timing.stall_s`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from weight_sync.device.collectives import LinkBroken
from weight_sync.errors import DeviceError, VersionUnavailable
from weight_sync.messages import PairDrop, PairMeet, PairMet, PairSend, PairState, PairWatch
from weight_sync.transports.pair import BATCHES_IN_FLIGHT, StoreMirror, Timing, batches

if TYPE_CHECKING:
    from collections.abc import Callable

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


class Sender:
    """What every pair of one publisher shares: the slots, the device, and how to build a member of a group."""

    def __init__(self, slots: Readable, *, host: str, timing: Timing) -> None:
        self.slots = slots
        self.timing = timing
        self._backend = slots.owner
        self._host = host
        # Not torch's current stream: a send would wait for the learner's compute that is queued there.
        self._stream: Any | None = slots.owner.new_stream()

    def connect(self, mirror: StoreMirror) -> PairGroup:
        """
        Raises:
            DeviceError: no such group, or the receiver did not join.
        """
        self._backend.enter()
        with self._backend.use_stream(self._stream):
            return self._backend.process_group(mirror.store, rank=0, timeout_s=self.timing.connect_s, host=self._host)

    def send(self, group: PairGroup, order: PairSend) -> None:
        """
        Raises:
            LinkBroken: the receiver is gone, silent, or left the group.
        """
        self._backend.enter()
        data = self.slots.readable(order.slot)
        pending: deque[Transfer] = deque()
        with self._backend.use_stream(self._stream):
            for batch in batches(order.ranges, lambda message: message[1]):
                if len(pending) == BATCHES_IN_FLIGHT:
                    pending.popleft().wait(self.timing.stall_s)
                pending.append(group.send([data[offset : offset + nbytes] for offset, nbytes in batch]))
            while pending:
                pending.popleft().wait(self.timing.stall_s)

    def check(self, order: PairSend) -> None:
        """
        Raises:
            ValueError: a slot or a range that does not exist.
        """
        if not 0 <= order.slot <= self.slots.num_slots:
            raise ValueError(f"slot must be in [0, {self.slots.num_slots}] (the last is the probe), got {order.slot}")
        size = self.slots.readable(order.slot).numel()
        for offset, nbytes in order.ranges:
            if offset < 0 or nbytes < 1 or offset + nbytes > size:
                raise ValueError(f"range {offset}+{nbytes} is not inside a slot of {size} bytes")


class Outbound:
    """One group, from its first meeting until it falls. Safe to use from several threads."""

    def __init__(self, group_id: bytes, sender: Sender, *, peer: str, on_connected: Callable[[], None]) -> None:
        self.group_id = group_id
        self._sender = sender
        self._peer = peer
        self._on_connected = on_connected
        self._mirror = StoreMirror()
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._group: PairGroup | None = None
        self._num_ordered = 0
        self._num_sent = 0
        self._error = ""
        self._is_dropped = False
        self._submit(self._connect)

    def meet(self, entries: dict[str, bytes]) -> PairMet:
        self._mirror.learn(entries)
        return PairMet(entries=self._mirror.own(), error=self._error)

    def order(self, request: PairSend) -> PairState:
        self._sender.check(request)
        if request.number > self._num_ordered:
            raise ValueError(f"order {request.number} came before order {self._num_ordered}")
        if request.number == self._num_ordered:
            self._num_ordered += 1
            self._submit(lambda: self._send(request))
        return self.state()

    def state(self) -> PairState:
        return PairState(num_sent=self._num_sent, error=self._error)

    def drop(self, *, join_s: float = 0.0) -> None:
        """Abort the group, whatever it is doing. Does not wait for that, unless told to."""
        with self._lock:
            self._is_dropped = True
            self._error = self._error if self._error else f"the group with {self._peer} was dropped"
            self._jobs.clear()
            group, self._group, worker = self._group, None, self._thread
        if group is None:
            return
        stopper = threading.Thread(target=_abort, args=(group,), name="weight-sync-drop", daemon=True)
        stopper.start()
        for thread in (stopper, worker):
            if thread is not None:
                thread.join(join_s)

    def _submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._error:
                return
            self._jobs.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"weight-sync-to-{self._peer}", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:  # noqa: BLE001 - whatever it was, the receiver must learn of it
                self._fail(error)

    def _connect(self) -> None:
        group = self._sender.connect(self._mirror)
        with self._lock:
            if not self._is_dropped:
                self._group = group
        if self._is_dropped:
            _abort(group)
            raise LinkBroken("dropped while it was being built")
        self._on_connected()

    def _send(self, request: PairSend) -> None:
        group = self._group
        if group is None:
            raise LinkBroken("the group is gone")
        self._sender.send(group, request)
        self._num_sent += 1

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._jobs.clear()
            group, self._group = self._group, None
            self._error = self._error if self._error else f"{type(error).__name__}: {error}"
        if not self._is_dropped:
            log.warning("sending to %s failed, the group is dropped: %s", self._peer, error)
        if group is not None:
            _abort(group)


class Peers:
    """Every receiver's pair. A receiver that meets under a new group leaves its old one."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._pairs: dict[str, Outbound] = {}
        self._num_connected = 0
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
                return self._current(peer, request.group).order(request)
            case PairWatch():
                return self._current(peer, request.group).state()
            case PairDrop():
                pair = self._current(peer, request.group)
                pair.drop()
                return pair.state()

    def num_connected(self) -> int:
        """Groups that came about so far."""
        return self._num_connected

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

    def _meeting(self, peer: str, group_id: bytes) -> Outbound:
        with self._lock:
            if self._is_closed:
                raise VersionUnavailable("this publisher closed; open the receiver again")
            known = self._pairs.get(peer)
            if known is not None and known.group_id == group_id:
                return known
            pair = Outbound(group_id, self._sender, peer=peer, on_connected=self._count)
            self._pairs[peer] = pair
        if known is not None:
            known.drop()
        return pair

    def _current(self, peer: str, group_id: bytes) -> Outbound:
        with self._lock:
            pair = self._pairs.get(peer)
        if pair is None or pair.group_id != group_id:
            raise VersionUnavailable(f"{peer} speaks of a group that is not its current one; meet again")
        return pair

    def _count(self) -> None:
        with self._lock:
            self._num_connected += 1


def _abort(group: PairGroup) -> None:
    with contextlib.suppress(DeviceError):
        group.abort()
