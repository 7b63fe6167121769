"""The builtin additions: complete, disjoint, and held out for good."""

from __future__ import annotations

from itertools import product

import pytest

from rollout.errors import DataError
from rollout.prompts.arithmetic import operand_pairs


@pytest.mark.parametrize("max_operand", [9, 10, 49, 99, 200])
def test_splits_are_disjoint_complete_and_closed_under_commutation(max_operand: int) -> None:
    train = operand_pairs("train", max_operand=max_operand)
    test = operand_pairs("test", max_operand=max_operand)
    assert sorted(train + test) == list(product(range(max_operand + 1), repeat=2))
    assert {(b, a) for a, b in test} == set(test)


@pytest.mark.parametrize(("max_operand", "num_held_out"), [(9, 10), (49, 250), (69, 490), (99, 500), (300, 500)])
def test_a_tenth_is_held_out_but_at_most_500(max_operand: int, num_held_out: int) -> None:
    assert len(operand_pairs("test", max_operand=max_operand)) == num_held_out


FIRST_HELD_OUT = [(0, 0), (0, 2), (0, 18), (0, 21), (0, 30), (1, 2)]


def test_the_held_out_set_never_changes() -> None:
    """Accuracies of different runs and releases can be compared only as long as this holds."""
    assert operand_pairs("test", max_operand=49)[:6] == FIRST_HELD_OUT


def test_unknown_splits_and_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="no split 'dev'; its splits are 'train' and 'test'"):
        operand_pairs("dev", max_operand=49)
    for size in (8, 1000):
        with pytest.raises(DataError, match=f"must be 9 to 999, got {size}"):
            operand_pairs("train", max_operand=size)
