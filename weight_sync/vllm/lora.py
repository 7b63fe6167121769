"""Adapters as weights: one slot per engine.

The engine keeps one adapter, the policy, in slot 0 of its LoRA layers; every request asks for it by the same name. What
a sync writes are the slot's stacked A and B matrices, in place, like any other engine parameter:

    learner: q_proj.lora_A [r, in] ─┐                           ┌─> qkv_proj.lora_a.0 [1, R, in]  (R >= r: zeros)
             k_proj.lora_A [r, in] ─┤ pack ─> arena ─> pull ────┼─> qkv_proj.lora_a.1 [1, R, in]
             q_proj.lora_B [out, r]─┘ (scaled by alpha / r)     └─> qkv_proj.lora_b.0 [1, out / TP, R]

So everything that holds for whole weights holds here: the layout comes from the engine's own `set_lora` (fused layers,
tensor parallelism, padding of the rank), addresses never change and captured graphs stay good, a commit falls between
two steps, and requests in flight go on under the new version from exactly that step on. The base weights never move.

The alternative, a new adapter per version (`add_lora`), would tie a request to the version it began with, hold as many
adapters in memory as versions are in flight, and go through files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from weight_sync.errors import PlanMismatch
from weight_sync.vllm.compat import rename_mapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence


ADAPTER_NAME = "policy"
ADAPTER_ID = 1
"""vLLM counts adapters from 1. There is one for all versions: what changes with the version is what it holds."""
ADAPTER_PATH = "held-by-weight-sync"
"""vLLM wants a path; it is never opened, since an adapter of this id is there before the first request."""
SLOT = 0
_PEFT_NAME = re.compile(r"base_model\.model\.(?P<rest>.+\.lora_(?P<matrix>[AB])\.weight)")


class _Layer(Protocol):
    """A linear layer of vLLM with LoRA; unchanged from 0.25.1 to 0.32."""

    lora_a_stacked: Sequence[torch.Tensor]
    """Per slice of a fused layer: [max_loras, 1, R, in]."""
    lora_b_stacked: Sequence[torch.Tensor]
    """Per slice of a fused layer: [max_loras, 1, out, R]."""

    def reset_lora(self, index: int) -> None: ...
    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None: ...


def peft_name(module: str, *, is_a: bool) -> str:
    """Name of an adapter matrix in a PEFT checkpoint, which is its name on the wire too.

    Example: peft_name("model.layers.0.mlp.up_proj", is_a=True)
        == "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    """
    return f"base_model.model.{module}.lora_{'A' if is_a else 'B'}.weight"


def policy_adapter() -> Any:
    """The `LoRARequest` that every generation of the policy carries."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_PATH)


def open_slot(model_runner: Any) -> None:
    """Put an adapter of zeros, which is the base model, into slot 0 and keep it from being evicted. Idempotent.

    Raises:
        PlanMismatch: the engine runs without LoRA, or another adapter is in the slot.
    """
    manager = _manager(model_runner)
    if manager.lora_index_to_id[SLOT] == ADAPTER_ID:
        return
    model_runner.lora_manager.add_dummy_lora(policy_adapter(), rank=1)
    manager.activate_adapter(ADAPTER_ID)
    manager.pin_adapter(ADAPTER_ID)
    _check_slot(manager)


def synced_model(model_runner: Any) -> nn.Module:
    """What weight sync writes: the policy's adapter if the engine was given one (`open_slot`), else the whole model.

    Raises:
        PlanMismatch: there is an adapter, but not where it was put.
    """
    lora = getattr(model_runner, "lora_manager", None)
    if lora is None or ADAPTER_ID not in lora.list_adapters():
        return model_runner.get_model()
    manager = _manager(model_runner)
    _check_slot(manager)
    model = model_runner.get_model()
    return AdapterSlot(
        manager.modules,
        manager.packed_modules,
        targets=getattr(manager.lora_config, "target_modules", None),
        mapper=rename_mapper(model),
        check=lambda: _check_slot(manager),
    )


class TensorTree(nn.Module):
    """Tensors as the parameters (or buffers) of a module, under dotted names: a model for those who walk these.

    They share memory with the tensors.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor] = {}) -> None:
        super().__init__()
        for name, tensor in (*params.items(), *buffers.items()):
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = cast("nn.Module", module._modules[part])
            if name in params:
                param = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
                module.register_parameter(leaf, param)
            else:
                module.register_buffer(leaf, tensor)


class AdapterSlot(TensorTree):
    """Slot 0 of the engine's LoRA layers, as a model that can be recorded and written like any other.

    Parameters are called like the engine's layers: `model.layers.0.self_attn.qkv_proj.lora_a.2` is A of v_proj.
    What a sync has to fill are parameters; parts of a fused layer that have no adapter stay zero and are buffers.
    Layers that are no linear layers (embeddings, fused experts) are left out; an adapter for one is refused.
    """

    def __init__(
        self,
        layers: Mapping[str, object],
        packed: Mapping[str, Sequence[str]],
        *,
        targets: Sequence[str] | None = None,
        mapper: Any = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            layers: the engine's LoRA layers by name.
            packed: fused layer -> names of the layers it is made of, as checkpoints know them.
            targets: last names of the layers that have adapters; None for all.
            mapper: renames checkpoint names to the engine's, if they differ.
            check: raises if the slot no longer is the policy's.
        """
        linear = {name: cast("_Layer", layer) for name, layer in layers.items() if _is_linear(layer)}
        views = [*_slot_views(linear, packed)]
        params = {name: tensor for name, target, tensor in views if targets is None or target in targets}
        super().__init__(params, {name: tensor for name, _, tensor in views if name not in params})
        self._linear = linear  # a dict of modules is not registered: base weights are not what is synchronised
        self._packed = {name: tuple(parts) for name, parts in packed.items()}
        self._mapper = mapper
        self._check = check

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module, after a look at the engine: whoever writes here must reach what its kernels read.

        Raises:
            PlanMismatch: the engine has other tensors now, or another adapter in the slot.
        """
        self._check()
        known = dict(super().named_parameters(remove_duplicate=False))
        views = ((name, tensor) for name, _, tensor in _slot_views(self._linear, self._packed) if name in known)
        moved = [name for name, tensor in views if tensor.data_ptr() != known[name].data_ptr()]
        if moved:
            raise PlanMismatch(f"the engine moved {len(moved)} LoRA buffers, e.g. {moved[0]}; open a new epoch")
        return super().named_parameters(*args, **kwargs)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the slot from the tensors of a PEFT checkpoint; layers without an adapter become zero.

        B must already hold the scaling: the engine's kernels apply none.

        Raises:
            ValueError: an adapter is incomplete or belongs to no linear layer of the engine.
        """
        found: dict[str, dict[bool, torch.Tensor]] = {}
        for name, tensor in weights:
            module, is_a = _module_of(name, self._mapper)
            found.setdefault(module, {})[is_a] = tensor
        for name, pair in found.items():
            if len(pair) != 2:
                raise ValueError(f"the adapter of {name} has only lora_{'A' if True in pair else 'B'}; it needs both")
        for name, layer in self._linear.items():
            _fill(layer, [found.pop(part, None) for part in self._packed.get(name, (name,))])
        if found:
            raise ValueError(
                f"the engine has no linear layer with LoRA for {sorted(found)}; it has {sorted(self._linear)}"
            )


def _module_of(name: str, mapper: Any) -> tuple[str, bool]:
    """Layer of the engine that a matrix called as by `peft_name` belongs to, and whether it is A."""
    match = _PEFT_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not the name of a LoRA matrix, such as {peft_name('model.x', is_a=True)}")
    mapped = match["rest"] if mapper is None else mapper._map_name(match["rest"])
    if mapped is None:
        raise ValueError(f"the engine's model has no layer for {name}")
    return mapped.removesuffix(f".lora_{match['matrix']}.weight"), match["matrix"] == "A"


def _slot_views(
    layers: Mapping[str, _Layer], packed: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name, last name of the checkpoint's layer such as "v_proj", contiguous [1, R, in] or [1, out, R])."""
    for name, layer in layers.items():
        for kind, slices in (("lora_a", layer.lora_a_stacked), ("lora_b", layer.lora_b_stacked)):
            parts = packed.get(name, (name,))
            for index, stacked in enumerate(slices):
                # A few layers have more slices than checkpoints have parts; the last part then covers the rest.
                target = parts[min(index, len(parts) - 1)].rsplit(".", 1)[-1]
                yield f"{name}.{kind}.{index}", target, stacked[SLOT]


def _fill(layer: _Layer, pairs: Sequence[dict[bool, torch.Tensor] | None]) -> None:
    if all(pair is None for pair in pairs):
        layer.reset_lora(SLOT)
        return
    lora_a, lora_b = ([None if pair is None else pair[is_a] for pair in pairs] for is_a in (True, False))
    is_fused = len(pairs) > 1
    layer.set_lora(SLOT, lora_a if is_fused else lora_a[0], lora_b if is_fused else lora_b[0])


def _is_linear(layer: object) -> bool:
    return isinstance(getattr(layer, "lora_a_stacked", None), tuple) and hasattr(layer, "output_slices")


def _manager(model_runner: Any) -> Any:
    lora = getattr(model_runner, "lora_manager", None)
    if lora is None:
        raise PlanMismatch("the engine runs without LoRA; start it with EngineSpec.lora_rank (model.lora.rank)")
    return lora._adapter_manager


def _check_slot(manager: Any) -> None:
    if manager.lora_index_to_id[SLOT] != ADAPTER_ID:
        raise PlanMismatch(
            f"slot {SLOT} of the engine's LoRA layers holds adapter {manager.lora_index_to_id[SLOT]}, not the policy "
            f"(adapter {ADAPTER_ID}); an engine in a run may have no other adapters"
        )
