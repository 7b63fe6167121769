"""The memory of a publisher's slots: on the device, or on the host with one staging slot on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import ArenaHandle
from weight_sync.transports.base import PROBE_BYTES, arena_bytes, slot_pieces, slot_stride

if TYPE_CHECKING:
    import torch

    from weight_sync.device.base import Backend, PersistentBlock


class Slots(ABC):
    """`num_slots` slots of `slot_bytes` in one persistent block; none at all if `slot_bytes` is 0."""

    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int) -> None:
        """`backend` owns the memory that receivers read.

        Raises:
            DeviceError: not enough memory.
        """
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.stride = slot_stride(slot_bytes)
        self.owner = backend
        self.probe_bytes = min(PROBE_BYTES, slot_bytes)
        size = arena_bytes(slot_bytes, num_slots)
        self.block: PersistentBlock | None = backend.alloc_persistent(size) if size else None

    def readable(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes]: what receivers get once the slot is sealed. Index `num_slots` is the probe,
        uint8[probe_bytes]: a page behind the slots that is never packed, so a late receiver finds it as the first."""
        if self.block is None:
            raise ValueError("this rank publishes nothing, so it has no slots")
        size = self.probe_bytes if index == self.num_slots else self.slot_bytes
        return self.block.tensor[index * self.stride : index * self.stride + size]

    @abstractmethod
    def packable(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes] on the learner's device: where to pack."""

    @abstractmethod
    def seal(self, index: int) -> None:
        """Make `readable(index)` what was packed. Returns when it is.

        The pack must have been waited for. Runs beside the learner's compute: neither is queued behind the other.
        """

    def num_allocations(self) -> int:
        return int(self.block is not None)

    def handle(self, transport: str, *, exported: bool, host: str = "") -> ArenaHandle:
        """How receivers find the slots: mapped memory if `exported`, else by asking `host`."""
        shared = None if self.block is None or not exported else self.owner.ipc_export(self.block)
        return ArenaHandle(
            transport=transport,
            handle=shared,
            slot_bytes=self.slot_bytes,
            slot_stride=self.stride,
            num_slots=self.num_slots,
            host=host,
            device="" if exported else self.owner.device_identity(),
        )

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self.block is not None:
            self.block.close()


class DeviceSlots(Slots):
    """Packed where they are read: in the learner's device memory."""

    def packable(self, index: int) -> torch.Tensor:
        return self.readable(index)

    def seal(self, index: int) -> None:
        return


class HostSlots(Slots):
    """In host memory. Learners on an accelerator pack on the device and copy to the host once, when sealing."""

    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int) -> None:
        host = CpuBackend()
        super().__init__(host, slot_bytes=slot_bytes, num_slots=num_slots)
        if self.block is not None:
            backend.pin(self.block, slot_pieces(self.stride, slot_bytes, num_slots))
        self._device = backend
        self._stream: Any | None = backend.new_stream()
        # One staging slot is enough: packing is sequential and sealing empties it.
        needs_staging = slot_bytes > 0 and backend.name != host.name
        try:
            self._staging = backend.alloc_persistent(slot_bytes) if needs_staging else None
        except BaseException:
            super().close()
            raise

    def packable(self, index: int) -> torch.Tensor:
        return self.readable(index) if self._staging is None else self._staging.tensor

    def seal(self, index: int) -> None:
        if self._staging is not None:
            self._device.copy_async(self.readable(index), self._staging.tensor, self._stream)
            self._device.synchronize(self._stream)

    def num_allocations(self) -> int:
        return super().num_allocations() + int(self._staging is not None)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._staging is not None:
                self._staging.close()
