"""Baseline: parameter by parameter, all learners gather it, learner 0 broadcasts it, every engine loads it.

Two collectives, two allocations and one loader call per parameter; the engines stand still from the first to the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from weight_sync.bench.party import Party


def send(party: Party, shards: Mapping[str, torch.Tensor]) -> None:
    """Collective over the learners; learner 0 also broadcasts. `shards` are the local rows of every parameter."""
    # The same under its name until torch 2.12 and after it.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for meta in party.params:
        part = party.padded_part(meta, shards)
        full = torch.empty(party.num_learners * part.numel(), dtype=torch.uint8, device=party.device)
        all_gather(full, part, group=party.learners)
        if party.is_sender:
            dist.broadcast(full[: party.nbytes(meta)], src=0, group=party.fan_out)


def receive(party: Party, load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object]) -> None:
    """An engine worker's side."""
    for meta in party.params:
        full = torch.empty(party.nbytes(meta), dtype=torch.uint8, device=party.device)
        dist.broadcast(full, src=0, group=party.fan_out)
        load_weights([(meta.name, party.as_tensor(full, meta))])
