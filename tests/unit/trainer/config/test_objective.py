"""What a run says it optimises."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.config.algorithm import (
    AlgorithmConfig,
    ClampConfig,
    CorrectionConfig,
    EstimatorTraits,
    MaskConfig,
    RejectConfig,
    with_traits,
)
from trainer.config.describe import describe_objective


def test_only_what_is_in_force_is_named() -> None:
    assert describe_objective(AlgorithmConfig(loss="reinforce", advantage="reinforce")) == (
        "reinforce -> reinforce() -> token_mean; engine's log-probs as old policy"
    )


def test_dapo_is_told_with_its_numbers() -> None:
    dapo = AlgorithmConfig(clip_high=0.28, filter_zero_variance=True, overlong_buffer_tokens=4096, mask_truncated=True)
    assert describe_objective(dapo) == (
        "grpo / std -> ppo_clip(clip_low=0.2, clip_high=0.28, clip_dual=null) -> token_mean; engine's log-probs as old "
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
        "grpo without std -> ppo_clip(clip_low=0.2, clip_high=0.2, clip_dual=null) - 0.01 x entropy -> token_mean; "
        "learner's log-probs at the start of the step as old policy, clamp [..2], mask by ratio [0.5..5], "
        "reject answers by k2 (sequence_mean) [..0.8], ratio of the token"
    )


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"advantage": "gpg"}, "gpg(gpg_scale=nonzero_rewards) -> "),
        ({"advantage": "gdpo"}, "gdpo(every part once) -> "),
        ({"advantage": "gdpo", "gdpo_weights": {"format": 0.5, "correct": 1.0}}, "gdpo(format=0.5, correct=1) -> "),
        ({"advantage": "gae", "gae_lambda": 0.95, "whiten_advantages": False}, "gae(gae_gamma=1, gae_lambda=0.95) -> "),
        ({"aggregation": "seq_mean_token_sum_norm", "aggregation_norm_tokens": 512}, "seq_mean_token_sum_norm(512); "),
        ({"aggregation": "seq_mean_token_sum_norm"}, "seq_mean_token_sum_norm(rollout.max_response_tokens); "),
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
    line = describe_objective(AlgorithmConfig(advantage=path, advantage_args=args, loss="my.loss"))
    assert line.startswith(f"own {path}{told} -> own my.loss() -> token_mean")
