"""Copies the boxes of a learner rank into a slot, cast to the dtype of the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_sync.device.fused import BatchCopy
from weight_sync.errors import PlanMismatch
from weight_sync.transports.base import PIECE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import PackPlan


class PackStep(NamedTuple):
    """One box of a local shard and its place in every slot."""

    param: str
    box: tuple[slice, ...]
    views: tuple[torch.Tensor, ...]
    """One per slot, of the box's shape and wire dtype."""


def pack_steps(plan: PackPlan, slots: Sequence[torch.Tensor]) -> tuple[PackStep, ...]:
    """`slots` are uint8 views of the arena slots."""
    dtypes = {param.name: getattr(torch, param.dtype) for param in plan.params}
    steps: list[PackStep] = []
    for item in plan.items:
        box = tuple(slice(start, start + size) for start, size in zip(item.start, item.size, strict=True))
        views = tuple(
            slot[item.arena_off : item.arena_off + item.nbytes].view(dtypes[item.param]).view(item.size)
            for slot in slots
        )
        steps.append(PackStep(item.param, box, views))
    return tuple(steps)


def in_parts(
    target: torch.Tensor, source: torch.Tensor, *, limit_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views that cover two tensors of equal shape, such that no part of `source` is larger than `limit_bytes`."""
    if source.nbytes <= limit_bytes:
        yield target, source
        return
    rows = limit_bytes // source[0].nbytes
    if rows:
        yield from zip(target.split(rows), source.split(rows), strict=True)
        return
    for each_target, each_source in zip(target, source, strict=True):
        yield from in_parts(each_target, each_source, limit_bytes=limit_bytes)


class Packer:
    """Packs local shards into slots on a stream of its own.

    Batch copies hold the addresses of the shards, which an optimizer updates in place. They are built with the first
    pack, and again if a shard has moved (offload, a reload). Shards that live elsewhere than the slots (FSDP2's CPU
    offload) go through the device in parts of at most `PIECE_BYTES`, so it never holds a copy of them.
    """

    def __init__(self, backend: Backend, steps: Sequence[PackStep], *, num_slots: int) -> None:
        self._backend = backend
        self._steps = tuple(steps)
        self._num_slots = num_slots
        self._params = tuple(sorted({step.param for step in steps}))
        self._stream = backend.new_stream()
        self._addresses: tuple[int, ...] | None = None
        self._copies: tuple[BatchCopy, ...] = ()

    def pack(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Returns when the bytes are in the slot, so the shards may change again.

        Raises:
            PlanMismatch: a tensor is missing or does not have the planned shape.
        """
        missing = [name for name in self._params if name not in tensors]
        if missing:
            raise PlanMismatch(
                f"{', '.join(missing[:5])}: the plan packs boxes of {len(missing)} parameters for which the learner "
                "gave no local shard; describe the model again and open a new epoch"
            )
        # Whatever last wrote the shards ran on the caller's stream. (To wait for the whole device would be to wait for
        # what is being sent to a receiver, alive or not.)
        self._backend.synchronize_current()
        here = next((step.views[slot].device for step in self._steps), None)
        if any(tensors[name].device != here for name in self._params):
            self._bring(self._pairs(slot, tensors))
        else:
            self._copy(slot, tensors)(self._stream)
        self._backend.synchronize(self._stream)

    def _copy(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> BatchCopy:
        addresses = tuple(tensors[name].data_ptr() for name in self._params)
        if addresses != self._addresses:
            self._copies = tuple(
                BatchCopy(self._backend, self._pairs(each, tensors)) for each in range(self._num_slots)
            )
            self._addresses = addresses
        return self._copies[slot]

    def _bring(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with self._backend.use_stream(self._stream):
            for pair in pairs:
                for target, source in in_parts(*pair, limit_bytes=PIECE_BYTES):
                    target.copy_(source.to(target.device, non_blocking=True))  # cast there, where it costs nothing

    def _pairs(self, slot: int, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in self._steps:
            tensor, target = tensors[step.param].detach(), step.views[slot]
            source = tensor[step.box]
            if source.shape != target.shape:
                raise PlanMismatch(
                    f"{step.param}: the plan packs {step.box} = shape {tuple(target.shape)}, the local shard has shape "
                    f"{tuple(tensor.shape)}; the model changed after the epoch was opened, open a new one"
                )
            pairs.append((target, source))
        return pairs
