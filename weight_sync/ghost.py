"""Tensors with a name and a shape but no data, whose views are followed on a `meta` twin.

Code that only slices, splits, reshapes and copies can be run with them, be it an engine's weight loader or
transformers' conversion of checkpoints; where each result lies in its tensor is then known exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from weight_sync.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weight_sync.types import ParamMeta

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
