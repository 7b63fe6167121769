"""What a learner rank holds: checkpoint names, full shapes, and this rank's rows of each checkpoint tensor.

Understands plain models and FSDP2 (`fully_shard`) on any mesh whose shard dimension splits rows: 1-D, and replicate x
shard (HSDP), where replica 0 serves and the others hold empty shards. No collective is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from weight_sync.checkpoint_names import saved_tensors
from weight_sync.errors import PlanMismatch
from weight_sync.types import ParamMeta, ShardDesc

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """The shards of all ranks of a 1-D FSDP2 mesh, as if every rank had reported its own. Empty shards included.

    For parameters that are trained as they are saved; fused experts are split by expert, which names do not tell.
    """
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
    Plain tensors, and buffers that checkpoints have, are served whole by global rank 0. A tied tensor appears once,
    under the first of its names, as in a Hugging Face checkpoint. Parameters that a checkpoint stores in pieces are
    described as those pieces: of fused experts, sharded by expert, a rank serves each tensor of its experts whole.
    Ranks are global (`torch.distributed.get_rank()`, 0 without a process group).

    The tensors alias the parameters (optimizer steps show through) in the dtype that the learner holds. They stay valid
    until the model is wrapped, moved or loaded with `assign=True`.

    Args:
        rollout_dtype: torch dtype name that the engine stores, e.g. "bfloat16".

    Returns:
        Full parameter descriptions under their checkpoint names, this rank's shards, and the local tensor
        ([row_stop - row_start, ...]) of every shard that is not empty.

    Raises:
        PlanMismatch: a placement other than rows over one mesh dimension (lists every such parameter), or a parameter
            that checkpoints store in a form other than views of its rows.
    """
    if not isinstance(getattr(torch, rollout_dtype, None), torch.dtype):
        raise PlanMismatch(f"rollout dtype must be the name of a torch dtype such as 'bfloat16', got {rollout_dtype!r}")
    _reshard(model)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    named, saved = saved_tensors(model)
    parts: dict[str, _LocalPart] = {}
    problems: list[str] = []
    for name, param in named.items():
        try:
            parts[name] = _local_part(param, rank)
        except PlanMismatch as error:
            problems.append(f"{name} {tuple(param.shape)}: {error}")
    if problems:
        raise PlanMismatch(f"rank {rank} holds parameters that cannot be served by rows: {'; '.join(problems)}")
    metas: list[ParamMeta] = []
    shards: list[ShardDesc] = []
    tensors: dict[str, torch.Tensor] = {}
    for piece in saved:
        part = parts[piece.param]
        start, stop = piece.held_rows(part.row_start, part.row_stop)
        dtype = rollout_dtype if part.tensor.is_floating_point() else str(part.tensor.dtype).removeprefix("torch.")
        metas.append(ParamMeta(name=piece.name, shape=piece.shape, dtype=dtype))
        shards.append(ShardDesc(param=piece.name, rank=rank, row_start=start, row_stop=stop))
        if stop > start:
            tensors[piece.name] = piece.view(part.tensor, start=part.row_start)
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


def _local_part(param: torch.Tensor, rank: int) -> _LocalPart:
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
