"""Learns an engine's layout by running its own loader once on tensors without data.

`record_layout` calls `model.load_weights` once with tensors that have a name, a shape and no data. A dispatch mode
watches every operation below Python's surface: views of such a tensor are followed on a `meta` twin, a `copy_` of one
into engine memory is written down and not carried out, anything else that would need the data is refused by name. So
the plan needs no knowledge of fused qkv, tensor parallelism or parameter names: the loader is the specification.

With a `Reloader` less is refused: a module whose loader does more than that, or whose live weights are derived from
what it loads, is noted with the tensors that it reads, and goes through the fallback.
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
    Blend,
    Ghost,
    Temporaries,
    compute,
    follow,
    ghosts_in,
    is_view,
    new_ghost,
    sources_in,
)
from weight_sync.plan.geometry import BoxCopy, TooScattered, ViewDim, split_into_boxes
from weight_sync.plan.types import EngineParam, ParamMeta, RecordedCopy, WorkerLayout
from weight_sync.receive.engine_memory import Coverage, EngineMemory
from weight_sync.receive.quantized import (
    ReloadedModule,
    decision_lines,
    derived_modules,
    module_of,
    virtual_name,
    whole_copy,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from weight_sync.receive.engine_memory import Block, Place
    from weight_sync.receive.quantized import Reloader


_aten = torch.ops.aten
_CONSTANT_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})
_LOADER_ERRORS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What the loaders of model classes raise when a tensor does not fit."""
_MIXED = "its loader computes with what it loads"


class Recorded(NamedTuple):
    """What recording a loader found out."""

    layout: WorkerLayout
    reloaded: tuple[ReloadedModule, ...]
    """Modules that are loaded through the fallback; their tensors are virtual parameters of `layout`."""


def record_layout(model: torch.nn.Module, params: Sequence[ParamMeta], *, worker: int) -> WorkerLayout:
    """`record` for an engine without a reloader: whatever cannot be written directly is refused."""
    return record(model, params, worker=worker).layout


def record(
    model: torch.nn.Module, params: Sequence[ParamMeta], *, worker: int, reloader: Reloader | None = None
) -> Recorded:
    """Run `model.load_weights` once with recording tensors; write nothing.

    Args:
        model: live engine model. Parameters that are written directly must be contiguous; none of them changes.
        params: all checkpoint tensors, in any order, with their full shapes.
        worker: rank of this worker inside its replica.
        reloader: the engine's way to load single modules again, for those that cannot be written directly.

    Raises:
        PlanMismatch: the loader refuses a tensor, does something that cannot be followed, or does not fill every
            element of every parameter exactly once. Names the tensor, the engine parameter, the operation, the numbers.
            Also if the engine permuted expert weights after loading, which the loader does not show.
    """
    scrambled = rearranged_experts(model)
    if scrambled and reloader is None:
        raise PlanMismatch(
            f"{len(scrambled)} expert layers keep their weights in the order of another kernel, e.g. "
            f"{next(iter(scrambled.items()))}; run the engine with moe_backend='triton', or use the reload path"
        )
    derived = {} if reloader is None else {**derived_modules(model, reloader), **scrambled}
    modules = dict(model.named_modules())
    swapped = nullcontext() if reloader is None else reloader.checkpoint_format([modules[name] for name in derived])
    with swapped:
        memory = EngineMemory(model, without_memory=derived)
        recording = _Recording(memory, is_lenient=reloader is not None)
        try:
            _run_loader(model, params, recording)
        finally:
            moved = memory.restore()
        if recording.refusals:
            raise PlanMismatch(recording.refusals[0])
        blocks = {block.name: block for block in memory.params()}
        if moved and not all(recording.follow_moved(blocks.get(name), memory.held[name]) for name in moved):
            raise PlanMismatch(
                f"the loader moves {', '.join(moved)} to other memory; use the reload path for this model"
            )
        reloaded = _reloaded(recording, memory.params(), derived, worker)
        layout = _layout(recording, memory, reloaded, params=params, worker=worker)
    away = {entry.module for entry in reloaded}
    direct = dict.fromkeys(module_of(param.name) for param in layout.params if module_of(param.name) in modules)
    decisions = decision_lines([name for name in direct if name not in away], reloaded)
    return Recorded(msgspec.structs.replace(layout, decisions=decisions), reloaded)


def _reloaded(
    recording: _Recording, blocks: Sequence[Block], derived: Mapping[str, str], worker: int
) -> tuple[ReloadedModule, ...]:
    """Modules that need the fallback.

    Raises:
        PlanMismatch: a parameter that no checkpoint tensor fills.
    """
    problems: list[str] = []
    why = {**recording.given_up, **derived}
    for block in blocks:
        module, counts = module_of(block.name), recording.coverage.of(block)
        if module in recording.given_up:
            if block.num_elements and all(block.name != target for _, target in recording.touched[module]):
                problems.append(counts.describe(block))
        elif counts.never or (counts.twice and not recording.is_lenient):
            problems.append(counts.describe(block))
        elif counts.twice:
            why.setdefault(module, f"{counts.twice} elements of {block.name} are written more than once")
    unread = [module for module in why if not recording.touched[module]]
    problems += [f"{module} ({why[module]}): the loader reads nothing for it" for module in unread]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise PlanMismatch(f"worker {worker}: the loader does not fill every parameter exactly once:{lines}")
    order = {name: i for i, name in enumerate(recording.seen)}
    return tuple(
        ReloadedModule(
            module, text, tuple(sorted({name for name, _ in recording.touched[module]}, key=order.__getitem__))
        )
        for module, text in why.items()
    )


def _layout(
    recording: _Recording,
    memory: EngineMemory,
    reloaded: Sequence[ReloadedModule],
    *,
    params: Sequence[ParamMeta],
    worker: int,
) -> WorkerLayout:
    """Direct copies as they were recorded; for reloaded modules, whole checkpoint tensors as virtual parameters."""
    away = {entry.module for entry in reloaded}
    carried = {name for entry in reloaded for name in entry.tensors}
    metas = [meta for meta in params if meta.name in carried]
    copies = [copy for copy in recording.copies if module_of(copy.dst_param) not in away]
    copies += map(whole_copy, metas)
    described = [p for p in memory.described({c.dst_param for c in copies}) if module_of(p.name) not in away]
    described += [EngineParam(name=virtual_name(meta.name), shape=meta.shape, dtype=meta.dtype) for meta in metas]
    return WorkerLayout(worker=worker, params=tuple(described), copies=tuple(copies))


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
    """Follows ghosts while it is active, and keeps every write away from engine memory."""

    def __init__(self, memory: EngineMemory, *, is_lenient: bool = False) -> None:
        super().__init__()
        self.is_lenient = is_lenient
        """Modules that cannot be followed are given up instead of refused."""
        self.given_up: dict[str, str] = {}
        """Module -> why."""
        self.touched: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        """Module -> (checkpoint tensor, engine tensor that something of it went to)."""
        self.seen: list[str] = []
        self.copies: list[RecordedCopy] = []
        self.coverage = Coverage()
        self.refusals: list[str] = []
        """A loader may catch our error; what could not be followed must not be forgotten."""
        self.current = "its first tensor"
        self._memory = memory
        self._temporaries = Temporaries()

    def tensors(self, params: Sequence[ParamMeta], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
        """What the loader iterates over. Lazy, so that `current` is the tensor being loaded."""
        for meta in params:
            self.current = f"{meta.name} {tuple(meta.shape)}"
            self.seen.append(meta.name)
            dtype = getattr(torch, meta.dtype, None)
            if not isinstance(dtype, torch.dtype):
                self._refuse(f"{meta.name} has dtype {meta.dtype!r}, which is not the name of a torch dtype")
            twin = torch.empty(meta.shape, dtype=dtype, device="meta")
            yield meta.name, new_ghost(meta, twin, dtype=dtype, device=device)
        self.current = "the end of the checkpoint"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _aten.copy_.default:
            return self._copy(func, args, kwargs)
        ghosts, blended = ghosts_in((args, kwargs)), sources_in((args, kwargs), self._temporaries)
        why = _MIXED
        if ghosts and not blended:
            try:
                return follow(func, ghosts, args, kwargs)
            except PlanMismatch as error:
                why = str(error)
                if not self.is_lenient:
                    self._refuse(why)
        if ghosts or blended:
            return self._compute(func, args, kwargs, blended.union(ghost.source.name for ghost in ghosts), why)
        return self._change(func, args, kwargs)

    def _change(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation that reads nothing of the checkpoint."""
        written = _written_tensors(func, args, kwargs)
        blocks = [block for block in map(self._memory.owner, written) if block is not None]
        if not blocks:
            return func(*args, **kwargs)
        if func not in _CONSTANT_FILLS:
            for block in blocks:
                self._give_up(
                    block,
                    (),
                    f"{func} changes {block.name} while {self.current} is loaded; what it writes is not in the "
                    "checkpoint, use the reload path for this model",
                )
            return written[0]
        place = self._locate(written[0], ())
        if place is not None:
            self._fill(place)
        return args[0]

    def _compute(self, func: Any, args: Any, kwargs: Any, sources: frozenset[str], why: str) -> Any:
        """An operation with `sources` whose result cannot be followed element by element."""
        written = _written_tensors(func, args, kwargs)
        if any(isinstance(tensor, Ghost) for tensor in written):
            self._refuse(f"{func} writes into the checkpoint tensors {', '.join(sorted(sources))}; use a copy")
        if not written:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if is_view(func) and not any(isinstance(tensor, (Ghost, Blend)) for tensor in tensors):
                return func(*args, **kwargs)  # of a temporary: its memory tells that it is one
            try:
                return compute(func, args, kwargs, sources=sources, why=why)
            except PlanMismatch as error:
                self._refuse(str(error))
        for tensor in written:
            self._absorb(tensor, sources, why)
        return written[0]

    def follow_moved(self, block: Block | None, held: Any) -> bool:
        """The loader put `held` in the place of an engine tensor. False if that is more than the fallback can do."""
        sources = {held.source.name} if isinstance(held, Ghost) else sources_in(held, self._temporaries)
        if block is None or not sources or not self.is_lenient:
            return False
        self._give_up(block, sources, f"its loader moves {block.name} to other memory")
        return True

    def _absorb(self, target: torch.Tensor, sources: Iterable[str], why: str) -> None:
        """`target` now holds something of `sources`; nobody knows where."""
        if isinstance(target, Blend):
            target.sources |= frozenset(sources)
            return
        block = self._memory.owner(target)
        if block is None:
            self._temporaries.put(target, sources)
        else:
            self._give_up(block, sources, why)

    def _give_up(self, block: Block, sources: Iterable[str], why: str) -> None:
        """The module of `block` needs the fallback; without one, that is the end."""
        if not self.is_lenient:
            self._refuse(why)
        module = module_of(block.name)
        self.given_up.setdefault(module, why)
        self.touched[module].update((name, block.name) for name in sources)

    def _locate(self, view: torch.Tensor, sources: Iterable[str]) -> Place | None:
        try:
            return self._memory.locate(view)
        except PlanMismatch as error:
            block = self._memory.owner(view)
            if block is None or not self.is_lenient:
                raise
            self._give_up(block, sources, str(error))
            return None

    def _refuse(self, message: str) -> NoReturn:
        self.refusals.append(message)
        raise PlanMismatch(message)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        dst, src = args[0], args[1]
        if isinstance(dst, Ghost):
            self._refuse(f"{func} writes into the checkpoint tensor {dst.source.name}; loaders may only read it")
        block = self._memory.owner(dst)
        blended = sources_in(src, self._temporaries)
        if isinstance(src, Ghost):
            self._copy_ghost(func, dst, src, block)
        elif blended:
            self._absorb(dst, blended, src.why if isinstance(src, Blend) else _MIXED)
        elif block is not None:
            self._give_up(
                block,
                (),
                f"{func} writes something into {block.name} that is not part of the checkpoint (while "
                f"{self.current} is loaded); use the reload path for this model",
            )
        else:
            return func(*args, **kwargs)
        return dst

    def _copy_ghost(self, func: Any, dst: torch.Tensor, src: Ghost, block: Block | None) -> None:
        name = src.source.name
        if block is None and dst.numel():
            if not self.is_lenient:
                self._refuse(
                    f"{func} puts {name} into {tuple(dst.shape)} of memory that belongs to no parameter or "
                    "buffer of the engine; use the reload path for this model"
                )
            self._absorb(dst, (name,), "")
        elif block is not None:
            self.touched[module_of(block.name)].add((name, block.name))
            place = self._locate(dst, (name,))
            if place is not None:
                self._record(src, place)
            stored, sent = str(block.tensor.dtype).removeprefix("torch."), src.source.dtype
            # The planner sends short dtypes in float32 where that is what the engine stores.
            if self.is_lenient and stored not in (sent, "float32"):
                self._give_up(block, (name,), f"{block.name} is {stored}, {name} is sent as {sent}")

    def _record(self, src: Ghost, place: Place) -> None:
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
            why = f"{name} is rearranged on its way into {where}: {error}; use the reload path for this model"
            self._give_up(place.block, (name,), why)
            return
        self.copies.extend(_recorded(name, where, box) for box in boxes)

    def _fill(self, place: Place) -> None:
        """A constant: the engine's first load wrote it already, so it is noted and not repeated."""
        name = place.block.name
        try:
            num_lost = self.coverage.add_fill(place)
        except TooScattered as error:
            self._refuse(f"a constant fill of {name} cannot be followed: {error}")
        if num_lost:
            why = f"{num_lost} elements of {name} are overwritten with a constant after they were loaded"
            self._give_up(place.block, (), why)


def _recorded(src_param: str, dst_param: str, box: BoxCopy) -> RecordedCopy:
    return RecordedCopy(
        src_param=src_param,
        src_start=box.start,
        src_size=box.size,
        dst_param=dst_param,
        dst_offset=box.dst_offset,
        dst_stride=box.dst_stride,
    )


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the operator writes to, by its schema: in-place and `out=` arguments, lists included."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


ORDER_KEEPING_EXPERTS = frozenset({"TRITON", "BATCHED_TRITON"})
"""`UnquantizedMoeBackend`s of vLLM that compute with w13 and w2 as the loader left them."""


def rearranged_experts(model: Any) -> dict[str, str]:
    """Expert layers whose unquantised weights vLLM stores in another order than its loader wrote: name -> backend.

    Such a layer keeps names and shapes, so a recorded layout looks right and would scramble it. Layers of quantised
    methods are not judged here.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        backend = getattr(getattr(method, "unquantized_backend", None), "value", None)
        if "w13_weight" not in module._parameters or backend is None or backend in ORDER_KEEPING_EXPERTS:
            continue
        if not getattr(module, "keeps_checkpoint_order", False):
            found[name] = str(backend)
    return found
