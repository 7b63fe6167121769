"""Learn where an engine's own weight loader puts every element, without moving one.

`record_layout` calls `model.load_weights` once with tensors that have a name, a shape and no data. A dispatch mode
watches every operation below Python's surface: views of such a tensor are followed on a `meta` twin, a `copy_` of one
into engine memory is written down and not carried out, anything else that would need the data is refused by name. So
the plan needs no knowledge of fused qkv, tensor parallelism or parameter names: the loader is the specification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weight_sync.engine_memory import Coverage, EngineMemory
from weight_sync.errors import PlanMismatch
from weight_sync.geometry import BoxCopy, TooScattered, ViewDim, split_into_boxes
from weight_sync.types import ParamMeta, RecordedCopy, WorkerLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weight_sync.engine_memory import Place

_aten = torch.ops.aten
_SAME_VALUES = frozenset({_aten.clone.default, _aten._to_copy.default})
"""Not views, but only place, layout or dtype change: the result may be followed like the original."""
_CONSTANT_FILLS = frozenset({_aten.fill_.Scalar, _aten.zero_.default})
_LOADER_ERRORS = (
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What the loaders of model classes raise when a tensor does not fit."""


def record_layout(model: torch.nn.Module, params: Sequence[ParamMeta], *, worker: int) -> WorkerLayout:
    """Run `model.load_weights` once with recording tensors; write nothing.

    Args:
        model: live engine model. Its parameters must be contiguous; none of them changes.
        params: all checkpoint tensors, in any order, with their full shapes.
        worker: rank of this worker inside its replica.

    Raises:
        PlanMismatch: the loader refuses a tensor, does something that cannot be followed, or does not fill every
            element of every parameter exactly once. Names the tensor, the engine parameter, the operation, the numbers.
    """
    memory = EngineMemory(model)
    recording = _Recording(memory)
    try:
        _run_loader(model, params, recording)
    finally:
        moved = memory.restore()
    if recording.refusals:
        raise PlanMismatch(recording.refusals[0])
    if moved:
        raise PlanMismatch(f"the loader moves {', '.join(moved)} to other memory; use the reload path for this model")
    problems = recording.coverage.problems(memory.params())
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PlanMismatch(f"worker {worker}: the loader does not fill every parameter exactly once:{lines}")
    written = {copy.dst_param for copy in recording.copies}
    return WorkerLayout(worker=worker, params=memory.described(written), copies=tuple(recording.copies))


def _run_loader(model: torch.nn.Module, params: Sequence[ParamMeta], recording: _Recording) -> None:
    load_weights = getattr(model, "load_weights", None)
    if not callable(load_weights):
        raise PlanMismatch(f"{type(model).__name__} has no load_weights; the layout is learnt from the engine's loader")
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    try:
        # A worker may call us from inference mode, where composite operations would reach the mode undivided.
        with torch.inference_mode(False), torch.no_grad(), recording:
            load_weights(recording.tensors(params, device))
    except _LOADER_ERRORS as error:
        raise PlanMismatch(
            f"the loader of {type(model).__name__} refused {recording.current}: {type(error).__name__}: {error}; "
            "the learner's parameter does not fit, or the engine repacked its own after loading"
        ) from error


class _Ghost(torch.Tensor):
    """A checkpoint tensor (or a view of one) without data.

    `twin` is a meta tensor in the checkpoint's dtype whose offset and strides say which part of the tensor this is.
    """

    source: ParamMeta
    twin: torch.Tensor
    # Without this, results such as `dst.copy_(ghost)` would be turned into ghosts on their way back to Python.
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        names = sorted({ghost.source.name for ghost in _ghosts_in((args, kwargs))})
        raise PlanMismatch(f"{func} was applied to {', '.join(names)} after its loader returned; it has no data")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<recording tensor {self.source.name} {tuple(self.twin.shape)}>"


def _ghost(source: ParamMeta, twin: torch.Tensor, *, dtype: torch.dtype, device: torch.device) -> _Ghost:
    ghost: Any = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        _Ghost, twin.shape, strides=twin.stride(), storage_offset=twin.storage_offset(), dtype=dtype, device=device
    )
    ghost.source, ghost.twin = source, twin
    return ghost


def _ghosts_in(tree: Any) -> list[_Ghost]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, _Ghost)]


class _Recording(TorchDispatchMode):
    """Follows ghosts while it is active, and keeps every write away from engine memory."""

    def __init__(self, memory: EngineMemory) -> None:
        super().__init__()
        self.copies: list[RecordedCopy] = []
        self.coverage = Coverage()
        self.refusals: list[str] = []
        """A loader may catch our error; what could not be followed must not be forgotten."""
        self.current = "its first tensor"
        self._memory = memory

    def tensors(self, params: Sequence[ParamMeta], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader iterates over. Lazy, so that `current` is the tensor being loaded."""
        for meta in params:
            self.current = f"{meta.name} {tuple(meta.shape)}"
            dtype = getattr(torch, meta.dtype, None)
            if not isinstance(dtype, torch.dtype):
                self._refuse(f"{meta.name} has dtype {meta.dtype!r}, which is not the name of a torch dtype")
            twin = torch.empty(meta.shape, dtype=dtype, device="meta")
            yield meta.name, _ghost(meta, twin, dtype=dtype, device=device)
        self.current = "the end of the checkpoint"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _aten.copy_.default:
            return self._copy(func, args, kwargs)
        ghosts = _ghosts_in((args, kwargs))
        if ghosts:
            return self._follow(func, ghosts, args, kwargs)
        touched = [self._memory.locate(tensor) for tensor in _written_tensors(func, args, kwargs)]
        places = [place for place in touched if place is not None]
        if not places:
            return func(*args, **kwargs)
        if func not in _CONSTANT_FILLS:
            self._refuse(
                f"{func} changes {', '.join(place.block.name for place in places)} while {self.current} is loaded; "
                "what it writes is not in the checkpoint, use the reload path for this model"
            )
        self._fill(places[0])
        return args[0]

    def _refuse(self, message: str) -> NoReturn:
        self.refusals.append(message)
        raise PlanMismatch(message)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        dst, src = args[0], args[1]
        if isinstance(dst, _Ghost):
            self._refuse(f"{func} writes into the checkpoint tensor {dst.source.name}; loaders may only read it")
        place = self._memory.locate(dst)
        if isinstance(src, _Ghost):
            if place is not None:
                self._record(src, place)
            elif dst.numel():
                self._refuse(
                    f"{func} puts {src.source.name} into {tuple(dst.shape)} of memory that belongs to no parameter or "
                    "buffer of the engine; use the reload path for this model"
                )
            return dst
        if place is not None:
            self._refuse(
                f"{func} writes something into {place.block.name} that is not part of the checkpoint (while "
                f"{self.current} is loaded); use the reload path for this model"
            )
        return func(*args, **kwargs)

    def _record(self, src: _Ghost, place: Place) -> None:
        name, where = src.source.name, place.block.name
        try:
            view = src.twin.expand(place.size)
        except RuntimeError:
            self._refuse(f"{name}: {tuple(src.twin.shape)} does not fit {place.size} of {where}")
        steps = zip(place.size, view.stride(), place.stride, strict=True)
        try:
            boxes = split_into_boxes(
                src.source.shape,
                src_offset=int(view.storage_offset()),
                dst_offset=place.offset,
                dims=[ViewDim(n, src_stride, dst_stride) for n, src_stride, dst_stride in steps if n > 1],
            )
            self.coverage.add_copy(place)
        except TooScattered as error:
            self._refuse(f"{name} is rearranged on its way into {where}: {error}; use the reload path for this model")
        self.copies.extend(_recorded(name, where, box) for box in boxes)

    def _fill(self, place: Place) -> None:
        """A constant: the engine's first load wrote it already, so it is noted and not repeated."""
        name = place.block.name
        try:
            num_lost = self.coverage.add_fill(place)
        except TooScattered as error:
            self._refuse(f"a constant fill of {name} cannot be followed: {error}")
        if num_lost:
            self._refuse(f"{num_lost} elements of {name} are overwritten with a constant after they were loaded")

    def _follow(self, func: Any, ghosts: Sequence[_Ghost], args: Any, kwargs: Any) -> Any:
        ghost = ghosts[0]
        name = f"{ghost.source.name} {tuple(ghost.twin.shape)}"
        if len(ghosts) > 1 or args[0] is not ghost:
            self._refuse(f"{func} combines {name} with other tensors; only views of one tensor can be followed")
        if func in _SAME_VALUES:
            return self._recast(func, ghost, kwargs)
        if func is _aten._unsafe_view.default:
            func = _aten.view.default
        elif not _is_view(func):
            self._refuse(f"{func} computes with {name}; only views, copies and widening casts can be followed")
        try:
            result = func(ghost.twin, *args[1:], **kwargs)
        except RuntimeError as error:
            self._refuse(f"{func} of {name} with strides {ghost.twin.stride()} rearranges it: {error}")
        if any(leaf.dtype != ghost.twin.dtype for leaf in tree_leaves(result)):
            self._refuse(f"{func} reads the bytes of {name} as another dtype; only whole elements can be followed")
        return tree_map(lambda twin: _ghost(ghost.source, twin, dtype=ghost.dtype, device=ghost.device), result)

    def _recast(self, func: Any, ghost: _Ghost, kwargs: Any) -> _Ghost:
        """`contiguous`, `clone`, `to`: same elements, same twin."""
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        dtype = ghost.dtype if dtype is None else dtype
        device = ghost.device if device is None else device
        if torch.promote_types(ghost.dtype, dtype) != dtype:
            self._refuse(
                f"{func} rounds {ghost.source.name} from {ghost.dtype} to {dtype}; send it as the engine has it"
            )
        return _ghost(ghost.source, ghost.twin, dtype=dtype, device=device)


def _recorded(src_param: str, dst_param: str, box: BoxCopy) -> RecordedCopy:
    return RecordedCopy(
        src_param=src_param,
        src_start=box.start,
        src_size=box.size,
        dst_param=dst_param,
        dst_offset=box.dst_offset,
        dst_stride=box.dst_stride,
    )


def _is_view(func: Any) -> bool:
    """Whether every result aliases an argument and nothing is written, by the operator's schema."""
    schema = func._schema
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    return not writes and bool(schema.returns) and all(ret.alias_info is not None for ret in schema.returns)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the operator writes to, by its schema: in-place and `out=` arguments, lists included."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found
