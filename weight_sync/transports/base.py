"""The data plane, as two small ends: a publisher's slots, and a receiver's way to read byte runs out of them.

Both ends allocate everything when they are built and nothing afterwards. Neither knows about versions, leases or
digests; those protect the bytes whatever the transport is. A transport either maps the slots into the receiver
(`MappedReceiverEnd`: the publisher does nothing while it is read) or has the publisher send (`pair`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weight_sync.errors import VersionUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from weight_sync.control import Request, TransportRequest, TransportResponse
    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.wire import ArenaHandle

SLOT_ALIGN_BYTES = 4096
BATCH_BYTES = 128 << 20
"""Bytes between two looks at the deadline, and between two reports: 0.35 ms of a 381 GB/s link. Two batches are under way
at a time, each on a stream of its own, so the link does not wait for the looks. Smaller ones would: to return from a
wait takes the interpreter lock, which an engine's main thread may hold."""
BATCH_PIECES = 256
"""So that thousands of tiny pieces do not keep anybody waiting."""
BATCHES_IN_FLIGHT = 2
R = TypeVar("R")


class Piece(NamedTuple):
    """One copy: `dst.numel()` bytes from `src_off` in a source's slot into `dst` (uint8, contiguous)."""

    src_off: int
    dst: torch.Tensor


class Line(Protocol):
    """An authenticated line to one publisher, for questions. `control.ControlClient` is one."""

    def ask(self, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """
        Raises:
            PublisherLost: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the publisher refused.
        """
        ...


OnArrived = Callable[[int], None]
"""Is told how many pieces, counted from the first, have arrived."""


def ignore(num_pieces: int) -> None:
    """Nobody wants to know."""
    del num_pieces


def batched(pieces: Sequence[Piece], *, done: int = 0) -> Iterator[tuple[int, Sequence[Piece]]]:
    """(pieces done after it, batch): `pieces[done:]` in batches of about `BATCH_BYTES`."""
    while done < len(pieces):
        first, size = done, 0
        while done < len(pieces) and done - first < BATCH_PIECES:
            size += pieces[done].dst.numel()
            if size > BATCH_BYTES and done > first:
                break
            done += 1
        yield done, pieces[first:done]


def slot_stride(slot_bytes: int) -> int:
    return -(-slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def require_slot(arena: ArenaHandle, slot: int) -> None:
    """
    Raises:
        ValueError: the arena has no such slot.
    """
    if not 0 <= slot < arena.num_slots:
        raise ValueError(f"slot must be in [0, {arena.num_slots}), got {slot}")


class PublisherEnd(ABC):
    """The slots of one learner rank."""

    handle: ArenaHandle
    """How receivers find the slots."""

    @abstractmethod
    def slot(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes] on the learner's device: where version data is packed."""

    @abstractmethod
    def seal(self, index: int) -> None:
        """Make what was packed into `slot(index)` visible to receivers. Returns when it is."""

    def answer(self, sender: str, request: TransportRequest) -> TransportResponse:
        """Answer a receiver's end. Called in the control thread, so it returns at once; work has threads of its own.

        Raises:
            VersionUnavailable: receivers of this transport have nothing to ask.
            ValueError: the request makes no sense, e.g. a slot that does not exist.
        """
        raise VersionUnavailable(
            f"{sender} sent a {type(request).__name__}, but transport {self.handle.transport} is read, not asked; "
            "open both sides with the same transport"
        )

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Allocations, registrations and communicators made so far."""

    @abstractmethod
    def close(self) -> None:
        """Free the slots. Idempotent. Receivers that still have them mapped keep valid memory."""


class ReceiverEnd(ABC):
    """Reads the slots of every publisher it was opened with."""

    @abstractmethod
    def pull(
        self,
        rank: int,
        slot: int,
        pieces: Sequence[Piece],
        *,
        check: Callable[[], None],
        on_arrived: OnArrived = ignore,
    ) -> None:
        """Bring `pieces` of `rank`'s slot, in this order, and wait for them. `on_arrived` is told how many there are.

        `check` is called in between, at least twice a second where bytes have to be waited for, and may raise to stop.
        Whether this returns or raises, nothing is written into the pieces afterwards.

        Raises:
            ValueError: no such slot.
            PublisherLost: the publisher ended or went silent (transports that wait for it).
            TransportUnusable: the first connection to it failed (likewise).
        """

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Allocations, registrations and communicators made so far."""

    @abstractmethod
    def close(self) -> None:
        """Let go of every publisher. Idempotent."""


class MappedReceiverEnd(ReceiverEnd):
    """Reads slots by address: every transport that can map them is one of these.

    `opener` maps the blocks, `copier` moves bytes from them to the device of the engine; on one kind of device they are
    the same backend.
    """

    def __init__(self, opener: Backend, copier: Backend, arenas: Mapping[int, ArenaHandle]) -> None:
        """
        Raises:
            DeviceError: a block cannot be mapped.
        """
        self._copier = copier
        self._arenas = dict(arenas)
        self._streams: tuple[Any | None, ...] = tuple(copier.new_stream() for _ in range(BATCHES_IN_FLIGHT))
        self._blocks: dict[int, PersistentBlock] = {}
        try:
            for rank, arena in self._arenas.items():
                if arena.handle is not None:
                    self._blocks[rank] = opener.ipc_open(arena.handle)
        except BaseException:
            self.close()
            raise

    def pull(
        self,
        rank: int,
        slot: int,
        pieces: Sequence[Piece],
        *,
        check: Callable[[], None],
        on_arrived: OnArrived = ignore,
    ) -> None:
        arena = self._arenas[rank]
        require_slot(arena, slot)
        base = slot * arena.slot_stride
        flying: deque[tuple[Any | None, int]] = deque()
        free = deque(self._streams)
        try:
            for done, batch in batched(pieces):
                check()
                if not free:
                    self._land(flying, free, on_arrived)
                stream = free.popleft()
                for piece in batch:
                    start = base + piece.src_off
                    source = self._blocks[rank].tensor[start : start + piece.dst.numel()]
                    self._copier.copy_async(piece.dst, source, stream)
                flying.append((stream, done))
            while flying:
                self._land(flying, free, on_arrived)
        finally:
            # After an error too: whoever pulls again writes to the same places.
            for stream, _ in flying:
                self._copier.synchronize(stream)
        check()

    def _land(self, flying: deque[tuple[Any | None, int]], free: deque[Any | None], on_arrived: OnArrived) -> None:
        """Wait for the oldest batch."""
        stream, done = flying[0]
        self._copier.synchronize(stream)
        flying.popleft()
        free.append(stream)
        on_arrived(done)

    def counters(self) -> dict[str, int]:
        return {"registrations": len(self._blocks)}

    def close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
