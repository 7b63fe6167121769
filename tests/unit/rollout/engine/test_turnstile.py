from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from rollout.errors import EngineDead
from rollout.fleet.scheduler import NoReplica, Router, Turnstile, Waits
from tests.fakes.virtual_time import run_virtual


class Guest:
    """May leave if it is told so, and counts how often it was asked to."""

    def __init__(self, group_key: str, *, may_leave: bool = True) -> None:
        self.group_key, self.may_leave, self.num_asked = group_key, may_leave, 0

    def leave(self) -> None:
        self.num_asked += 1


NOBODY = Guest("")


def make(*names: str, limit: int | None = None) -> Turnstile:
    turnstile = Turnstile(Router(names))
    for name in names if limit is not None else ():
        assert limit is not None
        turnstile.limit(name, limit)
    return turnstile


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def entering(turnstile: Turnstile, number: int, *, num: int = 1, key: str = "", tokens: int = 10) -> asyncio.Task[str]:
    """`number` is the place in the order, too."""
    return asyncio.create_task(
        turnstile.enter(key or f"g{number}", (0, number), tokens=tokens, num_requests=num), name=f"{number}"
    )


def test_without_limits_everything_goes_through_at_once() -> None:
    async def main() -> None:
        turnstile = make("a", "b")
        names = [await turnstile.enter(f"g{i}", (0, i), tokens=10, num_requests=8) for i in range(100)]
        assert (names.count("a"), names.count("b")) == (50, 50)

    run_virtual(main())


def test_requests_above_the_limit_wait_and_the_oldest_group_enters_first() -> None:
    async def main() -> None:
        turnstile = make("a", limit=2)
        first = [entering(turnstile, i) for i in (50, 51)]
        await settle()
        waiting = {i: entering(turnstile, i) for i in (9, 7, 8)}
        await settle()
        assert turnstile.num_held == 3
        order = []
        for _ in range(3):
            turnstile.leave("a", tokens=10, num_requests=1)
            await settle()
            order += [i for i, task in waiting.items() if task.done() and i not in order]
        assert order == [7, 8, 9]
        assert all(task.done() for task in first)
        assert (turnstile.num_held, turnstile.router.num_requests) == (0, {"a": 2})

    run_virtual(main())


def test_the_oldest_version_comes_before_the_smallest_group_id() -> None:
    async def main() -> None:
        turnstile = make("a", limit=1)
        await turnstile.enter("x", (0, 0), tokens=1, num_requests=1)
        late = asyncio.create_task(turnstile.enter("new", (5, 1), tokens=1, num_requests=1))
        early = asyncio.create_task(turnstile.enter("old", (4, 9), tokens=1, num_requests=1))
        await settle()
        turnstile.leave("a", tokens=1, num_requests=1)
        await settle()
        assert (early.done(), late.done()) == (True, False)
        late.cancel()

    run_virtual(main())


def test_a_group_enters_together_and_is_not_starved_by_smaller_ones() -> None:
    async def main() -> None:
        turnstile = make("a", limit=8)
        await entering(turnstile, 0, num=6)
        group, single = entering(turnstile, 1, num=8), entering(turnstile, 2)
        await settle()
        assert not single.done(), "there is room for it, but it would keep the older group out"
        turnstile.leave("a", tokens=10, num_requests=6)
        assert await group == "a"
        await settle()
        assert not single.done()
        single.cancel()

    run_virtual(main())


def test_a_group_larger_than_the_limit_enters_an_empty_replica() -> None:
    async def main() -> None:
        turnstile = make("a", limit=4)
        assert await entering(turnstile, 0, num=16) == "a"

    run_virtual(main())


def test_a_request_that_waits_for_its_own_replica_keeps_nobody_from_another() -> None:
    async def main() -> None:
        turnstile = make("a", "b", limit=1)
        assert await entering(turnstile, 0) == "a"
        again = entering(turnstile, 0, key="g0")
        await settle()
        assert not again.done(), "its prefix is on a"
        assert await entering(turnstile, 1) == "b"
        turnstile.leave("b", tokens=10, num_requests=1)
        younger = entering(turnstile, 2)
        assert await younger == "b"
        turnstile.leave("a", tokens=10, num_requests=1)
        assert await again == "a"

    run_virtual(main())


def test_a_replica_at_rest_gets_nothing_new_and_its_groups_go_elsewhere() -> None:
    async def main() -> None:
        turnstile = make("a", "b")
        assert await entering(turnstile, 0, tokens=1) == "a"
        turnstile.rest("a")
        assert await entering(turnstile, 0, key="g0") == "b"
        turnstile.rest("b")
        nobody = entering(turnstile, 1)
        await settle()
        assert not nobody.done()
        turnstile.resume("a")
        assert await nobody == "a"

    run_virtual(main())


def test_who_was_let_in_as_its_replica_was_lost_does_not_stay_there() -> None:
    """The replica is given away in one turn of the event loop, and reached in a later one."""

    async def main() -> None:
        turnstile = make("a", "b", limit=1)
        await entering(turnstile, 0, key="g0")
        await entering(turnstile, 1)
        waiting = entering(turnstile, 2, key="g0")
        await settle()
        turnstile.leave("a", tokens=10, num_requests=1)
        turnstile.quarantine("a", "silent for 120 s")
        assert await waiting == "a"
        with pytest.raises(EngineDead, match="silent for 120 s"):
            async with turnstile.stay("a", NOBODY):
                raise AssertionError("it would wait for an answer that does not come")

    run_virtual(main())


def test_the_end_of_all_replicas_ends_every_wait_with_the_reasons() -> None:
    async def main() -> None:
        turnstile = make("a", limit=1)
        await entering(turnstile, 0)
        waiting = [entering(turnstile, i) for i in (1, 2)]
        await settle()
        turnstile.quarantine("a", "died")
        for task in waiting:
            with pytest.raises(NoReplica, match="a: died"):
                await task
        assert turnstile.num_held == 0

    run_virtual(main())


def test_what_waits_for_a_replica_that_dies_goes_to_another() -> None:
    async def main() -> None:
        turnstile = make("a", "b", limit=1)
        await entering(turnstile, 0)
        again = entering(turnstile, 0, key="g0")
        await settle()
        turnstile.quarantine("a", "died")
        assert await again == "b"

    run_virtual(main())


@pytest.mark.parametrize("has_been_let_in", [False, True])
def test_a_cancelled_wait_leaves_nothing_behind(has_been_let_in: bool) -> None:
    async def main() -> None:
        turnstile = make("a", limit=1)
        await entering(turnstile, 0)
        gone, behind = entering(turnstile, 1), entering(turnstile, 2)
        await settle()
        if has_been_let_in:
            turnstile.leave("a", tokens=10, num_requests=1)  # it has its place, and has not heard of it yet
        gone.cancel()
        await settle()
        if not has_been_let_in:
            assert not behind.done()
            turnstile.leave("a", tokens=10, num_requests=1)
        assert await behind == "a"
        assert (turnstile.num_held, turnstile.router.num_requests) == (0, {"a": 1})

    run_virtual(main())


def test_a_stay_ends_with_the_quarantine_and_a_deadline_stays_a_deadline() -> None:
    async def main() -> None:
        turnstile = make("a", "b")

        async def stay(name: str) -> None:
            async with turnstile.stay(name, NOBODY):
                await asyncio.sleep(100)

        staying, elsewhere = asyncio.create_task(stay("a")), asyncio.create_task(stay("b"))
        await settle()
        turnstile.quarantine("a", "its weights are a mixture")
        with pytest.raises(EngineDead, match="its weights are a mixture"):
            await staying
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await stay("b")
        await settle()
        assert not elsewhere.done()
        elsewhere.cancel()

    run_virtual(main())


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_limit_is_broken_and_everyone_comes_through(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    limits = {name: rng.randint(1, 12) for name in names}

    async def main() -> None:
        turnstile = make(*names)
        for name, limit in limits.items():
            turnstile.limit(name, limit)
        through: list[int] = []

        async def one(number: int) -> None:
            await asyncio.sleep(rng.random() * 5)
            for _ in range(rng.randint(1, 3)):
                num = rng.choice([1, 2, 4, 8])
                name = await turnstile.enter(f"g{number}", (0, number), tokens=num, num_requests=num)
                used = turnstile.router.num_requests[name]
                assert used <= max(limits[name], num)
                try:
                    for _ in range(num):
                        await asyncio.sleep(rng.random())
                        turnstile.leave(name, tokens=1, num_requests=1)
                        num -= 1
                finally:
                    turnstile.leave(name, tokens=num, num_requests=num)
            turnstile.forget(f"g{number}")
            through.append(number)

        async def disturb() -> None:
            for _ in range(20):
                await asyncio.sleep(rng.random())
                name = rng.choice(names)
                turnstile.rest(name) if rng.random() < 0.5 else turnstile.resume(name)
            for name in names:
                turnstile.resume(name)

        tasks = [asyncio.create_task(one(number)) for number in range(40)]
        cancelled = tasks[rng.randrange(40)]
        await asyncio.gather(disturb(), return_exceptions=False)
        was_running = not cancelled.done()
        cancelled.cancel()
        async with asyncio.timeout(1000):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert len(through) >= 40 - was_running
        for task in tasks:
            assert task is cancelled or task.exception() is None
        assert turnstile.num_held == 0

    run_virtual(main())


def test_a_replica_is_freed_only_if_all_that_may_come_back_there_may_leave() -> None:
    async def main() -> None:
        turnstile = make("a", "b")
        guests = {key: Guest(key) for key in ("g0", "g2")}
        stays = contextlib.AsyncExitStack()
        for number in range(4):  # g0 and g2 are on a
            await entering(turnstile, number)
        await stays.enter_async_context(turnstile.stay("a", guests["g0"]))
        assert not turnstile.may_free("a"), "g2 is between two turns"
        await stays.enter_async_context(turnstile.stay("a", guests["g2"]))
        assert turnstile.may_free("a")
        guests["g2"].may_leave = False
        assert not turnstile.may_free("a")
        turnstile.free("a")
        assert [guest.num_asked for guest in guests.values()] == [1, 1]
        assert turnstile.router.in_service == ["b"]
        await stays.aclose()
        turnstile.free("a")
        assert [guest.num_asked for guest in guests.values()] == [1, 1], "they are no longer there"

    run_virtual(main())


def test_waits_of_an_answer_add_up_and_count_once_where_they_overlap() -> None:
    now = 10.0
    waits = Waits(lambda: now)
    assert waits.seconds(0) == 0
    with waits.of([0, 0, 1]):
        now = 12.0
        assert (waits.seconds(0), waits.seconds(1), waits.seconds(2)) == (2, 2, 0), "the one that goes on, too"
        with waits.of([1, 2]):
            now = 15.0
    now = 20.0
    with pytest.raises(KeyError), waits.of([1]):
        now = 21.0
        raise KeyError
    now = 30.0
    assert [waits.seconds(sample) for sample in range(3)] == [5, 5 + 1, 3]
