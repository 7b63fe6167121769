"""How a model's parameters are called, cut and shaped in a Hugging Face checkpoint, which is what engines load.

transformers >= 5 may train parameters in another form than it saves them: the experts of a layer are one tensor
`mlp.experts.gate_up_proj` [E, 2I, H] and are saved as `mlp.experts.{e}.gate_proj.weight` [I, H] and `up_proj`. Its own
save conversion is run over tensors without data, which shows where in which parameter every saved tensor lies; nothing
is written down here about any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.errors import PlanMismatch
from weight_sync.geometry import extent, row_major_strides
from weight_sync.ghost import Ghost, follow, ghosts_in, new_ghost
from weight_sync.types import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
"""Name parts that wrappers insert: torch.compile, activation checkpointing, FSDP1 and DDP (that one only in front)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A checkpoint tensor, and the strided view of one parameter that holds it, in elements."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    param: str
    """The parameter's name in the model, without wrappers."""
    offset: int
    stride: tuple[int, ...]
    row_elements: int
    """Elements in one row (index of dimension 0) of the parameter."""
    row: int | None
    """The one row of the parameter that holds all of it (an expert); None: its rows are those of the parameter."""

    def held_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Rows of this tensor that lie in rows `[start, stop)` of the parameter; (0, 0) if none does."""
        if self.row is None:
            return start, stop
        return (0, self.shape[0] if self.shape else 1) if start <= self.row < stop else (0, 0)

    def view(self, local: torch.Tensor, *, start: int) -> torch.Tensor:
        """The rows that are held, as a view of `local`, which is rows `[start, ...)` of the parameter.

        Raises:
            PlanMismatch: this tensor is a part of the parameter, and `local` is not contiguous.
        """
        if self.row is None and self.offset == 0 and self.stride == row_major_strides(self.shape):
            return local
        if not local.is_contiguous():
            raise PlanMismatch(f"{self.param} must be contiguous to be cut into {self.name}, got {local.stride()}")
        first, last = self.held_rows(start, start + (local.shape[0] if local.ndim else 1))
        shape = (last - first, *self.shape[1:]) if self.shape else ()
        offset = self.offset if self.row is None else self.offset - start * self.row_elements
        return local.as_strided(shape, self.stride, local.storage_offset() + offset)


def saved_tensors(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], tuple[SavedTensor, ...]]:
    """Parameters and persistent buffers by name, and every tensor a checkpoint has, in model order.

    Names are without wrappers; a tied parameter occurs once.

    Raises:
        PlanMismatch: two parameters have one name without wrappers, or the checkpoint holds one in a form that is not
            a view by rows (computed, or put together from several parameters). Names it and the operation.
    """
    named: dict[str, torch.Tensor] = {}
    for raw, tensor in (*model.named_parameters(), *persistent_buffers(model)):
        name = _without_wrappers(raw)
        if name in named:
            raise PlanMismatch(f"two parameters are called {name} once wrapper names are removed (second: {raw})")
        named[name] = tensor
    return named, checkpoint_views(model, {name: tuple(tensor.shape) for name, tensor in named.items()})


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that belong to the checkpoint, under their names in the model (a router's correction bias, say)."""
    for prefix, module in model.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            if key not in module._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def checkpoint_views(model: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> tuple[SavedTensor, ...]:
    """Where every tensor of the model's checkpoint lies, given its parameters' full shapes by name without wrappers.

    Raises:
        PlanMismatch: see `saved_tensors`.
    """
    inner = _unwrapped(model)
    if hasattr(inner, "save_pretrained"):
        return _converted(cast("PreTrainedModel", inner), shapes)
    return tuple(_located(name, _whole(name, shape)) for name, shape in shapes.items())


def _without_wrappers(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for part in _WRAPPERS[:-1]:
        name = name.replace(part, "")
    return name


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    while isinstance(wrapped := getattr(model, "_orig_mod", getattr(model, "module", None)), torch.nn.Module):
        model = wrapped
    return model


def _whole(name: str, shape: tuple[int, ...]) -> Ghost:
    twin = torch.empty(shape, device="meta")
    return new_ghost(
        ParamMeta(name=name, shape=shape, dtype="float32"), twin, dtype=twin.dtype, device=torch.device("cpu")
    )


class _Following(TorchDispatchMode):
    """Ghosts in, ghosts out; everything else runs as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        ghosts = ghosts_in((args, kwargs))
        return follow(func, ghosts, args, kwargs) if ghosts else func(*args, **kwargs)


def _converted(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> tuple[SavedTensor, ...]:
    from transformers.core_model_loading import revert_weight_conversion

    hollow: dict[str, torch.Tensor] = {name: _whole(name, shape) for name, shape in shapes.items()}
    try:
        with torch.inference_mode(False), torch.no_grad(), _Following():
            converted = revert_weight_conversion(model, hollow)
    except PlanMismatch as error:
        raise PlanMismatch(
            f"{type(model).__name__} saves a parameter in another form than it trains it, and not as views: {error}"
        ) from error
    saved: dict[str, list[SavedTensor]] = {name: [] for name in shapes}
    for name, tensor in converted.items():
        if not isinstance(tensor, Ghost):
            raise PlanMismatch(f"{type(model).__name__} saves {name}, which is no view of any of its parameters")
        saved[tensor.source.name].append(_located(name, tensor))
    lost = [name for name, parts in saved.items() if sum(prod(p.shape) for p in parts) != prod(shapes[name])]
    if lost:
        raise PlanMismatch(f"{type(model).__name__} does not save every element of {', '.join(lost[:4])} exactly once")
    return tuple(part for parts in saved.values() for part in parts)


def _located(name: str, ghost: Ghost) -> SavedTensor:
    """Where a saved tensor lies in its parameter; refuses what ranks could not serve by rows."""
    shape, full = tuple(ghost.twin.shape), ghost.source.shape
    offset, stride = int(ghost.twin.storage_offset()), tuple(ghost.twin.stride())
    row_elements = prod(full[1:])
    in_row = (offset % row_elements if row_elements else 0) + extent(shape, stride) <= row_elements
    keeps_rows = not full or (shape[:1] == full[:1] and (full[0] <= 1 or stride[0] == row_elements))
    whole = shape == full and offset == 0 and (stride == row_major_strides(full) or prod(full) == 0)
    if not whole and keeps_rows:
        keeps_rows = offset + extent(shape[1:], stride[1:]) <= row_elements
    if not (whole or in_row or keeps_rows):
        raise PlanMismatch(
            f"{name} {shape} lies in {ghost.source.name} {full} at offset {offset} with strides {stride}; only whole "
            "rows (dimension 0), or a part of a single row, can be synchronised"
        )
    row = None if whole or keeps_rows else offset // max(1, row_elements)
    return SavedTensor(
        name=name,
        shape=shape,
        param=ghost.source.name,
        offset=offset,
        stride=stride,
        row_elements=row_elements,
        row=row,
    )
