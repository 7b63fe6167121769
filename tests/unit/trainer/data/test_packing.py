"""The plan of samples over ranks and micro-batches, by its invariants."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batch import balance, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 60), max_size=60)
FEW_LENGTHS = st.lists(st.integers(1, 20), max_size=6)


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [i for rank in plan for members in rank for i in members]


@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), max_tokens=st.integers(1, 100))
def test_plan_loses_nothing_and_keeps_every_promise(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert all(sum(lengths[i] for i in m) <= max_tokens or len(m) == 1 for rank in plan for m in rank)
    for rank in plan:
        totals = [sum(lengths[i] for i in m) for m in rank]
        assert totals == sorted(totals, reverse=True)
    assert plan == plan_micro_batches(list(lengths), num_ranks=num_ranks, max_tokens=max_tokens)


@given(lengths=LENGTHS, num_ranks=st.integers(1, 6))
def test_ranks_differ_by_at_most_the_longest_sample(lengths: list[int], num_ranks: int) -> None:
    loads = [sum(lengths[i] for i in members) for members in balance(lengths, num_ranks=num_ranks)]
    assert sum(loads) == sum(lengths)
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths=FEW_LENGTHS, num_ranks=st.integers(1, 3))
def test_the_fullest_rank_is_within_four_thirds_of_the_best_assignment(lengths: list[int], num_ranks: int) -> None:
    best = min(
        max(sum(n for n, rank in zip(lengths, ranks, strict=True) if rank == r) for r in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )
    fullest = max(sum(lengths[i] for i in m) for m in balance(lengths, num_ranks=num_ranks))
    assert 3 * fullest <= 4 * best


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "max_tokens", "plan"),
    [
        ([3, 3, 2, 2, 2], 1, 6, [[[0, 1], [2, 3, 4]]]),  # spreading evenly would give 7 and 5 tokens
        ([100, 30, 30, 30], 2, 30, [[[0], [], []], [[1], [2], [3]]]),  # alone; the other rank has empty micro-batches
        ([], 3, 10, [[[]], [[]], [[]]]),  # still one forward pass on every rank
    ],
)
def test_the_limit_holds_and_every_rank_has_as_many_micro_batches(
    lengths: list[int], num_ranks: int, max_tokens: int, plan: list[list[list[int]]]
) -> None:
    assert plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens) == plan


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks must be >= 1, got 0"):
        balance([1], num_ranks=0)
    with pytest.raises(ValueError, match="got a length of 0"):
        balance([1, 0], num_ranks=1)
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        plan_micro_batches([1], num_ranks=1, max_tokens=0)
