"""Which token completes a stop string, wherever the answer was cut before."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineSpec
from rollout.engine.request_state import ActiveRequest, StopStringMatcher, stop_string_matcher
from rollout.engine.vllm_engine import VllmEngine
from rollout.types import SamplingParams
from tests.fakes.scripted_replica import ScriptedReplica, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

PIECES = [b"a", b"b", b"ab", b"</", b"s>", b"</s>", b" ", *(bytes([byte]) for byte in "é你😀".encode())]


def decode(token_ids: Sequence[int]) -> str:
    """As byte-level tokenizers do: what is no character yet reads as U+FFFD."""
    return b"".join(PIECES[token_id] for token_id in token_ids).decode(errors="replace")


def decode_words(token_ids: Sequence[int]) -> str:
    """As SentencePiece does: every token is a word with a space in front, and the first space of a text is dropped."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def watch_of(stop: Sequence[str], context: list[int], prefix: list[int]) -> StopStringMatcher:
    params = SamplingParams(max_tokens=99, stop=tuple(stop), num_prefix_tokens=len(prefix))
    return StopStringMatcher(decode, np.array(context + prefix, np.int32), params)


def reference(answer: list[int], stop: Sequence[str]) -> int | None:
    """The whole text after every token."""
    ends = (n for n in range(1, len(answer) + 1) if any(one in decode(answer[:n]) for one in stop))
    return next(ends, None)


@pytest.mark.parametrize("seed", range(200))
def test_an_answer_ends_where_its_whole_text_first_holds_a_stop_wherever_it_was_cut(seed: int) -> None:
    rng = random.Random(seed)
    stop = rng.sample(["</s>", "ab", "bab", "b</", "你", "é你", "😀", "a a", "s>s"], rng.randint(1, 3))
    context, answer = ([rng.randrange(len(PIECES)) for _ in range(n)] for n in (5, 60))
    end = reference(answer, stop)
    for cut in range(len(answer) if end is None else end):
        watch = watch_of(stop, context, answer[:cut])
        found = watch.end(answer[cut:])
        assert found == (None if end is None else end - cut), (seed, stop, cut)


def test_chunks_of_any_size_give_the_same_end() -> None:
    answer = [0, 0, 1, 3, 0, 3, 4]
    for size in range(1, 8):
        watch, num_before = watch_of(["</s>"], [0], []), 0
        for start in range(0, len(answer), size):
            end = watch.end(answer[start : start + size])
            num_before += size if end is None else end
            if end is not None:
                break
        assert num_before == 7, size


def test_what_the_context_says_ends_nothing() -> None:
    assert watch_of(["</s>"], [5, 3], []).end([4]) is None
    assert watch_of(["</s>"], [5], [3]).end([4]) == 1


def test_white_space_at_the_border_of_the_prompt_is_part_of_the_text() -> None:
    params = SamplingParams(max_tokens=9, stop=(" w3 w4",), num_prefix_tokens=1)
    assert StopStringMatcher(decode_words, np.array([1, 2, 3], np.int32), params).end([4, 5]) == 1


def test_after_as_many_tokens_as_a_string_can_have_none_begins_in_the_prefix() -> None:
    watch = watch_of(["ab"], [0], [0])
    for _ in range(8):
        assert not watch.is_past_prefix
        watch.end([0])
    assert watch.is_past_prefix


def taken(outputs: list[tuple[list[int], str | None]], *, drafts: bool) -> tuple[list[int], list[float], str | None]:
    """What an answer with the stop string "</s>" has of vLLM's outputs: tokens, log-probs, and why it ended."""
    anything: Any = None
    tokenizer: Any = SimpleNamespace(decode=lambda token_ids, **_: decode(token_ids))
    params = SamplingParams(max_tokens=99, stop=("</s>",))
    watch = stop_string_matcher(tokenizer, np.array([0, 1], np.int32), params, drafts=drafts)
    live, number, finish = ActiveRequest(anything, 0, 100, matcher=watch, drafts=drafts), 0, None
    for tokens, reason in outputs:
        flat = SimpleNamespace(
            logprobs=[-float(number + i) for i in range(len(tokens))], start_indices=range(len(tokens))
        )
        number += len(tokens)
        finish = live.take(SimpleNamespace(token_ids=tokens, logprobs=flat, finish_reason=reason))
        if finish is not None:
            break
    (chunk,) = live.output.flush(finish)
    return chunk.token_ids.tolist(), chunk.logprobs.tolist(), chunk.finish_reason


LONG = [0] * 40
"""Longer than any stop string can be."""


def test_with_speculative_decoding_nothing_that_was_drafted_behind_a_stop_string_stays() -> None:
    """vLLM 0.25.1 cuts the text there and leaves the tokens of the same step."""
    tokens, logprobs, finish = taken([(LONG, None), ([0, 5, 1, 2], "stop")], drafts=True)
    assert (tokens, finish) == ([*LONG, 0, 5], "stop")
    assert logprobs == [-float(i) for i in range(42)]


@pytest.mark.parametrize("drafts", [False, True])
def test_where_vllm_ended_the_answer_itself_it_is_left_as_it_is(drafts: bool) -> None:
    assert taken([(LONG, None), ([0, 5], "stop")], drafts=drafts)[::2] == ([*LONG, 0, 5], "stop")
    assert taken([(LONG, None), ([0, 1], "length")], drafts=drafts)[::2] == ([*LONG, 0, 1], "length")


@pytest.mark.parametrize("stop", [("",), ("a", ""), "ab", (3,)])
def test_a_stop_is_a_tuple_of_texts_that_are_not_empty(stop: object) -> None:
    with pytest.raises(ValueError, match="must be a tuple of texts that are not empty"):
        SamplingParams(max_tokens=1, stop=stop)  # type: ignore[arg-type]


async def test_an_engine_without_a_tokenizer_refuses_stop_strings() -> None:
    params = SamplingParams(max_tokens=1, stop=("x",))
    with pytest.raises(ValueError, match=r"give the engine EngineSpec\.tokenizer"):
        await anext(VllmEngine(EngineSpec(model="m")).generate("a", np.array([1], np.int32), params))


async def test_a_replica_without_text_refuses_stop_strings() -> None:
    replica = ScriptedReplica("r", workload=Workload(), version=0, seed=0)
    params = SamplingParams(max_tokens=1, stop=("x",))
    with pytest.raises(ValueError, match="has no text"):
        await anext(replica.stream_group(["a"], [np.array([1], np.int32)], [params]))
