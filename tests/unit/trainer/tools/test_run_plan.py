"""What a plan expects of a run: its arithmetic against that of a run and of the runs of docs/benchmarks.md, the traffic
of weight sync by the routes that a run would take, and Ray's object store against the arrays that go there."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from rollout.types import Group, Trajectory
from tests.fakes.learner import KINDS
from tests.fakes.model_7b import NUM_7B, config, planned
from tests.fakes.trajectories import make_turn
from trainer.config.compose import load_config
from trainer.config.presets import config_names, packaged_configs
from trainer.config.schema import LoraConfig, ModelConfig, RayConfig, RunConfig
from trainer.data.build import build_train_batch
from trainer.learner import flops
from trainer.learner.lora import add_adapters
from trainer.learner.model import check_architecture
from trainer.tools.dry_run import describe_placement, format_plan
from trainer.tools.memory_plan import GIB, model_shape, total
from trainer.tools.run_plan import FORWARD, StepWork, object_store, training_flops

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.tools.memory_plan import ModelShape
    from trainer.tools.run_plan import ObjectStore, RunPlan, SyncTraffic

GAE = {"advantage_estimator": "gae"}


def with_critic(shape: ModelShape, critic: ModelShape, /, **sections: dict[str, Any]) -> RunPlan:
    cfg = config(**({"algorithm": GAE} | sections))
    return planned(cfg, shape, critic=critic, response_tokens=100.0)


def passes(found: RunPlan) -> float:
    """Forward passes of the policy that the learner's operations on every token are worth."""
    cfg = config()
    tokens = 200.0 * cfg.trainer.groups_per_step * cfg.rollout.group_size
    return found.work[100.0].learner_flops * cfg.learner.num_ranks / (2 * found.shape.num_active_params * tokens)


def test_a_step_counts_every_pass_of_reference_and_critic(shape_7b: ModelShape) -> None:
    def alone(**sections: dict[str, Any]) -> float:
        return passes(planned(config(**sections), shape_7b, response_tokens=100.0))

    assert alone() == pytest.approx(4.0)
    assert alone(learner={"activation_checkpointing": False}) == pytest.approx(3.0)
    kl = replace(RunConfig().algorithm.kl, coef=0.1)
    assert alone(algorithm={"kl": kl}) == pytest.approx(5.0)
    assert alone(algorithm=GAE, critic={"shared_backbone": True}) == pytest.approx(5.0)


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelShape]:
    """Shapes of 0.5 and 32 billion parameters."""
    found: dict[str, ModelShape] = {}
    for name, sizes in {"small": (896, 4864, 24, 14, 2), "large": (5120, 27648, 64, 40, 8)}.items():
        hidden, intermediate, layers, heads, kv_heads = sizes
        directory = tmp_path_factory.mktemp(name)
        Qwen2Config(
            vocab_size=152064,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
        ).save_pretrained(directory)
        found[name] = model_shape(ModelConfig(), AutoConfig.from_pretrained(directory))
    return found


@pytest.mark.parametrize("name", ["small", "large"])
def test_passes_of_the_critic_cost_what_its_own_size_asks(
    shape_7b: ModelShape, critics: dict[str, ModelShape], name: str
) -> None:
    share = (critics[name].num_visited_params + critics[name].hidden_size) / shape_7b.num_active_params
    assert share < 0.06 if name == "small" else share > 4
    assert passes(with_critic(shape_7b, critics[name])) == pytest.approx(4.0 + 4.0 * share)
    twice = with_critic(shape_7b, critics[name], critic={"updates_per_step": 2})
    assert passes(twice) == pytest.approx(4.0 + 8.0 * share)


def computing(found: RunPlan) -> dict[str, int]:
    return {item.name: item.nbytes for item in found.learner if not item.is_exact}


def test_the_larger_of_policy_and_critic_needs_memory_to_compute(
    shape_7b: ModelShape, critics: dict[str, ModelShape]
) -> None:
    alone = computing(planned(config(), shape_7b))
    assert computing(with_critic(shape_7b, critics["small"])) == alone
    assert computing(with_critic(shape_7b, shape_7b)) == alone, "a critic has no logits"
    large, tokens = critics["large"], config().learner.max_tokens_per_micro_batch
    got = computing(with_critic(shape_7b, large))
    root = 152064 * 5120 + 5120 + 5120 + 1
    assert got["unsharded weights, critic"] == 2 * (root + 2 * large.num_block_params)
    assert got["unsharded gradients, critic"] == 6 * (root + large.num_block_params)
    assert got["activations, critic"] > 64 * tokens * 5120 * 2
    assert got["logits of a chunk, critic"] == 3 * 4 * 1024
    assert not alone.keys() & got.keys() and sum(got.values()) > sum(alone.values())
    own = with_critic(large, critics["small"])
    assert "activations" in computing(own) and total(own.learner) > total(planned(config(), large).learner)


@pytest.mark.parametrize("rank", [0, 8])
def test_a_teacher_costs_its_own_size(rank: int, shape_7b: ModelShape, critics: dict[str, ModelShape]) -> None:
    """Its share of memory, its pass, and what is there while it computes; whether the policy has adapters or not."""
    large, policy = critics["large"], replace(shape_7b, num_adapter_params=rank * 10**6)
    kl = replace(RunConfig().algorithm.kl, coef=0.1, reference_model="some/teacher")

    def plan(teacher: ModelShape | None, **learner: bool) -> RunPlan:
        cfg = config(algorithm={"kl": kl if teacher is not None else RunConfig().algorithm.kl}, learner=learner)
        return planned(cfg, policy, teacher=teacher, response_tokens=100.0)

    parts = {item.name: item.nbytes for item in plan(large).learner}
    assert parts["reference"] == 2 * large.num_params // 4
    assert passes(plan(large)) - passes(plan(None)) == pytest.approx(large.num_active_params / policy.num_active_params)
    offloaded = plan(large, reference_cpu_offload=True)
    assert {item.name: item.nbytes for item in offloaded.host}["reference"] == 2 * large.num_params // 4
    assert "reference" not in {item.name for item in offloaded.learner}
    whole = parts["unsharded weights, reference"] if rank else parts["unsharded weights"]
    assert whole == 2 * ((large if rank else policy).num_root_params + 2 * (large if rank else policy).num_block_params)
    assert computing(plan(critics["small"])) == computing(plan(None)), "a smaller one computes in less than the policy"


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("rank", [0, 8])
def test_forward_and_backward_are_the_operations_that_a_run_counts(tmp_path: Path, kind: str, rank: int) -> None:
    if rank:
        pytest.importorskip("peft")
    settings, lora = KINDS[kind](), LoraConfig(rank=rank, target_modules="q_proj+o_proj")
    settings.save_pretrained(tmp_path)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(settings)
    if rank:
        add_adapters(hf, check_architecture(hf), lora, base_dtype=torch.float32)
    counted = flops.model_flops(hf)
    assert counted is not None
    shape = model_shape(ModelConfig(lora=lora), AutoConfig.from_pretrained(tmp_path))
    assert bool(shape.num_adapter_params) == bool(rank)
    assert training_flops(shape, recomputes=False) == counted.per_token + counted.per_loss_token


def test_the_greedy_answer_is_generated_and_not_trained(shape_7b: ModelShape) -> None:
    remax, rloo = (
        planned(
            config(algorithm={"advantage_estimator": name}, rollout={"group_size": 2}), shape_7b, response_tokens=100.0
        ).work[100.0]
        for name in ("remax", "rloo")
    )
    assert remax.engine_flops / rloo.engine_flops == pytest.approx(3 / 2)
    assert remax.learner_flops == rloo.learner_flops


def test_a_deadline_that_asks_much_of_the_devices_is_told(shape_7b: ModelShape) -> None:
    long = config(rollout={"max_response_tokens": 16384}, trainer={"groups_per_step": 1024})
    told = format_plan(planned(long, shape_7b), long)
    flops = 2 * 4 * shape_7b.num_active_params * 1024 * 16 * (100 + 16384) / 4
    assert f"learner.timeout_s=1,800 if each learner device trains at {flops / 1800 / 1e12:,.0f} TFLOP/s" in told
    assert "Up to 32 responses are generated one after the other: 19 s for each" in told
    short = config(rollout={"max_response_tokens": 64}, trainer={"groups_per_step": 16})
    assert "TFLOP/s" not in (told := format_plan(planned(short, shape_7b), short))
    assert "one after the other" not in told


@pytest.mark.parametrize("name", [entry for entry in config_names(packaged_configs()) if entry.endswith("_7b")])
def test_no_shipped_configuration_asks_more_of_a_device_than_an_h100_trains_at(name: str, shape_7b: ModelShape) -> None:
    cfg = load_config(["--config-name", name])
    critic = shape_7b if cfg.algorithm.uses_critic else None
    work = planned(cfg, shape_7b, critic=critic, prompt_tokens=float(cfg.task.max_prompt_tokens)).work
    assert work[cfg.rollout.max_response_tokens].learner_flops / cfg.learner.timeout_s < 0.45 * 989e12


# Against measured runs


ANSWERS, PROMPT_TOKENS = 32 * 8, 512
PROMPTS = ANSWERS * PROMPT_TOKENS
MEAN_W1 = 966


def work(shape: ModelShape, ranks: int, engines: int, *, answers: float, prompts: float = PROMPTS) -> StepWork:
    """No activation checkpointing, KL or critic."""
    return StepWork(
        learner_flops=training_flops(shape, recomputes=False) * (prompts + answers) / ranks,
        engine_flops=FORWARD * shape.num_active_params * answers / engines,
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
    name: str, split: tuple[int, int, int], staleness: int, step_s: float, tokens_per_s: float,
    seconds: tuple[float, float, float], shape_7b: ModelShape,
) -> None:  # fmt: skip
    ranks, engines, num_devices = split
    generation_s, full_s, learning_s = seconds
    answers = round(tokens_per_s * num_devices * step_s) - PROMPTS  # with the lengths that this run had
    full, few = work(shape_7b, ranks, engines, answers=answers).generation_over_learning
    assert full / 1.25 < full_s / learning_s < full * 1.75, name
    least, most = (0.75, 1.0) if staleness else (0.6, 1.75)  # a tail that nothing overlaps is slower still
    assert least * few < generation_s / learning_s < most * few, name


@pytest.mark.parametrize(
    ("ranks", "engines", "mean", "expected"),
    [
        (2, 2, MEAN_W1, "either"),  # 7B: the learner sets the pace once S = 2 overlaps the tails
        (1, 1, MEAN_W1, "either"),  # 3B, likewise
        (1, 1, 256, "learning"),  # uniform: the learner works for 7.5 s of 7.6
        (3, 1, MEAN_W1, "generation"),  # 7B: from the measured split, 16.4 s at the full rate against 13.6 s
        (1, 3, MEAN_W1, "learning"),
        (6, 2, 4096, "generation"),
    ],
)
def test_the_bottleneck_is_named_as_it_was_measured(
    shape_7b: ModelShape, ranks: int, engines: int, mean: float, expected: str
) -> None:
    assert work(shape_7b, ranks, engines, answers=ANSWERS * mean).bottleneck == expected


def test_a_plan_is_made_for_the_mean_that_was_given(shape_7b: ModelShape) -> None:
    cfg = config(rollout={"max_response_tokens": 4096, "group_size": 8}, learner={"activation_checkpointing": False})
    plan = planned(cfg, shape_7b, prompt_tokens=512.0, response_tokens=966.0)
    assert list(plan.work) == [966.0]
    expected = 966 / (512 + 966) / 3
    assert plan.work[966.0].generation_over_learning == pytest.approx((expected / 0.45, expected / 0.2))
    text = format_plan(plan, cfg)
    assert "966 tokens, on average" in text
    assert "either: generation takes 0.48 to 1.1 times the time of learning" in text
    assert "--response-tokens" not in text and "alternate" not in text
    unknown = config(rollout={"max_response_tokens": 4096}, mode={"max_staleness": 0})
    plan = planned(unknown, shape_7b)
    assert list(plan.work) == [4096, 1024]
    for words in ("--response-tokens N", "4,096 tokens, the longest", "1,024 tokens, a quarter of it", "alternate"):
        assert words in format_plan(plan, unknown)


# Weight sync


HALF = {"gpu_memory_utilization": 0.5}
"""Room for a shadow, so that engines may hand versions on."""


def test_a_version_moves_every_published_byte_to_every_replica(shape_7b: ModelShape) -> None:
    def to_three_engines(relay: str) -> SyncTraffic:
        rollout = {"num_replicas": 3, "tensor_parallel_size": 2, **HALF}
        return planned(config(rollout=rollout, weight_sync={"relay": relay}), shape_7b).sync

    sync = to_three_engines("off")
    assert (sync.version_bytes, sync.device_bytes, sync.relays) == (2 * NUM_7B, NUM_7B, False)
    assert sync.rank_bytes == -(-3 * 2 * NUM_7B // 4)
    assert sync.floor_s(25e9) == pytest.approx(3 * 2 * NUM_7B / 4 / 25e9)
    relayed = to_three_engines("auto")
    assert (relayed.rank_bytes, relayed.relays) == (2 * NUM_7B // 4, True)
    assert relayed.floor_s(25e9) == pytest.approx(NUM_7B / 25e9), "an engine device reads more than a rank sends"


def test_the_least_time_of_a_pull_knows_whether_engines_hand_versions_on(shape_7b: ModelShape) -> None:
    many = {"num_replicas": 16, "gpu_memory_utilization": 0.5}

    def told(commit: str, relay: str) -> str:
        cfg = config(rollout=many, weight_sync={"commit": commit, "relay": relay})
        return format_plan(planned(cfg, shape_7b), cfg).partition("no pull is faster than ")[2].splitlines()[0]

    alone, sixteenfold = (f"{times * 2 * NUM_7B / 4 / 25e9:.3g} s at 25 GB/s" for times in (4, 16))
    assert told("auto", "auto").startswith(alone), "four ranks, and every engine device reads all of it"
    assert told("auto", "off").startswith(sixteenfold)
    assert told("inplace", "auto").startswith(sixteenfold), "only shadow blocks are handed on"


@pytest.mark.parametrize(
    ("sizes", "counts", "relay", "served"),
    [
        ((8, 8, 1), (8, 8), "auto", 1),  # all engines on the other node
        ((8, 8, 1), (8, 8), "off", 8),
        ((8, 16, 1), (8, 8, 8), "auto", 2),  # on two others
        ((4, 20, 1), (8, 8, 8), "auto", 2 + 4),  # and four beside the learners, which do not outnumber them
        ((2, 22, 1), (8, 8, 8), "auto", 3),  # six beside them, which do
        ((8, 4, 4), (8, 8, 8), "auto", 2),
        ((8, 4, 4), (8, 8, 8), "off", 4),
    ],
)
def test_a_learner_sends_its_share_to_every_node_on_which_there_are_engines(
    shape_7b: ModelShape, sizes: tuple[int, int, int], counts: tuple[int, ...], relay: str, served: int
) -> None:
    ranks, replicas, tp = sizes
    cfg = config(
        learner={"num_ranks": ranks},
        rollout={"num_replicas": replicas, "tensor_parallel_size": tp, **HALF},
        weight_sync={"relay": relay},
    )
    placement = describe_placement(cfg, counts, backend="fast", resource="GPU")
    assert placement.node_of is not None
    sync = planned(cfg, shape_7b, node_of=placement.node_of).sync
    assert sync.rank_bytes == -(-served * 2 * NUM_7B // ranks)
    assert sync.relays == (relay == "auto")


# The object store


PROMPT, ANSWER = 200, 1000


def group(num_answers: int) -> Group:
    """All answers of the same length, with four characters per token."""
    num_tokens = PROMPT + ANSWER
    # Each with arrays of its own: a pickle writes shared ones once.
    answers = [
        Trajectory.of_turns(
            [make_turn(range(PROMPT), range(PROMPT, num_tokens))], prompt_id="train/0", sample_index=i,
            reward=float(i % 2), reward_parts={},
            status="completed", timings={"generate_s": 1.0}, text=f"{i:04d}" + "x" * (4 * ANSWER - 4),
        )
        for i in range(num_answers)
    ]  # fmt: skip
    return Group(group_id=0, prompt_id="train/0", trajectories=answers, start_version=0)


def settings(**sections: dict[str, Any]) -> RunConfig:
    base = {"rollout": {"group_size": 16, "max_response_tokens": ANSWER}, "trainer": {"groups_per_step": 8}}
    return config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def stored(cfg: RunConfig, *, num_slots: int = 24, num_evaluated: int = 0) -> ObjectStore:
    return object_store(
        cfg, prompt_tokens=float(PROMPT), num_evaluated=num_evaluated, num_slots=num_slots,
        group_size=cfg.rollout.group_size,
    )  # fmt: skip


def store_sizes(store: ObjectStore) -> dict[str, int]:
    return {item.name: item.nbytes for item in store.items}


def test_a_group_has_the_bytes_that_a_worker_sends() -> None:
    store = stored(settings())
    assert store.group_bytes == pytest.approx(len(pickle.dumps(group(16))), rel=0.05)
    assert store.carries_groups
    assert store_sizes(store)["24 groups in flight"] == 24 * store.group_bytes


def test_groups_of_less_than_what_travels_within_a_call_bypass_the_store(shape_7b: ModelShape) -> None:
    small = settings(rollout={"group_size": 2})
    assert len(pickle.dumps(group(2))) < 100_000
    assert not stored(small).carries_groups
    assert list(store_sizes(stored(small))) == ["micro-batches of one step"]
    assert "Groups bypass it, as up to 100 kB do" in format_plan(planned(small, shape_7b), small)


def test_the_store_counts_sequences_evaluations_and_greedy_baselines(shape_7b: ModelShape) -> None:
    one, three = stored(settings()), stored(settings(task={"agent": "my.agent", "agent_max_sequences": 3}))
    assert store_sizes(three) == {name: 3 * nbytes for name, nbytes in store_sizes(one).items()}
    evaluation = store_sizes(stored(settings(), num_evaluated=400))["400 responses of an evaluation"]
    assert evaluation == 400 * one.group_bytes // 16
    needed = sum(store_sizes(one).values())  # Ray spills before the store is full
    for size, spills in ((1.2, True), (1.3, False)):
        assert stored(settings(ray={"object_store_gib": size * needed / GIB})).may_spill == spills
    plain, greedy = (
        planned(settings(algorithm={"advantage_estimator": name}), shape_7b).store for name in ("grpo", "remax")
    )
    assert greedy.group_bytes * 16 == plain.group_bytes * 17
    assert store_sizes(greedy)["micro-batches of one step"] == store_sizes(plain)["micro-batches of one step"]


@pytest.mark.parametrize("algorithm", [{}, {"loss": "clip_cov"}, {"advantage_estimator": "gae"}], ids=str)
def test_micro_batches_have_the_bytes_that_the_ranks_fetch(algorithm: dict[str, Any]) -> None:
    cfg = settings(algorithm=algorithm)
    groups = [group(cfg.rollout.group_size) for _ in range(cfg.trainer.groups_per_step)]
    batch = build_train_batch(
        groups,
        step=0,
        algorithm=cfg.algorithm,
        num_ranks=2,
        max_tokens_per_micro_batch=9 * (PROMPT + ANSWER),
        max_response_tokens=ANSWER,
    )
    real = sum(nbytes(micro) for rank in batch.micro_batches for micro in rank)
    assert store_sizes(stored(cfg))["micro-batches of one step"] == pytest.approx(real, rel=0.005)


def nbytes(value: object) -> int:
    """Of all arrays in a micro-batch."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return sum(nbytes(getattr(value, each.name)) for each in fields(value)) if is_dataclass(value) else 0


def test_the_store_is_compared_with_that_of_a_private_cluster_alone(shape_7b: ModelShape) -> None:
    mark = "(may not fit: it spills to disk)"
    tight = settings(rollout={"max_response_tokens": 20480}, trainer={"groups_per_step": 32})
    text = format_plan(planned(tight, shape_7b), tight)
    assert mark in text and "of 0.25 GiB" in text
    roomy = replace(tight, ray=RayConfig(object_store_gib=4.0))
    assert mark not in format_plan(planned(roomy, shape_7b), roomy)
    joined = replace(tight, ray=RayConfig(address="auto"))
    store = planned(joined, shape_7b).store
    assert store.total_bytes is None and not store.may_spill
    assert mark not in format_plan(planned(joined, shape_7b), joined)
