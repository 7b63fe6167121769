from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.token_weights import loss_weights
from trainer.config.compose import load_config

COUNTS = [1, 3, 0, 4]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0, 1 / 8]),
        ("seq_mean_token_mean", [1 / 3, 1 / 9, 0, 1 / 12]),
        ("seq_mean_token_sum", [1 / 3, 1 / 3, 0, 1 / 3]),
        ("token_sum", [1, 1, 0, 1]),
        ("seq_mean_token_sum_norm", [1 / 30, 1 / 30, 0, 1 / 30]),
    ],
)
def test_weights_equal_the_closed_form(kind: str, expected: list[float]) -> None:
    np.testing.assert_allclose(loss_weights(COUNTS, kind, norm_tokens=10), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_mean", 2.5),
        ("token_sum", 10),
        ("seq_mean_token_sum", 5),
        ("seq_mean_token_mean", 3),
        ("seq_mean_token_sum_norm", 1.25),
    ],
)
def test_padded_matrix_gives_the_closed_form(kind: str, expected: float) -> None:
    losses = np.array([[1, 2, 3, 0], [4, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]])
    weights = loss_weights(mask.sum(1), kind, norm_tokens=4)
    assert (weights[:, None] * mask * losses).sum() == pytest.approx(expected, abs=1e-12)


def test_dr_grpo_divides_every_answer_by_the_longest_that_is_allowed() -> None:
    """The authors' masked sum over the generation budget, meaned over answers: no length counts, and the gradient is of
    the size that a mean over tokens has, which `learner.max_grad_norm` is made for."""
    config = load_config(["algorithm=dr_grpo", "rollout.max_response_tokens=8", "device=cpu"])
    algorithm, norm = config.algorithm, config.rollout.max_response_tokens
    assert not algorithm.normalize_by_std
    losses, lengths = np.array([[1.0, 2, 3, 0], [4, 0, 0, 0]]), [3, 1]
    weights = loss_weights(lengths, algorithm.loss_aggregation, norm_tokens=norm)
    assert (weights[:, None] * losses).sum() == pytest.approx((6 / 8 + 4 / 8) / 2)


def test_a_rejected_token_keeps_its_place_in_the_denominator() -> None:
    """Rejection after the weights: the mean is over all tokens that entered the step."""
    weights = loss_weights([2, 2], "token_mean", norm_tokens=4)
    losses, kept = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1, 0], [1, 1]])
    assert (weights[:, None] * losses * kept).sum() == pytest.approx(8 / 4)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(0, 10_000))
def test_weighted_sum_equals_the_textbook_mean(counts: list[int], seed: int) -> None:
    if sum(counts) == 0:
        return
    rng = np.random.default_rng(seed)
    losses = [rng.normal(size=n) for n in counts]
    nonempty = [x for x in losses if len(x)]
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "seq_mean_token_mean": np.mean([x.mean() for x in nonempty]),
        "seq_mean_token_sum": np.mean([x.sum() for x in nonempty]),
        "token_sum": np.concatenate(losses).sum(),
        "seq_mean_token_sum_norm": np.mean([x.sum() / 50 for x in nonempty]),
    }
    for kind, value in expected.items():
        weights = loss_weights(counts, kind, norm_tokens=50)
        assert sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) == pytest.approx(value)


def test_a_step_without_a_loss_token_has_no_loss() -> None:
    np.testing.assert_array_equal(loss_weights([0, 0], "token_mean", norm_tokens=1), [0, 0])


def test_unknown_kind_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="seq_mean_token_sum_norm, got 'mean'"):
        loss_weights([1], "mean", norm_tokens=1)
