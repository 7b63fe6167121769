"""One rank of a baseline: its process group and what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.plan.types import ParamMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """One process of a baseline. Learners are ranks 0..num_learners-1, engine workers the ranks after them."""

    rank: int
    num_learners: int
    device: torch.device
    dtype: torch.dtype
    params: Sequence[ParamMeta]
    learners: Any
    """Process group of the learners."""
    fan_out: Any
    """Process group of learner 0 and all engine workers."""
    bucket_bytes: int

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    def nbytes(self, meta: ParamMeta) -> int:
        return prod(meta.shape) * self.dtype.itemsize

    def part_bytes(self, meta: ParamMeta) -> int:
        """Bytes of the longest shard: shards are padded to it, so that a gather puts the rows next to each other."""
        return -(-meta.shape[0] // self.num_learners) * (self.nbytes(meta) // meta.shape[0])

    def padded_part(self, meta: ParamMeta, shards: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """uint8[part_bytes]: this learner's rows, cast to the rollout dtype."""
        part = torch.empty(self.part_bytes(meta), dtype=torch.uint8, device=self.device)
        shard = shards.get(meta.name)
        if shard is not None:
            part[: shard.numel() * self.dtype.itemsize].view(self.dtype).copy_(shard.reshape(-1))
        return part

    def as_tensor(self, data: torch.Tensor, meta: ParamMeta) -> torch.Tensor:
        return data[: self.nbytes(meta)].view(self.dtype).view(meta.shape)
