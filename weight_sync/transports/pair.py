"""Reading through a communicator of two processes: NCCL, RCCL, HCCL or gloo.

    receiver                                          publisher
      meet(group, store entries) ───────────────────>   builds its half, in a thread (only while no group stands)
      send(group, slot, ranges)  ───────────────────>   queues them, answers at once
      <═══════════ one message per range, in order ══   a thread sends, while there is something to send
      watch(group)               ───────────────────>   how far it is, or what went wrong

`nccl` (also RCCL), `hccl` and `gloo` are this one implementation; they differ in `Backend.process_group` only. `gloo`
moves host memory: with an accelerator on either side, slots are copied to the host when sealed, and what arrives is
copied to the device. Groups are built by the first pull and kept. A pull that is stopped or fails aborts its group on
both sides, so a late message can never be taken for one of the next pull, which builds a new group.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch.distributed as dist
import zmq

from weight_sync.device.collectives import LinkBroken
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import DeviceError, PlanMismatch, PublisherLost, TransportUnusable, WeightSyncError
from weight_sync.messages import PairDrop, PairMeet, PairMet, PairSend, PairState, PairWatch
from weight_sync.transports.base import Line, OnArrived, Piece, ReceiverEnd, batched, ignore, require_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.device.collectives import PairGroup, Transfer
    from weight_sync.messages import ArenaHandle, Request


MESSAGE_BYTES = 64 * 2**20
BATCH_BYTES = 256 * 2**20
BATCH_MESSAGES = 256
BATCHES_IN_FLIGHT = 2
STAGED_BYTES = 16 * 2**20
"""A batch that is received into host memory and copied to the device from there."""
ORDER_MESSAGES = 2048
"""An order must fit into a control frame (1 MiB), and a range takes up to 15 bytes of it."""
T = TypeVar("T")


class Timing(NamedTuple):
    """How long the ends of a pair wait for each other, in seconds."""

    connect_s: float = 20.0
    """For a group to come about."""
    stall_s: float = 30.0
    """For one batch to move. A thread that sends or receives lives no longer than this after its peer died."""
    silence_s: float = 10.0
    """For the publisher's control thread to answer."""


def cut(offset: int, nbytes: int, *, limit_bytes: int = MESSAGE_BYTES) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the messages that carry one piece."""
    for start in range(0, nbytes, limit_bytes):
        yield offset + start, min(limit_bytes, nbytes - start)


def orders(messages: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(messages), ORDER_MESSAGES):
        yield messages[start : start + ORDER_MESSAGES]


def batches(messages: Sequence[T], size: Callable[[T], int], *, limit_bytes: int = BATCH_BYTES) -> Iterator[list[T]]:
    """Messages that are started together. Grouped libraries need the same batches on both ends."""
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


WILDCARDS = ("", "0.0.0.0", "::", "*")


class StoreMirror:
    """One side's store. Not thread-safe itself; the store is."""

    def __init__(self) -> None:
        self.store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        self._own: set[str] = set()
        self._learned: set[str] = set()

    def own(self) -> dict[str, bytes]:
        """Every key that this side made. All of them, whenever it is asked: an answer that came too late is thrown
        away, and nobody says so."""
        self._own |= set(self.store.list_keys()) - self._learned
        return {key: bytes(self.store.get(key)) for key in sorted(self._own)}

    def learn(self, entries: dict[str, bytes]) -> None:
        """Take over what the other side made. Keys that are known already are left alone."""
        for key, value in entries.items():
            if key not in self._own and key not in self._learned:
                self._learned.add(key)
                self.store.set(key, value)  # type: ignore[arg-type]


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


def own_address(peer: str) -> str:
    """The address of this host from which the kernel would reach `peer`. Sends nothing.

    Raises:
        TransportUnusable: there is no route.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportUnusable(f"no route to the publisher at {peer!r}: {error}") from error


CHECK_S = 0.1
"""How often a waiting pull looks at its `check`."""
ASK_S = 0.4
"""One question. Short, because the line is shared with the thread that must get to its `check`."""
WATCH_S = 1.0
MEET_S = 0.005
LEAVE_S = 5.0
"""For the thread of an aborted pull to come back from the library."""
R = TypeVar("R")


class Message(NamedTuple):
    offset: int
    dst: torch.Tensor


class Landing:
    """Where messages arrive: in the pieces themselves, or in host memory next to them and from there by a copy."""

    def __init__(self, backend: Backend, *, staged: bool) -> None:
        """
        Raises:
            DeviceError: no memory for staging.
        """
        self._backend = backend
        self._stream: Any | None = backend.new_stream()
        self._blocks: list[PersistentBlock] = []
        self._turn = 0
        self.message_bytes = STAGED_BYTES if staged else MESSAGE_BYTES
        self.batch_bytes = STAGED_BYTES if staged else BATCH_BYTES
        if staged:
            self._blocks.extend(CpuBackend().alloc_persistent(STAGED_BYTES) for _ in range(BATCHES_IN_FLIGHT))
            for block in self._blocks:
                backend.pin(block, [(0, block.nbytes)])

    def enter(self) -> contextlib.AbstractContextManager[None]:
        """Library calls of this thread wait for this end's own stream, not for the engine's compute."""
        self._backend.enter()
        return self._backend.use_stream(self._stream)

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
        finally:  # after an error too: whoever pulls again writes to the same places
            self._backend.synchronize(self._stream)

    def num_allocations(self) -> int:
        return len(self._blocks)

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks.clear()


class Standing:
    """A group that both sides are in, and how many orders went to it."""

    def __init__(self, group: PairGroup, group_id: bytes) -> None:
        self.group = group
        self.group_id = group_id
        self.num_orders = 0


class Job:
    """One pull."""

    def __init__(self, slot: int, messages: Sequence[Message], standing: Standing | None) -> None:
        """`standing` is the group to use; None if the pull must build one."""
        self.slot = slot
        self.standing = standing
        self.messages = messages
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.is_receiving = False
        """Messages may be on their way into the pieces."""
        self._is_cancelled = False
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """
        Raises:
            LinkBroken: nobody wants this any more.
        """
        if self._is_cancelled:
            raise LinkBroken("the pull was stopped")

    def begin_receiving(self, standing: Standing) -> None:
        """As `go_on`; if it does not raise, `cancel` knows the group, and that the pieces are in use."""
        with self._lock:
            self.go_on()
            self.standing = standing
            self.is_receiving = True

    def cancel(self) -> Standing | None:
        """The group that it uses or was to use. If it receives not yet, it never will."""
        with self._lock:
            self._is_cancelled = True
            return self.standing


class Inbound:
    """One publisher's pair. `connect` builds this side's member of a group; pulls come one at a time."""

    def __init__(
        self,
        arena: ArenaHandle,
        line: Line,
        landing: Landing,
        *,
        connect: Callable[[StoreMirror], PairGroup],
        timing: Timing,
    ) -> None:
        self.num_connected = 0
        self._arena = arena
        self._line = line
        self._landing = landing
        self._connect = connect
        self._timing = timing
        self._standing: Standing | None = None
        """Belongs to the caller's thread: what the thread of a stopped pull still does cannot reach the next pull."""
        self._stuck: threading.Thread | None = None

    def pull(self, slot: int, pieces: Iterable[Piece], *, check: Callable[[], None]) -> None:
        """As `ReceiverEnd.pull`."""
        require_slot(self._arena, slot)
        check()
        if self._stuck is not None:
            raise WeightSyncError(
                f"{self._name()}: an aborted transfer still holds its memory; restart this engine process"
            )
        limit_bytes = self._landing.message_bytes
        messages = [message for piece in pieces for message in _messages(piece, limit_bytes)]
        job = Job(slot, messages, self._standing)
        thread = threading.Thread(target=self._work, args=(job,), name="weight-sync-pull", daemon=True)
        thread.start()
        try:
            self._supervise(job, check)
            check()
        except BaseException:
            self._stop(job, thread)
            raise
        self._standing = job.standing

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._leave(self._standing)

    def _supervise(self, job: Job, check: Callable[[], None]) -> None:
        heard = watched = time.monotonic()
        while not job.done.wait(CHECK_S):
            check()
            now = time.monotonic()
            if not job.is_receiving:
                heard = now  # the thread itself asks the publisher
            elif now - watched > WATCH_S:
                watched = now
                heard = self._watch(job, heard)
        if job.error is not None:
            raise job.error

    def _watch(self, job: Job, heard: float) -> float:
        """When the publisher was last heard of.

        Raises:
            PublisherLost: too long ago.
            WeightSyncError: it says that the group fell.
        """
        assert job.standing is not None
        try:
            state = self._line.ask(PairWatch(group=job.standing.group_id), PairState, deadline_s=ASK_S)
        except PublisherLost as error:
            if time.monotonic() - heard > self._timing.silence_s:
                raise PublisherLost(f"{self._name()}: silent in the middle of a transfer: {error}") from error
            return heard
        if state.error:
            raise WeightSyncError(f"{self._name()}: it stopped sending: {state.error}")
        return time.monotonic()

    def _stop(self, job: Job, thread: threading.Thread) -> None:
        """Returns when the pull's thread is gone, so that it neither writes into the pieces nor speaks to the publisher
        any more (or remembers that this could not be had)."""
        try:
            self._leave(job.cancel())
        finally:
            thread.join(LEAVE_S)
            self._stuck = thread if job.is_receiving and thread.is_alive() else None

    def _leave(self, standing: Standing | None) -> None:
        self._standing = None
        if standing is None:
            return
        with contextlib.suppress(DeviceError):
            standing.group.abort()
        # A publisher that cannot be told notices by itself, later; and its line may be closed already.
        with contextlib.suppress(WeightSyncError, zmq.ZMQError):
            self._line.ask(PairDrop(group=standing.group_id), PairState, deadline_s=ASK_S / 2)

    def _work(self, job: Job) -> None:
        """The thread of a pull."""
        try:
            with self._landing.enter():
                standing = self._meet(job) if job.standing is None else job.standing
                self._begin(job, standing)
                self._receive(job, standing)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            job.error = self._explained(error)
        finally:
            job.done.set()

    def _begin(self, job: Job, standing: Standing) -> None:
        try:
            job.begin_receiving(standing)
        except LinkBroken:
            # Whoever stopped the pull did not know of this group, so nobody else will abort it.
            standing.group.abort()
            raise

    def _receive(self, job: Job, standing: Standing) -> None:
        for part in orders(job.messages):
            ranges = tuple((message.offset, message.dst.numel()) for message in part)
            order = PairSend(group=standing.group_id, number=standing.num_orders, slot=job.slot, ranges=ranges)
            standing.num_orders += 1
            state = self._ask(job, order, PairState)
            if state.error:
                raise LinkBroken(f"the publisher left the group: {state.error}")
        pending: deque[tuple[Transfer, list[Message], list[torch.Tensor]]] = deque()
        for part in orders(job.messages):
            for batch in batches(part, lambda message: message.dst.numel(), limit_bytes=self._landing.batch_bytes):
                if len(pending) == BATCHES_IN_FLIGHT:
                    self._finish(job, *pending.popleft())
                targets = self._landing.targets(batch)
                pending.append((standing.group.receive(targets), batch, targets))
        while pending:
            self._finish(job, *pending.popleft())

    def _finish(self, job: Job, transfer: Transfer, batch: list[Message], targets: list[torch.Tensor]) -> None:
        transfer.wait(self._timing.stall_s)
        job.go_on()
        self._landing.deliver(batch, targets)

    def _meet(self, job: Job) -> Standing:
        """Build both halves of a new group. The library blocks until the other half is there, so it has a thread."""
        group_id = secrets.token_bytes(16)
        mirror = StoreMirror()
        half = Half(lambda: self._connect(mirror))
        try:
            while True:
                is_built = half.done.wait(MEET_S)
                # Once more after it is built: the publisher may need what the library wrote last to finish its half.
                met = self._ask(job, PairMeet(group=group_id, entries=mirror.own()), PairMet)
                if met.error:
                    raise LinkBroken(f"the publisher could not join: {met.error}")
                mirror.learn(met.entries)
                if is_built:
                    break
            group = half.result()
        except BaseException:
            half.abandon()
            raise
        self.num_connected += 1
        return Standing(group, group_id)

    def _ask(self, job: Job, request: Request, kind: type[R]) -> R:
        """Ask until there is an answer. Every request of ours may be repeated.

        Raises:
            PublisherLost: none within `silence_s`.
        """
        give_up = time.monotonic() + self._timing.silence_s
        while True:
            job.go_on()
            try:
                return self._line.ask(request, kind, deadline_s=ASK_S)
            except PublisherLost:
                if time.monotonic() >= give_up:
                    raise

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, DeviceError):
            return error
        # Of this device, or of the link: the publisher may be well, and is asked when the pull is tried again.
        message = f"{self._name()}: {error}"
        return WeightSyncError(message) if self.num_connected else TransportUnusable(message)

    def _name(self) -> str:
        return f"{self._arena.transport} from the publisher at {self._arena.host}"


class Half:
    """This side's member of a group, being built in a thread."""

    def __init__(self, connect: Callable[[], PairGroup]) -> None:
        self.done = threading.Event()
        self._connect = connect
        self._group: PairGroup | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_abandoned = False
        threading.Thread(target=self._build, name="weight-sync-connect", daemon=True).start()

    def result(self) -> PairGroup:
        if self._group is None:
            raise self._error if self._error is not None else LinkBroken("the group was not built")
        return self._group

    def abandon(self) -> None:
        """Abort the group, now or when it is built: the library cannot be called back from that."""
        with self._lock:
            self._is_abandoned = True
        if self._group is not None:
            with contextlib.suppress(DeviceError):
                self._group.abort()

    def _build(self) -> None:
        try:
            group = self._connect()
            with self._lock:
                self._group = group
            if self._is_abandoned:
                group.abort()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        finally:
            self.done.set()


def _messages(piece: Piece, limit_bytes: int) -> Iterable[Message]:
    for offset, nbytes in cut(piece.src_off, piece.dst.numel(), limit_bytes=limit_bytes):
        start = offset - piece.src_off
        yield Message(offset, piece.dst[start : start + nbytes])


HOST = "gloo"
DEVICE = ("nccl", "hccl")


def device_transport(collective: str) -> str | None:
    """The pair transport of a backend's device memory, from `Backend.collective` (e.g. "cpu:gloo,cuda:nccl")."""
    libraries = [entry.rpartition(":")[2] for entry in collective.split(",")]
    return next((library for library in libraries if library in DEVICE), None)


def require_library(transport: str, backend: Backend) -> None:
    """
    Raises:
        TransportUnusable: `transport` does not move this backend's memory.
    """
    if transport != HOST and device_transport(backend.collective) != transport:
        raise TransportUnusable(
            f"backend {backend.name} ({backend.collective}) has no {transport}; both ends must have it, or use {HOST}"
        )


class PairReceiverEnd(ReceiverEnd):
    """Pulls from every publisher by asking it to send. One pull at a time."""

    def __init__(
        self,
        backend: Backend,
        arenas: Mapping[int, ArenaHandle],
        lines: Mapping[int, Line],
        *,
        host: str | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`host` is this process's address as publishers reach it; None takes the one that leads to them.

        Raises:
            TransportUnusable: the backend has no such library, or a publisher is on this very device.
            PlanMismatch: there is no line to a publisher.
            DeviceError: no memory for staging.
        """
        self._backend = backend
        self._host = host if host is None else require_reachable(host)
        self._timing = Timing() if timing is None else timing
        for rank, arena in arenas.items():
            _require_pair(rank, arena, backend)
            if rank not in lines:
                raise PlanMismatch(f"transport {arena.transport} asks learner {rank} to send, and has no line to it")
        staged = backend.name != "cpu" and any(arena.transport == HOST for arena in arenas.values())
        self._landing = Landing(backend, staged=staged)
        self._sources = {rank: self._inbound(arena, lines[rank]) for rank, arena in arenas.items()}

    def pull(
        self,
        rank: int,
        slot: int,
        pieces: Sequence[Piece],
        *,
        check: Callable[[], None],
        on_arrived: OnArrived = ignore,
    ) -> None:
        if on_arrived is ignore:
            self._sources[rank].pull(slot, pieces, check=check)
            return
        for done, batch in batched(pieces):
            self._sources[rank].pull(slot, batch, check=check)
            on_arrived(done)

    def counters(self) -> dict[str, int]:
        return {
            "allocations": self._landing.num_allocations(),
            "registrations": 0,
            "communicators": sum(source.num_connected for source in self._sources.values()),
        }

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._landing.close()

    def _inbound(self, arena: ArenaHandle, line: Line) -> Inbound:
        group_backend = CpuBackend() if arena.transport == HOST else self._backend

        def connect(mirror: StoreMirror) -> PairGroup:
            # In a thread of its own, so device and stream are chosen here again.
            with self._landing.enter():
                host = own_address(arena.host) if self._host is None else self._host
                return group_backend.process_group(mirror.store, rank=1, timeout_s=self._timing.connect_s, host=host)

        return Inbound(arena, line, self._landing, connect=connect, timing=self._timing)


def _require_pair(rank: int, arena: ArenaHandle, backend: Backend) -> None:
    require_library(arena.transport, backend)
    own = backend.device_identity()
    if arena.transport != HOST and own and own == arena.device:
        raise TransportUnusable(
            f"learner {rank} and this worker share device {own}, and {arena.transport} cannot connect a device with "
            f"itself; use ipc, or {HOST}"
        )
