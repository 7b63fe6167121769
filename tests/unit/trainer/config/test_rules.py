"""Combinations of values that cannot work, and keys that nothing reads: which keys are refused, and with what words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rollout.engine.interface import EngineSpec
from rollout.engine.vllm_config import engine_args
from trainer.config.algorithm import ESTIMATORS, LOSS_KEYS, LOSSES, AlgorithmConfig, LossName, loss_traits
from trainer.config.cli import parse
from trainer.config.compose import load_config, resolve
from trainer.config.describe import describe_rollout
from trainer.config.inactive import reset_inactive
from trainer.config.plain import to_run_config
from trainer.config.presets import config_names, groups, packaged_configs
from trainer.config.rules import REFUSED_ENGINE_ARGS, RESERVED_NAMES, check_combinations, pairing_problems
from trainer.config.schema import RunConfig, all_keys
from trainer.errors import ConfigurationError
from trainer.telemetry.metrics import METRICS, find_row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from trainer.errors import Problem

RECIPES = Path(__file__).parents[4] / "configs" / "algorithm"
NAMES = config_names(packaged_configs())
PREFIX = "algorithm.correction"

SHORT = {
    "SYNC": "mode.name=sync mode.max_staleness=0",
    "WEIGHTED": "a.loss=importance_sampling",
    "SEQUENCES": "task.agent=my.make task.agent_max_sequences=2",
    "IN_LOSS": "a.kl.coef=0.01",
    "IN_REWARD": "a.kl.coef=0.01 a.kl.apply_to=reward",
    "IN_ADVANTAGE": "a.kl.coef=0.01 a.kl.apply_to=advantage a.kl.estimator=k1",
    "TAUGHT": "IN_ADVANTAGE a.advantage_estimator=zero a.kl.reference_model=some/teacher WEIGHTED",
    "COSINE": "learner.lr_schedule=cosine",
    "FILTER": "task.pass_rate_min=0.1 task.pass_rate_max=0.9",
    "CURRICULUM": "task.curriculum=easy_to_hard task.difficulty_column=level",
    "ADAPTIVE": "rollout.concurrency=adaptive",
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
            yield re.sub(r"^c\.", f"{PREFIX}.", re.sub(r"^a\.", "algorithm.", word))


def config_of(words: str) -> RunConfig:
    """`section.key=value`, the value as JSON or as text."""
    keys = [word.partition("=") for word in expanded(words)]
    return config_with(**{path.replace(".", "__"): parsed(text) for path, _, text in keys})


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def config_with(**keys: Any) -> RunConfig:
    """`section__key=value` for a nested key."""
    data: dict[str, Any] = {}
    for path, value in keys.items():
        *sections, name = path.split("__")
        node = data
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    config, problems = to_run_config(data)
    assert problems == []
    return config


def problems_in(config: RunConfig, *, written: Collection[str] = ()) -> list[Problem]:
    """Of every key that has a value although nothing reads it, or cannot have the one that it has."""
    _, _, inactive = reset_inactive(config, asked_for=all_keys(), written=written)
    return [*inactive, *check_combinations(config)]


def keys_refused(config: RunConfig, *, written: Collection[str] = ()) -> list[str]:
    return [problem.key for problem in problems_in(config, written=written)]


def rows(table: str, base: str = "") -> list[Any]:
    """Of `words -> keys that are refused`."""
    found = [line.partition("->") for line in table.strip().splitlines()]
    return [pytest.param(f"{base} {words}", list(expanded(refused)), id=words) for words, _, refused in found]


GENERAL = r"""
name=a/b -> name
model.lora.alpha=8.0 -> model.lora.alpha
model.lora.target_modules=q_proj -> model.lora.target_modules
model.lora.rank=12 -> model.lora.rank
model.lora.rank=8 model.lora.target_modules=q_proj,v_proj -> model.lora.target_modules
device.env={"NOT-A-NAME":"1"} -> device.env
task.train_path= task.eval_path=builtin:arithmetic -> task.train_path
task.reader=arithmetic task.train_path=a.jsonl -> task.reader
task.reader=jsonl task.train_path=a.jsonl -> task.reader
task.reader=jsonl task.eval_path= -> task.reader
task.train_path=a/b task.eval_path=a/b task.max_operand=20 -> task.max_operand
task.eval_path= task.eval_size=5 -> task.eval_size
rollout.group_size=1 -> rollout.group_size
rollout.group_size=1 a.advantage_estimator=rloo -> rollout.group_size
rollout.group_size=1 a.advantage_estimator=reinforce a.dynamic_sampling=true -> a.dynamic_sampling
mode.name=sync -> mode.max_staleness
mode.name=one_step_off mode.max_staleness=2 -> mode.max_staleness
rollout.max_model_len=1535 -> rollout.max_model_len
learner.max_tokens_per_micro_batch=1535 -> learner.max_tokens_per_micro_batch
learner.num_ranks=257 -> learner.num_ranks
learner.min_lr_ratio=0.1 -> learner.min_lr_ratio
COSINE learner.warmup_steps=100 -> learner.warmup_steps
trainer.stop_at_accuracy=0.9 task.eval_path= -> trainer.stop_at_accuracy
trainer.stop_at_accuracy=0.9 NO_PERIODIC trainer.eval_at_end=false -> trainer.stop_at_accuracy
checkpoint.every_steps=50 checkpoint.keep_every=75 -> checkpoint.keep_every
checkpoint.every_steps=50 checkpoint.keep_every=10 -> checkpoint.keep_every
checkpoint.every_steps=0 checkpoint.keep_every=50 -> checkpoint.keep_every
ray.address= -> ray.address
telemetry.wandb_project=mine -> telemetry.wandb_project
telemetry.wandb_entity=team -> telemetry.wandb_entity
telemetry.wandb_group=sweep -> telemetry.wandb_group
telemetry.wandb_tags=a+b -> telemetry.wandb_tags
rollout.group_size=1 a.advantage_estimator=reinforce ->
mode.max_staleness=0 ->
rollout.max_model_len=1536 ->
learner.max_tokens_per_micro_batch=1536 ->
learner.num_ranks=256 ->
COSINE learner.warmup_steps=99 learner.min_lr_ratio=0.1 ->
ray.address=auto ->
checkpoint.every_steps=50 checkpoint.keep_every=150 ->
checkpoint.every_steps=0 ->
"""
ADVANTAGES = r"""
a.advantage_estimator=rloo a.normalize_by_std=false -> a.normalize_by_std
WEIGHTED a.clip_ratio_low=0.1 -> a.clip_ratio_low
WEIGHTED a.clip_ratio_high=0.1 -> a.clip_ratio_high
WEIGHTED a.dual_clip=3.0 -> a.dual_clip
a.overlong_penalty=0.5 -> a.overlong_penalty
a.overlong_buffer_tokens=2000 -> a.overlong_buffer_tokens
a.overlong_buffer_tokens=1024 a.overlong_penalty=0.5 ->
a.advantage_estimator=reinforce_pp_baseline a.normalize_by_std=false -> a.normalize_by_std
a.advantage_estimator=gdpo a.normalize_by_std=false -> a.normalize_by_std
a.advantage_estimator=grpo a.gpg_scale=valid_groups -> a.gpg_scale
a.advantage_estimator=grpo a.gdpo_weights={"format":2.0} -> a.gdpo_weights
a.advantage_estimator=gdpo a.gdpo_weights={"format":0.0} -> a.gdpo_weights
a.advantage_estimator=gdpo a.gdpo_weights={"format":NaN} -> a.gdpo_weights
a.advantage_estimator=gdpo a.overlong_buffer_tokens=64 -> a.overlong_buffer_tokens
a.advantage_estimator=gdpo a.dynamic_sampling=true -> a.dynamic_sampling
a.advantage_estimator=grpo a.normalize_by_std=false ->
a.advantage_estimator=pass_at_k a.normalize_by_std=false ->
a.advantage_estimator=gpg a.gpg_scale=valid_groups ->
a.advantage_estimator=gdpo a.gdpo_weights={"format":0.5,"correct":-1} ->
a.advantage_estimator=reinforce_pp a.overlong_buffer_tokens=64 ->
a.advantage_estimator=reinforce_pp_baseline a.dynamic_sampling=true ->
task.agent_args={"max_turns":3} -> task.agent_args
task.agent_timeout_s=5.0 -> task.agent_timeout_s
task.agent_max_sequences=2 -> task.agent_max_sequences
task.reward.name=zero -> task.reward.name
task.agent_args={"max_turns":3} task.agent=my.make ->
task.agent_timeout_s=5.0 task.agent=my.make ->
task.agent_max_sequences=2 task.agent=my.make ->
task.reward.name=zero task.agent=my.make ->
a.advantage_estimator=gae SEQUENCES -> task.agent_max_sequences
a.advantage_estimator=reinforce IN_REWARD a.kl.estimator=k1 SEQUENCES -> task.agent_max_sequences
a.advantage_estimator=grpo IN_REWARD a.kl.estimator=k1 SEQUENCES ->
a.advantage_estimator=reinforce SEQUENCES ->
a.advantage_estimator=gpg a.overlong_buffer_tokens=64 -> a.gpg_scale
a.advantage_estimator=gpg task.agent=my.make -> a.gpg_scale
a.advantage_estimator=gpg a.gpg_scale=valid_groups a.overlong_buffer_tokens=64 task.agent=my.make ->
a.advantage_estimator=gdpo task.agent=my.make -> task.agent
a.advantage_estimator=grpo a.overlong_buffer_tokens=64 task.agent=my.make ->
a.overlong_buffer_tokens=64 a.overlong_penalty=0.0 -> a.overlong_penalty
a.overlong_buffer_tokens=64 a.overlong_penalty=0.5 ->
rollout.top_k=1 WEIGHTED a.advantage_estimator=grpo -> rollout.top_k
rollout.top_k=1 WEIGHTED a.advantage_estimator=remax -> rollout.top_k
rollout.top_k=1 WEIGHTED a.advantage_estimator=reinforce_pp ->
rollout.top_k=1 WEIGHTED a.advantage_estimator=gae ->
rollout.top_k=2 WEIGHTED a.advantage_estimator=grpo ->
"""
CORRECTIONS = r"""
c.level=sequence -> c.level
c.level=sequence c.reject.upper=2.0 -> c.level
c.mask.metric=k3 -> c.mask.metric
c.reject.metric=tv -> c.reject.metric
c.reject.level=token -> c.reject.level
c.clamp.upper=1.0 -> c.clamp.upper
c.clamp.lower=1.5 -> c.clamp.lower
c.mask.upper=0.5 -> c.mask.upper
c.mask.lower=1.0 -> c.mask.lower
c.mask.lower=-1.0 -> c.mask.lower
c.mask.metric=k3 c.mask.lower=0.1 -> c.mask.lower
c.mask.metric=k3 c.mask.lower=-0.1 -> c.mask.lower
c.mask.metric=k1 c.mask.lower=0.1 -> c.mask.lower
c.reject.metric=k2 c.reject.upper=0.0 -> c.reject.upper
c.clamp.upper=5.0 c.mask.upper=2.0 -> c.clamp.upper
c.clamp.lower=0.1 c.mask.lower=0.2 -> c.clamp.lower
c.objective=loglinear SYNC -> c.objective
c.objective=decoupled a.loss=reinforce -> c.objective
c.objective=loglinear a.loss=dro -> c.objective
c.clamp.upper=2.0 a.loss=reinforce SYNC -> c.clamp.upper
c.clamp.upper=2.0 c.mask.upper=5.0 c.reject.upper=1.1 ->
c.level=sequence_mean c.clamp.upper=2.0 a.loss=gspo ->
c.level=sequence c.objective=decoupled WEIGHTED ->
c.mask.metric=k1 c.mask.lower=-1.0 c.mask.upper=1.0 ->
c.mask.metric=k3 c.mask.upper=0.1 c.clamp.upper=2.0 ->
c.objective=decoupled WEIGHTED SYNC ->
c.mask.upper=5.0 a.loss=reinforce ->
a.loss=reinforce -> a.loss
a.loss=reinforce SYNC ->
a.loss=reinforce c.mask.upper=5.0 ->
a.loss=reinforce c.reject.upper=2.0 ->
a.loss=dro ->
WEIGHTED ->
rollout.top_p=0.9 -> rollout.top_p
a.loss=gspo rollout.top_p=0.9 -> rollout.top_p
a.loss=reinforce SYNC rollout.top_p=0.9 -> rollout.top_p
a.loss=my_package.loss rollout.top_p=0.9 ->
WEIGHTED rollout.top_p=0.9 ->
WEIGHTED c.objective=decoupled c.mask.upper=5.0 rollout.top_p=0.9 ->
WEIGHTED c.clamp.upper=2.0 rollout.top_p=0.9 ->
WEIGHTED c.clamp.lower=0.5 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.mask.lower=0.5 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.mask.metric=k3 c.mask.upper=1.0 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.reject.upper=2.0 rollout.top_p=0.9 -> rollout.top_p
WEIGHTED c.objective=loglinear rollout.top_p=0.9 -> rollout.top_p
WEIGHTED IN_REWARD rollout.top_p=0.9 -> rollout.top_p
"""
CRITIC_AND_KL = r"""
a.gae_gamma=0.9 -> a.gae_gamma
a.gae_lambda=0.95 -> a.gae_lambda
a.whiten_advantages=false -> a.whiten_advantages
critic.lr=1e-05 -> critic.lr
critic.path=some/model -> critic.path
critic.shared_backbone=true -> critic.shared_backbone
a.advantage_estimator=gae a.normalize_by_std=false -> a.normalize_by_std
a.advantage_estimator=gae a.dynamic_sampling=true -> a.dynamic_sampling
a.advantage_estimator=gae a.loss=clip_cov -> a.loss
a.advantage_estimator=gae critic.value_coef=0.1 -> critic.value_coef
a.advantage_estimator=gae critic.value_clip=0.2 -> critic.value_clip
a.advantage_estimator=gae critic.warmup_steps=100 -> critic.warmup_steps
a.advantage_estimator=gae critic.shared_backbone=true critic.path=some/model -> critic.path
a.advantage_estimator=gae critic.shared_backbone=true critic.lr=1e-05 -> critic.lr
a.advantage_estimator=gae critic.shared_backbone=true critic.weight_decay=0.5 -> critic.weight_decay
a.advantage_estimator=gae critic.shared_backbone=true critic.max_grad_norm=0.5 -> critic.max_grad_norm
a.advantage_estimator=gae critic.shared_backbone=true critic.warmup_steps=5 -> critic.warmup_steps
a.advantage_estimator=gae critic.shared_backbone=true critic.updates_per_step=2 -> critic.updates_per_step
a.advantage_estimator=gae critic.shared_backbone=true critic.cpu_offload=true -> critic.cpu_offload
a.kl.apply_to=reward -> a.kl.apply_to
a.kl.estimator=k2 -> a.kl.estimator
learner.reference_cpu_offload=true -> learner.reference_cpu_offload
IN_LOSS learner.reference_cpu_offload=true model.lora.rank=8 -> learner.reference_cpu_offload
IN_LOSS a.kl.estimator=k1 -> a.kl.estimator
IN_REWARD a.kl.estimator=k1_straight_through -> a.kl.estimator
IN_REWARD a.advantage_estimator=gdpo -> a.kl.apply_to
IN_REWARD a.advantage_estimator=gpg -> a.kl.apply_to
IN_REWARD a.mask_truncated=true -> a.mask_truncated
IN_REWARD a.mask_truncated=true a.advantage_estimator=reinforce_pp -> a.mask_truncated
IN_REWARD a.dynamic_sampling=true -> a.dynamic_sampling
IN_REWARD a.loss=kl_cov -> a.loss
IN_REWARD a.advantage_estimator=gae a.loss=kl_cov -> a.loss
a.kl.reference_model=some/teacher -> a.kl.reference_model
IN_LOSS a.kl.apply_to=advantage a.kl.estimator=k3 -> a.kl.estimator
a.kl.coef=0.01 a.kl.apply_to=advantage a.kl.estimator=k1_straight_through -> a.kl.estimator
IN_ADVANTAGE a.loss=clip_cov -> a.loss
IN_ADVANTAGE a.advantage_estimator=gae a.loss=clip_cov -> a.loss
IN_ADVANTAGE a.dynamic_sampling=true -> a.dynamic_sampling
TAUGHT rollout.top_p=0.9 -> rollout.top_p
a.advantage_estimator=zero -> a.advantage_estimator
TAUGHT a.kl.reference_model=null -> a.advantage_estimator
TAUGHT a.kl.apply_to=reward a.kl.estimator=k1 -> a.kl.apply_to
TAUGHT a.overlong_buffer_tokens=4 -> a.overlong_buffer_tokens
TAUGHT a.normalize_by_std=false -> a.normalize_by_std
a.advantage_estimator=gae ->
a.advantage_estimator=gae rollout.group_size=1 a.mask_truncated=true ->
a.advantage_estimator=gae IN_REWARD a.kl.estimator=k1 a.mask_truncated=true ->
a.advantage_estimator=gae critic.updates_per_step=2 critic.value_clip=0.2 critic.warmup_steps=99 ->
a.advantage_estimator=gae critic.shared_backbone=true critic.value_coef=0.1 a.gae_lambda=0.95 ->
IN_LOSS a.loss=clip_cov ->
IN_LOSS learner.reference_cpu_offload=true a.dynamic_sampling=true ->
IN_LOSS a.kl.estimator=k1_straight_through a.mask_truncated=true ->
IN_REWARD a.advantage_estimator=reinforce a.mask_truncated=true ->
IN_REWARD a.advantage_estimator=opo a.kl.estimator=k1 ->
TAUGHT rollout.group_size=1 task.reward.name=zero a.mask_truncated=true ->
TAUGHT model.lora.rank=8 learner.reference_cpu_offload=true ->
TAUGHT a.kl.apply_to=loss a.kl.estimator=k2 ->
TAUGHT a.advantage_estimator=grpo a.mask_truncated=true ->
TAUGHT a.advantage_estimator=gdpo ->
TAUGHT a.advantage_estimator=gae critic.warmup_steps=3 ->
IN_ADVANTAGE a.advantage_estimator=rloo ->
COSINE learner.warmup_steps=60 critic.warmup_steps=30 a.advantage_estimator=gae ->
COSINE learner.warmup_steps=70 critic.warmup_steps=30 a.advantage_estimator=gae -> learner.warmup_steps
COSINE learner.warmup_steps=99 critic.warmup_steps=0 a.advantage_estimator=grpo ->
COSINE learner.warmup_steps=100 critic.warmup_steps=0 a.advantage_estimator=grpo -> learner.warmup_steps
"""
PROMPTS = r"""
FILTER ->
FILTER task.pass_threshold=0.5 task.pass_rate_cooldown_epochs=4 task.pass_rate_column=rate ->
task.pass_rate_min=0.1 ->
task.pass_rate_min=0.5 task.pass_rate_max=0.5 ->
task.pass_rate_min=0.6 task.pass_rate_max=0.5 -> task.pass_rate_min
task.pass_rate_min=0.55 task.pass_rate_max=0.6 -> task.pass_rate_min
FILTER rollout.group_size=1 a.advantage_estimator=reinforce -> task.pass_rate_min
task.pass_rate_cooldown_epochs=4 -> task.pass_rate_cooldown_epochs
task.pass_threshold=0.5 -> task.pass_threshold
task.pass_rate_column=rate -> task.pass_rate_column
CURRICULUM ->
CURRICULUM task.curriculum_epochs=3 ->
CURRICULUM FILTER task.pass_rate_column=rate ->
CURRICULUM task.pass_rate_column=rate -> task.pass_rate_column
task.curriculum=easy_to_hard task.pass_rate_column=rate ->
task.curriculum=easy_to_hard -> task.curriculum
task.curriculum_epochs=3 -> task.curriculum_epochs
task.difficulty_column=level -> task.difficulty_column
task.train_path=builtin:arithmetic CURRICULUM -> task.difficulty_column
task.train_path=builtin:arithmetic FILTER task.pass_rate_column=rate -> task.pass_rate_column
a.group_filter=my_package.filters.one a.group_filter_args={"a":1.0} ->
a.group_filter=one -> a.group_filter
a.group_filter=my_package.py:one -> a.group_filter
a.group_filter_args={"a":1.0} -> a.group_filter_args
"""
ENGINES_AND_EVALUATION = r"""
rollout.min_concurrency=4 -> rollout.min_concurrency
ADAPTIVE rollout.min_concurrency=4 ->
ADAPTIVE rollout.min_concurrency=256 -> rollout.min_concurrency
ADAPTIVE rollout.min_concurrency=9 rollout.max_concurrency=8 -> rollout.min_concurrency
rollout.max_concurrency=64 ->
ADAPTIVE rollout.max_concurrency=256 ->
ADAPTIVE rollout.max_concurrency=257 -> rollout.max_concurrency
rollout.max_concurrency=257 ->
rollout.max_concurrency=1 rollout.num_workers=2 -> rollout.max_concurrency
rollout.repack_below=8 -> rollout.repack_below
REPACKED ->
REPACKED SYNC -> rollout.repack_below
REPACKED SYNC rollout.per_request_seed=false ->
REPACKED rollout.per_request_seed=true -> rollout.repack_below
rollout.stop=["</s>","```"] rollout.stop_token_ids=[0,7] ->
rollout.stop=["</s>",""] -> rollout.stop
rollout.stop_token_ids=[7,-1] -> rollout.stop_token_ids
SAMPLED ->
SAMPLED trainer.eval_pass_k=4 ->
SAMPLED trainer.eval_pass_k=5 -> trainer.eval_pass_k
trainer.eval_samples=4 -> trainer.eval_samples
trainer.eval_temperature=0.7 ->
trainer.eval_temperature=0.005 -> trainer.eval_temperature
trainer.eval_temperature=0.7 trainer.eval_top_p=0.9 ->
trainer.eval_top_p=0.9 -> trainer.eval_top_p
task.eval_path= SAMPLED -> trainer.eval_samples trainer.eval_temperature
NO_PERIODIC trainer.eval_blocking=true -> trainer.eval_blocking
trainer.eval_blocking=true ->
trainer.eval_timeout_s=599.0 -> trainer.eval_timeout_s
trainer.eval_timeout_s=600.0 ->
task.eval_path= trainer.eval_timeout_s=600.0 -> trainer.eval_timeout_s
trainer.eval_timeout_s=599.0 task.agent=some.agent task.agent_timeout_s=60.0 ->
a.max_filtered_batches_per_step=3 ->
"""
SHARED_DEVICES = r"""
SHARED ->
SHARED mode.max_staleness=2 ->
SHARED rollout.tensor_parallel_size=1 ->
SHARED mode.in_flight=keep -> mode.in_flight
SHARED weight_sync.commit=staged weight_sync.num_slots=2 -> weight_sync.commit weight_sync.num_slots
SHARED trainer.eval_blocking=false -> trainer.eval_blocking
SHARED trainer.eval_blocking=false NO_PERIODIC ->
SHARED NO_PERIODIC ->
SHARED task.eval_path= ->
SHARED weight_sync.transport=nccl -> weight_sync.transport
SHARED weight_sync.transport=ipc ->
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
def test_what_cannot_work_or_does_nothing_is_refused_and_its_neighbours_are_not(words: str, refused: list[str]) -> None:
    assert keys_refused(config_of(words)) == refused


def test_the_defaults_have_no_problem() -> None:
    assert problems_in(RunConfig()) == []


# Estimators


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_one_answer_per_group_unless_it_compares(name: str) -> None:
    traits, words = ESTIMATORS[name], "TAUGHT" if name == "zero" else f"a.advantage_estimator={name}"  # pyright: ignore
    alone = keys_refused(config_of(f"{words} rollout.group_size=1"))
    assert alone == (["rollout.group_size"] if traits.needs_peers else [])
    assert keys_refused(config_of(f"{words} rollout.group_size=2")) == []
    sampled = keys_refused(config_of(f"{words} a.dynamic_sampling=true"))
    if traits.greedy_baseline:
        assert sampled == [] == keys_refused(config_of(f"{words} a.dynamic_sampling=true rollout.group_size=1"))
    elif not traits.needs_peers:
        assert "algorithm.dynamic_sampling" in sampled


def test_a_step_of_one_answer_cannot_be_normalised() -> None:
    sizes = "rollout.group_size=1 trainer.groups_per_step=1 learner.num_ranks=1"
    assert keys_refused(config_of(f"a.advantage_estimator=reinforce {sizes}")) == []
    assert keys_refused(config_of(f"a.advantage_estimator=reinforce_pp {sizes}")) == ["trainer.groups_per_step"]


def test_bounds_that_no_group_can_meet_are_told_with_the_group_size() -> None:
    (problem,) = check_combinations(config_of("task.pass_rate_min=0.55 task.pass_rate_max=0.6"))
    assert "a pass rate is a multiple of 1/8, and none lies in 0.55..0.6" in str(problem)


# Losses and corrections

MOVED = {
    "clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "dual_clip": 3.0, "sapo_tau_positive": 2.0, "sapo_tau_negative": 2.0,
    "cov_frac": 0.1, "cov_min": 0.5, "cov_max": 9.0, "cov_kl_coef": 2.0, "dppo_threshold": 0.3, "dro_beta": 0.3,
}  # fmt: skip


@pytest.mark.parametrize("loss", [*LOSSES, "my.loss"])
def test_a_loss_accepts_its_keys_and_refuses_all_others(loss: Any) -> None:
    assert MOVED.keys() == {key for keys in LOSS_KEYS.values() for key in keys}
    for key, value in MOVED.items():
        problems = problems_in(config_of(f"SYNC a.loss={loss} a.{key}={value}"))
        assert [p.key for p in problems] == ([] if key in LOSS_KEYS.get(loss, ()) else [f"algorithm.{key}"])
        assert all(f"algorithm.loss={loss} does not read it" in p.message for p in problems)
    assert keys_refused(config_of(f"SYNC a.loss={loss} a.entropy_coef=0.01")) == []


@pytest.mark.parametrize("loss", LOSSES)
def test_decoupled_takes_no_loss_whose_bound_would_never_act(loss: LossName) -> None:
    problems = check_combinations(config_of(f"a.loss={loss} c.objective=decoupled"))
    if loss == "importance_sampling":
        assert problems == []
        return
    (problem,) = problems
    assert problem.key == f"{PREFIX}.objective" and f"algorithm.loss={loss}" in problem.message
    assert "algorithm.loss=importance_sampling" in problem.hint
    if loss not in ("reinforce", "dro"):
        assert "always 1" in problem.message and "bypass or loglinear" in problem.hint


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_clamp_in_the_loss_must_be_of_the_ratio_that_the_loss_holds(loss: LossName, level: str) -> None:
    clamped = f"a.loss={loss} c.clamp.upper=2.0 c.level={level}"
    held = LOSSES[loss].ratio
    wrong = f"{PREFIX}.clamp.upper" if held is None else f"{PREFIX}.level"
    assert keys_refused(config_of(f"{clamped} SYNC")) == ([] if level == held else [wrong])
    if held is not None:  # beside the loss the weight may be any ratio
        assert keys_refused(config_of(f"{clamped} c.objective=loglinear")) == []


@pytest.mark.parametrize(
    ("loss", "words"),
    [("cispo", "algorithm.clip_ratio_high"), ("sapo", "gate of its own"), ("gspo", "sequence_mean")],
)
def test_a_refused_clamp_says_what_the_loss_bounds_itself(loss: str, words: str) -> None:
    (problem,) = check_combinations(config_of(f"a.loss={loss} c.clamp.upper=2.0"))
    assert words in str(problem)


def test_a_loss_of_the_user_holds_the_ratio_of_the_token_and_may_have_no_bound() -> None:
    assert loss_traits("my.loss").ratio == "token"
    assert keys_refused(config_of("a.loss=my.loss c.objective=decoupled")) == []
    assert keys_refused(config_of("a.loss=my.loss c.clamp.upper=2.0")) == []
    assert keys_refused(config_of("a.loss=my.loss c.clamp.upper=2.0 c.level=sequence")) == [f"{PREFIX}.level"]
    with pytest.raises(ValueError, match=r"algorithm\.loss must be one of"):
        loss_traits("nothing")


@pytest.mark.parametrize(("key", "numbers"), [("loss", "loss_args"), ("advantage_estimator", "advantage_args")])
def test_numbers_of_an_own_function_are_refused_with_a_built_in_one(key: str, numbers: str) -> None:
    args = f"a.{numbers}=" + '{"beta":1.0}'
    (problem,) = problems_in(config_of(args))
    assert problem.key == f"algorithm.{numbers}" and "is built in" in problem.message
    assert keys_refused(config_of(f"a.{key}=my.function {args}")) == []


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_is_accepted_and_names_its_source(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#"), f"{path.name} does not say where its numbers come from"
    keys = yaml.safe_load(text)
    if keys["name"] == "opd":
        keys["kl"]["reference_model"] = "some/teacher"  # which the user names
    config, problems = to_run_config({"algorithm": keys, "mode": {"name": "sync", "max_staleness": 0}})
    assert [*problems, *problems_in(config)] == []


def test_every_loss_has_a_recipe_or_is_a_variant_of_one() -> None:
    named = {yaml.safe_load(path.read_text()).get("loss", AlgorithmConfig().loss) for path in RECIPES.glob("*.yaml")}
    assert set(LOSSES) - named <= {"importance_sampling", "dppo_kl"}


@pytest.mark.parametrize(
    "overrides",
    [
        "algorithm=dapo correction=tis mode.max_staleness=2",
        "correction=icepop algorithm.correction.objective=decoupled algorithm.loss=importance_sampling",
        "correction=tis algorithm.correction.reject.metric=k3 algorithm.correction.reject.upper=0.1",
        "algorithm=gspo correction=tis algorithm.correction.level=sequence_mean",
        "algorithm=dapo correction=a3po",
        "algorithm=rloo correction=decoupled",
        "algorithm=dapo correction=decoupled",
        "algorithm=reinforce mode=sync",
        "algorithm=reinforce correction=mis",
        "algorithm=opd algorithm.kl.reference_model=builtin:tiny rollout.group_size=1",
        "algorithm=ppo",
    ],
)
def test_every_combination_that_the_documentation_names_is_accepted(overrides: str) -> None:
    load_config(overrides.split())


def test_distillation_without_a_teacher_says_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"there is none\n *-> set algorithm\.kl\.reference_model"):
        load_config(["algorithm=opd"])


# Engines


@pytest.mark.parametrize(
    ("argument", "value", "instead"),
    [
        ("tensor_parallel_size", 2, "rollout.tensor_parallel_size"),
        ("pipeline_parallel_size", 2, "rollout.tensor_parallel_size"),
        ("seed", 1, "seed"),
        ("max_num_seqs", 8, "rollout.max_num_seqs"),
        ("enable_lora", True, "model.lora.rank"),
        ("enable_sleep_mode", True, "mode.name"),
        ("data_parallel_size", 2, "rollout.num_replicas"),
    ],
)
def test_an_engine_argument_with_a_key_of_its_own_is_refused_with_its_name(
    argument: str, value: object, instead: str
) -> None:
    (problem,) = engine_problems(**{argument: value})
    assert (problem.key, problem.value) == ("rollout.engine_args", f"{argument}: {value}")
    assert problem.hint == f"use {instead}" and problem.related == (instead,)


@pytest.mark.parametrize(
    ("argument", "value", "why"),
    [
        ("logprobs_mode", "raw_logprobs", "correction"),
        ("worker_extension_cls", "mine.Extension", "weight sync"),
        ("skip_tokenizer_init", False, "tokens"),
        ("load_format", "auto", "weight sync"),
        ("enable_eplb", True, "expert"),
        ("hf_overrides", {"rope_theta": 1}, "config.json"),
        ("logits_processors", ["mine:Mask"], "distribution"),
        ("distributed_executor_backend", "ray", "mp, uni"),
    ],
)
def test_an_engine_argument_that_the_run_relies_on_is_refused_with_the_reason(
    argument: str, value: object, why: str
) -> None:
    (problem,) = engine_problems(**{argument: value})
    assert why in problem.message and problem.hint == "leave it out"


def engine_problems(**arguments: Any) -> list[Problem]:
    config, problems = to_run_config({"rollout": {"engine_args": arguments}})
    assert problems == []
    return check_combinations(config)


def test_every_wrong_engine_argument_is_named_and_any_other_passes() -> None:
    assert [p.value for p in engine_problems(seed=1, load_format="auto", enforce_eager=True)] == [
        "seed: 1", "load_format: auto", "enforce_eager: True",
    ]  # fmt: skip
    free = {"quantization": "fp8", "kv_cache_dtype": "fp8", "max_num_batched_tokens": 256, "async_scheduling": False}
    assert engine_problems(**free, distributed_executor_backend="mp") == []
    (problem,) = engine_problems(max_num_batched_tokens=255)
    assert problem.value == "max_num_batched_tokens: 255" and "rollout.max_num_seqs=256" in problem.message


def test_whatever_a_run_sets_for_its_engines_is_refused_unless_it_is_theirs_to_choose() -> None:
    specs = [EngineSpec(model="m", extension="a.B", sleep_level=1, lora_rank=8), EngineSpec(model="m", device="cuda")]
    ours = {name for spec in specs for name in engine_args(spec)}
    of_the_user = {"kv_cache_memory_bytes", "distributed_executor_backend"}
    assert ours - REFUSED_ENGINE_ARGS.keys() == of_the_user


# Modes and clusters

OWN_STALENESS = {"cispo_7b": 4, "dapo_7b": 4, "gspo_7b": 3, "reinforce_pp_7b": 2}
"""Shipped files that write S down themselves; it wins over that of a mode."""


def test_accelerators_have_one_rank_and_one_worker_each() -> None:
    assert not list(pairing_problems(config_of("SHARED")))
    (problem,) = pairing_problems(config_of("SHARED rollout.tensor_parallel_size=1"))
    assert problem.key == "learner.num_ranks" and "2 * 1 = 2" in problem.message


def test_the_colocated_group_sets_what_it_needs_and_own_keys_still_win() -> None:
    config = load_config(["mode=colocated", "learner.num_ranks=1", "mode.max_staleness=1"])
    assert config.mode.shares_devices and config.mode.max_staleness == 1
    assert (config.weight_sync.commit, config.weight_sync.num_slots) == ("inplace", 1)
    assert config.trainer.eval_blocking


@pytest.mark.parametrize("mode", groups([packaged_configs()])["mode"])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_takes_every_mode_or_says_which_key_makes_it(name: str, mode: str) -> None:
    asked = [f"--config-name={name}", "device=cuda", f"mode={mode}"]
    is_refused = name in OWN_STALENESS and mode in ("sync", "one_step_off")
    if is_refused:
        with pytest.raises(ConfigurationError) as caught:
            load_config(asked)
        (problem,) = caught.value.problems
        assert problem.key == "mode.max_staleness" and "--config-name" in problem.message
        asked += re.findall(r"mode\.max_staleness=\d", problem.hint)
    config = load_config(asked)
    of_mode = {"async": 1, "one_step_off": 1, "sync": 0, "colocated": 0}[mode]
    staleness = of_mode if is_refused else OWN_STALENESS.get(name, of_mode)
    assert (config.mode.name, config.mode.max_staleness) == (mode, staleness)
    warned = f"colocated, S = {staleness}: answers may span steps (mode.max_staleness=0 is on policy); "
    assert describe_rollout(config).startswith(warned) == (mode == "colocated" and staleness > 0)


@pytest.mark.parametrize("key", ["num_cpus", "object_store_gib"])
def test_the_size_of_a_cluster_belongs_to_one_that_is_started(key: str) -> None:
    assert keys_refused(config_of(f"ray.{key}=2"), written=[f"ray.{key}"]) == []
    joined = config_of(f"ray.{key}=2 ray.address=10.0.0.7:6379")
    assert keys_refused(joined, written=[f"ray.{key}"]) == [f"ray.{key}"]
    assert keys_refused(joined) == [], "a YAML file holds it for the runs that start their cluster"


@pytest.mark.parametrize("joins", [["ray.address=h:1"], ["--dry-run", "--nodes=8,8"]])
@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_configuration_joins_a_cluster(name: str, joins: list[str]) -> None:
    config, problems = resolve(parse(["--config-name", name, *joins]))
    assert not problems
    assert config.ray.address != "local"
    _, problems = resolve(parse(["--config-name", name, *joins, "ray.object_store_gib=24"]))
    assert [(problem.key, problem.value) for problem in problems] == [("ray.object_store_gib", "24")]


# Further evaluation sets

SET = "task.eval_sets.hard.path=builtin:arithmetic"


@pytest.mark.parametrize(
    ("overrides", "key", "allowed"),
    [
        ((SET, "task.eval_sets.hard.smaples=8"), "task.eval_sets.hard.smaples", "unknown key"),
        ((SET, "task.eval_sets.hard.size=many"), "task.eval_sets.hard.size", "expected integer"),
        ((SET, "task.eval_sets.hard.samples=0"), "task.eval_sets.hard.samples", "must be >= 1"),
        (("task.eval_sets.hard=builtin:arithmetic",), "task.eval_sets.hard", "expected a section with the keys path"),
        (("task.eval_sets.hard.size=3",), "task.eval_sets.hard.path", "must name held-out prompts"),
        (("task.eval_sets.reward.path=builtin:arithmetic",), "task.eval_sets", "and none of accuracy, num_prompts"),
        (("task.eval_sets._hard.path=builtin:arithmetic",), "task.eval_sets", "a name is of letters"),
        ((SET, "task.eval_path="), "task.eval_sets", "stand beside task.eval_path, which is empty"),
        (
            (SET, "trainer.eval_every=0", "trainer.eval_at_start=false", "trainer.eval_at_end=false"),
            "task.eval_sets",
            "has no effect: nothing is evaluated",
        ),
        ((SET, "task.eval_sets.hard.samples=2"), "task.eval_sets.hard.samples", "must be 1 with trainer.eval_temp"),
        (
            (
                SET, "trainer.eval_temperature=1", "trainer.eval_samples=8", "trainer.eval_pass_k=4",
                "task.eval_sets.hard.samples=3",
            ),
            "task.eval_sets.hard.samples",
            "must be at least trainer.eval_pass_k=4",
        ),
        (("task.train_path=a/b", "task.eval_path=a/b", "task.max_operand=20"), "task.max_operand", "no prompts come"),
    ],
)  # fmt: skip
def test_an_evaluation_set_that_cannot_be_is_refused_by_its_key(
    overrides: tuple[str, ...], key: str, allowed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config(["device=cpu", *overrides])
    found = {problem.key: problem.message for problem in caught.value.problems}
    assert allowed in found[key], found


def test_the_built_in_set_as_one_of_several_reads_its_own_key() -> None:
    load_config(["device=cpu", "task.train_path=a/b", "task.eval_path=a/b", "task.max_operand=20", SET])


def test_no_name_of_a_set_makes_the_metric_of_another() -> None:
    ours = [metric.name.split("/") for metric in METRICS if metric.name.startswith("eval/")]
    families = {words[1] for words in ours if words[-1] == "*"}
    assert families == set(RESERVED_NAMES)
    accuracy = find_row("eval/hard/accuracy")
    assert accuracy is not None and accuracy.name == "eval/accuracy"
    assert find_row("eval/hard/pass_at/8") is not None and find_row("eval/hard/reward/part/format") is not None
    assert find_row("eval/hard/acuracy") is None and find_row("train/hard/accuracy") is None
