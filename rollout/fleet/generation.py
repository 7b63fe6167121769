"""Sends the requests of a group to engines, and continues elsewhere what an engine gives back.

    agent loop (one per sample) --generate--> GroupGenerator --one streaming call per flush--> EngineClient
                                                   |  replica dies, or gives requests back
                                                   +--prompt + tokens so far, what is left of the budget--> another one

Requests made in the same turn of the event loop travel in one call: the samples of a group share it, and the later
turns of an agent do not wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollout.errors import EngineDead
from rollout.fleet.consolidation import has_doubled
from rollout.fleet.scheduler import QueueTimer
from rollout.types import join_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.fleet.engine_client import EngineClient
    from rollout.fleet.scheduler import Order, RequestScheduler
    from rollout.types import FinishReason, SamplingParams, TokenChunk


MAX_FRUITLESS_SUBMISSIONS = 100
"""Calls in a row that end in order and bring no token for any request; then the group fails instead of spinning.
On shared devices engines may fall asleep `max_staleness` times in a row just after they have woken up."""


class PendingGeneration:
    """One generation in progress: what the engine gets, and what came back so far."""

    def __init__(self, sample_index: int, context: np.ndarray, max_tokens: int, stop: tuple[str, ...] | None) -> None:
        self.sample_index = sample_index
        self.max_tokens = max_tokens
        self.stop = stop
        self.answer: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
        self.has_lost_replica = False
        """The last one that it was sent to was lost."""
        self.abort: Callable[[], None] = lambda: None
        """Has the replica that it was sent to give it back; does not wait."""
        self._context = context
        self._chunks: list[TokenChunk] = []
        self.num_tokens = self._num_sent = 0
        self._is_leaving = False

    @property
    def is_open(self) -> bool:
        return not self.answer.done()

    @property
    def budget(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def load(self) -> int:
        """Tokens that a replica has to hold for it at most."""
        return len(self._context) + self.max_tokens

    @property
    def may_leave(self) -> bool:
        return not self._is_leaving and has_doubled(self._length, self._num_sent)

    @property
    def _length(self) -> int:
        return len(self._context) + self.num_tokens

    def leave(self) -> None:
        """Its replica is to give it back."""
        self._is_leaving = True

    def send(self) -> int:
        """It is on its way to a replica. Returns the tokens that this one computes although another one had to give
        them up."""
        was_leaving, self._is_leaving, self._num_sent = self._is_leaving, False, self._length
        self.has_lost_replica = False
        return self._length if was_leaving else 0

    def token_ids(self) -> np.ndarray:
        return np.concatenate([self._context, *(chunk.token_ids for chunk in self._chunks)])

    def add(self, chunk: TokenChunk) -> None:
        _check_logprobs(chunk)
        self.num_tokens += len(chunk.token_ids)
        if self.budget < 0:
            raise ValueError(f"an engine returned {self.num_tokens} tokens where at most {self.max_tokens} were asked")
        self._chunks.append(chunk)
        if chunk.finish_reason in ("stop", "length"):  # after "abort" it continues elsewhere
            self.finish(chunk.finish_reason)

    def finish(self, finish_reason: FinishReason) -> None:
        """Answers with the tokens so far, unless its caller has gone."""
        if self.is_open:
            self.answer.set_result(join_chunks(self._chunks, finish_reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One streaming call to one replica, as a guest there."""

    group_key: str
    engine: EngineClient
    request_ids: Sequence[str]
    requests: Sequence[PendingGeneration]

    @property
    def may_leave(self) -> bool:
        return all(request.may_leave for request in self.requests if request.is_open)

    def leave(self) -> None:
        for request in self.requests:
            request.leave()
        self.engine.abort(self.request_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupContext:
    """What all requests of a group have in common."""

    key: str
    """Unique among the groups that are generated now; prefixes the request ids and makes routing sticky."""
    order: Order
    """Its place among the groups that wait for an engine."""
    min_version: int
    """Weights older than this must not sample a token of this group."""
    timeout_s: float
    """Longest time one generation may take, resubmissions and waits for room included."""
    params_of: Callable[[int, int], SamplingParams]
    """(sample_index, number of the submission of that sample) -> how to sample it; `max_tokens` is set here."""


class GroupGenerator:
    """Generates for the samples of one group; an async context manager that leaves no task behind.

    Example:
        async with GroupGenerator(context, engines, scheduler) as generator:
            completion = await generator.generate(0, prompt.token_ids, 1024)
    """

    def __init__(self, context: GroupContext, engines: Mapping[str, EngineClient], scheduler: RequestScheduler) -> None:
        self._context = context
        self._engines = engines
        self._scheduler = scheduler
        self._batch: list[PendingGeneration] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self.tokens_of: Counter[int] = Counter()
        """Sample index -> tokens that engines generated for it."""
        self._num_submissions: dict[int, int] = {}
        self.waits = QueueTimer(asyncio.get_running_loop().time)
        """For room at an engine, by sample index."""

    async def __aenter__(self) -> GroupGenerator:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._scheduler.forget(self._context.key)

    async def generate(
        self, sample_index: int, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        """Continues `token_ids` (int32[T]) by up to `max_tokens` tokens. `stop` takes the place of the stop strings of
        `params_of`.

        The finish reason is "stop", "length", or "abort" if `timeout_s` passed first (with the tokens until then). Its
        replica is told to stop if it is cancelled.

        Raises:
            NoReplica: all engines are excluded; or it waited for `timeout_s`, and those that are not are pinned.
        """
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be >= 1, got {max_tokens}")
        stops = (stop,) if isinstance(stop, str) else stop
        request = PendingGeneration(sample_index, token_ids, max_tokens, None if stops is None else tuple(stops))
        if not self._batch:
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(request)
        try:
            return await request.answer
        except asyncio.CancelledError:
            request.abort()
            raise

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        task = asyncio.create_task(self._drive(batch), name=f"generate {self._context.key}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(done, batch))

    def _settle(self, task: asyncio.Task[None], batch: list[PendingGeneration]) -> None:
        """Callers that still wait learn how the task ended."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for request in batch:
            if request.is_open:
                if error is None:
                    request.answer.cancel()
                else:
                    request.answer.set_exception(error)

    async def _drive(self, batch: list[PendingGeneration]) -> None:
        """Submits a batch, and what is left of it again, until every request is answered or time is up."""
        deadline = asyncio.get_running_loop().time() + self._context.timeout_s
        num_fruitless = 0
        while unanswered := [request for request in batch if request.is_open]:
            if num_fruitless == MAX_FRUITLESS_SUBMISSIONS:
                raise RuntimeError(
                    f"engines gave the requests of {self._context.key} back {num_fruitless} times in a row without a "
                    f"token; {self._scheduler.excluded or 'no engine is excluded'}"
                )
            tokens_before = sum(request.num_tokens for request in unanswered)
            try:
                async with asyncio.timeout_at(deadline):
                    name = ""
                    name = await self._enter(unanswered)
                    if entered := self._still_open(name, unanswered):
                        await self._submit(name, entered)
            except TimeoutError:
                if not name:
                    self._scheduler.require_engine()  # else it is no fault of the group
                for request in unanswered:
                    request.finish("abort")
            for request in unanswered:
                if request.budget == 0:  # the replica went away between the last token and saying so
                    request.finish("length")
            made_progress = sum(request.num_tokens for request in unanswered) > tokens_before
            num_fruitless = 0 if made_progress else num_fruitless + 1

    async def _enter(self, requests: Sequence[PendingGeneration]) -> str:
        """The replica that has room for them, which counts them from now on. Cancels its task once all are given
        up: others may have their place."""
        tokens, context, task = sum(request.load for request in requests), self._context, asyncio.current_task()

        def stop_if_unwanted(_: object) -> None:
            if task is not None and not any(request.is_open for request in requests):
                task.cancel()

        for request in requests:
            request.answer.add_done_callback(stop_if_unwanted)
        try:
            with self.waits.of([request.sample_index for request in requests]):
                size = {"tokens": tokens, "num_requests": len(requests)}
                return await self._scheduler.acquire(context.key, context.order, **size)
        finally:
            for request in requests:
                request.answer.remove_done_callback(stop_if_unwanted)

    def _still_open(self, name: str, requests: Sequence[PendingGeneration]) -> list[PendingGeneration]:
        """Those of `requests` that were not given up while they waited for room at `name`; it is free of the others."""
        closed = [request.load for request in requests if not request.is_open]
        if closed:
            self._scheduler.release(name, tokens=sum(closed), num_requests=len(closed))
        return [request for request in requests if request.is_open]

    async def _submit(self, name: str, requests: Sequence[PendingGeneration]) -> None:
        """One streaming call to the replica `name`. If it dies, hangs or has old weights, it is excluded, and what
        is left of the requests goes on elsewhere."""
        loads = [request.load for request in requests]
        is_outstanding = [True] * len(requests)
        try:
            call = self._call(name, requests)
            stream = call.engine.stream_group(
                call.request_ids,
                [request.token_ids() for request in requests],
                [self._params_of(request) for request in requests],
            )
            async with self._scheduler.holding(name, call), aclosing(stream):
                async for index, chunk in stream:
                    self._check_version(name, chunk)
                    requests[index].add(chunk)
                    self.tokens_of[requests[index].sample_index] += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        is_outstanding[index] = False
                        self._scheduler.release(name, tokens=loads[index], num_requests=1)
        except (EngineDead, TimeoutError) as error:  # a deadline of the engine's own: ours comes as a cancellation
            self._scheduler.exclude(name, str(error))
            for request in requests:
                request.has_lost_replica = request.is_open
        finally:
            left = [load for load, is_left in zip(loads, is_outstanding, strict=True) if is_left]
            self._scheduler.release(name, tokens=sum(left), num_requests=len(left))

    def _call(self, name: str, requests: Sequence[PendingGeneration]) -> _Call:
        self._num_calls += 1
        self._scheduler.recovered.add([request.num_tokens for request in requests if request.has_lost_replica])
        self._scheduler.migrated.add([tokens for request in requests if (tokens := request.send())])
        key = self._context.key
        # Numbered within the call, too: a loop may ask for several answers of one sample at once.
        ids = [f"{key}/{request.sample_index}/{self._num_calls}.{number}" for number, request in enumerate(requests)]
        engine = self._engines[name]
        for request, request_id in zip(requests, ids, strict=True):
            request.abort = partial(engine.abort, [request_id])
        return _Call(group_key=key, engine=engine, request_ids=ids, requests=requests)

    def _params_of(self, request: PendingGeneration) -> SamplingParams:
        """Every submission has its own seed: a continuation must not replay the random numbers of its beginning. And it
        looks for stop strings in what the answer has."""
        submission = self._num_submissions.get(request.sample_index, 0)
        self._num_submissions[request.sample_index] = submission + 1
        params = self._context.params_of(request.sample_index, submission)
        stop = params.stop if request.stop is None else request.stop
        return replace(params, max_tokens=request.budget, stop=stop, num_prefix_tokens=request.num_tokens)

    def _check_version(self, name: str, chunk: TokenChunk) -> None:
        oldest = int(chunk.versions.min(initial=self._context.min_version))
        if oldest < self._context.min_version:
            raise EngineDead(
                f"{name} samples with policy version {oldest} although {self._context.min_version} is live; it "
                "missed a weight sync"
            )


def _check_logprobs(chunk: TokenChunk) -> None:
    """Refuses a chunk of an engine whose model computed no numbers.

    Raises:
        ValueError: a log-probability is not finite.
    """
    if not np.isfinite(chunk.logprobs).all():
        number = int(np.sum(~np.isfinite(chunk.logprobs)))
        raise ValueError(
            f"the engine computed no finite log-probability for {number} of {len(chunk.logprobs)} tokens; look for NaN "
            "or infinity in the weights (learner/grad_norm), and whether model.rollout_dtype holds them (float16 ends "
            "at 65504)"
        )
