"""The shape of a model, from its config alone: built without memory, no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from trainer.learner.lora import add_adapters
from trainer.learner.model import check_architecture, load_config, torch_dtype
from trainer.planning.sizes import ModelShape

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from trainer.config.schema.model import ModelConfig


def model_shape(model: ModelConfig, path: str) -> ModelShape:
    """Of the model at `path` (a directory, or a hub name, of which only the config is fetched), with its adapters.

    Raises:
        ModelError: there is no config, or none that we can train.
    """
    config = load_config(model, Path(path).expanduser())
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=model.trust_remote_code)
    blocks = check_architecture(hf)
    num_params, of_blocks = _count(hf), [_count(block) for block in blocks]
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    text = config.get_text_config()
    num_visited = [_num_visited(block, text) for block in blocks]
    if model.lora.rank:
        add_adapters(hf, blocks, model.lora, base_dtype=torch_dtype(model.compute_dtype))
    heads, head_dim = int(text.num_attention_heads), _largest(text, "head_dim")
    kv_heads = _largest(text, "num_key_value_heads")
    return ModelShape(
        num_params=num_params,
        num_block_params=max(of_blocks),
        num_root_params=num_params - sum(of_blocks),
        num_head_params=0 if head is embedding else head.numel(),
        num_visited_params=sum(num_visited),
        num_layers=len(blocks),
        hidden_size=int(text.hidden_size),
        intermediate_size=_active_intermediate_size(text),
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=int(text.hidden_size) // heads if head_dim is None else head_dim,
        latent_size=_latent_size(text),
        vocab_size=int(text.vocab_size),
        num_adapter_params=sum(p.numel() for name, p in hf.named_parameters() if ".lora_" in name),
    )


def _largest(text: PreTrainedConfig, name: str) -> int | None:
    """Of all blocks; None if the config has no such attribute."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers will not answer for a model whose blocks differ in it, such as Gemma 4
        value = max(getattr(block, name) for block in text.per_layer_config)
    return None if value is None else int(value)


def _latent_size(text: PreTrainedConfig) -> int:
    """Of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): the compressed keys and values, and
    the one key that is rotated."""
    rank = getattr(text, "kv_lora_rank", None)
    return 0 if rank is None else int(rank) + int(text.qk_rope_head_dim)


def _active_intermediate_size(text: PreTrainedConfig) -> int:
    """Of the experts that one token visits, together; of a dense MLP."""
    expert, visited = getattr(text, "moe_intermediate_size", None), getattr(text, "num_experts_per_tok", None)
    if expert is None or visited is None:
        return int(text.intermediate_size)
    return int(expert) * int(visited)


def _num_visited(block: nn.Module, text: PreTrainedConfig) -> int:
    """In the matrices of a block, as trainer/learner/flops.py counts them; experts that are not fused all count."""
    visited = getattr(text, "num_experts_per_tok", None)
    of_matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    experts = [p for p in block.parameters() if p.ndim == 3]
    return of_matrices + sum(p.numel() if visited is None else p.numel() // p.shape[0] * visited for p in experts)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
