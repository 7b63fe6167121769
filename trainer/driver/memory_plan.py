"""Bytes that learner and engines need on each device, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from trainer.config.rules import longest_slice
from trainer.learner.fit import MOST_TOKENS, TOKENS_ON_CPU, Fit, choose, usable_beside_engine, usable_bytes
from trainer.learner.flops import logits_chunk, visited_params
from trainer.learner.fsdp import UNSHARDED_SHARE
from trainer.learner.lora import add_adapters
from trainer.learner.model import check_architecture, torch_dtype
from weight_sync.receive.staging import STAGING_HEADROOM
from weight_sync.transports.base import PIECE_BYTES

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from trainer.config.schema import ModelConfig, RunConfig


GIB = 1 << 30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Per trained parameter: float32 weight; two float32 moments of AdamW; float32 gradient."""
MOMENTS = {
    "adamw": ("AdamW", MOMENTS_BYTES),
    "adamw_bf16": ("AdamW, bfloat16", 2 * 2),
    "adamw_8bit": ("AdamW, 8 bits", 2 * (1 + 4 / 256)),  # and a float32 scale per block
    "muon": ("Muon", 4),
}
"""`learner.optimizer` -> what its moments are called, and bytes per parameter; of Muon, of those in blocks."""
GATHERED_BLOCKS = 2
MAX_WORKSPACE_BYTES = 2 * GIB
WORKSPACE_SHARE = 1 / 16
FEWER_TOKENS = "learner.max_tokens_per_micro_batch: fewer, or learner.context_parallel_size: more"
SMALLER_CHUNK = "learner.logprob_chunk_size: fewer"
UNCOUNTED = ("quantization", "kv_cache_dtype", "kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_gb")
"""Engine arguments with effects on weights and cache that are not modelled here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A causal language model. Counts are of parameters; tied ones count once."""

    num_params: int
    num_block_params: int
    """Of the largest decoder block."""
    num_root_params: int
    """Outside the blocks: embedding, final norm, output matrix."""
    num_head_params: int
    """Of an output matrix that is not tied to the embedding."""
    num_visited_params: int
    """In the matrices of all blocks; of a mixture of experts, those of the experts that a token visits."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of a mixture of experts, of all experts that a token visits."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    latent_size: int = 0
    """Of multi-head latent attention: numbers in the cache per token and block, instead of keys and values."""
    num_adapter_params: int = 0
    """In addition to `num_params`; 0 if all weights are trained."""

    @property
    def num_trained_params(self) -> int:
        return self.num_adapter_params if self.num_adapter_params else self.num_params

    @property
    def num_frozen_params(self) -> int:
        return self.num_params if self.num_adapter_params else 0

    @property
    def num_active_params(self) -> int:
        """That a token is multiplied with in a forward pass, without adapters and embedding."""
        return self.num_visited_params + self.vocab_size * self.hidden_size

    def with_value_head(self) -> ModelShape:
        """As a critic: one value instead of the logits, and all of it trained."""
        num_value_params = self.hidden_size + 1
        return replace(
            self,
            num_params=self.num_params - self.num_head_params + num_value_params,
            num_root_params=self.num_root_params - self.num_head_params + num_value_params,
            num_head_params=num_value_params,
            vocab_size=1,
            num_adapter_params=0,
        )

    def kv_bytes_per_token(self, *, tensor_parallel_size: int, dtype_bytes: int) -> int:
        """On one device; at least one head stays whole, and every device has all of a latent."""
        if self.latent_size:
            return self.num_layers * self.latent_size * dtype_bytes
        heads = max(1, -(-self.num_kv_heads // tensor_parallel_size))
        return 2 * self.num_layers * heads * self.head_dim * dtype_bytes


class Device(NamedTuple):
    name: str
    total_bytes: int
    is_shared: bool
    """By all ranks and engines of the host: a CPU's main memory."""
    collective: str = ""
    """See `Backend.collective`."""


class MemoryItem(NamedTuple):
    name: str
    nbytes: int
    hint: str
    """The key that makes it smaller, and how."""
    is_exact: bool = True
    """Follows from shapes. An estimate may be off by half."""
    is_state: bool = False
    """Exists between steps, too, and moves to the host where devices are shared."""


Items = tuple[MemoryItem, ...]


def total(items: Items) -> int:
    return sum(item.nbytes for item in items)


def min_bytes(items: Items) -> int:
    """What is needed even if every estimate is twice too large."""
    return sum(item.nbytes if item.is_exact else item.nbytes // 2 for item in items)


def gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB / 10 else f"{nbytes / (1 << 20):.2f} MiB"


def model_shape(model: ModelConfig, config: PreTrainedConfig) -> ModelShape:
    """With its adapters. Raises ModelError for a model that we cannot train."""
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=model.trust_remote_code)
    blocks = check_architecture(hf)
    num_params, of_blocks = _count(hf), [_count(block) for block in blocks]
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    text = config.get_text_config()
    num_visited = sum(visited_params(param, text) for block in blocks for param in block.parameters())
    if model.lora.rank:
        add_adapters(hf, blocks, model.lora, base_dtype=torch_dtype(model.compute_dtype))
    heads, head_dim = int(text.num_attention_heads), _largest(text, "head_dim")
    kv_heads = _largest(text, "num_key_value_heads")
    return ModelShape(
        num_params=num_params,
        num_block_params=max(of_blocks),
        num_root_params=num_params - sum(of_blocks),
        num_head_params=0 if head is embedding else head.numel(),
        num_visited_params=num_visited,
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
    """Of all blocks; None without such an attribute."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers refuses it for a model whose blocks differ in it, such as Gemma 4
        value = max(getattr(block, name) for block in text.per_layer_config)
    return None if value is None else int(value)


def _latent_size(text: PreTrainedConfig) -> int:
    """DeepSeek-V2 (arXiv:2405.04434, section 2.1): the compressed keys and values, and the one rotated key."""
    rank = getattr(text, "kv_lora_rank", None)
    return 0 if rank is None else int(rank) + int(text.qk_rope_head_dim)


def _active_intermediate_size(text: PreTrainedConfig) -> int:
    expert, visited = getattr(text, "moe_intermediate_size", None), getattr(text, "num_experts_per_tok", None)
    if expert is None or visited is None:
        return int(text.intermediate_size)
    return int(expert) * int(visited)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# The learner


def learner_items(
    cfg: RunConfig, shape: ModelShape, device: Device, reference: ModelShape | None, critic: ModelShape | None
) -> Items:
    """Everything on one device of the learner, at the worst moment of a step: its models compute in turn. `reference`
    and `critic` (with its value head) are None unless they have separate weights. The tokens of a micro-batch are a
    number (`planned_fit`)."""
    computing = [_computing(cfg, shape, device)]
    if reference is not None:
        computing.append(_scoring(cfg, reference))
    if critic is not None:
        computing.append(tuple(item._replace(name=f"{item.name}, critic") for item in _computing(cfg, critic, device)))
    slots, items = cfg.weight_sync.num_slots, list(max(computing, key=total))
    hint = "weight_sync.num_slots: fewer" if slots > 1 else "learner.num_ranks: more"
    items.append(MemoryItem(f"arenas of weight sync ({slots} slots)", arena_bytes(cfg, shape), hint))
    trained, frozen = shape.num_trained_params, shape.num_frozen_params
    if cfg.learner.cpu_offload:
        nbytes = min(PIECE_BYTES, _share(cfg, trained * MASTER_BYTES))
        items.append(MemoryItem("masters on their way to an arena", nbytes, "a smaller model"))
    else:
        more = "learner.num_ranks: more ranks" if cfg.learner.fsdp_size is None else "learner.fsdp_size: more ranks"
        hint = f"{more}, or learner.cpu_offload=true"
        items += [
            MemoryItem(f"masters ({cfg.learner.master_dtype})", _masters(cfg, trained), hint, is_state=True),
            MemoryItem(f"moments ({MOMENTS[cfg.learner.optimizer][0]})", _moments(cfg, shape), hint, is_state=True),
            MemoryItem("gradients (float32)", _share(cfg, trained * GRADIENT_BYTES), hint),
        ]
        if frozen:
            items.append(MemoryItem("frozen weights", _compute_share(cfg, frozen), hint, is_state=True))
    if reference is not None and not cfg.learner.reference_cpu_offload:
        nbytes, hint = _compute_share(cfg, reference.num_params), "learner.reference_cpu_offload=true"
        items.append(MemoryItem("reference", nbytes, hint, is_state=True))
    if critic is not None and not cfg.critic.cpu_offload:
        hint = "critic.cpu_offload=true or critic.shared_backbone=true"
        state = _masters(cfg, critic.num_params) + _moments(cfg, critic)
        items += [
            MemoryItem("critic", state, hint, is_state=True),
            MemoryItem("gradients of the critic", _share(cfg, critic.num_params * GRADIENT_BYTES), hint),
        ]
    return tuple(items)


def stays_for_sure(
    cfg: RunConfig,
    shape: ModelShape,
    device: Device,
    *,
    critic: ModelShape | None = None,
    teacher: ModelShape | None = None,
    earlier_tokens: int | None,
) -> bool:
    """Whether the learner stays beside its engines, even if it needs a tenth of the device more than planned.
    `critic` and `teacher` as of `plan_run`; `earlier_tokens` per micro-batch are those of the run before it was
    resumed."""
    if cfg.mode.offload == "always":
        return False
    critic = None if critic is None else critic.with_value_head()
    reference = reference_shape(cfg, shape, teacher)
    more = replace(cfg.rollout, gpu_memory_utilization=min(1.0, cfg.rollout.gpu_memory_utilization + 0.1))
    cfg = replace(cfg, rollout=more, mode=replace(cfg.mode, offload="auto"))
    return planned_fit(cfg, shape, device, reference, critic, earlier_tokens=earlier_tokens).stays_on_device


def reference_shape(cfg: RunConfig, shape: ModelShape, teacher: ModelShape | None) -> ModelShape | None:
    """Of the copy that the learner holds for the KL term, if any: with adapters it is the policy without them."""
    if cfg.algorithm.kl.coef == 0:
        return None
    return (None if shape.num_adapter_params else shape) if teacher is None else teacher


def planned_fit(
    cfg: RunConfig,
    shape: ModelShape,
    device: Device,
    reference: ModelShape | None,
    critic: ModelShape | None,
    *,
    earlier_tokens: int | None = None,
) -> Fit:
    """Of a micro-batch by this plan; a run measures it at its start."""
    given = cfg.learner.max_tokens_per_micro_batch
    if device.is_shared:
        tokens = max(longest_slice(cfg), TOKENS_ON_CPU) if given == "auto" else given
        return Fit(tokens, stays_on_device=not cfg.mode.shares_devices or cfg.mode.offload == "never")

    def needed_bytes(num_tokens: int) -> int:
        return total(learner_items(with_tokens(cfg, num_tokens), shape, device, reference, critic))

    def most(limit: int) -> int:
        low, high = 1, MOST_TOKENS
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needed_bytes(middle) <= limit else (low, middle - 1)
        return low

    beside = usable_beside_engine(cfg, device.total_bytes)
    if given != "auto":
        fits_beside = beside is not None and (cfg.mode.offload == "never" or needed_bytes(given) <= beside)
        return Fit(given, stays_on_device=not cfg.mode.shares_devices or fits_beside)
    most_beside = None if beside is None else most(beside)
    return choose(cfg, most(usable_bytes(cfg, device.total_bytes)), most_beside, earlier=earlier_tokens)


def with_tokens(cfg: RunConfig, num_tokens: int | Literal["auto"]) -> RunConfig:
    return replace(cfg, learner=replace(cfg.learner, max_tokens_per_micro_batch=num_tokens))


def _tokens(cfg: RunConfig) -> int:
    tokens = cfg.learner.max_tokens_per_micro_batch
    assert tokens != "auto", "see planned_fit"
    return tokens


def host_items(cfg: RunConfig, shape: ModelShape, reference: ModelShape | None, critic: ModelShape | None) -> Items:
    """What one rank keeps in host memory instead of its device."""
    items, all_bytes = list[MemoryItem](), MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES
    trained, frozen = shape.num_trained_params, shape.num_frozen_params
    if cfg.learner.cpu_offload:
        name = "masters, moments and gradients" if not frozen else "adapters' state, frozen weights"
        nbytes = _share(cfg, trained * all_bytes + frozen * DTYPE_BYTES[cfg.model.compute_dtype])
        items.append(MemoryItem(name, nbytes, "learner.cpu_offload=false, with more learner.num_ranks"))
    if reference is not None and cfg.learner.reference_cpu_offload:
        nbytes = _compute_share(cfg, reference.num_params)
        items.append(MemoryItem("reference", nbytes, "learner.reference_cpu_offload=false"))
    if critic is not None and cfg.critic.cpu_offload:
        hint = "critic.cpu_offload=false or critic.shared_backbone=true"
        items.append(MemoryItem("critic with its gradients", _share(cfg, critic.num_params * all_bytes), hint))
    if cfg.checkpoint.asynchronous and 0 < cfg.checkpoint.every_steps <= cfg.trainer.total_steps:
        nbytes = _masters(cfg, trained) + _moments(cfg, shape)
        if critic is not None:
            nbytes += _masters(cfg, critic.num_params) + _moments(cfg, critic)
        items.append(MemoryItem("copy for checkpoints", nbytes, "checkpoint.asynchronous=false"))
    return tuple(items)


def _masters(cfg: RunConfig, num_trained: int) -> int:
    """Of one rank."""
    return _share(cfg, num_trained * DTYPE_BYTES[cfg.learner.master_dtype])


def _moments(cfg: RunConfig, shape: ModelShape) -> int:
    """Of one rank."""
    each = MOMENTS[cfg.learner.optimizer][1]
    by_adamw = shape.num_root_params if cfg.learner.optimizer == "muon" else 0
    return _share(cfg, int((shape.num_trained_params - by_adamw) * each) + by_adamw * MOMENTS_BYTES)


def arena_bytes(cfg: RunConfig, shape: ModelShape) -> int:
    """Of one rank."""
    published = shape.num_trained_params * DTYPE_BYTES[cfg.model.rollout_dtype]
    # Replicas of a shard divide what they send.
    return cfg.weight_sync.num_slots * -(-published // cfg.learner.num_ranks)


Kept = Literal["all", "fused", "products"]
"""What of a block's forward is there until its backward: all results, those that its compiled form keeps, or those of
matrix products and attention."""


def activation_bytes_per_block(
    shape: ModelShape, *, num_tokens: int, compute_bytes: int, kept: Kept = "all", exchanges: bool = False
) -> int:
    """What the backward of one block needs from its forward, with attention that keeps no scores.

    Per token, with b bytes a number: two norms (input in float32, normalised input and result in b); queries, keys and
    values after the rotation; the output of attention; gate, up, activation and product of the MLP. With context
    parallelism, which `exchanges` tokens for heads, attention has copies of its own.
    """
    b, e, inner = compute_bytes, shape.hidden_size, shape.intermediate_size
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim * (1 + exchanges)
    match kept:
        case "all":
            numbers = b * (attention + 4 * inner) + 2 * e * (4 + 2 * b)
        case "fused":  # activations of the MLP are computed again, and norms have no float32
            numbers = b * (attention + 3 * inner + 4 * e)
        case "products":  # with the block's input
            numbers = b * (attention + 2 * inner + 3 * e)
    return num_tokens * numbers


def _estimate(name: str, nbytes: int, hint: str) -> MemoryItem:
    return MemoryItem(name, nbytes, hint, is_exact=False)


def _computing(cfg: RunConfig, shape: ModelShape, device: Device) -> Items:
    """While this model is trained."""
    b, learner, shape = DTYPE_BYTES[cfg.model.compute_dtype], cfg.learner, _divided(cfg, shape)
    room = UNSHARDED_SHARE * device.total_bytes
    copied = shape.num_trained_params * (cfg.learner.master_dtype != cfg.model.compute_dtype)
    if cfg.learner.num_ranks == 1 and not cfg.learner.cpu_offload and copied * b <= room:
        unsharded, in_backward = copied, 0 if shape.num_frozen_params else shape.num_root_params
    else:
        unsharded = shape.num_params if shape.num_params * b <= room else _gathered_params(shape)
        in_backward = 0 if shape.num_frozen_params else shape.num_root_params + shape.num_block_params
    num_tokens = _tokens(cfg)
    is_compiled = learner.compile is True or (learner.compile == "auto" and not device.is_shared)

    def block(kept: Kept) -> int:
        exchanges = learner.context_parallel_size > 1
        return activation_bytes_per_block(shape, num_tokens=num_tokens, compute_bytes=b, kept=kept, exchanges=exchanges)

    whole: Kept = "fused" if is_compiled else "all"
    match learner.activation_checkpointing:
        case False:
            activations, fewer = shape.num_layers * block(whole), f"{FEWER_TOKENS}, or learner.activation_checkpointing"
        case True:  # the input of each block, and the one being recomputed
            activations, fewer = shape.num_layers * num_tokens * shape.hidden_size * b + block(whole), FEWER_TOKENS
        case "selective":
            activations = shape.num_layers * block("products") + block(whole)
            fewer = f"{FEWER_TOKENS}, or learner.activation_checkpointing=true"
    return (
        _estimate("unsharded weights", unsharded * b, "model.compute_dtype=bfloat16"),
        _estimate("unsharded gradients", in_backward * (b + 4), "a smaller model"),
        _estimate("activations", activations, fewer),
        _estimate("logits of a chunk", _logits_bytes(cfg, shape, is_trained=True), SMALLER_CHUNK),
    )


def _scoring(cfg: RunConfig, shape: ModelShape) -> Items:
    """While the reference computes: no gradient, and the activations of one block at most."""
    b, shape = DTYPE_BYTES[cfg.model.compute_dtype], _divided(cfg, shape)
    block = activation_bytes_per_block(shape, num_tokens=_tokens(cfg), compute_bytes=b)
    smaller = "algorithm.kl.reference_model: a smaller model"
    return (
        _estimate("unsharded weights, reference", _gathered_params(shape) * b, smaller),
        _estimate("activations, reference", block, FEWER_TOKENS),
        _estimate("logits of a chunk, reference", _logits_bytes(cfg, shape, is_trained=False), SMALLER_CHUNK),
    )


def _divided(cfg: RunConfig, shape: ModelShape) -> ModelShape:
    """What one rank computes of a model, with tensor parallelism."""
    size = cfg.learner.tensor_parallel_size
    if size == 1:
        return shape
    return replace(
        shape,
        num_params=shape.num_root_params + -(-(shape.num_params - shape.num_root_params) // size),
        num_block_params=-(-shape.num_block_params // size),
        num_heads=-(-shape.num_heads // size),
        num_kv_heads=-(-shape.num_kv_heads // size),
        intermediate_size=-(-shape.intermediate_size // size),
    )


def _gathered_params(shape: ModelShape) -> int:
    """Parameters that are whole on a rank at the worst moment."""
    blocks = min(GATHERED_BLOCKS, shape.num_layers) * shape.num_block_params
    return min(shape.num_params, shape.num_root_params + blocks)


def _logits_bytes(cfg: RunConfig, shape: ModelShape, *, is_trained: bool) -> int:
    """Of the output matrix, which is in the forward twice the float32 logits of a chunk, and in the backward those and
    their gradient in the compute dtype, beside the sum of the hidden states' gradient in float32."""
    num_tokens = -(-_tokens(cfg) // cfg.learner.tensor_parallel_size)  # each rank has the logits of its part
    logits = 4 * shape.vocab_size * min(logits_chunk(shape.vocab_size, cfg.learner.logprob_chunk_size), num_tokens)
    if not is_trained:
        return 2 * logits
    factors = logits if cfg.algorithm.entropy_coef > 0 else 0
    gradient = logits // 4 * DTYPE_BYTES[cfg.model.compute_dtype] + 4 * num_tokens * shape.hidden_size
    return logits + max(logits, factors + gradient)


def _share(cfg: RunConfig, nbytes: int) -> int:
    """Of one shard."""
    return -(-nbytes // cfg.learner.num_shards)


def _compute_share(cfg: RunConfig, num_params: int) -> int:
    """Of one rank, of weights that are not trained."""
    return _share(cfg, num_params * DTYPE_BYTES[cfg.model.compute_dtype])


# Engines


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Of one device with engines."""

    items: Items
    """Of all engines on it."""
    is_staged: bool
    staging_fits: bool
    kv_bytes: int
    """Room for the cache of an engine; negative if not even the weights fit."""
    kv_tokens: int
    """Of an engine, as all below."""
    max_kv_tokens: int
    """If the workspace is half as large as assumed."""
    longest_tokens: int
    """Of one sequence, for which there must be room."""
    uncounted: tuple[str, ...]
    """Engine arguments among `UNCOUNTED`."""

    @property
    def may_not_fit(self) -> bool:
        """The longest sequence fits only if the workspace is smaller than assumed."""
        return self.kv_tokens < self.longest_tokens <= self.max_kv_tokens


def workspace_bytes(device: Device) -> int:
    """Assumed for activations of a prefill and captured graphs, which an engine measures at its start."""
    return min(MAX_WORKSPACE_BYTES, int(WORKSPACE_SHARE * device.total_bytes))


def engine_memory(cfg: RunConfig, shape: ModelShape, device: Device) -> EngineMemory:
    """The engine takes its share of the device; the staging buffer of a staged commit must fit into the rest."""
    rollout, commit = cfg.rollout, cfg.weight_sync.commit
    num_engines = rollout.engines_per_device
    tp, b = rollout.tensor_parallel_size, DTYPE_BYTES[cfg.model.rollout_dtype]
    weights, buffer = -(-shape.num_params * b // tp), -(-shape.num_trained_params * b // tp)
    if device.is_shared:  # the cache has its own size
        workspace, kv_bytes = 0, int(rollout.kv_cache_gib * GIB)
        free = device.total_bytes - weights - kv_bytes
    else:
        own_bytes, workspace = int(rollout.gpu_memory_utilization * device.total_bytes), workspace_bytes(device)
        kv_bytes = own_bytes // num_engines - weights - workspace
        free = (device.total_bytes - own_bytes) // num_engines
    fits = buffer <= (STAGING_HEADROOM * free if commit == "auto" else free)
    is_staged = commit == "staged" or (commit == "auto" and fits)
    items = [
        MemoryItem("weights", num_engines * weights, "rollout.tensor_parallel_size: more devices per engine"),
        _estimate("workspace (assumed)", num_engines * workspace, "rollout.engine_args"),
        MemoryItem("KV cache", num_engines * max(0, kv_bytes), "rollout.gpu_memory_utilization"),
    ]
    if is_staged:
        hint = "weight_sync.commit=inplace, or a lower rollout.gpu_memory_utilization"
        items.append(MemoryItem("staging buffer of a staged commit", num_engines * buffer, hint))
    per_token = shape.kv_bytes_per_token(tensor_parallel_size=tp, dtype_bytes=b)
    longest = cfg.task.max_prompt_tokens + rollout.max_response_tokens
    return EngineMemory(
        items=tuple(items),
        is_staged=is_staged,
        staging_fits=fits,
        kv_bytes=kv_bytes,
        kv_tokens=max(0, kv_bytes) // per_token,
        max_kv_tokens=max(0, kv_bytes + workspace // 2) // per_token,
        longest_tokens=rollout.max_model_len if rollout.max_model_len else longest,
        uncounted=tuple(name for name in UNCOUNTED if rollout.engine_args.get(name, "auto") not in ("auto", None)),
    )
