"""The memory of a publisher's slots: on the device, or on the host with one staging slot on the device."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import ArenaHandle
from weight_sync.transports.base import PROBE_BYTES, arena_bytes, slot_pieces, slot_stride

if TYPE_CHECKING:
    import torch

    from weight_sync.device.base import Backend, PersistentBlock


class SlotMemory:
    """`num_slots` slots of `slot_bytes` in one persistent block; none at all if `slot_bytes` is 0."""

    def __init__(self, backend: Backend, *, slot_bytes: int, num_slots: int, on_host: bool) -> None:
        """`backend` is the learner's. `on_host`: it packs on its device and copies to the host once, when sealing.

        Raises:
            DeviceError: not enough memory.
        """
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.stride = slot_stride(slot_bytes)
        self.probe_bytes = min(PROBE_BYTES, slot_bytes)
        self.owner = CpuBackend() if on_host else backend
        """Of the memory that receivers read."""
        self._backend = backend
        self.block: PersistentBlock | None = None
        self._staging: PersistentBlock | None = None
        self._stream: Any | None = backend.new_stream() if on_host else None
        if slot_bytes == 0:
            return
        with ExitStack() as undo:
            self.block = self.owner.alloc_persistent(arena_bytes(slot_bytes, num_slots))
            undo.callback(self.block.close)
            if self.owner.name != backend.name:
                backend.pin(self.block, slot_pieces(self.stride, slot_bytes, num_slots))
                # One is enough: packing is sequential and sealing empties it.
                self._staging = backend.alloc_persistent(slot_bytes)
            undo.pop_all()

    def readable(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes]: what receivers get once the slot is sealed. Index `num_slots` is the probe,
        uint8[probe_bytes]: a page behind the slots that is never packed, so a late receiver finds it as the first."""
        if self.block is None:
            raise ValueError("this rank publishes nothing, so it has no slots")
        size = self.probe_bytes if index == self.num_slots else self.slot_bytes
        return self.block.tensor[index * self.stride : index * self.stride + size]

    def packable(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes] on the learner's device: where to pack."""
        return self.readable(index) if self._staging is None else self._staging.tensor

    def seal(self, index: int) -> None:
        """Make `readable(index)` what was packed. Returns when it is.

        The pack must have been waited for. Runs beside the learner's compute: neither is queued behind the other.
        """
        if self._staging is not None:
            self._backend.copy_async(self.readable(index), self._staging.tensor, self._stream)
            self._backend.synchronize(self._stream)

    def num_allocations(self) -> int:
        return sum(block is not None for block in (self.block, self._staging))

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
        with ExitStack() as closing:
            for block in (self.block, self._staging):
                if block is not None:
                    closing.callback(block.close)
