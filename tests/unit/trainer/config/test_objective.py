"""What a run says it optimises."""

from __future__ import annotations

from trainer.config.objective import describe_objective
from trainer.config.schema.algorithm import AlgorithmConfig
from trainer.config.schema.correction import ClampConfig, CorrectionConfig, MaskConfig, RejectConfig


def test_only_what_is_in_force_is_named() -> None:
    assert describe_objective(AlgorithmConfig(loss="reinforce", advantage="reinforce")) == (
        "reinforce -> reinforce() -> token_mean; engine's log-probs as old policy"
    )


def test_dapo_is_told_with_its_numbers() -> None:
    dapo = AlgorithmConfig(clip_high=0.28, filter_zero_variance=True, overlong_buffer_tokens=4096, mask_truncated=True)
    assert describe_objective(dapo) == (
        "grpo / std -> ppo_clip(clip_low=0.2, clip_high=0.28, clip_dual=null) -> token_mean; engine's log-probs as old "
        "policy; groups of equal rewards are filtered and refilled; overlong penalty over the last 4096 tokens; "
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
