"""The Ray actor of one rollout worker, and its client of the engines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import uuid
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.agent.runner import make_loop
from rollout.errors import EngineDead
from rollout.rendering import load_tokenizer
from rollout.reward.pool import RewardPool
from rollout.reward.process import DRIVER_ONLY
from rollout.worker.group_server import GroupServer
from rollout.worker.worker import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence

    import numpy as np

    from rollout.engine.interface import EngineLoad
    from rollout.fleet.engine_monitor import LoadReport
    from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, TokenChunk, Trajectory
    from rollout.worker.worker import WorkerSpec


THRESHOLDS = (50_000, 20, 20)
"""See `gc.set_threshold`. The default (700, 10, 10) looks through everything each time that the objects in flight grow
by a quarter: with 10,000 trajectories that was half of all processor time, in pauses of 0.3 s of the event loop. Groups
form no cycles, so what has to be found is little: tracebacks and cancelled tasks."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """In the block, what exists already is never looked at, and full collections are rare."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class RayEngine:
    """An `EngineActor` behind a Ray handle, as an `EngineClient`.

    One Ray stream carries all requests with the same tokens, because an item of a stream costs about a millisecond.
    """

    def __init__(self, name: str, handle: Any, *, sender: str) -> None:
        """`sender` keeps request ids apart: a group whose worker died is generated again by another one, while the
        engine may still have the first attempt."""
        self._name = name
        self._handle = handle
        self._sender = sender

    @property
    def name(self) -> str:
        return self._name

    async def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """See `EngineClient`."""
        from ray.exceptions import ObjectLostError, RayTaskError

        same_tokens: dict[bytes, list[int]] = {}
        for index, tokens in enumerate(token_ids):
            same_tokens.setdefault(tokens.tobytes(), []).append(index)
        running = dict(enumerate(request_ids))
        try:
            streams = [self._stream(indices, request_ids, token_ids, params) for indices in same_tokens.values()]
            async with aclosing(_merge(streams)) as chunks:
                async for index, chunk in chunks:
                    if chunk.finish_reason is not None:
                        del running[index]
                    yield index, chunk
        except (*actor_errors(), ObjectLostError) as error:
            running.clear()
            raise EngineDead(f"{self._name}: {str(error).splitlines()[0]}") from error
        except EngineDead as error:
            running.clear()
            # What Ray raises for it has the engine's traceback for a text; what happened is in its cause.
            raise EngineDead(f"{self._name}: {getattr(error, 'cause', error)}") from error
        except RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            # Ray's own has a traceback for a text, cannot be pickled, and is of a new class each time.
            raise error.cause from error
        finally:
            for request_id in running.values():
                self._handle.abort.remote(self._full_id(request_id))

    def abort(self, request_ids: Sequence[str]) -> None:
        """See `EngineClient`."""
        for request_id in request_ids:
            self._handle.abort.remote(self._full_id(request_id))

    async def load(self) -> EngineLoad:
        """See `EngineClient`."""
        try:
            return await self._handle.load.remote()
        except actor_errors() as error:
            raise EngineDead(f"{self._name}: {str(error).splitlines()[0]}") from error

    async def _stream(
        self,
        indices: Sequence[int],
        request_ids: Sequence[str],
        token_ids: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        ids, sampling = [self._full_id(request_ids[index]) for index in indices], [params[index] for index in indices]
        async for ref in self._handle.generate_group.remote(ids, token_ids[indices[0]], sampling):
            for position, chunk in await ref:
                yield indices[position], chunk

    def _full_id(self, request_id: str) -> str:
        return f"{self._sender}/{request_id}"


async def _merge(
    streams: Sequence[AsyncGenerator[tuple[int, TokenChunk], None]],
) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """The items of all streams as they come. The first stream that fails ends it."""
    queue: asyncio.Queue[tuple[int, TokenChunk] | asyncio.Task[None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[tuple[int, TokenChunk], None]) -> None:
        async with aclosing(stream):
            async for one in stream:
                queue.put_nowait(one)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    for task in tasks:
        task.add_done_callback(queue.put_nowait)
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, tuple):
                yield item
            else:
                item.result()
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RolloutWorkerActor:
    """Builds one rollout worker with its tokenizer and reward processes, and forwards calls to it. `start` it first."""

    def __init__(self, spec: WorkerSpec, engines: Mapping[str, Any]) -> None:
        self._spec, self._engines = spec, engines
        self._sender = uuid.uuid4().hex[:8]
        self._rewards = RewardPool(
            spec.reward,
            timeout_s=spec.reward_timeout_s,
            num_processes=spec.reward_processes,
            queue_timeout_s=spec.reward_queue_timeout_s,
            max_concurrency=spec.reward_concurrency,
            directory=None if spec.reward_directory is None else Path(spec.reward_directory),
        )
        self._started: RolloutWorker | None = None
        self._groups = GroupServer(self.run_group)
        self._for_life = ExitStack()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the tokenizer, whose files may not be there before, and starts the reward processes.

        Raises:
            DataError: the reward does not import.
            PluginError: the agent loop does not load.
        """
        await self._rewards.start()
        self._for_life.enter_context(rare_collections())
        path = self._spec.tokenizer_path
        tokenizer = await asyncio.to_thread(load_tokenizer, path, trust_remote_code=self._spec.trust_remote_code)
        for name in DRIVER_ONLY:  # the tokenizer may have needed one; the agent loop that is imported next does not
            os.environ.pop(name, None)
        self._started = RolloutWorker(
            self._spec,
            [RayEngine(name, handle, sender=self._sender) for name, handle in self._engines.items()],
            tokenizer=tokenizer,
            score=self._rewards.score,
            loop=make_loop(
                self._spec.agent, self._spec.agent_args, chat_template_kwargs=self._spec.chat_template_kwargs
            ),
            num_judges=self._rewards.num_at_once,
        )
        self._watching = asyncio.create_task(self._started.watch_loads(), name="load-watch")

    @property
    def _worker(self) -> RolloutWorker:
        if self._started is None:
            raise RuntimeError("the rollout worker is not started; await start() first")
        return self._started

    async def run_group(self, item: RolloutRequest) -> Group:
        return await self._worker.run_group(item)

    async def submit(self, items: Mapping[int, RolloutRequest], given_up: Sequence[int]) -> None:
        """Begin groups by their tickets, and give others up; see `GroupServer`."""
        self._groups.submit(items, given_up)

    async def ended(self) -> dict[int, Group | Exception]:
        """The groups that have ended since the last call, by their tickets; waits for one."""
        return await self._groups.ended()

    async def evaluate(
        self, prompts: Sequence[Prompt], params: SamplingParams, engine: str, numbers: Sequence[int] | None = None
    ) -> list[Trajectory]:
        return await self._worker.evaluate(prompts, params, engine=engine, numbers=numbers)

    async def quarantine(self, name: str, reason: str) -> None:
        self._worker.quarantine(name, reason)

    async def rest(self, name: str) -> None:
        self._worker.rest(name)

    async def resume(self, name: str) -> None:
        self._worker.resume(name)

    async def loads(self) -> LoadReport:
        """As `RolloutWorker.loads`; raises what ended the watch, if something did."""
        if self._watching is not None and self._watching.done():
            self._watching.result()
        return self._worker.loads()

    async def replace(self, name: str, handle: Any) -> None:
        self._worker.replace(RayEngine(name, handle, sender=self._sender))

    async def quarantined(self) -> dict[str, str]:
        return self._worker.quarantined

    async def close(self) -> None:
        """Ends the watch, what the agent loop holds, and the reward processes; also of a worker that did not start."""
        if self._watching is not None:
            self._watching.cancel()
        self._groups.close()
        try:
            if self._started is not None:
                await self._started.close()
        finally:
            await self._rewards.close()
            self._for_life.close()


def actor_errors() -> tuple[type[Exception], ...]:
    """What Ray raises for a call to an actor that is gone or cannot be reached. One that the memory monitor of its node
    has killed fails with an `OutOfMemoryError`, which is no `RayActorError`."""
    from ray.exceptions import (
        LocalRayletDiedError,
        NodeDiedError,
        OutOfMemoryError,
        RayActorError,
        WorkerCrashedError,
    )

    return (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError, LocalRayletDiedError)


def is_actor_lost(error: BaseException) -> bool:
    """Whether a remote call failed because its actor is gone or cannot be reached, and not by what the actor did."""
    from ray.exceptions import RayTaskError

    return isinstance(error, actor_errors()) and not isinstance(error, RayTaskError)


def kill_actor(actor: Any) -> None:
    """End an actor's process, also one that is stopped. Its pending calls fail at once."""
    import ray

    ray.kill(actor)


def cancel_call(ref: Any) -> None:
    """Have an actor give up a call that nobody waits for any more. Does not wait; a call that has ended is left."""
    import ray

    ray.cancel(ref)


def rollout_worker_actor() -> Any:
    """`RolloutWorkerActor` as a Ray actor class, for the caller to give resources to.

    Example:
        worker = rollout_worker_actor().options(num_cpus=1).remote(spec, {"engine-0": handle})
        await worker.start.remote()
        group = await worker.run_group.remote(item)
    """
    import ray

    # Calls wait most of the time: for a group to end, for an evaluation. None may wait for another's turn.
    return ray.remote(max_concurrency=10_000)(RolloutWorkerActor)  # pyright: ignore[reportCallIssue]
