"""The end of a run as the buffer sees it: nothing is admitted that no step is left for. And lost workers."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from rollout.buffer.rollout_buffer import MAX_LOSSES
from rollout.errors import WorkerLost
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.buffer.test_work_buffer import admit_and_claim, blocks, group_of, new_buffer, prompt

if TYPE_CHECKING:
    from rollout.buffer.rollout_buffer import WorkBuffer, WorkItem

B, STEPS = 3, 8


class Fates:
    """What becomes of groups, drawn anew for each."""

    def __init__(self, seed: int, *, filtered: float = 0.0, failed: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.filtered, self.failed = filtered, failed
        self.ended: Counter[str] = Counter()
        self.trained: list[int] = []

    async def roll_out(self, buffer: WorkBuffer, item: WorkItem) -> None:
        await asyncio.sleep(self.rng.paretovariate(1.2))
        draw = self.rng.random()
        if draw < self.filtered:
            buffer.filter(item.group_id, "zero_variance")
        elif draw < self.filtered + self.failed:
            self.ended[buffer.fail(item.group_id, OSError("no answer"))] += 1
        else:
            buffer.finish(group_of(item))
            self.ended["finished"] += 1


async def play(buffer: WorkBuffer, fates: Fates, *, first: int = 0, end: int = STEPS, rest_s: float = 100.0) -> None:
    """The loops of a run around the buffer, and some time after its last step."""

    async def admit() -> None:
        while True:
            await buffer.wait_for_slot()
            if buffer.readmit() is None:
                buffer.admit(prompt("p"))

    async def roll_out() -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(fates.roll_out(buffer, await buffer.claim()))

    loops = [asyncio.create_task(admit()), asyncio.create_task(roll_out())]
    for step in range(first, end):
        fates.trained += [group.group_id for group in await buffer.take(step)]
        await asyncio.sleep(fates.rng.expovariate(1.0))
        buffer.release(step, version=step + 1)
    await asyncio.sleep(rest_s)
    for loop in loops:
        assert not loop.done()
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def with_end(**changes: Any) -> WorkBuffer:
    return new_buffer(**({"groups_per_step": B, "max_refills_per_step": 1000, "end_step": STEPS} | changes))


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 20])
@pytest.mark.parametrize(("filtered", "failed"), [(0.0, 0.0), (0.4, 0.0), (0.2, 0.3)])
def test_every_group_that_is_generated_to_its_end_is_trained(
    max_staleness: int, filtered: float, failed: float
) -> None:
    for seed in range(5):
        buffer, fates = with_end(max_staleness=max_staleness), Fates(seed, filtered=filtered, failed=failed)
        run_virtual(play(buffer, fates))
        stats = buffer.stats()
        assert fates.ended["finished"] == len(fates.trained) == STEPS * B
        assert stats.num_slots_used == 0
        assert stats.admitted == STEPS * B + stats.refilled, "those that led nowhere were replaced, and no others came"
        if filtered:
            assert stats.refilled > 0


def test_what_leaves_near_the_end_is_replaced_and_nothing_more() -> None:
    async def main() -> None:
        buffer = new_buffer(end_step=1, max_retries=0)
        first, second = await admit_and_claim(buffer, "a", "b")
        waiting = await blocks(buffer.wait_for_slot())  # two of four slots are free, and nobody needs them
        buffer.filter(first.group_id, "zero_variance")
        await asyncio.wait_for(waiting, 1.0)
        (third,) = await admit_and_claim(buffer, "c")
        waiting = await blocks(buffer.wait_for_slot())
        buffer.fail(second.group_id, OSError("no answer"))
        await asyncio.wait_for(waiting, 1.0)
        (fourth,) = await admit_and_claim(buffer, "d")
        for item in (third, fourth):
            buffer.finish(group_of(item))
        assert len(await buffer.take(0)) == 2
        waiting = await blocks(buffer.wait_for_slot())
        waiting.cancel()

    run_virtual(main())


def test_a_run_that_goes_on_with_more_steps_trains_every_prompt_once() -> None:
    first = with_end(max_staleness=2)
    fates = Fates(0)
    run_virtual(play(first, fates, end=STEPS - 3, rest_s=0.0))
    state = json.loads(json.dumps(first.state_dict(STEPS - 3)))
    again = with_end(max_staleness=2, version=STEPS - 3, end_step=STEPS + 4)
    again.load_state_dict(state, prompt)
    run_virtual(play(again, fates, first=STEPS - 3, end=STEPS + 4))
    assert sorted(fates.trained) == list(range((STEPS + 4) * B))


def test_a_resumed_run_that_owes_more_than_it_needs_keeps_the_rest_for_later() -> None:
    first, fates = with_end(max_staleness=4, end_step=None), Fates(0)
    run_virtual(play(first, fates, end=1, rest_s=0.0))
    again = with_end(max_staleness=4, version=1, end_step=2)
    again.load_state_dict(first.state_dict(1), prompt)
    run_virtual(play(again, fates, first=1, end=2))
    assert again.stats().num_slots_used == 0
    owed = [entry["group_id"] for entry in again.state_dict(2)["prompts"]]
    assert sorted(fates.trained + owed) == list(range(again.stats().admitted))
    assert len(fates.trained) == 2 * B


def test_a_lost_worker_costs_a_group_none_of_its_retries() -> None:
    async def main() -> None:
        buffer = new_buffer(max_retries=1, max_refills_per_step=1)
        (item,) = await admit_and_claim(buffer, "a")
        assert buffer.fail(item.group_id, WorkerLost("rollout worker 0 died")) == "retried"
        item = await buffer.claim()
        assert item.attempt == 0
        assert buffer.fail(item.group_id, OSError("its own fault")) == "retried"
        item = await buffer.claim()
        assert item.attempt == 1
        assert buffer.fail(item.group_id, WorkerLost("rollout worker 1 died")) == "retried"
        item = await buffer.claim()
        assert item.attempt == 1
        buffer.finish(group_of(item))
        stats = buffer.stats()
        assert (stats.failed, stats.retried, stats.dropped) == (3, 3, {})

    run_virtual(main())


def test_a_group_that_loses_one_worker_after_the_other_is_blamed_in_the_end() -> None:
    async def main() -> None:
        buffer = new_buffer(max_retries=1)
        (item,) = await admit_and_claim(buffer, "poison")
        lost = WorkerLost("a rollout worker died")
        for _ in range(MAX_LOSSES + 1):  # the last of them costs its one retry
            assert buffer.fail(item.group_id, lost) == "retried"
            item = await buffer.claim()
        assert buffer.fail(item.group_id, lost) == "dropped"
        assert buffer.stats().dropped == {"WorkerLost": 1}

    run_virtual(main())
