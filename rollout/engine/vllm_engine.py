"""vLLM's AsyncLLM as an `Engine`.

How every token gets the right version label, on vLLM versions with and without labels of their own:
1. A commit closes the admission gate, so no request is half-way into the engine.
2. vLLM acknowledges the pause only when no step is in flight, those of asynchronous scheduling included.
3. That reply leaves the engine process through the same ordered socket as the tokens. When we hold it, every token
   sampled so far is in AsyncLLM's output queue or beyond, and none sampled later can be.
4. A barrier put into that queue is reached when all of them have been counted. The counts are the label boundaries.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rollout.engine.interface import Engine, EngineSpec, EngineStatus
from rollout.engine.load_meter import Activity, LoadMeter
from rollout.engine.request_state import ActiveRequest, OutputBarrier, RequestTable, stop_string_matcher
from rollout.engine.startup_error import printed_cause
from rollout.engine.vllm_config import check_token_ids, engine_environ, vllm_sampling
from rollout.engine.vllm_process import engine_pids, launch, shut_down
from rollout.engine.weight_commit import EngineGate
from rollout.errors import EngineDead
from rollout.fork_server import begin_imports
from rollout.processes import OrphanReaper
from rollout.types import SamplingParams, TokenChunk
from weight_sync.device.environment import temporary_environment
from weight_sync.messages import CommitResult, open_reply, reply_state
from weight_sync.vllm import compat as vllm_compat
from weight_sync.vllm.replica import LeftS, commit_between_steps

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engine.request_state import StopStringMatcher

T = TypeVar("T")

IMPORTS = "imports"
"""A stage of `start`."""
_POLL_S = 0.25
"""How often a wait checks whether the engine process died; vLLM leaves such a wait hanging."""
_ABORT_TIMEOUT_S = 5.0
_RESUME_TIMEOUT_S = 30.0
_SLEEP_TIMEOUT_S = 60.0
_OPEN_ADAPTER_TIMEOUT_S = 60.0


async def import_vllm(spec: EngineSpec) -> float:
    """Import vLLM under the environment of `spec`, and start the process that its processes are forked from. Returns
    the seconds that it took; next to none if it is there. Not twice at the same time."""
    began = time.monotonic()
    with printed_cause(), temporary_environment(engine_environ(spec)):
        if spec.forks:
            begin_imports()
        # In a thread: it blocks for seconds, and starts of other engines may share this event loop.
        await asyncio.to_thread(import_module, "vllm.v1.engine.async_llm")
    return time.monotonic() - began


class VllmEngine(Engine):
    """One vLLM replica (tensor and pipeline parallel inside). See `Engine` for the promises.

    Use it in one event loop. `vllm` is imported by `start`, under the environment of the spec.
    """

    def __init__(self, spec: EngineSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec = spec
        self._clock = clock
        self._version = spec.initial_version
        self._gate = EngineGate(resume=self._resume, give_up=self._die, pause_limit_s=spec.pause_limit_s, clock=clock)
        self._meter = LoadMeter()
        self._activity = Activity(clock)
        self._requests = RequestTable(self._activity)
        self._llm: AsyncLLM | None = None
        self._adapter: Any = None
        self._dead_reason = ""
        self._stopping: list[asyncio.Future[None]] = []
        self._reapers: list[OrphanReaper] = []
        self._vllm_dead_errors: tuple[type[Exception], ...] = ()
        self._stop_token_ids: list[int] = []
        self._tokenizer, self._drafts = None, False
        self._generated_tokens = 0

    # ---------------------------------------------------------------- life

    async def start(self) -> dict[str, float]:
        imports_s = await import_vllm(self._spec)
        with printed_cause():
            return {IMPORTS: imports_s, **await self._start()}

    async def _start(self) -> dict[str, float]:
        imported = self._clock()
        with temporary_environment(engine_environ(self._spec)):
            llm, self._stop_token_ids, self._tokenizer = await asyncio.to_thread(launch, self._spec, self._meter)
        from vllm.v1.engine.exceptions import EngineDeadError

        self._llm, self._vllm_dead_errors = llm, (EngineDeadError,)
        self._reapers.append(OrphanReaper(engine_pids(llm)))
        loaded = self._clock()
        self._drafts = llm.vllm_config.speculative_config is not None
        try:
            if self._spec.lora_rank:
                await self._open_adapter()
            await self._warm_up()
        except BaseException:
            await self.close()
            raise
        return {"processes and model": loaded - imported, "warm-up": self._clock() - loaded}

    async def _open_adapter(self) -> None:
        """The adapter that every request names must be there before the first one."""
        from weight_sync.vllm.lora import policy_adapter

        await self._call_receivers("ws_open_adapter", _OPEN_ADAPTER_TIMEOUT_S)
        self._adapter = policy_adapter()

    async def _warm_up(self) -> None:
        """Generate once on every sampling path, so that one-time compilation is paid here."""
        greedy = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        drawn = replace(greedy, temperature=1.0, seed=0)
        for index, params in enumerate((greedy, drawn, replace(drawn, seed=None, top_p=0.9, top_k=2))):
            async for _ in self.generate(f"warm-up-{index}", np.zeros(1, np.int32), params):
                pass
        self._generated_tokens = 0

    async def close(self) -> None:
        self._die("it was closed")
        await asyncio.gather(*self._stopping)
        for reaper in self._reapers:
            reaper.close()
        self._llm = None  # so that it is finalized now and not while the interpreter shuts down

    # ---------------------------------------------------------------- generation

    async def generate(
        self, request_id: str, token_ids: np.ndarray, params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        self._spec.check_prompt(len(token_ids))
        matcher = stop_string_matcher(self._tokenizer, token_ids, params, drafts=self._drafts)
        check_token_ids(token_ids, self._engine.model_config.get_vocab_size())  # raises EngineDead, too
        with self._requests.open(request_id):
            is_finished, finish = False, None
            try:
                request = await self._enter(request_id, token_ids, params, matcher)
                while finish is None:
                    output = await self._guard(request.next_output())
                    if self._requests.is_waiting(request_id):  # a commit took it out before its first token
                        request = await self._enter(request_id, token_ids, params, matcher)
                        continue
                    completion = output.outputs[0]
                    self._activity.moved()
                    self._generated_tokens += len(completion.token_ids)
                    is_finished = output.finished
                    finish = request.take(completion)
                    for chunk in request.output.flush(finish):
                        yield chunk
            finally:
                if not is_finished and not self._is_dead:
                    await self._abort_in_vllm(request_id)

    async def _enter(
        self, request_id: str, token_ids: np.ndarray, params: SamplingParams, matcher: StopStringMatcher | None
    ) -> ActiveRequest:
        """Under the version that is live then."""
        async with self._gate.admission():
            # The salt keeps the prefix cache of one version from serving another.
            salt = f"v{self._version}"
            prompt: Any = {"type": "token", "prompt_token_ids": token_ids.tolist(), "cache_salt": salt}
            sampling = vllm_sampling(params, self._stop_token_ids)
            adding = self._engine.add_request(request_id, prompt, sampling, lora_request=self._adapter)
            queue = await self._guard(adding)
            _ = self._engine  # raises if it died meanwhile: nothing would wake the stream
            request = ActiveRequest(
                queue, self._version, self._spec.stream_interval, matcher=matcher, drafts=self._drafts
            )
            if not self._requests.enter(request_id, request):
                await self._abort_in_vllm(request_id)
            return request

    async def abort(self, request_id: str) -> None:
        if self._requests.note_abort(request_id) and not self._is_dead:
            await self._abort_in_vllm(request_id)

    async def _abort_in_vllm(self, request_id: str | list[str], *, internal: bool = False) -> None:
        await self._within(self._engine.abort(request_id, internal=internal), _ABORT_TIMEOUT_S, "abort")

    # ---------------------------------------------------------------- weights

    async def call_workers(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        # collective_rpc's own timeout leaves the worker's late reply in the pipe, where the next call would read it.
        return await self._within(self._engine.collective_rpc(method, args=args), timeout_s, f"worker call {method}")

    async def _call_receivers(self, method: str, timeout_s: float) -> None:
        for worker, reply in enumerate(await self.call_workers(method, timeout_s=timeout_s)):
            open_reply(reply, type(None), party=f"worker {worker}")

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        # A task of its own: a caller that is cancelled half-way must not leave the engine paused or mislabelled.
        return await asyncio.shield(asyncio.ensure_future(self._commit(version, method, args, timeout_s)))

    async def _commit(self, version: int, method: str, args: tuple[object, ...], timeout_s: float) -> CommitResult:
        gate, counts, taken_out = self._gate, list[tuple[str, ActiveRequest, int]](), list[str]()

        async def drain(left_s: LeftS) -> None:
            self._meter.before_commit(self._spec.in_flight)
            await self._within(vllm_compat.pause_engine(engine, mode=self._spec.in_flight), left_s(), "pause")

        async def write(left_s: LeftS) -> list[bytes]:
            if gate.is_asleep and self._spec.sleep_level:
                await self._within(engine.wake_up(tags=["weights"]), left_s(), "wake-up of the weights")
            # Concurrently with the workers' call: nothing is sampled any more, so the counts are final.
            counting = asyncio.ensure_future(self._count_tokens(engine, left_s()))
            try:
                results = await self.call_workers(method, *args, timeout_s=left_s())
                gate.outcome = reply_state(results)
                counts.extend(await counting)
            except BaseException:
                counting.cancel()
                raise
            return results

        async def go_live(left_s: LeftS) -> None:
            if gate.is_asleep and self._spec.sleep_level:
                await self._within(engine.wake_up(tags=["kv_cache"]), left_s(), "wake-up of the cache")
            gate.is_asleep = False
            for _, request, num_tokens in counts:
                request.output.versions.append(num_tokens, version)
            self._version = version
            if self._spec.in_flight == "keep":
                taken_out.extend(await self._readmit_unstarted(engine))

        async with gate.closed():
            engine = self._engine
            try:
                return await commit_between_steps(
                    gate.pause(), drain=drain, write=write, go_live=go_live, timeout_s=timeout_s, clock=self._clock
                )
            finally:
                if taken_out and not self._is_dead:  # only now: it wakes a stream for each of them
                    await self._abort_in_vllm(taken_out, internal=True)

    async def sleep(self) -> None:
        if self._spec.sleep_level is None:
            return await super().sleep()
        # A task of its own, as a commit: the engine must not be left half-way asleep.
        return await asyncio.shield(asyncio.ensure_future(self._fall_asleep(self._spec.sleep_level)))

    async def _fall_asleep(self, level: int) -> None:
        async with self._gate.closed():
            engine = self._engine
            if self._gate.is_asleep:
                return
            try:
                await self._within(vllm_compat.pause_engine(engine, mode="abort"), _SLEEP_TIMEOUT_S, "pause")
                if level:
                    await self._within(engine.sleep(level=level), _SLEEP_TIMEOUT_S, "sleep")
                if self._spec.extension == vllm_compat.EXTENSION and level == 2:
                    await self._call_receivers("ws_invalidate", _SLEEP_TIMEOUT_S)
            except Exception as error:
                self._die(f"it did not enter sleep mode, so the contents of its memory are unknown: {error}")
                raise
            self._gate.is_asleep = True

    async def _count_tokens(self, engine: AsyncLLM, timeout_s: float) -> list[tuple[str, ActiveRequest, int]]:
        """The engine must be paused."""
        barrier: Any = OutputBarrier()
        engine.engine_core.outputs_queue.put_nowait(barrier)
        await self._within(barrier.reached.wait(), timeout_s, "drain of outputs")
        return self._requests.num_tokens(engine.output_processor.request_states)

    async def _readmit_unstarted(self, engine: AsyncLLM) -> list[str]:
        """Requests without a token start after the commit, behind the gate: inside they would keep their salt, and
        start on KV that older weights computed for others with the same prompt. The engine must be paused and counted.
        Returns vLLM's ids for them: its process has forgotten them when it resumes, `AsyncLLM` has not."""
        if inner_ids := self._requests.readmit_unstarted(engine.output_processor.request_states):
            await self._within(engine.engine_core.abort_requests_async(inner_ids), _ABORT_TIMEOUT_S, "abort")
        return inner_ids

    async def _resume(self) -> None:
        if not self._is_dead:
            await self._within(vllm_compat.resume_engine(self._engine), _RESUME_TIMEOUT_S, "resume")

    # ---------------------------------------------------------------- state

    @property
    def version(self) -> int:
        return self._version

    def status(self) -> EngineStatus:
        states = {} if self._llm is None else self._llm.output_processor.request_states
        scheduled = self._meter.load(len(states))
        gate, activity = self._gate, self._activity
        should_generate = bool(self._requests.running) and not (gate.is_paused or gate.is_asleep)
        return replace(
            scheduled,
            # Without figures from the scheduler, everything inside counts as running.
            running=scheduled.running if self._spec.reports_load else len(states),
            unstarted=sum(state.is_prefilling for state in states.values()) + gate.num_waiting,
            still_s=activity.still_s(should_generate=should_generate),
            times=activity.times(),
            generated_tokens=self._generated_tokens,
            paused_s=gate.paused_s,
            is_dead=self._is_dead,
        )

    @property
    def _is_dead(self) -> bool:
        return bool(self._dead_reason) or (self._llm is not None and self._llm.errored)

    @property
    def _why_dead(self) -> str:
        return self._dead_reason or "its process ended"

    @property
    def _engine(self) -> AsyncLLM:
        if self._is_dead:
            raise EngineDead(f"engine is dead: {self._why_dead}; use another replica")
        if self._llm is None:
            raise EngineDead("engine is not started; await start() first")
        return self._llm

    def _die(self, reason: str) -> None:
        """Declare the engine dead: wake every stream with `EngineDead` and stop its processes in the background."""
        if self._dead_reason or self._llm is None:
            return
        self._dead_reason = reason
        self._gate.end_limit()
        for request in self._requests.running.values():
            request.queue.put(EngineDead(f"engine is dead: {self._dead_reason}"))
        if (handler := getattr(self._llm, "output_handler", None)) is not None:
            handler.cancel()  # vLLM cancels it later, when it may have logged the end of the process as a failure
        self._stopping.append(asyncio.ensure_future(asyncio.to_thread(shut_down, self._llm)))

    async def _guard(self, awaitable: Awaitable[T]) -> T:
        """Await with vLLM's errors of a dead engine turned into ours, and with those that killed it."""
        try:
            return await awaitable
        except self._vllm_dead_errors as error:
            raise EngineDead(f"engine is dead: {self._why_dead}") from error
        except Exception as error:
            if isinstance(error, EngineDead) or not self._is_dead:
                raise
            # vLLM's output handler has ended with it, while the process computes on for no one.
            self._die(f"vLLM failed with {type(error).__name__}: {error}")
            raise EngineDead(f"engine is dead: {self._dead_reason}") from error

    async def _within(self, awaitable: Awaitable[T], timeout_s: float, what: str) -> T:
        """Await at most `timeout_s`, and not beyond the death of the engine process (EngineDead). TimeoutError if time
        is up; then the engine is declared dead, because the call may still take effect."""
        task = asyncio.ensure_future(self._guard(awaitable))
        deadline = self._clock() + timeout_s
        try:
            while True:
                await asyncio.wait({task}, timeout=max(0.0, min(_POLL_S, deadline - self._clock())))
                if task.done():
                    return task.result()
                if self._is_dead:
                    raise EngineDead(f"engine died during {what}: {self._why_dead}")
                if self._clock() >= deadline:
                    self._die(late := f"{what} did not end within {timeout_s:.1f} s")
                    raise TimeoutError(f"{late}; the engine is declared dead")
        finally:
            task.cancel()
