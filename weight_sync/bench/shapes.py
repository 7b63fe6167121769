"""Exact parameter shapes of well-known models, from their published configurations, and how vLLM lays them out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

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


VOCAB_MULTIPLE = 64


class Place(NamedTuple):
    """Where a worker keeps its part of one checkpoint tensor."""

    param: str
    shape: tuple[int, ...]
    """Of the engine parameter."""
    dim: int
    span: tuple[int, int]
    """(start, size) of the part, along `dim` of the checkpoint tensor."""
    row: int = 0
    """First row in the engine parameter."""
    expert: int | None = None
    """Index into the engine parameter's first dimension, where experts are stacked."""
    is_padded: bool = False
    """Rows after this part are vocabulary padding."""


def places(arch: Architecture, *, worker: int, num_workers: int) -> Iterator[tuple[str, Place]]:
    """(checkpoint name, place) of every tensor.

    Fused `qkv_proj` and `gate_up_proj`, columns of `o_proj` and `down_proj` split over the workers, KV heads repeated
    when there are fewer of them than workers, experts stacked, a vocabulary padded to multiples of 64.

    Raises:
        ValueError: the model cannot be split over so many workers.
    """
    kv_fits = arch.kv_heads % num_workers == 0 or num_workers % arch.kv_heads == 0
    inner = arch.expert_intermediate if arch.num_experts else arch.intermediate
    if arch.heads % num_workers or inner % num_workers or VOCAB_MULTIPLE % num_workers or not kv_fits:
        raise ValueError(
            f"{arch.name} cannot be split over {num_workers} workers: it has {arch.heads} heads, {arch.kv_heads} "
            f"KV heads and {inner} MLP columns; use a number of workers that divides them"
        )
    inner //= num_workers
    q_rows = arch.heads // num_workers * arch.head_dim
    kv_rows = max(1, arch.kv_heads // num_workers) * arch.head_dim
    vocab_rows = -(-arch.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE // num_workers
    first_row = min(worker * vocab_rows, arch.vocab)
    vocab = (first_row, min(vocab_rows, arch.vocab - first_row))
    q, columns = (worker * q_rows, q_rows), (worker * inner, inner)
    kv = (worker // max(1, num_workers // arch.kv_heads) * kv_rows, kv_rows)
    in_qkv = {"q_proj": (q, 0), "k_proj": (kv, q_rows), "v_proj": (kv, q_rows + kv_rows)}
    for name, shape in arch.shapes():
        stem, _, kind = name.rpartition(".")
        prefix, _, leaf = stem.rpartition(".")
        # "model.layers.0.mlp.experts.7.gate_proj" is part of "model.layers.0.mlp.experts.w13_weight".
        experts, _, number = prefix.rpartition(".")
        expert = int(number) if experts.endswith("experts") else None
        stack = () if expert is None else (arch.num_experts,)
        match leaf:
            case "q_proj" | "k_proj" | "v_proj":
                span, row = in_qkv[leaf]
                yield name, Place(f"{prefix}.qkv_proj.{kind}", (q_rows + 2 * kv_rows, *shape[1:]), 0, span, row)
            case "o_proj":
                yield name, Place(name, (shape[0], q_rows), 1, q)
            case "gate_proj" | "up_proj":
                param = f"{prefix}.gate_up_proj.weight" if expert is None else f"{experts}.w13_weight"
                row = inner if leaf == "up_proj" else 0
                yield name, Place(param, (*stack, 2 * inner, shape[1]), 0, columns, row, expert)
            case "down_proj":
                param = name if expert is None else f"{experts}.w2_weight"
                yield name, Place(param, (*stack, shape[0], inner), 1, columns, expert=expert)
            case "embed_tokens" | "lm_head":
                yield name, Place(name, (vocab_rows, shape[1]), 0, vocab, is_padded=True)
            case _:
                yield name, Place(name, shape, 0, (0, shape[0]))
