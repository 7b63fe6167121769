"""Tensors without data that record what a loader does with them.

Code that only slices, splits, reshapes and copies can be run with them, be it an engine's weight loader or
transformers' conversion of checkpoints; where each result lies in its tensor is then known exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from weight_sync.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weight_sync.plan.types import ParamMeta


_aten = torch.ops.aten
_SAME_VALUES = frozenset({_aten.clone.default, _aten._to_copy.default})
"""Not views, but only place, layout or dtype change: the result may be followed like the original."""


class _Dataless(torch.Tensor):
    """`twin` is a meta tensor that stands for the data."""

    twin: torch.Tensor
    # Without this, results such as `dst.copy_(lazy)` would be turned into this class on their way back to Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = [repr(leaf) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, _Dataless)]
        raise PlanMismatch(f"{func} was applied to {', '.join(found)} after its loader returned; it has no data")


class LazyTensor(_Dataless):
    """A checkpoint tensor (or a view of one) without data.

    `twin` has the checkpoint's dtype; its offset and strides say which part of the tensor this is.
    """

    source: ParamMeta

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<recording tensor {self.source.name} {tuple(self.twin.shape)}>"


def new_lazy(source: ParamMeta, twin: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> LazyTensor:
    """A lazy of the part of `source` that `twin` (meta, in the checkpoint's dtype) describes."""
    lazy: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        LazyTensor, twin.shape, strides=twin.stride(), storage_offset=twin.storage_offset(), dtype=dtype, device=device
    )
    lazy.source, lazy.twin = source, twin
    return lazy


def leaves_in(tree: Any) -> list[Any]:
    """Leaves of nested tuples, lists and dicts. A recording asks at every operation; torch's own walk is 5x slower."""
    if isinstance(tree, (tuple, list)):
        return [leaf for branch in tree for leaf in leaves_in(branch)]
    return leaves_in(list(tree.values())) if isinstance(tree, dict) else [tree]


def lazy_in(tree: Any) -> list[LazyTensor]:
    """Every lazy among the leaves of nested arguments."""
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, LazyTensor)]


def follow(func: Any, lazies: Sequence[LazyTensor], args: Any, kwargs: Any) -> Any:
    """The result of an operation on lazies: again lazies.

    Args:
        lazies: every lazy in `args` and `kwargs`.

    Raises:
        PlanMismatch: the operation needs the data, rounds it, or puts several tensors together. Names both.
    """
    lazy = lazies[0]
    name = f"{lazy.source.name} {tuple(lazy.twin.shape)}"
    if len(lazies) > 1 or args[0] is not lazy:
        raise PlanMismatch(f"{func} combines {name} with other tensors; only views of one tensor can be followed")
    if func in _SAME_VALUES:
        return _recast(func, lazy, kwargs)
    if func is _aten._unsafe_view.default:
        func = _aten.view.default
    elif not is_view(func):
        raise PlanMismatch(f"{func} computes with {name}; only views, copies and widening casts can be followed")
    try:
        result = func(lazy.twin, *args[1:], **kwargs)
    except RuntimeError as error:
        raise PlanMismatch(f"{func} of {name} with strides {lazy.twin.stride()} rearranges it: {error}") from error
    if any(leaf.dtype != lazy.twin.dtype for leaf in tree_leaves(result)):
        raise PlanMismatch(f"{func} reads the bytes of {name} as another dtype; only whole elements can be followed")
    return tree_map(lambda twin: new_lazy(lazy.source, twin, dtype=lazy.dtype, device=lazy.device), result)


def _recast(func: Any, lazy: LazyTensor, kwargs: Any) -> LazyTensor:
    """`contiguous`, `clone`, `to`: same elements, same twin."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    dtype = lazy.dtype if dtype is None else dtype
    device = lazy.device if device is None else device
    if torch.promote_types(lazy.dtype, dtype) != dtype:
        raise PlanMismatch(
            f"{func} rounds {lazy.source.name} from {lazy.dtype} to {dtype}; send it as the engine has it"
        )
    return new_lazy(lazy.source, lazy.twin, dtype=dtype, device=device)


def is_view(func: Any) -> bool:
    """Whether every result aliases an argument and nothing is written, by the operator's schema."""
    schema = func._schema
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    return not writes and bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)


class OpaqueTensor(_Dataless):
    """A result without data. `twin` has its shape, strides and dtype."""

    sources: frozenset[str]
    why: str
    """The first operation that could not be followed."""

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<recording tensor of {', '.join(sorted(self.sources))} {tuple(self.twin.shape)}>"


class ScratchMemory:
    """Memory outside of the engine that a loader put checkpoint tensors into."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[frozenset[str], torch.Tensor]] = {}

    def put(self, tensor: torch.Tensor, sources: Iterable[str]) -> None:
        """`sources` are from now on part of everything that shares memory with `tensor`."""
        key = storage_of(tensor)
        known = self._held[key][0] if key in self._held else frozenset[str]()
        # The tensor is kept, so that its memory cannot become another tensor's while we remember it.
        self._held[key] = (known | frozenset(sources), tensor)

    def sources_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """What was put into the memory of `tensor`."""
        if not self._held:
            return frozenset()
        held = self._held.get(storage_of(tensor))
        return frozenset() if held is None else held[0]


def sources_in(tree: Any, scratch: ScratchMemory) -> frozenset[str]:
    """Checkpoint tensors that opaques and scratch among the leaves are made of. LazyTensors do not count."""
    found: frozenset[str] = frozenset()
    for leaf in leaves_in(tree):
        if isinstance(leaf, OpaqueTensor):
            found |= leaf.sources
        elif isinstance(leaf, torch.Tensor) and not isinstance(leaf, LazyTensor):
            found |= scratch.sources_of(leaf)
    return found


def compute(func: Any, args: Any, kwargs: Any, *, sources: frozenset[str], why: str) -> Any:
    """The result of an operation that reads checkpoint data: opaques instead of tensors.

    Args:
        why: why it cannot be followed; what the operands say takes precedence.

    Raises:
        PlanMismatch: the result depends on values, which do not exist.
    """
    try:
        result = func(*tree_map(_on_meta, args), **tree_map(_on_meta, kwargs))
    except (RuntimeError, NotImplementedError) as error:
        raise PlanMismatch(f"{func} needs the data of {', '.join(sorted(sources))}: {error}") from error
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = next((leaf.device for leaf in leaves), None)
    first = next((leaf.why for leaf in leaves if isinstance(leaf, OpaqueTensor)), why)

    def opaque_of(twin: Any) -> Any:
        if not isinstance(twin, torch.Tensor):
            return twin
        opaque: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            OpaqueTensor, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=device
        )
        opaque.sources, opaque.why, opaque.twin = sources, first, twin
        return opaque

    return tree_map(opaque_of, result)


def _on_meta(leaf: Any) -> Any:
    match leaf:
        case LazyTensor():
            return leaf.twin.to(leaf.dtype)
        case OpaqueTensor():
            return leaf.twin
        case torch.Tensor():
            return leaf.detach().to("meta")
        case torch.device():
            return torch.device("meta")
        case _:
            return leaf


def storage_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, `meta` ones too."""
    return tensor.untyped_storage()._cdata
