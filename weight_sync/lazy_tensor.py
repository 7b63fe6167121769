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


class Ghost(torch.Tensor):
    """A checkpoint tensor (or a view of one) without data.

    `twin` is a meta tensor in the checkpoint's dtype whose offset and strides say which part of the tensor this is.
    """

    source: ParamMeta
    twin: torch.Tensor
    # Without this, results such as `dst.copy_(ghost)` would be turned into ghosts on their way back to Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        names = sorted({ghost.source.name for ghost in ghosts_in((args, kwargs))})
        raise PlanMismatch(f"{func} was applied to {', '.join(names)} after its loader returned; it has no data")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<recording tensor {self.source.name} {tuple(self.twin.shape)}>"


def new_ghost(source: ParamMeta, twin: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> Ghost:
    """A ghost of the part of `source` that `twin` (meta, in the checkpoint's dtype) describes."""
    ghost: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        Ghost, twin.shape, strides=twin.stride(), storage_offset=twin.storage_offset(), dtype=dtype, device=device
    )
    ghost.source, ghost.twin = source, twin
    return ghost


def leaves_in(tree: Any) -> list[Any]:
    """Leaves of nested tuples, lists and dicts. A recording asks at every operation; torch's own walk is 5x slower."""
    if isinstance(tree, (tuple, list)):
        return [leaf for branch in tree for leaf in leaves_in(branch)]
    return leaves_in(list(tree.values())) if isinstance(tree, dict) else [tree]


def ghosts_in(tree: Any) -> list[Ghost]:
    """Every ghost among the leaves of nested arguments."""
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, Ghost)]


def follow(func: Any, ghosts: Sequence[Ghost], args: Any, kwargs: Any) -> Any:
    """The result of an operation on ghosts: again ghosts.

    Args:
        ghosts: every ghost in `args` and `kwargs`.

    Raises:
        PlanMismatch: the operation needs the data, rounds it, or puts several tensors together. Names both.
    """
    ghost = ghosts[0]
    name = f"{ghost.source.name} {tuple(ghost.twin.shape)}"
    if len(ghosts) > 1 or args[0] is not ghost:
        raise PlanMismatch(f"{func} combines {name} with other tensors; only views of one tensor can be followed")
    if func in _SAME_VALUES:
        return _recast(func, ghost, kwargs)
    if func is _aten._unsafe_view.default:
        func = _aten.view.default
    elif not is_view(func):
        raise PlanMismatch(f"{func} computes with {name}; only views, copies and widening casts can be followed")
    try:
        result = func(ghost.twin, *args[1:], **kwargs)
    except RuntimeError as error:
        raise PlanMismatch(f"{func} of {name} with strides {ghost.twin.stride()} rearranges it: {error}") from error
    if any(leaf.dtype != ghost.twin.dtype for leaf in tree_leaves(result)):
        raise PlanMismatch(f"{func} reads the bytes of {name} as another dtype; only whole elements can be followed")
    return tree_map(lambda twin: new_ghost(ghost.source, twin, dtype=ghost.dtype, device=ghost.device), result)


def _recast(func: Any, ghost: Ghost, kwargs: Any) -> Ghost:
    """`contiguous`, `clone`, `to`: same elements, same twin."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    dtype = ghost.dtype if dtype is None else dtype
    device = ghost.device if device is None else device
    if torch.promote_types(ghost.dtype, dtype) != dtype:
        raise PlanMismatch(
            f"{func} rounds {ghost.source.name} from {ghost.dtype} to {dtype}; send it as the engine has it"
        )
    return new_ghost(ghost.source, ghost.twin, dtype=dtype, device=device)


def is_view(func: Any) -> bool:
    """Whether every result aliases an argument and nothing is written, by the operator's schema."""
    schema = func._schema
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    return not writes and bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)


class Blend(torch.Tensor):
    """A result without data. `twin` (meta) has its shape, strides and dtype."""

    sources: frozenset[str]
    why: str
    """The first operation that could not be followed."""
    twin: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise PlanMismatch(f"{func} was applied to a result of recording tensors after the loader returned")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<recording tensor of {', '.join(sorted(self.sources))} {tuple(self.twin.shape)}>"


class Temporaries:
    """Memory outside of the engine that a loader put checkpoint tensors into."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[frozenset[str], torch.Tensor]] = {}

    def put(self, tensor: torch.Tensor, sources: Iterable[str]) -> None:
        """`sources` are from now on part of everything that shares memory with `tensor`."""
        key = _storage(tensor)
        known = self._held[key][0] if key in self._held else frozenset[str]()
        # The tensor is kept, so that its memory cannot become another tensor's while we remember it.
        self._held[key] = (known | frozenset(sources), tensor)

    def sources_of(self, tensor: torch.Tensor) -> frozenset[str]:
        """What was put into the memory of `tensor`."""
        if not self._held:
            return frozenset()
        held = self._held.get(_storage(tensor))
        return frozenset() if held is None else held[0]


def sources_in(tree: Any, temporaries: Temporaries) -> frozenset[str]:
    """Checkpoint tensors that blends and temporaries among the leaves are made of. Ghosts do not count."""
    found: frozenset[str] = frozenset()
    for leaf in leaves_in(tree):
        if isinstance(leaf, Blend):
            found |= leaf.sources
        elif isinstance(leaf, torch.Tensor) and not isinstance(leaf, Ghost):
            found |= temporaries.sources_of(leaf)
    return found


def compute(func: Any, args: Any, kwargs: Any, *, sources: frozenset[str], why: str) -> Any:
    """The result of an operation that reads checkpoint data: blends instead of tensors.

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
    first = next((leaf.why for leaf in leaves if isinstance(leaf, Blend)), why)

    def blend_of(twin: Any) -> Any:
        if not isinstance(twin, torch.Tensor):
            return twin
        blend: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            Blend, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=device
        )
        blend.sources, blend.why, blend.twin = sources, first, twin
        return blend

    return tree_map(blend_of, result)


def _on_meta(leaf: Any) -> Any:
    match leaf:
        case Ghost():
            return leaf.twin.to(leaf.dtype)
        case Blend():
            return leaf.twin
        case torch.Tensor():
            return leaf.detach().to("meta")
        case torch.device():
            return torch.device("meta")
        case _:
            return leaf


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
