"""LoRA (Hu et al. 2021): adapters on a frozen base, by PEFT's layers.

PEFT puts its layers into the Hugging Face model; the model keeps its class, and its parameters get these names:

    model.layers.0.mlp.up_proj.base_layer.weight          frozen, in the compute dtype, never published
    model.layers.0.mlp.up_proj.lora_A.default.weight      float32 [r, in], trained
    model.layers.0.mlp.up_proj.lora_B.default.weight      float32 [out, r], trained, zero at the start

Engines apply no scaling, so B is published multiplied by alpha / r. Adapters have no dropout, for the reason that the
model has none: it would make the ratio to the behavior policy noisy.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer.errors import ModelError
from trainer.learner.fsdp import local_tensor
from weight_sync.publish.shards import local_part, local_shards
from weight_sync.vllm.lora import TensorTree, peft_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from trainer.config.schema import LoraConfig

_ADAPTER = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.default\.weight")
ADAPTER_DIR = "adapter"
"""Inside an exported model: the adapter alone, as PEFT and engines load it."""


class Adapter(NamedTuple):
    """The two matrices of one layer, sharded as the model is."""

    module: str
    """Name of the layer, as in a checkpoint without adapters: "model.layers.0.mlp.up_proj"."""
    a: nn.Parameter
    """[r, in]"""
    b: nn.Parameter
    """[out, r]"""
    scaling: float

    def published(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """Both under PEFT's names."""
        return (peft_name(self.module, is_a=True), self.a), (peft_name(self.module, is_a=False), self.b)


def add_adapters(hf: PreTrainedModel, blocks: nn.ModuleList, config: LoraConfig, *, base_dtype: torch.dtype) -> None:
    """Put adapters into the linear layers of a model that has no memory yet, and freeze everything else. Raises
    ModelError if PEFT is missing, or the model has no linear layer of a given name."""
    targets = config.target_modules.split("+")
    found = {name.rsplit(".", 1)[-1] for name, module in blocks.named_modules() if isinstance(module, nn.Linear)}
    if missing := sorted(set(targets) - found):
        raise ModelError(f"model.lora.target_modules names {missing}; {type(hf).__name__} has {sorted(found)}")
    for param in hf.parameters():
        param.requires_grad_(False)
        param.data = param.data.to(base_dtype)
    # Only inside blocks: the output matrix is read directly, an adapter on it would have no effect.
    peft, peft_config = _peft(config, targets=rf".*\.layers\..*\.({'|'.join(targets)})")
    with torch.device("meta"):
        peft.inject_adapter_in_model(peft_config, hf)


def _peft(config: LoraConfig, *, targets: str | list[str]) -> tuple[Any, Any]:
    """(PEFT, its configuration). Raises ModelError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ModelError(f'model.lora needs PEFT ({error}); install it with pip install "tandem-rl[lora]"') from error
    return peft, peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,  # there is no memory yet; see init_adapters
    )


def adapters_of(hf: nn.Module) -> tuple[Adapter, ...]:
    """The adapters of a model in model order; empty if it has none. Gathered parameters are freed first."""
    for module in hf.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    named = dict(hf.named_parameters())
    found: list[Adapter] = []
    for name, param in named.items():
        match = _ADAPTER.fullmatch(name)
        if match is not None and match["matrix"] == "A":
            layer: Any = hf.get_submodule(match["module"])
            b = named[f"{match['module']}.lora_B.default.weight"]
            found.append(Adapter(module=match["module"], a=param, b=b, scaling=float(layer.scaling["default"])))
    return tuple(found)


@contextmanager
def without_adapters(hf: nn.Module) -> Iterator[None]:
    """The model computes as its frozen base. Changes nothing on a model without adapters."""
    layers: list[Any] = [module for module in hf.modules() if hasattr(module, "_disable_adapters")]
    # Not PEFT's enable_adapters: that also switches requires_grad, which FSDP2 and the optimizer have read already.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model belongs to an adapter."""
    return _ADAPTER.fullmatch(name) is not None


def checkpoint_name(name: str) -> str:
    """Name of a base parameter in a checkpoint without adapters."""
    return name.replace(".base_layer.", ".")


def init_adapters(hf: nn.Module, *, seed: int) -> None:
    """A uniform as PEFT draws it (Kaiming with a = sqrt 5), B zero: the policy starts as the base model.

    Every rank draws all of A, which is small, and keeps its rows, so the number of ranks does not matter.
    """
    for index, adapter in enumerate(adapters_of(hf)):
        part = local_part(adapter.a)
        bound = 1.0 / math.sqrt(adapter.a.shape[1])
        generator = torch.Generator(device=part.tensor.device).manual_seed(seed * 1_000_003 + index)
        whole = torch.empty(adapter.a.shape, device=part.tensor.device).uniform_(-bound, bound, generator=generator)
        part.tensor.copy_(whole[part.box])
        local_tensor(adapter.b.detach()).zero_()


class PublishedShards:
    """What this rank publishes: its rows of the model; or of its adapters, of A unchanged and of B times the scaling.

    `tensors` are persistent; `refresh` brings those of B up to date.
    """

    def __init__(self, hf: nn.Module, *, rollout_dtype: str) -> None:
        adapters = adapters_of(hf)
        matrices = {name: tensor for adapter in adapters for name, tensor in adapter.published()}
        tree = TensorTree(matrices) if adapters else hf
        self.params, self.shards, self.tensors = local_shards(tree, rollout_dtype=rollout_dtype)
        self._scaled: list[tuple[Tensor, float, Tensor]] = []
        for adapter in adapters:
            name = peft_name(adapter.module, is_a=False)
            if adapter.scaling != 1.0 and name in self.tensors:
                live = self.tensors[name]
                self.tensors[name] = torch.empty_like(live)
                self._scaled.append((live, adapter.scaling, self.tensors[name]))

    def refresh(self) -> None:
        """Call before every publish. In float32: the published value is rounded once, when it is packed."""
        for live, scaling, scaled in self._scaled:
            torch.mul(live, scaling, out=scaled)


def merged_parameters(hf: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Collective: every base parameter, whole, as W + scaling * B A in float32 where there is an adapter."""
    deltas = {f"{adapter.module}.weight": adapter for adapter in adapters_of(hf)}
    for full_name, param in hf.named_parameters():
        if is_adapter(full_name):
            continue
        name = checkpoint_name(full_name)
        if (adapter := deltas.get(name)) is None:
            yield name, _whole(param.detach().to(dtype))  # in this order, because it halves what is gathered
        else:
            merged = _whole(param).float() + adapter.scaling * (_whole(adapter.b) @ _whole(adapter.a))
            yield name, merged.to(dtype)


def gather_adapters(hf: nn.Module) -> dict[str, Tensor]:
    """Collective: the whole adapter in float32 on the host, under PEFT's names, B unscaled."""
    return {
        name: _whole(tensor).cpu().contiguous() for adapter in adapters_of(hf) for name, tensor in adapter.published()
    }


def write_adapter(path: Path, state: dict[str, Tensor], config: LoraConfig, *, base: str) -> None:
    """The adapter as a directory that `PeftModel.from_pretrained` and engines load."""
    from safetensors.torch import save_file

    _, peft_config = _peft(config, targets=config.target_modules.split("+"))
    peft_config.base_model_name_or_path, peft_config.task_type = base, "CAUSAL_LM"
    peft_config.inference_mode = True
    path.mkdir(parents=True)
    peft_config.save_pretrained(path)
    save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _whole(param: Tensor) -> Tensor:
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()
