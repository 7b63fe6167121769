"""Exact parameter shapes of well-known models, from their published configurations. Nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from weight_sync.plan.types import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator

_CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}

_CONFIG = {
    "model_type": "model_type", "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "intermediate_size": "intermediate",
    "vocab_size": "vocab", "tie_word_embeddings": "is_tied", "rope_theta": "rope_theta",
    "max_position_embeddings": "max_positions",
}  # fmt: skip
"""Key of a `config.json` -> field of `Architecture`."""
_EXPERTS_CONFIG = {
    "num_experts": "num_experts", "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_intermediate",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention and gated MLPs, or experts instead of the MLPs."""

    name: str
    model_type: str
    """As in a Hugging Face `config.json`: qwen2 | llama | qwen3 | qwen3_moe."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    num_experts: int = 0
    expert_intermediate: int = 0
    experts_per_token: int = 0
    rope_theta: float = 1e6
    max_positions: int = 32768

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(checkpoint name, full shape) of every parameter, in the order of a checkpoint."""
        hidden, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = self.expert_intermediate if self.num_experts else self.intermediate
        yield "model.embed_tokens.weight", (self.vocab, hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for part, rows in (("q", q), ("k", kv), ("v", kv)):
                yield f"{prefix}self_attn.{part}_proj.weight", (rows, hidden)
                if self.has_qkv_bias:
                    yield f"{prefix}self_attn.{part}_proj.bias", (rows,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, q)
            for part in "qk" if self.has_qk_norm else "":
                yield f"{prefix}self_attn.{part}_norm.weight", (self.head_dim,)
            if self.num_experts:
                yield f"{prefix}mlp.gate.weight", (self.num_experts, hidden)
            for mlp in [f"mlp.experts.{expert}" for expert in range(self.num_experts)] or ["mlp"]:
                yield f"{prefix}{mlp}.gate_proj.weight", (inner, hidden)
                yield f"{prefix}{mlp}.up_proj.weight", (inner, hidden)
                yield f"{prefix}{mlp}.down_proj.weight", (hidden, inner)
            yield f"{prefix}input_layernorm.weight", (hidden,)
            yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield "model.norm.weight", (hidden,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab, hidden)

    def params(self, dtype: str) -> tuple[ParamMeta, ...]:
        """What a learner describes; `dtype` is what travels and what the engine stores."""
        return tuple(ParamMeta(name=name, shape=shape, dtype=dtype) for name, shape in self.shapes())

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for _, shape in self.shapes())

    def config(self, dtype: str) -> dict[str, Any]:
        """A Hugging Face `config.json` from which an engine builds this model without weights or tokenizer."""
        names = _CONFIG | (_EXPERTS_CONFIG if self.num_experts else {})
        fixed: dict[str, Any] = {
            "architectures": [_CLASSES[self.model_type]], "torch_dtype": dtype, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        experts = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
        found = {name: getattr(self, field) for name, field in names.items()} | fixed
        return found | experts if self.num_experts else found


def _qwen2(name: str, hidden: int, layers: int, *, heads: int, **sizes: Any) -> Architecture:
    return Architecture(
        name=name, model_type="qwen2", hidden=hidden, layers=layers, heads=heads, head_dim=hidden // heads,
        has_qkv_bias=True, **sizes,
    )  # fmt: skip


def _llama3(name: str, hidden: int, layers: int, **sizes: Any) -> Architecture:
    return Architecture(
        name=name, model_type="llama", hidden=hidden, layers=layers, head_dim=128, kv_heads=8, vocab=128256,
        rope_theta=5e5, max_positions=8192, **sizes,
    )  # fmt: skip


_ALL = (
    # As qwen2, with a vocabulary that needs padding; about 13 MB.
    _qwen2("tiny", 256, 4, heads=8, kv_heads=4, intermediate=1024, vocab=4001, max_positions=4096),
    _qwen2("qwen2.5-0.5b", 896, 24, heads=14, kv_heads=2, intermediate=4864, vocab=151936, is_tied=True),
    _qwen2("qwen2.5-1.5b", 1536, 28, heads=12, kv_heads=2, intermediate=8960, vocab=151936, is_tied=True),
    _qwen2("qwen2.5-3b", 2048, 36, heads=16, kv_heads=2, intermediate=11008, vocab=151936, is_tied=True),
    _qwen2("qwen2.5-7b", 3584, 28, heads=28, kv_heads=4, intermediate=18944, vocab=152064),
    _qwen2("qwen2.5-14b", 5120, 48, heads=40, kv_heads=8, intermediate=13824, vocab=152064),
    _qwen2("qwen2.5-32b", 5120, 64, heads=40, kv_heads=8, intermediate=27648, vocab=152064),
    Architecture(
        name="smollm2-135m", model_type="llama", hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64,
        intermediate=1536, vocab=49152, is_tied=True, rope_theta=1e5, max_positions=8192,
    ),
    _llama3("llama3-8b", 4096, 32, heads=32, intermediate=14336),
    _llama3("llama3-70b", 8192, 80, heads=64, intermediate=28672),
    Architecture(
        name="qwen3-8b", model_type="qwen3", hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128,
        intermediate=12288, vocab=151936, has_qk_norm=True, max_positions=40960,
    ),
    Architecture(
        name="qwen3-30b-a3b", model_type="qwen3_moe", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128,
        intermediate=6144, vocab=151936, has_qk_norm=True, num_experts=128, expert_intermediate=768,
        experts_per_token=8, max_positions=40960,
    ),
)  # fmt: skip
MODELS = {architecture.name: architecture for architecture in _ALL}


def architecture(name: str) -> Architecture:
    """
    Raises:
        ValueError: no such model; lists those there are.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
