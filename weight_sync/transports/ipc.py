"""Same host, device memory: receivers map the arena itself and copy from it with the device's copy engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import TransportUnusable
from weight_sync.transports.base import PublisherEnd, ReceiverEnd, slot_stride
from weight_sync.wire import ArenaHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend

NAME = "ipc"


class IpcPublisherEnd(PublisherEnd):
    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int) -> None:
        """
        Raises:
            TransportUnusable: this backend cannot share its memory between processes.
            DeviceError: the allocation or the export failed.
        """
        if not backend.capabilities().ipc:
            raise TransportUnusable(f"backend {backend.name} cannot share device memory between processes; use shm")
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._stride = slot_stride(slot_bytes)
        self._block = backend.alloc_persistent(self._stride * num_slots) if slot_bytes else None
        self.handle = ArenaHandle(
            transport=NAME,
            handle=None if self._block is None else backend.ipc_export(self._block),
            slot_bytes=slot_bytes,
            slot_stride=self._stride,
            num_slots=num_slots,
        )

    def slot(self, index: int) -> torch.Tensor:
        if self._block is None:
            raise ValueError("this rank publishes nothing, so it has no slots")
        return self._block.tensor[index * self._stride : index * self._stride + self._slot_bytes]

    def seal(self, index: int) -> None:
        self._backend.synchronize()

    def counters(self) -> dict[str, int]:
        has_block = int(self._block is not None)
        return {"allocations": has_block, "registrations": has_block}

    def close(self) -> None:
        if self._block is not None:
            self._block.close()


def open_receiver(backend: Backend, arenas: Mapping[int, ArenaHandle]) -> ReceiverEnd:
    return ReceiverEnd(backend, backend, arenas)
