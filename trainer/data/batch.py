"""The shapes that a learner's step is made of, and how sequences are packed into micro-batches. Without torch.

Ragged numpy arrays, no padding. Shape legend: `T` tokens of a sample or of a packed micro-batch, `N` sequences in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

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
    rewards: np.ndarray | None
    """float32[T]: of each turn at its last generated token, of the outcome (after shaping) at the last one of all. None
    where the advantages are final."""
    num_loss_tokens: int
    response_index: int
    """Counts the scored responses of the step, trained or not; the same for all sequences of one response."""
    group_id: int
    sample_index: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


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
    """float32[T]: share of each token in the loss of its update: 1 / (global denominator) as the aggregation defines
    it, 0 outside `loss_mask`. The loss of an update is the plain sum of weight x token loss over all ranks and its
    micro-batches, so it cannot depend on how its mini-batch was split."""
    cov_selected: np.ndarray | None = None
    """bool[T]: tokens chosen for their covariance over the whole step; None with a loss that chooses none."""
    token_rewards: np.ndarray | None = None
    """float32[T]: `Sample.rewards`, from which the learner finishes the advantages; None where they are final."""
    response_index: np.ndarray | None = None
    """int32[N]: `Sample.response_index`, -1 in an empty micro-batch; None where advantages are final."""
    prefix_lens: np.ndarray | None = None
    """int32[N]: how many first tokens a sequence shares with the last one before it that shares none (0). They are
    computed once, with that one, and are in all other arrays for each sequence. None: nothing is shared."""
    is_copy: bool = False
    """Another rank of the context group counts it in the sums of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Everything one step needs. `micro_batches[rank]` has the same length for every rank."""

    step: int
    """From 0."""
    micro_batches: tuple[tuple[MicroBatch, ...], ...]
    """Those of a mini-batch are next to each other."""
    updates: tuple[tuple[int, int], ...] = ()
    """Of each optimizer update of the step, in order: its mini-batch, as the range (start, stop) of every rank's
    micro-batches. Empty: one update over all of them."""
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
    balance_frac: float = 1.0
    """As `balance_frac` of its plan: 1 where no rank waits for another."""
    num_shared_tokens: int = 0
    """Of `num_tokens`, those that are computed with another sequence."""


class SharedPrompts(NamedTuple):
    """The prompts of a step; samples of one group that begin with the same tokens have the same one."""

    of_sample: Sequence[int]
    """Which prompt a sample has."""
    lengths: Sequence[int]
    """Tokens of each prompt, fewer than its samples have; 0 where nothing can be shared."""
    costs: Sequence[float]
    """Of computing each of them, as those of samples."""


SHARING_GAIN = 0.02
"""Share of a step that shared prompts must save to be shared: attention with other keys than queries costs a little."""


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, max_tokens: int, costs: Sequence[float] | None = None
) -> list[list[list[int]]]:
    """Sample indices of each rank's micro-batches: as few as possible, and each of about the same cost.

    A micro-batch holds at most `max_tokens`; a sample longer than that gets one to itself. Samples go to the cheapest
    micro-batch of all ranks, the most expensive ones first (LPT, Graham 1969). Ranks wait for each other in each of
    their micro-batches, so the k-th ones of all ranks are neighbours by cost: in a whole step a rank waits at most for
    the difference between the most and the least expensive one.

    Args:
        lengths: tokens of each sample, >= 1.
        costs: of each sample, > 0, in any unit; None: its tokens.

    Raises:
        ValueError: `num_ranks` or `max_tokens` is below 1, or a sample has no tokens.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens per micro-batch must be >= 1, got {max_tokens}; set it to at least one sequence")
    if lengths and min(lengths) < 1:
        raise ValueError(f"every sample needs at least one token, got a length of {min(lengths)}")
    costs = lengths if costs is None else costs
    fewest = first_fit_decreasing(lengths, max_tokens=max_tokens)
    num_bins = max(1, -(-len(fewest) // num_ranks)) * num_ranks
    bins = _even(lengths, costs, num_bins=num_bins, max_tokens=max_tokens) or fewest
    bins = sorted((sorted(b) for b in bins if b), key=lambda b: (-sum(costs[i] for i in b), b))
    bins += [[] for _ in range(num_bins - len(bins))]
    return [bins[rank::num_ranks] for rank in range(num_ranks)]


def plan_shared(
    lengths: Sequence[int],
    *,
    costs: Sequence[float],
    prompts: SharedPrompts,
    share: bool | Literal["auto"],
    num_ranks: int,
    max_tokens: int,
) -> tuple[list[list[list[int]]], bool]:
    """As `plan_micro_batches`, where samples in one micro-batch compute the prompt that they share once, so they take
    fewer tokens, and are next to each other. Also whether they do: "auto" shares where that saves time.

    Samples of a prompt stay together as far as that leaves ranks balanced: of several plans, with samples in bundles
    from all that fit into a micro-batch down to one, the fastest is taken.
    """
    plain = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens, costs=costs)
    if share is False:
        return plain, False
    plans = []
    fits_in_one = num_ranks == 1 and sum(lengths) <= max_tokens  # however they are bundled
    for bundle_tokens in (max_tokens,) if fits_in_one else (max_tokens, max_tokens // 2, max_tokens // 4, 0):
        bundles = _bundles(lengths, prompts, bundle_tokens)
        shorter = [prompts.lengths[prompts.of_sample[bundle[0]]] * (len(bundle) - 1) for bundle in bundles]
        of_bundles = plan_micro_batches(
            [sum(lengths[i] for i in bundle) - less for bundle, less in zip(bundles, shorter, strict=True)],
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            costs=[micro_batch_cost(bundle, costs, prompts) for bundle in bundles],
        )
        plans.append([[_by_prompt(prompts, [bundles[b] for b in bin_]) for bin_ in rank] for rank in of_bundles])
    best = min(plans, key=lambda plan: _step_cost(plan, costs, prompts))
    is_faster = _step_cost(best, costs, prompts) <= (1 - SHARING_GAIN) * _step_cost(plain, costs, None)
    return (best, True) if share is True or is_faster else (plain, False)


def _by_prompt(prompts: SharedPrompts, bundles: list[list[int]]) -> list[int]:
    return sorted(chain.from_iterable(bundles), key=lambda i: (prompts.of_sample[i], i))


def _bundles(lengths: Sequence[int], prompts: SharedPrompts, most_tokens: int) -> list[list[int]]:
    """Samples of one prompt that are computed together, with it in at most `most_tokens`; a longer one is alone."""
    of_prompt: dict[int, list[int]] = {}
    for sample, prompt in enumerate(prompts.of_sample):
        of_prompt.setdefault(prompt, []).append(sample)
    bundles = []
    for prompt, members in of_prompt.items():
        shared = prompts.lengths[prompt]
        parts = first_fit_decreasing([lengths[i] - shared for i in members], max_tokens=most_tokens - shared)
        bundles += [sorted(members[i] for i in part) for part in parts]
    return bundles


def micro_batch_cost(members: Sequence[int], costs: Sequence[float], prompts: SharedPrompts | None) -> float:
    """Of its samples; with `prompts`, each of which is computed once."""
    total = sum(costs[i] for i in members)
    if prompts is None:
        return total
    used = [prompts.of_sample[i] for i in members]
    return total - sum(prompts.costs[prompt] * (used.count(prompt) - 1) for prompt in set(used))


def _step_cost(plan: list[list[list[int]]], costs: Sequence[float], prompts: SharedPrompts | None) -> float:
    """As if each micro-batch took as long as the most expensive one beside it."""
    totals = [[micro_batch_cost(members, costs, prompts) for members in rank] for rank in plan]
    return sum(map(max, zip(*totals, strict=True)))


def balance_frac(plan: list[list[list[int]]], costs: Sequence[float], prompts: SharedPrompts | None = None) -> float:
    """Cost of all micro-batches over that of `plan` as if each took as long as the most expensive one beside it:
    1 where no rank waits for another."""
    slowest = _step_cost(plan, costs, prompts)
    total = sum(micro_batch_cost(members, costs, prompts) for rank in plan for members in rank)
    return total / (len(plan) * slowest) if slowest else 1.0


def first_fit_decreasing(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Bins of at most `max_tokens` (Johnson 1973: at most 11/9 of the fewest, plus one). Longer samples are alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _largest_first(lengths):
        length = lengths[index]
        slot = next((b for b, room in enumerate(free) if room >= length), len(bins))
        if slot == len(bins):
            bins.append([])
            free.append(max_tokens)
        bins[slot].append(index)
        free[slot] -= length
    return bins


def _even(lengths: Sequence[int], costs: Sequence[float], *, num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Each sample in the cheapest bin that has room for it; None if there is none for one of them."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens, loads = [0] * num_bins, [0.0] * num_bins
    for index in _largest_first(costs):
        open_bins = [b for b in range(num_bins) if not bins[b] or tokens[b] + lengths[index] <= max_tokens]
        if not open_bins:
            return None
        cheapest = min(open_bins, key=lambda b: loads[b])
        bins[cheapest].append(index)
        tokens[cheapest] += lengths[index]
        loads[cheapest] += costs[index]
    return bins


def _largest_first(sizes: Sequence[float]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
