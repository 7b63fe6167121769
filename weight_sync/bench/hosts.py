"""What lives in the child processes: a learner rank with random row shards, and an engine worker without an engine."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from weight_sync.bench.baselines import Broadcast
from weight_sync.bench.ceiling import Ceiling
from weight_sync.bench.model import EngineModel
from weight_sync.device.environment import merge_env
from weight_sync.device.select import get_backend
from weight_sync.plan.types import ShardBox
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.publish.shards import chunk_rows
from weight_sync.receive.receiver import WeightReceiver
from weight_sync.receive.service import WorkerService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.bench.case import Case
    from weight_sync.device.base import IpcHandle

GROWTH = 1.0625
"""Every element changes by this factor from version to version: more than rounding hides, less than overflows."""
GROWTH_PERIOD = 64
CHURN_BLOCKS, CHURN_BYTES = 16, 64 << 20


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
        self._params = case.architecture.params(case.dtype)
        self._broadcast: Broadcast | None = None
        self._ceiling: Any = None

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

    def close_ceiling(self) -> None:
        self._ceiling.close()


class LearnerHost(_Host):
    """One learner rank: row shards as FSDP2 leaves them, all in one tensor so that one call makes or trains them."""

    def __init__(self, case: Case, rank: int, device_index: int) -> None:
        super().__init__(case, device_index)
        self._publisher = WeightPublisher(self._backend, rank=rank)
        self._shards: list[ShardBox] = []
        shapes: dict[str, torch.Size] = {}
        for meta in self._params:
            start, stop = chunk_rows(meta.shape[0], case.learners, rank)
            if stop > start:
                shapes[meta.name] = torch.Size((stop - start, *meta.shape[1:]))
                first = (start, *(0 for _ in meta.shape[1:]))
                self._shards.append(ShardBox(meta.name, first, shapes[meta.name]))
        sizes = [shape.numel() for shape in shapes.values()]
        self._all = torch.empty(sum(sizes), dtype=getattr(torch, case.master_dtype), device=self._device)
        self._all.normal_(0.0, 0.02, generator=torch.Generator(device=self._device).manual_seed(1234 + rank))
        parts = zip(shapes.items(), self._all.split(sizes), strict=True)
        self._tensors = {name: part.view(shape) for (name, shape), part in parts}
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
        self._ceiling = self._backend.alloc_persistent(nbytes)
        self._ceiling.tensor.fill_(1)
        self._backend.synchronize()
        return self._backend.ipc_export(self._ceiling)

    def close(self) -> None:
        self.leave()
        self._publisher.close()


class WorkerHost(_Host):
    """One worker of a synthetic replica: the engine's parameters and their loader, and no generation."""

    def __init__(self, case: Case, worker: int, device_index: int) -> None:
        super().__init__(case, device_index)
        dtype = getattr(torch, case.dtype)
        self._model = EngineModel(
            case.architecture, worker=worker, num_workers=case.tp, dtype=dtype, device=self._device
        )
        receiver = WeightReceiver(self._model, self._backend, worker=worker)
        self._service = WorkerService(lambda: receiver)
        self._backend.synchronize()

    def call(self, method: str, args: tuple[Any, ...], _timeout_s: float) -> list[bytes]:
        return [getattr(self._service, method.removeprefix("ws_"))(*args)]

    def digests(self) -> list[int]:
        return [self._backend.digest(tensor) for tensor in self._model.tensors()]

    def baseline(self, name: str) -> None:
        assert self._broadcast is not None
        self._broadcast.receive(name, self._model.load_weights)
        self._backend.synchronize()

    def open_ceiling(self, handles: Mapping[int, IpcHandle], taken: Mapping[int, int], index: int) -> None:
        self._ceiling = Ceiling(self._backend, handles, taken, index=index)

    def run_ceiling(self, start_at: float) -> float:
        return self._ceiling.copy(start_at)

    def close(self) -> None:
        self.leave()
        self._service.close()
