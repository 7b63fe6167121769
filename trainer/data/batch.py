"""What the learner trains on: samples, packed micro-batches, and the batch of one optimizer step.

Ragged numpy arrays, no padding. Shape legend: `T` tokens of a sample or of a packed micro-batch, `N` sequences in it.
Imports without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trainer.algorithms.advantages import GroupRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One token sequence of a trajectory (most have one), flattened over its turns, with an advantage for every token.

    All per-token arrays are aligned with `token_ids`: entry t speaks about predicting token t from the tokens before
    it. Entries where `loss_mask` is False (prompt and tool tokens) hold 0 and must not be used.
    """

    token_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]: True on generated tokens that are trained. Never True at index 0."""
    behaviour_logprobs: np.ndarray
    """float32[T]: as recorded by the engine when the token was sampled."""
    advantages: np.ndarray
    """float32[T]"""
    versions: np.ndarray
    """int32[T]: policy version that sampled the token; -1 outside `loss_mask`."""
    rewards: np.ndarray
    """float32[T]: of each turn at its last generated token, of the outcome (after shaping) at the last one of all."""
    answer: int
    """Counts the judged answers of the step, whether they are trained or not; the same for all sequences of one."""
    group_id: int
    sample_index: int
    reward: float
    """Of the whole trajectory."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """What the learner finishes the advantages of a micro-batch from."""

    rewards: np.ndarray
    """float32[T]: see `TrainSample.rewards`."""
    answers: np.ndarray
    """int32[N]: `TrainSample.answer` of every sequence; -1 for a filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRewards:
    """What the learner has to know of the whole step to finish its advantages; the same on every rank."""

    groups: tuple[GroupRewards, ...]
    """Of all judged answers in the order of their numbers, for estimators that compare answers."""
    num_loss_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples packed end to end. A micro-batch of a rank that ran out of samples has no loss token but is not empty:
    every rank must run the same number of forward passes, or FSDP would hang."""

    cu_seqlens: np.ndarray
    """int32[N+1]: sequence i is `[cu_seqlens[i], cu_seqlens[i+1])`."""
    token_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]"""
    behaviour_logprobs: np.ndarray
    """float32[T]"""
    versions: np.ndarray
    """int32[T]: policy version that sampled the token; -1 outside `loss_mask`."""
    advantages: np.ndarray
    """float32[T]; 0 where the learner has to finish them."""
    loss_weights: np.ndarray
    """float32[T]: share of each token in the step's loss: 1 / (global denominator) as the aggregation defines it,
    0 outside `loss_mask`. The loss of the whole step is the plain sum of weight x token loss over all ranks and
    micro-batches, so it cannot depend on how the batch was split."""
    cov_selected: np.ndarray | None = None
    """bool[T]: tokens chosen for their covariance over the whole step; None with a loss that chooses none."""
    unfinished: TokenRewards | None = None
    """None where `advantages` are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one optimizer step needs. `micro_batches[rank]` has the same length for every rank."""

    step: int
    """Version of the policy that this step updates; the result is version `step + 1`."""
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    num_samples: int
    """Answers; each is one token sequence or several."""
    num_tokens: int
    num_loss_tokens: int
    rewards: StepRewards | None = None
    """None where the advantages of the micro-batches are final."""
