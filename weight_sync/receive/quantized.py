"""Modules whose live weights are not what a checkpoint holds: fp8 with scales, packed or shuffled layouts, MLA.

Such a module is derived again at every commit, in memory of its own; the result is copied into the live tensors:

    arrived runs ─> block ─> parameters in checkpoint format ─> the engine's post-processing ─> live tensors, in place

To planner and transports its parameters are parameters like any other, *virtual* ones: `ws_reload/<engine parameter>`
is this worker's shard of a parameter as the loader fills it. Only where a loader computes with values do whole
checkpoint tensors travel (`ws_whole/<checkpoint tensor>`), and the loader runs again.

Captured graphs read the live tensors, so none may move. Everything else that post-processing made may keep memory of
its own: it is never taken from the block, which the next bucket overwrites.
"""

from __future__ import annotations

import types
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from weight_sync.device.fused import BatchCopy
from weight_sync.errors import PlanMismatch
from weight_sync.plan.types import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import EngineParam, Run


SHARD_PREFIX, WHOLE_PREFIX = "ws_reload/", "ws_whole/"
VIRTUAL_PREFIXES = (SHARD_PREFIX, WHOLE_PREFIX)
"""Names of virtual parameters begin so; no module path can contain a slash."""
BUCKET_BYTES = 64 << 20
"""Small modules are derived together up to this size; the block is as large as the largest bucket."""
ALIGN_BYTES = 256


class Ballots:
    """Whether all workers of a replica are ready to post-process: its collectives would wait for one that is not.

    Workers count their commits alike, since each gets every call; the number of a commit is that of its ballot.
    """

    def __init__(self, store: Store, *, rank: int, num_workers: int) -> None:
        self._store = store
        self._rank = rank
        self._num_workers = num_workers

    def vote(self, number: int, *, is_ready: bool) -> None:
        """The first vote counts."""
        self._store.compare_set(self._key(number, self._rank), "", "ready" if is_ready else "failed")
        self._store.delete_key(self._key(number - 4, self._rank))  # everybody has read that one

    def are_all_ready(self, number: int, timeout_s: float) -> bool:
        """False too if somebody has not voted within `timeout_s`."""
        keys = [self._key(number, rank) for rank in range(self._num_workers)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            return all(self._store.get(key) == b"ready" for key in keys)
        except RuntimeError:  # of this torch it is a DistStoreError, which is one
            return False

    def _key(self, number: int, rank: int) -> str:
        return f"weight-sync-commit/{number}/{rank}"


class Reloader(Protocol):
    """An engine's own way from checkpoint tensors to live ones."""

    @property
    def ballots(self) -> Ballots | None:
        """None for a worker that has no other to wait for."""
        ...

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        """Parameters as the module's loader fills them, by attribute name (`meta`); None if that is not known."""
        ...

    def restore_format(self, module: torch.nn.Module) -> None:
        """Give the module `checkpoint_tensors` for parameters; the caller puts the live ones back."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run the model's loader."""
        ...

    def post_process(self, module: torch.nn.Module) -> bool:
        """What the engine does with a module once its weights are loaded. False if there is nothing to do."""
        ...

    def known_derived(self) -> Mapping[str, str]:
        """Path of modules that are derived, whether or not a trial shows it -> why."""
        ...

    def dependents(self) -> Mapping[str, torch.nn.Module]:
        """Modules by path whose post-processing derives tensors from weights of other modules (MLA)."""
        ...


class ReloadedModule(NamedTuple):
    """A module that is derived again at every commit."""

    module: str
    why: str
    params: tuple[EngineParam, ...]
    """Its virtual parameters: shards of its own ones, or whole checkpoint tensors in checkpoint order."""

    @property
    def is_whole(self) -> bool:
        return any(param.name.startswith(WHOLE_PREFIX) for param in self.params)


class Reloads(NamedTuple):
    """What recording found out about an engine, for `ModuleReload`."""

    model: torch.nn.Module
    reloader: Reloader
    modules: tuple[ReloadedModule, ...]


def module_of(parameter_name: str) -> str:
    """Path of the module that holds a parameter; "" for the model itself."""
    return parameter_name.rpartition(".")[0]


def decision_lines(
    direct: Iterable[str], reloaded: Iterable[ReloadedModule], dependents: Iterable[str] = ()
) -> tuple[str, ...]:
    """How modules are written and why, one line per kind: layers that differ only in their number share one."""
    kinds: defaultdict[tuple[str, str], int] = defaultdict(int)
    for module in direct:
        kinds[_pattern(module), "direct (its loader's copies cover it exactly once)"] += 1
    for entry in reloaded:
        how = "reload of whole tensors" if entry.is_whole else "reload of its shard"
        kinds[_pattern(entry.module), f"{how} ({entry.why})"] += 1
    for module in dependents:
        kinds[_pattern(module), "derived again from other modules' weights"] += 1
    return tuple(f"{pattern} x{count}: {decision}" for (pattern, decision), count in kinds.items())


def _pattern(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split(".")) if module else "the model itself"


# Which modules are derived


_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_NOT_COMPARED = frozenset({*_REGISTRIES, "_already_called_process_weights_after_loading"})
"""Attributes that are looked at apart, or only say that processing took place."""
_DEPTH = 5
"""How far objects that post-processing left behind are compared."""
_PROCESSING_ERRORS = (AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError)


def derived_modules(model: torch.nn.Module, reloader: Reloader) -> dict[str, str]:
    """Path of each module whose live state is more than what its loader writes -> why we think so."""
    found: dict[str, str] = {}
    dependents = reloader.dependents()
    for name, module in model.named_modules():
        live = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
        expected = reloader.checkpoint_tensors(module) if live and name not in dependents else None
        if expected is not None and (why := _other_format(live, expected) or _trial(module, reloader)):
            found[name] = why
    return found | dict(reloader.known_derived())


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


def _trial(module: torch.nn.Module, reloader: Reloader) -> str:
    """Why post-processing, tried on random values, is more than nothing; "" if it is nothing."""
    try:
        with _Sandbox.around([module]) as (sandbox,):
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[name] = _randomised(_twin(tensor))  # pyright: ignore[reportArgumentType]
            given = sandbox.state(copied=True)
            return _difference(given, sandbox.state()) if reloader.post_process(module) else ""
    except torch.OutOfMemoryError:
        return "there is no memory to try its post-processing on a copy"
    except _PROCESSING_ERRORS as error:
        return f"its post-processing of a copy failed: {type(error).__name__}: {error}"


def _difference(given: _State, now: _State) -> str:
    if given[0].keys() != now[0].keys():
        return f"post-processing turns {', '.join(given[0])} into {', '.join(now[0])}"
    for name, tensor in now[0].items():
        if tensor is not None and _described(tensor) != _described(given[0][name]):
            return f"post-processing turns {name} into {_described(tensor)}"
        if not _is_same(given[0][name], tensor):
            return f"post-processing rearranges or scales {name}"
    for old, new in zip(given[1:], now[1:], strict=True):
        for name, value in new.items():
            if not _is_same(old.get(name), value):
                return f"post-processing keeps something of the weights in {name}"
    return ""


# What post-processing leaves behind


_State = list[dict[str, Any]]
"""Parameters, buffers and attributes of a module, then the attributes of each object that processes weights for it."""


class _Sandbox:
    """What post-processing of a module may replace, to be put back."""

    def __init__(self, module: torch.nn.Module) -> None:
        owners: list[Any] = [module]
        for owner in owners:  # grows
            for value in vars(owner).values():
                is_one = hasattr(type(value), "process_weights_after_loading") and hasattr(value, "__dict__")
                if is_one and not isinstance(value, torch.nn.Module) and all(value is not known for known in owners):
                    owners.append(value)
        self.module = module
        self._live: _State = [module._parameters, module._buffers, *map(vars, owners)]
        self._kept = [values.copy() for values in self._live]
        self._registries = {name: vars(module)[name].copy() for name in _REGISTRIES}
        self.before = self.state()

    @classmethod
    @contextmanager
    def around(cls, modules: Sequence[torch.nn.Module]) -> Iterator[tuple[_Sandbox, ...]]:
        """Whatever happens inside, the modules hold what they held before."""
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as undo:
            sandboxes = tuple(map(cls, modules))
            for sandbox in sandboxes:
                undo.callback(sandbox.put_back)
            yield sandboxes

    def state(self, *, copied: bool = False) -> _State:
        """What is there now. `copied`: tensors of the module are copies, for it to work on the ones it has."""
        found = [{key: value for key, value in owner.items() if key not in _NOT_COMPARED} for owner in self._live]
        for tensors in found[:2] if copied else ():
            tensors.update({key: value.detach().clone() for key, value in tensors.items() if value is not None})
        return found

    def put_back(self) -> None:
        for held, kept in zip(self._live, self._kept, strict=True):
            held.clear()
            held.update(kept)
        for name, content in self._registries.items():
            held = vars(self.module)[name]
            held.clear()
            held.update(content)

    def write(self, after: _State, name: str) -> None:
        """Bring what post-processing made into the tensors that were there before.

        Raises:
            PlanMismatch: a tensor is there no more, or has another shape or dtype.
        """
        if lost := sorted(self.before[0].keys() ^ after[0].keys()):
            raise PlanMismatch(f"{name} has other parameters than before: {', '.join(lost)}; restart the engine")
        for live, old, new in zip(self._live, self.before, after, strict=True):
            for key, value in new.items():
                is_whole = True
                for left, right in _pairs(old.get(key), value):
                    if left is None or right is None:
                        is_whole = False
                        continue
                    if _laid_out(left) != _laid_out(right):
                        raise PlanMismatch(
                            f"{name}: {key} is {_described(left)}, made again it is {_described(right)}; captured "
                            "graphs hold the old one, so this engine must be restarted"
                        )
                    left.copy_(right)
                    right.data = left.data  # also whatever else holds `right` reads the live memory from now on
                if not is_whole:
                    live[key] = value


def _laid_out(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_same(old: Any, new: Any) -> bool:
    return all(a is not None and b is not None and _same_bits(a, b) for a, b in _pairs(old, new))


def _pairs(old: Any, new: Any, depth: int = _DEPTH) -> Iterator[tuple[torch.Tensor, torch.Tensor] | tuple[None, None]]:
    """Tensors in `old` with those in their place in `new`; (None, None) for anything else that differs."""
    if old is new:
        return
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        yield old, new
        return
    parts = _parts(old), _parts(new)
    if type(old) is not type(new) or depth == 0 or parts[0] is None or parts[1] is None:
        is_plain = isinstance(new, (int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size))
        if not (is_plain and type(old) is type(new) and old == new):
            yield None, None
    elif parts[0].keys() != parts[1].keys():
        yield None, None
    else:
        for key, part in parts[0].items():
            yield from _pairs(part, parts[1][key], depth - 1)


def _parts(value: Any) -> Mapping[Any, Any] | None:
    """What a value is made of; None for one that cannot be looked into."""
    match value:
        case int() | float() | complex() | str() | bytes():
            return None
        case tuple() | list():
            return dict(enumerate(value))
        case dict():
            return value
        case types.MethodType():
            return {"self": value.__self__, "function": value.__func__}
        case types.FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return {"code": value.__code__, "cells": cells, "defaults": (value.__defaults__, value.__kwdefaults__)}
        case partial():
            return {"function": value.func, "args": value.args, "keywords": value.keywords}
        case _:
            # One that frees something may hold its address in a tensor, as vLLM's handlers of oneDNN do.
            is_closed = isinstance(value, type) or hasattr(type(value), "__del__") or not hasattr(value, "__dict__")
            return None if is_closed else vars(value)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return _laid_out(left) == _laid_out(right) and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of any strides, in logical order."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _twin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Another tensor of the same class, attributes, shape and strides: zeros."""
    device = tensor.device if device is None else device
    twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    _stored(twin).zero_()
    twin.__class__ = tensor.__class__
    vars(twin).update(vars(tensor))
    return twin


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _randomised(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        tensor.data.normal_()
    elif tensor.numel():
        _stored(tensor).random_(0, 2)
    return tensor


# The reload of an epoch


class Bucket(NamedTuple):
    """Modules that are derived together: a loader that runs again must find all that reads its tensors."""

    modules: tuple[str, ...]
    params: tuple[EngineParam, ...]


def sizes_of(params: Iterable[EngineParam]) -> dict[str, int]:
    """Bytes of each parameter."""
    return {param.name: prod(param.shape) * DTYPE_BYTES[param.dtype] for param in params}


def bucketed(reloaded: Iterable[ReloadedModule], *, max_bytes: int) -> tuple[Bucket, ...]:
    """Modules that share a tensor come together; others join while they fit into `max_bytes`. Pure."""
    groups: list[Bucket] = []
    for entry in reloaded:
        names = {param.name for param in entry.params}
        sharing = [group for group in groups if names & {param.name for param in group.params}]
        groups = [group for group in groups if group not in sharing]
        groups.append(_joined([*sharing, Bucket((entry.module,), entry.params)]))
    buckets: list[Bucket] = []
    for group in groups:
        if buckets and sum(sizes_of((*buckets[-1].params, *group.params)).values()) <= max_bytes:
            buckets[-1] = _joined([buckets[-1], group])
        else:
            buckets.append(group)
    return tuple(buckets)


def _joined(buckets: Sequence[Bucket]) -> Bucket:
    params = {param.name: param for bucket in buckets for param in bucket.params}
    return Bucket(tuple(name for bucket in buckets for name in bucket.modules), tuple(params.values()))


class ModuleReload:
    """The virtual parameters of one worker for one epoch, and the way from them to live tensors.

    The block is allocated here. What is derived is in torch's memory, and so is what the engine needs meanwhile.
    """

    def __init__(
        self, reloads: Reloads, backend: Backend, *, arrivals: Sequence[tuple[Run, torch.Tensor]] | None
    ) -> None:
        """
        Args:
            arrivals: runs of virtual parameters with the place where they arrive; None if they are to arrive in
                `views`, so that the block must hold all of them at a time.

        Raises:
            PlanMismatch: the model has no such module.
            DeviceError: there is no memory for the block.
        """
        self._reloader = reloads.reloader
        self._buckets = bucketed(reloads.modules, max_bytes=BUCKET_BYTES)
        modules = dict(reloads.model.named_modules())
        if missing := [entry.module for entry in reloads.modules if entry.module not in modules]:
            raise PlanMismatch(f"the engine has no modules {missing}; it changed after the layout was recorded")
        self._modules = {entry.module: modules[entry.module] for entry in reloads.modules}
        self._dependents = dict(reloads.reloader.dependents())
        places: dict[str, tuple[int, int]] = {}
        end = largest = 0
        for bucket in self._buckets:
            end = end if arrivals is None else 0
            for name, size in sizes_of(bucket.params).items():
                places[name] = end, size
                end += -(-size // ALIGN_BYTES) * ALIGN_BYTES
            largest = max(largest, end)
        self._device = next(param.device for param in reloads.model.parameters())
        self._block = backend.alloc_persistent(largest) if largest else None
        self.views: dict[str, torch.Tensor] = {}
        if self._block is not None:
            self.views = {name: self._block.tensor[at : at + size] for name, (at, size) in places.items()}
        """Bytes of each virtual parameter in the block."""
        self._fills: list[Callable[[], None]] = []
        for bucket in self._buckets if arrivals is not None else ():
            names = {param.name for param in bucket.params}
            pairs = [
                (self.views[run.dst_param][run.dst_off : run.dst_off + run.nbytes], arrived)
                for run, arrived in arrivals or ()
                if run.dst_param in names
            ]
            self._fills.append(BatchCopy(backend, pairs))

    @property
    def nbytes(self) -> int:
        return 0 if self._block is None else self._block.nbytes

    def reload(self) -> None:
        """Derive everything anew and write it into the live tensors. Queued on the current stream where there is one.

        Raises:
            PlanMismatch: a tensor came out in another shape or dtype; the engine must be restarted.
        """
        for derived in self._derived():
            for name, sandbox, after in derived:
                with torch.inference_mode(False), torch.no_grad():
                    sandbox.write(after, name)

    def verify(self) -> list[str]:
        """Derive everything once more; names the modules that hold something else. Nothing is written.

        Needs what arrived for the live version, so call it before the next prefetch.
        """
        return [
            name
            for derived in self._derived()
            for name, sandbox, after in derived
            if not all(
                left is None or _same_bits(left, right)
                for old, new in zip(sandbox.before, after, strict=True)
                for key, value in new.items()
                for left, right in _pairs(old.get(key), value)
                if right is not None
            )
        ]

    def close(self) -> None:
        """Free the block. Idempotent."""
        if self._block is not None:
            self._block.close()

    def _derived(self) -> Iterator[list[tuple[str, _Sandbox, _State]]]:
        """Bucket by bucket, then the dependents: what post-processing makes of what arrived."""
        for index, bucket in enumerate(self._buckets):
            if self._fills:
                self._fills[index]()
            yield self._derive({name: self._modules[name] for name in bucket.modules}, bucket.params)
        for name, module in self._dependents.items():
            yield self._derive({name: module}, ())

    def _derive(
        self, modules: Mapping[str, torch.nn.Module], params: Sequence[EngineParam]
    ) -> list[tuple[str, _Sandbox, _State]]:
        found: list[tuple[str, _Sandbox, _State]] = []
        with _Sandbox.around(list(modules.values())) as sandboxes:
            for name, module in modules.items():
                if name not in self._dependents:
                    self._reloader.restore_format(module)
                self._fill(name, module)
            whole = [param for param in params if param.name.startswith(WHOLE_PREFIX)]
            if whole:
                self._reloader.load((param.name.removeprefix(WHOLE_PREFIX), self._typed(param)) for param in whole)
            for (name, module), sandbox in zip(modules.items(), sandboxes, strict=True):
                self._reloader.post_process(module)
                found.append((name, sandbox, sandbox.state()))
        return found

    def _fill(self, path: str, module: torch.nn.Module) -> None:
        """Put tensors of their own in the place of all that the module holds, with the shards that arrived."""
        for registry in (module._parameters, module._buffers):
            for key, tensor in registry.items():
                if tensor is None:
                    continue
                twin = _twin(tensor, self._device if tensor.is_meta else None)
                arrived = self.views.get(f"{SHARD_PREFIX}{path}.{key}" if path else SHARD_PREFIX + key)
                if arrived is not None:
                    _stored(twin).copy_(arrived)
                elif not tensor.is_meta:
                    twin.data.copy_(tensor)
                registry[key] = twin  # pyright: ignore[reportArgumentType]

    def _typed(self, param: EngineParam) -> torch.Tensor:
        return self.views[param.name].clone().view(getattr(torch, param.dtype)).view(param.shape)


@contextmanager
def checkpoint_format(model: torch.nn.Module, names: Iterable[str], reloader: Reloader) -> Iterator[None]:
    """Inside the block the named modules hold what their loaders fill, without memory."""
    modules = dict(model.named_modules())
    with _Sandbox.around([modules[name] for name in names]) as sandboxes:
        for sandbox in sandboxes:
            reloader.restore_format(sandbox.module)
        yield
