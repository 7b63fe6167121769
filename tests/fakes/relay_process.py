"""Receivers that relay to each other, here or in processes that can be killed or stopped."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from tests.fakes.processes import Child
from weight_sync.device.select import get_backend
from weight_sync.messages import RelayHandle, decode, encode
from weight_sync.plan.types import PullPlan, Run
from weight_sync.receive.relay import RelayInlet, RelayOutlet, map_shadow
from weight_sync.receive.staging import shadow_plan
from weight_sync.transports.base import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCES = (2, 5)
NUM_PIECES = 24


def nothing() -> None:
    return None


class Replica:
    """A shadow block laid out by `shadow_plan`: `NUM_PIECES` pieces of each of two sources."""

    def __init__(self, *, device: str = "cpu", index: int = 0, piece_bytes: int = 1000) -> None:
        self.backend = get_backend(device)
        self.backend.set_device(index)
        # The second source has a hole wider than what is merged: two ranges, with padding between them.
        places = [(2, i * piece_bytes) for i in range(NUM_PIECES)]
        places += [(5, i * piece_bytes + 9000 * (i > 10)) for i in range(NUM_PIECES)]
        runs = [
            Run(src_rank=r, src_off=o, dst_param="w", dst_off=0, nbytes=piece_bytes - 7 * (r == 5)) for r, o in places
        ]
        plan = shadow_plan(PullPlan.of(0, runs))
        self.block = self.backend.alloc_persistent(plan.nbytes)
        placed = list(zip(runs, plan.run_offsets, strict=True))
        self.pieces: dict[int, Sequence[Piece]] = {
            rank: tuple(
                Piece(run.src_off, self.block.tensor[at : at + run.nbytes])
                for run, at in placed
                if run.src_rank == rank
            )
            for rank in SOURCES
        }
        self.map = map_shadow(self.block, self.pieces)

    def fill(self, rank: int, version: int, pieces: slice = slice(None)) -> None:
        """What a pull from the learner would do."""
        for piece in self.pieces[rank][pieces]:
            piece.dst.copy_(expected(rank, version, piece))
        self.backend.synchronize()

    def holds(self, rank: int, version: int, num_pieces: int = NUM_PIECES) -> bool:
        return all(torch.equal(p.dst, expected(rank, version, p)) for p in self.pieces[rank][:num_pieces])


def expected(rank: int, version: int, piece: Piece) -> torch.Tensor:
    first = piece.src_off + rank * 31 + version * 101
    numbers = torch.arange(first, first + piece.dst.numel(), dtype=torch.int32, device=piece.dst.device)
    return (numbers % 251).to(torch.uint8)


class Member:
    """What a relay process can be ordered to do."""

    def __init__(self, owner: str, shape: dict[str, Any]) -> None:
        self.replica = Replica(**shape)
        self.outlet = RelayOutlet(self.replica.backend, self.replica.map, owner=owner)
        self.inlet: RelayInlet | None = None
        self.version, self.filled = -1, 0

    def handle(self) -> bytes:
        return encode(self.outlet.handle)

    def follow(self, handle: bytes) -> None:
        self.inlet = RelayInlet(self.replica.backend, decode(handle, RelayHandle), self.replica.map, patience_s=20.0)

    def begin(self, version: int) -> None:
        self.version, self.filled = version, 0
        self.outlet.begin(version)

    def fill(self, num_pieces: int) -> None:
        """The next pieces of source 2."""
        self.replica.fill(2, self.version, slice(self.filled, self.filled + num_pieces))
        self.filled += num_pieces
        self.outlet.advance(2, self.filled)

    def offer(self) -> None:
        """Everything, at once."""
        for rank in SOURCES:
            self.replica.fill(rank, self.version)
            self.outlet.advance(rank, NUM_PIECES)

    def pull(self) -> tuple[float, float]:
        """Everything, along the chain; when it began and ended (seconds of the machine's clock)."""
        assert self.inlet is not None
        began = time.monotonic()
        for rank in SOURCES:
            self.inlet.pull(rank, self.version, check=nothing, outlet=self.outlet)
        return began, time.monotonic()

    def holds(self, version: int) -> bool:
        return all(self.replica.holds(rank, version) for rank in SOURCES)

    def close(self) -> None:
        """Its process ends."""


class RelayProcess(Child):
    """A `Member`."""

    def __init__(self, owner: str, **shape: Any) -> None:
        super().__init__(owner, Member, owner, shape)

    def handle(self) -> bytes:
        return self.ask("handle", timeout_s=120.0)
