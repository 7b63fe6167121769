"""What lives in the child processes: a learner rank with random row shards, and an engine worker without an engine;
and their parts in what weight sync is compared with.

The pull ceiling of this machine is the same bytes between the same devices, with nothing else around them: all workers
start at the same instant and copy from a plain block of each learner what a pull takes from it, 64 MiB at a time, each
starting at another learner.

The baselines are the two ways in common use, over one process group:

    rank0_broadcast   learner 0 gathers every full parameter, packs buckets, broadcasts each; engines load it
    param_broadcast   parameter by parameter, all learners gather it, learner 0 broadcasts it, every engine loads it

Both need what weight sync does without: the full tensor on a learner, a collective that all engines take part in, and
engines that stand still meanwhile. They are written as their users write them, on fast collectives, cast before the
gather.
"""

from __future__ import annotations

import os
import random
import re
import time
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weight_sync.bench.case import DTYPE
from weight_sync.bench.shapes import places
from weight_sync.device.environment import merge_env
from weight_sync.device.select import get_backend
from weight_sync.plan.types import ShardBox
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.publish.shards import chunk_rows
from weight_sync.receive.receiver import WeightReceiver, WorkerService
from weight_sync.transports.base import pieces
from weight_sync.transports.pair import HOST, device_transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from weight_sync.bench.case import Case
    from weight_sync.bench.shapes import Architecture
    from weight_sync.device.base import Backend, IpcHandle
    from weight_sync.plan.types import ParamMeta

GROWTH = 1.0625
"""Every element changes by this factor from version to version: more than rounding hides, less than overflows."""
GROWTH_PERIOD = 64
CHURN_BLOCKS, CHURN_BYTES = 16, 64 << 20
BASELINES = ("rank0_broadcast", "param_broadcast")
BUCKET_BYTES, ALIGN_BYTES = 512 << 20, 16


def host_bytes() -> int:
    """Memory of this process: its private pages, and all of every shared block that it maps. Resident pages would grow
    with each block that is touched for the first time, however long ago it was taken."""
    private = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert private is not None
    spans = re.findall(r"^(\w+)-(\w+) .* /memfd:", Path("/proc/self/maps").read_text(encoding="utf-8"), re.MULTILINE)
    return (int(private[1]) << 10) + sum(int(stop, 16) - int(start, 16) for start, stop in spans)


class _Host:
    """A process on its device, and what every host can do there."""

    def __init__(self, case: Case, device_index: int) -> None:
        self._case, self._backend = case, get_backend(case.device)
        os.environ.update(merge_env(self._backend.process_env("engine"), {}, os.environ))
        self._device = self._backend.set_device(device_index)
        if self._device.type == "cpu":
            torch.set_num_threads(1)
        self._params = case.architecture.params(DTYPE)
        self._broadcast: Broadcast | None = None

    def used_bytes(self) -> int:
        """Memory in use: of the whole device; on the host, of this process, since others come and go there."""
        if self._device.type == "cpu":
            return host_bytes()
        self._backend.synchronize()
        free, total = self._backend.memory_info()
        return total - free

    def churn(self, seed: int) -> None:
        """Allocate and free blocks of many sizes, then hand all that torch's allocator has cached back to the driver:
        memory that weight sync registered must be none of it."""
        generator = random.Random(seed)
        sizes = [generator.randrange(1, CHURN_BYTES) for _ in range(CHURN_BLOCKS)]
        kept = [torch.empty(size, dtype=torch.uint8, device=self._device).fill_(0xA5) for size in sizes]
        generator.shuffle(kept)
        while kept:
            kept.pop()
        self._backend.synchronize()
        torch.accelerator.empty_cache()

    def join(self, rank: int, port: int) -> None:
        self._broadcast = Broadcast(self._case, self._backend, self._device, rank=rank, port=port)

    def leave(self) -> None:
        if self._broadcast is not None:
            self._broadcast = None
            dist.destroy_process_group()


class LearnerHost(_Host):
    """One learner rank: row shards as FSDP2 leaves them, all in one tensor so that one call makes or trains them."""

    def __init__(self, case: Case, rank: int, device_index: int) -> None:
        super().__init__(case, device_index)
        self._publisher = WeightPublisher(self._backend, rank=rank)
        self._shards: list[ShardBox] = []
        for meta in self._params:
            start, stop = chunk_rows(meta.shape[0], case.learners, rank)
            if stop > start:
                first = (start, *(0 for _ in meta.shape[1:]))
                self._shards.append(ShardBox(meta.name, first, (stop - start, *meta.shape[1:])))
        sizes = [prod(shard.size) for shard in self._shards]
        self._all = torch.empty(sum(sizes), dtype=getattr(torch, case.master_dtype), device=self._device)
        self._all.normal_(0.0, 0.02, generator=torch.Generator(device=self._device).manual_seed(1234 + rank))
        parts = zip(self._shards, self._all.split(sizes), strict=True)
        self._tensors = {shard.param: part.view(shard.size) for shard, part in parts}
        self._backend.synchronize()

    def train(self, version: int) -> None:
        """Change every element, up and down again after a while so that nothing overflows."""
        self._all.mul_(GROWTH if version % GROWTH_PERIOD < GROWTH_PERIOD // 2 else 1 / GROWTH)
        self._backend.synchronize()

    def ws_describe(self) -> bytes:
        return self._publisher.describe(self._params, self._shards, self._tensors)

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        return self._publisher.publish(version, self._tensors, deadline_s=deadline_s)

    def __getattr__(self, method: str) -> Any:
        """The other calls of a coordinator."""
        if not method.startswith("ws_"):
            raise AttributeError(method)
        return getattr(self._publisher, method.removeprefix("ws_"))

    def baseline(self, name: str) -> None:
        assert self._broadcast is not None
        self._broadcast.send(name, self._tensors)
        self._backend.synchronize()

    def open_ceiling(self, nbytes: int) -> IpcHandle:
        self._block = self._backend.alloc_persistent(nbytes)
        self._block.tensor.fill_(1)
        self._backend.synchronize()
        return self._backend.ipc_export(self._block)

    def close_ceiling(self) -> None:
        self._block.close()

    def close(self) -> None:
        self.leave()
        self._publisher.close()


class WorkerHost(_Host):
    """One worker of a synthetic replica: the engine's parameters and their loader, and no generation."""

    def __init__(self, case: Case, worker: int, device_index: int) -> None:
        super().__init__(case, device_index)
        self._model = EngineModel(case.architecture, worker=worker, num_workers=case.tp, device=self._device)
        receiver = WeightReceiver(self._model, self._backend, worker=worker)
        self._service = WorkerService(lambda: receiver)
        self._backend.synchronize()

    def call(self, method: str, args: tuple[Any, ...], _timeout_s: float) -> list[bytes]:
        return [getattr(self._service, method)(*args)]

    def digests(self) -> list[int]:
        return [self._backend.digest(parameter.data) for parameter in self._model.flat.values()]

    def baseline(self, name: str) -> None:
        assert self._broadcast is not None
        self._broadcast.receive(name, self._model.load_weights)
        self._backend.synchronize()

    def open_ceiling(self, handles: Mapping[int, IpcHandle], taken: Mapping[int, int], index: int) -> None:
        """The `index`-th worker begins with the `index`-th learner; `taken` are bytes of each."""
        target = self._backend.alloc_persistent(sum(taken.values()))
        target.tensor.fill_(0)
        blocks = {rank: self._backend.ipc_open(handles[rank]) for rank in taken}
        self._blocks, self._stream = [target, *blocks.values()], self._backend.new_stream()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset, ranks = 0, sorted(taken)
        first = index % max(1, len(ranks))
        for rank in (*ranks[first:], *ranks[:first]):
            for start, size in pieces(taken[rank]):
                source = blocks[rank].tensor[start : start + size]
                self._copies.append((target.tensor[offset : offset + size], source))
                offset += size
        self._backend.synchronize()

    def run_ceiling(self, start_at: float) -> float:
        """Copy everything once from the instant `start_at` (monotonic clock) on. Returns seconds."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        started = time.monotonic()
        for target, source in self._copies:
            self._backend.copy_async(target, source, self._stream)
        self._backend.synchronize(self._stream)
        return time.monotonic() - started

    def close_ceiling(self) -> None:
        self._copies.clear()
        for block in reversed(self._blocks):
            block.close()

    def close(self) -> None:
        self.leave()
        self._service.ws_close()


class EngineModel(torch.nn.Module):
    """The parameters of one worker as vLLM lays them out, all zeros at first, with a loader and no forward pass."""

    def __init__(self, arch: Architecture, *, worker: int, num_workers: int, device: torch.device) -> None:
        super().__init__()
        self._places = dict(places(arch, worker=worker, num_workers=num_workers))
        self.flat: dict[str, torch.nn.Parameter] = {}
        for name, shape in {place.param: place.shape for place in self._places.values()}.items():
            tensor = torch.zeros(shape, dtype=getattr(torch, DTYPE), device=device)
            self.flat[name] = torch.nn.Parameter(tensor, requires_grad=False)
            self._attach(name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this worker's part of each full checkpoint tensor to its place. As in vLLM, any subset, in any order."""
        for name, tensor in weights:
            place = self._places[name]
            target = self.flat[place.param].data
            if place.expert is not None:
                target = target[place.expert]
            part = tensor.narrow(place.dim, *place.span)
            target.narrow(0, place.row, part.shape[0]).copy_(part)
            if place.is_padded:
                target[part.shape[0] :].fill_(0)

    def _attach(self, name: str) -> None:
        """Register a parameter under its dotted name, making the modules on the way."""
        *path, leaf = name.split(".")
        module: torch.nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, self.flat[name])


class Broadcast:
    """What one process does in a baseline. Learners are the first ranks, engine workers those after them. Making it is
    collective; so are `send` and `receive`."""

    def __init__(self, case: Case, backend: Backend, device: torch.device, *, rank: int, port: int) -> None:
        world, timeout = case.learners + case.replicas * case.tp, timedelta(seconds=case.timeout)
        dist.init_process_group(
            device_transport(backend.collective) or HOST,
            store=store(case.timeout, port=port),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
        self._is_sender, self._device, self._num_learners = rank == 0, device, case.learners
        self._params, self._dtype = case.architecture.params(DTYPE), getattr(torch, DTYPE)
        self._learners: Any = dist.new_group(list(range(case.learners)))
        self._fan_out: Any = dist.new_group([0, *range(case.learners, world)])

    def send(self, name: str, shards: Mapping[str, torch.Tensor]) -> None:
        """A learner's side. `shards` are the local rows of every parameter."""
        for bucket, nbytes in self._buckets(name):
            data = self._bytes(nbytes if self._is_sender and len(bucket) > 1 else 0)
            for meta, offset in bucket:
                full = self._gathered(meta, shards, everywhere=name == "param_broadcast")
                if len(bucket) == 1:
                    data = full[:nbytes]  # sent from where it is
                elif self._is_sender:
                    data[offset : offset + self._nbytes(meta)].copy_(full[: self._nbytes(meta)])
            if self._is_sender:
                dist.broadcast(data, src=0, group=self._fan_out)

    def receive(self, name: str, load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
        """An engine worker's side."""
        for bucket, nbytes in self._buckets(name):
            data = self._bytes(nbytes)
            dist.broadcast(data, src=0, group=self._fan_out)
            load_weights(
                (meta.name, data[offset : offset + self._nbytes(meta)].view(self._dtype).view(meta.shape))
                for meta, offset in bucket
            )

    def _buckets(self, name: str) -> Iterator[tuple[list[tuple[ParamMeta, int]], int]]:
        """(parameters with their offsets, bytes) of every bucket; a parameter larger than a bucket has its own."""
        limit = 0 if name == "param_broadcast" else BUCKET_BYTES
        bucket: list[tuple[ParamMeta, int]] = []
        stop = used = 0
        for meta in self._params:
            if bucket and used + self._nbytes(meta) > limit:
                yield bucket, stop
                bucket, used = [], 0
            bucket.append((meta, used))
            stop = used + self._nbytes(meta)
            used = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
        yield bucket, stop

    def _gathered(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor], *, everywhere: bool) -> torch.Tensor:
        """The rows of all learners one after the other, on learner 0 or on all; nothing on the others. Shards are cast
        to the rollout dtype and padded to the longest, so that a gather joins them."""
        num_learners = self._num_learners
        part = self._bytes(-(-meta.shape[0] // num_learners) * (self._nbytes(meta) // meta.shape[0]))
        if (shard := shards.get(meta.name)) is not None:
            part[: shard.numel() * self._dtype.itemsize].view(self._dtype).copy_(shard.reshape(-1))
        if num_learners == 1:
            return part
        full = self._bytes(num_learners * part.numel() if everywhere or self._is_sender else 0)
        if everywhere:
            # The same under its name until torch 2.12 and after it.
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            all_gather(full, part, group=self._learners)
        else:
            parts = list(full.chunk(num_learners)) if full.numel() else None
            dist.gather(part, parts, dst=0, group=self._learners)
        return full

    def _nbytes(self, meta: ParamMeta) -> int:
        return prod(meta.shape) * self._dtype.itemsize

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def store(timeout_s: float, *, port: int | None = None) -> Any:
    """The meeting point: on an ephemeral port (`.port`) of this process, or of another one that has it at `port`."""
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not list it
    timeout = timedelta(seconds=timeout_s)
    return make("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False, timeout=timeout)
