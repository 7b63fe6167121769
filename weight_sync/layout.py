"""What a learner rank holds: checkpoint names, full shapes, and this rank's rows of each parameter.

Understands plain models and FSDP2 (`fully_shard`) on any mesh whose shard dimension splits rows: 1-D, and replicate x
shard (HSDP), where replica 0 serves and the others hold empty shards. No collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from weight_sync.errors import PlanMismatch
from weight_sync.types import ParamMeta, ShardDesc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module.")
"""Name parts that wrappers insert: torch.compile, activation checkpointing, FSDP1 and DDP (that one only in front)."""


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


def shard_descs(params: Sequence[ParamMeta], *, num_ranks: int) -> tuple[ShardDesc, ...]:
    """The shards of all ranks of a 1-D FSDP2 mesh, as if every rank had reported its own. Empty shards included."""
    descs: list[ShardDesc] = []
    for rank in range(num_ranks):
        for meta in params:
            start, stop = chunk_rows(meta.shape[0] if meta.shape else 1, num_ranks, rank)
            descs.append(ShardDesc(param=meta.name, rank=rank, row_start=start, row_stop=stop))
    return tuple(descs)


def local_shards(
    model: torch.nn.Module, *, rollout_dtype: str
) -> tuple[tuple[ParamMeta, ...], tuple[ShardDesc, ...], dict[str, torch.Tensor]]:
    """Describe this rank's part of a model and hand out the live local tensors.

    Every rank describes every parameter; a rank that does not serve one reports an empty shard (row_start == row_stop).
    Plain tensors are served whole by global rank 0. A tied tensor appears once, under the first of its names, as in a
    Hugging Face checkpoint. Ranks are global (`torch.distributed.get_rank()`, 0 without a process group).

    The tensors alias the parameters (optimizer steps show through) in the dtype that the learner holds. They stay valid
    until the model is wrapped, moved or loaded with `assign=True`.

    Args:
        rollout_dtype: torch dtype name that the engine stores, e.g. "bfloat16".

    Returns:
        Full parameter descriptions under their checkpoint names, this rank's shards, and the local tensor
        ([row_stop - row_start, ...]) of every shard that is not empty.

    Raises:
        PlanMismatch: a placement other than rows over one mesh dimension, or a parameter that checkpoints store in
            another form (fused experts). Lists every such parameter.
    """
    if not isinstance(getattr(torch, rollout_dtype, None), torch.dtype):
        raise PlanMismatch(f"rollout dtype must be the name of a torch dtype such as 'bfloat16', got {rollout_dtype!r}")
    _reshard(model)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    named = _checkpoint_names(model)
    metas: list[ParamMeta] = []
    shards: list[ShardDesc] = []
    tensors: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    for name, param in named.items():
        try:
            part = _local_part(param, rank)
        except PlanMismatch as error:
            problems.append(f"{name} {tuple(param.shape)}: {error}")
            continue
        metas.append(ParamMeta(name=name, shape=tuple(param.shape), dtype=rollout_dtype))
        shards.append(ShardDesc(param=name, rank=rank, row_start=part.row_start, row_stop=part.row_stop))
        if part.row_stop > part.row_start:
            tensors[name] = part.tensor
    if problems:
        raise PlanMismatch(f"rank {rank} holds parameters that cannot be served by rows: {'; '.join(problems)}")
    return tuple(metas), tuple(shards), tensors


def _reshard(model: torch.nn.Module) -> None:
    """After a forward pass the root group may still be gathered: its parameters would be temporary full tensors."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalPart:
    """What this rank serves of a parameter: rows and the live tensor that holds them."""

    row_start: int
    row_stop: int
    tensor: torch.Tensor


def _local_part(param: torch.nn.Parameter, rank: int) -> _LocalPart:
    rows = param.shape[0] if param.ndim else 1
    if not isinstance(param, DTensor):
        return _LocalPart(row_start=0, row_stop=rows if rank == 0 else 0, tensor=param.detach())
    mesh, placements = param.device_mesh, param.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return _LocalPart(row_start=0, row_stop=0, tensor=param.to_local().detach())
    num_shards, index, serves = 1, 0, True
    for dim, placement in enumerate(placements):
        # The type is compared, not isinstance: a strided shard (FSDP over tensor parallel) interleaves rows.
        if type(placement) is Replicate:
            serves = serves and coordinate[dim] == 0
        elif type(placement) is Shard and placement.dim == 0 and num_shards == 1:
            num_shards, index = mesh.size(dim), coordinate[dim]
        else:
            raise PlanMismatch(
                f"placements {placements} on a mesh of shape {tuple(mesh.shape)}; allowed are Shard(0) on one mesh "
                "dimension and Replicate on the others"
            )
    start, stop = chunk_rows(rows, num_shards, index)
    local = param.to_local().detach()
    expected = (stop - start, *param.shape[1:]) if param.ndim else ()
    if tuple(local.shape) != expected:
        raise PlanMismatch(
            f"the local shard has shape {tuple(local.shape)}, rows {start}-{stop} should give {expected}"
        )
    return _LocalPart(row_start=start, row_stop=stop if serves else start, tensor=local)


def _checkpoint_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters under the names that `save_pretrained` would use and that engines load.

    Raises:
        PlanMismatch: two parameters have one name without wrappers, or checkpoints store one in another form.
    """
    named: dict[str, torch.nn.Parameter] = {}
    for raw, param in model.named_parameters():
        name = _without_wrappers(raw)
        if name in named:
            raise PlanMismatch(f"two parameters are called {name} once wrapper names are removed (second: {raw})")
        named[name] = param
    return {saved: named[name] for name, saved in _saved_names(model, named).items()}


def _without_wrappers(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for part in _WRAPPERS[:-1]:
        name = name.replace(part, "")
    return name


def _saved_names(model: torch.nn.Module, named: dict[str, torch.nn.Parameter]) -> dict[str, str]:
    """Parameter name -> checkpoint name.

    transformers >= 5 may train parameters in another form than it saves them (experts fused into one tensor). Its own
    save conversion is run over tensors without data: one that comes out as the same object was at most renamed.
    """
    inner = model
    while isinstance(wrapped := getattr(inner, "_orig_mod", getattr(inner, "module", None)), torch.nn.Module):
        inner = wrapped
    if not hasattr(inner, "save_pretrained"):
        return {name: name for name in named}
    from transformers.core_model_loading import revert_weight_conversion

    hollow = {name: torch.empty(param.shape, device="meta") for name, param in named.items()}
    saved = {
        id(tensor): name for name, tensor in revert_weight_conversion(cast("PreTrainedModel", inner), hollow).items()
    }
    converted = [name for name, tensor in hollow.items() if id(tensor) not in saved]
    if converted:
        raise PlanMismatch(
            f"{type(inner).__name__} saves {len(converted)} parameters in another form than it trains them, e.g. "
            f"{', '.join(converted[:4])}; only parameters that are stored as they are can be synchronised by rows"
        )
    return {name: saved[id(tensor)] for name, tensor in hollow.items()}
