"""A version comes from several learners side by side, a few at a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import opened
from weight_sync.errors import WeightSyncError

if TYPE_CHECKING:
    from collections.abc import Callable


def watch(replica: LocalReplica, around: Callable[[int, Callable[[], None], Callable[[], None]], None]) -> None:
    """Every read of a source goes through `around(rank, read, check)`."""
    for rank, reader in replica.receivers[0]._epoch.readers.items():  # pyright: ignore[reportOptionalMemberAccess]
        pull = reader.pull

        def watched(*args: Any, rank: int = rank, pull: Any = pull, check: Any, **options: Any) -> None:
            around(rank, lambda: pull(*args, check=check, **options), check)

        reader.pull = watched


class Count:
    """How many reads are under way. Each waits until there were as many as are expected, and then a moment for more."""

    def __init__(self, expected: int = 1) -> None:
        self.now, self.most, self._expected, self._changed = 0, 0, expected, threading.Condition()

    def __call__(self, rank: int, read: Callable[[], None], check: Callable[[], None]) -> None:
        with self._changed:
            self.now += 1
            self.most = max(self.most, self.now)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.most >= self._expected, 10)
        try:
            time.sleep(0.02)
            self.read(rank, read, check)
        finally:
            with self._changed:
                self.now -= 1

    def read(self, _rank: int, read: Callable[[], None], _check: Callable[[], None]) -> None:
        read()


@pytest.mark.parametrize("commit", ["staged", "inplace"])
@pytest.mark.parametrize(("transport", "num_at_once"), [("ipc", 4), ("gloo", 2)])
async def test_a_few_sources_are_read_at_a_time(transport: str, num_at_once: int, commit: str) -> None:
    replica, count = LocalReplica("r0"), Count(num_at_once)
    async with opened(5, [replica], transport=transport, commit=commit) as world:
        await world.step(1)
        watch(replica, count)
        report: Any = await world.step(2)
        replica.assert_holds(world.full)
        assert count.most == num_at_once
        assert len(report.pull_by_source) == 5
        assert report.pull_s < sum(report.pull_by_source.values())


async def test_what_other_workers_hand_on_comes_in_its_order_beside_what_learners_give() -> None:
    """Out of order, workers of a ring could wait for each other in a circle."""
    replicas = [LocalReplica(f"r{number}") for number in range(4)]
    async with opened(3, replicas, transport="gloo", commit="staged") as world:
        await world.step(1)
        relays: list[Any] = [replica.receivers[0]._epoch.relay for replica in replicas]  # pyright: ignore
        orders = [[rank for stage in relay._link.stages if stage.via for rank in stage.ranks] for relay in relays]
        relay, relayed = max(zip(relays, orders, strict=True), key=lambda each: len(each[1]))
        assert len(relayed) > 2
        order: list[int] = []
        for reader in relay._readers.values():
            pull = reader.pull

            def watched(rank: int, *args: Any, pull: Any = pull, **options: Any) -> None:
                order.append(rank)
                time.sleep(0.05)
                pull(rank, *args, **options)
                order.append(rank)

            reader.pull = watched
        report: Any = await world.step(2)
        assert order == [rank for rank in relayed for _ in range(2)]
        assert (report.num_stalls, len(report.pull_by_source)) == (0, 3)
        for replica in replicas:
            replica.assert_holds(world.full)


class Broken(Count):
    def read(self, rank: int, read: Callable[[], None], check: Callable[[], None]) -> None:
        del read
        if rank == 1:
            raise WeightSyncError("its link is down")
        until = time.monotonic() + 20
        while time.monotonic() < until:
            check()
            time.sleep(0.002)


async def test_the_failure_of_one_source_stops_the_others_before_the_pull_ends() -> None:
    replica, count = LocalReplica("r0"), Broken()
    async with opened(4, [replica], timeout_s=60.0) as world:
        await world.step(1)
        old = world.full
        watch(replica, count)
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="its link is down"):
            await world.step(2)
        assert time.monotonic() - started < 15
        assert count.now == 0, "one still wrote into the staging buffer"
        replica.assert_holds(old)
