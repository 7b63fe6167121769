"""The Ray shell around one engine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout.engine.vllm_config import process_env
from rollout.engine.vllm_engine import VllmEngine
from weight_sync.device.errors import DeviceError
from weight_sync.device.select import build as backend_called
from weight_sync.device.visibility import show_own_devices

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    import numpy as np

    from rollout.engine.interface import Engine, EngineInfo, EngineSpec, EngineStatus
    from rollout.types import SamplingParams, TokenChunk
    from weight_sync.wire import CommitResult

_END = object()

PAUSE_LIMIT_S = 300.0
"""What no commit takes, unless weight syncs have a longer deadline: one in place may pause for all of that."""


class EngineActor:
    """Builds one engine and forwards calls to it. Plain class: `engine_actor()` is the same under Ray.

    All methods run in the actor's event loop. `generate_group` is the way rollout workers generate: one stream per
    group of samples, because an item of a Ray stream costs about a millisecond.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pause_limit_s: float = PAUSE_LIMIT_S,
        build: Callable[[EngineSpec], Engine] = VllmEngine,
    ) -> None:
        import ray

        show_own_devices(spec.device, ray)
        self._spec = replace(spec, pause_limit_s=pause_limit_s)
        self._engine = build(self._spec)

    async def start(self) -> EngineInfo:
        """Start the engine, once its environment is as its device needs it.

        Raises:
            DeviceError: it is not; says of every variable what is wrong.
        """
        environ = {**process_env(self._spec), **os.environ, **self._spec.env}
        problems = backend_called(self._spec.device).check_env("engine", environ)
        if problems:
            raise DeviceError("; ".join(problems))
        return await self._engine.start()

    async def generate_group(
        self, request_ids: Sequence[str], token_ids: np.ndarray, params: Sequence[SamplingParams]
    ) -> AsyncGenerator[list[tuple[int, TokenChunk]], None]:
        """Several samples of one prompt: lists of (index into `request_ids`, chunk) as they come.

        Chunks that are ready together travel together. Each sample's chunks keep their order, and its last one has a
        finish reason. Closing the stream aborts what still runs.

        Raises:
            EngineDead: after every chunk that was ready has been yielded.
        """
        queue: asyncio.Queue[tuple[int, TokenChunk] | BaseException | object] = asyncio.Queue()

        async def pump(index: int, request_id: str, sampling: SamplingParams) -> None:
            try:
                async for chunk in self._engine.generate(request_id, token_ids, sampling):
                    queue.put_nowait((index, chunk))
            except BaseException as error:
                queue.put_nowait(error)
                raise
            queue.put_nowait(_END)

        requests = enumerate(zip(request_ids, params, strict=True))
        pumps = [asyncio.create_task(pump(index, request_id, one)) for index, (request_id, one) in requests]
        try:
            num_open = len(pumps)
            while num_open:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                chunks: list[Any] = [item for item in items if isinstance(item, tuple)]
                if chunks:
                    yield chunks
                num_open -= sum(item is _END for item in items)
                for item in items:
                    if isinstance(item, BaseException):
                        raise item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        # A group that came in this turn of the event loop begins in the next one: only then does the engine know it.
        await asyncio.sleep(0)
        await self._engine.abort(request_id)

    async def call_workers(self, method: str, args: Sequence[object], timeout_s: float) -> list[Any]:
        return await self._engine.call_workers(method, *args, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, args: Sequence[object], timeout_s: float) -> CommitResult:
        return await self._engine.commit(version, method, *args, timeout_s=timeout_s)

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def load(self) -> EngineStatus:
        return self._engine.load()

    async def close(self) -> None:
        await self._engine.close()


def engine_actor() -> Any:
    """`EngineActor` as a Ray actor class, for the caller to give resources to.

    Example:
        env = {variable.name: variable.value for variable in get_backend("cpu").process_env("engine")}
        actor = engine_actor().options(num_cpus=1, runtime_env={"env_vars": env}).remote(spec)
        info = ray.get(actor.start.remote())
        async for ref in actor.generate_group.remote(ids, tokens, params):
            for index, chunk in await ref: ...
    """
    import ray

    # Every stream, worker call and commit is a coroutine of one event loop; none may wait for another's slot.
    return ray.remote(max_concurrency=10_000)(EngineActor)  # pyright: ignore[reportCallIssue]
