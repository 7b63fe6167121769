"""Workers of a ring, here or in processes that can be killed or stopped."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import zmq

from tests.fakes.processes import Child
from weight_sync.channel import ControlClient, ControlServer
from weight_sync.device.select import get_backend
from weight_sync.messages import LinkRequest, RelayHandle, RunKeys, decode, encode
from weight_sync.plan.routes import Peer, Stage, plan_routes
from weight_sync.plan.types import PullPlan, Run
from weight_sync.receive.relay import Patience, Relay
from weight_sync.receive.staging import staging_layout
from weight_sync.transports.base import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.transports.base import OnArrived

SOURCES = (2, 5)
NUM_PIECES = 24
EPOCH = 3


def nothing() -> None:
    return None


class Worker:
    """A staging buffer laid out by `staging_layout`, with `NUM_PIECES` pieces of each of two sources, and its relay.
    Reading
    from a learner is filling in."""

    def __init__(
        self,
        name: str,
        keys: RunKeys,
        *,
        device: str = "cpu",
        index: int = 0,
        piece_bytes: int = 1000,
        patience: Patience | None = None,
    ) -> None:
        self.name = f"{name}/0"
        self.backend = get_backend(device)
        self.backend.set_device(index)
        # The second source has a hole wider than what is merged: two ranges, with padding between them.
        places = [(2, i * piece_bytes) for i in range(NUM_PIECES)]
        places += [(5, i * piece_bytes + 9000 * (i > 10)) for i in range(NUM_PIECES)]
        runs = [
            Run(src_rank=r, src_off=o, dst_param="w", dst_off=0, nbytes=piece_bytes - 7 * (r == 5)) for r, o in places
        ]
        plan = staging_layout(PullPlan.of(0, runs))
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
        self.route: tuple[Stage, ...] = (Stage(SOURCES),)
        self.direct_pieces = 0
        """Read from learners so far."""
        self.dies_at: int | None = None
        """Pieces of all sources after which this process is killed."""
        self.pause_s = 0.0
        self.relay = Relay(
            self.backend,
            self.block,
            self.pieces,
            owner=self.name,
            host="127.0.0.1",
            patience=patience,
            dial=lambda address: ControlClient(zmq.Context.instance(), address, keys, epoch=EPOCH, sender=self.name),
        )
        self.server = ControlServer(self.relay.answer, keys, epoch=EPOCH)

    @property
    def handle(self) -> RelayHandle:
        handle = self.relay.handle(self.server.address)
        assert handle is not None
        return handle

    def follow(self, *predecessors: RelayHandle, readers: Sequence[str] = ()) -> None:
        """Every source comes from these, as far as they have it."""
        self.route = (Stage(SOURCES, tuple(range(len(predecessors)))),)
        self.relay.link(LinkRequest(stages=self.route, predecessors=predecessors, readers=tuple(readers)))

    def pull(self, version: int, *ranks: int, check: Callable[[], None] = nothing) -> int:
        """In the order of the route. Returns the number of stalls."""

        def go_on() -> None:
            if self.dies_at is not None and sum(map(self._num_pieces, SOURCES)) >= self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            check()

        def direct(version: int, rank: int) -> Callable[[Sequence[Piece], OnArrived], None]:
            return lambda pieces, told: self._read_learner(version, rank, pieces, told, go_on)

        stalls = 0
        for rank in ranks if ranks else (rank for stage in self.route for rank in stage.ranks):
            stalls += self.relay.pull(
                rank, self.pieces[rank], version=version, direct=direct(version, rank), check=go_on, is_retry=False
            )
        go_on()
        return stalls

    def _num_pieces(self, rank: int) -> int:
        stretch = self.relay._stretches[rank]
        return sum(end - stretch.start <= self.relay._filled[rank] for end in stretch.ends)

    def _read_learner(
        self, version: int, rank: int, pieces: Sequence[Piece], told: OnArrived, check: Callable[[], None]
    ) -> None:
        for count, piece in enumerate(pieces, 1):
            check()
            piece.dst.copy_(expected(rank, version, piece))
            self.backend.synchronize()
            self.direct_pieces += 1
            told(count)
            time.sleep(self.pause_s)

    def fill(self, rank: int, version: int, num_pieces: int = NUM_PIECES) -> None:
        """So much of the source is here and offered."""
        for piece in self.pieces[rank][:num_pieces]:
            piece.dst.copy_(expected(rank, version, piece))
        self.backend.synchronize()
        stretch = self.relay._stretches[rank]
        with self.relay._lock:
            self.relay._filled[rank] = stretch.ends[num_pieces - 1] - stretch.start if num_pieces else 0
            self.relay._tell()

    def holds(self, version: int, *ranks: int, num_pieces: int = NUM_PIECES) -> bool:
        return all(
            torch.equal(piece.dst, expected(rank, version, piece))
            for rank in (ranks if ranks else SOURCES)
            for piece in self.pieces[rank][:num_pieces]
        )

    def close(self) -> None:
        self.server.close()
        self.relay.close()


def expected(rank: int, version: int, piece: Piece) -> torch.Tensor:
    first = piece.src_off + rank * 31 + version * 101
    numbers = torch.arange(first, first + piece.dst.numel(), dtype=torch.int32, device=piece.dst.device)
    return (numbers % 251).to(torch.uint8)


class Member(Worker):
    """In its process, on its node."""

    def __init__(self, name: str, keys: bytes, node: str, shape: dict[str, Any]) -> None:
        os.environ["TANDEM_NODE"] = node
        super().__init__(name, decode(keys, RunKeys), **shape)

    def see_handle(self) -> bytes:
        return encode(self.handle)

    def link(self, request: bytes) -> None:
        told = decode(request, LinkRequest)
        self.route = told.stages
        self.relay.link(told)

    def begin(self, version: int, pause_s: float, dies_at: int | None) -> None:
        self.pause_s, self.dies_at, self.direct_pieces = pause_s, dies_at, 0
        self.relay.begin(version)

    def bring(self, version: int) -> tuple[int, int, float, float]:
        """(stalls, pieces read from learners, when it began and ended on the machine's clock)."""
        began = time.monotonic()
        stalls = self.pull(version)
        return stalls, self.direct_pieces, began, time.monotonic()

    def whole(self, version: int) -> bool:
        return self.holds(version)


class RelayProcess(Child):
    """A `Member`."""

    def __init__(self, name: str, keys: RunKeys, node: str = "n", **shape: Any) -> None:
        super().__init__(name, Member, name, encode(keys), node, shape)
        self.node = node

    def handle(self) -> RelayHandle:
        return decode(self.ask("see_handle", timeout_s=120.0), RelayHandle)


def link_ring(ring: Mapping[str, RelayProcess]) -> None:
    """As the coordinator links them, with their learners on another node."""
    parties = [Peer(name=f"{name}/0", worker=0, node=member.node) for name, member in ring.items()]
    routes = plan_routes(dict.fromkeys(SOURCES, "learners"), parties, {0: SOURCES}, relay="auto")
    handles = {f"{name}/0": member.handle() for name, member in ring.items()}
    for name, member in ring.items():
        route = routes[f"{name}/0"]
        readers = tuple(other for other in routes if f"{name}/0" in routes[other].predecessors)
        told = tuple(handles[other] for other in route.predecessors)
        member.ask("link", msgspec.msgpack.encode(LinkRequest(stages=route.stages, predecessors=told, readers=readers)))
