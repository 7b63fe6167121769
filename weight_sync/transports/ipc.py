"""Same host, device memory: receivers map the arena itself and copy from it with the device's copy engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import TransportUnusable
from weight_sync.transports.base import MappedReceiverEnd, PublisherEnd
from weight_sync.transports.slots import DeviceSlots

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend
    from weight_sync.wire import ArenaHandle

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
        self._slots = DeviceSlots(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        self.handle = self._slots.handle(NAME, exported=True)

    def slot(self, index: int) -> torch.Tensor:
        return self._slots.packable(index)

    def seal(self, index: int) -> None:
        self._slots.seal(index)

    def counters(self) -> dict[str, int]:
        num_blocks = self._slots.num_allocations()
        return {"allocations": num_blocks, "registrations": num_blocks}

    def close(self) -> None:
        self._slots.close()


def open_receiver(backend: Backend, arenas: Mapping[int, ArenaHandle]) -> MappedReceiverEnd:
    return MappedReceiverEnd(backend, backend, arenas)
