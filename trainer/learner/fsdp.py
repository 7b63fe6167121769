"""Where a model's parameters are: sharded by FSDP2, or whole on one rank; and where ranks meet."""

from __future__ import annotations

import functools
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

# They are public, but not declared.
from torch.distributed import DistNetworkError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from trainer.errors import LearnerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed.device_mesh import DeviceMesh


UNSHARDED_SHARE = 1 / 8
"""Parameters in the compute dtype stay whole through a step if all of them together fit into this share of the device.
Otherwise blocks are made whole for each forward and each backward."""


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
    block_mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reshards_after_forward: bool,
    cpu_offload: bool,
) -> None:
    """`fully_shard` every block, then the root with what is left (embedding, final norm, output matrix).

    Gradients are reduced in float32 and **summed** over ranks: the loss weights already hold the one global
    denominator, so FSDP2's mean would divide a second time.

    Args:
        float32_modules: inside the root, computed in float32 whatever the compute dtype.
        block_mesh: of the blocks; ranks of `mesh` that are not in it have other parts of them.
        reshards_after_forward: blocks are gathered again for the backward.
    """
    half = compute_dtype != torch.float32
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype if half else None, reduce_dtype=torch.float32, cast_forward_inputs=half
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    shard: Any = functools.partial(fully_shard, mesh=mesh, offload_policy=offload)
    for block in blocks:
        shard(block, mesh=block_mesh, mp_policy=precision, reshard_after_forward=reshards_after_forward)
    for module in float32_modules:
        shard(module)
    shard(root, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # gloo has no pre-multiplied sum, which a factor other than the world size would otherwise ask for.
            module.set_force_sum_reduction_for_comms(True)


class RootModel(nn.Module):
    """What a step runs forward and backward: its parameters are in the compute dtype only while it does.

    Between steps its modules hold float32 masters (or what is frozen), sharded or whole, by which optimizer,
    checkpoints and weight sync know them.
    """

    stays_whole: bool = False
    """Its parameters stay gathered from the first forward of a step to the last backward."""
    compute_weights: ComputeWeights | None = None
    """Of a model that is not sharded and has masters of another dtype."""

    @property
    def placement(self) -> str:
        """How its parameters are kept, in words."""
        if not isinstance(self, FSDPModule):
            return "not sharded"
        return "sharded, gathered once per step" if self.stays_whole else "sharded, gathered block by block"

    def expect_backward(self, *, is_last: bool) -> None:
        """Call it before every forward with gradient. The backward that is the last before an update releases."""
        if self.compute_weights is not None:
            self.compute_weights.is_last_backward = is_last
        if isinstance(self, FSDPModule):
            self.set_is_last_backward(is_last)
            self.set_requires_all_reduce(is_last)  # replicas add up their gradients once
            if self.stays_whole:
                self.set_reshard_after_backward(is_last)

    def release(self) -> None:
        """Free what a forward without a backward gathered, or one that failed; not between a forward with gradient and
        its backward. Idempotent."""
        if self.compute_weights is not None:
            self.compute_weights.release()
        if not isinstance(self, FSDPModule):
            return
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        # What FSDP2 noted of a forward without a backward, only a backward drops; torch has no public way.
        order = self._get_fsdp_state()._comm_ctx.post_forward_order
        for group in order:
            group._post_forward_indices.clear()
        order.clear()


class _Copied(NamedTuple):
    places: list[tuple[nn.Module, str]]
    """Modules and the name that each has for the parameter; several where it is tied."""
    master: nn.Parameter
    copy: nn.Parameter
    """Without memory until a step begins."""


class ComputeWeights:
    """Copies in the compute dtype of parameters that are whole on this rank, made once per step.

    The gradient of a copy is added to the master's in float32 and freed as soon as a backward has it: what FSDP2
    computes, without its copy of every block in every forward and backward.
    """

    def __init__(self, root: RootModel, *, dtype: torch.dtype, float32_modules: Iterable[nn.Module]) -> None:
        """Parameters of `float32_modules`, and those that have `dtype`, compute as they are."""
        kept = {id(param) for module in float32_modules for param in module.parameters()}
        self.is_last_backward = True
        self._copied: list[_Copied] = []
        self._is_gathered = self._will_release = False
        for master, places in parameter_places(root):
            if master.dtype != dtype and id(master) not in kept:
                copy = nn.Parameter(torch.empty_like(master, dtype=dtype), requires_grad=master.requires_grad)
                copy.untyped_storage().resize_(0)
                if master.requires_grad:
                    copy.register_post_accumulate_grad_hook(functools.partial(self._add_to_master, master))
                self._copied.append(_Copied(places, master, copy))
        root.register_forward_pre_hook(lambda *_: self.gather())

    @torch.no_grad()
    def gather(self) -> None:
        if self._is_gathered or not self._copied:
            return
        for _, master, copy in self._copied:
            copy.untyped_storage().resize_(master.numel() * copy.element_size())
        copies = [one.copy.detach() for one in self._copied]
        masters = [one.master.detach() for one in self._copied]
        torch._foreach_copy_(copies, masters)  # pyright: ignore[reportPrivateImportUsage]
        for places, _, copy in self._copied:
            for module, name in places:
                module._parameters[name] = copy
        self._is_gathered = True

    def release(self) -> None:
        for places, master, copy in self._copied if self._is_gathered else ():
            for module, name in places:
                module._parameters[name] = master
            copy.grad = None
            copy.untyped_storage().resize_(0)
        self._is_gathered = self._will_release = False

    def _add_to_master(self, master: nn.Parameter, copy: Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad.add_(copy.grad)
        copy.grad = None
        if self.is_last_backward and not self._will_release:
            self._will_release = True
            torch.autograd.Variable._execution_engine.queue_callback(self.release)  # as FSDP2 does; no public way


def parameter_places(root: nn.Module) -> list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Every parameter once, with the modules that hold it and its name in each: several where it is tied."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for name, param in module.named_parameters(recurse=False):
            places.setdefault(param, []).append((module, name))
    return list(places.items())


def sharded_like(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local`, of the shape of this rank's shard of `param`, or of its rows (of any length), as a DTensor that shares
    its memory (`DTensor.from_local` would copy host memory to the device); unchanged if `param` is no DTensor."""
    if not isinstance(param, DTensor):
        return local
    is_alike = local.shape == param.to_local().shape
    shape = param.shape if is_alike else torch.Size((*param.shape[:1], *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(param.device_mesh, param.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def row_mesh(param: torch.Tensor) -> DeviceMesh | None:
    """The ranks that have rows of `param`, and no replicas; None if it is whole on every rank."""
    if not isinstance(param, DTensor):
        return None
    mesh, dims = param.device_mesh, [dim for dim, place in enumerate(param.placements) if place.is_shard()]
    if mesh.ndim == 1 or not dims:
        return mesh if dims else None
    assert mesh.mesh_dim_names is not None
    return mesh[mesh.mesh_dim_names[dims[0]]]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_replicas(tensor: Tensor) -> int:
    """Ranks that hold the same shard of a DTensor as this one, this one included; also outside its mesh, as those of
    a norm that tensor parallelism does not divide."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // math.prod(size for size, placement in sizes if placement != Replicate())
