"""Process group, FSDP2 sharding, and the optimizer over local shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

# They are public, but not declared.
from torch.distributed import DistNetworkError, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.errors import LearnerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from trainer.config.schema import LearnerConfig
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


def clear_fsdp_forward(root: nn.Module) -> None:
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


def learning_rate(step: int, *, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear warm-up, then the schedule down to the last step.

    A pure function of the step, so a resumed run needs no scheduler state.

    Example:
        warmup_steps=4: 0.25, 0.5, 0.75, 1.0 times `lr`, then the schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay_steps = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / decay_steps)
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        case _:
            raise ValueError(f"learner.lr_schedule must be constant, cosine or linear, got {config.lr_schedule!r}")
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamState:
    """One parameter as the model and as the optimizer see it; both share memory."""

    name: str
    param: nn.Parameter
    local: Tensor


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only: not on norms and biases."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, config: LearnerConfig) -> None:
        """`params` by the names that they have in checkpoints; all of them are trained."""
        self._config = config
        self._slots = [
            ParamState(name=name, param=param, local=local_tensor(param.detach()).requires_grad_())
            for name, param in params.items()
        ]
        decayed = [slot.local for slot in self._slots if slot.param.ndim >= 2]
        plain = [slot.local for slot in self._slots if slot.param.ndim < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
            if params
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
        for slot in self._slots:  # allocated at once: a checkpoint is loaded into these tensors
            self._adamw.state[slot.local] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.local.device),
                "exp_avg": torch.zeros_like(slot.local),
                "exp_avg_sq": torch.zeros_like(slot.local),
            }

    def grad_sq_sum(self) -> Tensor:
        """Sum of squares over this rank's shards, float32[], on the gradients' device. Sum it over ranks for the
        squared norm of the whole gradient."""
        grads = [local_tensor(slot.param.grad) for slot in self._slots if slot.param.grad is not None]
        return get_total_norm(grads).square()

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` by the given norm of the whole gradient, update, and drop the gradients."""
        for slot in self._slots:
            slot.local.grad = None if slot.param.grad is None else local_tensor(slot.param.grad)
        if grad_norm > self._config.max_grad_norm:
            locals_ = [slot.local for slot in self._slots]
            clip_grads_with_norm_(locals_, self._config.max_grad_norm, torch.tensor(grad_norm))
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for slot in self._slots:
            slot.local.grad = None
            slot.param.grad = None

    def weights(self) -> dict[str, Tensor]:
        """What is trained, by parameter name, for checkpoints."""
        return {slot.name: slot.param.detach() for slot in self._slots}

    def state(self) -> dict[str, Tensor]:
        """Moments by parameter name, as (D)Tensors that share memory with the optimizer, for checkpoints."""
        state: dict[str, Tensor] = {}
        for slot in self._slots:
            moments = self._adamw.state[slot.local]
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{key}.{slot.name}"] = sharded_like(slot.param, moments[key])
        return state

    def tensors(self) -> Iterator[Tensor]:
        """This rank's shards of what is trained and of the moments: all that takes memory between two steps."""
        for slot in self._slots:
            moments = self._adamw.state[slot.local]
            yield from (slot.local, moments["exp_avg"], moments["exp_avg_sq"])

    @property
    def num_updates(self) -> int:
        """Updates made so far, the same for every parameter."""
        return int(self._adamw.state[self._slots[0].local]["step"].item())

    def set_num_updates(self, count: int) -> None:
        """Of a loaded checkpoint: Adam's bias correction depends on it."""
        for slot in self._slots:
            self._adamw.state[slot.local]["step"].fill_(count)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
