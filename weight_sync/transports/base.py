"""The data plane, as two small ends: a publisher's slots, and a receiver's way to read byte runs out of them.

Neither knows about versions, leases or digests; those protect the bytes whatever the transport is. A transport either
maps the slots into the receiver (`mapped`: the publisher does nothing while it is read) or has the publisher send
(`pair`). A publisher has one `SlotExporter`: one memory and every transport to read it by; a receiver has a
`SelectedReader` for each publisher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from weight_sync.messages import ArenaHandle, Request

PROBE_BYTES = 1 << 20
SLOT_ALIGN_BYTES = 4096
BATCH_BYTES = 128 << 20
"""Bytes between two reports: 0.35 ms of a 381 GB/s link. Two batches are under way at a time, each on a stream of its
own, so the link does not wait for the reports. Smaller ones would: to return from a wait takes the interpreter lock,
which an engine's main thread may hold."""
QUIET_BATCH_BYTES = 1 << 30
"""The same where nobody waits for reports: 2.7 ms, so that a busy interpreter does not starve the link."""
BATCH_PIECES = 256
"""So that thousands of tiny pieces do not keep anybody waiting."""
BATCHES_IN_FLIGHT = 2
R = TypeVar("R")


class Piece(NamedTuple):
    """One copy: `dst.numel()` bytes from `src_off` in a source's slot into `dst` (uint8, contiguous)."""

    src_off: int
    dst: torch.Tensor


Check = Callable[[], None]
OnArrived = Callable[[int], None]
"""Receives how many pieces, counted from the first, have arrived."""


class Line(Protocol):
    """An authenticated line to one publisher, for questions. `channel.ControlClient` is one."""

    def ask(self, request: Request, kind: type[R], *, deadline_s: float) -> R:
        """
        Raises:
            PublisherLost: no answer within `deadline_s`.
            WeightSyncError: (its subclass) the publisher refused.
        """
        ...


def ignore(num_pieces: int) -> None:
    """Nobody wants to know."""
    del num_pieces


def batched(pieces: Sequence[Piece], *, max_bytes: int | None = None) -> Iterator[tuple[int, Sequence[Piece]]]:
    """(pieces done after it, batch): in batches of at most `max_bytes` (None: `BATCH_BYTES`)."""
    limit, done = BATCH_BYTES if max_bytes is None else max_bytes, 0
    while done < len(pieces):
        first, size = done, 0
        while done < len(pieces) and done - first < BATCH_PIECES:
            size += pieces[done].dst.numel()
            if size > limit and done > first:
                break
            done += 1
        yield done, pieces[first:done]


def slot_stride(slot_bytes: int) -> int:
    return -(-slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


def slot_pieces(stride: int, slot_bytes: int, num_slots: int) -> list[tuple[int, int]]:
    """(offset, bytes) of every slot."""
    return [(index * stride, slot_bytes) for index in range(num_slots)]


def arena_bytes(slot_bytes: int, num_slots: int) -> int:
    """Of a publisher's block: its slots, and a page with the probe pattern behind them. 0 if it publishes nothing."""
    return slot_stride(slot_bytes) * num_slots + min(PROBE_BYTES, slot_bytes)


def require_slot(arena: ArenaHandle, slot: int) -> None:
    """
    Raises:
        ValueError: the arena has no such slot.
    """
    if not 0 <= slot <= arena.num_slots:
        raise ValueError(f"slot must be in [0, {arena.num_slots}] (the last is the probe), got {slot}")


class SourceReader(ABC):
    """Reads the slots of one publisher."""

    @abstractmethod
    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        """Bring `pieces` of a slot, in this order, and wait for them. `on_arrived` receives how many there are.

        `check` is called in between, at least twice a second where bytes have to be waited for, and may raise to stop.
        Whether this returns or raises, nothing is written into the pieces afterwards.

        Raises:
            ValueError: no such slot.
            PublisherLost: the publisher's control line is silent (transports that wait for it).
            TransportUnusable: the first connection to it failed (likewise).
            WeightSyncError: (itself) this device or the link failed (likewise).
        """

    def disconnect(self) -> None:
        """Free the connection; the next pull makes a new one. Nothing where there is none."""
        return

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Allocations, registrations and communicators made so far."""

    @abstractmethod
    def close(self) -> None:
        """Free all there is. Idempotent."""


PIECE_BYTES = 64 << 20
"""Largest single copy: 64 MiB reaches the full link speed; 4 MiB reaches three quarters of it."""


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the copies that `nbytes` contiguous bytes are moved in."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, nbytes - start)
