"""Rollout workers that are killed in mid-run: real Ray, fleet, rollout buffer and rollout workers around scripted
engines, each in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import ray

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.types import SamplingParams
from tests.fakes.ray_actors import CountingWorker, KillableEngine, check_positions, prompt, start_actor, worker_spec
from trainer.driver.fleet import AllWorkersLost, Fleet
from trainer.remote import kill_actor

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollout.types import Group
    from rollout.worker.worker import WorkerSpec

pytestmark = pytest.mark.timing

MAX_TOKENS, TOKEN_S = 60, 0.005
GROUPS_PER_STEP = 4
SILENCE_S = 15.0
"""Longer than a healthy process may starve while others start on a busy machine."""


@dataclass
class Run:
    """Groups from admission to their step, over and over, until it is closed."""

    spec: WorkerSpec
    engines: dict[str, Any] = field(default_factory=dict)
    workers: list[Any] = field(default_factory=list)
    trained: list[Group] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    version: int = 0
    membership: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self, *, num_workers: int, num_engines: int) -> None:
        self.buffer = RolloutBuffer(
            groups_per_step=GROUPS_PER_STEP, max_staleness=1, max_retries=0, max_filtered_batches_per_step=1
        )
        for index in range(num_engines):
            self.engines[f"e{index}"] = await self.new_engine()
        self.workers = list(await asyncio.gather(*(self.new_worker() for _ in range(num_workers))))
        self.fleet = Fleet(
            self.engines,
            self.workers,
            group_timeout_s=120.0,
            heartbeat_timeout_s=2 * SILENCE_S,
            restart_engine=self.restart_engine,
            restart_worker=self.restart_worker,
            max_engine_restarts=3,
            max_worker_restarts=1,
        )
        loops = (
            self.admit(),
            self.roll_out(),
            self.train(),
            self.fleet.watch(needs_groups=lambda: True, needs_engines=lambda: True),
        )
        self.tasks = [asyncio.create_task(loop) for loop in loops]

    async def new_engine(self) -> Any:
        return await start_actor(KillableEngine, self.version, TOKEN_S, num_cpus=0, max_restarts=0)

    async def new_worker(self) -> Any:
        return await start_actor(CountingWorker, self.spec, dict(self.engines), num_cpus=0.5, max_restarts=0)

    async def restart_worker(self, index: int, _number: int) -> Any:
        self.workers[index] = await self.new_worker()
        return self.workers[index]

    async def restart_engine(self, name: str, _number: int) -> int:
        kill_actor(self.engines[name])
        async with self.membership:  # or the new one would miss a commit
            self.engines[name] = await self.new_engine()
        return self.version

    async def admit(self) -> None:
        while True:
            await self.buffer.wait_for_slot()
            self.buffer.admit(prompt())

    async def roll_out(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(self.one(await self.buffer.claim()))

    async def one(self, item: Any) -> None:
        try:
            self.buffer.finish(await self.fleet.run_group(item))
        except Exception as error:  # noqa: BLE001 - the edge of one group, as in the loops of a run
            self.errors.append(error)
            self.buffer.fail(item.group_id, error)

    async def train(self) -> None:
        for step in range(1_000_000):
            self.trained += await self.buffer.take(step)
            async with self.membership:
                await asyncio.gather(*(self.commit(engine, step + 1) for engine in self.engines.values()))
                self.version = step + 1
            self.buffer.release(step, version=step + 1)

    async def commit(self, engine: Any, version: int) -> None:
        with contextlib.suppress(ray.exceptions.RayActorError):
            await engine.commit.remote(version, "anything", (), 60.0)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float = 90.0) -> None:
        """While every loop runs; what ends one of them is raised."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.05)
                for task in self.tasks:
                    if task.done():
                        task.result()

    async def kill_worker(self, index: int) -> None:
        os.kill(await self.workers[index].pid.remote(), signal.SIGKILL)
        await self.until(lambda: bool(self.fleet._workers[index].lost))

    async def two_more_steps(self) -> None:
        goal = len(self.trained) + 2 * GROUPS_PER_STEP
        await self.until(lambda: len(self.trained) >= goal)

    def check_groups(self) -> None:
        """Every group once and whole, none given up, and all in hand or trained."""
        stats = self.buffer.stats()
        assert stats.dropped == {}
        ids = sorted(group.group_id for group in self.trained)
        assert len(set(ids)) == len(ids)
        outstanding = stats.num_queued + stats.num_running + stats.num_ready
        assert len(ids) + outstanding == stats.admitted, "a group was lost"
        for group in self.trained:
            for trajectory in group.trajectories:
                check_positions(trajectory, MAX_TOKENS)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for actor in (*self.workers, *self.engines.values()):
            kill_actor(actor)


@pytest.fixture
async def run(cluster: None, tokenizer_path: str) -> AsyncIterator[Run]:
    run = Run(worker_spec(tokenizer_path, SamplingParams(max_tokens=MAX_TOKENS), request_timeout_s=120.0))
    yield run
    await run.close()


async def test_a_killed_worker_costs_no_group_and_comes_back_knowing_who_is_pinned_until_none_may_be_started(
    run: Run,
) -> None:
    await run.start(num_workers=2, num_engines=2)
    await run.two_more_steps()
    await run.fleet.pin("e1")
    await run.until(lambda: run.fleet._workers[0].num_groups > 1)
    await run.kill_worker(0)
    await run.until(lambda: not run.fleet._workers[0].lost)
    async with asyncio.timeout(30.0):
        while (await run.engines["e1"].load.remote()).running:
            await asyncio.sleep(0.1)
    before = (await run.engines["e1"].load.remote()).generated_tokens
    restarted = run.fleet._workers[0]
    await run.until(lambda: restarted.num_groups > 1)
    await run.two_more_steps()
    assert (await run.engines["e1"].load.remote()).generated_tokens == before, "the new worker leaves it alone, too"

    await run.kill_worker(0)  # for the last time
    await run.two_more_steps()
    assert {type(error).__name__ for error in run.errors} == {"WorkerLost"}
    assert len(run.errors) <= 2 * 2 * GROUPS_PER_STEP, "the groups that it had, each once; a dead one gets none"
    await run.kill_worker(1)
    await run.until(lambda: not run.fleet._workers[1].lost)
    with pytest.raises(AllWorkersLost, match=r"rollout worker 0 died: .*; rollout worker 1 died: "):
        await run.kill_worker(1)
        await run.until(lambda: False)
    run.check_groups()
