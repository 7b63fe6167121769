"""The requests of one engine: their tokens, versions and log-probs, and where their answers end."""

from __future__ import annotations

import asyncio
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
from tests.fakes.scripted_replica import ScriptedReplica, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

# Tokens, versions, chunks


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
    stream_interval=st.integers(1, 9),
)
def test_no_token_is_lost_reordered_or_mislabelled(
    outputs: list[int], commit_before: set[int], stream_interval: int
) -> None:
    """Reference: the plain list of (token, version) pairs in the order they were sampled."""
    version, expected, chunks = 0, [], []
    builder = OutputBuffer(VersionSpans(version), stream_interval)
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
    assert all(len(c.token_ids) <= stream_interval for c in chunks)
    assert all(len(c.token_ids) == stream_interval for c in chunks[:-1])
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


class SlowOutputPath:
    """Like AsyncLLM: one handler takes outputs from a queue, in order, and counts their tokens per request."""

    def __init__(self) -> None:
        self.errored = False
        self.num_tokens = 0
        state = SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: self.num_tokens))
        self.output_processor = SimpleNamespace(request_states={"inner-id": state})
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())

    async def handle(self) -> None:
        while True:
            output = await self.engine_core.outputs_queue.get()
            for _ in output.outputs:
                await asyncio.sleep(0.005)
                self.num_tokens += 1


def make_engine(llm: SlowOutputPath) -> tuple[VllmEngine, ActiveRequest]:
    engine = VllmEngine(EngineSpec(model="m"))
    queue: Any = SimpleNamespace(request_id="inner-id")
    gone: Any = SimpleNamespace(request_id="finished-id")
    live = ActiveRequest(queue, 0, 4)
    engine._requests.enter("r", live)
    engine._requests.enter("finished", ActiveRequest(gone, 0, 4))
    return engine, live


async def test_outputs_on_their_way_count_for_the_old_version() -> None:
    llm: Any = SlowOutputPath()
    engine, live = make_engine(llm)
    for num_tokens in (2, 3):
        llm.engine_core.outputs_queue.put_nowait(SimpleNamespace(outputs=[0] * num_tokens))
    handler = asyncio.create_task(llm.handle())
    assert await engine._count_tokens(llm, 5.0) == [("r", live, 5)]
    handler.cancel()


async def test_an_output_path_that_stands_still_is_an_error_and_not_a_wrong_label() -> None:
    llm: Any = SlowOutputPath()
    engine, _ = make_engine(llm)
    with pytest.raises(TimeoutError, match="drain of outputs"):
        await engine._count_tokens(llm, 0.05)


def output(token_ids: list[int], positions: list[list[float]], finish_reason: str | None = None) -> SimpleNamespace:
    """An output with flat log-probs: per position the sampled token's first, then those of the best tokens."""
    starts = [sum(len(p) for p in positions[:i]) for i in range(len(positions))]
    flat = SimpleNamespace(logprobs=[value for p in positions for value in p], start_indices=starts)
    return SimpleNamespace(token_ids=token_ids, logprobs=flat, finish_reason=finish_reason)


def test_the_first_logprob_of_a_position_is_that_of_the_sampled_token() -> None:
    assert sampled_logprobs(output([5, 6], [[-1.0, -0.5], [-2.0]])) == [-1.0, -2.0]


def test_an_abort_without_new_tokens_has_no_new_logprobs() -> None:
    """vLLM 0.25.1 sends the log-probs of all earlier tokens again."""
    assert sampled_logprobs(output([], [[-1.0], [-2.0], [-3.0]], "abort")) == []


def test_an_abort_that_was_merged_into_unread_tokens_leaves_them_theirs() -> None:
    """Those two were not read yet when it came, and its log-probs of all five tokens were put behind theirs."""
    earlier = [[-1.0], [-2.0], [-3.0]]
    unread = [[-4.0, -0.5], [-5.0]]
    assert sampled_logprobs(output([8, 9], [*unread, *earlier, *unread], "abort")) == [-4.0, -5.0]


def test_too_many_logprobs_are_not_hidden_anywhere_else() -> None:
    assert len(sampled_logprobs(output([8], [[-1.0], [-2.0]]))) == 2
    assert len(sampled_logprobs(output([8], [[-1.0], [-2.0]], "stop"))) == 2


# Stop strings

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
