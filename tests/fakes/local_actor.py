"""An actor without Ray, for virtual time: `.method.remote(...)`, and a result that comes later, in this event loop."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError

from rollout.fleet.states import EngineView, FleetView
from rollout.worker.group_server import GroupServer
from trainer.driver.fleet import Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rollout.fleet.states import EngineState, WorkerReport
    from rollout.types import Trajectory
    from rollout.worker.worker import RolloutWorker


class Ref:
    """A remote call's result, which `future` has or will have."""

    def __init__(self, future: Future[Any], task: asyncio.Task[Any] | None = None) -> None:
        self._future = future
        self._task = task

    def future(self) -> Future[Any]:
        return self._future

    def cancel(self) -> None:
        """The actor gives the call up."""
        if self._task is not None:
            self._task.cancel()


class _Method:
    def __init__(self, actor: LocalActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Ref:
        future: Future[Any] = Future()
        if self._actor.is_dead:
            future.set_exception(RayActorError())
            return Ref(future)

        def settle(task: asyncio.Task[Any]) -> None:
            self._actor.tasks.discard(task)
            if future.cancelled():
                return  # no one waits for it any more
            if task.cancelled() and self._actor.is_dead:
                future.set_exception(RayActorError())
            elif task.cancelled():
                future.cancel()
            elif (error := task.exception()) is None:
                future.set_result(task.result())
            else:
                future.set_exception(error)

        task = asyncio.get_running_loop().create_task(getattr(self._actor.target, self._name)(*args))
        self._actor.tasks.add(task)
        task.add_done_callback(settle)
        return Ref(future, task)


class LocalActor:
    """Calls the async methods of `target`."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.is_dead = False
        self.tasks: set[asyncio.Task[Any]] = set()
        """Calls that are under way."""

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)

    def die(self) -> None:
        """Every call that is under way fails, and so does every later one."""
        self.is_dead = True
        for task in self.tasks:
            task.cancel()


class ServesGroups:
    """The part of a rollout worker's actor that the driver gives groups to; `run_group` is the subclass's."""

    def __init__(self) -> None:
        self.server = GroupServer(self.run_group)

    async def run_group(self, item: Any) -> Any:
        raise NotImplementedError

    async def submit(self, items: Any, given_up: Any) -> None:
        self.server.submit(items, given_up)

    async def ended(self) -> Any:
        return await self.server.ended()


class ServedWorker(ServesGroups):
    """A rollout worker as its actor serves it. New engines are `LocalActor`s of clients."""

    def __init__(self, worker: RolloutWorker) -> None:
        super().__init__()
        self.worker = worker

    async def run_group(self, item: Any) -> Any:
        return await self.worker.run_group(item)

    async def update(self, view: FleetView) -> WorkerReport:
        return self.worker.update(view, {name: actor.target for name, actor in view.handles.items()})

    async def evaluate(self, prompts: Any, params: Any, engine: str, numbers: Sequence[int]) -> list[Trajectory]:
        return await self.worker.evaluate(prompts, params, engine=engine, numbers=numbers)


def view_of(*, incarnation: int = 0, **states: EngineState) -> FleetView:
    """Engines by state; those that are lost are so for weight sync."""
    engines = {
        name: EngineView(incarnation=incarnation, state=state, reason="weight sync: dead" * (state == "lost"))
        for name, state in states.items()
    }
    return FleetView(epoch=1, engines=engines, handles={})


@contextlib.asynccontextmanager
async def watched(worker: RolloutWorker, *engines: Any, **settings: Any) -> AsyncIterator[Fleet]:
    """The fleet of this worker and these engines, under its watch."""
    fleet = Fleet(
        {engine.name: LocalActor(engine) for engine in engines},
        [LocalActor(ServedWorker(worker))],
        **({"group_timeout_s": 1e6, "heartbeat_timeout_s": 120.0} | settings),
    )
    watch = asyncio.create_task(fleet.watch(needs_groups=lambda: False, needs_engines=lambda: True))
    try:
        yield fleet
        assert not watch.done()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
