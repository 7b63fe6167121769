"""How the ranks divide a model and a batch: replicas and shards of FSDP2, matrices of blocks (`tensor_parallel`), and
slices of packed rows.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509) divides a packed row: rank r of a context group computes the r-th slice
of its tokens. Around attention alone the group exchanges slices of tokens for slices of heads, so that every sequence
is whole there, and any `PackedLayout` stays as it is. Afterwards every rank of the group gets what was computed for all
loss tokens, so losses of sequences, returns and corrections know nothing of it.

Shape legend: `T` packed tokens, `S` those of a slice, `C` ranks of a context group, `H` heads, `D` head size, `L` loss
tokens, `K` kinds of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from trainer.config.schema import LearnerConfig
    from trainer.learner.attention import PackedLayout, Scores
    from weight_sync.device.base import Backend


class ContextGroup(NamedTuple):
    """The ranks that share every micro-batch of this rank."""

    group: ProcessGroup
    rank: int
    """Of this process in it: it has the `rank`-th slice."""
    size: int
    is_tensor_parallel: bool = False
    """The blocks of each compute all tokens; only the loss tokens are divided."""

    def slice_of(self, num_tokens: int) -> slice:
        """Of a row of `num_tokens`, which is then padded to a multiple of `size`."""
        num_own = -(-num_tokens // self.size)
        return slice(self.rank * num_own, (self.rank + 1) * num_own)

    def gather(self, parts: Sequence[Tensor], owner_L: np.ndarray) -> tuple[Tensor, ...]:
        """Collective. Values of all loss tokens, from those of every rank's own.

        Args:
            parts: K tensors of this rank's loss tokens, of one dtype.
            owner_L: int64[L], the rank of the group that has each loss token.

        Returns:
            K tensors [L]. Every rank computes the same loss of them, so a gradient flows back to its own alone; that of
            the other ranks is theirs.
        """
        found: Any = _GatherLossTokens.apply(torch.stack(list(parts)), owner_L, self)
        return tuple(found.unbind())


class ParallelContext(NamedTuple):
    """Where models are."""

    mesh: DeviceMesh
    """Of FSDP2: all ranks, or (replicas, shards)."""
    block_mesh: DeviceMesh
    """Of FSDP2 for blocks: with tensor parallelism the ranks that have the same part of their matrices."""
    tensor_mesh: DeviceMesh | None
    """The ranks that divide matrices; None without tensor parallelism."""
    device: torch.device
    backend: Backend
    group: ContextGroup | None
    """None if every rank has micro-batches of its own."""


def parallel_context(cfg: LearnerConfig, *, device: torch.device, backend: Backend) -> ParallelContext:
    """Collective. Neighbouring ranks, which are on one node where possible, share a model or a micro-batch.

    Shards are of all ranks, or of those of a replica; which of them share a micro-batch does not matter, because
    gradients are summed over all.
    """
    kind, num_ranks = backend.torch_device, dist.get_world_size()
    num_shards, size, divided = min(cfg.num_shards, num_ranks), cfg.ranks_per_batch, cfg.tensor_parallel_size
    has_replicas = num_shards < num_ranks
    if has_replicas:
        mesh = _mesh(kind, cfg, replica=num_ranks // num_shards, shard=num_shards)
    else:
        mesh = init_device_mesh(kind, (num_ranks,), mesh_dim_names=("shard",))
    if size == 1:
        return ParallelContext(mesh, mesh, None, device, backend, None)
    place = dist.get_rank() % size
    if divided == 1:
        group = _mesh(kind, cfg, batch=num_ranks // size, context=size).get_group("context")
        return ParallelContext(mesh, mesh, None, device, backend, ContextGroup(group, place, size))
    grid = _mesh(kind, cfg, replica=num_ranks // num_shards, shard=num_shards // divided, tensor=divided)
    block_mesh = grid["replica", "shard"] if has_replicas else grid["shard"]
    group = ContextGroup(grid.get_group("tensor"), place, size, is_tensor_parallel=True)
    return ParallelContext(mesh, block_mesh, grid["tensor"], device, backend, group)


def _mesh(kind: str, cfg: LearnerConfig, **sizes: int) -> DeviceMesh:
    """Of all ranks, by the names of its dimensions; neighbours differ in the last one."""
    grid = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups: list[ProcessGroup] = []
    for dim, size in enumerate(sizes.values()):
        ranks = grid.movedim(dim, -1).reshape(-1, size).tolist()
        # Not by init_device_mesh, whose groups wait for torch's 10 or 30 minutes whatever the deadline is.
        own, _ = dist.new_subgroups_by_enumeration(ranks, timeout=timedelta(seconds=cfg.timeout_s))
        assert isinstance(own, dist.ProcessGroup)
        groups.append(own)
    return DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=tuple(sizes))


class _GatherLossTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_KL: Tensor, owner_L: np.ndarray, context: ContextGroup) -> Tensor:
        counts = np.bincount(owner_L, minlength=context.size).tolist()
        longest = max(counts)
        padded_KL = own_KL.new_zeros(own_KL.shape[0], longest)
        padded_KL[:, : own_KL.shape[1]] = own_KL
        parts = [torch.empty_like(padded_KL) for _ in counts]
        if longest:
            dist.all_gather(parts, padded_KL, group=context.group)
        in_order = np.argsort(np.argsort(owner_L, kind="stable"), kind="stable")
        ctx.own_L = torch.from_numpy(np.flatnonzero(owner_L == context.rank)).to(own_KL.device)
        whole_KL = torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], dim=1)
        return whole_KL.index_select(1, torch.from_numpy(in_order).to(own_KL.device))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(1, ctx.own_L), None, None


@dataclass(frozen=True, slots=True)
class UlyssesLayout:
    """A `PackedLayout` for a slice of a row: `whole` is that of the padded row, and attends a slice of the heads."""

    whole: PackedLayout
    context: ContextGroup

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, how: Scores) -> Tensor:
        """Of the slice. Collective. Raises ModelError if the heads cannot be divided."""
        return _attend_divided(self, q_THD, k_THD, v_THD, how)  # pyright: ignore[reportCallIssue]


@torch.compiler.disable  # collectives
def _attend_divided(layout: UlyssesLayout, q_SHD: Tensor, k_SHD: Tensor, v_SHD: Tensor, how: Scores) -> Tensor:
    size, num_heads, num_kv_heads = layout.context.size, q_SHD.shape[1], k_SHD.shape[1]
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        raise ModelError(
            f"learner.context_parallel_size={size} must divide the {num_heads} attention heads of the model, and "
            f"divide its {num_kv_heads} key-value heads or be a multiple of them"
        )
    if num_kv_heads % size:  # each goes to several ranks
        k_SHD, v_SHD = (x.repeat_interleave(size // num_kv_heads, dim=1) for x in (k_SHD, v_SHD))
    widths = [x.shape[1] // size for x in (q_SHD, k_SHD, v_SHD)]
    # [C, S, heads of one rank, D]: all three in one exchange
    sent = torch.cat([x.unflatten(1, (size, -1)).transpose(0, 1) for x in (q_SHD, k_SHD, v_SHD)], dim=2)
    q_THD, k_THD, v_THD = _exchange(sent, layout.context).flatten(0, 1).split(widths, dim=1)
    if how.sinks_H is not None:
        how = how._replace(sinks_H=how.sinks_H.unflatten(0, (size, -1))[layout.context.rank])
    out_THD = layout.whole.attend(q_THD, k_THD, v_THD, how)
    return _exchange(out_THD.unflatten(0, (size, -1)), layout.context).transpose(0, 1).flatten(1, 2)


def _exchange(parts_CSHD: Tensor, context: ContextGroup) -> Tensor:
    """Part r to rank r of the group; the parts that this rank gets, by sender."""
    return _Exchange.apply(parts_CSHD, context.group)  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0], ctx.group), None  # pyright: ignore[reportReturnType]
