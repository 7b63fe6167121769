"""Rewards of tokens and what is still to come: closed forms, a reference made of loops, and what changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.algorithms.advantages import gae_advantages, reward_to_go, token_rewards


def test_the_documented_example() -> None:
    assert reward_to_go([0, 2, 0, 0, 1], [True, True, False, True, True]).tolist() == [3, 3, 0, 1, 1]


def test_a_turn_is_rewarded_at_its_last_generated_token_and_the_outcome_at_the_last_of_all() -> None:
    #       turn 0: 2 context, 2 generated    turn 1: 1 context, 2 generated    turn 2: 1 context
    mask_T = [False, False, True, True, False, True, True, False]
    got = token_rewards(mask_T, turn_rewards_K=[0.5, -2.0, 0.0], turn_lengths_K=[4, 3, 1], outcome=10.0)
    assert got.tolist() == [0, 0, 0, 0.5, 0, 0, 8.0, 0]


def test_without_a_generated_token_nothing_is_rewarded() -> None:
    assert token_rewards([False] * 3, turn_rewards_K=[0.0], turn_lengths_K=[3], outcome=1.0).tolist() == [0, 0, 0]


RAGGED = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 4), st.floats(-5, 5).map(lambda x: round(x, 3))), min_size=1, max_size=6
)
"""Turns of (context tokens, generated tokens, reward)."""


@given(RAGGED, st.floats(-5, 5).map(lambda x: round(x, 3)))
def test_ragged_turns_agree_with_loops(turns: list[tuple[int, int, float]], outcome: float) -> None:
    mask = [flag for context, generated, _ in turns for flag in [False] * context + [True] * generated]
    wanted = []
    for index, (context, generated, _) in enumerate(turns):
        still_to_come = outcome
        for later in range(index, len(turns)):
            still_to_come += turns[later][2]
        wanted += [0.0] * context + [still_to_come] * generated
    rewards_T = token_rewards(
        mask, turn_rewards_K=[r for *_, r in turns], turn_lengths_K=[c + g for c, g, _ in turns], outcome=outcome
    )
    np.testing.assert_allclose(reward_to_go(rewards_T, mask), wanted, rtol=0, atol=1e-9)


@given(RAGGED, st.integers(0, 20))
def test_a_context_token_in_between_changes_nothing(turns: list[tuple[int, int, float]], at: int) -> None:
    mask = [flag for context, generated, _ in turns for flag in [False] * context + [True] * generated]
    at %= len(mask) + 1
    rewards_T = np.arange(len(mask)) * np.array(mask, np.float64)
    plain = reward_to_go(rewards_T, mask)
    longer = reward_to_go(np.insert(rewards_T, at, 0.0), np.insert(np.array(mask), at, False))
    np.testing.assert_array_equal(np.delete(longer, at), plain)


def test_it_is_the_return_of_gae_without_a_critic() -> None:
    rng = np.random.Generator(np.random.PCG64(2))
    mask_T = rng.random(40) < 0.6
    rewards_T = np.where(mask_T, rng.normal(size=40), 0.0)
    _, returns_T = gae_advantages(rewards_T, np.zeros(40), mask_T, gamma=1.0, lam=1.0)
    np.testing.assert_allclose(reward_to_go(rewards_T, mask_T), returns_T, rtol=0, atol=1e-12)


def test_what_breaks_the_contract_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one shape \[T\], got \(2,\) and \(3,\)"):
        reward_to_go([0, 1], [True] * 3)
    with pytest.raises(ValueError, match="must be finite"):
        reward_to_go([0, np.nan], [True] * 2)
    with pytest.raises(ValueError, match=r"token 0 is context and has reward 1\.0"):
        reward_to_go([1, 0], [False, True])
    with pytest.raises(ValueError, match="2 turns of 5 tokens with 2 rewards do not make up a trajectory of 4 tokens"):
        token_rewards([True] * 4, turn_rewards_K=[0, 0], turn_lengths_K=[2, 3], outcome=0.0)
    with pytest.raises(ValueError, match=r"turn 0 has reward 1\.0 and no generated token"):
        token_rewards([False, True], turn_rewards_K=[1.0, 0.0], turn_lengths_K=[1, 1], outcome=0.0)
