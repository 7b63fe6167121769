"""The effective objective of a run in a few words: what is really in force, and nothing that is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.describe import value_text
from trainer.config.estimators import ESTIMATORS
from trainer.config.loss_keys import LOSS_KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainer.config.schema.algorithm import AlgorithmConfig
    from trainer.config.schema.correction import CorrectionConfig


def describe_objective(algorithm: AlgorithmConfig) -> str:
    """One line: estimator, loss with its numbers, aggregation, correction, and what happens to samples.

    Example: `grpo / std -> ppo_clip(clip_low=0.2, clip_high=0.28, clip_dual=null) -> token_mean; engine's log-probs as
    old policy`.
    """
    traits = ESTIMATORS[algorithm.advantage]
    estimator: str = algorithm.advantage
    if traits.reads_normalize_by_std:
        estimator += " / std" if algorithm.normalize_by_std else " without std"
    loss = f"{algorithm.loss}({_values(algorithm, LOSS_KEYS[algorithm.loss])})"
    if algorithm.entropy_coef > 0:
        loss += f" - {value_text(algorithm.entropy_coef)} x entropy"
    parts = [f"{estimator} -> {loss} -> {algorithm.aggregation}", _correction(algorithm.correction)]
    if algorithm.filter_zero_variance:
        parts.append("groups of equal rewards are filtered and refilled")
    if algorithm.overlong_buffer_tokens:
        parts.append(f"overlong penalty over the last {algorithm.overlong_buffer_tokens} tokens")
    if algorithm.mask_truncated:
        parts.append("truncated answers carry no loss")
    return "; ".join(parts)


def _correction(correction: CorrectionConfig) -> str:
    olds = {
        "bypass": "engine's log-probs as old policy",
        "decoupled": "learner's log-probs at the start of the step as old policy",
        "loglinear": "old policy interpolated by the age of the token",
    }
    actions = {
        "clamp": correction.clamp,
        f"mask by {correction.mask.metric}": correction.mask,
        f"reject answers by {correction.reject.metric} ({correction.reject.level})": correction.reject,
    }
    parts = [olds[correction.objective]]
    parts += [f"{name} [{_bounds(one.lower, one.upper)}]" for name, one in actions.items() if one.is_active]
    if len(parts) > 1 or correction.objective != "bypass":
        parts.append(f"ratio of the {correction.level}")
    return ", ".join(parts)


def _bounds(lower: float | None, upper: float | None) -> str:
    return f"{'' if lower is None else value_text(lower)}..{'' if upper is None else value_text(upper)}"


def _values(algorithm: AlgorithmConfig, keys: Iterable[str]) -> str:
    return ", ".join(f"{key}={value_text(getattr(algorithm, key))}" for key in keys)
