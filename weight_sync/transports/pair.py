"""Two-sided transports: the publisher sends, the receiver receives, over a group of two. Any host, any device.

    receiver                                          publisher
      meet(group, store entries) ───────────────────>   builds its half, in a thread (only while no group stands)
      send(group, slot, ranges)  ───────────────────>   queues them, answers at once
      <═══════════ one message per range, in order ══   a thread sends, while there is something to send
      watch(group)               ───────────────────>   how far it is, or what went wrong

`nccl` (also RCCL), `hccl` and `gloo` are this one implementation; they differ in `Backend.process_group` only. `gloo`
moves host memory: with an accelerator on either side, slots are copied to the host when sealed, and what arrives is
copied to the device. Groups are built by the first pull and kept. A pull that is stopped or fails aborts its group on
both sides, so a late message can never be taken for one of the next pull, which builds a new group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PlanMismatch, TransportUnusable
from weight_sync.transports.base import Line, OnArrived, Piece, ReceiverEnd, batched, ignore
from weight_sync.transports.inbound import Inbound, Landing
from weight_sync.transports.messages import Timing
from weight_sync.transports.rendezvous import StoreMirror, own_address, require_reachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.device.process_groups import PairGroup
    from weight_sync.wire import ArenaHandle

HOST = "gloo"
DEVICE = ("nccl", "hccl")


def device_transport(collective: str) -> str | None:
    """The pair transport of a backend's device memory, from `Backend.collective` (e.g. "cpu:gloo,cuda:nccl")."""
    libraries = [entry.rpartition(":")[2] for entry in collective.split(",")]
    return next((library for library in libraries if library in DEVICE), None)


def require_library(transport: str, backend: Backend) -> None:
    """
    Raises:
        TransportUnusable: `transport` does not move this backend's memory.
    """
    if transport != HOST and device_transport(backend.collective) != transport:
        raise TransportUnusable(
            f"backend {backend.name} ({backend.collective}) has no {transport}; both ends must have it, or use {HOST}"
        )


class PairReceiverEnd(ReceiverEnd):
    """Pulls from every publisher by asking it to send. One pull at a time."""

    def __init__(
        self,
        backend: Backend,
        arenas: Mapping[int, ArenaHandle],
        lines: Mapping[int, Line],
        *,
        host: str | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`host` is this process's address as publishers reach it; None takes the one that leads to them.

        Raises:
            TransportUnusable: the backend has no such library, or a publisher is on this very device.
            PlanMismatch: there is no line to a publisher.
            DeviceError: no memory for staging.
        """
        self._backend = backend
        self._host = host if host is None else require_reachable(host)
        self._timing = Timing() if timing is None else timing
        for rank, arena in arenas.items():
            _require_pair(rank, arena, backend)
            if rank not in lines:
                raise PlanMismatch(f"transport {arena.transport} asks learner {rank} to send, and has no line to it")
        staged = backend.name != "cpu" and any(arena.transport == HOST for arena in arenas.values())
        self._landing = Landing(backend, staged=staged)
        self._sources = {rank: self._inbound(arena, lines[rank]) for rank, arena in arenas.items()}

    def pull(
        self,
        rank: int,
        slot: int,
        pieces: Sequence[Piece],
        *,
        check: Callable[[], None],
        on_arrived: OnArrived = ignore,
    ) -> None:
        if on_arrived is ignore:
            self._sources[rank].pull(slot, pieces, check=check)
            return
        for done, batch in batched(pieces):
            self._sources[rank].pull(slot, batch, check=check)
            on_arrived(done)

    def counters(self) -> dict[str, int]:
        return {
            "allocations": self._landing.num_allocations(),
            "registrations": 0,
            "communicators": sum(source.num_connected for source in self._sources.values()),
        }

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._landing.close()

    def _inbound(self, arena: ArenaHandle, line: Line) -> Inbound:
        group_backend = CpuBackend() if arena.transport == HOST else self._backend

        def connect(mirror: StoreMirror) -> PairGroup:
            # In a thread of its own, so device and stream are chosen here again.
            with self._landing.enter():
                host = own_address(arena.host) if self._host is None else self._host
                return group_backend.process_group(mirror.store, rank=1, timeout_s=self._timing.connect_s, host=host)

        return Inbound(arena, line, self._landing, connect=connect, timing=self._timing)


def _require_pair(rank: int, arena: ArenaHandle, backend: Backend) -> None:
    require_library(arena.transport, backend)
    own = backend.device_identity()
    if arena.transport != HOST and own and own == arena.device:
        raise TransportUnusable(
            f"learner {rank} and this worker share device {own}, and {arena.transport} cannot connect a device with "
            f"itself; use ipc, or {HOST}"
        )
