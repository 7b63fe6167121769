"""Critic, GAE and the KL to the reference: what means nothing is refused, and what is in force is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.trainer.config.test_validate import config_with, keys_refused
from trainer.config.algorithm import AlgorithmConfig, CriticConfig, KlConfig
from trainer.config.compose import load_config
from trainer.config.describe import describe_critic, describe_objective
from trainer.config.rules import check_combinations
from trainer.errors import ConfigurationError

GAE = {"algorithm__advantage": "gae"}
SHARED = {**GAE, "critic__shared_backbone": True}
IN_LOSS = {"algorithm__kl__coef": 0.01}
IN_REWARD = {**IN_LOSS, "algorithm__kl__placement": "reward"}
IN_ADVANTAGE = {**IN_LOSS, "algorithm__kl__placement": "advantage", "algorithm__kl__estimator": "k1"}
TAUGHT = {
    **IN_ADVANTAGE, "algorithm__advantage": "zero", "algorithm__kl__path": "some/teacher",
    "algorithm__loss": "importance_sampling",
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"algorithm__gae_gamma": 0.9}, "algorithm.gae_gamma"),
        ({"algorithm__gae_lambda": 0.95}, "algorithm.gae_lambda"),
        ({"algorithm__whiten_advantages": False}, "algorithm.whiten_advantages"),
        ({"critic__lr": 1e-5}, "critic.lr"),
        ({"critic__path": "some/model"}, "critic.path"),
        ({"critic__shared_backbone": True}, "critic.shared_backbone"),
        ({**GAE, "algorithm__normalize_by_std": False}, "algorithm.normalize_by_std"),
        ({**GAE, "algorithm__filter_zero_variance": True}, "algorithm.filter_zero_variance"),
        ({**GAE, "algorithm__loss": "clip_cov"}, "algorithm.loss"),
        ({**GAE, "critic__value_coef": 0.1}, "critic.value_coef"),
        ({**GAE, "critic__value_clip": 0.2}, "critic.value_clip"),
        ({**GAE, "critic__warmup_steps": 100}, "critic.warmup_steps"),
        ({**SHARED, "critic__path": "some/model"}, "critic.path"),
        ({**SHARED, "critic__lr": 1e-5}, "critic.lr"),
        ({**SHARED, "critic__weight_decay": 0.5}, "critic.weight_decay"),
        ({**SHARED, "critic__max_grad_norm": 0.5}, "critic.max_grad_norm"),
        ({**SHARED, "critic__warmup_steps": 5}, "critic.warmup_steps"),
        ({**SHARED, "critic__updates_per_step": 2}, "critic.updates_per_step"),
        ({**SHARED, "critic__cpu_offload": True}, "critic.cpu_offload"),
        ({"algorithm__kl__placement": "reward"}, "algorithm.kl.placement"),
        ({"algorithm__kl__estimator": "k2"}, "algorithm.kl.estimator"),
        ({"learner__reference_cpu_offload": True}, "learner.reference_cpu_offload"),
        ({**IN_LOSS, "learner__reference_cpu_offload": True, "model__lora__rank": 8}, "learner.reference_cpu_offload"),
        ({**IN_LOSS, "algorithm__kl__estimator": "k1"}, "algorithm.kl.estimator"),
        ({**IN_REWARD, "algorithm__kl__estimator": "k1_straight_through"}, "algorithm.kl.estimator"),
        ({**IN_REWARD, "algorithm__advantage": "gdpo"}, "algorithm.kl.placement"),
        ({**IN_REWARD, "algorithm__advantage": "gpg"}, "algorithm.kl.placement"),
        ({**IN_REWARD, "algorithm__mask_truncated": True}, "algorithm.mask_truncated"),
        (
            {**IN_REWARD, "algorithm__mask_truncated": True, "algorithm__advantage": "reinforce_pp"},
            "algorithm.mask_truncated",
        ),
        ({**IN_REWARD, "algorithm__filter_zero_variance": True}, "algorithm.filter_zero_variance"),
        ({**IN_REWARD, "algorithm__loss": "kl_cov"}, "algorithm.loss"),
        ({**IN_REWARD, **GAE, "algorithm__loss": "kl_cov"}, "algorithm.loss"),
        ({"algorithm__kl__path": "some/teacher"}, "algorithm.kl.path"),
        ({**IN_ADVANTAGE, "algorithm__kl__estimator": "k3"}, "algorithm.kl.estimator"),
        ({**IN_ADVANTAGE, "algorithm__kl__estimator": "k1_straight_through"}, "algorithm.kl.estimator"),
        ({**IN_ADVANTAGE, "algorithm__loss": "clip_cov"}, "algorithm.loss"),
        ({**IN_ADVANTAGE, **GAE, "algorithm__loss": "clip_cov"}, "algorithm.loss"),
        ({**IN_ADVANTAGE, "algorithm__filter_zero_variance": True}, "algorithm.filter_zero_variance"),
        ({**TAUGHT, "rollout__top_p": 0.9}, "rollout.top_p"),
        ({"algorithm__advantage": "zero"}, "algorithm.advantage"),
        ({**TAUGHT, "algorithm__kl__path": None}, "algorithm.advantage"),
        ({**TAUGHT, "algorithm__kl__placement": "reward"}, "algorithm.kl.placement"),
        ({**TAUGHT, "algorithm__overlong_buffer_tokens": 4}, "algorithm.overlong_buffer_tokens"),
        ({**TAUGHT, "algorithm__normalize_by_std": False}, "algorithm.normalize_by_std"),
    ],
)
def test_what_means_nothing_is_refused(keys: dict[str, Any], refused: str) -> None:
    assert keys_refused(config_with(**keys)) == [refused]


@pytest.mark.parametrize(
    "keys",
    [
        GAE,
        {**GAE, "rollout__group_size": 1, "algorithm__mask_truncated": True},
        {**GAE, **IN_REWARD, "algorithm__kl__estimator": "k1", "algorithm__mask_truncated": True},
        {**GAE, "critic__updates_per_step": 2, "critic__value_clip": 0.2, "critic__warmup_steps": 99},
        {**SHARED, "critic__value_coef": 0.1, "algorithm__gae_lambda": 0.95},
        {**IN_LOSS, "algorithm__loss": "clip_cov"},
        {**IN_LOSS, "learner__reference_cpu_offload": True, "algorithm__filter_zero_variance": True},
        {**IN_LOSS, "algorithm__kl__estimator": "k1_straight_through", "algorithm__mask_truncated": True},
        {**IN_REWARD, "algorithm__advantage": "reinforce", "algorithm__mask_truncated": True},
        {**IN_REWARD, "algorithm__advantage": "opo", "algorithm__kl__estimator": "k1"},
        {**TAUGHT, "rollout__group_size": 1, "task__reward__name": "zero", "algorithm__mask_truncated": True},
        {**TAUGHT, "model__lora__rank": 8, "learner__reference_cpu_offload": True},
        {**TAUGHT, "algorithm__kl__placement": "loss", "algorithm__kl__estimator": "k2"},
        {**TAUGHT, "algorithm__advantage": "grpo", "algorithm__mask_truncated": True},
        {**TAUGHT, "algorithm__advantage": "gdpo"},
        {**TAUGHT, **GAE, "critic__warmup_steps": 3},
        {**IN_ADVANTAGE, "algorithm__advantage": "rloo"},
    ],
)
def test_what_means_something_is_allowed(keys: dict[str, Any]) -> None:
    assert keys_refused(config_with(**keys)) == []


def test_the_preset_is_ppo_with_a_critic() -> None:
    config = load_config(["algorithm=ppo"])
    assert check_combinations(config) == []
    assert (config.algorithm.advantage, config.algorithm.loss) == ("gae", "ppo_clip")


def test_the_preset_of_distillation_needs_nothing_but_a_teacher() -> None:
    algorithm = load_config(["algorithm=opd", "algorithm.kl.path=builtin:tiny", "rollout.group_size=1"]).algorithm
    assert (algorithm.advantage, algorithm.kl.in_advantage, algorithm.kl.estimator) == ("zero", True, "k1")
    assert (algorithm.kl.coef, algorithm.loss) == (1.0, "importance_sampling")
    with pytest.raises(ConfigurationError, match=r"there is none\n *-> set algorithm\.kl\.path"):
        load_config(["algorithm=opd"])


def test_the_objective_names_the_critic_and_the_kl_where_they_act() -> None:
    told = describe_objective(AlgorithmConfig(advantage="gae", kl=KlConfig(coef=0.05, placement="reward")))
    assert told.startswith(
        "gae(gae_gamma=1, gae_lambda=1), whitened of reward - 0.05 x KL to the first policy (k3) -> ppo_clip("
    )
    told = describe_objective(AlgorithmConfig(kl=KlConfig(coef=0.001, estimator="k2")))
    assert "clip_dual=null) + 0.001 x KL to the first policy (k2) -> token_mean" in told
    assert "KL" not in describe_objective(AlgorithmConfig())
    kl = KlConfig(coef=1.0, path="some/teacher", placement="advantage", estimator="k1")
    told = describe_objective(AlgorithmConfig(advantage="zero", kl=kl))
    assert told.startswith("zero - 1 x KL to some/teacher (k1) of the token -> ppo_clip(")
    assert describe_critic(CriticConfig(), policy_lr=1e-6) == "critic: own backbone, lr 1e-05, 1 update(s) per step"
    assert describe_critic(CriticConfig(lr=1e-4, value_clip=0.2, warmup_steps=9), policy_lr=1e-6) == (
        "critic: own backbone, lr 0.0001, 1 update(s) per step, values clipped at 0.2, alone for 9 steps"
    )
    assert describe_critic(CriticConfig(shared_backbone=True), policy_lr=1e-6) == (
        "critic: value head on the policy's backbone, + 0.5 x value loss"
    )
