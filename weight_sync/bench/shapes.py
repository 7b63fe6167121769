"""Exact parameter shapes of well-known models, written down from their published configurations.

Only sizes: nothing is downloaded, and no weights are needed to measure how fast weights travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from weight_sync.plan.types import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield from ((prefix + name, shape) for name, shape in self._attention())
            yield from ((prefix + name, shape) for name, shape in self._mlp())
            yield prefix + "input_layernorm.weight", (self.hidden,)
            yield prefix + "post_attention_layernorm.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)
        if not self.is_tied:
            yield "lm_head.weight", (self.vocab, self.hidden)

    def _attention(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"self_attn.{part}_proj.weight", (rows, self.hidden)
            if self.has_qkv_bias:
                yield f"self_attn.{part}_proj.bias", (rows,)
        yield "self_attn.o_proj.weight", (self.hidden, q)
        if self.has_qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)

    def _mlp(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if not self.num_experts:
            yield from _gated_mlp("mlp.", self.hidden, self.intermediate)
            return
        yield "mlp.gate.weight", (self.num_experts, self.hidden)
        for expert in range(self.num_experts):
            yield from _gated_mlp(f"mlp.experts.{expert}.", self.hidden, self.expert_intermediate)

    def params(self, dtype: str) -> tuple[ParamMeta, ...]:
        """What a learner describes; `dtype` is what travels and what the engine stores."""
        return tuple(ParamMeta(name=name, shape=shape, dtype=dtype) for name, shape in self.shapes())

    @property
    def num_params(self) -> int:
        return sum(prod(shape) for _, shape in self.shapes())

    def config(self, dtype: str) -> dict[str, Any]:
        """A Hugging Face `config.json` from which an engine builds this model without weights or tokenizer."""
        classes = {
            "qwen2": "Qwen2ForCausalLM",
            "llama": "LlamaForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
        }
        experts: dict[str, Any] = {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_intermediate,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }
        return {
            "architectures": [classes[self.model_type]],
            "model_type": self.model_type,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_positions,
            "attention_bias": False,
            "torch_dtype": dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **(experts if self.num_experts else {}),
        }


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (intermediate, hidden)
    yield prefix + "up_proj.weight", (intermediate, hidden)
    yield prefix + "down_proj.weight", (hidden, intermediate)


def _qwen2(name: str, hidden: int, layers: int, **sizes: Any) -> Architecture:
    heads = sizes["heads"]
    return Architecture(
        name=name,
        model_type="qwen2",
        hidden=hidden,
        layers=layers,
        head_dim=hidden // heads,
        has_qkv_bias=True,
        **sizes,
    )


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
"""Architecture by name."""


def architecture(name: str) -> Architecture:
    """
    Raises:
        ValueError: no such model; lists those there are.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]
