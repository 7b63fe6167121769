"""Same host, host memory: works wherever two processes can map one anonymous shared-memory file.

With learners on an accelerator the version is packed on the device first and copied to the host once; receivers copy
from there to their own device. On CPU both copies vanish: the learner packs straight into the shared block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.device.cpu import CpuBackend
from weight_sync.transports.base import MappedReceiverEnd, PublisherEnd
from weight_sync.transports.slots import HostSlots

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend
    from weight_sync.wire import ArenaHandle

NAME = "shm"


class ShmPublisherEnd(PublisherEnd):
    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int) -> None:
        """
        Raises:
            DeviceError: not enough shared or device memory.
        """
        self._slots = HostSlots(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        self.handle = self._slots.handle(NAME, exported=True)

    def slot(self, index: int) -> torch.Tensor:
        return self._slots.packable(index)

    def seal(self, index: int) -> None:
        self._slots.seal(index)

    def counters(self) -> dict[str, int]:
        return {
            "allocations": self._slots.num_allocations(),
            "registrations": int(self._slots.block is not None),
        }

    def close(self) -> None:
        self._slots.close()


def open_receiver(backend: Backend, arenas: Mapping[int, ArenaHandle]) -> MappedReceiverEnd:
    return MappedReceiverEnd(CpuBackend(), backend, arenas)
