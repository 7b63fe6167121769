"""The learner's slots in memory that others can reach, for each transport.

On one host receivers map it; from elsewhere, or where mapping fails, the publisher sends it. Which way it is, each
receiver finds out for itself by probing (`select`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from weight_sync import deadlines
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import TransportUnusable
from weight_sync.messages import ArenaHandle
from weight_sync.transports import pair
from weight_sync.transports.base import PROBE_BYTES, arena_bytes, slot_pieces, slot_stride
from weight_sync.transports.mapped import DEVICE, HOST, MAPPED
from weight_sync.transports.pair import Timing, require_reachable
from weight_sync.transports.pair_sender import SenderPool

if TYPE_CHECKING:
    import torch

    from weight_sync.device.base import Backend, PersistentBlock


TRANSPORTS = (DEVICE, *pair.DEVICE, HOST, pair.HOST)
"""Fastest first."""


def offered(transport: str, backend: Backend) -> tuple[str, ...]:
    """The ways that a learner on `backend` offers for a configured transport, best first. They share one memory.

    `auto` packs where the device can read it: mapped (ipc), else sent by the device's own library, and on a device
    without one through host memory (shm, else gloo).

    Raises:
        ValueError: no such transport.
    """
    if transport not in ("auto", *TRANSPORTS):
        raise ValueError(f"weight_sync.transport must be auto, {' or '.join(TRANSPORTS)}, got {transport!r}")
    if transport != "auto":
        return (transport,)
    library = pair.device_transport(backend.collective)
    if library is None and backend.name != "cpu":
        return (HOST, pair.HOST)
    mapped = (DEVICE,) if backend.capabilities().ipc else ()
    return (*mapped, pair.HOST if library is None else library)


class SlotExporter:
    """The slots of one learner rank in one persistent block, and the transports to read them by. No memory at all if
    `slot_bytes` is 0."""

    def __init__(
        self,
        transports: tuple[str, ...],
        backend: Backend,
        *,
        slot_bytes: int,
        num_slots: int,
        host: str,
        timing: Timing | None = None,
    ) -> None:
        """
        Args:
            transports: as `offered` gives them. Those of the host share memory there: the learner packs on its device
                and copies to the host once, when sealing.
            host: this process's address as receivers reach it.

        Raises:
            TransportUnusable: the backend lacks what a transport needs, or `host` is a wildcard.
            DeviceError: not enough memory.
        """
        for name in transports:
            _require(name, backend, host)
        on_host = HOST in transports or pair.HOST in transports
        self.num_slots = num_slots
        self.owner = CpuBackend() if on_host else backend
        """Of the memory that receivers read."""
        self.block: PersistentBlock | None = None
        self._slot_bytes, self._stride = slot_bytes, slot_stride(slot_bytes)
        self._backend = backend
        self._staging: PersistentBlock | None = None
        self._stream = backend.new_stream() if on_host else None
        with ExitStack() as undo:
            undo.callback(self._free)
            if slot_bytes:
                self.block = self.owner.alloc_persistent(arena_bytes(slot_bytes, num_slots))
                if self.owner.name != backend.name:
                    backend.pin(self.block, slot_pieces(self._stride, slot_bytes, num_slots))
                    # One is enough: packing is sequential and sealing empties it.
                    self._staging = backend.alloc_persistent(slot_bytes)
            self.handles: tuple[ArenaHandle, ...] = tuple(self._handle(name, host) for name in transports)
            undo.pop_all()
        self._senders = SenderPool(self, host=host, timing=Timing() if timing is None else timing)
        self.answer = self._senders.answer
        """Answers a receiver that wants to be sent to. Called in the control thread, so it returns at once."""
        self.forget = self._senders.forget
        """Frees the communicators with a replica's workers."""

    def readable(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes]: what receivers get once the slot is sealed. Index `num_slots` is the probe."""
        if self.block is None:
            raise ValueError("this rank publishes nothing, so it has no slots")
        size = min(PROBE_BYTES, self._slot_bytes) if index == self.num_slots else self._slot_bytes
        return self.block.tensor[index * self._stride : index * self._stride + size]

    def slot(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes] on the learner's device: where version data is packed."""
        return self.readable(index) if self._staging is None else self._staging.tensor

    @property
    def probe(self) -> torch.Tensor:
        """uint8[at most 1 MiB]: a page behind the slots that is never packed. It shows receivers, early or late, that
        bytes arrive as they were written."""
        return self.readable(self.num_slots)

    def seal(self, index: int) -> None:
        """Make what was packed into `slot(index)`, and waited for, visible to receivers. Returns when it is.

        Runs beside the learner's compute: neither is queued behind the other.
        """
        if self._staging is not None:
            self._backend.copy_async(self.readable(index), self._staging.tensor, self._stream)
            self._backend.synchronize(self._stream)

    def counters(self) -> dict[str, int]:
        """Allocations, registrations and communicators made so far."""
        return {
            "allocations": sum(block is not None for block in (self.block, self._staging)),
            "registrations": int(any(handle.handle is not None for handle in self.handles)),
            "communicators": self._senders.num_connected,
        }

    def close(self) -> None:
        """Free the slots. Idempotent.

        Receivers must have unmapped them: what they read afterwards is undefined, and some drivers refuse to free.
        """
        try:
            self._senders.close(join_s=deadlines.SENDERS_CLOSE_S)
        finally:
            self._free()

    def _handle(self, transport: str, host: str) -> ArenaHandle:
        """How receivers find the slots: as mapped memory, or by asking `host`."""
        is_mapped = transport in MAPPED
        return ArenaHandle(
            transport=transport,
            handle=self.owner.ipc_export(self.block) if is_mapped and self.block is not None else None,
            slot_bytes=self._slot_bytes,
            slot_stride=self._stride,
            num_slots=self.num_slots,
            host="" if is_mapped else host,
            device="" if is_mapped else self.owner.device_identity(),
        )

    def _free(self) -> None:
        with ExitStack() as closing:
            for block in (self.block, self._staging):
                if block is not None:
                    closing.callback(block.close)


def _require(transport: str, backend: Backend, host: str) -> None:
    if transport == DEVICE and not backend.capabilities().ipc:
        raise TransportUnusable(f"backend {backend.name} cannot share device memory between processes; use shm")
    if transport not in MAPPED:
        pair.require_library(transport, backend)
        require_reachable(host)
