"""Configuration and shapes -> what a run needs, against closed forms, what a real learner allocates and computes, and
the runs of docs/benchmarks.md."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, Gemma4TextConfig, Qwen2Config

from rollout.types import Group, Trajectory
from tests.fakes.learner import KINDS, NEEDS_TORCHAO, process_group, run_config, save_tiny
from tests.fakes.model_7b import BIG, NUM_7B, QWEN_7B, config, planned
from tests.fakes.trajectories import make_turn
from trainer.config.algorithm import KlConfig
from trainer.config.compose import load_config
from trainer.config.presets import config_names, packaged_configs
from trainer.config.schema import LoraConfig, ModelConfig, RayConfig, RunConfig
from trainer.data.build import build_train_batch
from trainer.driver.memory_plan import (
    GIB,
    Device,
    ModelShape,
    activation_bytes_per_block,
    gib,
    learner_items,
    min_bytes,
    model_shape,
    stays_for_sure,
    total,
)
from trainer.learner import flops
from trainer.learner.fit import MOST_TOKENS, on_grid
from trainer.learner.fsdp import local_tensor
from trainer.learner.lora import add_adapters
from trainer.learner.model import check_architecture
from trainer.learner.policy import PolicyTrainer
from trainer.tools.dry_run import describe_placement, format_plan
from trainer.tools.run_plan import FORWARD, RunPlan, StepWork, problems, training_flops
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from pathlib import Path

SIZES = {"0.5B": (896, 4864, 24, 14, 2), "32B": (5120, 27648, 64, 40, 8)}
Sections = dict[str, Any]


@cache
def shape(name: str = "7B", *, lora_rank: int = 0) -> ModelShape:
    given = QWEN_7B
    if name in SIZES:
        hidden, intermediate, layers, heads, kv_heads = SIZES[name]
        given = Qwen2Config(
            vocab_size=152064, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv_heads,
        )  # fmt: skip
    return model_shape(ModelConfig(lora=LoraConfig(rank=lora_rank)), given)


def plan_of(sections: Sections, given: dict[str, Any]) -> RunPlan:
    """`given`: names of shapes as "policy", "critic" and "teacher", "adapters" as a number; the rest see `plan_run`."""
    shapes = {name: shape(given[name]) for name in ("critic", "teacher") if name in given}
    policy = given.get("policy", shape())
    policy = shape(policy) if isinstance(policy, str) else policy
    rest = {name: value for name, value in given.items() if name not in ("policy", "adapters")}
    if "adapters" in given:
        policy = replace(policy, num_adapter_params=given["adapters"])
    return planned(config(**sections), policy, **{**rest, **shapes})


def passes(plan: RunPlan) -> float:
    """Forward passes of the policy that the learner's operations on every token are worth."""
    tokens = 200.0 * config().trainer.groups_per_step * config().rollout.group_size
    return plan.work[100.0].learner_flops * 4 / (2 * plan.shape.num_active_params * tokens)


def value(plan: RunPlan, name: str) -> Any:
    """An attribute with a dot, a memory item of a device, or one of the host; None if there is no such item."""
    if name == "passes":
        return passes(plan)
    if "." in name or hasattr(plan, name):
        return attrgetter(name)(plan)
    items = {item.name: item.nbytes for item in (*plan.learner, *plan.engine.items)}
    items |= {f"host: {item.name}": item.nbytes for item in plan.host}
    return items.get(name)


def kl(reference: str | None = None, **learner: Any) -> Sections:
    return {"algorithm": {"kl": KlConfig(coef=0.1, reference_model=reference)}, "learner": learner}


GAE: Sections = {"algorithm": {"advantage_estimator": "gae"}}
BLOCKING: Sections = {"checkpoint": {"asynchronous": False}}
NO_CHECKPOINTING: Sections = {"learner": {"activation_checkpointing": False}}
OFFLOADED: Sections = {**kl(cpu_offload=True, reference_cpu_offload=True), "critic": {"cpu_offload": True}}
COLOCATED: Sections = {
    "mode": {"name": "colocated", "in_flight": "abort"}, "weight_sync": {"num_slots": 1, "commit": "inplace"},
    "rollout": {"num_replicas": 4},
}  # fmt: skip
THREE_ENGINES: Sections = {"rollout": {"num_replicas": 3, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}}
MIB = 1 << 20


def apart(collective: str, ranks: int, replicas: int, *, relay: str = "auto") -> tuple[Sections, dict[str, Any]]:
    """Learners on one node, and each engine on a node of its own."""
    sections = {
        "learner": {"num_ranks": ranks, "max_tokens_per_micro_batch": 1024},
        "rollout": {"num_replicas": replicas, "gpu_memory_utilization": 0.5},
        "weight_sync": {"relay": relay, "commit": "staged"},
    }
    nodes = {f"learner_{rank}": "learners" for rank in range(ranks)}
    nodes |= {f"replica_{number}": f"engine {number}" for number in range(replicas)}
    return sections, {"node_of": nodes, "device": BIG._replace(collective=collective)}


P, SMALL, LARGE, ADAPTED = shape(), shape("0.5B"), shape("32B"), shape(lora_rank=8)
NUM_CRITIC = NUM_7B - 152064 * 3584 + 3584 + 1
CRITIC_ROOT = 152064 * 5120 + 5120 + 5120 + 1
TOKENS = 16384
FUSED, PRODUCTS = (
    activation_bytes_per_block(P, num_tokens=TOKENS, compute_bytes=2, kept=kept) for kept in ("fused", "products")
)
GATHERED = {name: 2 * (one.num_root_params + 2 * one.num_block_params) for name, one in (("7B", P), ("32B", LARGE))}
MEAN: dict[str, Any] = {"response_tokens": 100.0}
TEACHER: dict[str, Any] = {"teacher": "32B", **MEAN}


def critic_share(critic: ModelShape) -> float:
    """Of the policy's operations."""
    return (critic.num_visited_params + critic.hidden_size) / P.num_active_params


PLANS: dict[str, tuple[Sections, dict[str, Any], dict[str, Any]]] = {
    "a rank has 16 bytes per parameter over the ranks": ({}, {}, {
        "masters (float32)": NUM_7B, "moments (AdamW)": 2 * NUM_7B, "gradients (float32)": NUM_7B,
        "arenas of weight sync (2 slots)": NUM_7B, "unsharded weights": GATHERED["7B"],
        "logits of a chunk": 6 * 441 * 152064 + 4 * TOKENS * 3584, "weights": 2 * NUM_7B, "host: reference": None}),
    "a model that is small compared with the device stays whole": (
        {}, {"device": BIG._replace(total_bytes=1000 * GIB)}, {"unsharded weights": 2 * NUM_7B}),
    **{f"one rank computes with {what} of {master} masters": (
        {"learner": {"num_ranks": 1, "master_dtype": master}, "rollout": {"num_replicas": 1}},
        {"device": BIG._replace(total_bytes=1000 * GIB)}, {"unsharded weights": nbytes})
        for what, master, nbytes in (("copies", "float32", 2 * NUM_7B), ("the tensors", "bfloat16", 0))},
    "a reference is a model in the compute dtype": (kl(), {}, {"reference": 2 * NUM_7B // 4}),
    "masters of an offloaded learner pass in pieces": (
        {"learner": {"cpu_offload": True}}, {}, {
        "masters (float32)": None, "moments (AdamW)": None, "gradients (float32)": None,
        "masters on their way to an arena": 64 * 2**20}),
    "a critic has all of it but the head": ({}, {"critic": "7B"}, {
        "critic": 12 * NUM_CRITIC // 4, "gradients of the critic": 4 * NUM_CRITIC // 4,
        "unsharded weights": GATHERED["7B"], "unsharded weights, critic": None}),
    "arenas have as many slots as are given": (
        {"weight_sync": {"num_slots": 3}}, {}, {"arenas of weight sync (3 slots)": 3 * NUM_7B * 2 // 4}),
    "without checkpointing every block keeps its activations": (NO_CHECKPOINTING, {}, {"activations": 28 * FUSED}),
    "with it, its input": ({}, {}, {"activations": FUSED + 28 * TOKENS * 3584 * 2}),
    "selectively, products and one block": (
        {"learner": {"activation_checkpointing": "selective"}}, {}, {"activations": 28 * PRODUCTS + FUSED}),
    "what leaves a device is in host memory": (OFFLOADED, {"critic": "7B"}, {
        "host: masters, moments and gradients": 16 * NUM_7B // 4, "host: reference": 2 * NUM_7B // 4,
        "host: critic with its gradients": 16 * NUM_CRITIC // 4, "reference": None, "critic": None}),
    "a checkpoint that is written meanwhile is a copy of masters and moments": ({}, {"critic": "7B"}, {
        "host: copy for checkpoints": 12 * (NUM_7B + NUM_CRITIC) // 4}),
    "one that the learner waits for is none": (BLOCKING, {}, {"host: copy for checkpoints": None}),
    "nor is the one at the end": ({"checkpoint": {"every_steps": 0}}, {}, {"host: copy for checkpoints": None}),
    "a shared device moves masters and moments, and keeps the arena": (COLOCATED, {}, {
        "is_paired": True, "moved_bytes": 12 * NUM_7B // 4, "arena_bytes": 2 * NUM_7B // 4, "engine.is_staged": False,
        "host: the learner, while engines compute": 12 * NUM_7B // 4}),
    "adapters alone are trained and published": ({}, {"policy": ADAPTED}, {
        "masters (float32)": ADAPTED.num_adapter_params, "frozen weights": 2 * NUM_7B // 4, "unsharded gradients": 0}),
    "replicas share what they send, not what they hold": ({"learner": {"fsdp_size": 2}}, {}, {
        "masters (float32)": 2 * NUM_7B, "moments (AdamW)": 4 * NUM_7B, "arenas of weight sync (2 slots)": NUM_7B}),
    "ranks that share a micro-batch have as many tokens each": (
        {"learner": {"context_parallel_size": 4, "activation_checkpointing": False}}, {}, {
        "masters (float32)": NUM_7B, "activations": 28 * (FUSED + TOKENS * 2 * (2 * 28 + 2 * 4) * 128)}),
    "matrices of blocks are divided, and what is outside of them is not": (
        {"learner": {"tensor_parallel_size": 4, "activation_checkpointing": False}}, {}, {
        "masters (float32)": NUM_7B, "activations": 28 * TOKENS * 2 * (2 * (7 + 1) * 128 + 3 * 18944 // 4 + 4 * 3584),
        "unsharded weights": 2 * (P.num_root_params + -(-(NUM_7B - P.num_root_params) // 4))}),
    # The learner computes with its models in turn, so the largest counts.
    "a smaller critic computes in the memory of the policy": ({}, {"critic": "0.5B"}, {
        "unsharded weights": GATHERED["7B"], "unsharded weights, critic": None}),
    "a larger one needs more": ({}, {"critic": "32B"}, {
        "unsharded weights, critic": 2 * (CRITIC_ROOT + 2 * LARGE.num_block_params),
        "unsharded gradients, critic": 6 * (CRITIC_ROOT + LARGE.num_block_params),
        "logits of a chunk, critic": (6 + 4 * 5120) * TOKENS, "activations": None}),
    "a larger teacher needs its share, its pass and its unsharded weights": (kl("some/teacher"), TEACHER, {
        "reference": 2 * LARGE.num_params // 4, "unsharded weights": GATHERED["7B"],
        "passes": 4 + LARGE.num_active_params / P.num_active_params}),
    "also of a policy with adapters, which needs less": (kl("some/teacher"), {**TEACHER, "adapters": 8 * 10**6}, {
        "reference": 2 * LARGE.num_params // 4, "unsharded weights, reference": GATHERED["32B"]}),
    "a smaller teacher computes in the memory of the policy": (
        kl("some/teacher"), {"teacher": "0.5B", "adapters": 8 * 10**6}, {
        "unsharded weights": GATHERED["7B"], "unsharded weights, reference": None}),
    "a teacher may be offloaded": (kl("some/teacher", reference_cpu_offload=True), TEACHER, {
        "reference": None, "host: reference": 2 * LARGE.num_params // 4}),
    # The engine
    "the cache gets what weights and workspace leave": (
        {"rollout": {"gpu_memory_utilization": 0.5, "max_num_seqs": 10, "max_model_len": 2048}}, {}, {
        "engine.kv_bytes": 40 * GIB - 2 * NUM_7B - 2 * GIB, "seats.number": 10, "engine.is_staged": True,
        "engine.kv_tokens": (40 * GIB - 2 * NUM_7B - 2 * GIB) // (2 * 28 * 4 * 128 * 2)}),
    "engines of one device divide its share, and each has its weights": (
        {"rollout": {"num_replicas": 4, "engines_per_device": 2, "gpu_memory_utilization": 0.8}}, {}, {
        "engine.kv_bytes": 32 * GIB - 2 * NUM_7B - 2 * GIB, "weights": 4 * NUM_7B, "sync.device_bytes": 4 * NUM_7B,
        "KV cache": 2 * (32 * GIB - 2 * NUM_7B - 2 * GIB)}),
    "no staging buffer of 14.2 GiB fits into 12": (
        {"rollout": {"gpu_memory_utilization": 0.85}}, {}, {"engine.is_staged": False}),
    # Forward passes: 1 + 2 for the backward
    "a pass is repeated with checkpointing": ({}, MEAN, {"passes": 4}),
    "and not without": (NO_CHECKPOINTING, MEAN, {"passes": 3}),
    "a reference makes a forward pass": (kl(), MEAN, {"passes": 5}),
    "so does a shared critic": ({**GAE, "critic": {"shared_backbone": True}}, MEAN, {"passes": 5}),
    "passes of a small critic are cheap": (
        GAE, {**MEAN, "critic": "0.5B"}, {"passes": 4 + 4 * critic_share(SMALL)}),
    "those of a large one are not": (GAE, {**MEAN, "critic": "32B"}, {"passes": 4 + 4 * critic_share(LARGE)}),
    "and repeat with its updates": (
        {**GAE, "critic": {"updates_per_step": 2}}, {**MEAN, "critic": "32B"}, {"passes": 4 + 8 * critic_share(LARGE)}),
    "a batch is visited as often as it is trained, its reference once": (
        {**kl(), "learner": {"updates_per_batch": 3, "num_mini_batches": 2}}, MEAN, {"passes": 3 * 4 + 1}),
    "the greedy response is generated and not trained": (
        {"algorithm": {"advantage_estimator": "remax"}, "rollout": {"group_size": 16}}, MEAN, {
        "passes": 4, "num_responses": 17 * (RunConfig().mode.max_staleness + 1) * RunConfig().trainer.groups_per_step}),
    # Weight sync
    "a version moves every published byte to every replica": ({**THREE_ENGINES, "weight_sync": {"relay": "off"}}, {}, {
        "sync.version_bytes": 2 * NUM_7B, "sync.device_bytes": NUM_7B, "sync.relays": False,
        "sync.rank_bytes": -(-3 * 2 * NUM_7B // 4)}),
    "relayed, a rank sends it once": ({**THREE_ENGINES, "weight_sync": {"relay": "auto"}}, {}, {
        "sync.rank_bytes": 2 * NUM_7B // 4, "sync.relays": True}),
    "memory is mapped on one node": ({}, {"device": BIG._replace(collective="npu:hccl")}, {"sync.pairs": ((), ())}),
    "or sent by the transport that is asked for": (
        {"weight_sync": {"transport": "nccl"}}, {"device": BIG._replace(collective="cpu:gloo,cuda:nccl")},
        {"groups of two (4)": 4 * 36 * MIB}),
    "64 pairs of HCCL take 2 GiB of the learner": (*apart("npu:hccl", 1, 64, relay="off"), {
        "groups of two (64)": 2 * GIB, "groups of two (1)": 32 * MIB}),
    "a ring takes one": (*apart("npu:hccl", 1, 64), {
        # A worker reads from two before it at most, and two after it from there.
        "groups of two (1)": 32 * MIB, "groups of two (4)": 4 * 32 * MIB, "groups of two (64)": None}),
    "of host memory there are none": (*apart("gloo", 1, 64, relay="off"), {"sync.pairs": ((), ())}),
    "workers that read 64 learners each": (*apart("cpu:gloo,cuda:nccl", 64, 2, relay="off"), {
        "groups of two (2)": 2 * 36 * MIB, "groups of two (64)": 64 * 36 * MIB}),
}  # fmt: skip


@pytest.mark.parametrize(("sections", "given", "expected"), PLANS.values(), ids=PLANS)
def test_a_plan_counts(sections: Sections, given: dict[str, Any], expected: dict[str, Any]) -> None:
    plan = plan_of(sections, given)
    found = {name: value(plan, name) for name in expected}
    assert found == {name: pytest.approx(n, rel=1e-12) if isinstance(n, float) else n for name, n in expected.items()}


def test_a_shape_is_read_from_the_config_alone() -> None:
    assert (P.num_params, P.num_head_params, P.num_layers) == (NUM_7B, 152064 * 3584, 28)
    block = 2 * 3584 * 3584 + 2 * 3584 * 512 + (3584 + 2 * 512) + 3 * 3584 * 18944 + 2 * 3584
    assert (P.num_block_params, P.num_root_params) == (block, NUM_7B - 28 * block)
    for tp, heads in ((1, 4), (8, 1)):
        assert P.kv_bytes_per_token(tensor_parallel_size=tp, dtype_bytes=2) == 2 * 28 * heads * 128 * 2
    # q, o: 2 x (in + out); k, v; gate, up, down.
    e, kv, i = 3584, 512, 18944
    assert ADAPTED.num_adapter_params == 28 * 8 * (2 * (e + e) + 2 * (e + kv) + 3 * (e + i))
    assert ADAPTED.num_params == NUM_7B


def test_shapes_of_other_architectures() -> None:
    def of(settings: Any) -> ModelShape:
        return model_shape(ModelConfig(), settings)

    assert of(KINDS["qwen2"]()).num_head_params == 0, "tied weights count once"
    assert of(KINDS["qwen3_moe"]()).intermediate_size == 2 * 32, "experts that a token visits"
    small: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96}
    heads: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 4, "num_hidden_layers": 6, "global_head_dim": 48}
    assert of(Gemma4TextConfig(**small, **heads)).head_dim == 48, "blocks that differ are planned as the largest"
    # DeepSeek-V2-Lite: 512 + 64 numbers per token and block on every device, where 16 heads would have 2 x 16 x 128.
    latent = of(DeepseekV2Config(
        **small, moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=16,
        kv_lora_rank=512, qk_rope_head_dim=64, n_routed_experts=4,
    ))  # fmt: skip
    assert [latent.kv_bytes_per_token(tensor_parallel_size=n, dtype_bytes=2) for n in (1, 8)] == [
        3 * (512 + 64) * 2
    ] * 2


@pytest.mark.parametrize(
    ("utilization", "offload", "earlier_tokens", "expected"),
    [
        (0.5, "auto", None, True),
        (0.5, "never", None, True),
        (0.5, "always", None, False),
        (0.5, "auto", 65536, False),  # a run that is resumed keeps them, and leaves its device for them
        (0.8, "auto", None, False),
        (0.8, "never", None, False),  # it is refused, and until then engines must not take the memory
    ],
)
def test_a_learner_surely_stays_only_with_room_to_spare(
    utilization: float, offload: str, earlier_tokens: int | None, expected: bool
) -> None:
    cfg = config(
        learner={"num_ranks": 1, "max_tokens_per_micro_batch": "auto"},
        rollout={"num_replicas": 1, "gpu_memory_utilization": utilization},
        mode={**COLOCATED["mode"], "offload": offload},
    )
    assert stays_for_sure(cfg, SMALL, BIG, earlier_tokens=earlier_tokens) == expected


@pytest.mark.parametrize(
    ("beside", "largest"), [("nothing", 0.55), ("reference", 0.5), ("teacher", 0.35), ("critic", 0.45)]
)
def test_what_the_learner_holds_beside_the_policy_leaves_less_to_engines(beside: str, largest: float) -> None:
    def stays(utilization: float) -> bool:
        cfg = config(
            learner={"num_ranks": 1, "max_tokens_per_micro_batch": 8192},
            rollout={"num_replicas": 1, "gpu_memory_utilization": utilization},
            algorithm={"kl": KlConfig(coef=0.1 if beside in ("reference", "teacher") else 0.0)},
            mode=COLOCATED["mode"],
        )
        others = {"teacher": {"teacher": P}, "critic": {"critic": SMALL}}.get(beside, {})
        return stays_for_sure(cfg, SMALL, BIG, **others, earlier_tokens=None)

    assert stays(largest) and not stays(largest + 0.05)


# What cannot fit, and what a person reads


SMALL_DEVICE: dict[str, Any] = {"device": BIG._replace(total_bytes=16 * GIB)}
MANY_RANKS: Any = {"num_ranks": 64, "max_tokens_per_micro_batch": 1024}
UTILIZATION = "rollout.gpu_memory_utilization"


def on_host(num_gib: int | None) -> tuple[Sections, dict[str, Any]]:
    """7.6 billion x 16 bytes are 113.5 GiB."""
    return {"learner": {"cpu_offload": True, "num_ranks": 2}, **BLOCKING}, {"host_bytes": num_gib and num_gib * GIB}


def of_24_gib(utilization: float) -> tuple[Sections, dict[str, Any]]:
    rollout = {"gpu_memory_utilization": utilization, "max_model_len": 32512}
    return {"rollout": rollout, "learner": MANY_RANKS}, {"device": BIG._replace(total_bytes=24 * GIB)}


REFUSED: dict[str, tuple[Sections, dict[str, Any], list[str], str, str]] = {
    # fact: (sections, given, keys that are refused, words of the problems, words of the plan)
    "the state of the learner": ({}, {"device": BIG._replace(total_bytes=24 * GIB)}, ["learner.num_ranks"],
        "masters (float32), moments (AdamW), gradients", ""),
    "activations": ({"learner": {"activation_checkpointing": False, "max_tokens_per_micro_batch": 1 << 17}}, {},
        ["learner.max_tokens_per_micro_batch"], "activations", ""),
    "the longest sequence": ({"rollout": {"gpu_memory_utilization": 0.15}}, {}, [UTILIZATION],
        "must hold one sequence", ""),
    "a staging buffer": ({"rollout": {"gpu_memory_utilization": 0.95}, "weight_sync": {"commit": "staged"}}, {},
        ["weight_sync.commit"], "only 4.00 GiB are left", ""),
    "the ranks of a host together": (*on_host(113), ["learner.cpu_offload"],
        "masters, moments and gradients: 113.48 GiB", "113.48 GiB of 113.00 GiB"),
    "which fit into more": (*on_host(114), [], "", "2 ranks together"),
    "hosts of another cluster may have any size": (*on_host(None), [], "", ""),
    "a shared device that fits": (COLOCATED, {}, [], "", "21.28 GiB per device"),
    "an engine next to the arena": ({**COLOCATED, "rollout": {"num_replicas": 4, "gpu_memory_utilization": 0.99}}, {},
        [UTILIZATION], "3.55 GiB of arena", "arena of the learner"),
    "a learner that has room beside its engine": (
        {**COLOCATED, "rollout": {"num_replicas": 4, "gpu_memory_utilization": 0.2}}, {}, [], "", "Both fit"),
    "one that may not leave, and has none": (
        {**COLOCATED, "mode": {**COLOCATED["mode"], "offload": "never"}}, {}, [UTILIZATION], "learner that stays", ""),
    "an odd number of ranks": ({**COLOCATED, "learner": {"num_ranks": 3}}, {}, ["learner.num_ranks"], "", ""),
    "no cache, as counted": ({"learner": MANY_RANKS}, SMALL_DEVICE, [UTILIZATION], "", ""),
    "nothing is sure of other dtypes": (
        {"learner": MANY_RANKS, "rollout": {"engine_args": {"quantization": "fp8"}}}, SMALL_DEVICE, [], "",
        "Counted as without rollout.engine_args.quantization"),
    "the default is no other dtype": (
        {"learner": MANY_RANKS, "rollout": {"engine_args": {"kv_cache_dtype": "auto"}}}, SMALL_DEVICE, [UTILIZATION],
        "", ""),
    "a cache that does not fit next to half the workspace": (*of_24_gib(0.66), [UTILIZATION], "", ""),
    "one that may fit is marked": (*of_24_gib(0.7), [], "", "(may not fit: the longest sequence"),
}  # fmt: skip


@pytest.mark.parametrize(("sections", "given", "keys", "words", "planned"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_fit_is_refused_by_name(
    sections: Sections, given: dict[str, Any], keys: list[str], words: str, planned: str
) -> None:
    cfg, plan = config(**sections), plan_of(sections, given)
    found = problems(plan, cfg)
    assert [problem.key for problem in found] == keys
    assert words in "\n".join(map(str, found))
    assert planned in format_plan(plan, cfg)


def test_processes_that_share_a_host_are_added_up() -> None:
    cfg, host = config(), Device(name="cpu", total_bytes=200 * GIB, is_shared=True)
    plan = planned(cfg, P, host)
    assert plan.engine.kv_bytes == GIB
    (problem,) = problems(plan, cfg)
    needed = cfg.learner.num_ranks * (total(plan.learner) + total(plan.host))
    needed += cfg.rollout.num_replicas * total(plan.engine.items)
    assert problem.value == f"{gib(needed)} for this host", "all ranks and engines together"
    assert not problems(planned(cfg, P, host._replace(total_bytes=2000 * GIB)), cfg)
    offloaded = planned(config(learner={"cpu_offload": True}), P, host)
    assert min_bytes((*offloaded.learner, *offloaded.host)) >= min_bytes(plan.learner), "there is nowhere else to go"


LONG: Sections = {"rollout": {"max_response_tokens": 16384, "max_num_seqs": 256}, "trainer": {"groups_per_step": 1024}}
SHORT: Sections = {"rollout": {"max_response_tokens": 64}, "trainer": {"groups_per_step": 16}}
FLOPS = 2 * 4 * P.num_active_params * 1024 * 16 * (100 + 16384) / 4
GIVEN: Sections = {"rollout": {"max_response_tokens": 4096, "group_size": 8}, **NO_CHECKPOINTING}
UNKNOWN: Sections = {"rollout": {"max_response_tokens": 4096}, "mode": {"max_staleness": 0}}
FEW: Sections = {"rollout": {"max_num_seqs": 256, "max_concurrency": 8}, "trainer": {"groups_per_step": 4}}
TIGHT: Sections = {"rollout": {"max_response_tokens": 20480}, "trainer": {"groups_per_step": 32}}
SPILLS = "(may not fit: it spills to disk)"


def sixteen(commit: str, relay: str) -> Sections:
    return {
        "rollout": {"num_replicas": 16, "gpu_memory_utilization": 0.5},
        "weight_sync": {"commit": commit, "relay": relay},
    }


def pull(readers: int) -> str:
    return f"no pull is faster than {readers * 2 * NUM_7B / 4 / 25e9:.3g} s at 25 GB/s"


TEXTS: dict[str, tuple[Sections, dict[str, Any], list[str], list[str]]] = {
    # fact: (sections, given, words, words that are absent)
    "what the deadline asks of the devices": (LONG, {}, [
        f"learner.timeout_s=1,800 if each learner device trains at {FLOPS / 1800 / 1e12:,.0f} TFLOP/s",
        "Up to 32 responses are generated one after the other: 19 s for each"], []),
    "how many sequences an engine generates, and why": (
        {"trainer": {"groups_per_step": 4}}, {}, [
        "rollout.max_num_seqs=32 sequences at once per engine (auto: all 32 that may be in flight)"], []),
    "that its cache holds fewer": (
        {"rollout": {"max_response_tokens": 16384}, "trainer": {"groups_per_step": 1024}}, {}, [
        "the engines generate 928 at once",
        "rollout.max_num_seqs=232 sequences at once per engine (auto: its cache"], []),
    "not why, of a number": (FEW, {}, ["the engines generate 32 at once"], ["auto"]),
    "a short step asks nothing": (SHORT, {}, [], ["TFLOP/s", "one after the other"]),
    "the mean that was given": (GIVEN, {"prompt_tokens": 512.0, "response_tokens": 966.0}, [
        "966 tokens, on average", "either: generation takes 0.48 to 1.1 times the time of learning"],
        ["--response-tokens", "alternate"]),
    "the longest and a quarter of it": (UNKNOWN, {}, [
        "--response-tokens N", "4,096 tokens, the longest", "1,024 tokens, a quarter of it", "alternate"], []),
    "requests that an engine gets at once": (
        FEW, {}, ["128 responses; the engines generate 32 at once", "Up to 4 responses are generated one after"], []),
    "engines relay: 4 ranks, and every engine device reads all of it": (sixteen("auto", "auto"), {}, [pull(4)], []),
    "engines do not relay": (sixteen("auto", "off"), {}, [pull(16)], []),
    "only staging buffers are relayed": (sixteen("inplace", "auto"), {}, [pull(16)], []),
    "an object store that spills": (TIGHT, {}, [SPILLS, "of 0.25 GiB"], []),
    "one that is large": ({**TIGHT, "ray": {"object_store_gib": 4.0}}, {}, [], [SPILLS]),
    "one of a cluster that is joined": ({**TIGHT, "ray": {"address": "auto"}}, {}, [], [SPILLS, "of 0.25 GiB"]),
}  # fmt: skip


@pytest.mark.parametrize(("sections", "given", "words", "absent"), TEXTS.values(), ids=TEXTS)
def test_a_plan_reads(sections: Sections, given: dict[str, Any], words: list[str], absent: list[str]) -> None:
    text = format_plan(plan_of(sections, given), config(**sections))
    assert [each for each in words if each not in text] == [each for each in absent if each in text] == []


@pytest.mark.parametrize("name", [entry for entry in config_names(packaged_configs()) if entry.endswith("_7b")])
def test_no_shipped_configuration_asks_more_of_a_device_than_an_h100_trains_at(name: str) -> None:
    cfg = load_config(["--config-name", name])
    critic = P if cfg.algorithm.uses_critic else None
    work = planned(cfg, P, critic=critic, prompt_tokens=float(cfg.task.max_prompt_tokens)).work
    assert work[cfg.rollout.max_response_tokens].learner_flops / cfg.learner.timeout_s < 0.45 * 989e12


# Against a real learner


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("gibibytes", [80, 141])
def test_auto_plans_the_micro_batch_that_fills_the_device(gibibytes: int, checkpointing: bool) -> None:
    def plan(tokens: int | str) -> RunPlan:
        learner = {"max_tokens_per_micro_batch": tokens, "activation_checkpointing": checkpointing}
        return planned(config(learner=learner), P, BIG._replace(total_bytes=gibibytes * GIB))

    auto, limit = plan("auto"), 0.92 * gibibytes * GIB
    tokens = auto.fit.tokens
    assert auto.learner == plan(tokens).learner
    next_larger = next(n for n in range(tokens + 1, 2 * tokens + 1) if on_grid(n) == n)
    assert total(auto.learner) <= limit
    assert total(plan(next_larger).learner) > limit or tokens == MOST_TOKENS
    assert "Micro-batches have up to" in format_plan(auto, config(learner={"max_tokens_per_micro_batch": "auto"}))


@pytest.mark.parametrize(
    ("optimizer", "label", "tolerance"),
    [
        ("adamw", "AdamW", 0.0),
        ("adamw_bf16", "AdamW, bfloat16", 0.0),
        # Its rows are so short that scales take an eighth, and norms count.
        pytest.param("adamw_8bit", "AdamW, 8 bits", 0.15, marks=NEEDS_TORCHAO),
        ("muon", "Muon", 0.02),  # norms have two moments
    ],
)
def test_a_real_learner_allocates_what_was_planned(
    optimizer: str, label: str, tolerance: float, tmp_path: Path
) -> None:
    cfg = run_config(
        save_tiny(tmp_path / "model", "llama"), num_ranks=1, max_tokens_per_micro_batch=64, optimizer=optimizer
    )
    with process_group(tmp_path / "store"), patch("trainer.learner.optimizer.MIN_QUANTIZED", 1):
        real = PolicyTrainer(cfg, device=torch.device("cpu"), backend=get_backend("cpu"))
        params = [p.to_local() if isinstance(p, DTensor) else p for p in real.model.parameters()]
        moments = [local_tensor(state) for state in real._optimizers[""].state().values()]
    host = Device(name="cpu", total_bytes=64 * GIB, is_shared=True)
    items = learner_items(cfg, model_shape(cfg.model, KINDS["llama"]()), host, None, None)
    parts = {item.name: item.nbytes for item in items}
    assert parts["masters (float32)"] == sum(p.numel() * p.element_size() for p in params)
    nbytes = sum(t.numel() * t.element_size() for t in moments)
    assert parts[f"moments ({label})"] == pytest.approx(nbytes, rel=tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen2", torch.bfloat16)]
)
def test_activations_are_those_that_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    """What autograd keeps of one block, parameters left out, with attention that keeps no scores."""
    settings, num_tokens, kept = KINDS[kind](), 64, dict[int, int]()
    for name, size in {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 1, "head_dim": 32}.items():
        setattr(settings, name, size)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa").to(dtype)
    params = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda t: t):
        model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    block = replace(P, hidden_size=128, intermediate_size=344, num_heads=4, num_kv_heads=2, head_dim=32)
    expected = activation_bytes_per_block(block, num_tokens=num_tokens, compute_bytes=dtype.itemsize)
    last_norm = num_tokens * 128 * (4 + 2 * dtype.itemsize)
    assert sum(kept.values()) == pytest.approx(expected + last_norm, rel=0.05)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("rank", [0, 8])
def test_forward_and_backward_are_the_operations_that_a_run_counts(kind: str, rank: int) -> None:
    settings, lora = KINDS[kind](), LoraConfig(rank=rank, target_modules="q_proj+o_proj")
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(settings)
    if rank:
        pytest.importorskip("peft")
        add_adapters(hf, check_architecture(hf), lora, base_dtype=torch.float32)
    counted = flops.model_flops(hf)
    assert counted is not None
    found = model_shape(ModelConfig(lora=lora), settings)
    assert bool(found.num_adapter_params) == bool(rank)
    assert training_flops(found, recomputes=False) == counted.per_token + counted.per_loss_token


# Against measured runs


NUM_RESPONSES = 32 * 8
PROMPTS = NUM_RESPONSES * 512
W1 = 966
"""Mean length."""


def work(ranks: int, engines: int, *, responses: float) -> StepWork:
    """`responses`: their tokens. No activation checkpointing, KL or critic."""
    return StepWork(
        learner_flops=training_flops(P, recomputes=False) * (PROMPTS + responses) / ranks,
        engine_flops=FORWARD * P.num_active_params * responses / engines,
    )


RUNS: list[tuple[str, tuple[int, int, int], int, float, float, tuple[float, float, float]]] = [
    ("w1, 7B, async:2+2", (2, 2, 4), 2, 20.47, 4704, (21.0, 8.2, 20.44)),
    ("w1, 7B, sync:2+2", (2, 2, 4), 0, 41.5, 2138, (21.9, 7.2, 17.6)),
    ("w1, 7B, colocated:4", (4, 4, 4), 0, 36.2, 2454, (16.2, 6.2, 10.2)),
    ("w1, 3B, async:1+1", (1, 1, 2), 2, 15.51, 11771, (14.9, 8.1, 15.48)),
    ("w1, 3B, async:1+1, the day before", (1, 1, 2), 2, 15.37, 11875, (14.7, 8.2, 15.34)),
    ("w1, 3B, colocated:2", (2, 2, 2), 0, 25.23, 7035, (14.4, 5.0, 7.93)),
    ("w1, 3B, sync:1+1", (1, 1, 2), 0, 33.80, 5251, (18.9, 7.9, 14.86)),
    ("w1-heavy, 3B, async:1+1", (1, 1, 2), 6, 19.80, 10835, (22.6, 10.6, 19.77)),
    ("w1-heavy, 3B, sync:1+1", (1, 1, 2), 0, 56.05, 3712, (38.1, 8.3, 19.43)),
    ("uniform, 3B, async:1+1", (1, 1, 2), 1, 7.56, 13008, (3.2, 3.1, 7.54)),
    ("uniform, 3B, colocated:2", (2, 2, 2), 0, 7.39, 13294, (1.6, 1.6, 3.99)),
    ("uniform, 3B, sync:1+1", (1, 1, 2), 0, 10.16, 9671, (2.6, 2.6, 7.46)),
]
"""Rows of docs/benchmarks.md: (learner ranks, engine devices, devices), S, seconds of a step, tokens/s per device, and
the seconds that a step's generation, the same at the full rate, and learning take."""


@pytest.mark.parametrize(("name", "split", "staleness", "step_s", "tokens_per_s", "seconds"), RUNS)
def test_both_ends_of_the_range_are_as_near_to_what_was_measured_as_the_page_says(
    name: str, split: tuple[int, int, int], staleness: int, step_s: float, tokens_per_s: float, seconds: Any
) -> None:
    ranks, engines, num_devices = split
    generation_s, full_s, learning_s = seconds
    responses = round(tokens_per_s * num_devices * step_s) - PROMPTS  # with the lengths that this run had
    full, few = work(ranks, engines, responses=responses).generation_over_learning
    assert full / 1.25 < full_s / learning_s < full * 1.75, name
    least, most = (0.75, 1.0) if staleness else (0.6, 1.75)  # a tail that nothing overlaps is slower still
    assert least * few < generation_s / learning_s < most * few, name


@pytest.mark.parametrize(
    ("sizes", "counts", "relay", "served"),
    [
        ((8, 8, 1), (8, 8), "auto", 1),  # all engines on the other node
        ((8, 8, 1), (8, 8), "off", 8),
        ((8, 16, 1), (8, 8, 8), "auto", 1),  # on two others, which hand it on
        ((4, 20, 1), (8, 8, 8), "auto", 1 + 4),  # and four next to the learners, which do not outnumber them
        ((2, 22, 1), (8, 8, 8), "auto", 1),  # six next to them, which do
        ((8, 4, 4), (8, 8, 8), "auto", 1),
        ((8, 4, 4), (8, 8, 8), "off", 4),
    ],
)
def test_a_learner_sends_its_share_into_the_ring_once_and_to_engines_next_to_it(
    sizes: tuple[int, int, int], counts: tuple[int, ...], relay: str, served: int
) -> None:
    ranks, replicas, tp = sizes
    rollout = {"num_replicas": replicas, "tensor_parallel_size": tp, "gpu_memory_utilization": 0.5}
    cfg = config(learner={"num_ranks": ranks}, rollout=rollout, weight_sync={"relay": relay})
    placement = describe_placement(cfg, counts, backend="fast", resource="GPU")
    assert placement.node_of is not None
    sync = planned(cfg, P, node_of=placement.node_of).sync
    assert (sync.rank_bytes, sync.relays) == (-(-served * 2 * NUM_7B // ranks), relay == "auto")


# The object store, against what goes there


PROMPT, RESPONSE = 200, 1000


def group(num_responses: int) -> Group:
    """All of the same length, with four characters per token, and arrays of their own: a pickle writes shared ones
    once."""
    trajectories = [
        Trajectory.of_turns(
            [make_turn(range(PROMPT), range(PROMPT, PROMPT + RESPONSE))], prompt_id="train/0", sample_index=i,
            reward=float(i % 2), reward_parts={}, status="completed", timings={"generate_s": 1.0},
            text=f"{i:04d}" + "x" * (4 * RESPONSE - 4),
        )
        for i in range(num_responses)
    ]  # fmt: skip
    return Group(group_id=0, prompt_id="train/0", trajectories=trajectories, start_version=0)


def settings(**sections: dict[str, Any]) -> RunConfig:
    base = {"rollout": {"max_response_tokens": RESPONSE}, "trainer": {"groups_per_step": 8}}
    return config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def stored(cfg: RunConfig, **given: Any) -> tuple[dict[str, int], int]:
    """(sizes by name, bytes of a group)."""
    store = planned(cfg, P, prompt_tokens=float(PROMPT), **given).store
    return {item.name.partition(" ")[2]: item.nbytes for item in store.items}, store.group_bytes


def test_a_group_has_the_bytes_that_a_worker_sends_and_small_ones_bypass_the_store() -> None:
    sizes, of_group = stored(settings())
    assert of_group == pytest.approx(len(pickle.dumps(group(16))), rel=0.05)
    num_slots = 8 * (settings().mode.max_staleness + 1)
    assert sizes["groups in flight"] == num_slots * of_group
    small = settings(rollout={"group_size": 2})
    assert len(pickle.dumps(group(2))) < 100_000
    assert list(stored(small)[0]) == ["of one step"]
    assert "Groups bypass it, as up to 100 kB do" in format_plan(planned(small, P), small)


def test_the_store_counts_sequences_evaluations_and_greedy_baselines() -> None:
    sizes, of_group = stored(settings())
    three, _ = stored(settings(task={"agent": "my.agent", "agent_max_sequences": 3}))
    assert three == {name: 3 * nbytes for name, nbytes in sizes.items()}
    assert stored(settings(), num_evaluated=400)[0]["responses of an evaluation"] == 400 * of_group // 16
    greedy, of_greedy_group = stored(settings(algorithm={"advantage_estimator": "remax"}))
    assert (of_greedy_group * 16, greedy["of one step"]) == (of_group * 17, sizes["of one step"])
    for size, spills in ((1.2, True), (1.3, False)):  # Ray spills before the store is full
        cfg = replace(settings(), ray=RayConfig(object_store_gib=size * sum(sizes.values()) / GIB))
        assert planned(cfg, P, prompt_tokens=float(PROMPT)).store.may_spill == spills


@pytest.mark.parametrize("algorithm", [{}, {"loss": "clip_cov"}, {"advantage_estimator": "gae"}], ids=str)
def test_micro_batches_have_the_bytes_that_the_ranks_fetch(algorithm: dict[str, Any]) -> None:
    def nbytes(value: object) -> int:
        if isinstance(value, np.ndarray):
            return value.nbytes
        return sum(nbytes(getattr(value, each.name)) for each in fields(value)) if is_dataclass(value) else 0

    cfg = settings(algorithm=algorithm)
    batch = build_train_batch(
        [group(cfg.rollout.group_size) for _ in range(8)], step=0, algorithm=cfg.algorithm, num_ranks=2,
        max_tokens_per_micro_batch=9 * (PROMPT + RESPONSE), max_response_tokens=RESPONSE,
    )  # fmt: skip
    real = sum(nbytes(micro) for rank in batch.micro_batches for micro in rank)
    assert stored(cfg)[0]["of one step"] == pytest.approx(real, rel=0.005)
