"""Several rollout workers route to the same engines, each with a view of its own; compared with one that sees all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from statistics import fmean

import pytest

from rollout.fleet.scheduler import RequestScheduler, order_of
from tests.fakes.virtual_time import in_virtual_time

ENGINES = tuple(f"replica_{index}" for index in range(4))
NUM_GROUPS, GROUP_SIZE, TOKENS, LONGEST = 32, 16, 104, 64
"""Groups of a step; the tokens of a request include its prompt."""
POLL_S, LEARNER_S = 0.5, 0.17
NUM_STEPS, FIRST_STEADY = 24, 4
LATE_STEP, LATE = 8, "replica_1"


class Run:
    """Steps of up to S + 1 versions in flight: `NUM_GROUPS` slots are free again once a step is trained."""

    def __init__(self, *, num_workers: int, max_staleness: int) -> None:
        self.random = random.Random(0)
        self.active = Counter[str]()
        self.late = dict.fromkeys(ENGINES, 1.0)
        self.workers = [
            RequestScheduler(order_of(list(ENGINES), worker=w, num_workers=num_workers)) for w in range(num_workers)
        ]
        self.slots = asyncio.Semaphore(NUM_GROUPS * (max_staleness + 1))
        self.finished = asyncio.Queue[int]()

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

    async def feed(self) -> None:
        async with asyncio.TaskGroup() as groups:
            for number in range(10**6):
                await self.slots.acquire()
                groups.create_task(self.group(self.workers[number % len(self.workers)], number))

    async def group(self, worker: RequestScheduler, number: int) -> None:
        order = number // NUM_GROUPS, number
        name = await worker.acquire(f"g{number}", order, tokens=GROUP_SIZE * TOKENS, num_requests=GROUP_SIZE)

        async def request() -> None:
            num_tokens = LONGEST if self.random.random() < 0.5 else self.random.randint(10, LONGEST)
            self.active[name] += 1
            for _ in range(0, num_tokens, 8):  # a token takes longer beside others, there and on the same device
                seconds = 0.002 + 4e-5 * self.active[name] + 1e-5 * self.active.total()
                await asyncio.sleep(8 * seconds * self.late[name])
            self.active[name] -= 1
            worker.release(name, tokens=TOKENS, num_requests=1)

        async with asyncio.TaskGroup() as requests:
            for _ in range(GROUP_SIZE):
                requests.create_task(request())
        self.finished.put_nowait(number)

    async def seconds_of_steps(self) -> list[float]:
        tasks = [asyncio.create_task(self.poll()), asyncio.create_task(self.feed())]
        loop, have, ends = asyncio.get_running_loop(), Counter[int](), [0.0]
        for step in range(NUM_STEPS):
            self.late[LATE] = 2.5 if step == LATE_STEP else 1.0
            while have[step] < NUM_GROUPS:
                have[await self.finished.get() // NUM_GROUPS] += 1
            await asyncio.sleep(LEARNER_S)
            for _ in range(NUM_GROUPS):
                self.slots.release()
            ends.append(loop.time())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [end - begin for begin, end in zip(ends[FIRST_STEADY:], ends[FIRST_STEADY + 1 :], strict=False)]


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@in_virtual_time
async def test_workers_that_know_little_of_each_other_fill_engines_as_evenly_as_one_that_knows_all(
    max_staleness: int,
) -> None:
    """An engine is late once. If workers avoided it then because of what the others had there, the next step would
    leave it idle, and they would all choose it for the step after that."""
    seconds = [
        fmean(await Run(num_workers=number, max_staleness=max_staleness).seconds_of_steps()) for number in (1, 4)
    ]
    assert seconds[1] < 1.05 * seconds[0]
