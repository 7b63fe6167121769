"""vLLM's way from checkpoint tensors to live ones, layer by layer: a `weight_sync.receive.quantized.Reloader`.

vLLM notes what the tensors of every layer look like before a load and can put a layer back into that state, without
memory. Its own reload collects what loaders are given until a layer is complete; here weights arrive complete, so only
the notes and the post-processing are used. They are the same from 0.25.1 to 0.32.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from weight_sync.errors import PlanMismatch
from weight_sync.receive.quantized import Ballots
from weight_sync.vllm.compat import rearranged_experts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch


log = logging.getLogger(__name__)

_RELOAD = "vllm.model_executor.model_loader.reload"
_WRAPPER = "online_process_loader"
"""Name of the function that vLLM wraps around weight loaders while it collects a layer."""


def layerwise_reloader(model: torch.nn.Module, vllm_config: Any) -> LayerwiseReloader | None:
    """The reloader of a live vLLM model; None if this vLLM has no layer-wise reload and the model can do without.

    Raises:
        PlanMismatch: it cannot, and recording its loader would not show it.
    """
    try:
        layerwise: Any = import_module(f"{_RELOAD}.layerwise")
        meta: Any = import_module(f"{_RELOAD}.meta")
        return LayerwiseReloader(
            model, vllm_config, info_of=layerwise.get_layerwise_info, restore=meta.restore_layer_on_meta
        )
    except (ModuleNotFoundError, AttributeError) as error:
        log.warning("this vLLM has no layer-wise reload (%s); models with derived weights will be refused", error)
    if hidden := [name for name, module in model.named_modules() if _derives_from_others(module)]:
        raise PlanMismatch(f"{len(hidden)} layers derive matrices from kv_b_proj, e.g. {hidden[0]}; use a newer vLLM")
    if moved := rearranged_experts(model):
        raise PlanMismatch(
            f"{len(moved)} expert layers keep their weights in the order of another kernel, e.g. "
            f"{next(iter(moved.items()))}; run the engine with moe_backend='triton', or use a newer vLLM"
        )
    return None


class LayerwiseReloader:
    """See the module docstring; `layerwise_reloader` makes it."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, *, info_of: Any, restore: Any) -> None:
        self._model: Any = model
        self._config = vllm_config
        self.ballots = _ballots()
        self._info_of = info_of
        self._restore = restore
        # Before 0.32 `bias` was among the noted tensors; later it never leaves the layer.
        self._never_noted = getattr(import_module(f"{_RELOAD}.meta"), "SKIP_TENSORS", frozenset())
        self._method_base: Any = import_module("vllm.model_executor.layers.quantization.base_config").QuantizeMethodBase
        self._in_config: Any = import_module("vllm.config").set_current_vllm_config

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        params, _ = self._info_of(module).restore_metadata
        if not params:
            return None
        live = {name: tensor for name, tensor in module._parameters.items() if name in self._never_noted}
        return {**{name: tensor for name, tensor in live.items() if tensor is not None}, **params}

    def restore_format(self, module: torch.nn.Module) -> None:
        """With the loaders that fill the tensors, in place of the ones that collect for online quantisation."""
        if self.checkpoint_tensors(module) is None:
            return
        self._restore(module, self._info_of(module))
        for tensor in module._parameters.values():
            loader: Any = getattr(tensor, "weight_loader", None)
            while getattr(loader, "__name__", "") == _WRAPPER:
                loader = loader.__wrapped__
                tensor.weight_loader = loader  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._in_config(self._config):
            self._model.load_weights(weights)

    def post_process(self, module: torch.nn.Module) -> bool:
        """As after loading from disk. False if the layer has no method that does anything."""
        method: Any = getattr(module, "quant_method", None)
        with self._in_config(self._config):
            if _derives_from_others(module):
                module.process_weights_after_loading(self._config.model_config.dtype)  # pyright: ignore[reportCallIssue]
            elif isinstance(method, self._method_base):
                vars(module).pop("_already_called_process_weights_after_loading", None)
                method.process_weights_after_loading(module)
            else:
                return False
        return True

    def known_derived(self) -> Mapping[str, str]:
        return rearranged_experts(self._model)

    def dependents(self) -> Mapping[str, torch.nn.Module]:
        """Attention layers that make matrices of their `kv_b_proj` (MLA)."""
        return {name: module for name, module in self._model.named_modules() if _derives_from_others(module)}


def _derives_from_others(module: torch.nn.Module) -> bool:
    return getattr(module, "kv_b_proj", None) is not None and hasattr(module, "process_weights_after_loading")


def _ballots() -> Ballots | None:
    """Over the store in which the engine's workers have found each other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    return Ballots(store, rank=dist.get_rank(), num_workers=dist.get_world_size())
