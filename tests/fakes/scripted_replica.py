"""A replica without a model, for simulations in virtual time.

`ScriptedEngine` keeps the contract of one engine token by token. `ScriptedReplica` is an `EngineClient`, draws the
length and the speed of every response from a `Workload`, and can die, hang, miss a commit or be slow. It works chunk by
chunk, so that simulations of 100,000 groups take seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollout.engine.interface import EngineStatus
from rollout.engine.load_meter import Activity
from rollout.engine.request_state import VersionSpans
from rollout.errors import EngineDead
from rollout.types import FinishReason, TokenChunk

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterator, Sequence

    from rollout.types import SamplingParams


class Counting:
    """A tokenizer that decodes to the number of tokens: the cost of texts is not what is simulated."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(len(token_ids)) if skip_special_tokens else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """How long responses are and how fast they come."""

    min_tokens: int = 16
    """Of an response that no budget cuts; lengths are Pareto above it."""
    tail: float = 1.2
    """Pareto shape of the lengths; at 1 and below their mean is infinite, and budgets do all the cutting."""
    token_s: tuple[float, float] = (0.01, 0.05)
    """Range of the time per token; each response has one of its own."""
    first_token_s: float = 0.2
    """Mean of the exponential time before the first token: queue and prefill."""
    stream_interval: int = 64
    """Tokens per chunk."""
    kv_requests: int = 64
    """So many requests fill the KV cache; more of them are reported to wait."""

    def draw_tokens(self, rng: random.Random, budget: int) -> tuple[int, FinishReason]:
        """The length of an response with room for `budget` tokens, and why it ends there."""
        length = self.min_tokens * rng.paretovariate(self.tail)
        return (int(length), "stop") if length < budget else (budget, "length")


class _Response:
    """One request. Tokens are sampled evenly from `_began` to `due`, which bound the current chunk."""

    def __init__(self, num_context: int, length: tuple[int, FinishReason], *, token_s: float, version: int) -> None:
        self.num_tokens: int = length[0]
        self._finish_reason: FinishReason = length[1]
        self._num_context = num_context
        self._token_s = token_s
        self._labels = VersionSpans(version)
        self._num_emitted = 0
        self._began = self.due = 0.0
        self.is_over = False

    def begin_chunk(self, now: float, stream_interval: int) -> None:
        self._began = now
        self.due = now + self._token_s * min(stream_interval, self.num_tokens - self._num_emitted)

    def num_sampled(self, now: float) -> int:
        """Tokens that exist by now, emitted or not."""
        since = max(0.0, now - self._began)
        return min(self.num_tokens, self._num_emitted + int(since / self._token_s))

    def switch(self, now: float, version: int, pause_s: float) -> None:
        """`version` samples everything from now on, after a pause."""
        self._labels.append(self.num_sampled(now), version)
        self._began += pause_s
        self.due += pause_s

    def give_back(self, now: float) -> None:
        """Ends now with what was sampled."""
        self.num_tokens, self._finish_reason, self.due = self.num_sampled(now), "abort", now

    def cut(self, now: float, stream_interval: int) -> TokenChunk:
        """The chunk that is due; the next one begins. The ids are the positions in the whole sequence."""
        first, last = self._num_emitted, min(self._num_emitted + stream_interval, self.num_tokens)
        self._num_emitted = last
        is_last = last == self.num_tokens
        self.is_over = is_last
        if not is_last:
            self.begin_chunk(now, stream_interval)
        return TokenChunk(
            token_ids=np.arange(self._num_context + first, self._num_context + last, dtype=np.int32),
            logprobs=np.full(last - first, -1.0, np.float32),
            versions=self._labels.of(first, last),
            finish_reason=self._finish_reason if is_last else None,
        )


class _Stream:
    """The responses of one call, in the order in which their chunks are due."""

    def __init__(self, request_ids: Sequence[str], responses: Sequence[_Response]) -> None:
        self._request_ids, self._responses = request_ids, responses
        self._wakes: asyncio.Future[None] | None = None
        self._due: list[tuple[float, int]] = []
        self.sort()

    def open_responses(self) -> Iterator[_Response]:
        return (response for response in self._responses if not response.is_over)

    def give_back(self, now: float, request_ids: Collection[str] | None = None) -> None:
        """Ends those of the requests that it has (None: all) with what was sampled."""
        for request_id, response in zip(self._request_ids, self._responses, strict=True):
            if not response.is_over and (request_ids is None or request_id in request_ids):
                response.give_back(now)
        self.sort()

    def switch(self, now: float, version: int, pause_s: float) -> None:
        for response in self.open_responses():
            response.switch(now, version, pause_s)
        self.sort()

    def sort(self) -> None:
        """Due times have changed; waiting tasks look again."""
        self._due = [(response.due, index) for index, response in enumerate(self._responses) if not response.is_over]
        heapq.heapify(self._due)
        self.wake()

    def wake(self) -> None:
        if self._wakes is not None and not self._wakes.done():
            self._wakes.set_result(None)

    @property
    def is_over(self) -> bool:
        return not self._due

    async def wait(self, *, indefinitely: bool) -> None:
        """Waits for: the earliest chunk, unless `indefinitely`. Unblocked by: its time; `wake`."""
        loop = asyncio.get_running_loop()
        if not indefinitely and self._due[0][0] <= loop.time():
            return
        self._wakes = loop.create_future()
        timer = None if indefinitely else loop.call_at(self._due[0][0], self.wake)
        try:
            await self._wakes
        finally:
            if timer is not None:
                timer.cancel()

    def cut(self, now: float, stream_interval: int) -> tuple[int, TokenChunk] | None:
        """The next chunk that is due by now, if there is one."""
        if not self._due or self._due[0][0] > now:
            return None
        _, index = heapq.heappop(self._due)
        response = self._responses[index]
        chunk = response.cut(now, stream_interval)
        if chunk.finish_reason is None:
            heapq.heappush(self._due, (response.due, index))
        return index, chunk


class ScriptedReplica:
    """An `EngineClient` in the time of the running event loop.

    Token ids are positions in the whole sequence, prompt included, so an response that was continued elsewhere shows
    every lost or repeated token.

    Args:
        name: of the replica.
        workload: lengths and speeds.
        version: the weights that it begins with.
        seed: of its draws; with virtual time a run repeats itself.
    """

    def __init__(self, name: str, *, workload: Workload, version: int, seed: int) -> None:
        self._name = name
        self._workload = workload
        self._version = version
        self._rng = random.Random(seed)
        self._streams: dict[_Stream, None] = {}  # in the order in which they came: a world can be played again
        self._activity = Activity(lambda: asyncio.get_running_loop().time())
        self.num_answers = 0
        """Begun so far."""
        self._dead_reason = ""
        self._hangs = False
        self._is_awake = asyncio.Event()
        self._is_awake.set()

    @property
    def name(self) -> str:
        return self._name

    @property
    def version(self) -> int:
        return self._version

    @property
    def is_dead(self) -> bool:
        return bool(self._dead_reason)

    @property
    def is_asleep(self) -> bool:
        return not self._is_awake.is_set()

    @property
    def num_streams(self) -> int:
        """Calls under way."""
        return len(self._streams)

    @property
    def num_open(self) -> int:
        """Answers under way."""
        return sum(1 for stream in self._streams for _ in stream.open_responses())

    async def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """See `EngineClient`.

        Raises:
            ValueError: there is a stop string; its tokens are no text.
        """
        if any(one.stop for one in params):
            raise ValueError("a scripted replica has no text and cannot find stop strings; use a ScriptedEngine")
        self._check_alive()
        await self._is_awake.wait()
        self._check_alive()
        clock = asyncio.get_running_loop().time
        chunk_tokens = self._workload.stream_interval
        responses = [self._begin(len(t), p.max_tokens) for t, p in zip(token_ids, params, strict=True)]
        stream = _Stream(request_ids, responses)
        if not self._streams:
            self._activity.begin()
        self._streams[stream] = None
        try:
            while not stream.is_over:
                await stream.wait(indefinitely=self._hangs)
                self._check_alive()
                while not self._hangs and (item := stream.cut(clock(), chunk_tokens)) is not None:
                    yield item
        finally:
            self._streams.pop(stream, None)
            if not self._streams:
                self._activity.end()

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `EngineClient`."""
        for stream in self._streams:
            stream.give_back(asyncio.get_running_loop().time(), set(request_ids))

    async def load(self) -> EngineStatus:
        """See `EngineClient`."""
        self._check_alive()
        num_open, room = self.num_open, self._workload.kv_requests
        return EngineStatus(
            running=min(num_open, room),
            waiting=max(0, num_open - room),
            kv_usage_frac=min(1.0, num_open / room),
            num_preemptions=0,
            times=self._activity.times(),
        )

    def _begin(self, num_context: int, budget: int) -> _Response:
        rng, workload = self._rng, self._workload
        self.num_answers += 1
        response = _Response(
            num_context,
            workload.draw_tokens(rng, budget),
            token_s=rng.uniform(*workload.token_s),
            version=self._version,
        )
        delay_s = rng.expovariate(1 / workload.first_token_s) if workload.first_token_s else 0.0
        response.begin_chunk(asyncio.get_running_loop().time() + delay_s, workload.stream_interval)
        return response

    def commit(self, version: int, *, pause_s: float, gives_back: bool = False) -> None:
        """`version` samples from now on; `gives_back` ends every request with "abort" instead of keeping it."""
        self._check_alive()
        now = asyncio.get_running_loop().time()
        for stream in self._streams:
            if gives_back:
                stream.give_back(now)
            else:
                stream.switch(now, version, pause_s)
        self._version = version
        self._is_awake.set()

    async def sleep(self) -> None:
        """Every request ends with "abort"; new calls wait for the next commit. One that hangs never responses."""
        if self._hangs:
            await asyncio.get_running_loop().create_future()
        self._check_alive()
        self._is_awake.clear()
        for stream in self._streams:
            stream.give_back(asyncio.get_running_loop().time())

    def hang(self) -> None:
        """Answers nothing more, until it dies."""
        self._hangs = True

    def die(self, reason: str) -> None:
        """Every stream and every later call raises `EngineDead`."""
        self._dead_reason = self._dead_reason or reason
        self._is_awake.set()
        for stream in self._streams:
            stream.wake()

    def _check_alive(self) -> None:
        if self._dead_reason:
            raise EngineDead(f"{self._name} is dead: {self._dead_reason}; use another replica")
