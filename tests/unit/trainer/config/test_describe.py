"""What a run says it optimises, and how its engines are used."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.algorithm import (
    AlgorithmConfig,
    ClampConfig,
    CorrectionConfig,
    CriticConfig,
    EstimatorTraits,
    KlConfig,
    MaskConfig,
    RejectConfig,
    with_traits,
)
from trainer.config.compose import load_config
from trainer.config.describe import describe_critic, describe_objective, describe_rollout
from trainer.config.docs import configuration_markdown
from trainer.config.schema import RunConfig, TaskConfig


def test_only_what_is_in_force_is_named() -> None:
    assert describe_objective(AlgorithmConfig(loss="reinforce", advantage_estimator="reinforce")) == (
        "reinforce -> reinforce() -> token_mean; engine's log-probs as old policy"
    )


def test_dapo_is_told_with_its_numbers() -> None:
    dapo = AlgorithmConfig(
        clip_ratio_high=0.28, dynamic_sampling=True, overlong_buffer_tokens=4096, mask_truncated=True
    )
    assert describe_objective(dapo) == (
        "grpo / std -> ppo_clip(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=null) -> token_mean; "
        "engine's log-probs as old "
        "policy; groups of equal rewards are filtered and refilled; overlong penalty of up to 1 over the last "
        "4096 tokens; "
        "truncated answers carry no loss"
    )


def test_every_action_of_a_correction_is_told_with_its_bounds() -> None:
    correction = CorrectionConfig(
        objective="decoupled",
        clamp=ClampConfig(upper=2.0),
        mask=MaskConfig(lower=0.5, upper=5.0),
        reject=RejectConfig(metric="k2", upper=0.8),
    )
    told = describe_objective(AlgorithmConfig(correction=correction, entropy_coef=0.01, normalize_by_std=False))
    assert told == (
        "grpo without std -> ppo_clip(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip=null) - 0.01 x entropy -> "
        "token_mean; "
        "learner's log-probs at the start of the step as old policy, clamp [..2], mask by ratio [0.5..5], "
        "reject answers by k2 (sequence_mean) [..0.8], ratio of the token"
    )


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"advantage_estimator": "gpg"}, "gpg(gpg_scale=nonzero_rewards) -> "),
        ({"advantage_estimator": "gdpo"}, "gdpo(every part once) -> "),
        (
            {"advantage_estimator": "gdpo", "gdpo_weights": {"format": 0.5, "correct": 1.0}},
            "gdpo(format=0.5, correct=1) -> ",
        ),
        (
            {"advantage_estimator": "gae", "gae_lambda": 0.95, "whiten_advantages": False},
            "gae(gae_gamma=1, gae_lambda=0.95) -> ",
        ),
        ({"loss_aggregation": "seq_mean_token_sum_norm", "loss_norm_tokens": 512}, "seq_mean_token_sum_norm(512); "),
        ({"loss_aggregation": "seq_mean_token_sum_norm"}, "seq_mean_token_sum_norm(rollout.max_response_tokens); "),
        (
            {"overlong_buffer_tokens": 8, "overlong_penalty": 0.5},
            "overlong penalty of up to 0.5 over the last 8 tokens",
        ),
    ],
)
def test_every_number_in_force_is_told(keys: dict[str, Any], told: str) -> None:
    assert told in describe_objective(AlgorithmConfig(**keys))


def plain_estimator(groups: Any) -> Any:
    return [group.rewards_G for group in groups]


@with_traits(EstimatorTraits(needs_peers=False, reward_to_go=True))
def declared_estimator(groups: Any, *, scale: float = 1.0) -> Any:
    return [scale * group.rewards_G for group in groups]


@with_traits(EstimatorTraits(needs_peers=False))
def modest_estimator(groups: Any) -> Any:
    return [group.rewards_G for group in groups]


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("plain_estimator", {}, "() [needs_peers, spans_step]"),
        ("declared_estimator", {"scale": 2.0}, "(scale=2) [reward_to_go]"),
        ("modest_estimator", {}, "() [no trait]"),
    ],
)
def test_an_own_estimator_is_told_with_what_it_declares(name: str, args: dict[str, float], told: str) -> None:
    path = f"{__name__}.{name}"
    line = describe_objective(AlgorithmConfig(advantage_estimator=path, advantage_args=args, loss="my.loss"))
    assert line.startswith(f"own {path}{told} -> own my.loss() -> token_mean")


def test_the_objective_names_the_critic_and_the_kl_where_they_act() -> None:
    told = describe_objective(AlgorithmConfig(advantage_estimator="gae", kl=KlConfig(coef=0.05, apply_to="reward")))
    assert told.startswith(
        "gae(gae_gamma=1, gae_lambda=1), whitened of reward - 0.05 x KL to the first policy (k3) -> ppo_clip("
    )
    told = describe_objective(AlgorithmConfig(kl=KlConfig(coef=0.001, estimator="k2")))
    assert "dual_clip=null) + 0.001 x KL to the first policy (k2) -> token_mean" in told
    assert "KL" not in describe_objective(AlgorithmConfig())
    kl = KlConfig(coef=1.0, reference_model="some/teacher", apply_to="advantage", estimator="k1")
    told = describe_objective(AlgorithmConfig(advantage_estimator="zero", kl=kl))
    assert told.startswith("zero - 1 x KL to some/teacher (k1) of the token -> ppo_clip(")
    assert describe_critic(CriticConfig(), policy_lr=1e-6) == "critic: own backbone, lr 1e-05, 1 update(s) per step"
    assert describe_critic(CriticConfig(lr=1e-4, value_clip=0.2, warmup_steps=9), policy_lr=1e-6) == (
        "critic: own backbone, lr 0.0001, 1 update(s) per step, values clipped at 0.2, alone for 9 steps"
    )
    assert describe_critic(CriticConfig(shared_backbone=True), policy_lr=1e-6) == (
        "critic: value head on the policy's backbone, + 0.5 x value loss"
    )


def test_the_objective_names_the_greedy_answer() -> None:
    config = load_config(["algorithm=remax", "algorithm.dynamic_sampling=true"])
    assert describe_objective(config.algorithm) == (
        "remax (one more, greedy answer per group) -> "
        "ppo_clip(clip_ratio_low=0.2, clip_ratio_high=0.2, dual_clip=null) -> "
        "token_mean; engine's log-probs as old policy; groups of rewards equal to the greedy one are filtered and "
        "refilled"
    )


def test_the_line_at_the_start_says_what_is_in_force() -> None:
    config = load_config(
        [
            "rollout.concurrency=adaptive",
            "rollout.max_num_seqs=128",
            "trainer.eval_samples=4",
            "trainer.eval_temperature=0.7",
            "trainer.eval_top_p=0.95",
        ]
    )
    assert describe_rollout(config) == (
        "adaptive, 1 to 128 requests per engine; evaluation on builtin:arithmetic: 4 answers per prompt at temperature "
        "0.7 and top_p 0.95, pass@4"
    )
    config = load_config(["rollout.max_concurrency=32", "trainer.eval_blocking=true"])
    assert describe_rollout(config) == (
        "at most 32 requests per engine; evaluation on builtin:arithmetic: one greedy answer per prompt, pass@1, the "
        "learner waits for it"
    )
    assert describe_rollout(RunConfig(task=TaskConfig(eval_path=""))) == "all requests at once; no evaluation"


def test_a_colocated_run_on_policy_is_told_nothing_of_it() -> None:
    told = describe_rollout(load_config(["mode=colocated", "learner.num_ranks=1"]))
    evaluation = "evaluation on builtin:arithmetic: one greedy answer per prompt, pass@1, the learner waits for it"
    assert told == f"all requests at once; {evaluation}"


def test_the_start_of_a_run_and_the_documentation_name_them() -> None:
    sets = "task.eval_sets={hard: {path: 'builtin:arithmetic', samples: 8}, all: {path: 'builtin:arithmetic'}}"
    told = describe_rollout(load_config(["device=cpu", "trainer.eval_temperature=1", "trainer.eval_samples=2", sets]))
    assert (
        "evaluation on builtin:arithmetic: 2 answers per prompt at temperature 1, pass@2, also on hard (8 answers), all"
        in told
    )
    assert "| `task.eval_sets.NAME.samples` | integer or null, >= 1 |" in configuration_markdown()
