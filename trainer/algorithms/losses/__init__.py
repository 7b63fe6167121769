"""Policy losses, one value per token: pure functions of `LossInputs`, in float32; the caller sums weight x loss."""

from trainer.algorithms.losses.choice import policy_loss
from trainer.algorithms.losses.inputs import LossInputs, LossStats

__all__ = ["LossInputs", "LossStats", "policy_loss"]
