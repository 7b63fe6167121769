"""One pin per learner rank keeps a version while replicas read it; whatever happened to them, no learner keeps it for
longer."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalReplica
from tests.unit.weight_sync.test_coordinator import World, opened
from weight_sync import deadlines
from weight_sync.channel import ControlServer
from weight_sync.errors import DigestMismatch, PublisherLost, PullTimeout, WeightSyncError
from weight_sync.messages import Pin, Unpin
from weight_sync.publish.slots import SlotState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STAGED_OR_NOT = pytest.mark.parametrize("commit", ["staged", "inplace"])


def pinned(world: World) -> list[list[int | None]]:
    """Of each rank, the versions that are pinned."""
    tables = [publisher.publisher._epoch.table for publisher in world.publishers]
    return [[slot.version for slot in table.slots if slot.state is SlotState.PINNED] for table in tables]


async def assert_nothing_is_pinned(world: World) -> None:
    async with asyncio.timeout(5):
        while any(pinned(world)):
            await asyncio.sleep(0.005)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Pin | Unpin]:
    """Every pin and unpin that a learner is asked for."""
    found: list[Pin | Unpin] = []
    init = ControlServer.__init__

    def listening(server: ControlServer, handler: Callable[..., Any], *args: Any, **options: Any) -> None:
        def heard(sender: str, request: Any) -> Any:
            found.extend([request] if isinstance(request, Pin | Unpin) else [])
            return handler(sender, request)

        init(server, heard, *args, **options)

    monkeypatch.setattr(ControlServer, "__init__", listening)
    return found


@STAGED_OR_NOT
async def test_a_rank_is_asked_for_one_pin_however_many_workers_read(commit: str, asked: list[Pin | Unpin]) -> None:
    async with opened(3, [LocalReplica(f"r{i}", 2) for i in range(3)], commit=commit) as world:
        await world.step(1)
        await assert_nothing_is_pinned(world)
        assert asked == [Pin(version=1, ttl_s=deadlines.PIN_TTL_S)] * 3 + [Unpin(version=1)] * 3


@STAGED_OR_NOT
async def test_nothing_is_unpinned_while_an_engine_stands_still(commit: str, asked: list[Pin | Unpin]) -> None:
    first, second = LocalReplica("r0"), LocalReplica("r1")
    async with opened(2, [first, second], commit=commit) as world:
        await world.step(1)
        await assert_nothing_is_pinned(world)
        asked.clear()
        commits, seen = second.commit, list[list[list[int | None]]]()

        async def look(*args: Any, **options: Any) -> Any:
            await asyncio.sleep(0.05)  # an unpin would be on its way
            seen.append(pinned(world))
            return await commits(*args, **options)

        second.commit = look
        await world.step(2)
        assert seen == [[[2], [2]]]
        await assert_nothing_is_pinned(world)
        assert asked == [Pin(version=2, ttl_s=deadlines.PIN_TTL_S)] * 2 + [Unpin(version=2)] * 2


async def test_a_frozen_replica_that_has_its_bytes_keeps_no_slot(asked: list[Pin | Unpin]) -> None:
    async with opened(1, [LocalReplica("r0")], commit="staged") as world:
        await world.step(1)
        async with world.coordinator.freeze("r0"):
            syncing = asyncio.create_task(world.step(2))
            async with asyncio.timeout(10):
                while Unpin(version=2) not in asked:
                    await asyncio.sleep(0.005)
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
    replicas = [LocalReplica("r0", 2), LocalReplica("r1", 2)]
    async with opened(2, replicas, commit=commit, num_slots=1) as world:
        await world.step(1)
        trouble(replicas[0], times)
        report: Any = await world.step(2)
        assert world.coordinator.members == {"r0": state if is_lost else "live", "r1": "live"}
        assert (report.replicas_live, report.num_retries) == ((1, 0) if is_lost else (2, 1))
        assert ("r0 did not take version 2 (attempt 1): " in caplog.text) == is_tried_again
        assert (f"r0 is {state} and left out until it joins again: " in caplog.text) == is_lost
        await assert_nothing_is_pinned(world)
        await world.step(3)
        replicas[1].assert_holds(world.full)


@STAGED_OR_NOT
async def test_a_sync_that_is_cancelled_unpins(commit: str) -> None:
    replica = LocalReplica("r0")
    async with opened(1, [replica], commit=commit) as world:
        await world.step(1)
        replica.commit_delay_s = 30.0
        syncing = asyncio.create_task(world.step(2))
        async with asyncio.timeout(10):
            while not replica.is_paused:
                await asyncio.sleep(0.005)
        syncing.cancel()
        await asyncio.gather(syncing, return_exceptions=True)
        await assert_nothing_is_pinned(world)


async def test_a_slow_read_has_its_pin_renewed_and_the_learner_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "PIN_TTL_S", 0.3)
    monkeypatch.setattr(deadlines, "RENEW_S", 0.1)
    replica = LocalReplica("r0")
    async with opened(1, [replica], commit="inplace", num_slots=1) as world:
        await world.step(1)
        replica.commit_delay_s = 1.0
        syncing = asyncio.create_task(world.step(2))
        await asyncio.sleep(0.8)
        assert pinned(world) == [[2]]
        await world.coordinator.publish(3)
        assert syncing.done(), "its slot was packed under it"
        assert (await syncing).replicas_live == 1


async def test_the_pin_of_a_coordinator_that_is_gone_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "PIN_TTL_S", 0.3)
    async with opened(1, [LocalReplica("r0")], num_slots=1) as world:
        await world.step(1)
        pin = world.coordinator._pin_of(1)
        await pin.hold("r0", 5.0)
        renewing, pin._renewing = pin._renewing, None
        renewing.cancel()  # as with its process
        started = asyncio.get_running_loop().time()
        await world.coordinator.publish(2)
        assert asyncio.get_running_loop().time() - started >= 0.2


@contextlib.contextmanager
def silent(world: World) -> Iterator[None]:
    """The control thread of the second learner is stuck."""
    server = world.publishers[1].publisher._epoch.server
    receive, server._receive = server._receive, lambda *_: None
    yield
    server._receive = receive


@pytest.mark.parametrize(("silence_s", "error"), [(0.3, PublisherLost), (60.0, PullTimeout)])
async def test_a_silent_learner_is_no_failure_of_a_replica(
    silence_s: float, error: type[WeightSyncError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one called lost that was given less time than a stopped one has."""
    monkeypatch.setattr("weight_sync.deadlines.PEER_TIMEOUT_S", silence_s)
    monkeypatch.setattr("weight_sync.deadlines.PING_S", 0.05)
    replica = LocalReplica("r0")
    async with opened(2, [replica], timeout_s=2.0) as world:
        await world.step(1)
        with silent(world), pytest.raises(error, match="learner 1"):
            await world.step(2)
        assert world.coordinator.members == {"r0": "live"}
        await world.coordinator.sync(2)
        replica.assert_holds(world.full)


async def test_a_self_test_keeps_the_version_that_it_compares() -> None:
    async with opened(1, [LocalReplica("r0")]) as world:
        await world.step(1)
        digests, seen = world.publishers[0].ws_digests, list[list[list[int | None]]]()

        def look(*args: Any) -> bytes:
            seen.append(pinned(world))
            return digests(*args)

        world.publishers[0].ws_digests = look
        await world.coordinator.self_test()
        assert seen == [[[1]]]
        await assert_nothing_is_pinned(world)
