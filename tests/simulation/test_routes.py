"""Several rollout workers, each with its own view of the engines, in steps that begin together (S = 0)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from rollout.fleet.scheduler import RequestScheduler, order_of
from tests.fakes.virtual_time import in_virtual_time

ENGINES = tuple(f"replica_{index}" for index in range(4))
NUM_WORKERS, NUM_GROUPS, GROUP_SIZE, SEATS = 4, 32, 16, 128
"""As many seats as there are requests."""
TOKENS = 104
RESPONSE_S, POLL_S, LEARNER_S = 0.45, 0.5, 0.3
LATE_STEP, LATE = 3, "replica_1"


class Fleet:
    """Engines that compute `SEATS` requests at once, workers that route to them, and a driver that polls."""

    def __init__(self, *, steps_overlap: bool) -> None:
        self.random = random.Random(0)
        self.seats = {name: asyncio.Semaphore(SEATS) for name in ENGINES}
        self.slowness = dict.fromkeys(ENGINES, 1.0)
        self.workers = [
            RequestScheduler(order_of(list(ENGINES), worker=w, num_workers=NUM_WORKERS), steps_overlap=steps_overlap)
            for w in range(NUM_WORKERS)
        ]

    async def poll(self) -> None:
        """Each worker gets what the others had at the poll before, as from their reports."""
        reports = [Counter[str]() for _ in self.workers]
        while True:
            await asyncio.sleep(POLL_S)
            for worker in self.workers:
                others = [report for one, report in zip(self.workers, reports, strict=True) if one is not worker]
                for name in ENGINES:
                    worker.set_view(name, num_elsewhere=sum(report[name] for report in others))
            reports = [Counter(worker.num_requests) for worker in self.workers]

    async def step(self, number: int) -> float:
        """Generate all groups of a step. Returns seconds."""
        for name in ENGINES:
            self.slowness[name] = self.random.uniform(1.0, 1.08)
        if number == LATE_STEP:
            self.slowness[LATE] = 2.5
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as groups:
            for index in range(NUM_GROUPS):
                groups.create_task(self.group(self.workers[index % NUM_WORKERS], number, number * NUM_GROUPS + index))
        return loop.time() - began

    async def group(self, worker: RequestScheduler, step: int, number: int) -> None:
        name = await worker.acquire(f"g{number}", (step, number), tokens=GROUP_SIZE * TOKENS, num_requests=GROUP_SIZE)

        async def request() -> None:
            is_long = self.random.random() < 0.5
            seconds = RESPONSE_S if is_long else self.random.uniform(0.1, RESPONSE_S)
            async with self.seats[name]:
                await asyncio.sleep(seconds * self.slowness[name])
            worker.release(name, tokens=TOKENS, num_requests=1)

        async with asyncio.TaskGroup() as requests:
            for _ in range(GROUP_SIZE):
                requests.create_task(request())


async def seconds_of_steps(num_steps: int, *, steps_overlap: bool) -> list[float]:
    fleet = Fleet(steps_overlap=steps_overlap)
    polls = asyncio.create_task(fleet.poll())
    seconds: list[float] = []
    for number in range(num_steps):
        seconds.append(await fleet.step(number))
        await asyncio.sleep(LEARNER_S + fleet.random.uniform(0.0, 0.02))
    polls.cancel()
    return seconds


@in_virtual_time
async def test_an_engine_that_is_late_in_one_step_delays_that_step_alone() -> None:
    """Two waves on one engine would take twice as long."""
    seconds = await seconds_of_steps(12, steps_overlap=False)
    late = seconds.pop(LATE_STEP)
    assert late > 2 * RESPONSE_S
    assert max(seconds) < 1.1 * RESPONSE_S
    disturbed = await seconds_of_steps(12, steps_overlap=True)
    assert max(disturbed[LATE_STEP + 1 :]) > 1.5 * RESPONSE_S, "where steps overlap, the view of the step before counts"
