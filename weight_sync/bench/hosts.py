"""What lives in the child processes: a learner rank with random row shards, and an engine worker without an engine."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.bench import baselines
from weight_sync.bench.ceiling import CeilingSink, CeilingSource
from weight_sync.bench.model import EngineModel
from weight_sync.device.select import get_backend
from weight_sync.plan.types import ShardDesc
from weight_sync.publish.publisher import WeightPublisher
from weight_sync.publish.shards import chunk_rows
from weight_sync.receive.receiver import WeightReceiver, WorkerService

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.bench.baselines import GroupSpec
    from weight_sync.bench.case import Case
    from weight_sync.bench.party import Party
    from weight_sync.device.base import Backend, IpcHandle

GROWTH = 1.0625
"""Every element changes by this factor from version to version: more than rounding hides, less than overflows."""
GROWTH_PERIOD = 64
CHURN_BLOCKS, CHURN_BYTES = 16, 64 << 20


class Place:
    """A process on its device, and what every host can do there."""

    def __init__(self, case: Case, device_index: int) -> None:
        self.backend: Backend = get_backend(case.device)
        self.device = self.backend.set_device(device_index)
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        self.params = case.architecture.params(case.dtype)
        self._parties: list[Party] = []

    def used_bytes(self) -> int:
        """Memory in use: of the whole device; on the host, of this process, since others come and go there."""
        if self.device.type == "cpu":
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        self.backend.synchronize()
        free, total = self.backend.memory_info()
        return total - free

    def churn(self, seed: int) -> None:
        """Allocate and free blocks of many sizes, then hand all that torch's allocator has cached back to the driver:
        memory that weight sync registered must be none of it."""
        generator = random.Random(seed)
        sizes = [generator.randrange(1, CHURN_BYTES) for _ in range(CHURN_BLOCKS)]
        kept = [torch.empty(size, dtype=torch.uint8, device=self.device).fill_(0xA5) for size in sizes]
        generator.shuffle(kept)
        while kept:
            kept.pop()
        self.backend.synchronize()
        torch.accelerator.empty_cache()

    def join(self, spec: GroupSpec) -> None:
        self._parties.append(baselines.join(spec, self.backend, self.device, self.params))

    @property
    def party(self) -> Party:
        return self._parties[-1]

    def leave(self) -> None:
        if self._parties:
            self._parties.clear()
            baselines.leave()


class LearnerHost:
    """One learner rank: row shards as FSDP2 leaves them, all in one tensor so that one call makes or trains them."""

    def __init__(self, case: Case, rank: int, device_index: int) -> None:
        self._place = Place(case, device_index)
        self._publisher = WeightPublisher(self._place.backend, rank=rank)
        self._shards: list[ShardDesc] = []
        sizes: list[tuple[str, tuple[int, ...], int]] = []
        for meta in self._place.params:
            start, stop = chunk_rows(meta.shape[0], case.learners, rank)
            self._shards.append(ShardDesc(param=meta.name, rank=rank, row_start=start, row_stop=stop))
            if stop > start:
                shape = (stop - start, *meta.shape[1:])
                sizes.append((meta.name, shape, torch.Size(shape).numel()))
        self._all = torch.empty(
            sum(size for *_, size in sizes), dtype=getattr(torch, case.master_dtype), device=self._place.device
        )
        generator = torch.Generator(device=self._place.device).manual_seed(1234 + rank)
        self._all.normal_(0.0, 0.02, generator=generator)
        parts = self._all.split([size for *_, size in sizes])
        self._tensors = {name: part.view(shape) for (name, shape, _), part in zip(sizes, parts, strict=True)}
        self._ceilings: list[CeilingSource] = []
        self._place.backend.synchronize()

    def call(self, method: str, *args: Any) -> Any:
        match method:
            case "train":
                self._train(*args)
            case "used_bytes":
                return self._place.used_bytes()
            case "churn":
                self._place.churn(*args)
            case "join":
                self._place.join(*args)
            case "leave":
                self._place.leave()
            case "baseline":
                baselines.send(args[0], self._place.party, self._tensors)
                self._place.backend.synchronize()
            case "open_ceiling":
                self._ceilings.append(CeilingSource(self._place.backend, *args))
                return self._ceilings[-1].handle
            case "close_ceiling":
                self._ceilings.pop().close()
            case _:
                return self._sync_call(method, *args)
        return None

    def close(self) -> None:
        self._place.leave()
        self._publisher.close()

    def _train(self, version: int) -> None:
        """Change every element, up and down again after a while so that nothing overflows."""
        self._all.mul_(GROWTH if version % GROWTH_PERIOD < GROWTH_PERIOD // 2 else 1 / GROWTH)
        self._place.backend.synchronize()

    def _sync_call(self, method: str, *args: Any) -> Any:
        match method:
            case "ws_describe":
                return self._publisher.describe(self._place.params, self._shards)
            case "ws_publish":
                version, deadline_s = args
                return self._publisher.publish(version, self._tensors, deadline_s=deadline_s)
            case _:
                return getattr(self._publisher, method.removeprefix("ws_"))(*args)


class WorkerHost:
    """One worker of a synthetic replica: the engine's parameters and their loader, and no generation."""

    def __init__(self, case: Case, worker: int, device_index: int) -> None:
        self._place = Place(case, device_index)
        backend, dtype = self._place.backend, getattr(torch, case.dtype)
        self._model = EngineModel(
            case.architecture, worker=worker, num_workers=case.tp, dtype=dtype, device=self._place.device
        )
        receiver = WeightReceiver(self._model, backend, worker=worker)
        self._service = WorkerService(lambda: receiver)
        self._ceilings: list[CeilingSink] = []
        backend.synchronize()

    def call(self, method: str, *args: Any) -> Any:
        match method:
            case "used_bytes":
                return self._place.used_bytes()
            case "churn":
                self._place.churn(*args)
            case "digests":
                return [self._place.backend.digest(tensor) for tensor in self._model.tensors()]
            case "join":
                self._place.join(*args)
            case "leave":
                self._place.leave()
            case "baseline":
                baselines.receive(args[0], self._place.party, self._model.load_weights)
                self._place.backend.synchronize()
            case "open_ceiling":
                self._open_ceiling(*args)
            case "run_ceiling":
                return self._ceilings[-1].copy(*args)
            case "close_ceiling":
                self._ceilings.pop().close()
            case _:
                return getattr(self._service, method.removeprefix("ws_"))(*args)
        return None

    def close(self) -> None:
        self._place.leave()
        self._service.close()

    def _open_ceiling(self, handles: Mapping[int, IpcHandle], taken: Mapping[int, int], stagger: int) -> None:
        self._ceilings.append(CeilingSink(self._place.backend, handles, taken, stagger=stagger))
