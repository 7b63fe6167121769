"""Modules whose live weights are not what a checkpoint holds: they receive whole tensors and are loaded again.

Some engines keep something else than what their loaders fill: fp8 weights with scales, packed or shuffled layouts. For
such a module the whole checkpoint tensors that its loader reads travel instead, as *virtual parameters* named
`ws_fallback/<checkpoint name>`. To the planner, the transports, leases and digests they are parameters like any other.
At the commit, after the direct copies:

    arrived runs ─> bucket: whole tensors, whole modules ─> engine's loader, post-processing ─> live tensors, in place

A loader may keep views of the tensors that it was given until its module is complete, so memory that is used again too
early corrupts weights without an error. Hence a bucket holds only complete modules, and is filled again only after the
engine has finished with every module in it.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weight_sync.errors import PlanMismatch, WeightSyncError
from weight_sync.plan.checks import DTYPE_BYTES
from weight_sync.plan.geometry import row_major_strides
from weight_sync.plan.types import RecordedCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.plan.types import ParamMeta, Run


VIRTUAL_PREFIX = "ws_fallback/"
"""Names of virtual parameters begin so; no module path can contain a slash."""
BUCKET_BYTES = 512 << 20
"""Small groups are reloaded together up to this size: every call of a model's loader walks all its parameters."""
TENSOR_ALIGN_BYTES = 256


class Reloader(Protocol):
    """An engine's own way to load modules of a live model again."""

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Parameters as the module's loader fills them, by attribute name (`meta`); None if that is not known."""
        ...

    def checkpoint_format(self, modules: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
        """Inside the block these modules hold `checkpoint_tensors`; afterwards their live tensors again."""
        ...

    def post_process(self, module: torch.nn.Module) -> bool:
        """What the engine does with a module once its weights are loaded. False if there is nothing to do."""
        ...

    def reload(self, modules: Sequence[torch.nn.Module], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load, post-process and write the result into the live tensors in place. `weights` complete every module."""
        ...


class ReloadedModule(NamedTuple):
    """A module that goes through its loader."""

    module: str
    why: str
    tensors: tuple[str, ...]
    """Checkpoint tensors that its loader reads, in checkpoint order."""


class ReloadGroup(NamedTuple):
    """Modules that must be loaded together, because they read the same tensors."""

    modules: tuple[str, ...]
    tensors: tuple[str, ...]


def virtual_name(checkpoint_name: str) -> str:
    """Name of the virtual parameter that carries a whole checkpoint tensor."""
    return VIRTUAL_PREFIX + checkpoint_name


def whole_copy(meta: ParamMeta) -> RecordedCopy:
    """A whole checkpoint tensor into its virtual parameter."""
    return RecordedCopy(
        src_param=meta.name,
        src_start=(0,) * len(meta.shape),
        src_size=meta.shape,
        dst_param=virtual_name(meta.name),
        dst_offset=0,
        dst_stride=row_major_strides(meta.shape),
    )


def module_of(parameter_name: str) -> str:
    """Path of the module that holds a parameter; "" for the model itself."""
    return parameter_name.rpartition(".")[0]


def grouped(reloaded: Sequence[ReloadedModule]) -> tuple[ReloadGroup, ...]:
    """Join modules that share a tensor, directly or through others; every tensor is then loaded exactly once. Pure."""
    leader = {entry.module: entry.module for entry in reloaded}

    def find(module: str) -> str:
        while leader[module] != module:
            module = leader[module]
        return module

    reader: dict[str, str] = {}
    for entry in reloaded:
        for tensor in entry.tensors:
            leader[find(entry.module)] = find(reader.setdefault(tensor, entry.module))
    members: defaultdict[str, list[ReloadedModule]] = defaultdict(list)
    for entry in reloaded:
        members[find(entry.module)].append(entry)
    return tuple(_joined(entries) for entries in members.values())


def bucketed(groups: Sequence[ReloadGroup], sizes: Mapping[str, int], *, max_bytes: int) -> tuple[ReloadGroup, ...]:
    """Neighbouring groups joined while they fit into `max_bytes`; a larger group gets a bucket of its own. Pure.

    Args:
        sizes: bytes of each tensor.
    """
    buckets: list[ReloadGroup] = []
    filled = 0
    for group in groups:
        nbytes = sum(sizes[name] for name in group.tensors)
        if buckets and filled + nbytes <= max_bytes:
            last = buckets[-1]
            buckets[-1] = ReloadGroup(last.modules + group.modules, last.tensors + group.tensors)
        else:
            buckets.append(group)
            filled = 0
        filled += nbytes
    return tuple(buckets)


def decision_lines(direct: Sequence[str], reloaded: Sequence[ReloadedModule]) -> tuple[str, ...]:
    """What the self-test decided, one line per kind of module: layers that differ only in their number share one."""
    kinds: defaultdict[tuple[str, str], int] = defaultdict(int)
    for module in direct:
        kinds[_pattern(module), "direct (its loader's copies cover it exactly once)"] += 1
    for entry in reloaded:
        kinds[_pattern(entry.module), f"fallback ({entry.why})"] += 1
    return tuple(f"{pattern} x{count}: {decision}" for (pattern, decision), count in kinds.items())


class Tensors(NamedTuple):
    """One bucket, ready to be reloaded."""

    modules: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]
    """Paths of `modules`."""
    weights: tuple[tuple[str, torch.Tensor], ...]
    """Checkpoint name -> tensor in the bucket."""
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """(bytes of the bucket, bytes that arrived); empty if runs arrive in the bucket itself."""


class Fallback:
    """The virtual parameters of one worker for one epoch. Everything is allocated here; `reload` allocates nothing.

    What the engine itself allocates while it post-processes a module is its own affair.
    """

    def __init__(self, backend: Backend, reloader: Reloader, *, block: PersistentBlock, buckets: Sequence[Tensors]):
        self.nbytes = block.nbytes
        self._backend = backend
        self._reloader = reloader
        self._block = block
        self._buckets = tuple(buckets)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of all modules that are reloaded."""
        return tuple(name for bucket in self._buckets for name in bucket.names)

    def reload(self) -> None:
        """Bring what arrived into the live modules. Queued on the current stream where the device has streams.

        Raises:
            WeightSyncError: a live tensor moved; whoever captured its address would read old weights.
        """
        for bucket in self._buckets:
            self._fill(bucket)
            self._load(bucket, bucket.weights)

    def verify(self) -> list[str]:
        """Load every bucket once more from tensors of their own; the modules that differ from what `reload` left.

        Needs what arrived for the live version, so call it before the next prefetch. Costs one bucket of memory.
        """
        wrong: list[str] = []
        for bucket in self._buckets:
            left = [_tensors_of(module) for module in bucket.modules]
            bits = [{name: _bits(tensor).clone() for name, tensor in tensors.items()} for tensors in left]
            self._fill(bucket)
            self._load(bucket, [(name, tensor.clone()) for name, tensor in bucket.weights])
            for name, tensors, before in zip(bucket.names, left, bits, strict=True):
                if any(not torch.equal(_bits(tensor), before[key]) for key, tensor in tensors.items()):
                    wrong.append(name)
        return wrong

    def close(self) -> None:
        """Free the buckets. Idempotent."""
        self._block.close()

    def _fill(self, bucket: Tensors) -> None:
        for target, arrived in bucket.copies:
            self._backend.copy_async(target, arrived)

    def _load(self, bucket: Tensors, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        before = [_addresses(module) for module in bucket.modules]
        self._reloader.reload(bucket.modules, weights)
        for name, module, old in zip(bucket.names, bucket.modules, before, strict=True):
            moved = [key for key, address in _addresses(module).items() if old.get(key) != address]
            if moved or len(_addresses(module)) != len(old):
                raise WeightSyncError(
                    f"reloading {name} moved or dropped {', '.join(moved) if moved else 'tensors'}; captured graphs "
                    "hold the old addresses, so this engine must be restarted"
                )


def sizes_of(params: Sequence[ParamMeta]) -> dict[str, int]:
    """Bytes of each checkpoint tensor, as it travels."""
    return {meta.name: prod(meta.shape) * DTYPE_BYTES[meta.dtype] for meta in params}


class BucketPlan(NamedTuple):
    """Where every virtual parameter lies in the block of buckets."""

    buckets: tuple[ReloadGroup, ...]
    offsets: Mapping[str, int]
    """Checkpoint name -> byte offset."""
    nbytes: int


def plan_buckets(
    reloaded: Sequence[ReloadedModule], params: Sequence[ParamMeta], *, is_staged: bool, max_bytes: int
) -> BucketPlan:
    """Staged, runs wait in the shadow and one bucket serves all groups in turn; in place, each has its own. Pure."""
    sizes = sizes_of(params)
    buckets = bucketed(grouped(reloaded), sizes, max_bytes=max_bytes)
    offsets: dict[str, int] = {}
    end = largest = 0
    for bucket in buckets:
        end = 0 if is_staged else end
        for name in bucket.tensors:
            offsets[name] = end
            end += -(-sizes[name] // TENSOR_ALIGN_BYTES) * TENSOR_ALIGN_BYTES
        largest = max(largest, end)
    return BucketPlan(buckets, offsets, largest)


def virtual_bytes(plan: BucketPlan, params: Sequence[ParamMeta], block: torch.Tensor) -> dict[str, torch.Tensor]:
    """Virtual parameter -> uint8 view of its place in the block."""
    sizes = sizes_of(params)
    return {virtual_name(name): block[at : at + sizes[name]] for name, at in plan.offsets.items()}


def bind_buckets(
    plan: BucketPlan,
    *,
    model: torch.nn.Module,
    params: Sequence[ParamMeta],
    views: Mapping[str, torch.Tensor],
    arrivals: Sequence[tuple[Run, torch.Tensor]],
) -> tuple[Tensors, ...]:
    """Attach a plan to memory.

    Args:
        views: `virtual_bytes`.
        arrivals: runs of virtual parameters that land elsewhere first, with the place where they do.

    Raises:
        PlanMismatch: the model has no such module.
    """
    modules, metas = dict(model.named_modules()), {meta.name: meta for meta in params}
    missing = [name for bucket in plan.buckets for name in bucket.modules if name not in modules]
    if missing:
        raise PlanMismatch(f"the engine has no modules {missing}; it changed after the layout was recorded")
    copies: defaultdict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    for run, arrived in arrivals:
        target = views[run.dst_param][run.dst_off : run.dst_off + run.nbytes]
        copies[run.dst_param.removeprefix(VIRTUAL_PREFIX)].append((target, arrived))
    return tuple(
        Tensors(
            modules=tuple(modules[name] for name in bucket.modules),
            names=bucket.modules,
            weights=tuple((name, _typed(views[virtual_name(name)], metas[name])) for name in bucket.tensors),
            copies=tuple(pair for name in bucket.tensors for pair in copies[name]),
        )
        for bucket in plan.buckets
    )


def _typed(data: torch.Tensor, meta: ParamMeta) -> torch.Tensor:
    return data.view(getattr(torch, meta.dtype)).view(meta.shape)


def _joined(entries: Sequence[ReloadedModule]) -> ReloadGroup:
    tensors = dict.fromkeys(name for entry in entries for name in entry.tensors)
    return ReloadGroup(tuple(entry.module for entry in entries), tuple(tensors))


def _pattern(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split(".")) if module else "the model itself"


def _tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's own parameters and buffers that hold something."""
    named = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in named if tensor is not None and tensor.numel()}


def _addresses(module: torch.nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in _tensors_of(module).items()}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides, in logical order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_MARKS = frozenset({*_REGISTRIES, "_already_called_process_weights_after_loading"})
"""Attributes that are compared apart, or only say that processing took place."""
_DEPTH = 3
"""How far objects that post-processing left behind are compared."""
_PROCESSING_ERRORS = (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)


def derived_modules(model: torch.nn.Module, reloader: Reloader) -> dict[str, str]:
    """Path of each module whose live state is derived from what its loader writes -> why we think so.

    Raises:
        PlanMismatch: a module depends on others in a way that the engine's reload does not follow.
    """
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        live = _own(module)
        if not live:
            continue
        expected = reloader.checkpoint_tensors(module)
        why = "" if expected is None else _other_format(live, expected)
        why = why if why or expected is None else _processed(module, reloader)
        if why:
            found[name] = why
    return found


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in module._parameters.items() if tensor is not None}


def _other_format(live: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    for name, tensor in expected.items():
        if name not in live:
            return f"{name} of its loader is gone"
        now, then = _described(live[name]), _described(tensor)
        if now != then:
            return f"{name} is {now}, its loader fills {then}"
    added = [name for name in live if name not in expected and name != "bias"]
    return f"{', '.join(added)} is in no checkpoint" if added else ""


def _described(tensor: torch.Tensor) -> str:
    layout = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{layout}"


def _processed(module: torch.nn.Module, reloader: Reloader) -> str:
    """Why post-processing is more than nothing; "" if it is nothing."""
    state, registries = dict(vars(module)), {name: vars(module)[name].copy() for name in _REGISTRIES}
    method: Any = getattr(module, "quant_method", None)
    method_state = dict(vars(method)) if hasattr(method, "__dict__") else {}
    given: dict[str, torch.Tensor] = {}
    try:
        for name, tensor in _own(module).items():
            module._parameters[name] = _random_twin(tensor)  # pyright: ignore[reportArgumentType]
            given[name] = module._parameters[name].detach().clone()  # pyright: ignore[reportOptionalMemberAccess]
        if not reloader.post_process(module):
            return ""
        return _difference(module, given, state, registries["_buffers"])
    except torch.OutOfMemoryError:
        return "there is no memory to try its post-processing on a copy"
    except _PROCESSING_ERRORS as error:
        return f"its post-processing of a copy failed: {type(error).__name__}: {error}"
    finally:
        vars(module).clear()
        vars(module).update(state)
        for name, content in registries.items():
            registry = vars(module)[name]
            registry.clear()
            registry.update(content)
        if method_state:
            vars(method).clear()
            vars(method).update(method_state)


def _random_twin(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same class, attributes, shape and strides, with random finite values."""
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        twin.normal_()
    elif twin.numel():
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        raw.set_(twin.untyped_storage(), 0, (twin.untyped_storage().nbytes(),), (1,)).random_(0, 2)
    twin.__class__ = tensor.__class__
    vars(twin).update(vars(tensor))
    return twin


def _difference(
    module: torch.nn.Module,
    given: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor | None],
) -> str:
    now = _own(module)
    if now.keys() != given.keys():
        return f"post-processing turns {', '.join(given)} into {', '.join(now)}"
    for name, tensor in now.items():
        if _described(tensor) != _described(given[name]):
            return f"post-processing turns {name} into {_described(tensor)}"
        if not _same_bits(tensor, given[name]):
            return f"post-processing rearranges or scales {name}"
    for name, buffer in module._buffers.items():
        before = buffers.get(name)
        if buffer is not before and (buffer is None or before is None or not _same_bits(buffer, before)):
            return f"post-processing derives {name}"
    for name, value in vars(module).items():
        if name not in _MARKS and not _same(state.get(name), value, _DEPTH):
            return f"post-processing keeps something of the weights in {name}"
    return ""


def _same(old: Any, new: Any, depth: int) -> bool:
    """Whether two values that post-processing left behind are the same but for their identity."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if isinstance(new, torch.Tensor):
        return _same_bits(new, old)
    if isinstance(new, (int, float, str, bytes, torch.dtype, torch.device, torch.Size)):
        return bool(old == new)
    if depth == 0:
        return False
    if isinstance(new, (tuple, list)):
        return len(old) == len(new) and all(_same(a, b, depth - 1) for a, b in zip(old, new, strict=True))
    if isinstance(new, dict):
        return old.keys() == new.keys() and all(_same(old[key], new[key], depth - 1) for key in new)
    if hasattr(new, "__code__"):
        return old.__code__ is new.__code__ and _same(_captured(old), _captured(new), depth - 1)
    return hasattr(new, "__dict__") and _same(vars(old), vars(new), depth - 1)


def _captured(function: Any) -> list[Any]:
    """What a function brings along: the values of its closure and its defaults."""
    cells = [] if function.__closure__ is None else [cell.cell_contents for cell in function.__closure__]
    return [*cells, function.__defaults__, function.__kwdefaults__]


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    a, b = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(a, b)
