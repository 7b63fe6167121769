"""The learner's slots in memory that others can reach, for each transport.

On one host receivers map it; from elsewhere, or where mapping fails, the publisher sends it. Which way it is, each
receiver finds out for itself by probing (`select`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync import deadlines
from weight_sync.errors import TransportUnusable
from weight_sync.transports import pair
from weight_sync.transports.mapped import DEVICE, HOST, MAPPED
from weight_sync.transports.pair import Timing, require_reachable
from weight_sync.transports.pair_sender import SenderPool
from weight_sync.transports.slots import SlotMemory

if TYPE_CHECKING:
    import torch

    from weight_sync.device.base import Backend
    from weight_sync.messages import ArenaHandle, TransportRequest, TransportResponse


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
    """The slots of one learner rank, and the transports to read them by."""

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
            transports: as `offered` gives them.
            host: this process's address as receivers reach it.

        Raises:
            TransportUnusable: the backend lacks what a transport needs, or `host` is a wildcard.
            DeviceError: not enough memory.
        """
        for name in transports:
            _require(name, backend, host)
        on_host = HOST in transports or pair.HOST in transports
        self._slots = SlotMemory(backend, slot_bytes=slot_bytes, num_slots=num_slots, on_host=on_host)
        try:
            self.handles: tuple[ArenaHandle, ...] = tuple(
                self._slots.handle(name, exported=name in MAPPED, host="" if name in MAPPED else host)
                for name in transports
            )
        except BaseException:
            self._slots.close()
            raise
        self._senders = SenderPool(self._slots, host=host, timing=Timing() if timing is None else timing)

    def slot(self, index: int) -> torch.Tensor:
        """uint8[slot_bytes] on the learner's device: where version data is packed."""
        return self._slots.packable(index)

    @property
    def probe(self) -> torch.Tensor:
        """uint8[at most 1 MiB]: shows receivers, early or late, that bytes arrive as they were written."""
        return self._slots.readable(self._slots.num_slots)

    def seal(self, index: int) -> None:
        """Make what was packed into `slot(index)`, and waited for, visible to receivers. Returns when it is."""
        self._slots.seal(index)

    def answer(self, sender: str, request: TransportRequest) -> TransportResponse:
        """Answer a receiver that wants to be sent to. Called in the control thread, so it returns at once.

        Raises:
            VersionUnavailable: the receiver speaks of a connection that is not its current one.
            ValueError: a slot or range that does not exist.
        """
        return self._senders.answer(sender, request)

    def forget(self, replica: str) -> None:
        """Free the communicators with this replica's workers."""
        self._senders.forget(replica)

    def counters(self) -> dict[str, int]:
        """Allocations, registrations and communicators made so far."""
        is_mapped = any(handle.handle is not None for handle in self.handles)
        return {
            "allocations": self._slots.num_allocations(),
            "registrations": int(is_mapped),
            "communicators": self._senders.num_connected,
        }

    def close(self) -> None:
        """Free the slots. Idempotent.

        Receivers must have unmapped them: what they read afterwards is undefined, and some drivers refuse to free.
        """
        try:
            self._senders.close(join_s=deadlines.SENDERS_CLOSE_S)
        finally:
            self._slots.close()


def _require(transport: str, backend: Backend, host: str) -> None:
    if transport == DEVICE and not backend.capabilities().ipc:
        raise TransportUnusable(f"backend {backend.name} cannot share device memory between processes; use shm")
    if transport not in MAPPED:
        pair.require_library(transport, backend)
        require_reachable(host)
