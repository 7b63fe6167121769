"""The memory of an engine's parameters: which bytes a loader wrote, and which parameters share them.

The recorder sees a loader write to some strided view; only the address tells which parameter it belongs to (a
loader holds `param.data`, narrowed any number of times). Addresses are compared, memory is never read or written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from weight_sync.errors import PlanMismatch
from weight_sync.lazy_tensor import storage_of
from weight_sync.plan.geometry import dense_runs, extent, merge_spans, spans_of_runs
from weight_sync.plan.types import EngineParam

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Memory of one engine parameter or buffer: bytes `[first, last)` of the address space."""

    first: int
    last: int
    name: str
    tensor: torch.Tensor
    is_param: bool

    @property
    def num_elements(self) -> int:
        return self.tensor.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A strided view of an engine tensor, in elements."""

    block: Block
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def spans(self) -> np.ndarray:
        """int64[R, 2]: the element ranges that the view covers. Raises TooScattered."""
        return spans_of_runs([dense_runs(self.offset, self.size, self.stride)])


class EngineMemory:
    """The parameters and buffers of a live model by address.

    Tensors that share all their memory (tied embeddings) count once, under the first name. Modules in `without_memory`
    may hold `meta` tensors: they are told apart by their storages, which exist although they hold nothing. Those in
    `without_checkpoint` are left out: nothing is loaded into them.

    Raises:
        PlanMismatch: a parameter is not contiguous, has no memory, or shares a part of it with another tensor.
    """

    def __init__(
        self, model: torch.nn.Module, *, without_memory: Container[str] = (), without_checkpoint: Container[str] = ()
    ) -> None:
        self._order = _blocks_of(model, without_memory, without_checkpoint)
        self._by_storage = {storage_of(b.tensor): b for b in self._order if b.tensor.device.type == "meta"}
        held = [b for b in self._order if b.last > b.first and b.tensor.device.type != "meta"]
        self._sorted = sorted(held, key=lambda b: b.first)
        for left, right in zip(self._sorted, self._sorted[1:], strict=False):
            if right.first < left.last and (left.is_param or right.is_param):
                raise PlanMismatch(
                    f"engine tensors {left.name} and {right.name} share {left.last - right.first} bytes but are not "
                    "the same tensor; use the reload path for this model"
                )
        self._starts = [block.first for block in self._sorted]
        self._bindings = _bindings_of(model)
        self.held: dict[str, Any] = {}
        """What `restore` found in the place of tensors that had moved."""

    def params(self) -> list[Block]:
        """Every parameter once, in model order."""
        return [block for block in self._order if block.is_param]

    def locate(self, view: torch.Tensor) -> Place | None:
        """The place of `view` in an engine tensor; None if it lies in other memory or has no elements.

        Raises:
            PlanMismatch: it lies in an engine tensor but is not a view of its elements.
        """
        block = self.owner(view)
        if block is None:
            return None
        itemsize = block.tensor.element_size()
        if view.device.type == "meta":
            address = (view.storage_offset() - block.tensor.storage_offset()) * itemsize
        else:
            address = view.data_ptr()
        last = address + extent(view.shape, view.stride()) * view.element_size()
        if view.dtype != block.tensor.dtype or (address - block.first) % itemsize or last > block.last:
            raise PlanMismatch(
                f"the loader writes {view.dtype} {tuple(view.shape)} at byte {address - block.first} of {block.name}, "
                f"which holds {block.tensor.dtype} {tuple(block.tensor.shape)}; only whole elements can be followed"
            )
        offset = (address - block.first) // itemsize
        return Place(block=block, offset=offset, size=tuple(view.shape), stride=tuple(view.stride()))

    def owner(self, view: torch.Tensor) -> Block | None:
        """The engine tensor whose memory `view` begins in; None if it lies elsewhere or has no elements."""
        if view.numel() == 0:
            return None
        if view.device.type == "meta":
            return self._by_storage.get(storage_of(view))
        address = view.data_ptr()
        at = bisect_right(self._starts, address) - 1
        return None if at < 0 or address >= self._sorted[at].last else self._sorted[at]

    def restore(self) -> tuple[str, ...]:
        """Undo rebinding (`param.data = other`, a new `Parameter` in its place); returns the names that had moved.

        Device graphs hold the addresses of parameters, so a loader that rebinds them cannot be used for a live engine.
        """
        moved: list[str] = []
        for binding in self._bindings:
            if not binding.is_kept():
                self.held[binding.name] = binding.registry.get(binding.key)
                binding.registry[binding.key] = binding.tensor
                binding.tensor.data = binding.alias
                moved.append(binding.name)
        return tuple(moved)

    def described(self, written: Container[str]) -> tuple[EngineParam, ...]:
        """Every parameter, and those buffers whose name is in `written`."""
        return tuple(
            EngineParam(name=b.name, shape=tuple(b.tensor.shape), dtype=str(b.tensor.dtype).removeprefix("torch."))
            for b in self._order
            if b.is_param or b.name in written
        )


def _blocks_of(
    model: torch.nn.Module, without_memory: Container[str], without_checkpoint: Container[str]
) -> list[Block]:
    blocks: list[Block] = []
    problems: list[str] = []
    known: set[tuple[int, int]] = set()
    tensors = [(True, name, tensor) for name, tensor in model.named_parameters()]
    tensors += [(False, name, tensor) for name, tensor in model.named_buffers()]
    for is_param, name, tensor in tensors:
        module = name.rpartition(".")[0]
        if module in without_checkpoint:
            continue
        if tensor.device.type == "meta":
            if module in without_memory:
                extent_bytes = tensor.numel() * tensor.element_size()
                blocks.append(Block(first=0, last=extent_bytes, name=name, tensor=tensor, is_param=is_param))
            elif is_param:
                problems.append(f"{name} {tuple(tensor.shape)} has no memory (meta device)")
            continue
        if not tensor.is_contiguous():
            if is_param:
                problems.append(f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}")
            continue
        first = tensor.data_ptr()
        last = first + tensor.numel() * tensor.element_size()
        if last > first and (first, last) in known:
            continue
        known.add((first, last))
        blocks.append(Block(first=first, last=last, name=name, tensor=tensor, is_param=is_param))
    if problems:
        raise PlanMismatch(f"engine parameters must be contiguous to be written by byte runs: {'; '.join(problems)}")
    return blocks


class _Binding(NamedTuple):
    """How a module holds a tensor, to put it back: `registry[key] is tensor`, whose memory `alias` keeps."""

    name: str
    registry: dict[str, Any]
    key: str
    tensor: torch.Tensor
    alias: torch.Tensor
    address: int

    def is_kept(self) -> bool:
        if self.registry.get(self.key) is not self.tensor:
            return False
        try:
            return self.tensor.data_ptr() == self.address and self.tensor.shape == self.alias.shape
        except RuntimeError:  # bound to a tensor without data
            return False


def _bindings_of(model: torch.nn.Module) -> list[_Binding]:
    return [
        _Binding(f"{prefix}.{key}" if prefix else key, registry, key, tensor, tensor.detach(), tensor.data_ptr())
        for prefix, module in model.named_modules()
        for registry in (module._parameters, module._buffers)
        for key, tensor in registry.items()
        if tensor is not None and tensor.device.type != "meta"
    ]


class Counts(NamedTuple):
    """Elements of one engine tensor by what a loader did to them."""

    copied: int
    filled: int
    never: int
    twice: int

    def describe(self, block: Block) -> str:
        return (
            f"{block.name} {tuple(block.tensor.shape)}: of {block.num_elements} elements {self.copied} come from the "
            f"checkpoint, {self.filled} are constant padding, {self.never} are never written, {self.twice} are written "
            "more than once"
        )


class Coverage:
    """Which elements of which engine tensor were written, and whether that adds up to exactly once."""

    def __init__(self) -> None:
        self._copied: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self._filled: defaultdict[str, list[np.ndarray]] = defaultdict(list)

    def add_copy(self, place: Place) -> None:
        """Elements that come from the checkpoint. Raises TooScattered."""
        self._copied[place.block.name].append(place.spans())

    def add_fill(self, place: Place) -> int:
        """Elements set to a constant (vocabulary padding); returns how many had come from the checkpoint before.

        A fill that a later copy overwrites is no padding and does no harm. Raises TooScattered.
        """
        spans, copied = place.spans(), self._copied[place.block.name]
        self._filled[place.block.name].append(spans)
        return _merged([*copied, spans])[1] - _merged(copied)[1]

    def of(self, block: Block) -> Counts:
        """How often the elements of one engine tensor were written."""
        copied, filled = self._copied[block.name], self._filled[block.name]
        num_copied, num_twice = _merged(copied)
        num_written, _ = _merged([*copied, *filled])
        return Counts(num_copied, num_written - num_copied, block.num_elements - num_written, num_twice)


def _merged(spans: Sequence[np.ndarray]) -> tuple[int, int]:
    """Elements that are covered, and those more than once."""
    merged, num_twice = merge_spans(np.concatenate([np.zeros((0, 2), np.int64), *spans]))
    return int((merged[:, 1] - merged[:, 0]).sum()), num_twice
