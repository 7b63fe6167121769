"""The Ray shell around one engine."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollout.engine.vllm_config import engine_environ
from rollout.engine.vllm_engine import IMPORTS, VllmEngine, import_vllm
from rollout.processes import rare_collections
from weight_sync.device.select import build as backend_called
from weight_sync.device.select import take_devices
from weight_sync.errors import DeviceError
from weight_sync.vllm.compat import device_arguments, takes_device_ids

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    import numpy as np

    from rollout.engine.interface import Engine, EngineSpec, EngineStatus
    from rollout.types import SamplingParams, TokenChunk
    from weight_sync.messages import CommitResult

PAUSE_LIMIT_S = 300.0
"""Longer than any commit, unless weight syncs have a longer deadline: one in place may pause for all of that."""


class EngineActor:
    """Builds one engine and forwards calls to it. A plain class: `engine_actor()` is the same under Ray.

    Args:
        spec: what is known when the process is created; `start` gets the rest.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        pause_limit_s: float = PAUSE_LIMIT_S,
        build: Callable[[EngineSpec], Engine] = VllmEngine,
    ) -> None:
        self._spec, self._build = replace(spec, pause_limit_s=pause_limit_s), build
        self._imports: asyncio.Future[float] | None = None
        self._arguments: Mapping[str, Any] | None = None
        self._started: Engine | None = None
        self._for_life = ExitStack()

    async def begin_imports(self, devices: tuple[str, ...] = ()) -> None:
        """Begin to import vLLM, before `start`, which raises what that raises. `devices` are needed where the import
        touches one (see `EngineSpec.forks`)."""
        if self._imports is None:
            if not self._spec.forks:
                self._take(devices)
            self._imports = asyncio.ensure_future(import_vllm(self._spec))

    async def prepare(self, devices: tuple[str, ...] = ()) -> None:
        """`begin_imports`, and wait for them."""
        await self.begin_imports(devices)
        assert self._imports is not None
        await asyncio.shield(self._imports)

    async def start(self, **found: Any) -> Mapping[str, float]:
        """See `Engine.start`. `found` are fields of the spec that were not known before. Raises DeviceError if the
        environment is not what the device needs."""
        began = time.monotonic()
        if self._imports is not None:
            await self._imports
        waited_s = time.monotonic() - began
        spec = replace(self._spec, **found)
        arguments = {**self._take(spec.devices), **spec.engine_args}
        spec = replace(spec, engine_args=arguments)
        if problems := backend_called(spec.device).check_env("engine", engine_environ(spec)):
            raise DeviceError("; ".join(problems))
        self._started = self._build(spec)
        stages = await self._started.start()
        self._for_life.enter_context(rare_collections())
        return {stage: seconds + waited_s * (stage == IMPORTS) for stage, seconds in stages.items()}

    def _take(self, devices: tuple[str, ...]) -> Mapping[str, Any]:
        """Make only its devices visible, once. Returns the arguments that name them."""
        import ray

        if self._arguments is None:
            places = take_devices(self._spec.device, ray, own=devices, own_first=not takes_device_ids())
            self._arguments = device_arguments(places)
        return self._arguments

    @property
    def _engine(self) -> Engine:
        if self._started is None:
            raise RuntimeError("the engine is not started; await start() first")
        return self._started

    async def generate_group(
        self, request_ids: Sequence[str], token_ids: Sequence[np.ndarray], params: Sequence[SamplingParams]
    ) -> AsyncGenerator[list[tuple[int, TokenChunk]], None]:
        """Many requests in one stream, because an item of a Ray stream costs about a millisecond: lists of (index into
        `request_ids`, chunk). Chunks that are ready together travel together; those of a request keep their order.
        Closing the stream aborts what still runs.

        Raises:
            EngineDead: after every chunk that was ready has been yielded.
        """
        queue: asyncio.Queue[tuple[int, TokenChunk] | asyncio.Task[None]] = asyncio.Queue()

        async def pump(index: int) -> None:
            async for chunk in self._engine.generate(request_ids[index], token_ids[index], params[index]):
                queue.put_nowait((index, chunk))

        pumps = [asyncio.create_task(pump(index)) for index in range(len(request_ids))]
        for task in pumps:
            task.add_done_callback(queue.put_nowait)
        try:
            num_open = len(pumps)
            while num_open:
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                if chunks := [item for item in items if isinstance(item, tuple)]:
                    yield chunks
                for item in items:
                    if isinstance(item, asyncio.Task):
                        item.result()
                        num_open -= 1
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        # A group that came in this turn of the event loop begins in the next one: only then does the engine know it.
        await asyncio.sleep(0)
        for request_id in request_ids:
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
        self._for_life.close()
        if self._started is not None:
            await self._started.close()


def engine_actor() -> Any:
    """`EngineActor` as a Ray actor class, for the caller to give resources to.

    Example:
        env = {variable.name: variable.value for variable in get_backend("cpu").process_env("engine")}
        actor = engine_actor().options(num_cpus=1, runtime_env={"env_vars": env}).remote(spec)
        async for ref in actor.generate_group.remote(ids, [tokens] * len(ids), params):
            for index, chunk in await ref: ...
    """
    import ray

    # Every stream, worker call and commit is a coroutine of one event loop; none may wait for another's slot.
    return ray.remote(max_concurrency=10_000)(EngineActor)  # pyright: ignore[reportCallIssue]
