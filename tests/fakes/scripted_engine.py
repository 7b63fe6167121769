"""An engine without a model, which generates what a script returns.

`ScriptedEngine` keeps the same contract as the real engine (chunks, labels, commits, death) without a model, a process
or a device, so the code around an engine can be tested in milliseconds. It is never reachable from a configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engine.interface import Engine, EngineSpec, EngineStatus
from rollout.engine.load_meter import Activity
from rollout.engine.request_state import OutputBuffer, StopStringMatcher
from rollout.engine.weight_commit import EngineGate
from rollout.errors import EngineDead
from weight_sync.messages import CommitResult, Reply, encode, reply_state

if TYPE_CHECKING:
    from rollout.types import FinishReason, SamplingParams, TokenChunk


Script = Callable[[np.ndarray, int, int], tuple[int, float]]
"""(prompt int32[T], position of the token in the answer, live version) -> (token id, log-prob)."""
WorkerScript = Callable[[str, tuple[object, ...]], list[Any]]
"""(method, arguments) -> one result per worker. May raise."""


def letter_script(prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
    """Every token is `100 + version`: the token itself shows which version sampled it."""
    return 100 + version, -0.5


def obedient_workers(method: str, args: tuple[object, ...]) -> list[Any]:
    """One worker that agrees to everything."""
    return [encode(Reply(ok=True))]


@dataclass(slots=True)
class _Live:
    output: OutputBuffer
    matcher: StopStringMatcher | None
    ended_by: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class Faults:
    """What shall go wrong; tests change the fields while the engine runs."""

    die_after_tokens: int | None = None
    """The engine dies when it has generated this many tokens in all."""
    hang_generation: bool = False
    """Streams stand still."""


class ScriptedEngine(Engine):
    """Generates what `script` returns: `token_s` per token and `worker_s` per worker call, in seconds of `sleep`. Stop
    strings need `decode`."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        script: Script = letter_script,
        workers: WorkerScript = obedient_workers,
        decode: Callable[[Sequence[int]], str] | None = None,
        token_s: float = 0.0,
        worker_s: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._script = script
        self._workers = workers
        self._decode = decode
        self._token_s = token_s
        self._worker_s = worker_s
        self._sleep = sleep
        self._clock = clock
        self.faults = Faults()
        self._version = spec.initial_version
        self._gate = EngineGate(resume=self.wake, give_up=self._give_up, pause_limit_s=spec.pause_limit_s, clock=clock)
        self._activity = Activity(clock)
        self._live: dict[str, _Live] = {}
        self._entering: set[str] = set()
        self._cancelled: set[str] = set()
        self._changed = asyncio.Condition()
        self._dead_reason = "it is not started"
        self._generated_tokens = 0
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> dict[str, float]:
        self._dead_reason = ""
        return {}

    async def generate(
        self, request_id: str, token_ids: np.ndarray, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        live = await self._admit(request_id, token_ids, params)
        try:
            finish = live.ended_by
            while finish is None:
                finish = await self._step(live, token_ids, params)
                for chunk in live.output.flush(None) if finish is None else ():
                    yield chunk
            for chunk in live.output.flush(finish):
                yield chunk
        finally:
            self._live.pop(request_id, None)
            if not self._live:
                self._activity.end()

    async def _admit(self, request_id: str, token_ids: np.ndarray, params: SamplingParams) -> _Live:
        if request_id in self._live or request_id in self._entering:
            raise ValueError(f"request {request_id!r} is already running; request ids must be unique per engine")
        self._spec.check_prompt(len(token_ids))
        matcher = self._matcher(token_ids, params) if params.stop else None
        self._check_alive()
        self._entering.add(request_id)
        try:
            async with self._gate.admission():
                self._check_alive()
                live = _Live(OutputBuffer(self._version, self._spec.stream_interval), matcher)
                live.ended_by = "abort" if request_id in self._cancelled else None
                if not self._live:
                    self._activity.begin()
                self._live[request_id] = live
                return live
        finally:
            self._entering.discard(request_id)
            self._cancelled.discard(request_id)

    def _matcher(self, token_ids: np.ndarray, params: SamplingParams) -> StopStringMatcher:
        if self._decode is None:
            raise ValueError(f"stop strings {params.stop} need text; give the scripted engine a `decode`")
        return StopStringMatcher(self._decode, token_ids, params)

    async def _step(self, live: _Live, prompt: np.ndarray, params: SamplingParams) -> FinishReason | None:
        """Sample one token, unless the request ended meanwhile. The reason it ends with now, or None."""
        await self._sleep(self._token_s)
        async with self._changed:
            await self._changed.wait_for(self._can_step)
        self._check_alive()
        if live.ended_by is not None:
            return live.ended_by
        position = live.output.num_tokens
        token_id, logprob = self._script(prompt, position, self._version)
        live.output.add([token_id], [logprob])
        self._generated_tokens += 1
        self._activity.moved()
        if self.faults.die_after_tokens is not None and self._generated_tokens >= self.faults.die_after_tokens:
            await self.die("scripted death")
        if token_id in self._spec.stop_token_ids and not params.ignore_eos:
            return "stop"
        if live.matcher is not None and live.matcher.end([token_id]) is not None:
            return "stop"
        at_limit = position + 1 >= params.max_tokens or len(prompt) + position + 1 >= self._spec.max_model_len
        return "length" if at_limit else None

    def _can_step(self) -> bool:
        return bool(self._dead_reason) or not (self._gate.is_paused or self.faults.hang_generation)

    async def abort(self, request_id: str) -> None:
        if request_id in self._entering:
            self._cancelled.add(request_id)
        if request_id in self._live:
            self._live[request_id].ended_by = "abort"

    async def call_workers(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        self._check_alive()
        await self._sleep(self._worker_s)
        return self._workers(method, args)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        return await asyncio.shield(asyncio.ensure_future(self._commit(version, method, args, timeout_s)))

    async def _commit(self, version: int, method: str, args: tuple[object, ...], timeout_s: float) -> CommitResult:
        async with self._gate.closed():
            self._check_alive()
            begin = self._clock()
            async with self._gate.pause():
                if self._spec.in_flight == "abort":
                    self._end_all("abort")
                results = await self.call_workers(method, *args, timeout_s=timeout_s)
                self._gate.outcome = reply_state(results)
                if self._gate.outcome == "ok":
                    self._gate.is_asleep = False
                    for live in self._live.values():
                        live.output.versions.append(live.output.num_tokens, version)
                    self._version = version
            return CommitResult(results=results, pause_s=self._clock() - begin)

    async def sleep(self) -> None:
        if self._spec.sleep_level is None:
            return await super().sleep()
        return await asyncio.shield(asyncio.ensure_future(self._fall_asleep()))

    async def _fall_asleep(self) -> None:
        async with self._gate.closed():
            self._check_alive()
            if self._gate.is_asleep:
                return
            self._end_all("abort")
            await self._sleep(self._worker_s)
            self._gate.is_asleep = True

    def _end_all(self, reason: FinishReason) -> None:
        for live in self._live.values():
            live.ended_by = reason

    async def wake(self) -> None:
        """Let streams look at `faults` again."""
        async with self._changed:
            self._changed.notify_all()

    async def die(self, reason: str) -> None:
        """Die now: every stream and every later call raises `EngineDead`."""
        self._dead_reason = self._dead_reason or reason
        await self.wake()

    def _give_up(self, reason: str) -> None:
        self._ending = asyncio.ensure_future(self.die(reason))

    @property
    def version(self) -> int:
        return self._version

    def status(self) -> EngineStatus:
        gate = self._gate
        should_generate = bool(self._live) and not (gate.is_paused or gate.is_asleep)
        return EngineStatus(
            running=len(self._live),
            waiting=gate.num_waiting,
            kv_usage_frac=None,
            num_preemptions=None,
            still_s=self._activity.still_s(should_generate=should_generate),
            times=self._activity.times(),
            unstarted=sum(not live.output.num_tokens for live in self._live.values()) + gate.num_waiting,
            generated_tokens=self._generated_tokens,
            paused_s=gate.paused_s,
            is_dead=bool(self._dead_reason),
        )

    async def close(self) -> None:
        self._dead_reason = "closed"
        self._gate.end_limit()
        await self.wake()

    def _check_alive(self) -> None:
        if self._dead_reason:
            raise EngineDead(f"engine is dead: {self._dead_reason}; use another replica")
