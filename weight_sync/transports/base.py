"""The data plane, as two small ends: a publisher's slots, and a receiver's way to read byte runs out of them.

Both ends allocate everything when they are built and nothing afterwards. Neither knows about versions, leases or
digests; those protect the bytes whatever the transport is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import torch

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.wire import ArenaHandle

SLOT_ALIGN_BYTES = 4096
COPIES_IN_FLIGHT = 16
"""Copies queued before the receiver waits for them and looks at its deadline: about 1 GiB of 64 MiB pieces."""


class Piece(NamedTuple):
    """One copy: `dst.numel()` bytes from `src_off` in a source's slot into `dst` (uint8, contiguous)."""

    src_off: int
    dst: torch.Tensor


def slot_stride(slot_bytes: int) -> int:
    return -(-slot_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES


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

    @abstractmethod
    def counters(self) -> dict[str, int]:
        """Allocations and registrations made so far."""

    @abstractmethod
    def close(self) -> None:
        """Free the slots. Idempotent. Receivers that still have them mapped keep valid memory."""


class ReceiverEnd:
    """Reads any publisher's slots by address: every transport that can map them is one of these.

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
        """Copy `pieces` of `rank`'s slot and wait for them. `check` is called in between and may raise to stop."""
        arena = self._arenas[rank]
        if not 0 <= slot < arena.num_slots:
            raise ValueError(f"slot must be in [0, {arena.num_slots}), got {slot}")
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
        """Unmap everything. Idempotent."""
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
