"""The plan of samples over ranks and micro-batches, by its invariants."""

from __future__ import annotations

import math
from itertools import chain, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.batch import (
    SHARING_GAIN,
    SharedPrompts,
    balance_frac,
    first_fit_decreasing,
    plan_micro_batches,
    plan_shared,
)

LENGTHS = st.lists(st.integers(1, 60), max_size=60)
FEW_LENGTHS = st.lists(st.integers(1, 20), max_size=6)


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [i for rank in plan for members in rank for i in members]


def work(length: int) -> float:
    """Of a model whose attention costs as much as its matrices at 100 tokens."""
    return length + length**2 / 100


@given(lengths=LENGTHS, num_ranks=st.integers(1, 6), max_tokens=st.integers(1, 100), is_by_work=st.booleans())
def test_plan_loses_nothing_and_keeps_every_promise(
    lengths: list[int], num_ranks: int, max_tokens: int, is_by_work: bool
) -> None:
    costs = [work(n) if is_by_work else float(n) for n in lengths]
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens, costs=costs)
    assert sorted(flat(plan)) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    (num_each,) = {len(rank) for rank in plan}
    assert num_each == max(1, math.ceil(len(first_fit_decreasing(lengths, max_tokens=max_tokens)) / num_ranks))
    assert all(sum(lengths[i] for i in m) <= max_tokens or len(m) == 1 for rank in plan for m in rank)
    totals = [[sum(costs[i] for i in m) for m in rank] for rank in plan]
    dealt = [total for beside in zip(*totals, strict=True) for total in beside]
    assert dealt == sorted(dealt, reverse=True)  # so a rank waits for no more than max(dealt) - min(dealt) in all
    assert plan == plan_micro_batches(list(lengths), num_ranks=num_ranks, max_tokens=max_tokens, costs=list(costs))


@given(lengths=LENGTHS, num_ranks=st.integers(1, 6))
def test_where_all_fits_micro_batches_differ_by_at_most_the_most_expensive_sample(
    lengths: list[int], num_ranks: int
) -> None:
    costs = [work(n) for n in lengths]
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=10**6, costs=costs)
    loads = [sum(costs[i] for i in members) for members in chain.from_iterable(plan)]
    assert len(loads) == num_ranks
    assert max(loads) - min(loads) <= max(costs, default=0) + 1e-6


@given(lengths=FEW_LENGTHS, num_ranks=st.integers(1, 3))
def test_the_slowest_rank_is_within_four_thirds_of_the_best_assignment(lengths: list[int], num_ranks: int) -> None:
    costs = [work(n) for n in lengths]
    best = min(
        max(sum(n for n, rank in zip(costs, ranks, strict=True) if rank == r) for r in range(num_ranks))
        for ranks in product(range(num_ranks), repeat=len(lengths))
    )
    plan = plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=10**6, costs=costs)
    slowest = max(sum(costs[i] for i in m) for m in chain.from_iterable(plan))
    assert 3 * slowest <= 4 * best + 1e-6


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_long_answers_make_no_rank_wait(num_ranks: int) -> None:
    """512 answers of a model that thinks: a median of 4,000 tokens, the longest cut at 32,768."""
    drawn = np.random.default_rng(0).lognormal(math.log(4000), 1.0, 512)
    lengths = np.clip(drawn, 64, 32768).astype(int).tolist()
    costs = [n + n**2 / 28_000 for n in lengths]  # as in Qwen2.5-7B
    limits: dict[str, int] = {"num_ranks": num_ranks, "max_tokens": 32768}
    by_cost = balance_frac(plan_micro_batches(lengths, costs=costs, **limits), costs)
    by_tokens = balance_frac(plan_micro_batches(lengths, **limits), costs)
    assert by_cost > 0.97
    plan = plan_micro_batches(lengths, costs=costs, **limits)
    num_fillers = sum(not members for rank in plan for members in rank)
    assert 2 * num_fillers < 0.02 * sum(lengths), "tokens of micro-batches without a sample, all that is wasted"
    assert by_tokens < by_cost


def test_waiting_is_counted_in_every_micro_batch() -> None:
    costs = [4.0, 1.0, 2.0, 1.0]
    assert balance_frac([[[0], [2]], [[1], [3]]], costs) == pytest.approx(8 / (2 * 6))
    assert balance_frac([[[0]], [[1, 2, 3]]], costs) == 1
    assert balance_frac([[[]], [[]]], []) == 1


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "max_tokens", "plan"),
    [
        ([4, 4, 2, 2, 2], 1, 8, [[[0, 2, 4], [1, 3]]]),  # one is filled to the last token
        ([3, 3, 2, 2, 2], 1, 6, [[[0, 1], [2, 3, 4]]]),  # spreading evenly would give 7 and 5 tokens
        ([100, 30, 30, 30], 2, 30, [[[0], [2]], [[1], [3]]]),  # a sample beyond the limit is alone
        ([5], 2, 9, [[[0]], [[]]]),  # the other rank has an empty micro-batch
        ([], 3, 10, [[[]], [[]], [[]]]),  # still one forward pass on every rank
    ],
)
def test_the_limit_holds_and_every_rank_has_as_many_micro_batches(
    lengths: list[int], num_ranks: int, max_tokens: int, plan: list[list[list[int]]]
) -> None:
    assert plan_micro_batches(lengths, num_ranks=num_ranks, max_tokens=max_tokens) == plan


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks must be >= 1, got 0"):
        plan_micro_batches([1], num_ranks=0, max_tokens=1)
    with pytest.raises(ValueError, match="got a length of 0"):
        plan_micro_batches([1, 0], num_ranks=1, max_tokens=1)
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        plan_micro_batches([1], num_ranks=1, max_tokens=0)


def plan_of_groups(
    seed: int, *, num_groups: int, share: Any, num_ranks: int, max_tokens: int, shortest: int = 1, longest: int = 60
) -> tuple[list[list[list[int]]], bool, list[int], list[float], SharedPrompts]:
    """Of groups of 8 whose prompts have a third of the mean response."""
    rng = np.random.default_rng(seed)
    of_sample = np.repeat(np.arange(num_groups), 8)
    prompt_lens = rng.integers(1, max(2, longest // 6), num_groups)
    lengths = (prompt_lens[of_sample] + rng.integers(shortest, longest, len(of_sample))).tolist()
    costs = [work(n) for n in lengths]
    prompts = SharedPrompts(of_sample.tolist(), prompt_lens.tolist(), [work(n) for n in prompt_lens.tolist()])
    plan, is_shared = plan_shared(
        lengths, costs=costs, prompts=prompts, share=share, num_ranks=num_ranks, max_tokens=max_tokens
    )
    return plan, is_shared, lengths, costs, prompts


@given(
    seed=st.integers(0, 10**6),
    num_groups=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    max_tokens=st.integers(1, 500),
)
def test_shared_prompts_count_once_in_a_micro_batch_and_are_shared_where_that_is_faster(
    seed: int, num_groups: int, num_ranks: int, max_tokens: int
) -> None:
    sizes = {"num_groups": num_groups, "num_ranks": num_ranks, "max_tokens": max_tokens}
    plain, _, lengths, costs, prompts = plan_of_groups(seed, share=False, **sizes)
    assert plain == plan_micro_batches(lengths, costs=costs, num_ranks=num_ranks, max_tokens=max_tokens)
    for share in (True, "auto"):
        plan, is_shared, *_ = plan_of_groups(seed, share=share, **sizes)
        assert sorted(flat(plan)) == list(range(len(lengths)))
        for members in chain.from_iterable(plan) if is_shared else ():
            assert computed_tokens(members, lengths, prompts) <= max_tokens or len(members) == 1
            used = [prompts.of_sample[i] for i in members]
            assert used == sorted(used), "those of a prompt are next to each other"
        if is_shared:
            saved = 1 - step_cost(plan, costs, prompts) / step_cost(plain, costs, None)
            assert share is True or saved >= SHARING_GAIN
        else:
            assert share == "auto" and plan == plain


def computed_tokens(members: list[int], lengths: list[int], prompts: SharedPrompts) -> int:
    used = [prompts.of_sample[i] for i in members]
    again = sum(prompts.lengths[prompt] * (used.count(prompt) - 1) for prompt in set(used))
    return sum(lengths[i] for i in members) - again


def step_cost(plan: list[list[list[int]]], costs: list[float], prompts: SharedPrompts | None) -> float:
    """As if every micro-batch took as long as the most expensive one beside it."""

    def cost(members: list[int]) -> float:
        used = [] if prompts is None else [prompts.of_sample[i] for i in members]
        again = sum(work(prompts.lengths[p]) * (used.count(p) - 1) for p in set(used)) if prompts else 0.0
        return sum(costs[i] for i in members) - again

    return sum(max(map(cost, beside)) for beside in zip(*plan, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_groups_of_long_prompts_save_most_of_them_and_stay_balanced(num_ranks: int) -> None:
    sizes = {"num_groups": 32, "num_ranks": num_ranks, "max_tokens": 2000, "shortest": 25, "longest": 400}
    plan, is_shared, lengths, costs, prompts = plan_of_groups(0, share="auto", **sizes)
    repeated = sum(prompts.lengths[p] for p in prompts.of_sample) - sum(prompts.lengths)
    computed = sum(computed_tokens(members, lengths, prompts) for members in chain.from_iterable(plan))
    assert is_shared and sum(lengths) - computed > 0.7 * repeated
    assert balance_frac(plan, costs, prompts) > 0.97
