"""What weight sync is compared with: the two ways in common use, over one process group.

    rank0_broadcast   learner 0 gathers every full parameter, packs buckets, broadcasts each; engines load it
    param_broadcast   parameter by parameter, all learners gather it, learner 0 broadcasts it, every engine loads it

Both need what weight sync does without: the full tensor on a learner, a collective that all engines take part in, and
engines that stand still meanwhile. They are written as their users write them, on fast collectives, cast before the
gather, and without a Python call more than they need.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import ParamMeta

BASELINES = ("rank0_broadcast", "param_broadcast")
ALIGN_BYTES = 16


def store(timeout_s: float, *, port: int | None = None) -> Any:
    """The meeting point: on an ephemeral port (`.port`) of this process, or of another one that has it at `port`."""
    make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not list it
    timeout = timedelta(seconds=timeout_s)
    return make("127.0.0.1", port or 0, is_master=port is None, wait_for_workers=False, timeout=timeout)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """How a process joins. Learners are ranks 0..num_learners-1, engine workers the ranks after them."""

    port: int
    rank: int
    num_learners: int
    world: int
    timeout_s: float
    bucket_bytes: int


class Party:
    """One process of a baseline. Making it is collective; so are `send` and `receive`."""

    def __init__(self, seat: Seat, backend: Backend, device: torch.device, params: Sequence[ParamMeta]) -> None:
        dist.init_process_group(
            collective_of(backend),
            store=store(seat.timeout_s, port=seat.port),
            rank=seat.rank,
            world_size=seat.world,
            timeout=timedelta(seconds=seat.timeout_s),
            device_id=None if device.type == "cpu" else device,
        )
        self._seat, self._device, self._params = seat, device, params
        self._dtype = getattr(torch, params[0].dtype)
        self._learners: Any = dist.new_group(list(range(seat.num_learners)))
        self._fan_out: Any = dist.new_group([0, *range(seat.num_learners, seat.world)])

    def send(self, name: str, shards: Mapping[str, torch.Tensor]) -> None:
        """A learner's side. `shards` are the local rows of every parameter."""
        is_sender = self._seat.rank == 0
        if name == "param_broadcast":
            # The same under its name until torch 2.12 and after it.
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            for meta in self._params:
                part = self._padded_part(meta, shards)
                full = self._bytes(self._seat.num_learners * part.numel())
                all_gather(full, part, group=self._learners)
                if is_sender:
                    dist.broadcast(full[: self._nbytes(meta)], src=0, group=self._fan_out)
            return
        for bucket, nbytes in self.buckets():
            data = self._bytes(nbytes if is_sender else 0)
            for meta, offset in bucket:
                full = self._gathered(meta, shards)
                if full is not None:
                    data[offset : offset + self._nbytes(meta)].copy_(full[: self._nbytes(meta)])
            if is_sender:
                dist.broadcast(data, src=0, group=self._fan_out)

    def receive(self, name: str, load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
        """An engine worker's side."""
        one_by_one = [([(meta, 0)], self._nbytes(meta)) for meta in self._params]
        for bucket, nbytes in one_by_one if name == "param_broadcast" else self.buckets():
            data = self._bytes(nbytes)
            dist.broadcast(data, src=0, group=self._fan_out)
            load_weights(
                (meta.name, data[offset : offset + self._nbytes(meta)].view(self._dtype).view(meta.shape))
                for meta, offset in bucket
            )

    def buckets(self) -> Iterator[tuple[list[tuple[ParamMeta, int]], int]]:
        """(parameters with their offsets, bytes) of every bucket; a parameter larger than a bucket has its own."""
        bucket: list[tuple[ParamMeta, int]] = []
        used = 0
        for meta in self._params:
            if bucket and used + self._nbytes(meta) > self._seat.bucket_bytes:
                yield bucket, used
                bucket, used = [], 0
            bucket.append((meta, used))
            used += -(-self._nbytes(meta) // ALIGN_BYTES) * ALIGN_BYTES
        if bucket:
            yield bucket, used

    def _gathered(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The rows of all learners one after the other, on learner 0; None on the others."""
        part, num_learners = self._padded_part(meta, shards), self._seat.num_learners
        if num_learners == 1:
            return part
        full = self._bytes(num_learners * part.numel()) if self._seat.rank == 0 else None
        dist.gather(part, None if full is None else list(full.chunk(num_learners)), dst=0, group=self._learners)
        return full

    def _padded_part(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This learner's rows, cast to the rollout dtype; padded to the longest shard, so that a gather joins them."""
        rows = -(-meta.shape[0] // self._seat.num_learners)
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
