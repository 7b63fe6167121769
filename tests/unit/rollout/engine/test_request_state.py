"""The requests of one engine: their tokens, versions and log-probs, and where their responses end."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.interface import EngineSpec
from rollout.engine.request_state import (
    ActiveRequest,
    OutputBuffer,
    StopStringMatcher,
    VersionSpans,
    sampled_logprobs,
    stop_string_matcher,
)
from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens, versions, chunks


def test_what_cannot_be_labelled_is_refused() -> None:
    spans = VersionSpans(1)
    spans.append(5, 2)
    with pytest.raises(ValueError, match="token 4"):
        spans.append(4, 3)
    with pytest.raises(ValueError, match="2 tokens with 1"):
        OutputBuffer(0, 4).add([1, 2], [-0.5])


@pytest.mark.parametrize("num_tokens", [0, 4])
def test_one_chunk_carries_the_last_tokens_and_the_reason(num_tokens: int) -> None:
    buffer = OutputBuffer(0, 4)
    buffer.add([1] * num_tokens, [-1.0] * num_tokens)
    assert [(len(c.token_ids), c.finish_reason) for c in buffer.flush("abort")] == [(num_tokens, "abort")]


@given(
    outputs=st.lists(st.integers(0, 7), min_size=1, max_size=20),
    commits_before=st.lists(st.integers(0, 19)),
    stream_interval=st.integers(1, 9),
)
def test_no_token_is_lost_reordered_or_mislabelled(
    outputs: list[int], commits_before: list[int], stream_interval: int
) -> None:
    """Reference: the plain list of (token, version) pairs in the order they were sampled."""
    version, expected, chunks = 0, [], []
    buffer = OutputBuffer(version, stream_interval)
    for index, num_new in enumerate(outputs):
        for _ in range(commits_before.count(index)):
            version += 1
            buffer.versions.append(len(expected), version)
        new = list(range(len(expected), len(expected) + num_new))
        expected += [(token, version) for token in new]
        buffer.add(new, [-float(token) for token in new])
        chunks += list(buffer.flush("stop" if index == len(outputs) - 1 else None))
    tokens = np.concatenate([c.token_ids for c in chunks])
    labels = [version for c in chunks for version in c.versions.tolist()]
    assert list(zip(tokens, labels, strict=True)) == expected
    assert np.array_equal(np.concatenate([c.logprobs for c in chunks]), -tokens.astype(np.float32))
    assert all(len(c.token_ids) <= stream_interval for c in chunks)
    assert all(len(c.token_ids) == stream_interval for c in chunks[:-1])
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


EARLIER, UNREAD = [-1.0, -2.0, -3.0], [-4.0, -5.0]


@pytest.mark.parametrize(
    ("num_tokens", "given", "finish_reason", "logprobs"),
    [
        (2, [-1.0, -2.0], None, [-1.0, -2.0]),
        # vLLM 0.25.1 repeats the log-probs of all earlier tokens in an abort, which has no new tokens ...
        (0, EARLIER, "abort", []),
        # ... also after those of tokens that were still unread when it came.
        (2, [*UNREAD, *EARLIER, *UNREAD], "abort", UNREAD),
        (1, [-1.0, -2.0], "stop", [-1.0, -2.0]),  # too many anywhere else are not hidden
    ],
)
def test_each_new_token_has_its_own_logprob(
    num_tokens: int, given: list[float], finish_reason: str | None, logprobs: list[float]
) -> None:
    output = SimpleNamespace(token_ids=[8] * num_tokens, logprobs=given, finish_reason=finish_reason)
    assert sampled_logprobs(output) == logprobs


# Stop strings

PIECES = [b"a", b"b", b"ab", b"</", b"s>", b"</s>", b" ", *(bytes([byte]) for byte in "é你😀".encode())]


def decode(token_ids: Sequence[int]) -> str:
    """As byte-level tokenizers do: what is no character yet reads as U+FFFD."""
    return b"".join(PIECES[token_id] for token_id in token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """As SentencePiece does: every token is a word with a space in front, and the first space of a text is dropped."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def matcher_of(stop: Sequence[str], context: list[int], prefix: list[int]) -> StopStringMatcher:
    params = SamplingParams(max_tokens=99, stop=tuple(stop), num_prefix_tokens=len(prefix))
    return StopStringMatcher(decode, np.array(context + prefix, np.int32), params)


@pytest.mark.parametrize("seed", range(40))
def test_a_response_ends_where_its_text_first_holds_a_stop_wherever_it_was_cut_and_chunked(seed: int) -> None:
    """Reference: the whole text after every token."""
    rng = random.Random(seed)
    stop = rng.sample(["</s>", "ab", "bab", "b</", "你", "é你", "😀", "a a", "s>s"], rng.randint(1, 3))
    context, response = ([rng.randrange(len(PIECES)) for _ in range(n)] for n in (5, 60))
    ends = (n for n in range(1, 61) if any(one in decode(response[:n]) for one in stop))
    end = next(ends, None)
    for cut in range(60 if end is None else end):
        matcher, num_before, size = matcher_of(stop, context, response[:cut]), cut, rng.choice([1, 2, 7, 60])
        found = None
        while found is None and num_before < 60:
            found = matcher.end(response[num_before : num_before + size])
            num_before += size if found is None else found
        assert (found is not None, min(num_before, 60)) == (end is not None, 60 if end is None else end), (stop, cut)


def test_the_text_of_the_prompt_is_no_part_of_the_response_but_white_space_at_its_border_is() -> None:
    assert matcher_of(["</s>"], [5, 3], []).end([4]) is None
    assert matcher_of(["</s>"], [5], [3]).end([4]) == 1
    params = SamplingParams(max_tokens=9, stop=(" w3 w4",), num_prefix_tokens=1)
    assert StopStringMatcher(decode_words, np.array([1, 2, 3], np.int32), params).end([4, 5]) == 1


def test_after_as_many_tokens_as_a_string_can_have_none_begins_in_the_prefix() -> None:
    matcher = matcher_of(["ab"], [0], [0])
    for _ in range(8):
        assert not matcher.is_past_prefix
        matcher.end([0])
    assert matcher.is_past_prefix


LONG = [0] * 40
"""Longer than any stop string can be."""


@pytest.mark.parametrize(
    ("drafts", "last", "reason", "kept", "finish"),
    [
        # vLLM 0.25.1 cuts the text there and leaves the tokens that were drafted in the same step.
        (True, [0, 5, 1, 2], "stop", [0, 5], "stop"),
        (True, [0, 5], "stop", [0, 5], "stop"),
        (False, [0, 5], "stop", [0, 5], "stop"),
        (True, [0, 1], "length", [0, 1], "length"),
        (False, [0, 1], "length", [0, 1], "length"),
    ],
)
def test_with_speculative_decoding_nothing_that_was_drafted_after_a_stop_string_stays(
    drafts: bool, last: list[int], reason: str, kept: list[int], finish: str
) -> None:
    queue: Any = None
    tokenizer: Any = SimpleNamespace(decode=lambda token_ids, **_: decode(token_ids))
    params = SamplingParams(max_tokens=99, stop=("</s>",))
    matcher = stop_string_matcher(tokenizer, np.array([0, 1], np.int32), params, drafts=drafts)
    request = ActiveRequest(queue, 0, 100, matcher=matcher, drafts=drafts)

    def output(start: int, tokens: list[int], reason: str | None) -> Any:
        values = [-float(start + i) for i in range(len(tokens))]
        return SimpleNamespace(token_ids=tokens, logprobs=values, finish_reason=reason)

    assert request.take(output(0, LONG, None)) is None
    found = request.take(output(40, last, reason))
    (chunk,) = request.output.flush(found)
    assert (chunk.token_ids.tolist(), chunk.finish_reason) == ([*LONG, *kept], finish)
    assert chunk.logprobs.tolist() == [-float(i) for i in range(40 + len(kept))]


@pytest.mark.parametrize("stop", [("",), ("a", ""), "ab", (3,)])
def test_a_stop_is_a_tuple_of_texts_that_are_not_empty(stop: object) -> None:
    with pytest.raises(ValueError, match="must be a tuple of texts that are not empty"):
        SamplingParams(max_tokens=1, stop=stop)  # type: ignore[arg-type]


async def test_an_engine_without_a_tokenizer_refuses_stop_strings() -> None:
    params = SamplingParams(max_tokens=1, stop=("x",))
    with pytest.raises(ValueError, match=r"give the engine EngineSpec\.tokenizer"):
        await anext(VllmEngine(EngineSpec(model="m")).generate("a", np.array([1], np.int32), params))
