"""Evaluations as the driver asks the rollout workers for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rollout.errors import WorkerLost
from rollout.types import SamplingParams
from tests.fakes.virtual_time import run_virtual
from trainer.driver import fleet as workers
from trainer.driver.fleet import WorkerPool

PARAMS = SamplingParams(max_tokens=1)


class Ref:
    """A remote call that its test answers."""

    def __init__(self) -> None:
        self.result: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.result


class Actor:
    """Takes calls to `evaluate`."""

    def __init__(self) -> None:
        self.refs: list[Ref] = []

    @property
    def evaluate(self) -> Actor:
        return self

    def remote(self, *_args: Any) -> Ref:
        self.refs.append(Ref())
        return self.refs[-1]


def test_an_evaluation_may_take_longer_than_any_group() -> None:
    async def main() -> None:
        actor = Actor()
        pool = WorkerPool([actor], group_timeout_s=10.0)
        running = asyncio.create_task(pool.evaluate([], PARAMS, "r0", []))
        await asyncio.sleep(10_000.0)
        actor.refs[0].result.set_result(["answer"])
        assert await running == ["answer"]

    run_virtual(main())


def test_shares_of_an_evaluation_go_to_different_workers() -> None:
    async def main() -> None:
        actors = [Actor(), Actor()]
        pool = WorkerPool(actors, group_timeout_s=10.0)
        running = [asyncio.create_task(pool.evaluate([], PARAMS, f"r{i}", [])) for i in range(4)]
        await asyncio.sleep(1.0)
        assert [len(actor.refs) for actor in actors] == [2, 2]
        for actor in actors:
            for ref in actor.refs:
                ref.result.set_result([])
        await asyncio.gather(*running)

    run_virtual(main())


def test_an_evaluation_that_nobody_waits_for_ends_at_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[Any] = []
    monkeypatch.setattr(workers, "cancel_call", cancelled.append)

    async def main() -> None:
        actor = Actor()
        pool = WorkerPool([actor], group_timeout_s=10.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await pool.evaluate([], PARAMS, "r0", [])
        assert cancelled == actor.refs

    run_virtual(main())


def test_an_evaluation_does_not_wait_for_a_worker_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "kill_actor", lambda _actor: None)

    async def main() -> None:
        actor = Actor()
        pool = WorkerPool([actor], group_timeout_s=1000.0)
        running = asyncio.create_task(pool.evaluate([], PARAMS, "r0", []))
        await asyncio.sleep(5.0)
        actor.refs[0].result.set_exception(RayActorError())
        await asyncio.sleep(5.0)
        assert not running.done(), "it may come back"
        pool.close()
        for evaluation in (running, pool.evaluate([], PARAMS, "r0", [])):
            with pytest.raises(WorkerLost, match="no rollout worker is left"):
                await evaluation
        assert asyncio.get_running_loop().time() == pytest.approx(10.0)

    run_virtual(main())
