from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agent.trajectory_builder import TokenLedger, check_chunk, coalesce, join_chunks
from rollout.types import Completion, Segment


def chunk(tokens: list[int], versions: list[int], finish_reason: None = None) -> Completion:
    return Completion(
        token_ids=np.array(tokens, np.int32),
        logprobs=np.array(tokens, np.float32) / -100,
        segments=tuple(Segment(version=version, num_tokens=1) for version in versions),
        finish_reason=finish_reason,
    )


def labels(segments: tuple[Segment, ...]) -> list[int]:
    return [segment.version for segment in segments for _ in range(segment.num_tokens)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_coalesced_segments_label_every_token_as_before_and_no_neighbours_agree(pairs: list[tuple[int, int]]) -> None:
    segments = tuple(Segment(version=version, num_tokens=count) for version, count in pairs)
    joined = coalesce(segments)
    assert labels(joined) == labels(segments)
    assert all(segment.num_tokens > 0 for segment in joined)
    assert all(a.version != b.version for a, b in pairwise(joined))


# Stretches of (is_generated, tokens); the ledger must account for each token once, in order.
stretches = st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 99), max_size=5)), max_size=8)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=4), stretches)
def test_turns_joined_are_the_whole_sequence_with_labels(
    prompt: list[int], script: list[tuple[bool, list[int]]]
) -> None:
    ledger = TokenLedger(np.array(prompt, np.int32))
    flat = [(token, False, -1) for token in prompt]
    for version, (is_generated, tokens) in enumerate(script):
        if is_generated:
            ledger.add_generated(chunk(tokens, [version] * len(tokens)))
        else:
            ledger.add_context(np.array(tokens, np.int32))
        flat += [(token, is_generated, version if is_generated else -1) for token in tokens]
    turns = ledger.turns()
    token_ids = np.concatenate([turn.token_ids for turn in turns])
    mask = np.concatenate([turn.is_generated for turn in turns])
    logprobs = np.concatenate([turn.logprobs for turn in turns])
    assert token_ids.tolist() == ledger.token_ids().tolist() == [token for token, _, _ in flat]
    assert mask.tolist() == [generated for _, generated, _ in flat]
    assert [v for turn in turns for v in labels(turn.segments)] == [v for _, generated, v in flat if generated]
    np.testing.assert_array_equal(np.isnan(logprobs), ~mask)
    np.testing.assert_allclose(logprobs[mask], token_ids[mask] / -100)
    assert ledger.num_response_tokens == len(flat) - len(prompt)
    assert token_ids.dtype == np.int32
    assert logprobs.dtype == np.float32


def test_a_new_turn_begins_where_context_follows_generated_tokens() -> None:
    ledger = TokenLedger(np.array([1, 2], np.int32))
    ledger.add_generated(chunk([3], [7]))
    ledger.add_generated(chunk([4], [7]))
    ledger.add_context(np.array([5]))
    ledger.add_context(np.array([6]))
    ledger.add_generated(chunk([7], [8]))
    first, second = ledger.turns()
    assert (first.token_ids.tolist(), first.is_generated.tolist()) == ([1, 2, 3, 4], [False, False, True, True])
    assert first.segments == (Segment(version=7, num_tokens=2),)
    assert (second.token_ids.tolist(), second.is_generated.tolist()) == ([5, 6, 7], [False, False, True])


def test_joined_chunks_merge_versions_across_the_seam() -> None:
    joined = join_chunks([chunk([1, 2], [3, 3]), chunk([4], [3]), chunk([5], [4])], "stop")
    assert joined.token_ids.tolist() == [1, 2, 4, 5]
    assert joined.segments == (Segment(version=3, num_tokens=3), Segment(version=4, num_tokens=1))
    assert joined.finish_reason == "stop"


def test_a_chunk_with_unlabelled_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens with 3 logprobs and version labels for 2"):
        check_chunk(chunk([1, 2, 3], [0, 0]))


@pytest.mark.parametrize("is_context_first", [True, False])
def test_a_reward_belongs_to_the_turn_before_it_also_behind_its_reply(is_context_first: bool) -> None:
    ledger = TokenLedger(np.array([1], np.int32))
    for version, reward in enumerate((0.5, -1.0)):
        ledger.add_generated(chunk([3], [version]))
        if is_context_first:
            ledger.add_context(np.array([4]))
        ledger.add_reward(reward)
        ledger.add_reward(0.25)
        if not is_context_first:
            ledger.add_context(np.array([4]))
    assert [turn.reward for turn in ledger.turns()] == [0.75, -0.75, 0.0]


def test_a_reward_before_anything_was_generated_is_refused() -> None:
    ledger = TokenLedger(np.array([1], np.int32))
    ledger.add_context(np.array([2]))
    with pytest.raises(ValueError, match="none was generated yet"):
        ledger.add_reward(1.0)


def test_a_sequence_that_begins_anew_leaves_behind_what_was_said() -> None:
    ledger = TokenLedger(np.array([1, 2]))
    ledger.add_generated(chunk([3, 4], [0, 1]))
    ledger.add_context(np.array([5]))
    ledger.begin_anew(np.array([1, 6]))
    ledger.add_reward(0.5)
    assert ledger.token_ids().tolist() == [1, 6] and ledger.num_response_tokens == 0
    ledger.add_generated(chunk([7], [1]))
    ledger.add_context(np.array([8]))
    ledger.add_generated(chunk([9], [2]))
    ledger.add_reward(2.0)
    assert ledger.token_ids().tolist() == [1, 6, 7, 8, 9] and ledger.num_response_tokens == 3
    turns = ledger.turns()
    assert [turn.token_ids.tolist() for turn in turns] == [[1, 2, 3, 4], [1, 6, 7], [8, 9]]
    assert [turn.begins_anew for turn in turns] == [False, True, False]
    assert [turn.reward for turn in turns] == [0.5, 0.0, 2.0], "a reward is for what was generated last"
    assert [labels(turn.segments) for turn in turns] == [[0, 1], [1], [2]]


def test_context_that_is_left_behind_before_anything_was_said_is_no_turn() -> None:
    ledger = TokenLedger(np.array([1, 2]))
    ledger.begin_anew(np.array([7, 8]))
    ledger.begin_anew(np.array([9]))
    ledger.add_generated(chunk([3], [0]))
    (turn,) = ledger.turns()
    assert turn.token_ids.tolist() == [9, 3] and turn.begins_anew
    with pytest.raises(ValueError, match="needs at least one token of context"):
        ledger.begin_anew(np.array([], np.int32))
    with pytest.raises(ValueError, match="token ids in one row"):
        ledger.begin_anew(np.array([[1]]))
    assert ledger.token_ids().tolist() == [9, 3], "what was refused has changed nothing"
