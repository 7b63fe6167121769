"""In-process engine replicas for tests of the rollout worker.

Every token is a hash of all tokens before it. So an answer is right if, and only if, each submission carried exactly
the prompt and the tokens so far, however often it was interrupted.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rollout.engine.request_state import StopStringMatcher
from rollout.errors import EngineDead
from rollout.types import TokenChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from rollout.engine.interface import EngineStatus
    from rollout.types import FinishReason, SamplingParams

STOP_TOKEN = 0


def next_token(context: np.ndarray, stop_one_in: int) -> int:
    value = zlib.crc32(np.asarray(context, np.int32).tobytes())
    return STOP_TOKEN if value % stop_one_in == 0 else 1 + value % 50


def decode(token_ids: Sequence[int]) -> str:
    """A letter per token."""
    return "".join(chr(ord("A") + token_id) for token_id in token_ids)


def expected_answer(context: np.ndarray, max_tokens: int, *, stop_one_in: int = 10_000) -> list[int]:
    """The answer of an engine that is never interrupted."""
    tokens = list(context)
    for _ in range(max_tokens):
        tokens.append(next_token(np.array(tokens, np.int32), stop_one_in))
        if tokens[-1] == STOP_TOKEN:
            break
    return tokens[len(context) :]


@dataclass
class Call:
    request_ids: list[str]
    token_ids: list[list[int]]
    params: list[SamplingParams]
    is_closed: bool = False


@dataclass
class FakeEngine:
    """Generates `chunk_tokens` per step for all requests of a call; `version` labels them, and may be changed."""

    name: str
    version: int = 0
    chunk_tokens: int = 3
    stop_one_in: int = 10_000
    step_s: float = 0.01
    die_after_chunks: int | None = None
    """Chunks of all calls after which the replica is dead, for good."""
    give_back_after_chunks: int | None = None
    """Chunks per request after which it is given back with "abort"."""
    hangs: bool = False
    said_load: EngineStatus | None = None
    """The load that it reports; without one it replies to no poll."""
    calls: list[Call] = field(default_factory=list)
    num_chunks: int = 0
    now: int = 0
    """Requests that it has."""
    most: int = 0
    """The most that it had at once."""
    num_abort_calls: int = 0
    aborted: set[str] = field(default_factory=set)
    """All that it ever had to return."""
    leaving: set[str] = field(default_factory=set)
    """What it still has of these; an id may be used again."""

    async def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        call = Call(list(request_ids), [tokens.tolist() for tokens in token_ids], list(params))
        self.calls.append(call)
        sequences = [tokens.tolist() for tokens in token_ids]
        left = {index: one.max_tokens for index, one in enumerate(params)}
        given: dict[int, int] = dict.fromkeys(left, 0)
        self.now += len(left)
        self.most = max(self.most, self.now)
        stops = [StopStringMatcher(decode, t, p) if p.stop else None for t, p in zip(token_ids, params, strict=True)]
        try:
            while left:
                await asyncio.sleep(3600 if self.hangs else self.step_s)
                for index in list(left):
                    if self.die_after_chunks is not None and self.num_chunks >= self.die_after_chunks:
                        raise EngineDead(f"{self.name} was killed")
                    if given[index] == self.give_back_after_chunks or request_ids[index] in self.leaving:
                        del left[index]
                        self.now -= 1
                        yield index, self._completion([], "abort")
                        continue
                    chunk = self._chunk(sequences[index], left[index], stops[index])
                    left[index] -= len(chunk.token_ids)
                    given[index] += 1
                    self.num_chunks += 1
                    if chunk.finish_reason is not None:
                        del left[index]
                        self.now -= 1
                    yield index, chunk
        finally:
            self.now -= len(left)
            call.is_closed = True
            self.leaving.difference_update(request_ids)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.num_abort_calls += 1
        self.aborted.update(request_ids)
        running = {one for call in self.calls if not call.is_closed for one in call.request_ids}
        self.leaving |= running.intersection(request_ids)

    async def load(self) -> EngineStatus:
        if self.said_load is None:
            raise EngineDead(f"{self.name} does not answer")
        return self.said_load

    def _chunk(self, sequence: list[int], budget: int, stops: StopStringMatcher | None) -> TokenChunk:
        tokens: list[int] = []
        while len(tokens) < min(self.chunk_tokens, budget):
            tokens.append(next_token(np.array(sequence, np.int32), self.stop_one_in))
            sequence.append(tokens[-1])
            if tokens[-1] == STOP_TOKEN or (stops is not None and stops.end(tokens[-1:]) is not None):
                return self._completion(tokens, "stop")
        return self._completion(tokens, "length" if len(tokens) == budget else None)

    def _completion(self, tokens: list[int], finish_reason: FinishReason | None) -> TokenChunk:
        return TokenChunk(
            token_ids=np.array(tokens, np.int32),
            logprobs=-np.array(tokens, np.float32),
            versions=np.full(len(tokens), self.version, np.int32),
            finish_reason=finish_reason,
        )
