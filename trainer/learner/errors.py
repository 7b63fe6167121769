"""Errors of the learner that callers tell apart. Imports without torch."""

from __future__ import annotations

TESTED = "Qwen2, Qwen3, Qwen3-MoE, Llama or Mistral"
"""Kinds of models of which the tests say that they are trained right."""


class ModelError(Exception):
    """The policy cannot be loaded or is of a kind we cannot train. The process exits with code 2."""


class CheckpointError(Exception):
    """A checkpoint is missing, truncated, or of another model. Names the file. The process exits with code 2."""


class LearnerError(Exception):
    """A learner rank failed or did not answer in time; the whole learner group is unusable then."""


class TrainingDiverged(Exception):
    """A gradient, a value or a log-prob of the reference is not finite. Raised on every rank, before the optimizer
    touches a weight."""


class GradientsDiverged(TrainingDiverged):
    """Too many gradients in a row are not finite. Every weight is as the last step that went well has left it, and can
    be saved."""
