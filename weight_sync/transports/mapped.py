"""Same host: receivers map the slots and copy from them by address; the publisher does nothing while it is read.

`ipc` maps device memory, read by the device's copy engines. `shm` maps host memory: learners on an accelerator copy a
version to the host once, receivers copy from there to their own device. On CPU both are the same memory.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from weight_sync.device.cpu import CpuBackend
from weight_sync.transports.base import (
    BATCHES_IN_FLIGHT,
    QUIET_BATCH_BYTES,
    ReceiverEnd,
    batched,
    ignore,
    require_slot,
    slot_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.messages import ArenaHandle
    from weight_sync.transports.base import Check, OnArrived, Piece

DEVICE = "ipc"
HOST = "shm"
MAPPED = (DEVICE, HOST)


def open_mapped(transport: str, backend: Backend, arenas: Mapping[int, ArenaHandle]) -> MappedReceiverEnd:
    """
    Raises:
        DeviceError: a block cannot be mapped.
    """
    return MappedReceiverEnd(backend if transport == DEVICE else CpuBackend(), backend, arenas)


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
                    if opener is not copier:
                        slots = slot_pieces(arena.slot_stride, arena.slot_bytes, arena.num_slots)
                        copier.pin(self._blocks[rank], slots)
        except BaseException:
            self.close()
            raise

    def pull(
        self,
        rank: int,
        slot: int,
        pieces: Sequence[Piece],
        *,
        check: Check,
        on_arrived: OnArrived = ignore,
    ) -> None:
        arena = self._arenas[rank]
        require_slot(arena, slot)
        base = slot * arena.slot_stride
        flying: deque[tuple[Any | None, int]] = deque()
        free = deque(self._streams)
        try:
            for done, batch in batched(pieces, max_bytes=QUIET_BATCH_BYTES if on_arrived is ignore else None):
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
        except BaseException:
            # Whoever pulls again writes to the same places. All streams: the last batch may be there in part.
            with ExitStack() as waiting:
                for stream in self._streams:
                    waiting.callback(self._copier.synchronize, stream)
            raise
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
        """Unmap every block, also after one that cannot be; that failure is raised at the end. Idempotent."""
        with ExitStack() as closing:
            for block in self._blocks.values():
                closing.callback(block.close)
