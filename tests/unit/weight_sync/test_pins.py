"""One pin per learner rank keeps a version while replicas read it; whatever happened to them, no learner keeps it for
longer. What loses its slot on the way is nobody's failure."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica, World, eventually, opened
from weight_sync import deadlines
from weight_sync.channel import ControlServer
from weight_sync.errors import (
    DeviceError,
    DigestMismatch,
    PublisherLost,
    PullTimeout,
    VersionUnavailable,
    WeightSyncError,
)
from weight_sync.messages import AwaitRequest, Check, Pin, PrefetchRequest, Request, Unpin
from weight_sync.publish.slots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGED_OR_NOT = pytest.mark.parametrize("commit", ["staged", "inplace"])


def epochs(world: World) -> list[Any]:
    """Of each rank."""
    return [publisher.publisher._epoch for publisher in world.publishers]


def pinned(world: World) -> list[list[int | None]]:
    """Of each rank, the versions that are pinned."""
    tables = [epoch.table for epoch in epochs(world)]
    return [[slot.version for slot in table.slots if slot.state is SlotState.PINNED] for table in tables]


async def assert_nothing_is_pinned(world: World) -> None:
    await eventually(lambda: not any(pinned(world)))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Every request that learners and workers are asked, in order."""
    found: list[Request] = []
    init = ControlServer.__init__

    def listening(server: ControlServer, handler: Callable[..., Any], *args: Any, **options: Any) -> None:
        def hear(sender: str, request: Any) -> Any:
            found.append(request)
            return handler(sender, request)

        init(server, hear, *args, **options)

    monkeypatch.setattr(ControlServer, "__init__", listening)
    return found


def pins_in(heard: list[Request]) -> list[Request]:
    return [request for request in heard if isinstance(request, Pin | Unpin)]


async def test_a_version_costs_the_driver_one_message_per_worker_and_two_per_learner(
    heard: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks each learner once whether it is there whole, and its neighbour twice per source at most."""
    monkeypatch.setattr(deadlines, "RESEND_S", 120.0)  # a busy machine would repeat itself
    num_ranks, num_replicas, tp = 3, 4, 2
    async with opened(num_ranks, [LocalReplica(f"r{i}", tp) for i in range(num_replicas)], commit="staged") as world:
        await world.step(1)
        for version in (2, 3):
            await assert_nothing_is_pinned(world)
            heard.clear()
            await world.step(version)
        await assert_nothing_is_pinned(world)
        costs = Counter(type(request) for request in heard)
        num_workers = num_replicas * tp
        assert costs.pop(AwaitRequest) <= 2 * num_ranks * (num_replicas - 1) * tp
        assert costs == {
            PrefetchRequest: num_workers, Pin: num_ranks, Unpin: num_ranks, Check: num_workers * num_ranks,
        }  # fmt: skip


@STAGED_OR_NOT
async def test_a_rank_is_asked_for_one_pin_however_many_workers_read(commit: str, heard: list[Request]) -> None:
    async with opened(3, [LocalReplica(f"r{i}", 2) for i in range(3)], commit=commit) as world:
        await world.step(1)
        await assert_nothing_is_pinned(world)
        assert pins_in(heard) == [Pin(version=1, ttl_s=deadlines.PIN_TTL_S)] * 3 + [Unpin(version=1)] * 3


@STAGED_OR_NOT
async def test_nothing_is_unpinned_while_an_engine_stands_still(commit: str, heard: list[Request]) -> None:
    async with opened(2, 2, commit=commit) as world:
        second = world.replicas[1]
        await world.step(1)
        await assert_nothing_is_pinned(world)
        heard.clear()
        commits, seen = second.commit, list[list[list[int | None]]]()

        async def look(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.05)  # an unpin would be on its way
            seen.append(pinned(world))
            return await commits(*args, **options)

        second.commit = look
        await world.step(2)
        assert seen == [[[2], [2]]]
        await assert_nothing_is_pinned(world)
        assert pins_in(heard) == [Pin(version=2, ttl_s=deadlines.PIN_TTL_S)] * 2 + [Unpin(version=2)] * 2


async def test_a_frozen_replica_that_has_its_bytes_keeps_no_slot(heard: list[Request]) -> None:
    async with opened(1, 1, commit="staged") as world:
        await world.step(1)
        async with world.coordinator.freeze("r0"):
            syncing = asyncio.create_task(world.step(2))
            await eventually(lambda: Unpin(version=2) in heard)
            assert not syncing.done()
        await syncing


def raising(error: Exception, times: int) -> Callable[..., None]:
    failures = iter([error] * times)

    def fail(*_: Any) -> None:
        for failure in failures:
            raise failure

    return fail


def break_pull(replica: LocalReplica, times: int) -> None:
    reach: Any = next(iter(replica.receivers[-1]._epoch.readers.values()))
    pull, fail = reach.pull, raising(DigestMismatch("broken memory"), times)
    reach.pull = lambda *args, **options: (fail(), pull(*args, **options))


def break_commit(replica: LocalReplica, times: int) -> None:
    replica.before_commit = raising(TimeoutError("busy"), times)


def kill(replica: LocalReplica, times: int) -> None:
    replica.before_commit = raising(ConnectionError("the engine is gone"), times)


@STAGED_OR_NOT
@pytest.mark.parametrize("times", [1, 9])
@pytest.mark.parametrize("trouble", [break_pull, break_commit, kill])
async def test_a_replica_is_tried_twice_and_after_whatever_happened_to_it_no_learner_keeps_a_version(
    trouble: Callable[[LocalReplica, int], None], times: int, commit: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = "dirty" if trouble is break_pull and commit == "inplace" else "dead"
    is_tried_again, is_lost = trouble is not kill, trouble is kill or times > 1
    async with opened(2, [LocalReplica("r0", 2), LocalReplica("r1", 2)], commit=commit, num_slots=1) as world:
        await world.step(1)
        trouble(world.replicas[0], times)
        report = await world.step(2)
        assert world.coordinator.members == {"r0": state if is_lost else "live", "r1": "live"}
        assert (report.replicas_live, report.num_retries) == ((1, 0) if is_lost else (2, 1))
        assert ("r0 did not take version 2 (attempt 1): " in caplog.text) == is_tried_again
        assert (f"r0 is {state} and left out until it joins again: " in caplog.text) == is_lost
        await assert_nothing_is_pinned(world)
        await world.step(3)
        world.replicas[1].assert_holds(world.full)


@STAGED_OR_NOT
async def test_a_sync_that_is_cancelled_unpins(commit: str) -> None:
    async with opened(1, 1, commit=commit) as world:
        await world.step(1)
        world.replicas[0].commit_delay_s = 30.0
        syncing = asyncio.create_task(world.step(2))
        await eventually(lambda: world.replicas[0].is_paused)
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        await assert_nothing_is_pinned(world)


async def test_a_slow_read_has_its_pin_renewed_and_the_learner_waits_and_says_for_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deadlines, "RENEW_S", 0.02)
    async with opened(2, 1, num_slots=1, commit="inplace") as world:
        await world.step(1)
        replica, may_commit = world.replicas[0], asyncio.Event()
        commit, publish = replica.commit, world.publishers[0].ws_publish

        async def commit_slowly(*args: Any, **options: Any) -> Any:
            await may_commit.wait()
            return await commit(*args, **options)

        def answer_late(version: int, deadline_s: float) -> bytes:
            try:
                return publish(version, deadline_s)
            finally:
                time.sleep(0.3)  # on its way to the driver

        replica.commit = commit_slowly
        syncing = asyncio.create_task(world.step(2))
        await eventually(lambda: pinned(world) == [[2], [2]])
        slots = [epoch.table.slots[0] for epoch in epochs(world)]
        pinned_until = [slot.pinned_until for slot in slots]
        await eventually(lambda: all(s.pinned_until > t for s, t in zip(slots, pinned_until, strict=True)))
        world.hurry(0.5)
        monkeypatch.setattr(world.publishers[0], "ws_publish", answer_late)
        with pytest.raises(PullTimeout, match=r"version 2 in slot 0 is pinned .*; version 2 is still read by r0"):
            await world.coordinator.publish(3)
        world.hurry(20.0)
        publishing = asyncio.create_task(world.publish(3))
        may_commit.set()
        await publishing
        assert syncing.done(), "its slot was packed under it"
        assert (await syncing).replicas_live == 1


async def test_the_pin_of_a_coordinator_that_is_gone_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "PIN_TTL_S", 0.3)
    async with opened(1, 1, num_slots=1) as world:
        await world.step(1)
        pin = world.coordinator._pin_of(1)
        await pin.hold("r0", 5.0)
        renewing, pin._renewing = pin._renewing, None
        assert renewing is not None
        renewing.cancel()  # as with its process
        pinned_until = epochs(world)[0].table.slots[0].pinned_until
        await world.coordinator.publish(2)
        assert time.monotonic() >= pinned_until


@contextlib.contextmanager
def silent(world: World) -> Iterator[None]:
    """The control thread of the second learner is stuck."""
    server = epochs(world)[1].server
    receive, server._receive = server._receive, lambda *_: None
    yield
    server._receive = receive


@pytest.mark.parametrize(("silence_s", "error"), [(0.3, PublisherLost), (60.0, PullTimeout)])
async def test_a_silent_learner_is_no_failure_of_a_replica(
    silence_s: float, error: type[WeightSyncError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one called lost that was given less time than a stopped one has."""
    async with opened(2, 1) as world:
        await world.step(1)
        monkeypatch.setattr(deadlines, "PEER_TIMEOUT_S", silence_s)
        monkeypatch.setattr(deadlines, "PING_S", 0.05)
        world.hurry(1.0)
        with silent(world), pytest.raises(error, match="learner 1"):
            await world.step(2)
        assert world.coordinator.members == {"r0": "live"}
        monkeypatch.undo()
        world.hurry(20.0)
        await world.coordinator.sync(2)
        world.assert_all_hold(2)


async def test_a_self_test_keeps_the_version_that_it_compares() -> None:
    async with opened(1, 1) as world:
        await world.step(1)
        digests, seen = world.publishers[0].ws_digests, list[list[list[int | None]]]()

        def look(*args: Any) -> bytes:
            seen.append(pinned(world))
            return digests(*args)

        world.publishers[0].ws_digests = look
        await world.coordinator.self_test()
        assert seen == [[[1]]]
        await assert_nothing_is_pinned(world)


# Versions that lose their slots on the way


async def test_a_version_that_one_replica_missed_does_not_count_as_live() -> None:
    """It is pinned until each replica has it, but for one that is frozen with it staged: the learner may go on then. If
    its commit fails afterwards, there is nothing left to try again with."""
    async with opened(1, 2, commit="staged", rolling=False) as world:
        prompt, late = world.replicas
        await world.step(1)
        commit, failures = late.commit, iter([TimeoutError("the engine was busy")])

        async def fail_once(*args: Any, **options: Any) -> Any:
            for failure in failures:
                raise failure
            return await commit(*args, **options)

        late.commit = fail_once
        async with world.coordinator.freeze("r1"):
            syncing = asyncio.create_task(world.step(2))
            await eventually(lambda: prompt.versions == [1, 2] and not any(pinned(world)))
            for version in (3, 4):
                await world.publish(version)
        with pytest.raises(VersionUnavailable, match="version 2 is not held here"):
            await syncing
        assert world.coordinator.members == {"r0": "live", "r1": "live"}, "it is nobody's failure"
        report = await world.coordinator.sync(4)
        assert (report.version_lag, report.replicas_live) == (0, 2)
        world.assert_all_hold(4)


async def test_a_newcomer_waits_for_the_version_that_is_being_packed_over_the_last_one() -> None:
    async with opened(1, 1, num_slots=1) as world:
        await world.step(1)
        packer, has_begun, may_go_on = epochs(world)[0].packer, threading.Event(), threading.Event()
        pack = packer.pack

        def pack_slowly(*args: Any) -> None:
            has_begun.set()
            assert may_go_on.wait(20)
            pack(*args)

        packer.pack = pack_slowly
        publishing = asyncio.create_task(world.publish(2))
        await asyncio.to_thread(has_begun.wait, 20)
        newcomer = LocalReplica("r1")
        joining = asyncio.create_task(world.coordinator.join(newcomer))
        await asyncio.wait({joining}, timeout=0.5)
        assert not joining.done()
        may_go_on.set()
        await publishing
        assert await asyncio.wait_for(joining, 20) == 2
        newcomer.assert_holds(world.full)


async def test_a_replica_that_has_the_version_already_is_not_asked_again() -> None:
    second = LocalReplica("r1")
    async with opened(1, 1, num_slots=1) as world:
        await world.step(1)
        await world.coordinator.join(second)
        report = await world.coordinator.sync(1)
        assert (report.version, report.replicas_live) == (1, 2)
        assert (world.replicas[0].versions, second.versions) == ([1], [1])


async def test_a_version_that_could_not_be_sealed_says_why_and_harms_no_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(1, 1) as world:
        await world.step(1)

        def fail(_: int) -> None:
            raise DeviceError("no page-locked memory")

        monkeypatch.setattr(epochs(world)[0].end, "seal", fail)
        with pytest.raises(VersionUnavailable, match="rank 0 could not seal version 2: DeviceError: no page-locked"):
            await world.step(2)
        assert "could not seal version 2" in caplog.text
        assert world.coordinator.members == {"r0": "live"}
        with pytest.raises(WeightSyncError, match="could not seal version 2"):
            await world.coordinator.publish(2)
        monkeypatch.undo()
        await world.step(2)
        assert world.coordinator.members == {"r0": "live"}


async def test_the_seal_and_the_slot_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def tick() -> float:
        """Time goes on a little whenever somebody looks at the clock."""
        nonlocal now
        now += 0.01
        return now

    def seal(_deadline_s: float) -> None:
        nonlocal now
        now += 0.6

    async with opened(1, 1, num_slots=1) as world:
        await world.step(1)
        await assert_nothing_is_pinned(world)
        (epoch,) = epochs(world)
        monkeypatch.setattr(world.publishers[0].publisher, "_clock", tick)
        monkeypatch.setattr(epoch.table, "_clock", tick)
        epoch.table.pin(1, 60.0)
        monkeypatch.setattr(epoch.sealer, "wait", seal)
        with pytest.raises(PullTimeout):
            world.publishers[0].ws_publish(2, 0.8)
        assert 0.8 <= now < 1.0


async def test_a_sync_has_all_its_time_after_it_waited_for_somebody_to_join() -> None:
    async with opened(1, 1) as world:
        await world.step(1)
        await world.publish(2)
        async with world.coordinator._membership_lock:
            syncing = asyncio.create_task(world.coordinator.sync(2))
            await asyncio.sleep(0)  # it has begun to wait
            world.late_s = 100.0
        assert (await asyncio.wait_for(syncing, 10)).replicas_live == 1
        assert world.replicas[0].versions == [1, 2]
