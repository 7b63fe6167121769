"""vLLM's layerwise reload, made to write into live memory.

vLLM notes what the tensors of every layer look like before a load. `initialize_layerwise_reload` puts layers back into
that state (without memory), their loaders keep views of what they are given until the layer is complete, then the layer
is loaded, post-processed, and copied into its live tensors. The functions are the same from 0.25.1 to 0.32.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.errors import PlanMismatch, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


log = logging.getLogger(__name__)

_RELOAD = "vllm.model_executor.model_loader.reload"
_NEEDED = ("get_layerwise_info", "initialize_layerwise_reload", "finalize_layerwise_reload")
_WRAPPER = "online_process_loader"
"""Name of the function that vLLM wraps around weight loaders while it collects a layer."""


def layerwise_reloader(model: torch.nn.Module, vllm_config: Any) -> LayerwiseReloader | None:
    """The reloader of a live vLLM model; None if this vLLM has no layer-wise reload.

    Raises:
        PlanMismatch: attention layers derive matrices from `kv_b_proj` (MLA). vLLM makes them anew in other memory, so
            they would neither follow a direct write nor stay where captured graphs read them.
    """
    for name, module in model.named_modules():
        if getattr(module, "kv_b_proj", None) is not None and hasattr(module, "process_weights_after_loading"):
            raise PlanMismatch(f"{name} ({type(module).__name__}) derives matrices from its kv_b_proj; not supported")
    try:
        layerwise: Any = import_module(f"{_RELOAD}.layerwise")
        meta: Any = import_module(f"{_RELOAD}.meta")
    except ModuleNotFoundError:
        log.warning("this vLLM has no layer-wise reload; models with derived weights will be refused")
        return None
    missing = [name for name in _NEEDED if not hasattr(layerwise, name)]
    if missing or not hasattr(meta, "restore_layer_on_meta"):
        log.warning("vLLM's layer-wise reload lacks %s; models with derived weights will be refused", missing)
        return None
    return LayerwiseReloader(model, vllm_config, layerwise=layerwise, meta=meta)


class LayerwiseReloader:
    """A `weight_sync.receive.quantized.Reloader`; `layerwise_reloader` makes it."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, *, layerwise: Any, meta: Any) -> None:
        self._model = model
        self._config = vllm_config
        self._layerwise = layerwise
        self._meta = meta
        self._method_base: Any = import_module("vllm.model_executor.layers.quantization.base_config").QuantizeMethodBase
        self._in_config: Any = import_module("vllm.config").set_current_vllm_config

    def checkpoint_tensors(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor] | None:
        params, _ = self._layerwise.get_layerwise_info(module).restore_metadata
        if not params:
            return None
        # Before 0.32 `bias` was among the noted tensors; later it never leaves the layer.
        skipped = getattr(self._meta, "SKIP_TENSORS", frozenset())
        live = {name: tensor for name, tensor in module._parameters.items() if tensor is not None and name in skipped}
        return {**live, **params}

    @contextmanager
    def checkpoint_format(self, modules: Sequence[torch.nn.Module]) -> Iterator[None]:
        """As vLLM's loaders find the layers in a reload, but with their own loaders instead of collecting ones."""
        kept = [_Held(module) for module in modules]
        try:
            for module in modules:
                self._meta.restore_layer_on_meta(module, self._layerwise.get_layerwise_info(module))
                for tensor in module._parameters.values():
                    _unwrap_loader(tensor)
            yield
        finally:
            for held in kept:
                held.put_back()

    def post_process(self, module: torch.nn.Module) -> bool:
        """As after loading from disk. False if the layer has no method that does anything."""
        method: Any = getattr(module, "quant_method", None)
        if not isinstance(method, self._method_base):
            return False
        vars(module).pop("_already_called_process_weights_after_loading", None)
        with torch.no_grad(), self._in_config(self._config):
            method.process_weights_after_loading(module)
        return True

    def reload(self, modules: Sequence[torch.nn.Module], weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Whatever happens, the layers hold their live tensors afterwards; after an error, with undefined contents.

        Raises:
            WeightSyncError: what vLLM raised.
        """
        kept, chosen = [_Held(module) for module in modules], _Chosen(modules)
        try:
            with torch.inference_mode(False), torch.no_grad(), self._in_config(self._config):
                self._layerwise.initialize_layerwise_reload(chosen)
                self._model.load_weights(weights)  # pyright: ignore[reportCallIssue]
                self._layerwise.finalize_layerwise_reload(chosen, self._config.model_config)
        except Exception as error:
            for held in kept:
                held.put_back()
                self._layerwise.get_layerwise_info(held.module).reset()
            names = ", ".join(sorted({type(module).__name__ for module in modules}))
            message = f"vLLM's reload of {len(kept)} layers ({names}) failed: {type(error).__name__}: {error}"
            raise WeightSyncError(message) from error
        for held in kept:
            held.check()


class _Chosen:
    """What vLLM's functions take for a model: they only walk its modules (and note torchao's flag on it)."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = tuple(modules)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._modules)


class _Held:
    """The live tensors of one module, to put back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self._params = dict(module._parameters)
        self._buffers = dict(module._buffers)
        self._transient = set(module._non_persistent_buffers_set)

    def put_back(self) -> None:
        self.module._parameters.clear()
        self.module._parameters.update(self._params)
        self.module._buffers.clear()
        self.module._buffers.update(self._buffers)
        self.module._non_persistent_buffers_set.clear()
        self.module._non_persistent_buffers_set.update(self._transient)

    def check(self) -> None:
        """
        Raises:
            PlanMismatch: the module holds other tensors than before.
        """
        for now, held in ((self.module._parameters, self._params), (self.module._buffers, self._buffers)):
            changed = [name for name in {**now, **held} if now.get(name) is not held.get(name)]
            if changed:
                raise PlanMismatch(
                    f"vLLM's reload of {type(self.module).__name__} put other tensors in the place of "
                    f"{', '.join(sorted(changed))}; whoever captured their addresses would read old weights"
                )


def _unwrap_loader(tensor: Any) -> None:
    """Online quantisation wraps loaders when a layer is made; the recorder wants what is below."""
    loader = getattr(tensor, "weight_loader", None)
    while getattr(loader, "__name__", "") == _WRAPPER:
        loader = loader.__wrapped__  # pyright: ignore[reportOptionalMemberAccess, reportFunctionMemberAccess]
        tensor.weight_loader = loader
