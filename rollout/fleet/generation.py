"""Sends the requests of a group to engines, and continues elsewhere what an engine returns unfinished.

    agent loop (one per sample) --generate--> GroupGenerator --one streaming call per flush--> EngineClient
                                                   |  engine dies, or returns requests
                                                   +--prompt + tokens so far, rest of the budget--> another engine

Requests made in the same turn of the event loop travel in one call: the samples of a group share it, and the later
turns of an agent do not wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollout.errors import EngineDead
from rollout.fleet.consolidation import has_doubled
from rollout.types import join_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rollout.fleet.engine_client import EngineClient
    from rollout.fleet.scheduler import Order, RequestScheduler
    from rollout.types import FinishReason, SamplingParams, TokenChunk


MAX_FRUITLESS_SUBMISSIONS = 100
"""Calls in a row that end in order and bring no token for any request; then the group fails. On shared devices engines
may fall asleep `max_staleness` times in a row just after they have woken up."""
FIRST_PAUSE_S, MAX_PAUSE_S = 0.01, 1.0
"""Before a call that follows two fruitless ones, doubling with each."""


class PendingGeneration:
    """One generation in progress: what the engine gets, and what came back so far."""

    def __init__(self, sample_index: int, context: np.ndarray, max_tokens: int, stop: tuple[str, ...] | None) -> None:
        self.sample_index, self.max_tokens, self.stop = sample_index, max_tokens, stop
        self.response: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
        self.has_lost_engine = False
        """The last one that it was sent to was lost."""
        self.is_leaving = False
        """Its engine is to return it."""
        self.sent_as: tuple[str, str] | None = None
        """Its engine, and its id there."""
        self.num_tokens = self._num_sent = 0
        self._context = context
        self._chunks: list[TokenChunk] = []

    @property
    def is_open(self) -> bool:
        return not self.response.done()

    @property
    def budget(self) -> int:
        return self.max_tokens - self.num_tokens

    @property
    def load(self) -> int:
        """Tokens that an engine has to hold for it at most."""
        return len(self._context) + self.max_tokens

    @property
    def length(self) -> int:
        return len(self._context) + self.num_tokens

    @property
    def may_leave(self) -> bool:
        return not self.is_leaving and has_doubled(self.length, self._num_sent)

    def send(self, name: str, request_id: str) -> None:
        """It is on its way to an engine."""
        self.sent_as, self._num_sent = (name, request_id), self.length
        self.is_leaving = self.has_lost_engine = False

    def token_ids(self) -> np.ndarray:
        return np.concatenate([self._context, *(chunk.token_ids for chunk in self._chunks)])

    def add(self, chunk: TokenChunk) -> None:
        """Raises ValueError for more tokens than were requested, and if the model computed no numbers."""
        if num_bad := int(np.count_nonzero(~np.isfinite(chunk.logprobs))):
            raise ValueError(
                f"the engine computed no finite log-probability for {num_bad} of {len(chunk.logprobs)} tokens; look "
                "for NaN or infinity in the weights (learner/grad_norm), and whether model.rollout_dtype holds them "
                "(float16 ends at 65504)"
            )
        self.num_tokens += len(chunk.token_ids)
        if self.budget < 0:
            raise ValueError(f"an engine returned {self.num_tokens} tokens, at most {self.max_tokens} are allowed")
        self._chunks.append(chunk)
        if chunk.finish_reason in ("stop", "length"):  # after "abort" it continues elsewhere
            self.finish(chunk.finish_reason)

    def finish(self, finish_reason: FinishReason) -> None:
        """Responds with the tokens so far, unless its caller has gone."""
        if self.is_open:
            self.response.set_result(join_chunks(self._chunks, finish_reason))


class GroupGenerator:
    """Generates for the samples of one group; an async context manager that leaves no task behind.

    Args:
        key: unique among the groups that are generated now; prefixes the request ids and makes routing sticky.
        timeout_s: longest time one generation may take, resubmissions and waits for room included.
        params_of: (sample_index, number of the submission of that sample) -> how to sample it, but for `max_tokens`.
        order: its place among the groups that wait for an engine.
        min_version: weights older than this must not sample a token of this group.

    Example:
        async with GroupGenerator(engines, scheduler, key="g7.0", timeout_s=600.0, params_of=params_of) as generator:
            chunk = await generator.generate(0, prompt.token_ids, 1024)
    """

    def __init__(
        self,
        engines: Mapping[str, EngineClient],
        scheduler: RequestScheduler,
        *,
        key: str,
        timeout_s: float,
        params_of: Callable[[int, int], SamplingParams],
        order: Order = (0, 0),
        min_version: int = 0,
    ) -> None:
        self._engines, self._scheduler = engines, scheduler
        self._key, self._order, self._min_version = key, order, min_version
        self._timeout_s, self._params_of = timeout_s, params_of
        self._batch: list[PendingGeneration] = []
        self._aborts: defaultdict[str, list[str]] = defaultdict(list)
        """By engine."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._num_submissions = Counter[int]()
        self.tokens_of = Counter[int]()
        """Sample index -> tokens that engines generated for it."""
        self.waits = QueueTimer(asyncio.get_running_loop().time)
        """For room at an engine, by sample index."""

    async def __aenter__(self) -> GroupGenerator:
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._scheduler.forget(self._key)

    async def generate(
        self, sample_index: int, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        """Continues `token_ids` (int32[T]) by up to `max_tokens` tokens; `stop` replaces the stop strings of
        `params_of`. Cancel it and its engine aborts it.

        The finish reason is "stop", "length", or "abort" if `timeout_s` passed first (with the tokens until then).

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
            return await request.response
        except asyncio.CancelledError:
            if request.sent_as is not None:
                if not self._aborts:
                    asyncio.get_running_loop().call_soon(self._flush_aborts)
                name, request_id = request.sent_as
                self._aborts[name].append(request_id)
            raise

    def _flush_aborts(self) -> None:
        """Those of one turn of the event loop travel in one call, too: a cancelled group has many."""
        aborts, self._aborts = self._aborts, defaultdict(list)
        for name, request_ids in aborts.items():
            self._engines[name].abort(request_ids)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        task = asyncio.create_task(self._drive(batch), name=f"generate {self._key}")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._settle(done, batch))

    def _settle(self, task: asyncio.Task[None], batch: list[PendingGeneration]) -> None:
        """Callers that still wait learn how the task ended."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        for request in batch:
            if request.is_open:
                if error is None:
                    request.response.cancel()
                else:
                    request.response.set_exception(error)

    async def _drive(self, batch: list[PendingGeneration]) -> None:
        """Submits a batch, and again what is unfinished, until every request has its response or time is up."""
        clock = asyncio.get_running_loop().time
        deadline, num_fruitless = clock() + self._timeout_s, 0
        while unfinished := [request for request in batch if request.is_open]:
            if num_fruitless == MAX_FRUITLESS_SUBMISSIONS:
                raise RuntimeError(
                    f"engines returned the requests of {self._key} {num_fruitless} times in a row without a token; "
                    f"{self._scheduler.excluded or 'no engine is excluded'}"
                )
            num_tokens, name, has_ended = sum(request.num_tokens for request in unfinished), "", True
            try:
                async with asyncio.timeout_at(deadline):
                    name = await self._enter(unfinished)
                    if entered := self._still_open(name, unfinished):
                        has_ended = await self._submit(name, entered)
            except TimeoutError:
                if not name:
                    self._scheduler.require_engine()  # else it is no fault of the group
                for request in unfinished:
                    request.finish("abort")
            for request in unfinished:
                if request.budget == 0:  # the engine was lost between the last token and its finish reason
                    request.finish("length")
            made_progress = sum(request.num_tokens for request in unfinished) > num_tokens
            num_fruitless = 0 if made_progress else num_fruitless + has_ended
            if num_fruitless > 1:
                pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (num_fruitless - 2))
                await asyncio.sleep(min(pause_s, max(0.0, deadline - clock())))

    async def _enter(self, requests: Sequence[PendingGeneration]) -> str:
        """The engine with room for them, where they count from now on. Ends its task once all callers are gone."""
        task = asyncio.current_task()

        def stop_if_unwanted(_: object) -> None:
            if task is not None and not any(request.is_open for request in requests):
                task.cancel()

        for request in requests:
            request.response.add_done_callback(stop_if_unwanted)
        try:
            with self.waits.of([request.sample_index for request in requests]):
                tokens = sum(request.load for request in requests)
                return await self._scheduler.acquire(self._key, self._order, tokens=tokens, num_requests=len(requests))
        finally:
            for request in requests:
                request.response.remove_done_callback(stop_if_unwanted)

    def _still_open(self, name: str, requests: Sequence[PendingGeneration]) -> list[PendingGeneration]:
        """Those of `requests` that were not cancelled while they waited for room at `name`; it drops the others."""
        closed = [request.load for request in requests if not request.is_open]
        if closed:
            self._scheduler.release(name, tokens=sum(closed), num_requests=len(closed))
        return [request for request in requests if request.is_open]

    async def _submit(self, name: str, requests: Sequence[PendingGeneration]) -> bool:
        """One streaming call to the engine `name`. False if it dies, hangs or has old weights: then it is excluded, and
        the requests continue elsewhere."""
        loads = dict(enumerate(request.load for request in requests))
        engine, ids = self._engines[name], list[str]()

        def may_leave() -> bool:
            return all(request.may_leave for request in requests if request.is_open)

        def leave() -> None:
            for request in requests:
                request.is_leaving = True
            engine.abort(ids)

        try:
            ids += self._send(name, requests)
            stream = engine.stream_group(
                ids, [request.token_ids() for request in requests], [self._params(request) for request in requests]
            )
            stay = self._scheduler.holding(name, self._key, may_leave=may_leave, leave=leave)
            async with stay, aclosing(stream):
                async for index, chunk in stream:
                    self._check_version(name, chunk)
                    requests[index].add(chunk)
                    self.tokens_of[requests[index].sample_index] += len(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        self._scheduler.release(name, tokens=loads.pop(index), num_requests=1)
        except (EngineDead, TimeoutError) as error:  # a deadline of the engine's own: ours comes as a cancellation
            self._scheduler.exclude(name, str(error))
            for request in requests:
                request.has_lost_engine = request.is_open
            return False
        finally:
            self._scheduler.release(name, tokens=sum(loads.values()), num_requests=len(loads))
        return True

    def _send(self, name: str, requests: Sequence[PendingGeneration]) -> list[str]:
        """The ids of the requests at the engine. Numbered within the call, too: a loop may request several responses of
        one sample at once."""
        self._num_calls += 1
        moves = self._scheduler.moves
        for request in requests:
            if request.has_lost_engine:
                moves.update(recovered_requests=1, recovered_tokens=request.num_tokens)
            if request.is_leaving:  # computed again, to free another engine
                moves.update(migrated_requests=1, migrated_tokens=request.length)
        ids = [f"{self._key}/{one.sample_index}/{self._num_calls}.{number}" for number, one in enumerate(requests)]
        for request, request_id in zip(requests, ids, strict=True):
            request.send(name, request_id)
        return ids

    def _params(self, request: PendingGeneration) -> SamplingParams:
        """Every submission has its own seed: a continuation must not replay the random numbers of its beginning. And it
        looks for stop strings in the response so far."""
        submission = self._num_submissions[request.sample_index]
        self._num_submissions[request.sample_index] += 1
        params = self._params_of(request.sample_index, submission)
        stop = params.stop if request.stop is None else request.stop
        return replace(params, max_tokens=request.budget, stop=stop, num_prefix_tokens=request.num_tokens)

    def _check_version(self, name: str, chunk: TokenChunk) -> None:
        oldest = int(chunk.versions.min(initial=self._min_version))
        if oldest < self._min_version:
            raise EngineDead(
                f"{name} samples with policy version {oldest} although {self._min_version} is live; it missed a "
                "weight sync"
            )


class QueueTimer:
    """How long each sample of a group has waited for room: all its waits, the current one included. Waits of one sample
    that overlap count once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_open = Counter[int]()
        self._waited_s: defaultdict[int, float] = defaultdict(float)
        """Less the time at which the current wait began."""

    @contextlib.contextmanager
    def of(self, samples: Sequence[int]) -> Iterator[None]:
        """These samples wait for as long as the block lasts, however it ends."""
        for sample in samples:
            self._waited_s[sample] -= 0.0 if self._num_open[sample] else self._clock()
            self._num_open[sample] += 1
        try:
            yield
        finally:
            for sample in samples:
                self._num_open[sample] -= 1
                self._waited_s[sample] += 0.0 if self._num_open[sample] else self._clock()

    def seconds(self, sample: int) -> float:
        return self._waited_s[sample] + (self._clock() if self._num_open[sample] else 0.0)
