"""FSDP2 sharding, the optimizer over local shards, and where ranks meet."""

from __future__ import annotations

import functools
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

# They are public, but not declared.
from torch.distributed import DistNetworkError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer.errors import LearnerError, ModelError
from weight_sync.publish.shards import chunk_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from trainer.config.schema import LearnerConfig


UNSHARDED_SHARE = 1 / 8
"""Blocks stay whole between forward and backward if all of them together fit into this share of the device: that
saves one of two all-gathers per micro-batch."""


def open_store(host: str, port: int, *, is_master: bool, world_size: int, timeout_s: float) -> TCPStore:
    """Where the ranks meet: rank 0 is the master and holds the store, the others connect to its address.

    The master takes a free port for 0, by binding it, so that no one can take it in between. Raises LearnerError if it
    cannot bind the port, torch's DistStoreError if it did not respond in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, world_size, is_master=is_master, timeout=timeout, wait_for_workers=False)
    except DistNetworkError as error:
        if not is_master:
            raise
        raise LearnerError(
            f"learner.port={port} cannot be bound on {host}: {error}; use another port, or 0 for a free one"
        ) from error


def shard_model(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    *,
    float32_modules: Iterable[nn.Module] = (),
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    keep_unsharded: bool,
    cpu_offload: bool,
) -> None:
    """`fully_shard` every block, then the root with what is left (embedding, final norm, output matrix).

    Gradients are reduced in float32 and **summed** over ranks: the loss weights already hold the one global
    denominator, so FSDP2's mean would divide a second time.

    Args:
        float32_modules: inside the root, computed in float32 whatever the compute dtype.
        keep_unsharded: blocks are not gathered again for the backward.
    """
    half = compute_dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if half else None, reduce_dtype=torch.float32, cast_forward_inputs=half
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    shard: Any = functools.partial(fully_shard, mesh=mesh, offload_policy=offload)
    for block in blocks:
        shard(block, mp_policy=precision, reshard_after_forward=not keep_unsharded)
    for module in float32_modules:
        shard(module)
    shard(root, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a factor other than the world size would otherwise ask for.
            module.set_force_sum_reduction_for_comms(True)


def sharded_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, of the shape of this rank's shard of `param`, as a DTensor that shares its memory (`DTensor.from_local`
    would copy host memory to the device); unchanged if `param` is no DTensor."""
    return DTensor(local, param._spec, requires_grad=False) if isinstance(param, DTensor) else local


def clear_fsdp_forward(root: nn.Module) -> None:
    """Free what a forward without a backward gathered, and FSDP2's notes of it, which only a backward drops. Not
    between a forward with gradient and its backward, which reads the notes."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    assert isinstance(root, FSDPModule)
    order = root._get_fsdp_state()._comm_ctx.post_forward_order  # torch has no public way
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def learning_rate(step: int, *, config: LearnerConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (counted from 0): linear warm-up (of 4 steps: 0.25, 0.5, 0.75, 1.0 times
    `lr`), then the schedule down to the last step. A pure function, so a resumed run needs no scheduler state."""
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


class ParamState(NamedTuple):
    """One parameter as the model and as the optimizer see it; both share memory."""

    name: str
    param: nn.Parameter
    local: Tensor


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) with decay on matrices only: not on norms and biases."""

    def __init__(self, params: Mapping[str, nn.Parameter], *, config: LearnerConfig) -> None:
        """`params` by the names that they have in checkpoints; all of them are trained."""
        self._max_grad_norm = config.max_grad_norm
        self._slots = [
            ParamState(name, param, local_tensor(param.detach()).requires_grad_()) for name, param in params.items()
        ]
        groups = [
            {"params": [slot.local for slot in self._slots if (slot.param.ndim >= 2) == decays], "weight_decay": decay}
            for decays, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for slot in self._slots:  # allocated at once: a checkpoint is loaded into these tensors
            self._adamw.state[slot.local] = {
                "step": torch.zeros((), dtype=torch.float32, device=slot.local.device),
                "exp_avg": torch.zeros_like(slot.local),
                "exp_avg_sq": torch.zeros_like(slot.local),
            }

    def grad_sq_sum(self) -> Tensor:
        """Sum of squares over this rank's shards, float32[], on the gradients' device."""
        grads = [local_tensor(slot.param.grad) for slot in self._slots if slot.param.grad is not None]
        return get_total_norm(grads).square()

    def step(self, *, lr: float, grad_norm: float) -> None:
        """Clip to `max_grad_norm` by the given norm of the whole gradient, update, and drop the gradients."""
        for slot in self._slots:
            slot.local.grad = None if slot.param.grad is None else local_tensor(slot.param.grad)
        if grad_norm > self._max_grad_norm:
            locals_ = [slot.local for slot in self._slots]
            clip_grads_with_norm_(locals_, self._max_grad_norm, torch.tensor(grad_norm))
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
        return {
            f"{key}.{slot.name}": sharded_like(slot.param, self._adamw.state[slot.local][key])
            for slot in self._slots
            for key in ("exp_avg", "exp_avg_sq")
        }

    @property
    def num_updates(self) -> int:
        """Updates made so far, the same for every parameter."""
        return int(self._adamw.state[self._slots[0].local]["step"].item())

    def set_num_updates(self, count: int) -> None:
        """Of a loaded checkpoint: Adam's bias correction depends on it."""
        for slot in self._slots:
            self._adamw.state[slot.local]["step"].fill_(count)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor, *, name: str) -> tuple[int, int]:
    """(start, stop): this rank's rows of a DTensor, else all. Raises ModelError for a sharding other than by rows."""
    if not isinstance(tensor, DTensor) or tensor.placements == (Replicate(),):
        return 0, tensor.shape[0] if tensor.ndim else 1
    if tensor.placements != (Shard(0),):
        raise ModelError(f"{name} is sharded as {tensor.placements}; only rows (dimension 0) are supported")
    return chunk_rows(tensor.shape[0], tensor.device_mesh.size(), tensor.device_mesh.get_local_rank())
