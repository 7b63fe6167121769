"""Token ids that a model has no row for are found, whatever side they are on."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.vllm_config import check_token_ids, foreign_token


@pytest.mark.parametrize(
    ("token_ids", "foreign"),
    [
        ([], None),
        ([0, 9, 5], None),
        ([0, 10], 10),
        ([12, 3, 11], 12),
        ([4, -1], -1),
        ([-3, 0, -1], -3),
        ([-1, 10], 10),
    ],
)
def test_the_furthest_token_outside_the_vocabulary_is_named(token_ids: list[int], foreign: int | None) -> None:
    tokens = np.array(token_ids, np.int32)
    assert foreign_token(tokens, 10) == foreign
    if foreign is None:
        check_token_ids(tokens, 10)
    else:
        with pytest.raises(ValueError, match=f"token id {foreign}, must be >= 0 and < 10, the vocabulary"):
            check_token_ids(tokens, 10)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_integers_of_any_size_are_token_ids(dtype: type[np.integer]) -> None:
    check_token_ids(np.array([0, 9], dtype), 10)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (np.array([1.0, 2.0]), r"got float64 of shape \(2,\)"),
        (np.array([True, False]), r"got bool of shape \(2,\)"),
        (np.array([[1, 2]], np.int32), r"got int32 of shape \(1, 2\)"),
    ],
)
def test_what_is_no_row_of_integers_is_refused(token_ids: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_token_ids(token_ids, 10)
