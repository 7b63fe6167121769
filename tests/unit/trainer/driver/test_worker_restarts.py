"""Rollout workers that are lost, and come back beside all that goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout.fleet.engine_monitor import LoadReport
from tests.fakes.local_actor import LocalActor, ServesGroups
from tests.fakes.virtual_time import run_virtual
from trainer.driver import fleet as workers
from trainer.driver.fleet import NoWorker, WorkerPool

SILENCE_S = 20.0
RESTART_S = 900.0


class Worker(ServesGroups):
    """Says how it is until it is told to be silent; notes what it is told."""

    def __init__(self, *, gave_up: str = "") -> None:
        super().__init__()
        self.is_silent = False
        self.gave_up = gave_up
        self.told: list[tuple[str, ...]] = []

    async def loads(self) -> LoadReport:
        if self.is_silent:
            await asyncio.Event().wait()
        given_up = {self.gave_up: "it was silent"} if self.gave_up else {}
        return LoadReport(
            replicas={}, held=0, moved_requests=0, moved_tokens=0, rescued_requests=0, rescued_tokens=0,
            quarantined=given_up,
        )  # fmt: skip

    async def quarantine(self, name: str, reason: str) -> None:
        self.told.append(("quarantine", name, reason))


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "kill_actor", lambda actor: actor.die())


def pool_of(*targets: Worker, restart: Any, max_restarts: int = 3) -> WorkerPool:
    actors = [LocalActor(target) for target in targets]
    return WorkerPool(
        actors, group_timeout_s=10.0, silence_timeout_s=SILENCE_S, restart=restart, max_restarts=max_restarts
    )


def test_a_slow_restart_holds_up_neither_the_look_at_the_others_nor_their_restarts() -> None:
    async def main() -> None:
        first, second, third = Worker(), Worker(), Worker()
        begun: list[tuple[int, float]] = []

        async def restart(place: int, _number: int) -> LocalActor:
            begun.append((place, asyncio.get_running_loop().time()))
            await asyncio.sleep(RESTART_S if place == 0 else 1.0)
            return LocalActor(Worker())

        pool = pool_of(first, second, third, restart=restart)
        watch = asyncio.create_task(pool.watch_loads())
        first.is_silent = True
        await asyncio.sleep(SILENCE_S + 5.0)
        second.is_silent, third.gave_up = True, "replica_0"
        await asyncio.sleep(5.0)
        assert pool.lost_engines == {"replica_0": "lost (it was silent)"}, "the silent one holds up the others"
        await asyncio.sleep(SILENCE_S + 5.0)
        assert [place for place, _ in begun] == [0, 1]
        assert pool.lost_engines == {"replica_0": "lost (it was silent)"}
        assert begun[1][1] < RESTART_S
        await pool.quarantine("replica_1", "dead")
        await asyncio.sleep(RESTART_S)
        assert [worker.lost for worker in pool._workers] == ["", "", ""]
        assert pool._workers[0].actor.target.told == [("quarantine", "replica_1", "dead")], "it missed that"
        watch.cancel()

    run_virtual(main())


def test_the_end_of_the_run_ends_restarts_under_way() -> None:
    async def main() -> None:
        ended: list[bool] = []

        async def restart(_place: int, _number: int) -> LocalActor:
            try:
                await asyncio.sleep(RESTART_S)
            finally:
                ended.append(True)
            raise AssertionError

        only = Worker()
        only.is_silent = True
        watch = asyncio.create_task(pool_of(only, restart=restart).watch_loads())
        await asyncio.sleep(SILENCE_S + 5.0)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        assert ended == [True]

    run_virtual(main())


def test_a_silent_worker_holds_up_no_restart_of_another() -> None:
    async def main() -> None:
        silent, dead = Worker(), Worker()
        begun: list[tuple[int, float]] = []

        async def restart(place: int, _number: int) -> LocalActor:
            begun.append((place, asyncio.get_running_loop().time()))
            return LocalActor(Worker())

        pool = pool_of(silent, dead, restart=restart)
        watch = asyncio.create_task(pool.watch_loads())
        await asyncio.sleep(5.0)
        silent.is_silent, now = True, asyncio.get_running_loop().time()
        pool._lose(pool._workers[1], "died")
        await asyncio.sleep(5.0)
        assert [(place, at - now < 2.0) for place, at in begun] == [(1, True)]
        watch.cancel()

    run_virtual(main())


def test_a_worker_that_lived_for_an_hour_has_all_its_restarts_again() -> None:
    async def main() -> None:
        numbers: list[int] = []

        async def restart(_place: int, number: int) -> LocalActor:
            numbers.append(number)
            return LocalActor(Worker())

        pool = pool_of(Worker(), restart=restart, max_restarts=1)
        watch = asyncio.create_task(pool.watch_loads())
        for _ in range(3):
            await asyncio.sleep(workers.HEALTHY_S + 10.0)
            pool._lose(pool._workers[0], "died")
            await asyncio.sleep(10.0)
            assert not pool._workers[0].lost
        assert numbers == [1, 2, 3], "each actor has a name of its own"
        pool._lose(pool._workers[0], "died")
        with pytest.raises(NoWorker, match="after 1 restarts of each"):
            await watch

    run_virtual(main())


def test_without_a_worker_and_a_restart_the_run_ends_with_the_reasons() -> None:
    async def main() -> None:
        async def restart(_place: int, _number: int) -> LocalActor:
            raise OSError("no memory")

        only = Worker()
        only.is_silent = True
        with pytest.raises(NoWorker, match=r"after 2 restarts of each \(rollout worker 0 .*no memory"):
            await asyncio.wait_for(pool_of(only, restart=restart, max_restarts=2).watch_loads(), 1000.0)

    run_virtual(main())
