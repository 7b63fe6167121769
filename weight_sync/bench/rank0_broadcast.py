"""Baseline: learner 0 gathers every full parameter, packs them into buckets, broadcasts each bucket; engines load it.

The packed variant of what most systems do. The engines stand still from the first bucket to the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from weight_sync.bench.party import Party
    from weight_sync.plan.types import ParamMeta

ALIGN_BYTES = 16


def send(party: Party, shards: Mapping[str, torch.Tensor]) -> None:
    """Collective over the learners; learner 0 also broadcasts. `shards` are the local rows of every parameter."""
    for bucket, nbytes in buckets_of(party):
        data = torch.empty(nbytes if party.is_sender else 0, dtype=torch.uint8, device=party.device)
        for meta, offset in bucket:
            full = _gather(party, meta, shards)
            if full is not None:
                data[offset : offset + party.nbytes(meta)].copy_(full[: party.nbytes(meta)])
        if party.is_sender:
            dist.broadcast(data, src=0, group=party.fan_out)


def receive(party: Party, load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
    """An engine worker's side."""
    for bucket, nbytes in buckets_of(party):
        data = torch.empty(nbytes, dtype=torch.uint8, device=party.device)
        dist.broadcast(data, src=0, group=party.fan_out)
        load_weights((meta.name, party.as_tensor(data[offset:], meta)) for meta, offset in bucket)


def buckets_of(party: Party) -> Iterator[tuple[list[tuple[ParamMeta, int]], int]]:
    """(parameters with their offsets, bytes) of every bucket; a parameter larger than a bucket has one of its own."""
    bucket: list[tuple[ParamMeta, int]] = []
    used = 0
    for meta in party.params:
        if bucket and used + party.nbytes(meta) > party.bucket_bytes:
            yield bucket, used
            bucket, used = [], 0
        bucket.append((meta, used))
        used += -(-party.nbytes(meta) // ALIGN_BYTES) * ALIGN_BYTES
    if bucket:
        yield bucket, used


def _gather(party: Party, meta: ParamMeta, shards: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The rows of all learners one after the other, on learner 0; None on the others."""
    part = party.padded_part(meta, shards)
    if party.num_learners == 1:
        return part
    if not party.is_sender:
        dist.gather(part, None, dst=0, group=party.learners)
        return None
    full = torch.empty(party.num_learners * part.numel(), dtype=torch.uint8, device=party.device)
    dist.gather(part, list(full.chunk(party.num_learners)), dst=0, group=party.learners)
    return full
