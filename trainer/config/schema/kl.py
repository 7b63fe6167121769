"""`algorithm.kl`: what holds the policy near another model, the reference: its own beginning, or a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.field import key

KlEstimator = Literal["k1", "k2", "k3", "k1_straight_through", "k3_straight_through"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KlConfig:
    coef: float = key(
        0.0,
        "Weight of the KL divergence of the policy to the reference; 0 keeps no reference.",
        ge=0,
    )
    path: str | None = key(
        None,
        "The reference: a Hugging Face model directory or hub name, of any architecture with the policy's tokens (a "
        "teacher); null takes the policy that the run began with.",
        is_path=True,
    )
    placement: Literal["loss", "reward", "advantage"] = key(
        "loss",
        "`loss` adds the KL of the policy being trained to every token's loss (GRPO); `reward` takes the KL of the "
        "policy that sampled off every token's reward, so that the advantages see it (PPO for RLHF); `advantage` takes "
        "it off the token's own advantage, whatever the estimator (on-policy distillation).",
    )
    estimator: KlEstimator = key(
        "k3",
        "From one sampled token, with d = log policy - log reference: k1 = d (not in the loss; the only one in the "
        "advantage), k2 = d^2 / 2, "
        "k3 = exp(-d) - 1 + d; the straight-through forms (only in the loss) have the value of k1 or k3 and the "
        "gradient of k2, which is that of the KL.",
    )

    @property
    def in_loss(self) -> bool:
        return self.coef > 0 and self.placement == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coef > 0 and self.placement == "reward"

    @property
    def in_advantage(self) -> bool:
        return self.coef > 0 and self.placement == "advantage"
