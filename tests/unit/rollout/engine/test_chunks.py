from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.request_state import OutputBuffer, VersionSpans


def test_labels_of_a_request_that_crossed_a_commit() -> None:
    labels = VersionSpans(3)
    labels.append(10, 4)
    assert labels.of(0, 10).tolist() == [3] * 10
    assert labels.of(8, 12).tolist() == [3, 3, 4, 4]
    assert labels.of(10, 11).tolist() == [4]
    assert labels.of(5, 5).tolist() == []


def test_a_version_that_sampled_nothing_leaves_no_segment() -> None:
    labels = VersionSpans(1)
    labels.append(0, 2)
    labels.append(4, 3)
    labels.append(4, 4)
    assert labels.of(0, 6).tolist() == [2, 2, 2, 2, 4, 4]


def test_a_switch_into_the_past_is_refused() -> None:
    labels = VersionSpans(1)
    labels.append(5, 2)
    with pytest.raises(ValueError, match="token 4"):
        labels.append(4, 3)


def test_tokens_without_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1"):
        OutputBuffer(VersionSpans(0), 4).add([1, 2], [-0.5])


def test_an_aborted_request_without_tokens_still_ends() -> None:
    (chunk,) = OutputBuffer(VersionSpans(0), 4).flush("abort")
    assert (len(chunk.token_ids), chunk.finish_reason) == (0, "abort")


def test_a_full_last_chunk_carries_the_reason_itself() -> None:
    builder = OutputBuffer(VersionSpans(0), 4)
    builder.add([1, 2, 3, 4], [-1.0] * 4)
    assert [(len(c.token_ids), c.finish_reason) for c in builder.flush("length")] == [(4, "length")]


@given(
    outputs=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    commit_before=st.sets(st.integers(0, 19)),
    stream_tokens=st.integers(1, 9),
)
def test_no_token_is_lost_reordered_or_mislabelled(
    outputs: list[int], commit_before: set[int], stream_tokens: int
) -> None:
    """Reference: the plain list of (token, version) pairs in the order they were sampled."""
    version, expected, chunks = 0, [], []
    builder = OutputBuffer(VersionSpans(version), stream_tokens)
    for index, num_new in enumerate(outputs):
        if index in commit_before:
            version += 1
            builder.versions.append(len(expected), version)
        new = list(range(len(expected), len(expected) + num_new))
        expected += [(token, version) for token in new]
        builder.add(new, [-float(token) for token in new])
        chunks += list(builder.flush("stop" if index == len(outputs) - 1 else None))
    tokens = np.concatenate([c.token_ids for c in chunks])
    labels = [version for c in chunks for version in c.versions.tolist()]
    assert list(zip(tokens, labels, strict=True)) == expected
    assert np.array_equal(np.concatenate([c.logprobs for c in chunks]), -tokens.astype(np.float32))
    assert all(len(c.token_ids) <= stream_tokens for c in chunks)
    assert all(len(c.token_ids) == stream_tokens for c in chunks[:-1])
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
