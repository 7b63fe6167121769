"""Transports by name, and the order in which `auto` tries them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.errors import PlanMismatch
from weight_sync.transports import ipc, pair, shm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.device.base import Backend
    from weight_sync.transports.base import Line, PublisherEnd, ReceiverEnd
    from weight_sync.wire import ArenaHandle

MAPPED = (ipc.NAME, shm.NAME)
PAIRS = (*pair.DEVICE, pair.HOST)
TRANSPORTS = (ipc.NAME, *pair.DEVICE, shm.NAME, pair.HOST)
"""Fastest first."""


def candidates(transport: str, *, collective: str = pair.HOST, same_host: bool = True) -> tuple[str, ...]:
    """What to try, in order, for a configured transport.

    `collective` is `Backend.collective` of the devices, `same_host` whether all parties are on one host. A transport
    that is asked for by name is tried whatever they say.

    Raises:
        ValueError: no such transport.
    """
    if transport != "auto":
        if transport not in TRANSPORTS:
            raise ValueError(f"weight_sync.transport must be auto, {' or '.join(TRANSPORTS)}, got {transport!r}")
        return (transport,)
    device = pair.device_transport(collective)
    return tuple(
        name
        for name in TRANSPORTS
        if name == pair.HOST or (name in MAPPED and same_host) or (name == device and name in pair.DEVICE)
    )


def open_publisher_end(
    transport: str, backend: Backend, *, slot_bytes: int, num_slots: int, host: str = "127.0.0.1"
) -> PublisherEnd:
    """Allocate the slots of one learner rank. `host` is its address as receivers reach it.

    Raises:
        TransportUnusable, DeviceError: the slots cannot be made.
    """
    match transport:
        case ipc.NAME:
            return ipc.IpcPublisherEnd(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        case shm.NAME:
            return shm.ShmPublisherEnd(backend, slot_bytes=slot_bytes, num_slots=num_slots)
        case _ if transport in PAIRS:
            slots = pair.make_slots(transport, backend, slot_bytes=slot_bytes, num_slots=num_slots)
            try:
                return pair.PairPublisherEnd(transport, slots, host=host)
            except BaseException:
                slots.close()
                raise
        case _:
            raise ValueError(f"unknown transport {transport!r}, known: {', '.join(TRANSPORTS)}")


def open_receiver_end(
    backend: Backend,
    arenas: Mapping[int, ArenaHandle],
    lines: Mapping[int, Line] | None = None,
    *,
    host: str | None = None,
) -> ReceiverEnd:
    """Reach the slots of every learner rank. Two-sided transports need `lines` to them, by rank.

    `host` is this worker's address as learners reach it; None takes the one from which they are reached.

    Raises:
        PlanMismatch: the ranks do not all use one known transport, or a line is missing.
        TransportUnusable, DeviceError: a rank cannot be reached from here.
    """
    names = {arena.transport for arena in arenas.values()}
    if names == {ipc.NAME}:
        return ipc.open_receiver(backend, arenas)
    if names == {shm.NAME}:
        return shm.open_receiver(backend, arenas)
    if len(names) == 1 and names <= set(PAIRS):
        return pair.PairReceiverEnd(backend, arenas, {} if lines is None else lines, host=host)
    raise PlanMismatch(f"learner ranks offer transports {sorted(names)}; all must use one of {', '.join(TRANSPORTS)}")
