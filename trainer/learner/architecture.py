"""Which kinds of models we can train packed, and what has to be changed in one before its numbers mean what engines
compute: no noise, and rotary factors that do not depend on a token's neighbours in the micro-batch.

Nothing here needs memory for weights: models are looked at on the meta device.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from trainer.learner.attention import ATTENTION_NAME, register_packed_attention
from trainer.learner.errors import TESTED, ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.config.schema.model import ModelConfig

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling")
"""Config fields of models that do more than one matrix product after the last hidden state."""
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
"""Of `config.layer_types`: what reaches our attention function with all that it does. Convolutions, recurrences and
chunked or sparse attention would mix sequences that lie end to end."""
CONFIG_ERRORS = (
    ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ArithmeticError, ImportError,
)  # fmt: skip
"""A damaged config fails wherever its numbers are first used."""


def load_config(model: ModelConfig, directory: Path) -> PreTrainedConfig:
    """Raises ModelError if the config cannot be read, names an architecture transformers does not know, or belongs to
    quantized weights."""
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, StrictDataclassError) as error:
        raise ModelError(
            f"{directory / 'config.json'} cannot be used: {error}; check model_type, or set "
            "model.trust_remote_code=true if the model brings its own code"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not getattr(config, "auto_map", None):
        raise ModelError(f"model_type {config.model_type!r} is not a causal language model; the policy must be one")
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else type(quantization).__name__
        raise ModelError(
            f"{directory / 'config.json'} is of quantized weights (quant_method {method!r}), which mean nothing "
            "without their scales; give the model in bfloat16, float16 or float32"
        )
    return config


def check_packed(config: PreTrainedConfig, directory: Path, *, trust_remote_code: bool) -> None:
    """Build the model of a config without memory, and run it packed once: its shapes and its calls, no numbers.

    Raises:
        ModelError: it cannot be built, does more than we compute, or has a block that tokens get past without our
            attention function.
    """
    register_packed_attention()
    try:
        with torch.device("meta"):
            hf = AutoModelForCausalLM.from_config(
                copy.deepcopy(config),
                dtype=torch.float32,
                experts_implementation="batched_mm",  # others look at numbers
                trust_remote_code=trust_remote_code,
            )
    except CONFIG_ERRORS as error:
        raise ModelError(
            f"{directory / 'config.json'} describes no model that can be built ({type(error).__name__}: {error}); "
            "download it again"
        ) from error
    blocks = check_architecture(hf)
    hf.set_attn_implementation(ATTENTION_NAME)  # only then, since a class that knows no other than its own breaks
    _run_once(hf, blocks)


def check_architecture(hf: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks of a model, if what it says of itself is what we can train packed and with chunked log-probs.

    Raises:
        ModelError: the model does more than we compute.
    """
    name, config = type(hf).__name__, hf.config.get_text_config()
    if not hf._supports_attention_backend:
        raise ModelError(f"{name} has its own attention code, which cannot run packed; use {TESTED}")
    head = hf.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(f"{name} has output layer {head}; only a matrix without bias is supported; use {TESTED}")
    for transform in LOGIT_TRANSFORMS:
        if (value := getattr(config, transform, None)) not in (None, 1, 1.0):
            raise ModelError(f"{name} transforms its logits ({transform}={value}), which we do not; use {TESTED}")
    if foreign := sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES):
        raise ModelError(
            f"{name} has layers of type {', '.join(foreign)}, in which packed sequences would see each other; only "
            f"full and sliding attention can run packed; use {TESTED}"
        )
    _check_rotary(hf)
    blocks = getattr(hf.base_model, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ModelError(f"{name} has no decoder blocks at {hf.base_model_prefix}.layers; use {TESTED}")
    return blocks


def silence(hf: PreTrainedModel) -> None:
    """No dropout and no router noise: either would make the ratio to the behaviour policy noisy, and engines have none.

    Inference mode turns them off wherever they are. Only what can recompute its activations stays in training mode,
    which transformers asks of it; rates of its own dropout become 0.
    """
    for module in hf.modules():
        module.training = hasattr(module, "gradient_checkpointing")
        for name, value in vars(module).items() if module.training else ():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


@torch.no_grad()
def fix_longrope(hf: PreTrainedModel, *, max_model_len: int) -> None:
    """Choose the factors of LongRoPE once, by the rule of engines: the long ones if the context length of the engine
    exceeds that of pretraining, whatever the length of a sequence. Transformers would choose anew for every
    micro-batch, by its longest sequence.

    Args:
        hf: with memory for its buffers.
        max_model_len: tokens, of the engine.
    """
    for rotary in _longropes(hf):
        rotary(rotary.inv_freq, torch.tensor([[max_model_len - 1]], device=rotary.inv_freq.device))
        rotary.rope_type = "fixed"  # a type that transformers does not look after


def _longropes(hf: PreTrainedModel) -> list[Any]:
    return [module for module in hf.modules() if getattr(module, "rope_type", None) == "longrope"]


def _check_rotary(hf: PreTrainedModel) -> None:
    """Raises ModelError for frequencies that `fix_longrope` does not fix and that change with what is in a batch."""
    for module in hf.modules():
        kind: Any = getattr(module, "rope_type", "")
        per_layer_type = isinstance(kind, dict)
        for text in kind.values() if per_layer_type else [kind]:
            if "dynamic" in text or (per_layer_type and text == "longrope"):
                raise ModelError(
                    f"{type(hf).__name__} has rotary embeddings of type {text}, which depend on the longest sequence "
                    "of a micro-batch and differ from the engine's; take the scaling out of config.json, or use "
                    f"{TESTED}"
                )


@dataclass(slots=True, kw_only=True)
class _Trace:
    """A packed layout that computes nothing and notes which blocks asked."""

    block: int = -1
    """The one that runs."""
    attended: set[int] = field(default_factory=set)

    def attend(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float, window: int | None) -> Tensor:
        self.attended.add(self.block)
        return torch.empty_like(q_THD)


def _run_once(hf: PreTrainedModel, blocks: nn.ModuleList) -> None:
    """Raises ModelError if `hf`, which lies on the meta device and is not used again, does not run packed."""
    name, trace = type(hf).__name__, _Trace()
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: setattr(trace, "block", index))
    for rotary in _longropes(hf):
        rotary.rope_type = "fixed"
    one_T = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            hf.base_model(input_ids=one_T, position_ids=one_T, use_cache=False, packed=trace)
    except CONFIG_ERRORS as error:
        raise ModelError(f"{name} cannot run packed ({type(error).__name__}: {error}); use {TESTED}") from error
    if missing := sorted(set(range(len(blocks))) - trace.attended):
        raise ModelError(
            f"{name} has {len(missing)} of {len(blocks)} blocks without attention (the first is {missing[0]}), and "
            f"packed sequences would see each other in them; use {TESTED}"
        )
