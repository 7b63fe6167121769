"""Which modules of a live engine hold something else than what their loader wrote; the start-up self-test.

Two questions per module, answered without a checkpoint and without a trace in the model:

1. Do its live tensors have the names, shapes and dtypes that its loader fills? If not, it was quantised or repacked.
2. Does the engine's post-processing keep random weights bit for bit, and leave nothing else behind? If not, it shuffles
   them, scales them, or keeps a packed copy somewhere. Only then are direct copies what the engine's reload would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weight_sync.fallback import Reloader

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
