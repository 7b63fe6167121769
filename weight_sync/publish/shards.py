"""What a learner rank holds: its shards as boxes of saved tensors, under the names and shapes of a checkpoint.

Understands plain models and DTensors whose placements leave a rank one box: FSDP2 (`fully_shard`), also with replicas
(HSDP) and over tensor parallelism. Every rank lists its box; the planner shares the work among ranks that hold the same
one. No collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.errors import PlanMismatch
from weight_sync.lazy_tensor import LazyTensor, follow, lazy_in, new_lazy
from weight_sync.plan.geometry import extent, row_major_strides
from weight_sync.plan.types import ParamMeta, ShardBox

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

    @property
    def is_whole(self) -> bool:
        """It is the parameter itself, under its name in the checkpoint."""
        return self.row is None and self.offset == 0 and self.stride == row_major_strides(self.shape)

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
        if self.is_whole:
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


def _whole(name: str, shape: tuple[int, ...]) -> LazyTensor:
    twin = torch.empty(shape, device="meta")
    return new_lazy(
        ParamMeta(name=name, shape=shape, dtype="float32"), twin, dtype=twin.dtype, device=torch.device("cpu")
    )


class _Following(TorchDispatchMode):
    """Lazy tensors in, lazy tensors out; everything else runs as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        lazies = lazy_in((args, kwargs))
        return follow(func, lazies, args, kwargs) if lazies else func(*args, **kwargs)


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
        if not isinstance(tensor, LazyTensor):
            raise PlanMismatch(f"{type(model).__name__} saves {name}, which is not a view of any of its parameters")
        saved[tensor.source.name].append(_located(name, tensor))
    lost = [name for name, parts in saved.items() if sum(prod(p.shape) for p in parts) != prod(shapes[name])]
    if lost:
        raise PlanMismatch(f"{type(model).__name__} does not save every element of {', '.join(lost[:4])} exactly once")
    return tuple(part for parts in saved.values() for part in parts)


def _located(name: str, lazy: LazyTensor) -> SavedTensor:
    """Where a saved tensor lies in its parameter; refuses what ranks could not serve by rows."""
    shape, full = tuple(lazy.twin.shape), lazy.source.shape
    offset, stride = int(lazy.twin.storage_offset()), tuple(lazy.twin.stride())
    row_elements = prod(full[1:])
    in_row = (offset % row_elements if row_elements else 0) + extent(shape, stride) <= row_elements
    keeps_rows = not full or (shape[:1] == full[:1] and (full[0] <= 1 or stride[0] == row_elements))
    whole = shape == full and offset == 0 and (stride == row_major_strides(full) or prod(full) == 0)
    if not whole and keeps_rows:
        keeps_rows = offset + extent(shape[1:], stride[1:]) <= row_elements
    if not (whole or in_row or keeps_rows):
        raise PlanMismatch(
            f"{name} {shape} lies in {lazy.source.name} {full} at offset {offset} with strides {stride}; only whole "
            "rows (dimension 0), or a part of a single row, can be synchronised"
        )
    row = None if whole or keeps_rows else offset // max(1, row_elements)
    return SavedTensor(
        name=name,
        shape=shape,
        param=lazy.source.name,
        offset=offset,
        stride=stride,
        row_elements=row_elements,
        row=row,
    )


def chunk_rows(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Rows `[start, stop)` that `Shard(0)` gives to a rank.

    The split is `torch.chunk`'s: every rank gets ceil(num_rows / num_ranks) rows until they run out, so the last
    shards may be shorter or empty. 10 rows over 4 ranks: 3, 3, 3, 1. 5 rows over 4 ranks: 2, 2, 1, 0.
    """
    if num_ranks < 1 or not 0 <= rank < num_ranks or num_rows < 0:
        raise ValueError(
            f"cannot give rank {rank} of {num_ranks} its part of {num_rows} rows; need 0 <= rank < num_ranks"
        )
    per_rank = -(-num_rows // num_ranks)
    return min(rank * per_rank, num_rows), min((rank + 1) * per_rank, num_rows)


def local_shards(
    model: torch.nn.Module, *, rollout_dtype: str
) -> tuple[tuple[ParamMeta, ...], tuple[ShardBox, ...], dict[str, torch.Tensor]]:
    """Describe this rank's part of a model and hand out the live local tensors.

    Every rank lists every parameter, and the boxes of those that it holds a part of. Plain tensors, and buffers that
    checkpoints have, are served whole by global rank 0. A tied tensor appears once, under the first of its names, as in
    a Hugging Face checkpoint. Parameters that a checkpoint stores in pieces are described as those pieces: of fused
    experts, sharded by expert, a rank serves each tensor of its experts whole.
    Ranks are global (`torch.distributed.get_rank()`, 0 without a process group).

    The tensors alias the parameters (optimizer steps show through) in the dtype that the learner holds. They stay valid
    until the model is wrapped, moved or loaded with `assign=True`.

    Args:
        rollout_dtype: torch dtype name that the engine stores, e.g. "bfloat16".

    Returns:
        Full parameter descriptions under their checkpoint names, this rank's shards, none of them empty, and the local
        tensor of every shard.

    Raises:
        PlanMismatch: placements that leave a rank more than a box (lists every such parameter), or a parameter that
            checkpoints store in a form other than views of its rows.
    """
    if not isinstance(getattr(torch, rollout_dtype, None), torch.dtype):
        raise PlanMismatch(f"rollout dtype must be the name of a torch dtype such as 'bfloat16', got {rollout_dtype!r}")
    _reshard(model)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    named, saved = saved_tensors(model)
    parts: dict[str, LocalPart] = {}
    problems: list[str] = []
    for name, param in named.items():
        try:
            parts[name] = local_part(param, rank)
        except PlanMismatch as error:
            problems.append(f"{name} {tuple(param.shape)}: {error}")
    for piece in saved:
        part = parts.get(piece.param)
        if part is not None and not piece.is_whole and part.size[1:] != tuple(named[piece.param].shape[1:]):
            problems.append(f"{piece.param} is saved in parts such as {piece.name}, so it can only be sharded by rows")
    if problems:
        raise PlanMismatch(f"rank {rank} holds parameters that cannot be served: {'; '.join(problems)}")
    metas: list[ParamMeta] = []
    shards: list[ShardBox] = []
    tensors: dict[str, torch.Tensor] = {}
    for piece in saved:
        part = parts[piece.param]
        dtype = rollout_dtype if part.tensor.is_floating_point() else str(part.tensor.dtype).removeprefix("torch.")
        metas.append(ParamMeta(name=piece.name, shape=piece.shape, dtype=dtype))
        start, size = part.start, part.size
        if not piece.is_whole:
            first, stop = piece.held_rows(start[0], start[0] + size[0])
            start, size = (first, *(0 for _ in piece.shape[1:])), (stop - first, *piece.shape[1:])
        if part.is_held and prod(size):
            shards.append(ShardBox(piece.name, start, size, part.is_replicated))
            tensors[piece.name] = piece.view(part.tensor, start=part.start[0] if part.start else 0)
    return tuple(metas), tuple(shards), tensors


def _reshard(model: torch.nn.Module) -> None:
    """After a forward pass the root group may still be gathered: its parameters would be temporary full tensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class LocalPart(NamedTuple):
    """The box of a parameter that this rank has, and the live tensor that holds it."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    tensor: torch.Tensor
    is_held: bool = True
    is_replicated: bool = False
    """Other ranks hold the same box."""

    @property
    def box(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))


def local_part(param: torch.Tensor, rank: int = 0) -> LocalPart:
    """Of a parameter, sharded or not; one that is not counts as held by rank 0. Raises PlanMismatch for placements that
    leave this rank more than a box."""
    shape = tuple(param.shape)
    if not isinstance(param, DTensor):
        return LocalPart((0,) * len(shape), shape, param.detach(), is_held=rank == 0)
    mesh, placements, local = param.device_mesh, param.placements, param.to_local().detach()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalPart((0,) * len(shape), shape, local, is_held=False)
    # The indices that are left in each dimension, in the order of the local tensor.
    left = [np.arange(length) for length in shape]
    for index, num_parts, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise PlanMismatch(f"placements {placements}; allowed: Shard and Replicate")
        indices = left[placement.dim]
        if isinstance(placement, _StridedShard):
            factor = int(placement.split_factor)
            if len(indices) % (num_parts * factor):
                raise PlanMismatch(
                    f"placements {placements} on a mesh of shape {tuple(mesh.shape)} split {len(indices)} unevenly; a "
                    f"length that is sharded twice must be a multiple of {num_parts * factor}"
                )
            indices = indices.reshape(factor, num_parts, -1)[:, index].reshape(-1)
        else:
            indices = indices[slice(*chunk_rows(len(indices), num_parts, index))]
        left[placement.dim] = indices
    size = tuple(len(indices) for indices in left)
    if tuple(local.shape) != size:
        raise PlanMismatch(f"the local shard has shape {tuple(local.shape)}, {placements} should give {size}")
    if any(len(indices) and indices[-1] - indices[0] != len(indices) - 1 for indices in left):
        raise PlanMismatch(f"placements {placements} on a mesh of shape {tuple(mesh.shape)} leave more than one box")
    start = tuple(int(indices[0]) if len(indices) else 0 for indices in left)
    # Ranks beyond the mesh may have one of their own, with the same boxes (norms, in FSDP over tensor parallelism).
    is_replicated = mesh.size() < dist.get_world_size() or any(
        isinstance(placement, Replicate) and num_parts > 1
        for placement, num_parts in zip(placements, mesh.shape, strict=True)
    )
    return LocalPart(start, size, local, is_replicated=is_replicated)
