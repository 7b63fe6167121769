"""Which combinations of values are refused. tests/golden (`argv`) has the others, and every text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_args
from tests.fakes.metric_names import METRICS, find_row
from trainer.config.algorithm import ESTIMATORS, LOSSES, AlgorithmConfig, EstimatorTraits
from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.describe import describe_rollout
from trainer.config.inactive import INACTIVE, inactive_keys, reset_inactive
from trainer.config.plain import to_run_config
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.rules import (
    REFUSED_ENGINE_ARGS,
    RESERVED_NAMES,
    check_combinations,
    estimator_problems,
    pairing_problems,
)
from trainer.config.schema import RunConfig, all_keys
from trainer.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from trainer.errors import Problem

RECIPES = Path(__file__).parents[4] / "configs" / "algorithm"
NAMES = config_names(packaged_configs())

SHORT = {
    "SYNC": "mode.name=sync mode.max_staleness=0",
    "WEIGHTED": "a.loss=importance_sampling",
    "SEQUENCES": "task.agent=my.make task.agent_max_sequences=2",
    "IN_LOSS": "a.kl.coef=0.01",
    "IN_REWARD": "a.kl.coef=0.01 a.kl.apply_to=reward",
    "IN_ADVANTAGE": "a.kl.coef=0.01 a.kl.apply_to=advantage a.kl.estimator=k1",
    "TAUGHT": "IN_ADVANTAGE a.advantage_estimator=zero a.kl.reference_model=some/teacher WEIGHTED",
    "COSINE": "learner.lr_schedule=cosine",
    "SINGLE": "rollout.group_size=1 trainer.groups_per_step=1 learner.num_ranks=1",
    "SHARED_HEAD": "a.advantage_estimator=gae critic.shared_backbone=true",
    "FILTER": "task.pass_rate_min=0.1 task.pass_rate_max=0.9",
    "CURRICULUM": "task.curriculum=easy_to_hard task.difficulty_column=level",
    "ADAPTIVE": "rollout.concurrency=adaptive rollout.max_num_seqs=256",
    "TENSOR": "learner.num_ranks=8 learner.fsdp_size=4 learner.tensor_parallel_size=4",
    "OFFLOADED": "learner.cpu_offload learner.reference_cpu_offload",
    "REPACKED": "rollout.repack_below=8 rollout.num_replicas=2",
    "SAMPLED": "trainer.eval_samples=4 trainer.eval_temperature=0.7",
    "NO_PERIODIC": "trainer.eval_every=0 trainer.eval_at_start=false",
    "SHARED": "mode.name=colocated mode.max_staleness=0 mode.in_flight=abort weight_sync.commit=inplace "
    "weight_sync.num_slots=1 trainer.eval_blocking=true learner.num_ranks=4 rollout.num_replicas=2 "
    "rollout.tensor_parallel_size=2 task.eval_path=eval.jsonl",
}
"""Words of several keys; a. stands for algorithm., c. for algorithm.correction. Later words win."""


def expanded(words: str) -> Iterator[str]:
    for word in words.split():
        if word in SHORT:
            yield from expanded(SHORT[word])
        else:
            yield re.sub(r"^c\.", "algorithm.correction.", re.sub(r"^a\.", "algorithm.", word))


def config_of(words: str) -> RunConfig:
    """`section.key=value`, the value as JSON or as text."""
    data: dict[str, Any] = {}
    for word in expanded(words):
        path, _, text = word.partition("=")
        *sections, name = path.split(".")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        try:
            node[name] = json.loads(text)
        except ValueError:
            node[name] = text
    config, problems = to_run_config(data)
    assert problems == []
    return config


def problems_in(config: RunConfig, *, written: Collection[str] = ()) -> list[Problem]:
    """Of every key that has a value although nothing reads it, or cannot have the one that it has."""
    _, _, inactive = reset_inactive(config, chosen=all_keys(), written=written)
    return [*inactive, *check_combinations(config)]


def keys_refused(words: str, *, written: Collection[str] = ()) -> list[str]:
    return sorted(problem.key for problem in problems_in(config_of(words), written=written))


def rows(table: str, base: str = "") -> list[Any]:
    """Of `words -> keys that are refused`."""
    found = [line.partition("->") for line in table.strip().splitlines()]
    return [pytest.param(f"{base} {words}", sorted(expanded(refused)), id=words) for words, _, refused in found]


GENERAL = r"""
task.reader=arithmetic task.train_path=a.jsonl -> task.reader
task.eval_path= task.eval_size=5 -> task.eval_size
rollout.max_model_len=1535 -> rollout.max_model_len
rollout.max_model_len=1536 ->
learner.max_tokens_per_micro_batch=1535 -> learner.max_tokens_per_micro_batch
learner.max_tokens_per_micro_batch=1536 ->
learner.num_ranks=257 -> learner.num_ranks
learner.num_ranks=256 ->
learner.num_mini_batches=4 learner.num_ranks=64 ->
learner.num_mini_batches=4 learner.num_ranks=65 -> learner.num_ranks
learner.num_mini_batches=5 -> learner.num_mini_batches
learner.num_ranks=512 learner.context_parallel_size=2 ->
learner.num_ranks=6 learner.fsdp_size=4 -> learner.fsdp_size
learner.num_ranks=8 learner.fsdp_size=4 learner.context_parallel_size=8 ->
learner.num_ranks=512 learner.tensor_parallel_size=2 ->
learner.num_ranks=1024 learner.tensor_parallel_size=2 -> learner.num_ranks
learner.num_ranks=8 learner.tensor_parallel_size=3 -> learner.tensor_parallel_size
rollout.num_replicas=4 rollout.engines_per_device=4 ->
rollout.num_replicas=3 rollout.engines_per_device=4 -> rollout.engines_per_device
rollout.num_replicas=4 rollout.engines_per_device=2 rollout.tensor_parallel_size=2 -> rollout.engines_per_device
learner.num_ranks=8 learner.fsdp_size=2 learner.tensor_parallel_size=4 -> learner.tensor_parallel_size
TENSOR learner.max_tokens_per_micro_batch=1536 a.advantage_estimator=gae ->
TENSOR learner.context_parallel_size=2 learner.optimizer=muon -> learner.context_parallel_size learner.optimizer
TENSOR learner.master_dtype=bfloat16 model.lora.rank=8 -> learner.master_dtype learner.master_dtype model.lora.rank
TENSOR learner.cpu_offload=true IN_LOSS learner.reference_cpu_offload=true -> OFFLOADED
learner.context_parallel_size=2 learner.max_tokens_per_micro_batch=767 -> learner.max_tokens_per_micro_batch
learner.context_parallel_size=2 learner.max_tokens_per_micro_batch=768 ->
learner.min_lr_ratio=0.1 -> learner.min_lr_ratio
COSINE learner.warmup_steps=60 critic.warmup_steps=30 a.advantage_estimator=gae ->
COSINE learner.warmup_steps=70 critic.warmup_steps=30 a.advantage_estimator=gae -> learner.warmup_steps
learner.lr_schedule=wsd learner.warmup_steps=60 learner.decay_steps=40 ->
learner.lr_schedule=wsd learner.warmup_steps=60 learner.decay_steps=41 -> learner.decay_steps
learner.lr_schedule=linear learner.decay_steps=10 -> learner.decay_steps
learner.master_dtype=bfloat16 learner.optimizer=muon ->
learner.master_dtype=bfloat16 learner.optimizer=muon model.lora.rank=8 -> learner.master_dtype learner.optimizer
learner.optimizer=adamw_bf16 model.lora.rank=8 ->
learner.optimizer=adamw_8bit learner.cpu_offload=true -> learner.cpu_offload
learner.master_dtype=bfloat16 critic.cpu_offload=true a.advantage_estimator=gae -> critic.cpu_offload
checkpoint.every_steps=50 checkpoint.keep_every=150 ->
"""
ADVANTAGES = r"""
a.advantage_estimator=rloo a.normalize_by_std=false -> a.normalize_by_std
a.advantage_estimator=pass_at_k a.normalize_by_std=false ->
a.overlong_buffer_tokens=1024 a.overlong_penalty=0.5 ->
a.advantage_estimator=grpo a.gpg_scale=valid_groups -> a.gpg_scale
a.advantage_estimator=gpg a.gpg_scale=valid_groups a.overlong_buffer_tokens=64 task.agent=my.make ->
a.advantage_estimator=grpo a.gdpo_weights={"format":2.0} -> a.gdpo_weights
a.advantage_estimator=gdpo a.gdpo_weights={"format":0.5,"correct":-1} ->
a.advantage_estimator=gdpo a.overlong_buffer_tokens=64 -> a.overlong_buffer_tokens
a.advantage_estimator=gdpo a.on_failure.timeout=zero -> a.on_failure.timeout
a.advantage_estimator=reinforce_pp_baseline a.dynamic_sampling=true ->
task.agent_args={"max_turns":3} -> task.agent_args
task.agent_timeout_s=5.0 -> task.agent_timeout_s
task.agent_max_sequences=2 -> task.agent_max_sequences
task.agent_max_sequences=2 task.agent=my.make ->
task.reward.name=zero task.agent=my.make ->
a.advantage_estimator=grpo IN_REWARD a.kl.estimator=k1 SEQUENCES ->
a.advantage_estimator=reinforce SEQUENCES ->
rollout.top_k=1 WEIGHTED a.advantage_estimator=remax -> rollout.top_k
rollout.top_k=1 WEIGHTED a.advantage_estimator=reinforce_pp ->
rollout.top_k=2 WEIGHTED a.advantage_estimator=grpo ->
SINGLE a.advantage_estimator=reinforce ->
a.advantage_estimator=my.function a.advantage_args={"beta":1.0} ->
a.loss=my.function a.loss_args={"beta":1.0} ->
"""
CORRECTIONS = r"""
c.level=sequence -> c.level
c.level=sequence c.reject.upper=2.0 -> c.level
c.mask.metric=k3 -> c.mask.metric
c.reject.metric=tv -> c.reject.metric
c.mask.lower=1.0 -> c.mask.lower
c.reject.metric=k2 c.reject.upper=0.0 -> c.reject.upper
c.objective=loglinear a.loss=dro -> c.objective
c.clamp.upper=2.0 a.loss=reinforce SYNC -> c.clamp.upper
c.clamp.upper=2.0 c.mask.upper=5.0 c.reject.upper=1.1 ->
c.level=sequence c.objective=decoupled WEIGHTED ->
c.mask.metric=k1 c.mask.lower=-1.0 c.mask.upper=1.0 ->
c.mask.metric=k3 c.mask.upper=0.1 c.clamp.upper=2.0 ->
a.loss=reinforce SYNC ->
a.loss=reinforce SYNC learner.updates_per_batch=2 -> a.loss
a.loss=reinforce SYNC learner.updates_per_batch=2 c.mask.upper=5.0 ->
a.loss=ppo_clip c.objective=decoupled learner.updates_per_batch=2 ->
a.loss=gspo c.objective=decoupled learner.num_mini_batches=2 ->
a.loss=reinforce c.mask.upper=5.0 ->
a.loss=dro ->
a.loss=my.loss c.objective=decoupled ->
a.loss=my.loss c.clamp.upper=2.0 ->
a.loss=my.loss c.clamp.upper=2.0 c.level=sequence -> c.level
a.loss=reinforce SYNC rollout.top_p=0.9 -> rollout.top_p
a.loss=my_package.loss rollout.top_p=0.9 ->
WEIGHTED c.objective=decoupled c.mask.upper=5.0 rollout.top_p=0.9 ->
WEIGHTED c.clamp.lower=0.5 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.mask.metric=k3 c.mask.upper=1.0 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.reject.upper=2.0 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.objective=loglinear rollout.top_p=0.9 -> rollout.top_p
WEIGHTED IN_REWARD rollout.top_p=0.9 -> rollout.top_p
"""
CRITIC_AND_KL = r"""
a.gae_gamma=0.9 -> a.gae_gamma
a.advantage_estimator=gae critic.value_coef=0.1 -> critic.value_coef
a.advantage_estimator=gae critic.warmup_steps=100 -> critic.warmup_steps
a.advantage_estimator=gae rollout.group_size=1 a.mask_truncated=true ->
a.advantage_estimator=gae IN_REWARD a.kl.estimator=k1 a.mask_truncated=true ->
a.advantage_estimator=gae critic.updates_per_step=2 critic.value_clip=0.2 critic.warmup_steps=99 ->
SHARED_HEAD critic.lr=1e-05 critic.path=some/model critic.warmup_steps=5 -> critic.lr critic.path critic.warmup_steps
SHARED_HEAD critic.value_coef=0.1 a.gae_lambda=0.95 ->
SHARED_HEAD critic.value_clip=0.2 learner.updates_per_batch=2 ->
a.kl.apply_to=reward -> a.kl.apply_to
a.kl.reference_model=some/teacher -> a.kl.reference_model
IN_LOSS a.loss=clip_cov ->
IN_LOSS learner.reference_cpu_offload=true a.dynamic_sampling=true ->
IN_REWARD a.advantage_estimator=reinforce a.mask_truncated=true ->
IN_REWARD a.advantage_estimator=opo a.kl.estimator=k1 ->
TAUGHT rollout.top_p=0.9 -> rollout.top_p
TAUGHT a.overlong_buffer_tokens=4 -> a.overlong_buffer_tokens
TAUGHT rollout.group_size=1 task.reward.name=zero a.mask_truncated=true ->
TAUGHT model.lora.rank=8 learner.reference_cpu_offload=true ->
TAUGHT a.advantage_estimator=grpo a.mask_truncated=true ->
"""
PROMPTS = r"""
FILTER task.pass_threshold=0.5 task.pass_rate_cooldown_epochs=4 task.pass_rate_column=rate ->
task.pass_rate_min=0.5 task.pass_rate_max=0.5 ->
task.pass_rate_cooldown_epochs=4 -> task.pass_rate_cooldown_epochs
task.pass_rate_column=rate -> task.pass_rate_column
CURRICULUM task.curriculum_epochs=3 ->
CURRICULUM task.pass_rate_column=rate -> task.pass_rate_column
task.curriculum=easy_to_hard task.pass_rate_column=rate ->
task.curriculum_epochs=3 -> task.curriculum_epochs
task.difficulty_column=level -> task.difficulty_column
a.group_filter=my_package.filters.one a.group_filter_args={"a":1.0} ->
"""
ENGINES_AND_EVALUATION = r"""
rollout.min_concurrency=4 -> rollout.min_concurrency
ADAPTIVE rollout.min_concurrency=4 ->
ADAPTIVE rollout.min_concurrency=256 -> rollout.min_concurrency
ADAPTIVE rollout.max_concurrency=256 ->
ADAPTIVE rollout.max_concurrency=257 -> rollout.max_concurrency
rollout.concurrency=adaptive rollout.max_num_seqs=auto rollout.max_concurrency=2570 rollout.min_concurrency=300 ->
REPACKED SYNC rollout.per_request_seed=false ->
rollout.stop=["</s>","```"] rollout.stop_token_ids=[0,7] ->
SAMPLED ->
trainer.eval_temperature=0.005 -> trainer.eval_temperature
trainer.eval_temperature=0.7 trainer.eval_top_p=0.9 ->
task.eval_path= SAMPLED -> trainer.eval_samples trainer.eval_temperature
task.eval_path= trainer.eval_timeout_s=600.0 -> trainer.eval_timeout_s
trainer.eval_timeout_s=599.0 task.agent=some.agent task.agent_timeout_s=60.0 ->
"""
SHARED_DEVICES = r"""
SHARED ->
SHARED mode.in_flight=keep -> mode.in_flight
SHARED weight_sync.commit=staged weight_sync.num_slots=2 -> weight_sync.commit weight_sync.num_slots
SHARED trainer.eval_blocking=false NO_PERIODIC ->
SHARED task.eval_path= ->
"""


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        *rows(GENERAL),
        *rows(ADVANTAGES),
        *rows(CORRECTIONS),
        *rows(CRITIC_AND_KL),
        *rows(PROMPTS, "task.train_path=train.jsonl"),
        *rows(ENGINES_AND_EVALUATION, "task.eval_path=eval.jsonl"),
        *rows(SHARED_DEVICES),
    ],
)
def test_only_what_cannot_work_or_has_no_effect_is_refused(words: str, refused: list[str]) -> None:
    assert keys_refused(words) == refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("task.pass_rate_min=0.55 task.pass_rate_max=0.6", "is a multiple of 1/8, and none is in 0.55..0.6"),
        ("a.loss=gspo c.objective=decoupled", "always 1, and algorithm.loss=gspo cannot bound it"),
        ("COSINE learner.warmup_steps=70 critic.warmup_steps=30 a.advantage_estimator=gae", "must be below 70"),
        ("ADAPTIVE rollout.min_concurrency=9 rollout.max_concurrency=8", "must be below rollout.max_concurrency=8"),
        ("trainer.eval_timeout_s=599.0", "must be at least rollout.request_timeout_s=600"),
        ("rollout.max_model_len=1535", "task.max_prompt_tokens + rollout.max_response_tokens = 1536"),
    ],
)
def test_a_refusal_states_the_limit(words: str, expected: str) -> None:
    assert expected in "".join(map(str, problems_in(config_of(words))))


# Keys that nothing reads


def test_every_row_is_about_keys_that_exist() -> None:
    assert {key for row in INACTIVE for key in (*row.keys, *row.because)} <= all_keys().keys()


@pytest.mark.parametrize(
    "words",
    [
        "TAUGHT a.overlong_penalty=0.5 a.overlong_buffer_tokens=4",
        "critic.updates_per_step=4 critic.value_clip=0.2 critic.lr=1e-05",
        "SHARED_HEAD critic.updates_per_step=4 critic.value_clip=0.2",
        "task.eval_path= task.curriculum_epochs=3 task.difficulty_column=level",
        "a.loss=reinforce c.clamp.upper=2.0 c.level=sequence",
    ],
)
def test_one_pass_over_the_rows_resets_everything(words: str) -> None:
    """The keys that a row reads may be reset by rows before it alone."""
    once, _, problems = reset_inactive(config_of(words), chosen=(), written=())
    assert problems == [] and inactive_keys(once) == set()


# Estimators


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_one_response_per_group_unless_it_compares(name: str) -> None:
    traits, words = ESTIMATORS[name], "TAUGHT" if name == "zero" else f"a.advantage_estimator={name}"  # pyright: ignore
    assert keys_refused(f"{words} rollout.group_size=1") == (["rollout.group_size"] if traits.needs_peers else [])
    assert keys_refused(f"{words} rollout.group_size=2") == []
    sampled = keys_refused(f"{words} a.dynamic_sampling=true")
    if traits.greedy_baseline:
        assert sampled == [] == keys_refused(f"{words} a.dynamic_sampling=true rollout.group_size=1")
    elif not traits.needs_peers:
        assert "algorithm.dynamic_sampling" in sampled


@pytest.mark.parametrize(
    ("traits", "words", "key"),
    [
        (EstimatorTraits(needs_peers=True), "rollout.group_size=1", "rollout.group_size"),
        (EstimatorTraits(needs_peers=False, uses_parts=True), "a.overlong_buffer_tokens=8", "a.overlong_buffer_tokens"),
        (EstimatorTraits(needs_peers=False, uses_parts=True), 'a.gdpo_weights={"a":0}', "a.gdpo_weights"),
        (EstimatorTraits(needs_peers=False, reward_to_go=True), "IN_REWARD", "a.kl.apply_to"),
    ],
)
def test_the_traits_of_a_users_estimator_are_held_against_the_configuration(
    traits: EstimatorTraits, words: str, key: str
) -> None:
    found = estimator_problems(config_of(f"a.advantage_estimator=my.own {words}"), traits)
    assert [problem.key for problem in found] == [*expanded(key)]


# Losses and corrections

MOVED = {
    "clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "dual_clip": 3.0, "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0,
    "cov_frac": 0.1, "cov_min": 0.5, "cov_max": 9.0, "cov_kl_coef": 2.0, "dppo_threshold": 0.3, "dro_beta": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("loss", [*LOSSES, "my.loss"])
def test_a_loss_accepts_its_keys_and_refuses_all_others(loss: Any) -> None:
    read = LOSSES[loss].keys if loss in LOSSES else ()
    assert MOVED.keys() == {key for traits in LOSSES.values() for key in traits.keys}
    for key, value in MOVED.items():
        problems = problems_in(config_of(f"SYNC a.loss={loss} a.{key}={value}"))
        assert [p.key for p in problems] == ([] if key in read else [f"algorithm.{key}"])
        assert all(f"algorithm.loss={loss} does not read it" in p.message for p in problems)
    assert keys_refused(f"SYNC a.loss={loss} a.entropy_coef=0.01") == []


@pytest.mark.parametrize("loss", LOSSES)
def test_a_correction_must_fit_the_ratio_that_the_loss_contains(loss: Any) -> None:
    decoupled = keys_refused(f"a.loss={loss} c.objective=decoupled")
    assert decoupled == ([] if loss == "importance_sampling" else ["algorithm.correction.objective"])
    held = LOSSES[loss].ratio
    wrong = f"algorithm.correction.{'clamp.upper' if held is None else 'level'}"
    for level in ("token", "sequence", "sequence_mean"):
        clamped = f"a.loss={loss} c.clamp.upper=2.0 c.level={level}"
        assert keys_refused(f"{clamped} SYNC") == ([] if level == held else [wrong])
        if held is not None:  # with this objective the weight may be any ratio
            assert keys_refused(f"{clamped} c.objective=loglinear") == []


def test_every_loss_has_a_recipe_that_names_its_source_or_is_a_variant_of_one() -> None:
    texts = [path.read_text() for path in RECIPES.glob("*.yaml")]
    assert all(text.startswith("#") for text in texts)
    assert set(LOSSES) - {yaml.safe_load(text).get("loss", AlgorithmConfig().loss) for text in texts} <= {
        "importance_sampling", "dppo_kl"
    }  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm=reinforce mode=sync",
        "algorithm=reinforce correction=mis",
        "algorithm=opd algorithm.kl.reference_model=builtin:tiny rollout.group_size=1",
    ],
)
def test_what_the_documentation_recommends_in_words_is_accepted(overrides: str) -> None:
    load_config(overrides.split())


# Engines


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("data_parallel_size", 2, "use rollout.num_replicas"),
        ("logprobs_mode", "raw_logprobs", "correction"),
        ("max_num_batched_tokens", 255, "rollout.max_num_seqs=256"),
        ("quantization", "fp8", ""),
        ("max_num_batched_tokens", 256, ""),
        ("distributed_executor_backend", "mp", ""),
    ],
)
def test_an_engine_argument_that_the_run_sets_or_relies_on_is_refused(argument: str, value: object, words: str) -> None:
    config, problems = to_run_config({"rollout": {"max_num_seqs": 256, "engine_args": {argument: value}}})
    problems += check_combinations(config)
    assert [(p.key, p.value) for p in problems] == [("rollout.engine_args", f"{argument}: {value}")] * bool(words)
    assert words in "".join(map(str, problems))


def test_no_engine_argument_that_a_run_sets_is_accepted_from_the_user() -> None:
    specs = [EngineSpec(model="m", extension="a.B", sleep_level=1, lora_rank=8), EngineSpec(model="m", device="cuda")]
    ours = {name for spec in specs for name in engine_args(spec)}
    of_the_user = {"kv_cache_memory_bytes", "distributed_executor_backend"}
    assert ours - REFUSED_ENGINE_ARGS.keys() == of_the_user


# Modes and clusters

OWN_STALENESS = {"cispo_7b": 4, "dapo_7b": 4, "gspo_7b": 3, "reinforce_pp_7b": 2}
"""Shipped files that set S themselves; it wins over that of a mode."""


def test_accelerators_have_one_rank_and_one_worker_each() -> None:
    assert not list(pairing_problems(config_of("SHARED")))
    (problem,) = pairing_problems(config_of("SHARED rollout.tensor_parallel_size=1"))
    assert problem.key == "learner.num_ranks" and "2 * 1 = 2" in problem.message
    divided = "SHARED rollout.tensor_parallel_size=1 rollout.num_replicas=8 rollout.engines_per_device="
    assert not list(pairing_problems(config_of(f"{divided}2")))
    (problem,) = pairing_problems(config_of(f"{divided}4"))
    assert "rollout.num_replicas / rollout.engines_per_device = 8 / 4 = 2" in problem.message


@pytest.mark.parametrize("mode", groups([packaged_configs()])["mode"])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_takes_every_mode_or_names_the_key_to_add(name: str, mode: str) -> None:
    asked = [f"--config-name={name}", "device=cuda", f"mode={mode}"]
    is_refused = name in OWN_STALENESS and mode in ("sync", "one_step_off")
    if is_refused:
        with pytest.raises(ConfigurationError) as caught:
            load_config(asked)
        (problem,) = caught.value.problems
        asked += re.findall(r"mode\.max_staleness=\d", problem.hint)
    config = load_config(asked)
    of_mode = {"async": 1, "one_step_off": 1, "sync": 0, "colocated": 0}[mode]
    staleness = of_mode if is_refused else OWN_STALENESS.get(name, of_mode)
    assert (config.mode.name, config.mode.max_staleness) == (mode, staleness)
    warned = f"colocated, S = {staleness}: responses may span steps (mode.max_staleness=0 is on policy); "
    assert describe_rollout(config).startswith(warned) == (mode == "colocated" and staleness > 0)


@pytest.mark.parametrize("joins", [["ray.address=h:1"], ["--dry-run", "--nodes=8,8"]])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_joins_a_cluster_but_cannot_size_it_on_the_command_line(
    name: str, joins: list[str]
) -> None:
    config, problems = resolve(parse(["--config-name", name, *joins, "ray.object_store_gib=24"]))
    assert config.ray.address != "local"
    assert [(problem.key, problem.value) for problem in problems] == [("ray.object_store_gib", "24")]


# Further evaluation sets

SET = "task.eval_sets.hard.path=builtin:arithmetic"
SEVERAL = "trainer.eval_temperature=1 trainer.eval_samples=8 trainer.eval_pass_k=4"
OTHER = "task.train_path=a/b task.eval_path=a/b task.max_operand=20"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (f"{SET} task.eval_sets.hard.smaples=8", "task.eval_sets.hard.smaples", "unknown key"),
        (f"{SET} task.eval_sets.hard.size=many", "task.eval_sets.hard.size", "expected integer"),
        (f"{SET} task.eval_sets.hard.samples=0", "task.eval_sets.hard.samples", "must be >= 1"),
        (SET.replace("hard", "reward"), "task.eval_sets", "and not be accuracy, num_prompts"),
        (f"{SET} {SEVERAL} task.eval_sets.hard.samples=3", "task.eval_sets.hard.samples", "trainer.eval_pass_k=4"),
        (OTHER, "task.max_operand", "no prompts come from builtin:arithmetic"),
    ],
)  # fmt: skip
def test_an_evaluation_set_that_cannot_be_is_refused_by_its_key(overrides: str, key: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["device=cpu", *overrides.split()])
    assert words in {problem.key: problem.message for problem in caught.value.problems}[key]


def test_an_evaluation_set_may_be_the_only_reader_of_a_key() -> None:
    load_config(["device=cpu", *OTHER.split(), SET])


def test_no_name_of_a_set_makes_the_metric_of_another() -> None:
    ours = [metric.name.split("/") for metric in METRICS if metric.name.startswith("eval/")]
    families = {words[1] for words in ours if words[-1] == "*"}
    assert families == set(RESERVED_NAMES)
    accuracy = find_row("eval/hard/accuracy")
    assert accuracy is not None and accuracy.name == "eval/accuracy"
    assert find_row("eval/hard/pass_at/8") is not None and find_row("eval/hard/reward/part/format") is not None
    assert find_row("eval/hard/acuracy") is None and find_row("train/hard/accuracy") is None
