"""One learner rank's pack: its boxes, cast to the rollout dtype and ordered by destination, in one pass over memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_sync.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.device.base import Backend, Mover
    from weight_sync.types import Manifest, PackPlan


class PackStep(NamedTuple):
    """One box of a local shard and its place in every slot."""

    param: str
    box: tuple[slice, ...]
    views: tuple[torch.Tensor, ...]
    """One per slot, of the box's shape and wire dtype."""


def pack_steps(manifest: Manifest, plan: PackPlan, slots: Sequence[torch.Tensor]) -> tuple[PackStep, ...]:
    """`slots` are uint8 views of the arena slots."""
    dtypes = {param.name: getattr(torch, param.dtype) for param in manifest.params}
    steps: list[PackStep] = []
    for item in plan.items:
        box = tuple(slice(start, start + size) for start, size in zip(item.start, item.size, strict=True))
        views = tuple(
            slot[item.arena_off : item.arena_off + item.nbytes].view(dtypes[item.param]).view(item.size)
            for slot in slots
        )
        steps.append(PackStep(item.param, box, views))
    return tuple(steps)


class Packer:
    """Packs local shards into slots on a stream of its own.

    The movers hold the addresses of the shards, which an optimizer updates in place. They are built with the first
    pack, and again if a shard has moved (offload, a reload).
    """

    def __init__(self, backend: Backend, steps: Sequence[PackStep], *, num_slots: int) -> None:
        self._backend = backend
        self._steps = tuple(steps)
        self._num_slots = num_slots
        self._params = tuple(sorted({step.param for step in steps}))
        self._stream = backend.new_stream()
        self._addresses: tuple[int, ...] | None = None
        self._movers: tuple[Mover, ...] = ()

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
        addresses = tuple(tensors[name].data_ptr() for name in self._params)
        if addresses != self._addresses:
            self._movers = tuple(self._backend.mover(self._pairs(each, tensors)) for each in range(self._num_slots))
            self._addresses = addresses
        # Whatever last wrote the shards ran on the caller's stream. (To wait for the whole device would be to wait for
        # what is being sent to a receiver, alive or not.)
        self._backend.synchronize_current()
        self._movers[slot](self._stream)
        self._backend.synchronize(self._stream)

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
