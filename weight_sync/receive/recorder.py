"""Learns an engine's layout by running its own loader once on tensors without data.

`record` calls `model.load_weights` with tensors that have a name, a shape and no data. A dispatch mode watches every
operation below Python's surface: views of such a tensor are followed on a `meta` twin, a `copy_` of one into engine
memory is written down and not carried out, anything else that would need the data is refused by name. So the plan needs
no knowledge of fused qkv, tensor parallelism or parameter names: the loader is the specification.

With a `Reloader` less is refused. A module whose live weights are derived is recorded in checkpoint format, and what
its loader copies becomes its shard; one whose loader computes with values is loaded from whole tensors.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weight_sync.errors import PlanMismatch
from weight_sync.lazy_tensor import (
    LazyTensor,
    OpaqueTensor,
    ScratchMemory,
    compute,
    follow,
    is_view,
    lazy_in,
    new_lazy,
    sources_in,
)
from weight_sync.plan.geometry import TooScattered, ViewDim, row_major_strides, split_into_boxes
from weight_sync.plan.types import EngineParam, ParamMeta, RecordedCopy, WorkerLayout
from weight_sync.receive.engine_memory import Coverage, EngineMemory
from weight_sync.receive.quantized import (
    SHARD_PREFIX,
    WHOLE_PREFIX,
    ReloadedModule,
    checkpoint_format,
    decision_lines,
    derived_modules,
    module_of,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from weight_sync.receive.engine_memory import Block, Place
    from weight_sync.receive.quantized import Reloader


_aten = torch.ops.aten
_CONSTANT_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_LOADER_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What the loaders of model classes raise when a tensor does not fit."""
_COMPUTES = "its loader computes with what it loads"


class Recorded(NamedTuple):
    """What recording a loader found out."""

    layout: WorkerLayout
    reloaded: tuple[ReloadedModule, ...]
    """Modules that are derived again at every commit; their virtual parameters are part of `layout`."""


def record(
    model: torch.nn.Module, params: Sequence[ParamMeta], *, worker: int, reloader: Reloader | None = None
) -> Recorded:
    """Run `model.load_weights` once with recording tensors; write nothing.

    Args:
        model: live engine model. Parameters that are written directly must be contiguous; none of them changes.
        params: all checkpoint tensors, in any order, with their full shapes.
        worker: rank of this worker inside its replica.
        reloader: the engine's way to derive modules again, for those that cannot be written directly.

    Raises:
        PlanMismatch: the loader refuses a tensor, does something that cannot be followed, or does not fill every
            element of every parameter exactly once. Names the tensor, the engine parameter, the operation, the numbers.
    """
    derived = {} if reloader is None else derived_modules(model, reloader)
    dependents = () if reloader is None else tuple(reloader.dependents())
    with nullcontext() if reloader is None else checkpoint_format(model, derived, reloader):
        memory = EngineMemory(model, without_memory=derived, without_checkpoint=dependents)
        recording = _Recording(memory, derived, is_lenient=reloader is not None)
        try:
            _run_loader(model, params, recording)
        finally:
            moved = memory.restore()
        if recording.refusals:
            raise PlanMismatch(recording.refusals[0])
        if not all(recording.follow_moved(name) for name in moved):
            raise PlanMismatch(
                f"the loader moves {', '.join(moved)} to other memory; use the reload path for this model"
            )
        reloaded = recording.reloaded(params, worker)
        layout = recording.layout(reloaded, params, worker)
    away = {*dependents, *(entry.module for entry in reloaded)}
    direct = dict.fromkeys(module_of(param.name) for param in memory.described(()))
    lines = decision_lines([name for name in direct if name not in away], reloaded, dependents)
    return Recorded(msgspec.structs.replace(layout, decisions=lines), reloaded)


def _run_loader(model: torch.nn.Module, params: Sequence[ParamMeta], recording: _Recording) -> None:
    if not callable(load_weights := getattr(model, "load_weights", None)):
        raise PlanMismatch(f"{type(model).__name__} has no load_weights; the layout is learnt from the engine's loader")
    devices = (param.device for param in model.parameters() if param.device.type != "meta")
    device = next(devices, torch.device("cpu"))
    try:
        # A worker may call us from inference mode, where composite operations would reach the mode undivided.
        with torch.inference_mode(False), torch.no_grad(), recording:
            load_weights(recording.tensors(params, device))
    except _LOADER_ERRORS as error:
        raise PlanMismatch(
            f"the loader of {type(model).__name__} refused {recording.current}: {type(error).__name__}: {error}; "
            "the learner's parameter does not fit, or the engine repacked its own after loading"
        ) from error


class _Recording(TorchDispatchMode):
    """Follows lazy tensors while it is active, and keeps every write away from engine memory."""

    def __init__(self, memory: EngineMemory, derived: Mapping[str, str], *, is_lenient: bool) -> None:
        super().__init__()
        self.refusals: list[str] = []
        """A loader may catch our error; what could not be followed must not be forgotten."""
        self.current = "its first tensor"
        self._memory = memory
        self._derived = derived
        self._is_lenient = is_lenient
        """Modules that cannot be followed are loaded from whole tensors instead of refused."""
        self._whole: dict[str, str] = {}
        """Module that is -> why."""
        self._touched: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        """Module -> (checkpoint tensor, engine tensor that something of it went to)."""
        self._seen: list[str] = []
        self._copies: list[RecordedCopy] = []
        self._coverage = Coverage()
        self._scratch = ScratchMemory()

    # ---------------------------------------------------------------- results

    def reloaded(self, params: Sequence[ParamMeta], worker: int) -> tuple[ReloadedModule, ...]:
        """Modules that cannot be written directly.

        Raises:
            PlanMismatch: a parameter that no checkpoint tensor fills.
        """
        problems: list[str] = []
        twice: dict[str, str] = {}
        for block in self._memory.params():
            module, counts = module_of(block.name), self._coverage.of(block)
            if module in self._whole:
                if block.num_elements and all(block.name != target for _, target in self._touched[module]):
                    problems.append(counts.describe(block))
            elif counts.never or (counts.twice and not self._is_lenient):
                problems.append(counts.describe(block))
            elif counts.twice:
                twice.setdefault(module, f"{counts.twice} elements of {block.name} are written more than once")
        self._whole |= twice
        why = {**self._derived, **self._whole}
        unread = [module for module in why if not self._touched[module]]
        problems += [f"{module} ({why[module]}): the loader reads nothing for it" for module in unread]
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise PlanMismatch(f"worker {worker}: the loader does not fill every parameter exactly once:{lines}")
        reads = {module: {name for name, _ in self._touched[module]} for module in why}
        self._add_readers(reads)
        metas = {meta.name: meta for meta in params}
        own: defaultdict[str, list[EngineParam]] = defaultdict(list)
        for param in self._memory.described(self._written()):
            own[module_of(param.name)].append(msgspec.structs.replace(param, name=SHARD_PREFIX + param.name))
        found: list[ReloadedModule] = []
        for module, text in why.items():
            if module in self._whole:
                read = [metas[name] for name in self._seen if name in reads[module]]
                whole = [EngineParam(name=WHOLE_PREFIX + m.name, shape=m.shape, dtype=m.dtype) for m in read]
                found.append(ReloadedModule(module, text, tuple(whole)))
            else:
                found.append(ReloadedModule(module, text, tuple(own[module])))
        return tuple(found)

    def _add_readers(self, reads: Mapping[str, Collection[str]]) -> None:
        """A loader that runs again must find checkpoint format wherever the tensors it is given go."""
        num_before = -1
        while num_before != len(self._whole):
            num_before = len(self._whole)
            given = {name for module in self._whole for name in reads[module]}
            self._whole.update(
                {m: why for m, why in self._derived.items() if m not in self._whole and given & {*reads[m]}}
            )

    def layout(self, reloaded: Sequence[ReloadedModule], params: Sequence[ParamMeta], worker: int) -> WorkerLayout:
        """Copies as they were recorded, with virtual parameters in the place of those that are not written directly."""
        away = {entry.module for entry in reloaded}
        copies: list[RecordedCopy] = []
        for copy in self._copies:
            module = module_of(copy.dst_param)
            if module in away and module not in self._whole:
                copies.append(msgspec.structs.replace(copy, dst_param=SHARD_PREFIX + copy.dst_param))
            elif module not in away:
                copies.append(copy)
        described = [p for p in self._memory.described(self._written()) if module_of(p.name) not in away]
        virtual = {param.name: param for entry in reloaded for param in entry.params}
        copies += [_whole_copy(meta) for meta in params if WHOLE_PREFIX + meta.name in virtual]
        return WorkerLayout(worker=worker, params=(*described, *virtual.values()), copies=tuple(copies))

    def _written(self) -> set[str]:
        return {copy.dst_param for copy in self._copies}

    # ---------------------------------------------------------------- operations

    def tensors(self, params: Sequence[ParamMeta], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader iterates over. Lazy, so that `current` is the tensor being loaded."""
        for meta in params:
            self.current = f"{meta.name} {tuple(meta.shape)}"
            self._seen.append(meta.name)
            dtype = getattr(torch, meta.dtype, None)
            if not isinstance(dtype, torch.dtype):
                self._refuse(f"{meta.name} has dtype {meta.dtype!r}, which is not the name of a torch dtype")
            twin = torch.empty(meta.shape, dtype=dtype, device="meta")
            yield meta.name, new_lazy(meta, twin, dtype=dtype, device=device)
        self.current = "the end of the checkpoint"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _aten.copy_.default:
            return self._copy(func, args, kwargs)
        lazies, mixed = lazy_in((args, kwargs)), sources_in((args, kwargs), self._scratch)
        why = _COMPUTES
        if lazies and not mixed:
            try:
                return follow(func, lazies, args, kwargs)
            except PlanMismatch as error:
                why = str(error)
                if not self._is_lenient:
                    self._refuse(why)
        if lazies or mixed:
            return self._compute(func, args, kwargs, mixed.union(lazy.source.name for lazy in lazies), why)
        return self._change(func, args, kwargs)

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that reads nothing of the checkpoint."""
        written = _written_tensors(func, args, kwargs)
        blocks = [block for block in map(self._memory.owner, written) if block is not None]
        if not blocks:
            return func(*args, **kwargs)
        if func not in _CONSTANT_FILLS:
            for block in blocks:
                why = f"{func} changes {block.name} while {self.current} is loaded; that is not in the checkpoint"
                self._load_whole(block, (), why)
            return written[0]
        place = self._locate(written[0], ())
        if place is not None:
            self._fill(place, 0 if func is _aten.zero_.default else args[1])
        return args[0]

    def _compute(self, func: Any, args: Any, kwargs: Any, sources: frozenset[str], why: str) -> Any:
        """An operation with `sources` whose result cannot be followed element by element."""
        written = _written_tensors(func, args, kwargs)
        if any(isinstance(tensor, LazyTensor) for tensor in written):
            self._refuse(f"{func} writes into the checkpoint tensors {', '.join(sorted(sources))}; use a copy")
        if not written:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if is_view(func) and not any(isinstance(tensor, (LazyTensor, OpaqueTensor)) for tensor in tensors):
                return func(*args, **kwargs)  # of a temporary: its memory tells that it is one
            try:
                return compute(func, args, kwargs, sources=sources, why=why)
            except PlanMismatch as error:
                self._refuse(str(error))
        for tensor in written:
            self._absorb(tensor, sources, why)
        return written[0]

    def follow_moved(self, name: str) -> bool:
        """The loader put another tensor in the place of engine tensor `name`. False if that is to be refused."""
        held = self._memory.held[name]
        block = next((block for block in self._memory.params() if block.name == name), None)
        sources = {held.source.name} if isinstance(held, LazyTensor) else sources_in(held, self._scratch)
        if block is None or not sources or not self._is_lenient:
            return False
        self._load_whole(block, sources, f"its loader moves {block.name} to other memory")
        return True

    def _absorb(self, target: torch.Tensor, sources: Iterable[str], why: str) -> None:
        """`target` now holds something of `sources`; nobody knows where."""
        if isinstance(target, OpaqueTensor):
            target.sources |= frozenset(sources)
            return
        block = self._memory.owner(target)
        if block is None:
            self._scratch.put(target, sources)
        else:
            self._load_whole(block, sources, why)

    def _load_whole(self, block: Block, sources: Iterable[str], why: str) -> None:
        """The module of `block` is loaded from whole tensors; without a reloader, that is the end."""
        if not self._is_lenient:
            self._refuse(f"{why}; use the reload path for this model")
        module = module_of(block.name)
        self._whole.setdefault(module, why)
        self._touched[module].update((name, block.name) for name in sources)

    def _locate(self, view: torch.Tensor, sources: Iterable[str]) -> Place | None:
        try:
            return self._memory.locate(view)
        except PlanMismatch as error:
            block = self._memory.owner(view)
            if block is None or not self._is_lenient:
                raise
            self._load_whole(block, sources, str(error))
            return None

    def _refuse(self, message: str) -> NoReturn:
        self.refusals.append(message)
        raise PlanMismatch(message)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        dst, src = args[0], args[1]
        if isinstance(dst, LazyTensor):
            self._refuse(f"{func} writes into the checkpoint tensor {dst.source.name}; loaders may only read it")
        block = self._memory.owner(dst)
        mixed = sources_in(src, self._scratch)
        if isinstance(src, LazyTensor):
            self._copy_lazy(func, dst, src, block)
        elif mixed:
            self._absorb(dst, mixed, src.why if isinstance(src, OpaqueTensor) else _COMPUTES)
        elif block is not None:
            why = f"{func} writes something into {block.name} that is not part of the checkpoint"
            self._load_whole(block, (), f"{why} (while {self.current} is loaded)")
        else:
            return func(*args, **kwargs)
        return dst

    def _copy_lazy(self, func: Any, dst: torch.Tensor, src: LazyTensor, block: Block | None) -> None:
        name = src.source.name
        if block is None and dst.numel():
            if not self._is_lenient:
                self._refuse(
                    f"{func} puts {name} into {tuple(dst.shape)} of memory that belongs to no parameter or "
                    "buffer of the engine; use the reload path for this model"
                )
            self._absorb(dst, (name,), "")
        elif block is not None:
            self._touched[module_of(block.name)].add((name, block.name))
            place = self._locate(dst, (name,))
            if place is not None:
                self._record(src, place)
            stored, sent = str(block.tensor.dtype).removeprefix("torch."), src.source.dtype
            # The planner sends short dtypes in float32 where that is what the engine stores.
            if self._is_lenient and stored not in (sent, "float32"):
                self._load_whole(block, (name,), f"{block.name} is {stored}, {name} is sent as {sent}")

    def _record(self, src: LazyTensor, place: Place) -> None:
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
            self._coverage.add_copy(place)
        except TooScattered as error:
            self._load_whole(place.block, (name,), f"{name} is rearranged on its way into {where}: {error}")
            return
        self._copies += [
            RecordedCopy(
                src_param=name, src_start=box.start, src_size=box.size,
                dst_param=where, dst_offset=box.dst_offset, dst_stride=box.dst_stride,
            )
            for box in boxes
        ]  # fmt: skip

    def _fill(self, place: Place, value: Any) -> None:
        """A constant: the engine's first load wrote it already, so it is noted and not repeated."""
        name = place.block.name
        try:
            num_lost = self._coverage.add_fill(place)
        except TooScattered as error:
            self._refuse(f"a constant fill of {name} cannot be followed: {error}")
        if num_lost:
            why = f"{num_lost} elements of {name} are overwritten with a constant after they were loaded"
            self._load_whole(place.block, (), why)
        elif module_of(name) in self._derived and value != 0:  # its memory is new at every commit: zeros
            self._load_whole(place.block, (), f"its loader fills a part of {name} with {value}")


def _whole_copy(meta: ParamMeta) -> RecordedCopy:
    return RecordedCopy(
        src_param=meta.name,
        src_start=(0,) * len(meta.shape),
        src_size=meta.shape,
        dst_param=WHOLE_PREFIX + meta.name,
        dst_offset=0,
        dst_stride=row_major_strides(meta.shape),
    )


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the operator writes to, by its schema: in-place and `out=` arguments, lists included."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found
