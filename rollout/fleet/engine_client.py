"""One engine as a rollout worker reaches it: the protocol, and the client of a Ray actor."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from rollout.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    import numpy as np

    from rollout.types import SamplingParams, TokenChunk


class EngineClient(Protocol):
    """One engine replica, as seen from a rollout worker."""

    @property
    def name(self) -> str: ...

    def stream_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[tuple[int, TokenChunk], None]:
        """Generates for all requests at once; yields (index of the request, next chunk) in any order.

        A chunk holds only new tokens. The last one of a request has a finish reason; "abort" means that the engine
        gave the request back and it goes on elsewhere. Closing the generator aborts what still runs.

        Raises:
            EngineDead: the replica stopped answering.
        """
        ...

    def abort(self, request_ids: Sequence[str]) -> None:
        """Has it give these requests back, with every token that it has sampled. Does not wait; ids that it does not
        have are ignored."""
        ...


class RayEngineClient:
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
