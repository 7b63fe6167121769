"""A small weight-sync world in one process: learner ranks with row shards, replicas with a model that fuses and splits.

Real publishers, receivers, sockets and shared memory; only the model and the hosts (Ray, vLLM) are small stand-ins.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tests.fakes.row_shards import held_by, rows_of
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.device.cpu import CpuBackend
from weight_sync.messages import CommitResult, reply_state
from weight_sync.plan.types import ParamMeta
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.receive.receiver import WeightReceiver, WorkerService
from weight_sync.receive.recorder import record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from weight_sync.messages import SyncReport
    from weight_sync.plan.types import WorkerLayout

SHAPES = {
    "embed.weight": (10, 4),
    "q.weight": (8, 4),
    "k.weight": (4, 4),
    "v.weight": (4, 4),
    "down.weight": (5, 8),
    "norm.weight": (4,),
}
DTYPE = torch.bfloat16
PARAMS = tuple(ParamMeta(name=name, shape=shape, dtype="bfloat16") for name, shape in SHAPES.items())


class FusedModel(torch.nn.Module):
    """Like an engine's model: q, k, v fused; q, k, v, down split over 1, 2 or 4 workers; the rest replicated."""

    def __init__(self, worker: int = 0, num_workers: int = 1) -> None:
        super().__init__()
        self.worker, self.num_workers = worker, num_workers
        rows = (8 + 4 + 4) // num_workers
        self.embed = torch.nn.Parameter(torch.zeros(10, 4, dtype=DTYPE), requires_grad=False)
        self.qkv = torch.nn.Parameter(torch.zeros(rows, 4, dtype=DTYPE), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(5, 8 // num_workers, dtype=DTYPE), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(4, dtype=DTYPE), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        part = {"q.weight": (0, 8), "k.weight": (8, 4), "v.weight": (12, 4)}
        for name, tensor in weights:
            if name in part:
                start, rows = (n // self.num_workers for n in part[name])
                self.qkv.data[start : start + rows].copy_(tensor.narrow(0, self.worker * rows, rows))
            elif name == "down.weight":
                columns = 8 // self.num_workers
                self.down.data.copy_(tensor.narrow(1, self.worker * columns, columns))
            else:
                {"embed.weight": self.embed, "norm.weight": self.norm}[name].data.copy_(tensor)


def record_layout(model: torch.nn.Module, params: Sequence[ParamMeta], *, worker: int) -> WorkerLayout:
    """Of an engine without a reloader: whatever cannot be written directly is refused."""
    return record(model, params, worker=worker).layout


def full_weights(seed: int) -> dict[str, torch.Tensor]:
    """float32 masters of the whole model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def local_tensors(
    full: dict[str, torch.Tensor], *, rank: int, num_ranks: int, params: Sequence[ParamMeta] = PARAMS
) -> dict[str, torch.Tensor]:
    """The rows that FSDP2 would leave on a rank; parameters without any are missing."""
    return held_by(full, rows_of(params, rank, num_ranks))


def expected_engine(full: dict[str, torch.Tensor], *, worker: int, num_workers: int) -> dict[str, torch.Tensor]:
    """What an engine worker must hold: the model's own loader, fed with the cast checkpoint."""
    model = FusedModel(worker, num_workers)
    model.load_weights((name, tensor.to(DTYPE)) for name, tensor in full.items())
    return dict(model.named_parameters())


class LocalPublisher:
    """A learner rank in this process. `full` is what it trains; replace it to train."""

    def __init__(
        self, rank: int, num_ranks: int, full: dict[str, torch.Tensor], params: Sequence[ParamMeta] = PARAMS
    ) -> None:
        self.rank, self.num_ranks, self.full, self.params = rank, num_ranks, full, params
        self.publisher = WeightPublisher(CpuBackend(), rank=rank)

    def ws_describe(self) -> bytes:
        return self.publisher.describe(self.params, rows_of(self.params, self.rank, self.num_ranks), {})

    def ws_open(self, request: bytes) -> bytes:
        return self.publisher.open(request)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        tensors = local_tensors(self.full, rank=self.rank, num_ranks=self.num_ranks, params=self.params)
        return self.publisher.publish(version, tensors, deadline_s=deadline_s)

    def ws_digests(self, version: int, deadline_s: float) -> bytes:
        return self.publisher.digests(version, deadline_s=deadline_s)

    def ws_close(self) -> None:
        self.publisher.close()

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(getattr(self, method), *args), timeout_s)


class LocalReplica:
    """An engine replica in this process; `board` lets tests watch the rolling order."""

    def __init__(self, name: str, num_workers: int = 1, *, board: list[str] | None = None) -> None:
        self.name = name
        self.models = [FusedModel(worker, num_workers) for worker in range(num_workers)]
        self.receivers = [
            WeightReceiver(model, CpuBackend(), worker=worker) for worker, model in enumerate(self.models)
        ]
        self.services = [WorkerService(lambda receiver=receiver: receiver) for receiver in self.receivers]
        self._turns = [threading.Lock() for _ in self.services]
        self.board = [] if board is None else board
        self.versions: list[int] = []
        self.is_paused = False
        self.before_commit: Callable[[], None] = lambda: None
        self.commit_delay_s = 0.0

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        calls = (asyncio.to_thread(self._in_turn, worker, method, args) for worker in range(len(self.services)))
        return list(await asyncio.wait_for(asyncio.gather(*calls), timeout_s))

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        started = time.monotonic()
        self.is_paused = True
        self.board.append(f"pause {self.name}")
        results: list[bytes] = []
        is_known = True
        try:
            self.before_commit()
            await asyncio.sleep(self.commit_delay_s)
            is_known = False
            results = await self.call(method, *args, timeout_s=timeout_s)
            is_known = True
            if reply_state(results) == "ok":
                self.versions.append(version)
        finally:
            # Workers that did not answer may be in the middle of it: no engine may generate from that.
            if is_known and (not results or reply_state(results) != "dirty"):
                self.is_paused = False
            self.board.append(f"resume {self.name}")
        return CommitResult(results=results, pause_s=time.monotonic() - started)

    def _in_turn(self, worker: int, method: str, args: tuple[object, ...]) -> bytes:
        """A worker takes its calls one after the other, also abandoned ones."""
        with self._turns[worker]:
            return getattr(self.services[worker], method)(*args)

    def assert_holds(self, full: dict[str, torch.Tensor]) -> None:
        for worker, model in enumerate(self.models):
            expected = expected_engine(full, worker=worker, num_workers=len(self.models))
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[name]), f"{self.name}/{worker} {name} differs"


class World:
    """Learner ranks, replicas (or that many, called r0, r1, ...) and their coordinator. Version v has the weights of
    seed v. `late_s` puts the coordinator's clock forward."""

    def __init__(self, num_ranks: int, replicas: Sequence[LocalReplica] | int, **options: Any) -> None:
        self.full = full_weights(0)
        self.publishers = [LocalPublisher(rank, num_ranks, self.full) for rank in range(num_ranks)]
        names = [f"r{i}" for i in range(replicas)] if isinstance(replicas, int) else []
        self.replicas = [LocalReplica(name) for name in names] if isinstance(replicas, int) else [*replicas]
        self.late_s = 0.0
        self.coordinator = SyncCoordinator(
            self.publishers,
            self.replicas,
            options=SyncOptions(**{"timeout_s": 20.0, **options}),
            clock=lambda: time.monotonic() + self.late_s,
        )

    def hurry(self, timeout_s: float) -> None:
        """From here on an open, a publish or a sync has so long."""
        self.coordinator._options = msgspec.structs.replace(self.coordinator._options, timeout_s=timeout_s)

    def train(self, seed: int) -> None:
        self.full = full_weights(seed)
        for publisher in self.publishers:
            publisher.full = self.full

    async def publish(self, version: int) -> None:
        self.train(version)
        await self.coordinator.publish(version)

    async def step(self, version: int) -> SyncReport:
        await self.publish(version)
        return await self.coordinator.sync(version)

    def assert_all_hold(self, version: int) -> None:
        for replica in self.replicas:
            replica.assert_holds(full_weights(version))


@contextlib.asynccontextmanager
async def opened(num_ranks: int, replicas: Sequence[LocalReplica] | int, **options: Any) -> AsyncIterator[World]:
    world = World(num_ranks, replicas, **options)
    try:
        await world.coordinator.open()
        yield world
    finally:
        await world.coordinator.close()


async def eventually(is_so: Callable[[], Any], *, within_s: float = 20.0) -> None:
    """Until it is so; what is asked is the product's own state, so no time is too long but all of it."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.005)
