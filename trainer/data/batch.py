"""The shapes that a learner's step is made of, and how sequences are packed into micro-batches. Without torch.

Ragged numpy arrays, no padding. Shape legend: `T` tokens of a sample or of a packed micro-batch, `N` sequences in it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.algorithms.advantages import GroupRewards


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence of a trajectory (most have one), flattened over its turns, with an advantage for every token.

    All per-token arrays are aligned with `token_ids`: entry t is about predicting token t from the tokens before it.
    Entries where `loss_mask` is False (prompt and tool tokens) hold 0 and must not be used.
    """

    token_ids: np.ndarray
    """int32[T]"""
    loss_mask: np.ndarray
    """bool[T]: True on generated tokens that are trained. Never True at index 0."""
    behavior_logprobs: np.ndarray
    """float32[T]: as recorded by the engine when the token was sampled."""
    advantages: np.ndarray
    """float32[T]"""
    versions: np.ndarray
    """int32[T]: policy version that sampled the token; -1 outside `loss_mask`."""
    rewards: np.ndarray
    """float32[T]: of each turn at its last generated token, of the outcome (after shaping) at the last one of all."""
    response_index: int
    """Counts the scored responses of the step, trained or not; the same for all sequences of one response."""
    group_id: int
    sample_index: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


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
    behavior_logprobs: np.ndarray
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
    token_rewards: np.ndarray | None = None
    """float32[T]: `Sample.rewards`, from which the learner finishes the advantages; None where they are final."""
    response_index: np.ndarray | None = None
    """int32[N]: `Sample.response_index`, -1 in an empty micro-batch; None where advantages are final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one optimizer step needs. `micro_batches[rank]` has the same length for every rank."""

    step: int
    """From 0."""
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    num_samples: int
    """Responses; each is one token sequence or several."""
    num_sequences: int
    num_tokens: int
    num_loss_tokens: int
    group_rewards: tuple[GroupRewards, ...] | None = None
    """Of all scored responses in the order of `Sample.response_index`, the same on every rank, where the learner
    finishes the advantages. None where the advantages of the micro-batches are final."""
    excluded: Mapping[str, int] = field(default_factory=dict[str, int])
    """Reason -> number of trajectories that are not in the batch."""
    packing_efficiency: float = 1.0
    """Tokens of an average rank over those of the fullest: 1 is perfect balance."""


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Balances samples over ranks by token count, then packs each rank's samples into micro-batches.

    Micro-batches hold at most `max_tokens`; a sample longer than that gets one to itself. There are as few as possible,
    and a rank spreads its samples evenly over them, longest first, so that the k-th micro-batches of all ranks (which
    wait for each other) take about the same time. Raises ValueError if `num_ranks` or `max_tokens` is below 1, or
    a sample has no tokens.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens per micro-batch must be >= 1, got {max_tokens}; set it to at least one sequence")
    ranks = balance(lengths, num_ranks=num_ranks)
    packed = [first_fit_decreasing(lengths, members, max_tokens=max_tokens) for members in ranks]
    num_micro_batches = max(1, *(len(bins) for bins in packed))

    def total(members: Sequence[int]) -> int:
        return sum(lengths[i] for i in members)

    plan: list[list[list[int]]] = []
    for members, bins in zip(ranks, packed, strict=True):
        even = _spread(lengths, members, num_bins=num_micro_batches)
        chosen = even if all(total(b) <= max_tokens or len(b) == 1 for b in even) else bins
        chosen = sorted((sorted(b) for b in chosen if b), key=lambda b: (-total(b), b))
        plan.append(chosen + [[] for _ in range(num_micro_batches - len(chosen))])
    return plan


def balance(lengths: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Sample indices of each rank, longest sample first to the rank with the fewest tokens so far (LPT, Graham 1969).

    The most and the least loaded rank differ by at most the longest sample, and the most loaded one is at most 4/3 of
    the optimum. Raises ValueError if `num_ranks` is below 1, or a sample has no tokens.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"every sample needs at least one token, got a length of {min(lengths)}")
    return _spread(lengths, range(len(lengths)), num_bins=num_ranks)


def first_fit_decreasing(lengths: Sequence[int], members: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Bins of at most `max_tokens` (Johnson 1973: at most 11/9 of the fewest, plus one). Longer samples are alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _longest_first(lengths, members):
        length = lengths[index]
        slot = next((b for b, room in enumerate(free) if room >= length), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[slot].append(index)
        free[slot] -= length
    return bins


def _spread(lengths: Sequence[int], members: Sequence[int], *, num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    loads = [(0, b) for b in range(num_bins)]
    for index in _longest_first(lengths, members):
        load, b = loads[0]
        bins[b].append(index)
        heapq.heapreplace(loads, (load + lengths[index], b))
    return bins


def _longest_first(lengths: Sequence[int], members: Sequence[int]) -> list[int]:
    return sorted(members, key=lambda i: (-lengths[i], i))
