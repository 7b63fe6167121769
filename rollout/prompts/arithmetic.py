"""The `builtin:arithmetic` data set: additions of two small numbers, with the same split in every run.

`a+b` and `b+a` are always in the same split: otherwise commutativity alone could solve the held-out set.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from rollout.errors import DataError

ArithmeticSplit = Literal["train", "test"]

SMALLEST_MAX_OPERAND, LARGEST_MAX_OPERAND = 9, 999
_SPLIT_SEED = 20_260_101
_HELD_OUT_FRAC = 0.1
_MAX_HELD_OUT = 500


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def operand_pairs(split: str, *, max_operand: int) -> list[tuple[int, int]]:
    """All (a, b) of a split with 0 <= a, b <= `max_operand`, sorted. `test` has about a tenth of the pairs (at most
    500), `train` the others.

    Raises:
        DataError: unknown split, or a `max_operand` that is too small to split or too large to list.
    """
    if split not in get_args(ArithmeticSplit):
        raise DataError(f"builtin:arithmetic has no split {split!r}; its splits are 'train' and 'test' (held out)")
    if not SMALLEST_MAX_OPERAND <= max_operand <= LARGEST_MAX_OPERAND:
        raise DataError(
            f"builtin:arithmetic: max_operand must be {SMALLEST_MAX_OPERAND} to {LARGEST_MAX_OPERAND}, "
            f"got {max_operand}; set task.max_operand"
        )
    train, test = _split(max_operand)
    return test if split == "test" else train


def _split(max_operand: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    unordered = [(a, b) for a in range(max_operand + 1) for b in range(a, max_operand + 1)]
    order = np.random.Generator(np.random.PCG64(_SPLIT_SEED)).permutation(len(unordered))
    num_wanted = min(_MAX_HELD_OUT, int(_HELD_OUT_FRAC * (max_operand + 1) ** 2))
    held_out: set[tuple[int, int]] = set()
    for index in order:
        a, b = unordered[index]
        if len(held_out) + (1 if a == b else 2) <= num_wanted:
            held_out |= {(a, b), (b, a)}
        if len(held_out) == num_wanted:
            break
    everything = [(a, b) for a in range(max_operand + 1) for b in range(max_operand + 1)]
    return [p for p in everything if p not in held_out], [p for p in everything if p in held_out]
