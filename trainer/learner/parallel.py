"""The process group of the learner ranks, and FSDP2 over it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

# They are public, but not declared.
from torch.distributed import DistNetworkError, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from trainer.learner.errors import LearnerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.device.base import Backend

UNSHARDED_SHARE = 1 / 8
"""Blocks stay whole between forward and backward if all of them together fit into this share of the device: that
saves one of two all-gathers per micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks meet: rank 0 holds the store, the others connect to its address."""

    store: Store
    host: str
    port: int

    @staticmethod
    def host_at(host: str, *, port: int, world_size: int, timeout_s: float) -> Rendezvous:
        """Open the store on `port`; 0 takes a free one, by binding it, so nobody can take it in between.

        Raises:
            LearnerError: the port cannot be bound.
        """
        try:
            store = TCPStore(
                host, port, world_size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except DistNetworkError as error:
            raise LearnerError(
                f"learner.port={port} cannot be bound on {host}: {error}; use another port, or 0 for a free one"
            ) from error
        return Rendezvous(store=store, host=host, port=store.port)

    @staticmethod
    def join(host: str, port: int, *, world_size: int, timeout_s: float) -> Rendezvous:
        """Connect to rank 0's store; raises torch's DistStoreError when it does not answer in time."""
        store = TCPStore(
            host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        return Rendezvous(store=store, host=host, port=port)


def open_process_group(
    rendezvous: Rendezvous, *, backend: Backend, rank: int, world_size: int, timeout_s: float
) -> None:
    """Join the default process group. Every collective fails after `timeout_s`. One rank needs a group too: FSDP2 has
    no other way to run."""
    dist.init_process_group(
        backend=backend.collective,
        store=rendezvous.store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def close_process_group() -> None:
    """Leave the default process group. Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()


def learner_mesh(backend: Backend, world_size: int) -> DeviceMesh:
    """One dimension, `fsdp`, over all ranks."""
    return init_device_mesh(backend.torch_device, (world_size,), mesh_dim_names=("fsdp",))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """How FSDP2 treats the parameters."""

    mesh: DeviceMesh
    compute_dtype: torch.dtype
    keep_unsharded: bool
    """Blocks are not re-gathered for the backward."""
    cpu_offload: bool


def shard_model(
    root: nn.Module, blocks: Sequence[nn.Module], plan: ShardingPlan, *, float32_modules: Sequence[nn.Module] = ()
) -> None:
    """`fully_shard` every block, then the root with what is left (embedding, final norm, output matrix).

    `float32_modules` inside the root are computed in float32 whatever the plan says.

    Gradients are reduced in float32 and **summed** over ranks: the loss weights already hold the one global
    denominator, so FSDP2's mean would divide a second time.
    """
    half = plan.compute_dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=plan.compute_dtype if half else None, reduce_dtype=torch.float32, cast_forward_inputs=half
    )
    offload = CPUOffloadPolicy(pin_memory=plan.mesh.device_type != "cpu") if plan.cpu_offload else OffloadPolicy()
    for block in blocks:
        fully_shard(
            block,
            mesh=plan.mesh,
            mp_policy=precision,
            offload_policy=offload,
            reshard_after_forward=not plan.keep_unsharded,
        )
    for module in float32_modules:
        fully_shard(module, mesh=plan.mesh, offload_policy=offload)
    fully_shard(root, mesh=plan.mesh, mp_policy=precision, offload_policy=offload)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a factor other than the world size would otherwise ask for.
            module.set_force_sum_reduction_for_comms(True)


def sharded_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, which has the shape of this rank's shard of `param`, as a DTensor that shares its memory; as it is if
    `param` is no DTensor.

    `DTensor.from_local` would copy what lies on the host to the device of the mesh, and then share nothing.
    """
    return DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local


def end_forward(root: nn.Module) -> None:
    """Give back what a forward gathered, and what FSDP2 noted of it. Without a backward, the root would stay whole, and
    the notes, which only a backward throws away, would grow for as long as the run lasts.

    Not between a forward with gradient and its backward, which reads the notes.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert isinstance(root, FSDPModule)
    order = root._get_fsdp_state()._comm_ctx.post_forward_order  # torch has no public way
    for group in order:
        group._post_forward_indices.clear()
    order.clear()
