"""The data plane, as two small ends: a publisher's slots, and a receiver's way to read byte runs out of them.

Both ends allocate everything when they are built and nothing afterwards. Neither knows about versions, leases or
digests; those protect the bytes whatever the transport is. A transport either maps the slots into the receiver
(`MappedReceiverEnd`: the publisher does nothing while it is read) or has the publisher send (`pair`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from weight_sync.errors import VersionUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from weight_sync.control import Request, TransportRequest, TransportResponse
    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.wire import ArenaHandle

SLOT_ALIGN_BYTES = 4096
COPIES_IN_FLIGHT = 16
"""Copies queued before the receiver waits for them and looks at its deadline: about 1 GiB of 64 MiB pieces."""
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
    def pull(self, rank: int, slot: int, pieces: Iterable[Piece], *, check: Callable[[], None]) -> None:
        """Bring `pieces` of `rank`'s slot and wait for them.

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
        self._stream: Any | None = copier.new_stream()
        self._blocks: dict[int, PersistentBlock] = {}
        try:
            for rank, arena in self._arenas.items():
                if arena.handle is not None:
                    self._blocks[rank] = opener.ipc_open(arena.handle)
        except BaseException:
            self.close()
            raise

    def pull(self, rank: int, slot: int, pieces: Iterable[Piece], *, check: Callable[[], None]) -> None:
        arena = self._arenas[rank]
        require_slot(arena, slot)
        base = slot * arena.slot_stride
        for number, piece in enumerate(pieces, start=1):
            check()
            start = base + piece.src_off
            source = self._blocks[rank].tensor[start : start + piece.dst.numel()]
            self._copier.copy_async(piece.dst, source, self._stream)
            if number % COPIES_IN_FLIGHT == 0:
                self._copier.synchronize(self._stream)
        self._copier.synchronize(self._stream)
        check()

    def counters(self) -> dict[str, int]:
        return {"registrations": len(self._blocks)}

    def close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
