"""Configurations for 7B models hold the numbers that were published, and say where."""

from __future__ import annotations

import re
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest

from trainer.config.compose import load_config
from trainer.config.describe import describe_objective
from trainer.config.presets import config_names, packaged_configs

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

NAMES = [name for name in config_names(packaged_configs()) if name.endswith("_7b")]

PUBLISHED: dict[str, dict[str, Any]] = {
    "ppo_7b": {
        "algorithm.advantage": "gae", "algorithm.gae_gamma": 1.0, "algorithm.gae_lambda": 1.0, "algorithm.kl.coef": 0.0,
        "critic.lr": 5e-6, "critic.weight_decay": 0.0, "learner.lr": 1e-6, "learner.warmup_steps": 50,
        "learner.weight_decay": 0.0, "learner.beta2": 0.95, "rollout.group_size": 64, "trainer.groups_per_step": 128,
        "task.max_prompt_tokens": 2048, "rollout.max_response_tokens": 8000,
    },
    "grpo_7b": {
        "algorithm.kl.coef": 0.04, "algorithm.kl.placement": "loss", "algorithm.kl.estimator": "k3",
        "algorithm.normalize_by_std": True, "algorithm.aggregation": "seq_mean_token_mean", "learner.lr": 1e-6,
        "rollout.group_size": 64, "trainer.groups_per_step": 16, "rollout.max_response_tokens": 1024,
    },
    "dapo_7b": {
        "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.kl.coef": 0.0,
        "algorithm.aggregation": "token_mean", "algorithm.filter_zero_variance": True,
        "algorithm.overlong_buffer_tokens": 4096, "algorithm.overlong_penalty": 1.0, "task.max_prompt_tokens": 2048,
        "rollout.max_response_tokens": 20480, "rollout.group_size": 16, "trainer.groups_per_step": 32,
        "learner.lr": 1e-6, "learner.warmup_steps": 10, "learner.weight_decay": 0.1,
    },
    "gspo_7b": {
        "algorithm.loss": "gspo", "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4, "algorithm.kl.coef": 0.0,
        "algorithm.aggregation": "seq_mean_token_mean", "mode.max_staleness": 3, "learner.lr": 1e-6,
        "learner.weight_decay": 0.1, "rollout.group_size": 16, "trainer.groups_per_step": 128,
    },
    "cispo_7b": {
        "algorithm.loss": "cispo", "algorithm.clip_low": 1.0, "algorithm.clip_high": 4.0, "algorithm.kl.coef": 0.0,
        "algorithm.filter_zero_variance": True, "rollout.group_size": 16, "learner.beta2": 0.95, "learner.eps": 1e-15,
    },
    "reinforce_pp_7b": {
        "algorithm.advantage": "reinforce_pp_baseline", "algorithm.kl.coef": 1e-5, "algorithm.kl.estimator": "k2",
        "algorithm.correction.mask.lower": 0.5, "algorithm.correction.mask.upper": 5.0, "learner.lr": 5e-7,
        "learner.lr_schedule": "cosine", "learner.min_lr_frac": 0.1, "learner.warmup_steps": 15,
        "learner.weight_decay": 0.0, "learner.beta2": 0.95, "rollout.group_size": 8, "trainer.groups_per_step": 128,
    },
}  # fmt: skip


def config_of(name: str) -> RunConfig:
    return load_config([f"--config-name={name}", "device=cuda"])


@pytest.mark.parametrize("name", config_names(packaged_configs()))
def test_every_configuration_loads_and_has_its_own_name(name: str) -> None:
    config = load_config([f"--config-name={name}", "device=cpu"])
    assert config.name == name
    assert describe_objective(config.algorithm)


def test_every_algorithm_of_a_7b_run_is_here() -> None:
    assert set(NAMES) == PUBLISHED.keys()


@pytest.mark.parametrize("name", NAMES)
def test_it_has_the_published_numbers(name: str) -> None:
    config = config_of(name)
    got = {key: reduce(getattr, key.split("."), config) for key in PUBLISHED[name]}
    assert got == PUBLISHED[name]


@pytest.mark.parametrize("name", NAMES)
def test_it_names_the_paper_that_its_numbers_come_from(name: str) -> None:
    comment = "\n".join(re.findall(r"^#.*", (packaged_configs() / f"{name}.yaml").read_text(), re.MULTILINE))
    assert re.search(r"arXiv:\d{4}\.\d{5}", comment)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_small_recipe_takes_one_device_and_compiles_nothing(device: str) -> None:
    config = load_config(["--config-name=grpo_small", f"device={device}", "model.path=owner/mine"])
    assert (config.learner.num_ranks, config.rollout.num_replicas, config.rollout.num_workers) == (1, 1, 1)
    assert config.mode.shares_devices and not config.learner.compile
    assert config.ray.object_store_gib < 1
