"""`algorithm`: advantage estimator, policy loss, aggregation and off-policy correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    name: str = key("grpo", "Shown in logs; the parts below define the objective.")
    advantage: Literal["grpo", "rloo", "reinforce"] = key(
        "grpo", "Advantage estimator: group-normalised (GRPO), leave-one-out (RLOO), or the plain reward."
    )
    normalize_by_std: bool = key(True, "GRPO: divide by the group's standard deviation; false is Dr. GRPO.")
    loss: Literal["ppo_clip", "reinforce"] = key("ppo_clip", "Policy loss.")
    clip_low: float = key(0.2, "PPO clip: lower bound of the ratio is 1 - clip_low.", gt=0, le=1)
    clip_high: float = key(0.2, "PPO clip: upper bound of the ratio is 1 + clip_high.", gt=0)
    clip_dual: float | None = key(None, "Dual clip constant c (> 1) for negative advantages; null turns it off.", gt=1)
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = key(
        "token_mean", "How token losses become one number; the denominator is global over ranks and micro-batches."
    )
    filter_zero_variance: bool = key(
        False, "Dynamic sampling (DAPO): drop groups whose rewards are all equal, and refill them."
    )
    max_refills_per_step: int = key(
        64,
        "Refills of filtered groups, in multiples of `trainer.groups_per_step`, without one step trained "
        "before the run stops with the reason.",
        ge=1,
    )
    overlong_buffer_tokens: int = key(
        0, "DAPO overlong reward shaping: penalty grows over the last so many response tokens; 0 turns it off.", ge=0
    )
    overlong_penalty: float = key(1.0, "Largest overlong penalty.", ge=0)
    mask_truncated: bool = key(False, "DAPO overlong filtering: truncated answers carry no loss.")
