"""`critic`: the value function of PPO. Read with `algorithm.advantage=gae` only."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.field import key

DEFAULT_LR_RATIO = 10.0
"""Peak learning rate of the critic over that of the policy, if `lr` is null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    path: str | None = key(
        None,
        "Hugging Face model directory or hub name that the critic's backbone starts from, with the policy's tokens; "
        "null takes `model.path`. Its output matrix is not used: a value head that starts at 0 is.",
        is_path=True,
    )
    shared_backbone: bool = key(
        False,
        "Put the value head on the policy's own hidden states. Both losses then train one model with one optimizer: "
        "no second model in memory, but the two tasks share weights.",
    )
    value_coef: float = key(
        0.5, "With `shared_backbone`: weight of the value loss beside the policy loss (PPO's c1).", gt=0
    )
    lr: float | None = key(
        None,
        "Peak learning rate of the critic; null takes 10 times `learner.lr`. It follows `learner.lr_schedule` and "
        "`learner.warmup_steps`.",
        gt=0,
    )
    weight_decay: float = key(0.01, "AdamW weight decay of the critic (not on norms and biases).", ge=0)
    max_grad_norm: float = key(1.0, "Gradient norm of the critic is clipped to this.", gt=0)
    warmup_steps: int = key(
        0,
        "First steps that train the critic alone. The policy is not computed; its version counts on with unchanged "
        "weights, and its learning-rate schedule starts after them.",
        ge=0,
    )
    updates_per_step: int = key(
        1,
        "Optimizer updates of the critic per step, each over the whole batch towards the same returns. The policy "
        "makes one.",
        ge=1,
    )
    value_clip: float | None = key(
        None,
        "Largest distance that a value may win by moving from where it was when the advantages were computed; null "
        "does not clip. The first update of a step starts there, so only `updates_per_step` > 1 is ever clipped.",
        gt=0,
    )
    cpu_offload: bool = key(
        False, "Keep the critic's parameters and optimizer state in host memory (FSDP2 CPU offload)."
    )
