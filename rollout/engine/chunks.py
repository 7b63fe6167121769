"""From engine outputs to labelled chunks: pure bookkeeping of one request, without an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.types import Completion, FinishReason, Segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class VersionLabels:
    """Which policy version sampled which token of one request.

    Example: a request that started under version 3 and had 10 tokens when version 4 was committed:
        labels = VersionLabels(3); labels.switch(10, 4)
        labels.segments(8, 12) == (Segment(version=3, num_tokens=2), Segment(version=4, num_tokens=2))
    """

    def __init__(self, version: int) -> None:
        self._starts: list[tuple[int, int]] = [(0, version)]

    def switch(self, at: int, version: int) -> None:
        """Tokens from index `at` on are sampled by `version`.

        Raises:
            ValueError: `at` lies before an earlier switch.
        """
        last_at = self._starts[-1][0]
        if at < last_at:
            raise ValueError(f"switch at token {at} lies before the last switch at {last_at}; switches go forward")
        if at == last_at:
            self._starts[-1] = (at, version)
        else:
            self._starts.append((at, version))

    def segments(self, start: int, stop: int) -> tuple[Segment, ...]:
        """The labels of tokens `[start, stop)`; empty for an empty range."""
        ends = [begin for begin, _ in self._starts[1:]] + [stop]
        found = []
        for (begin, version), end in zip(self._starts, ends, strict=True):
            num_tokens = min(end, stop) - max(begin, start)
            if num_tokens > 0:
                found.append(Segment(version=version, num_tokens=num_tokens))
        return tuple(found)


class ChunkBuilder:
    """Collects a request's tokens and cuts them into completions of at most `stream_tokens` tokens."""

    def __init__(self, labels: VersionLabels, stream_tokens: int) -> None:
        self.labels = labels
        self._stream_tokens = stream_tokens
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

    def cut(self, finish_reason: FinishReason | None) -> Iterator[Completion]:
        """Every full chunk; with a finish reason also the rest, and the reason on the last one (which may be empty)."""
        if finish_reason is None:
            while len(self._token_ids) >= self._stream_tokens:
                yield self._emit(self._stream_tokens, None)
            return
        while len(self._token_ids) > self._stream_tokens:
            yield self._emit(self._stream_tokens, None)
        yield self._emit(len(self._token_ids), finish_reason)

    def _emit(self, num_tokens: int, finish_reason: FinishReason | None) -> Completion:
        start = self._num_emitted
        completion = Completion(
            token_ids=np.array(self._token_ids[:num_tokens], np.int32),
            logprobs=np.array(self._logprobs[:num_tokens], np.float32),
            segments=self.labels.segments(start, start + num_tokens),
            finish_reason=finish_reason,
        )
        del self._token_ids[:num_tokens], self._logprobs[:num_tokens]
        self._num_emitted += num_tokens
        return completion
