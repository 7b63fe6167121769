"""Transports by name, and the order in which `auto` tries them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import PlanMismatch
from weight_sync.transports import ipc, shm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.device.base import Backend
    from weight_sync.transports.base import PublisherEnd, ReceiverEnd
    from weight_sync.wire import ArenaHandle

AUTO_ORDER = (ipc.NAME, shm.NAME)
"""Fastest first."""


def candidates(transport: str) -> tuple[str, ...]:
    """What to try, in order, for a configured transport.

    Raises:
        ValueError: no such transport.
    """
    if transport == "auto":
        return AUTO_ORDER
    if transport not in AUTO_ORDER:
        raise ValueError(f"weight_sync.transport must be auto, {' or '.join(AUTO_ORDER)}, got {transport!r}")
    return (transport,)


def open_publisher_end(transport: str, backend: Backend, *, slot_bytes: int, num_slots: int) -> PublisherEnd:
    """Allocate the slots of one learner rank."""
    match transport:
        case ipc.NAME:
            return ipc.IpcPublisherEnd(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        case shm.NAME:
            return shm.ShmPublisherEnd(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        case _:
            raise ValueError(f"unknown transport {transport!r}, known: {', '.join(AUTO_ORDER)}")


def open_receiver_end(backend: Backend, arenas: Mapping[int, ArenaHandle]) -> ReceiverEnd:
    """Map the slots of every learner rank.

    Raises:
        PlanMismatch: the ranks do not all use one known transport.
    """
    names = {arena.transport for arena in arenas.values()}
    if names == {ipc.NAME}:
        return ipc.open_receiver(backend, arenas)
    if names == {shm.NAME}:
        return shm.open_receiver(backend, arenas)
    raise PlanMismatch(f"learner ranks offer transports {sorted(names)}; all must use one of {', '.join(AUTO_ORDER)}")
