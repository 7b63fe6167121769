"""Tensors computed from checkpoint tensors: nothing is known of their values, but of whom they are made.

Where a loader does more than to slice and copy, the recorder cannot tell where which element lands. It still can tell
which checkpoint tensors end up in which module, and that is all that is needed to send the module through its loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from weight_sync.errors import PlanMismatch
from weight_sync.ghost import Ghost, leaves_in

if TYPE_CHECKING:
    from collections.abc import Iterable


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
