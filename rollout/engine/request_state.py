"""The requests inside one engine: what each has generated, under which version, and when it ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import TokenChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm.v1.engine.output_processor import RequestOutputCollector

    from rollout.engine.load_meter import Activity
    from rollout.types import FinishReason, SamplingParams

    Decode = Callable[[Sequence[int]], str]
    """Tokens to text, special tokens spelled out."""


MAX_READMISSIONS = 8
"""Then a request stays in: one whose prompt takes longer than the time between commits would never have a token."""


class RequestTable:
    """The requests of one engine, each from its call to its last chunk.

    open ─> waiting ─ enter ─> running ─ readmit_unstarted ─> waiting ...

    An abort reaches a request at every moment: a running one by way of vLLM, and an entering one through `enter`.
    """

    def __init__(self, activity: Activity) -> None:
        self.running: dict[str, ActiveRequest] = {}
        """One that was taken out stays in here until it is back: its stream must learn of the engine's death."""
        self._activity = activity
        self._waiting, self._aborted = set[str](), set[str]()
        self._num_readmissions = Counter[str]()

    @contextmanager
    def open(self, request_id: str) -> Iterator[None]:
        """Around all of a request, which starts as waiting. Raises ValueError if there is one with this id."""
        if request_id in self.running or request_id in self._waiting:
            raise ValueError(f"request {request_id!r} is already running; request ids must be unique per engine")
        self._waiting.add(request_id)
        try:
            yield
        finally:
            self._waiting.discard(request_id)
            self._aborted.discard(request_id)
            self._num_readmissions.pop(request_id, None)
            if self.running.pop(request_id, None) is not None and not self.running:
                self._activity.end()

    def enter(self, request_id: str, request: ActiveRequest) -> bool:
        """vLLM has the request. False if it was aborted before, so that vLLM must abort it."""
        if not self.running:
            self._activity.begin()
        self.running[request_id] = request
        self._waiting.discard(request_id)
        return request_id not in self._aborted

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self._waiting

    def note_abort(self, request_id: str) -> bool:
        """Whether vLLM must abort it now. Kept in any case: the request may just be taken out."""
        if request_id in self.running or request_id in self._waiting:
            self._aborted.add(request_id)
        return request_id in self.running

    def num_tokens(self, request_states: Mapping[str, Any]) -> list[tuple[str, ActiveRequest, int]]:
        """How many tokens each request in vLLM's output processor has so far; finished ones have left it."""
        found = ((key, one, request_states.get(one.queue.request_id)) for key, one in self.running.items())
        return [
            (key, one, state.detokenizer.num_output_tokens())
            for key, one, state in found
            if state is not None and state.detokenizer is not None
        ]

    def readmit_unstarted(self, request_states: Mapping[str, Any]) -> list[str]:
        """Requests without a token, oldest first, by vLLM's ids, for it to abort. Their streams notice by the output
        that this produces, and enter again."""
        unstarted = {
            key: one
            for key, one, num_tokens in self.num_tokens(request_states)
            if not num_tokens and self._num_readmissions[key] < MAX_READMISSIONS
        }
        self._waiting.update(unstarted)
        self._num_readmissions.update(unstarted.keys())
        return [one.queue.request_id for one in unstarted.values()]


class ActiveRequest:
    """A request that vLLM has.

    Args:
        queue: vLLM's outputs of it.
        version: the policy version that it starts under.
        matcher: for stop strings that vLLM does not end a response at: those that begin before what it generates; with
            speculative decoding all, since 0.25.1 leaves what the same step drafted after them.
        drafts: whether a step may give a response several tokens.
    """

    def __init__(
        self,
        queue: RequestOutputCollector,
        version: int,
        stream_interval: int,
        *,
        matcher: StopStringMatcher | None = None,
        drafts: bool = False,
    ) -> None:
        self.queue = queue
        self.output = OutputBuffer(version, stream_interval)
        self._matcher, self._drafts = matcher, drafts

    async def next_output(self) -> Any:
        """One that is there already costs no turn of the event loop."""
        return self.queue.get_nowait() or await self.queue.get()

    def take(self, completion: Any) -> FinishReason | None:
        """Add vLLM's new tokens, up to a stop string that it left inside. The reason if the response ends there."""
        token_ids, logprobs = completion.token_ids, sampled_logprobs(completion)
        finish = completion.finish_reason
        if finish not in (None, "stop", "length", "abort"):
            raise RuntimeError(f"engine ended a request with {finish!r}; expected stop, length or abort")
        end = None if self._matcher is None else self._matcher.end(token_ids)
        if end is not None:
            token_ids, logprobs, finish = token_ids[:end], logprobs[:end], "stop"
        elif self._matcher is not None and self._matcher.is_past_prefix and not self._drafts:
            self._matcher = None
        self.output.add(token_ids, logprobs)
        return finish


class VersionSpans:
    """Which policy version sampled which token of one request.

    Example: a request that started under version 3 and had 10 tokens when version 4 was committed:
        spans = VersionSpans(3); spans.append(10, 4)
        spans.of(8, 12)  # [3, 3, 4, 4]
    """

    def __init__(self, version: int) -> None:
        self._starts: list[tuple[int, int]] = [(0, version)]

    def append(self, at: int, version: int) -> None:
        """Tokens from index `at` on are sampled by `version`. Raises ValueError if `at` is before an earlier switch."""
        last_at = self._starts[-1][0]
        if at < last_at:
            raise ValueError(f"switch at token {at} is before the last switch at {last_at}; switches move forward")
        if at == last_at:
            self._starts.pop()
        self._starts.append((at, version))

    def of(self, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: of tokens `[start, stop)`."""
        begins, versions = zip(*self._starts, strict=True)
        return np.array(versions, np.int32)[np.searchsorted(begins, np.arange(start, stop), side="right") - 1]


class OutputBuffer:
    """Collects a request's tokens and cuts them into chunks of at most `stream_interval` tokens."""

    def __init__(self, version: int, stream_interval: int) -> None:
        self.versions = VersionSpans(version)
        self._stream_interval = stream_interval
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._num_emitted = 0

    @property
    def num_tokens(self) -> int:
        """Tokens received, emitted or not."""
        return self._num_emitted + len(self._token_ids)

    def add(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        if len(token_ids) != len(logprobs):
            raise ValueError(f"got {len(token_ids)} tokens with {len(logprobs)} log-probs; the engine must give both")
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def flush(self, finish_reason: FinishReason | None) -> Iterator[TokenChunk]:
        """Every full chunk; with a finish reason also the rest, and the reason on the last one (which may be empty)."""
        num_kept = 0 if finish_reason is None else 1  # the last full chunk, too, waits to carry the reason
        while len(self._token_ids) >= self._stream_interval + num_kept:
            yield self._emit(self._stream_interval, None)
        if finish_reason is not None:
            yield self._emit(len(self._token_ids), finish_reason)

    def _emit(self, num_tokens: int, finish_reason: FinishReason | None) -> TokenChunk:
        start = self._num_emitted
        chunk = TokenChunk(
            token_ids=np.array(self._token_ids[:num_tokens], np.int32),
            logprobs=np.array(self._logprobs[:num_tokens], np.float32),
            versions=self.versions.of(start, start + num_tokens),
            finish_reason=finish_reason,
        )
        del self._token_ids[:num_tokens], self._logprobs[:num_tokens]
        self._num_emitted += num_tokens
        return chunk


class OutputBarrier:
    """Looks like one (empty) engine output to AsyncLLM's output handler, and shows when the handler came to it."""

    engine_index = 0
    scheduler_stats = None
    timestamp = 0.0
    weight_version = None

    def __init__(self) -> None:
        self.reached = asyncio.Event()

    @property
    def outputs(self) -> list[Any]:
        self.reached.set()
        return []


def sampled_logprobs(completion: Any) -> list[float]:
    """Of each new token, see `receive_step_logprobs`.

    An abort, which has no new tokens, carries all log-probs so far in vLLM 0.25.1, which slices them with `[-0:]`,
    after those of tokens that were unread when it came.
    """
    num_tokens, logprobs = len(completion.token_ids), completion.logprobs
    if not num_tokens or logprobs is None:
        return []
    return logprobs[:num_tokens] if completion.finish_reason == "abort" else logprobs


_BYTES_PER_CHARACTER = 4
_CONTEXT_TOKENS = 4
"""Decoded in front of the response: some tokenizers drop the white space that a text begins with."""


class StopStringMatcher:
    """Finds the token that completes a stop string in one response.

    Args:
        token_ids: int32[T], what the engine continues; the last `params.num_prefix_tokens` belong to the response.
        params: with at least one stop string.

    Example:
        matcher = StopStringMatcher(tokenizer.decode, prompt, SamplingParams(max_tokens=9, stop=("</search>",)))
        matcher.end(new_tokens)  # 3: the third of them completes it; None: none does
    """

    def __init__(self, decode: Decode, token_ids: np.ndarray, params: SamplingParams) -> None:
        self._decode, self._stop = decode, params.stop
        # A token is at least a byte of the text, so no string is longer than this many tokens.
        self._window = _BYTES_PER_CHARACTER * max(map(len, params.stop))
        num_kept = min(params.num_prefix_tokens, self._window)
        self._tokens: list[int] = token_ids[-(num_kept + _CONTEXT_TOKENS) :].tolist()
        self._first = len(self._tokens) - num_kept
        """Where in `_tokens` the part of the response begins that a match may begin in."""
        self._num_seen = 0

    @property
    def is_past_prefix(self) -> bool:
        """Whether no string can begin in what the response had when it came here."""
        return self._num_seen >= self._window

    def end(self, token_ids: Sequence[int]) -> int | None:
        """How many of the next tokens the response has, the completing one included; None if none completes a string.
        Decodes once for a chunk, and token by token only where it may complete a string."""
        text = self._decode([*self._tokens, *token_ids])
        if not any(stop in text for stop in self._stop):
            self._append(token_ids)
            return None
        for number, token_id in enumerate(token_ids, start=1):
            self._append([token_id])
            text, begin = self._decode(self._tokens), len(self._decode(self._tokens[: self._first]))
            if any(text.find(stop, begin) >= 0 for stop in self._stop):
                return number
        return None

    def _append(self, token_ids: Sequence[int]) -> None:
        self._num_seen += len(token_ids)
        self._tokens += token_ids
        self._first = max(self._first, len(self._tokens) - self._window)
        del self._tokens[: max(0, self._first - _CONTEXT_TOKENS)]
        self._first = min(self._first, _CONTEXT_TOKENS)


def stop_string_matcher(
    tokenizer: Any, token_ids: np.ndarray, params: SamplingParams, *, drafts: bool = False
) -> StopStringMatcher | None:
    """For stop strings that vLLM does not end a response at (see `ActiveRequest`); None where there are none. Raises
    ValueError if there is no tokenizer (None) to find them with."""
    if not params.stop:
        return None
    if tokenizer is None:
        raise ValueError(f"stop strings {params.stop} need text; give the engine EngineSpec.tokenizer")
    if not params.num_prefix_tokens and not drafts:
        return None
    return StopStringMatcher(partial(tokenizer.decode, clean_up_tokenization_spaces=False), token_ids, params)
