"""Reading through a communicator of two processes: NCCL, RCCL, HCCL or gloo.

    receiver                                          publisher
      meet(group, store entries) ───────────────────>   builds its end, in a thread (only while no group stands)
      send(group, slot, ranges)  ───────────────────>   queues them, answers immediately
      <═══════════ one message per range, in order ══   a thread sends, while there is something to send
      watch(group)               ───────────────────>   how far it is, or what went wrong

All of them are this one implementation; they differ in `Backend.connect_pair` only. `gloo` moves host memory: with an
accelerator on either side, slots are copied to the host when sealed, and what arrives is copied to the device. A group
is built by the first pull and kept. A pull that is stopped or fails aborts its group on both sides, so a late message
can never be taken for one of the next pull, which builds a new group.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
import zmq

from weight_sync.device.collectives import Hccl, LinkBroken, Nccl
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import DeviceError, PublisherLost, TransportUnusable, WeightSyncError
from weight_sync.messages import PairDrop, PairMeet, PairMet, PairSend, PairState, PairWatch
from weight_sync.transports.base import BATCH_BYTES, BATCHES_IN_FLIGHT, SourceReader, ignore, require_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.device.collectives import PairGroup, Transfer
    from weight_sync.messages import ArenaHandle
    from weight_sync.transports.base import Check, Line, OnArrived, Piece


HOST = "gloo"
DEVICE = ("nccl", "hccl")
PAIR_BYTES = {library.name: library.PAIR_BYTES for library in (Nccl, Hccl)}
"""What a group of two takes of the device at each end."""
WILDCARDS = ("", "0.0.0.0", "::", "*")
MESSAGE_BYTES = 64 * 2**20
BATCH_MESSAGES = 256
STAGED_BYTES = 16 * 2**20
"""A batch that is received into host memory and copied to the device from there."""
ORDER_MESSAGES = 2048
"""An order must fit into a control frame (1 MiB), and a range takes up to 15 bytes of it."""
BUILDS_AT_ONCE = 4
"""Groups that one process builds at a time: each takes threads, sockets and up to a second."""
CHECK_S = 0.1
"""How often a waiting pull looks at its `check`."""
ASK_S = 0.4
"""For a question that may go unanswered."""
WATCH_S = 1.0
MEET_S = 0.005
T = TypeVar("T")
R = TypeVar("R")


class Timing(NamedTuple):
    """How long the ends of a pair wait for each other, in seconds."""

    connect_s: float = 20.0
    """For a group to be created."""
    stall_s: float = 30.0
    """For one batch to move. A thread that sends lives no longer than this after its peer died."""
    silence_s: float = 10.0
    """For the publisher's control thread to answer."""


class Message(NamedTuple):
    """A part of a piece that is sent as one message."""

    offset: int
    dst: torch.Tensor
    num_pieces: int
    """That are complete when this has arrived."""


def messages_of(pieces: Sequence[Piece], *, limit_bytes: int = MESSAGE_BYTES) -> list[Message]:
    found: list[Message] = []
    for number, piece in enumerate(pieces):
        size = piece.dst.numel()
        for start in range(0, size, limit_bytes):
            end = min(size, start + limit_bytes)
            found.append(Message(piece.src_off + start, piece.dst[start:end], number + (end == size)))
    return found


def orders(messages: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(messages), ORDER_MESSAGES):
        yield messages[start : start + ORDER_MESSAGES]


def batches(messages: Sequence[T], size: Callable[[T], int], *, limit_bytes: int = BATCH_BYTES) -> Iterator[list[T]]:
    """Messages of one order that are started together. Grouped libraries need the same batches on both ends."""
    batch: list[T] = []
    batch_bytes = 0
    for message in messages:
        if batch and (batch_bytes + size(message) > limit_bytes or len(batch) == BATCH_MESSAGES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(message)
        batch_bytes += size(message)
    if batch:
        yield batch


class ReplicatedStore:
    """One end's copy of the store in which a library's two ends find each other. Not thread-safe itself; the store is.

    gloo keeps its addresses there; NCCL and HCCL the one root that rank 0 makes.
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self._own: set[str] = set()
        self._learned: set[str] = set()

    def own(self) -> dict[str, bytes]:
        """Every key that this end made: all of them each time, because an answer may be lost."""
        self._own |= set(self.store.list_keys()) - self._learned
        return {key: bytes(self.store.get(key)) for key in sorted(self._own)}

    def learn(self, entries: dict[str, bytes]) -> None:
        """Take over what the other end made. Keys that are known already are left alone."""
        for key, value in entries.items():
            if key not in self._own and key not in self._learned:
                self._learned.add(key)
                self.store.set(key, value)  # type: ignore[arg-type]


def device_transport(collective: str) -> str | None:
    """The pair transport of a backend's device memory, from `Backend.collective` (e.g. "cpu:gloo,cuda:nccl")."""
    libraries = [entry.rpartition(":")[2] for entry in collective.split(",")]
    return next((library for library in libraries if library in DEVICE), None)


def pair_bytes(transport: str, collective: str, *, same_node: bool) -> int:
    """What a connection takes of the device at each end, with `weight_sync.transport` and `Backend.collective`, where
    processes of one node can map each other's memory."""
    if transport == "auto":
        transport = "" if same_node else device_transport(collective) or HOST
    return PAIR_BYTES.get(transport, 0)


def require_library(transport: str, backend: Backend) -> None:
    """
    Raises:
        TransportUnusable: `transport` does not move this backend's memory.
    """
    if transport != HOST and device_transport(backend.collective) != transport:
        raise TransportUnusable(
            f"backend {backend.name} ({backend.collective}) has no {transport}; both ends must have it, or use {HOST}"
        )


def require_reachable(host: str) -> str:
    """
    Raises:
        TransportUnusable: `host` is no address that another process could connect to.
    """
    if host in WILDCARDS:
        raise TransportUnusable(
            f"a two-sided transport needs the address under which others reach this process, got {host!r}; "
            "name one of this host's addresses"
        )
    return host


class ReceiveBuffer:
    """Where messages arrive: in the pieces themselves, or in host memory next to them and from there by a copy."""

    def __init__(self, backend: Backend, *, staged: bool) -> None:
        """
        Raises:
            DeviceError: no memory for staging.
        """
        self._backend = backend
        self._blocks: list[PersistentBlock] = []
        self._turn = 0
        self.message_bytes = STAGED_BYTES if staged else MESSAGE_BYTES
        self.batch_bytes = STAGED_BYTES if staged else BATCH_BYTES
        if staged:
            self._stream: Any | None = backend.new_stream()
            self._blocks.extend(CpuBackend().alloc_persistent(STAGED_BYTES) for _ in range(BATCHES_IN_FLIGHT))
            for block in self._blocks:
                backend.pin(block, [(0, block.nbytes)])

    def targets(self, batch: Sequence[Message]) -> list[torch.Tensor]:
        """What to receive `batch` into. A batch must be delivered before the next but one asks."""
        if not self._blocks:
            return [message.dst for message in batch]
        block, self._turn = self._blocks[self._turn].tensor, (self._turn + 1) % len(self._blocks)
        found: list[torch.Tensor] = []
        start = 0
        for message in batch:
            found.append(block[start : start + message.dst.numel()])
            start += message.dst.numel()
        return found

    def deliver(self, batch: Sequence[Message], arrived: Sequence[torch.Tensor]) -> None:
        """Bring what arrived into the pieces. Returns when it is there."""
        if not self._blocks:
            return
        try:
            for message, tensor in zip(batch, arrived, strict=True):
                self._backend.copy_async(message.dst, tensor, self._stream)
        finally:  # after an error too: a caller that pulls again writes to the same places
            self._backend.synchronize(self._stream)

    def num_allocations(self) -> int:
        return len(self._blocks)

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks.clear()


class Connection:
    """A group that both ends are in, and how many orders went to it."""

    def __init__(self, group: PairGroup, group_id: bytes) -> None:
        self.group = group
        self.group_id = group_id
        self.num_orders = 0


_building = threading.BoundedSemaphore(BUILDS_AT_ONCE)


class PairReceiver(SourceReader):
    """Reads one publisher's slots by asking it to send. One pull at a time."""

    def __init__(
        self, backend: Backend, arena: ArenaHandle, line: Line, *, host: str, timing: Timing | None = None
    ) -> None:
        """`host` is this process's address as the publisher reaches it.

        Raises:
            TransportUnusable: the backend has no such library, or the publisher is on this very device.
            DeviceError: no memory for staging.
        """
        require_library(arena.transport, backend)
        own = backend.device_identity()
        if arena.transport != HOST and own and own == arena.device:
            raise TransportUnusable(
                f"the learner and this worker share device {own}, and {arena.transport} cannot connect a device with "
                f"itself; use ipc, or {HOST}"
            )
        self._arena = arena
        self._line = line
        self._host = require_reachable(host)
        self._timing = Timing() if timing is None else timing
        self._backend = CpuBackend() if arena.transport == HOST else backend
        self._buffer = ReceiveBuffer(backend, staged=arena.transport == HOST and backend.name != "cpu")
        self._connection: Connection | None = None
        self._num_connected = 0
        self._is_stuck = False
        self._heard_at = self._watched_at = 0.0

    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        require_slot(self._arena, slot)
        check()
        if self._is_stuck:
            raise WeightSyncError(f"{self._name}: an aborted transfer still holds its memory; restart this process")
        messages = messages_of(pieces, limit_bytes=self._buffer.message_bytes)
        connection, self._connection = self._connection, None  # kept only by a pull that ends well
        try:
            if connection is None:
                connection = self._connect(check)
            self._receive(connection, slot, messages, check, on_arrived)
            check()
        except BaseException as error:
            self._leave(connection)
            if isinstance(error, DeviceError):
                # Of this device, or of the link: the publisher may be well, and is asked when the pull is tried again.
                kind = WeightSyncError if self._num_connected else TransportUnusable
                raise kind(f"{self._name}: {error}") from error
            raise
        self._connection = connection

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._leave(connection)

    def counters(self) -> dict[str, int]:
        return {
            "allocations": self._buffer.num_allocations(),
            "registrations": 0,
            "communicators": self._num_connected,
        }

    def close(self) -> None:
        self.disconnect()
        self._buffer.close()

    @property
    def _name(self) -> str:
        return f"{self._arena.transport} from the publisher at {self._arena.host}"

    def _connect(self, check: Check) -> Connection:
        """Build this end of a new group, in a thread because libraries block until the other end is there."""
        while not _building.acquire(timeout=CHECK_S):
            check()
        group_id, replica = secrets.token_bytes(16), ReplicatedStore()
        building: Future[PairGroup] | None = None
        try:
            while not self._meet(group_id, replica, check):
                time.sleep(MEET_S)
            building = in_thread("weight-sync-connect", partial(self._build, replica))
            deadline = time.monotonic() + 2 * self._timing.connect_s
            is_built = False
            while not is_built:
                is_built = bool(wait([building], MEET_S).done)
                # Once more after it is built: the publisher may need what the library wrote last to finish its end.
                self._meet(group_id, replica, check)
                if time.monotonic() > deadline:
                    raise LinkBroken(f"connecting did not end within {2 * self._timing.connect_s:.1f} s")
            group = building.result()
        except BaseException:
            if building is not None:
                building.add_done_callback(_abort_built)
            self._drop(group_id)
            raise
        finally:
            if building is None:
                _building.release()
            else:
                building.add_done_callback(lambda _: _building.release())
        self._num_connected += 1
        return Connection(group, group_id)

    def _meet(self, group_id: bytes, replica: ReplicatedStore, check: Check) -> bool:
        """Bring both stores up to date. Whether the publisher has begun to build its end: from then on its time runs.

        Raises:
            LinkBroken: it could not.
        """
        met = self._ask(PairMeet(group=group_id, entries=replica.own()), PairMet, check)
        if met.error:
            raise LinkBroken(f"the publisher could not join: {met.error}")
        replica.learn(met.entries)
        return bool(met.entries)

    def _build(self, replica: ReplicatedStore) -> PairGroup:
        return self._backend.connect_pair(replica.store, rank=1, timeout_s=self._timing.connect_s, host=self._host)

    def _receive(
        self, connection: Connection, slot: int, messages: Sequence[Message], check: Check, on_arrived: OnArrived
    ) -> None:
        for part in orders(messages):
            ranges = tuple((message.offset, message.dst.numel()) for message in part)
            order = PairSend(group=connection.group_id, number=connection.num_orders, slot=slot, ranges=ranges)
            connection.num_orders += 1
            state = self._ask(order, PairState, check)
            if state.error:
                raise LinkBroken(f"the publisher left the group: {state.error}")
        under_way: deque[tuple[Transfer, list[Message], list[torch.Tensor]]] = deque()

        def finish() -> None:
            transfer, batch, targets = under_way.popleft()
            self._await(connection, transfer, check)
            self._buffer.deliver(batch, targets)
            on_arrived(batch[-1].num_pieces)

        for part in orders(messages):
            for batch in batches(part, lambda message: message.dst.numel(), limit_bytes=self._buffer.batch_bytes):
                if len(under_way) == BATCHES_IN_FLIGHT:
                    finish()
                targets = self._buffer.targets(batch)
                under_way.append((connection.group.receive(targets), batch, targets))
        while under_way:
            finish()

    def _await(self, connection: Connection, transfer: Transfer, check: Check) -> None:
        began_at = time.monotonic()
        while not transfer.is_done(CHECK_S):
            check()
            if time.monotonic() - began_at > self._timing.stall_s:
                raise LinkBroken(f"no progress within {self._timing.stall_s:.1f} s")
            if time.monotonic() - self._watched_at > WATCH_S:
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """
        Raises:
            PublisherLost: it was last heard of too long ago.
            WeightSyncError: it says that the group fell.
        """
        self._watched_at = time.monotonic()
        try:
            state = self._line.ask(PairWatch(group=connection.group_id), PairState, deadline_s=ASK_S)
        except PublisherLost as error:
            if time.monotonic() - self._heard_at > self._timing.silence_s:
                raise PublisherLost(f"{self._name}: silent in the middle of a transfer: {error}") from error
            return
        self._heard_at = time.monotonic()
        if state.error:
            raise WeightSyncError(f"{self._name}: it stopped sending: {state.error}")

    def _ask(self, request: PairMeet | PairSend, kind: type[R], check: Check) -> R:
        """
        Raises:
            PublisherLost: no answer within `silence_s`.
        """
        deadline = time.monotonic() + self._timing.silence_s
        while True:
            check()  # not inside the question: it may have one of its own for this line
            try:
                answer = self._line.ask(request, kind, deadline_s=ASK_S)
            except PublisherLost:
                if time.monotonic() >= deadline:
                    raise
            else:
                self._heard_at = self._watched_at = time.monotonic()
                return answer

    def _leave(self, connection: Connection | None) -> None:
        """When this returns nothing is written into the pieces any more; where that cannot be had it is remembered."""
        if connection is None:
            return
        try:
            connection.group.abort()
        except DeviceError:
            self._is_stuck = True
        self._drop(connection.group_id)

    def _drop(self, group_id: bytes) -> None:
        # A publisher that cannot be notified notices by itself, later; and its line may be closed already.
        with contextlib.suppress(WeightSyncError, zmq.ZMQError):
            self._line.ask(PairDrop(group=group_id), PairState, deadline_s=ASK_S / 2)


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """The result of `call`, from a daemon thread: one that never returns does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _abort_built(building: Future[PairGroup]) -> None:
    """A group that nobody waits for any more."""
    if building.exception() is None:
        with contextlib.suppress(DeviceError):
            building.result().abort()
