"""Same host, host memory: works wherever two processes can map one anonymous shared-memory file.

With learners on an accelerator the version is packed on the device first and copied to the host once; receivers copy
from there to their own device. On CPU both copies vanish: the learner packs straight into the shared block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.device.cpu import CpuBackend
from weight_sync.transports.base import PublisherEnd, ReceiverEnd, slot_stride
from weight_sync.wire import ArenaHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend, PersistentBlock

NAME = "shm"


class ShmPublisherEnd(PublisherEnd):
    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int) -> None:
        """
        Raises:
            DeviceError: not enough shared or device memory.
        """
        host = CpuBackend()
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._stride = slot_stride(slot_bytes)
        self._block = host.alloc_persistent(self._stride * num_slots) if slot_bytes else None
        # One staging slot is enough: packing is sequential and sealing empties it.
        needs_staging = slot_bytes > 0 and backend.name != host.name
        self._staging: PersistentBlock | None = backend.alloc_persistent(slot_bytes) if needs_staging else None
        self.handle = ArenaHandle(
            transport=NAME,
            handle=None if self._block is None else host.ipc_export(self._block),
            slot_bytes=slot_bytes,
            slot_stride=self._stride,
            num_slots=num_slots,
        )

    def slot(self, index: int) -> torch.Tensor:
        return self._host_slot(index) if self._staging is None else self._staging.tensor

    def seal(self, index: int) -> None:
        if self._staging is not None:
            self._backend.synchronize()
            self._backend.copy_async(self._host_slot(index), self._staging.tensor)
            self._backend.synchronize()

    def counters(self) -> dict[str, int]:
        blocks = [block for block in (self._block, self._staging) if block is not None]
        return {"allocations": len(blocks), "registrations": int(self._block is not None)}

    def close(self) -> None:
        for block in (self._block, self._staging):
            if block is not None:
                block.close()

    def _host_slot(self, index: int) -> torch.Tensor:
        if self._block is None:
            raise ValueError("this rank publishes nothing, so it has no slots")
        return self._block.tensor[index * self._stride : index * self._stride + self._slot_bytes]


def open_receiver(backend: Backend, arenas: Mapping[int, ArenaHandle]) -> ReceiverEnd:
    return ReceiverEnd(CpuBackend(), backend, arenas)
