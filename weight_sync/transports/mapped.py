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
    SourceReader,
    batched,
    ignore,
    require_slot,
    slot_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.messages import ArenaHandle
    from weight_sync.transports.base import Check, OnArrived, Piece

DEVICE = "ipc"
HOST = "shm"
MAPPED = (DEVICE, HOST)


class MappedReader(SourceReader):
    """Reads slots by address: every transport that can map them is one of these."""

    def __init__(self, backend: Backend, arena: ArenaHandle) -> None:
        """`backend` moves bytes to the device of the engine.

        Raises:
            DeviceError: the block cannot be mapped.
        """
        self._copier = backend
        self._arena = arena
        self._streams: tuple[Any | None, ...] = tuple(backend.new_stream() for _ in range(BATCHES_IN_FLIGHT))
        self._block: PersistentBlock | None = None
        if arena.handle is not None:
            opener = backend if arena.transport == DEVICE else CpuBackend()
            self._block = opener.ipc_open(arena.handle)
            if opener is not backend:
                backend.pin(self._block, slot_pieces(arena.slot_stride, arena.slot_bytes, arena.num_slots))

    def pull(self, slot: int, pieces: Sequence[Piece], *, check: Check, on_arrived: OnArrived = ignore) -> None:
        require_slot(self._arena, slot)
        base = slot * self._arena.slot_stride
        flying: deque[tuple[Any | None, int]] = deque()
        free = deque(self._streams)
        try:
            for done, batch in batched(pieces, max_bytes=QUIET_BATCH_BYTES if on_arrived is ignore else None):
                check()
                if not free:
                    self._land(flying, free, on_arrived)
                stream = free.popleft()
                assert self._block is not None
                for piece in batch:
                    start = base + piece.src_off
                    source = self._block.tensor[start : start + piece.dst.numel()]
                    self._copier.copy_async(piece.dst, source, stream)
                flying.append((stream, done))
            while flying:
                self._land(flying, free, on_arrived)
        except BaseException:
            # A caller that pulls again writes to the same places. All streams: the last batch may be there in part.
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
        return {"registrations": int(self._block is not None)}

    def close(self) -> None:
        """Unmap the block. A refused one may be closed again. Idempotent."""
        if self._block is not None:
            self._block.close()
