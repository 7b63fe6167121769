"""Bytes that learner and engines need on each device, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import AutoModelForCausalLM

from trainer.learner.lora import add_adapters
from trainer.learner.model import check_architecture, load_config, torch_dtype
from weight_sync.pull import PIECE_BYTES
from weight_sync.routes import Party, plan_routes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers import PreTrainedConfig

    from trainer.config.schema import ModelConfig
    from weight_sync.routes import RelayMode


GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A causal language model, as far as memory depends on it. Counts are of parameters; tied ones count once."""

    num_params: int
    num_block_params: int
    """Of the largest decoder block."""
    num_root_params: int
    """Outside the blocks: embedding, final norm, output matrix."""
    num_head_params: int
    """Of an output matrix that is not tied to the embedding."""
    num_visited_params: int
    """In the matrices of all blocks, per token: of a mixture of experts, those of the experts that one token visits."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Per token: of a mixture of experts, the experts that one token visits together."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    latent_size: int = 0
    """Numbers in the cache per token and block, in the place of keys and values: of multi-head latent attention."""
    num_adapter_params: int = 0
    """Of LoRA, beside `num_params`; 0 if all weights are trained."""

    @property
    def num_trained_params(self) -> int:
        return self.num_adapter_params if self.num_adapter_params else self.num_params

    @property
    def num_frozen_params(self) -> int:
        return self.num_params if self.num_adapter_params else 0

    @property
    def num_active_params(self) -> int:
        """That a token is multiplied with in a forward pass, without adapters. The embedding is looked up."""
        return self.num_visited_params + self.vocab_size * self.hidden_size

    def with_value_head(self) -> ModelShape:
        """As a critic has it: one value in the place of the logits, and all of it trained."""
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
        """Keys and values of one token on one device; at least one head stays whole, and every device has all of a
        latent."""
        if self.latent_size:
            return self.num_layers * self.latent_size * dtype_bytes
        heads = max(1, -(-self.num_kv_heads // tensor_parallel_size))
        return 2 * self.num_layers * heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one device offers."""

    name: str
    total_bytes: int
    is_shared: bool
    """All ranks and engines of this host share it: a CPU's main memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is known of prompts and answers before a run."""

    prompt_tokens: float
    """Mean of the training prompts."""
    response_tokens: float | None = None
    """Mean of the answers; None if nobody said."""
    num_evaluated: int = 0
    """Answers of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One thing that takes memory on a device."""

    name: str
    nbytes: int
    remedy: str
    """The key that makes it smaller, with what to do."""
    is_exact: bool = True
    """Follows from shapes. An estimate may be off by half."""
    is_state: bool = False
    """Is there between two steps, too, and moves to the host where devices are shared."""

    @property
    def least_bytes(self) -> int:
        return self.nbytes if self.is_exact else self.nbytes // 2


def total(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def least(parts: tuple[Part, ...]) -> int:
    """What is needed even if every estimate is twice too large."""
    return sum(part.least_bytes for part in parts)


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


MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4
"""Per trained parameter: float32 weight; two float32 moments of AdamW; float32 gradient."""
GATHERED_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """What the configuration says about one learner rank."""

    num_ranks: int
    compute_bytes: int
    """Of one number in the forward."""
    published_bytes: int
    """Of one number in the arena."""
    keeps_unsharded: bool
    max_tokens: int
    """Per micro-batch."""
    logprob_chunk_tokens: int
    checkpoints_activations: bool
    cpu_offload: bool
    num_slots: int
    reference: ModelShape | None
    """Of its own: not that of adapters, which is the policy without them."""
    reference_cpu_offload: bool
    critic: ModelShape | None
    """Of its own, with its value head."""
    keeps_critic_unsharded: bool
    critic_cpu_offload: bool


def activation_bytes_per_block(shape: ModelShape, *, num_tokens: int, compute_bytes: int) -> int:
    """What the backward of one block needs from its forward, without checkpointing and with attention that keeps no
    scores.

    Per token, with b bytes a number: two norms keep their input and its normalised form in float32 and the result in
    b; two residual sums; queries, keys and values before and after the rotation, and the output of attention; gate, up,
    activation and product of the MLP.
    """
    b, e = compute_bytes, shape.hidden_size
    norms, residuals = 2 * e * (4 + 4 + 2 * b), 2 * e * b
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = b * (2 * q + 4 * kv + q)
    return num_tokens * (norms + residuals + attention + 4 * b * shape.intermediate_size)


def activation_bytes(shape: ModelShape, plan: LearnerPlan) -> int:
    """Of one micro-batch: all blocks, or with checkpointing the input of each block and the one being recomputed."""
    block = activation_bytes_per_block(shape, num_tokens=plan.max_tokens, compute_bytes=plan.compute_bytes)
    if not plan.checkpoints_activations:
        return shape.num_layers * block
    return shape.num_layers * plan.max_tokens * shape.hidden_size * plan.compute_bytes + block


def logits_bytes(shape: ModelShape, plan: LearnerPlan) -> int:
    """Of one chunk, in float32: logits, probabilities and the gradient."""
    return 3 * 4 * min(plan.logprob_chunk_tokens, plan.max_tokens) * shape.vocab_size


def unsharded_params(shape: ModelShape, *, keeps_unsharded: bool) -> int:
    """Parameters that are whole on a rank at the worst moment."""
    if keeps_unsharded:
        return shape.num_params
    blocks = min(GATHERED_BLOCKS, shape.num_layers) * shape.num_block_params
    return min(shape.num_params, shape.num_root_params + blocks)


def arena_bytes(shape: ModelShape, plan: LearnerPlan) -> int:
    """All slots of one rank."""
    return plan.num_slots * _share(shape.num_trained_params * plan.published_bytes, plan.num_ranks)


def learner_parts(shape: ModelShape, plan: LearnerPlan) -> tuple[Part, ...]:
    """Everything on one device of the learner, at the worst moment of a step: its models compute in turn."""
    computing = _computing(shape, plan, keeps_unsharded=plan.keeps_unsharded)
    if plan.reference is not None:
        scoring = _scoring(plan.reference, plan)
        if total(scoring) > total(computing):
            computing = scoring
    if plan.critic is not None:
        critic = _computing(plan.critic, plan, keeps_unsharded=plan.keeps_critic_unsharded)
        if total(critic) > total(computing):
            computing = tuple(replace(part, name=f"{part.name}, critic") for part in critic)
    arenas = Part(
        name=f"arenas of weight sync ({plan.num_slots} slots)",
        nbytes=arena_bytes(shape, plan),
        remedy="weight_sync.num_slots: fewer" if plan.num_slots > 1 else "learner.num_ranks: more",
    )
    return (*computing, arenas, *_training_state(shape, plan), *_more_models(plan))


def _computing(shape: ModelShape, plan: LearnerPlan, *, keeps_unsharded: bool) -> tuple[Part, ...]:
    """What is there while this model computes."""
    b = plan.compute_bytes
    whole = unsharded_params(shape, keeps_unsharded=keeps_unsharded)
    in_backward = 0 if shape.num_frozen_params else shape.num_root_params + shape.num_block_params
    fewer_tokens = "learner.max_tokens_per_micro_batch: fewer"
    recompute = "" if plan.checkpoints_activations else ", or learner.activation_checkpointing=true"
    return (
        Part(name="unsharded weights", nbytes=whole * b, remedy="model.compute_dtype=bfloat16", is_exact=False),
        Part(name="unsharded gradients", nbytes=in_backward * (b + 4), remedy="a smaller model", is_exact=False),
        Part(
            name="activations",
            nbytes=activation_bytes(shape, plan),
            remedy=f"{fewer_tokens}{recompute}",
            is_exact=False,
        ),
        Part(
            name="logits of a chunk",
            nbytes=logits_bytes(shape, plan),
            remedy="learner.logprob_chunk_tokens: fewer",
            is_exact=False,
        ),
    )


def _scoring(shape: ModelShape, plan: LearnerPlan) -> tuple[Part, ...]:
    """What is there while the reference computes: no gradient, and the activations of one block at most."""
    block = activation_bytes_per_block(shape, num_tokens=plan.max_tokens, compute_bytes=plan.compute_bytes)
    needs = {
        "unsharded weights": (
            unsharded_params(shape, keeps_unsharded=False) * plan.compute_bytes,
            "algorithm.kl.path: a smaller model",
        ),
        "activations": (block, "learner.max_tokens_per_micro_batch: fewer"),
        "logits of a chunk": (logits_bytes(shape, plan), "learner.logprob_chunk_tokens: fewer"),
    }
    return tuple(
        Part(name=f"{name}, reference", nbytes=nbytes, remedy=remedy, is_exact=False)
        for name, (nbytes, remedy) in needs.items()
    )


def _training_state(shape: ModelShape, plan: LearnerPlan) -> list[Part]:
    """A rank's share of what it trains, and of what stays as it is."""
    n, trained, frozen = plan.num_ranks, shape.num_trained_params, shape.num_frozen_params
    if plan.cpu_offload:
        nbytes = min(PIECE_BYTES, _share(trained * MASTER_BYTES, n))
        return [Part(name="masters on their way to an arena", nbytes=nbytes, remedy="a smaller model")]
    remedy = "learner.num_ranks: more ranks, or learner.cpu_offload=true"
    parts = [
        Part(name="masters (float32)", nbytes=_share(trained * MASTER_BYTES, n), remedy=remedy, is_state=True),
        Part(name="moments (AdamW)", nbytes=_share(trained * MOMENTS_BYTES, n), remedy=remedy, is_state=True),
        Part(name="gradients (float32)", nbytes=_share(trained * GRADIENT_BYTES, n), remedy=remedy),
    ]
    if frozen:
        nbytes = _share(frozen * plan.compute_bytes, n)
        parts.append(Part(name="frozen weights", nbytes=nbytes, remedy=remedy, is_state=True))
    return parts


def host_parts(shape: ModelShape, plan: LearnerPlan) -> tuple[Part, ...]:
    """What one rank keeps in host memory instead of its device."""
    n, b, parts = plan.num_ranks, plan.compute_bytes, list[Part]()
    trained, frozen = shape.num_trained_params, shape.num_frozen_params
    if plan.cpu_offload:
        nbytes = _share(trained * (MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES) + frozen * b, n)
        remedy = "learner.cpu_offload=false, with more learner.num_ranks"
        name = "masters, moments and gradients" if not frozen else "adapters' state, frozen weights"
        parts.append(Part(name=name, nbytes=nbytes, remedy=remedy))
    if plan.reference is not None and plan.reference_cpu_offload:
        remedy = "learner.reference_cpu_offload=false"
        parts.append(Part(name="reference", nbytes=_share(plan.reference.num_params * b, n), remedy=remedy))
    if plan.critic is not None and plan.critic_cpu_offload:
        nbytes = _share(plan.critic.num_params * (MASTER_BYTES + MOMENTS_BYTES + GRADIENT_BYTES), n)
        remedy = "critic.cpu_offload=false or critic.shared_backbone=true"
        parts.append(Part(name="critic with its gradients", nbytes=nbytes, remedy=remedy))
    return tuple(parts)


def _more_models(plan: LearnerPlan) -> list[Part]:
    """Reference and critic."""
    parts: list[Part] = []
    if plan.reference is not None and not plan.reference_cpu_offload:
        nbytes = _share(plan.reference.num_params * plan.compute_bytes, plan.num_ranks)
        remedy = "learner.reference_cpu_offload=true"
        parts.append(Part(name="reference", nbytes=nbytes, remedy=remedy, is_state=True))
    if plan.critic is not None and not plan.critic_cpu_offload:
        num_params = plan.critic.num_params
        state = _share(num_params * (MASTER_BYTES + MOMENTS_BYTES), plan.num_ranks)
        gradients = _share(num_params * GRADIENT_BYTES, plan.num_ranks)
        remedy = "critic.cpu_offload=true or critic.shared_backbone=true"
        parts += [
            Part(name="critic", nbytes=state, remedy=remedy, is_state=True),
            Part(name="gradients of the critic", nbytes=gradients, remedy=remedy),
        ]
    return parts


def _share(nbytes: int, num_ranks: int) -> int:
    return -(-nbytes // num_ranks)


MAX_WORKSPACE_BYTES = 2 * GIB
WORKSPACE_SHARE = 1 / 16
SHADOW_HEADROOM = 0.9
"""`commit=auto` stages only if the shadow takes at most this share of what is free (weight_sync/landing.py)."""


UNCOUNTED = (
    "quantization",
    "kv_cache_dtype",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "cpu_offload_gb",
)
"""Engine arguments that change what weights and cache take; what they do is not for us to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What the configuration says about one engine."""

    tensor_parallel_size: int
    dtype_bytes: int
    memory_share: float
    """rollout.gpu_memory_utilization; it has no meaning where `kv_bytes` is given."""
    kv_bytes: int | None
    """Size of the cache where it is set directly (on a CPU); None where it takes what is left."""
    max_model_len: int
    num_seats: int
    """Answers that it generates at once at most."""
    commit: str
    uncounted: tuple[str, ...]
    """Engine arguments that change what is counted here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One device of an engine."""

    parts: tuple[Part, ...]
    is_staged: bool
    shadow_fits: bool
    kv_bytes: int
    """Room for the cache; negative if not even the weights fit."""
    kv_tokens: int
    most_kv_tokens: int
    """If the workspace is half as large as assumed."""
    longest_tokens: int
    """Of one sequence, for which there must be room."""
    num_seats: int
    uncounted: tuple[str, ...]
    """See `EnginePlan`."""

    @property
    def wanted_tokens(self) -> int:
        """For a sequence of full length on every seat."""
        return self.num_seats * self.longest_tokens

    @property
    def may_not_fit(self) -> bool:
        """Whether there is room for the longest sequence only if the workspace is smaller than assumed."""
        return self.kv_tokens < self.longest_tokens <= self.most_kv_tokens


def workspace_bytes(device: Device) -> int:
    """Assumed for what an engine measures at its start and keeps free: activations of a prefill and captured graphs."""
    return min(MAX_WORKSPACE_BYTES, int(WORKSPACE_SHARE * device.total_bytes))


def engine_memory(shape: ModelShape, plan: EnginePlan, device: Device) -> EngineMemory:
    """The engine takes its share of the device; the shadow of a staged commit must fit into the rest."""
    tp = plan.tensor_parallel_size
    weights = -(-shape.num_params * plan.dtype_bytes // tp)
    shadow = -(-shape.num_trained_params * plan.dtype_bytes // tp)
    if plan.kv_bytes is None:
        own_bytes = int(plan.memory_share * device.total_bytes)
        workspace = workspace_bytes(device)
        kv_bytes = own_bytes - weights - workspace
        free = device.total_bytes - own_bytes
    else:
        workspace, kv_bytes = 0, plan.kv_bytes
        free = device.total_bytes - weights - kv_bytes
    fits = shadow <= (SHADOW_HEADROOM * free if plan.commit == "auto" else free)
    is_staged = plan.commit == "staged" or (plan.commit == "auto" and fits)
    per_token = shape.kv_bytes_per_token(tensor_parallel_size=tp, dtype_bytes=plan.dtype_bytes)
    parts = [
        Part(name="weights", nbytes=weights, remedy="rollout.tensor_parallel_size: more devices per engine"),
        Part(name="workspace (assumed)", nbytes=workspace, remedy="rollout.engine_args", is_exact=False),
        Part(name="KV cache", nbytes=max(0, kv_bytes), remedy="rollout.gpu_memory_utilization"),
    ]
    if is_staged:
        remedy = "weight_sync.commit=inplace, or a lower rollout.gpu_memory_utilization"
        parts.append(Part(name="shadow of a staged commit", nbytes=shadow, remedy=remedy))
    return EngineMemory(
        parts=tuple(parts),
        is_staged=is_staged,
        shadow_fits=fits,
        kv_bytes=kv_bytes,
        kv_tokens=max(0, kv_bytes) // per_token,
        most_kv_tokens=max(0, kv_bytes + workspace // 2) // per_token,
        longest_tokens=plan.max_model_len,
        num_seats=plan.num_seats,
        uncounted=plan.uncounted,
    )


LINK_BYTES_PER_S = (25e9, 200e9)
"""Two links that a pull may go over: a 200 Gbit/s network card per device, and a link between devices of one host."""
TAIL_EFFICIENCY, FULL_EFFICIENCY = 0.2, 0.45
"""Arithmetic efficiency of decoding over that of training, if engines have few answers each, as in a long tail, and if
they are kept full. The asynchronous runs on H200s in docs/benchmarks.md had 0.20 to 0.26 by the generation-bound time
as it was, and 0.27 to 0.55 by that at the full rate. The test of this module has all of them."""
TRAINED, FROZEN = 3, 2
"""Forward passes' worth of forward and backward: the gradients of the input and of the weights are one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTraffic:
    """Of one policy version."""

    version_bytes: int
    """All published parameters, once."""
    device_bytes: int
    """That one engine device reads."""
    rank_bytes: int
    """That the busiest learner rank serves, on all nodes."""
    relays: bool
    """Whether engines hand versions on to each other."""

    def floor_s(self, link_bytes_per_s: float) -> float:
        """No pull is faster than the busier of the two ends of its link."""
        return max(self.device_bytes, self.rank_bytes) / link_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Who publishes a version, and who reads it."""

    ranks: Sequence[str]
    """Node of every learner rank."""
    replicas: Sequence[str]
    """Node of every engine; it is on one, with all its devices."""
    tensor_parallel_size: int
    relay: RelayMode
    """"off" also where engines have nothing to hand on."""


def sync_traffic(shape: ModelShape, parties: Parties, *, dtype_bytes: int) -> SyncTraffic:
    """Every replica needs every published byte once, spread over its devices, by the routes of weight sync."""
    version, tp = shape.num_trained_params * dtype_bytes, parties.tensor_parallel_size
    everyone = range(len(parties.ranks))
    routes = plan_routes(
        dict(enumerate(parties.ranks)),
        [
            Party(name=f"{replica}/{worker}", worker=worker, node=node)
            for replica, node in enumerate(parties.replicas)
            for worker in range(tp)
        ],
        dict.fromkeys(range(tp), everyone),
        relay=parties.relay,
    )
    most_readers = max(sum(route[rank] is None for route in routes.values()) for rank in everyone)
    return SyncTraffic(
        version_bytes=version,
        device_bytes=-(-version // tp),
        rank_bytes=-(-version * most_readers // (tp * len(parties.ranks))),
        relays=any(via is not None for route in routes.values() for via in route.values()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Arithmetic of one step per device, in floating point operations."""

    learner_flops: float
    engine_flops: float

    @property
    def generation_over_learning(self) -> tuple[float, float]:
        """Time of generation over that of learning: with engines that are kept full, and with few answers in them."""
        ratio = self.engine_flops / self.learner_flops
        return ratio / FULL_EFFICIENCY, ratio / TAIL_EFFICIENCY

    @property
    def bottleneck(self) -> Literal["learning", "generation", "either"]:
        """The side that takes longer wherever between the two efficiencies decoding is."""
        least, most = self.generation_over_learning
        if most < 1:
            return "learning"
        return "generation" if least > 1 else "either"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one side does in a step."""

    num_devices: int
    params: float
    """That every token meets, each as often as a pass needs it: see `params_met`."""
    tokens: float

    @property
    def flops(self) -> float:
        """2 operations per parameter and token in a forward pass (Kaplan et al. 2020, section 2.1), attention left
        out. Of one device."""
        return 2 * self.params * self.tokens / self.num_devices


def step_work(learner: Side, engines: Side) -> StepWork:
    """
    Args:
        learner: its tokens are prompts and answers.
        engines: theirs are all answers, those that are not trained included.
    """
    return StepWork(learner_flops=learner.flops, engine_flops=engines.flops)


def params_met(shape: ModelShape, *, recomputes: bool) -> float:
    """Parameters that a token of the learner meets in forward and backward, counted once per forward pass' worth.

    Args:
        recomputes: the backward repeats the forward (activation checkpointing).
    """
    if shape.num_adapter_params:
        return (FROZEN + recomputes) * shape.num_active_params + (TRAINED + recomputes) * shape.num_adapter_params
    return (TRAINED + recomputes) * shape.num_active_params
