"""Where the runs of one worker land: views of its parameters, and of its shadow block if it stages.

Built once per epoch. Afterwards a pull is a walk over these views.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_sync.device.base import DeviceError
from weight_sync.errors import PlanMismatch
from weight_sync.pull import ShadowPlan, pieces, shadow_plan
from weight_sync.transports.base import Piece

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.types import PullPlan
    from weight_sync.wire import CommitMode

SHADOW_HEADROOM = 0.9
"""`auto` stages only if the shadow takes at most this fraction of what is free."""


class Landing(NamedTuple):
    """Every place that bytes are written to, in plan order of the runs."""

    params: tuple[torch.Tensor, ...]
    """Run -> its bytes in the engine parameter."""
    arrivals: tuple[torch.Tensor, ...]
    """Run -> where a pull puts it: in the shadow block, or `params` itself."""
    pieces: Mapping[int, tuple[Piece, ...]]
    """Source rank -> copies of a pull."""
    shadow: PersistentBlock | None
    addresses: Mapping[str, int]
    """Written parameter -> its address, which must never change."""

    @property
    def is_staged(self) -> bool:
        return self.shadow is not None


def parameter_bytes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """uint8 views of every contiguous parameter and buffer, by every name it has.

    Views of the storage, not of the tensor: autograd and inference mode keep out of the way of in-place copies.
    """
    views: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.device.type == "meta":
                continue
            size = tensor.numel() * tensor.element_size()
            offset = tensor.storage_offset() * tensor.element_size()
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            views[name] = empty.set_(tensor.untyped_storage(), offset, (size,), (1,))
    return views


def build_landing(
    plan: PullPlan, views: Mapping[str, torch.Tensor], backend: Backend, *, commit: CommitMode
) -> Landing:
    """
    Raises:
        PlanMismatch: a run lies outside its parameter, or the engine has no such parameter.
        DeviceError: `staged` was asked for and the shadow does not fit.
    """
    params = tuple(_destination(run.dst_param, run.dst_off, run.nbytes, views) for run in plan.runs)
    addresses = {run.dst_param: views[run.dst_param].data_ptr() for run in plan.runs}
    layout = shadow_plan(plan.runs)
    shadow = _make_shadow(layout, backend, commit)
    if shadow is None:
        return Landing(params, params, _pieces_in_place(plan, params), None, addresses)
    arrivals = tuple(
        shadow.tensor[offset : offset + run.nbytes] for run, offset in zip(plan.runs, layout.run_offsets, strict=True)
    )
    return Landing(params, arrivals, _pieces_to_shadow(layout, shadow), shadow, addresses)


def _destination(name: str, offset: int, nbytes: int, views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    view = views.get(name)
    if view is None:
        raise PlanMismatch(f"the plan writes {name}, which the engine does not have (or not contiguously)")
    if offset < 0 or offset + nbytes > view.numel():
        raise PlanMismatch(f"the plan writes bytes {offset}..{offset + nbytes} of {name}, which has {view.numel()}")
    return view[offset : offset + nbytes]


def _make_shadow(layout: ShadowPlan, backend: Backend, commit: CommitMode) -> PersistentBlock | None:
    free, _ = backend.memory_info()
    if layout.nbytes == 0 or commit == "inplace" or (commit == "auto" and layout.nbytes > SHADOW_HEADROOM * free):
        return None
    try:
        return backend.alloc_persistent(layout.nbytes)
    except DeviceError:
        if commit == "staged":
            raise
        return None


def _pieces_in_place(plan: PullPlan, params: tuple[torch.Tensor, ...]) -> dict[int, tuple[Piece, ...]]:
    found: dict[int, list[Piece]] = {}
    for run, target in zip(plan.runs, params, strict=True):
        copies = found.setdefault(run.src_rank, [])
        copies.extend(Piece(run.src_off + start, target[start : start + size]) for start, size in pieces(run.nbytes))
    return {rank: tuple(copies) for rank, copies in found.items()}


def _pieces_to_shadow(layout: ShadowPlan, shadow: PersistentBlock) -> dict[int, tuple[Piece, ...]]:
    found: dict[int, list[Piece]] = {}
    for span in layout.ranges:
        target = shadow.tensor[span.shadow_off : span.shadow_off + span.nbytes]
        copies = found.setdefault(span.src_rank, [])
        copies.extend(Piece(span.src_off + start, target[start : start + size]) for start, size in pieces(span.nbytes))
    return {rank: tuple(copies) for rank, copies in found.items()}
