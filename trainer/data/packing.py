"""Plans which sample goes to which rank and micro-batch. Pure functions over lengths; deterministic.

A plan is `plan[rank][micro_batch] -> sample indices`. Every rank has the same number of micro-batches, because FSDP's
collectives count forward passes; an empty list stands for a filler without loss.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Plan = list[list[list[int]]]


def plan_micro_batches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> Plan:
    """Balances samples over ranks by token count, then packs each rank's samples into micro-batches.

    Micro-batches hold at most `max_tokens`; a sample longer than that gets one to itself. There are as few as
    possible, and a rank spreads its samples evenly over them, longest first, so that the k-th micro-batches of all
    ranks (which wait for each other) take about the same time.

    Raises:
        ValueError: `num_ranks` or `max_tokens` below 1, or a sample without tokens.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens per micro-batch must be >= 1, got {max_tokens}; set it to at least one sequence")
    ranks = balance(lengths, num_ranks=num_ranks)
    packed = [first_fit_decreasing(lengths, members, max_tokens=max_tokens) for members in ranks]
    num_micro_batches = max(1, *(len(bins) for bins in packed))
    plan: Plan = []
    for members, bins in zip(ranks, packed, strict=True):
        even = _spread(lengths, members, num_bins=num_micro_batches)
        chosen = even if _fits(lengths, even, max_tokens) else bins
        chosen = sorted((sorted(b) for b in chosen if b), key=lambda b: (-_total(lengths, b), b))
        plan.append(chosen + [[] for _ in range(num_micro_batches - len(chosen))])
    return plan


def balance(lengths: Sequence[int], *, num_ranks: int) -> list[list[int]]:
    """Sample indices of each rank, longest sample first to the rank with the fewest tokens so far (LPT, Graham 1969).

    The most and the least loaded rank differ by at most the longest sample, and the most loaded one is at most 4/3
    of the optimum.

    Raises:
        ValueError: `num_ranks` below 1, or a sample without tokens.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
    if lengths and min(lengths) < 1:
        raise ValueError(f"every sample needs at least one token, got a length of {min(lengths)}")
    return _spread(lengths, range(len(lengths)), num_bins=num_ranks)


def first_fit_decreasing(lengths: Sequence[int], members: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Bins of at most `max_tokens` (Johnson 1973: at most 11/9 of the fewest, plus one). Longer samples sit alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _longest_first(lengths, members):
        length = lengths[index]
        slot = next((b for b, room in enumerate(free) if room >= length), -1)
        if slot < 0:
            bins.append([index])
            free.append(max_tokens - length)
        else:
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


def _fits(lengths: Sequence[int], bins: Sequence[Sequence[int]], max_tokens: int) -> bool:
    return all(_total(lengths, b) <= max_tokens or len(b) == 1 for b in bins)


def _total(lengths: Sequence[int], members: Sequence[int]) -> int:
    return sum(lengths[i] for i in members)
