from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest

from rollout.errors import EngineDead
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.generation import QueueTimer
from rollout.fleet.scheduler import NoReplica, RequestScheduler, order_of
from tests.fakes.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager


class Holder:
    """May leave if it is allowed to, and counts how often it was asked to."""

    def __init__(self, group_key: str = "", *, may_leave: bool = True) -> None:
        self.group_key, self.may_leave, self.num_asked = group_key, may_leave, 0

    def leave(self) -> None:
        self.num_asked += 1

    def at(self, scheduler: RequestScheduler, name: str) -> AbstractAsyncContextManager[None]:
        return scheduler.holding(name, self.group_key, may_leave=lambda: self.may_leave, leave=self.leave)


def make(*names: str, limit: int | None = None) -> RequestScheduler:
    bounds = None if limit is None else LimitRange(lowest=limit, highest=limit)
    return RequestScheduler(names, concurrency=bounds)


def entering(scheduler: RequestScheduler, number: int, *, num: int = 1, tokens: int = 10) -> asyncio.Task[str]:
    """Of group `number`, which is its place in the order, too."""
    return asyncio.create_task(
        scheduler.acquire(f"g{number}", (0, number), tokens=tokens, num_requests=num), name=f"{number}"
    )


async def enter(scheduler: RequestScheduler, *numbers: int, tokens: int = 10) -> list[str]:
    return [await entering(scheduler, number, tokens=tokens) for number in numbers]


async def waiting(scheduler: RequestScheduler, *numbers: int, num: int = 1) -> list[asyncio.Task[str]]:
    tasks = [entering(scheduler, number, num=num) for number in numbers]
    await settle()
    assert not any(task.done() for task in tasks)
    return tasks


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def leave(scheduler: RequestScheduler, name: str, num: int = 1) -> None:
    scheduler.release(name, tokens=10, num_requests=num)


# Where a group goes


@in_virtual_time
async def test_an_excluded_engine_gets_nothing_and_its_groups_move_for_good() -> None:
    scheduler = make("a", "b")
    assert await enter(scheduler, 0) == ["a"]
    scheduler.exclude("a", "died")
    assert await enter(scheduler, 0, 1) == ["b", "b"]
    scheduler.readmit("a")
    assert await enter(scheduler, 2, 0) == ["a", "b"], "the group has moved, with its prefix cache"


@in_virtual_time
async def test_a_pinned_engine_gets_nothing_new_and_its_groups_go_elsewhere() -> None:
    scheduler = make("a", "b")
    assert await enter(scheduler, 0) == ["a"]
    scheduler.set_view("a", is_pinned=True)
    assert await enter(scheduler, 0) == ["b"]
    scheduler.set_view("b", is_pinned=True)
    (task,) = await waiting(scheduler, 1)
    scheduler.set_view("a")
    assert await task == "a"


@in_virtual_time
async def test_no_engine_left_is_an_error_with_every_first_reason() -> None:
    scheduler = make("a", "b", "c")
    for name, reason in (("a", "out of memory"), ("a", "does not reply"), ("b", "missed a sync")):
        scheduler.exclude(name, reason)
    scheduler.require_engine()
    scheduler.set_view("c", is_pinned=True)
    with pytest.raises(NoReplica, match=r"all 3 .*c: pinned; a: out of memory; b: missed a sync"):
        scheduler.require_engine()
    scheduler.exclude("c", "died")
    with pytest.raises(NoReplica, match=r"all 3 .*a: out of memory; b: missed a sync; c: died"):
        await enter(scheduler, 1)


@in_virtual_time
async def test_what_cannot_be_is_refused() -> None:
    scheduler = make("a")
    await enter(scheduler, 0)
    with pytest.raises(ValueError, match="11 tokens came back from 'a', but only 10 were outstanding"):
        scheduler.release("a", tokens=11, num_requests=1)
    with pytest.raises(ValueError, match="unknown engine 'c'; known engines:"):
        scheduler.exclude("c", "x")
    with pytest.raises(ValueError, match="at least one engine"):
        RequestScheduler([])


@pytest.mark.parametrize(
    ("num_engines", "num_workers", "groups_each"),
    [(16, 16, 4), (16, 4, 8), (4, 16, 1), (2, 8, 3), (6, 4, 3), (3, 1, 7), (1, 5, 2)],
)
@in_virtual_time
async def test_workers_that_know_nothing_of_each_other_spread_their_groups(
    num_engines: int, num_workers: int, groups_each: int
) -> None:
    names = [f"e{i}" for i in range(num_engines)]
    sent = dict.fromkeys(names, 0)
    for worker in range(num_workers):
        for name in await enter(make(*order_of(names, worker=worker, num_workers=num_workers)), *range(groups_each)):
            sent[name] += 1
    fair = num_workers * groups_each / num_engines
    assert fair - 1 <= min(sent.values()) and max(sent.values()) <= fair + 1


# Drained engines


async def drained(*names: str, limit: int | None = None) -> RequestScheduler:
    """One group is on each engine, in order; the first engine is drained, and its group has come back."""
    scheduler = make(*names, limit=limit)
    await enter(scheduler, *range(len(names)))
    scheduler.drain("a")
    assert "a" not in scheduler.in_service
    leave(scheduler, "a")
    return scheduler


@in_virtual_time
async def test_a_drained_engine_loses_its_groups_and_waits_for_a_new_one() -> None:
    scheduler = await drained("a", "b", "c")
    assert await enter(scheduler, 0, 2, 9) == ["b", "c", "a"], "a is empty, but g0 has begun"
    assert scheduler.in_service == ["a", "b", "c"]


@in_virtual_time
async def test_a_group_that_finds_no_room_elsewhere_goes_to_a_drained_engine() -> None:
    scheduler = await drained("a", "b", limit=1)
    assert await enter(scheduler, 0) == ["a"]
    assert scheduler.in_service == ["a", "b"]


@in_virtual_time
async def test_a_group_of_a_lost_engine_leaves_the_drained_one_alone_while_there_is_another() -> None:
    scheduler = await drained("a", "b", "c")
    scheduler.exclude("b", "died")
    assert await enter(scheduler, 1) == ["c"]
    scheduler.exclude("c", "died")
    assert await enter(scheduler, 1) == ["a"]


@in_virtual_time
async def test_an_engine_is_freed_only_if_all_that_may_come_back_there_may_leave() -> None:
    scheduler = make("a", "b")
    holders = [Holder("g0"), Holder("g2")]
    await enter(scheduler, *range(4))  # g0 and g2 are on a
    async with contextlib.AsyncExitStack() as stays:
        await stays.enter_async_context(holders[0].at(scheduler, "a"))
        assert not scheduler.may_drain("a"), "g2 is between two turns"
        await stays.enter_async_context(holders[1].at(scheduler, "a"))
        assert scheduler.may_drain("a")
        holders[1].may_leave = False
        assert not scheduler.may_drain("a")
        scheduler.drain("a")
    scheduler.drain("a")
    assert [holder.num_asked for holder in holders] == [1, 1], "once: the second time they are no longer there"
    assert scheduler.in_service == ["b"]
    scheduler.readmit("a")
    assert scheduler.in_service == ["a", "b"], "a new engine is not drained"


# When


@in_virtual_time
async def test_a_group_enters_together_and_is_not_starved_by_smaller_ones() -> None:
    scheduler = make("a", limit=8)
    await entering(scheduler, 0, num=6)
    (group,) = await waiting(scheduler, 1, num=8)
    (single,) = await waiting(scheduler, 2)  # there is room for it, but it would keep the older group out
    leave(scheduler, "a", 6)
    assert await group == "a"
    await settle()
    assert not single.done()
    single.cancel()


@in_virtual_time
async def test_a_group_larger_than_the_limit_enters_an_empty_engine() -> None:
    assert await entering(make("a", limit=4), 0, num=16) == "a"


@in_virtual_time
async def test_a_request_that_waits_for_its_own_engine_keeps_no_other_from_another() -> None:
    scheduler = make("a", "b", limit=1)
    assert await enter(scheduler, 0) == ["a"]
    (again,) = await waiting(scheduler, 0)  # its prefix is on a
    assert await enter(scheduler, 1) == ["b"]
    leave(scheduler, "b")
    assert await enter(scheduler, 2) == ["b"]
    leave(scheduler, "a")
    assert await again == "a"


@in_virtual_time
async def test_what_waits_for_an_engine_that_dies_goes_to_another_and_to_none_if_it_was_the_last() -> None:
    scheduler = make("a", "b", limit=1)
    await enter(scheduler, 0)
    (again,) = await waiting(scheduler, 0)
    scheduler.exclude("a", "died")
    assert await again == "b"
    tasks = await waiting(scheduler, 1, 2)
    scheduler.exclude("b", "hangs")
    for task in tasks:
        with pytest.raises(NoReplica, match="a: died; b: hangs"):
            await task
    assert scheduler.num_queued == 0


@pytest.mark.parametrize("has_been_let_in", [False, True])
@in_virtual_time
async def test_a_cancelled_wait_leaves_nothing_behind(has_been_let_in: bool) -> None:
    scheduler = make("a", limit=1)
    await enter(scheduler, 0)
    gone, behind = await waiting(scheduler, 1, 2)
    if has_been_let_in:
        leave(scheduler, "a")  # it has its place, and has not heard of it yet
    gone.cancel()
    await settle()
    if not has_been_let_in:
        assert not behind.done()
        leave(scheduler, "a")
    assert await behind == "a"
    assert (scheduler.num_queued, scheduler.num_requests) == (0, {"a": 1})


@in_virtual_time
async def test_a_request_that_was_let_in_as_its_engine_was_lost_does_not_stay_there() -> None:
    """The engine is assigned in one turn of the event loop, and reached in a later one."""
    scheduler = make("a", "b", limit=1)
    await enter(scheduler, 0, 1)
    (task,) = await waiting(scheduler, 0)
    leave(scheduler, "a")
    scheduler.exclude("a", "silent for 120 s")
    assert await task == "a"
    with pytest.raises(EngineDead, match="silent for 120 s"):
        async with Holder().at(scheduler, "a"):
            raise AssertionError("it would wait for a reply that does not come")


@in_virtual_time
async def test_a_stay_ends_with_the_exclusion_and_a_deadline_stays_a_deadline() -> None:
    scheduler = make("a", "b")

    async def stay(name: str) -> None:
        async with Holder().at(scheduler, name):
            await asyncio.sleep(100)

    staying, elsewhere = asyncio.create_task(stay("a")), asyncio.create_task(stay("b"))
    await settle()
    scheduler.exclude("a", "its weights are a mixture")
    with pytest.raises(EngineDead, match="its weights are a mixture"):
        await staying
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await stay("b")
    assert not elsewhere.done()
    elsewhere.cancel()


@pytest.mark.parametrize("seed", range(20))
@in_virtual_time
async def test_whatever_happens_no_limit_is_broken_and_every_group_comes_through(seed: int) -> None:
    rng = random.Random(seed)
    names, limit, through = ["a", "b", "c"], rng.randint(1, 12), list[int]()
    scheduler = make(*names, limit=limit)

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * 5)
        for _ in range(rng.randint(1, 3)):
            num = rng.choice([1, 2, 4, 8])
            name = await scheduler.acquire(f"g{number}", (0, number), tokens=num, num_requests=num)
            assert scheduler.num_requests[name] <= max(limit, num)
            try:
                for _ in range(num):
                    await asyncio.sleep(rng.random())
                    scheduler.release(name, tokens=1, num_requests=1)
                    num -= 1
            finally:
                scheduler.release(name, tokens=num, num_requests=num)
        scheduler.forget(f"g{number}")
        through.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(40)]
    cancelled = tasks[rng.randrange(40)]
    for _ in range(20):
        await asyncio.sleep(rng.random())
        scheduler.set_view(rng.choice(names), is_pinned=rng.random() < 0.5)
    for name in names:
        scheduler.set_view(name)
    was_running = cancelled.cancel()
    async with asyncio.timeout(1000):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert len(through) >= 40 - was_running
    assert all(task is cancelled or task.exception() is None for task in tasks)
    assert scheduler.num_queued == 0


def test_waits_of_a_response_add_up_and_count_once_where_they_overlap() -> None:
    now = 10.0
    waits = QueueTimer(lambda: now)
    assert waits.seconds(0) == 0
    with waits.of([0, 0, 1]):
        now = 12.0
        assert (waits.seconds(0), waits.seconds(1), waits.seconds(2)) == (2, 2, 0), "the current one, too"
        with waits.of([1, 2]):
            now = 15.0
    now = 20.0
    with pytest.raises(KeyError), waits.of([1]):
        now = 21.0
        raise KeyError
    now = 30.0
    assert [waits.seconds(sample) for sample in range(3)] == [5, 5 + 1, 3]
