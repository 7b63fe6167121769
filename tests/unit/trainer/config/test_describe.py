"""What a run reports about its objective, and how its engines are used."""

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
from trainer.config.describe import describe_objective, describe_rollout, describe_run
from trainer.config.schema import LearnerConfig, RunConfig


@with_traits(EstimatorTraits(needs_peers=False, reward_to_go=True))
def declared_estimator(groups: Any, *, scale: float = 1.0) -> Any:
    return [scale * group.rewards_G for group in groups]


CORRECTION = CorrectionConfig(
    objective="decoupled",
    clamp=ClampConfig(upper=2.0),
    mask=MaskConfig(lower=0.5, upper=5.0),
    reject=RejectConfig(metric="k2", upper=0.8),
)
TEACHER = KlConfig(coef=1.0, reference_model="some/teacher", apply_to="advantage", estimator="k1")


ESTIMATOR, OWN = "advantage_estimator", f"{__name__}."
BYPASS = "engine's log-probs as old policy"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"loss": "reinforce", ESTIMATOR: "reinforce"}, f"reinforce -> reinforce() -> token_mean; {BYPASS}"),
        (
            {"clip_ratio_high": 0.28, "dynamic_sampling": True, "overlong_buffer_tokens": 4096, "mask_truncated": True},
            (
                "grpo / std -> ppo_clip(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=null) -> token_mean; "
                f"{BYPASS}; groups of equal rewards are filtered and replaced; overlong penalty of up to 1 over the "
                "last 4096 tokens; truncated responses carry no loss"
            ),
        ),
        (
            {"correction": CORRECTION, "entropy_coef": 0.01, "normalize_by_std": False, "loss": "reinforce"},
            (
                "grpo without std -> reinforce() - 0.01 x entropy -> token_mean; learner's log-probs at the start of "
                "the step as old policy, clamp [..2], mask by ratio [0.5..5], reject responses by k2 (sequence_mean) "
                "[..0.8], ratio of the token"
            ),
        ),
        (
            {ESTIMATOR: "remax", "dynamic_sampling": True, "loss": "reinforce"},
            (
                "remax (an extra greedy response per group) -> reinforce() -> token_mean; "
                f"{BYPASS}; groups of rewards equal to the greedy one are filtered and replaced"
            ),
        ),
    ],
)
def test_only_what_is_in_force_is_described(keys: dict[str, Any], expected: str) -> None:
    assert describe_objective(AlgorithmConfig(**keys)) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({ESTIMATOR: "gpg"}, "gpg(gpg_scale=nonzero_rewards) -> "),
        ({ESTIMATOR: "gdpo"}, "gdpo(every part once) -> "),
        ({ESTIMATOR: "gdpo", "gdpo_weights": {"format": 0.5, "correct": 1.0}}, "gdpo(format=0.5, correct=1) -> "),
        ({ESTIMATOR: "gae", "gae_lambda": 0.95, "whiten_advantages": False}, "gae(gae_gamma=1, gae_lambda=0.95) -> "),
        ({"loss_aggregation": "seq_mean_token_sum_norm", "loss_norm_tokens": 512}, "seq_mean_token_sum_norm(512); "),
        ({"loss_aggregation": "seq_mean_token_sum_norm"}, "seq_mean_token_sum_norm(rollout.max_response_tokens); "),
        (
            {ESTIMATOR: "gae", "kl": KlConfig(coef=0.05, apply_to="reward")},
            "gae(gae_gamma=1, gae_lambda=1), whitened of reward - 0.05 x KL to the initial policy (k3) -> ppo_clip(",
        ),
        ({"kl": KlConfig(coef=0.001, estimator="k2")}, "null) + 0.001 x KL to the initial policy (k2) -> token_mean"),
        ({ESTIMATOR: "zero", "kl": TEACHER}, "zero - 1 x KL to some/teacher (k1) of the token -> ppo_clip("),
        (
            {ESTIMATOR: f"{OWN}declared_estimator", "advantage_args": {"scale": 2.0}, "loss": "my.loss"},
            f"own {OWN}declared_estimator(scale=2) [reward_to_go] -> own my.loss() -> token_mean",
        ),
    ],
)
def test_every_number_in_force_is_described(keys: dict[str, Any], expected: str) -> None:
    assert expected in describe_objective(AlgorithmConfig(**keys))


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        (
            CriticConfig(lr=1e-4, value_clip=0.2, warmup_steps=9),
            "own backbone, lr 0.0001, 1 update(s) per step, values clipped at 0.2, alone for 9 steps",
        ),
        (CriticConfig(shared_backbone=True), "value head on the policy's backbone, + 0.5 x value loss"),
    ],
)
def test_how_the_critic_learns_is_described(critic: CriticConfig, expected: str) -> None:
    config = RunConfig(algorithm=AlgorithmConfig(advantage_estimator="gae"), critic=critic)
    assert f"critic: {expected}" in describe_run(config)
    assert not [line for line in describe_run(RunConfig(critic=critic)) if line.startswith("critic")]


def test_several_updates_per_batch_and_the_layout_of_the_ranks_are_described() -> None:
    learner = LearnerConfig(updates_per_batch=2, num_mini_batches=4, num_ranks=8, fsdp_size=4)
    found = describe_run(RunConfig(learner=learner))
    assert "updates: 8 per batch, 2 pass(es) over 4 mini-batch(es)" in found
    assert found[-1] == "learner: 8 ranks: 2 replicas of 4 shard(s)"
    assert [line.partition(":")[0] for line in describe_run(RunConfig())] == ["objective", "rollout"]


ALL, GREEDY = "all requests at once", "evaluation on builtin:arithmetic: one greedy response per prompt, pass@1"
TWICE = "evaluation on builtin:arithmetic: 2 responses per prompt at temperature 1"
SAMPLED = "trainer.eval_temperature=1 trainer.eval_samples=2 task.eval_sets="


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            "rollout.concurrency=adaptive trainer.eval_samples=4 trainer.eval_temperature=0.7 trainer.eval_top_p=0.95",
            [
                "adaptive, 1 to 128 requests per engine",
                "evaluation on builtin:arithmetic: 4 responses per prompt at temperature 0.7 and top_p 0.95, pass@4",
            ],
        ),
        ("rollout.max_concurrency=32", ["at most 32 requests per engine", GREEDY]),
        ("mode=colocated learner.num_ranks=1", [ALL, f"{GREEDY}, the learner waits for it"]),
        ("task.eval_path= trainer.stop_at_accuracy=null", [ALL, "no evaluation"]),
        (
            SAMPLED + "{hard:{path:'builtin:arithmetic',samples:8},all:{path:'builtin:arithmetic'}}",
            [ALL, f"{TWICE}, pass@2, also on hard (8 responses), all"],
        ),
    ],
)
def test_the_line_at_the_start_describes_requests_and_evaluation(overrides: str, parts: list[str]) -> None:
    assert describe_rollout(load_config(["device=cpu", *overrides.split()])) == "; ".join(parts)
