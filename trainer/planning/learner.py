"""Bytes on one device of the learner.

FSDP2 gives each of N ranks 1/N of masters, moments and gradients. While a block computes, its weights are whole, in the
compute dtype, and the next block's are already being gathered; the embedding and the output matrix are whole all the
time. Activations follow the layers of a Llama-like block; the constant per layer is counted below.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.planning.sizes import Part, total
from weight_sync.pull import PIECE_BYTES

if TYPE_CHECKING:
    from trainer.planning.sizes import ModelShape

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
