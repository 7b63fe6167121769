"""What weight sync is compared with: the two ways in common use, over one process group.

    rank0_broadcast   learner 0 gathers every full parameter, packs buckets, broadcasts each; engines load it
    param_broadcast   parameter by parameter, all learners gather it, learner 0 broadcasts it, every engine loads it

Both need what weight sync does without: the full tensor on a learner, a collective that all engines take part in, and
engines that stand still meanwhile. They are written as their users write them, on fast collectives, cast before the
gather.
"""

from __future__ import annotations

from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from weight_sync.bench.case import Case
    from weight_sync.device.base import Backend
    from weight_sync.plan.types import ParamMeta

BASELINES = ("rank0_broadcast", "param_broadcast")
ALIGN_BYTES = 16


def store(timeout_s: float, *, port: int | None = None) -> Any:
    """The meeting point: on an ephemeral port (`.port`) of this process, or of another one that has it at `port`."""
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not list it
    timeout = timedelta(seconds=timeout_s)
    return make("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False, timeout=timeout)


class Broadcast:
    """What one process does in a baseline. Learners are the first ranks, engine workers those after them. Making it is
    collective; so are `send` and `receive`."""

    def __init__(self, case: Case, backend: Backend, device: torch.device, *, rank: int, port: int) -> None:
        world, timeout = case.learners + case.replicas * case.tp, timedelta(seconds=case.timeout)
        dist.init_process_group(
            collective_of(backend),
            store=store(case.timeout, port=port),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )
        self._is_sender, self._device, self._num_learners = rank == 0, device, case.learners
        self._bucket_bytes, self._params = case.bucket_mib << 20, case.architecture.params(case.dtype)
        self._dtype = getattr(torch, case.dtype)
        self._learners: Any = dist.new_group(list(range(case.learners)))
        self._fan_out: Any = dist.new_group([0, *range(case.learners, world)])

    def send(self, name: str, shards: Mapping[str, torch.Tensor]) -> None:
        """A learner's side. `shards` are the local rows of every parameter."""
        for bucket, nbytes in self.buckets(name):
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
        for bucket, nbytes in self.buckets(name):
            data = self._bytes(nbytes)
            dist.broadcast(data, src=0, group=self._fan_out)
            load_weights(
                (meta.name, data[offset : offset + self._nbytes(meta)].view(self._dtype).view(meta.shape))
                for meta, offset in bucket
            )

    def buckets(self, name: str) -> Iterator[tuple[list[tuple[ParamMeta, int]], int]]:
        """(parameters with their offsets, bytes) of every bucket; a parameter larger than a bucket has its own."""
        limit = 0 if name == "param_broadcast" else self._bucket_bytes
        bucket: list[tuple[ParamMeta, int]] = []
        stop = used = 0
        for meta in self._params:
            if bucket and used + self._nbytes(meta) > limit:
                yield bucket, stop
                bucket, used = [], 0
            bucket.append((meta, used))
            stop = used + self._nbytes(meta)
            used = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
        if bucket:
            yield bucket, stop

    def _gathered(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor], *, everywhere: bool) -> torch.Tensor:
        """The rows of all learners one after the other, on learner 0 or on all; nothing on the others."""
        part, num_learners = self._padded_part(meta, shards), self._num_learners
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

    def _padded_part(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This learner's rows, cast to the rollout dtype; padded to the longest shard, so that a gather joins them."""
        rows = -(-meta.shape[0] // self._num_learners)
        part = self._bytes(rows * (self._nbytes(meta) // meta.shape[0]))
        if (shard := shards.get(meta.name)) is not None:
            part[: shard.numel() * self._dtype.itemsize].view(self._dtype).copy_(shard.reshape(-1))
        return part

    def _nbytes(self, meta: ParamMeta) -> int:
        return prod(meta.shape) * self._dtype.itemsize

    def _bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)


def collective_of(backend: Backend) -> str:
    """The part of a backend's `collective` ("name", or "device:name,...") that serves its own devices."""
    parts = dict(part.split(":") for part in backend.collective.split(",") if ":" in part)
    return parts.get(backend.torch_device, backend.collective)
