"""Learners are reached when they are needed; opening takes no longer than it may, and blames nobody who lives."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.sync_world import LocalPublisher, LocalReplica, full_weights
from tests.unit.weight_sync.test_receiver import OLD, Pair, ask_local, closing
from weight_sync.channel import ControlClient
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.errors import PublisherLost, PullTimeout, TransportUnusable
from weight_sync.receive import epoch as sources
from weight_sync.receive.epoch import ReceiverEpoch
from weight_sync.transports import select

if TYPE_CHECKING:
    from weight_sync.messages import PublisherInfo

__all__ = ["closing"]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every learner has to be probed by itself, as if each were on another node."""
    monkeypatch.setattr(sources, "_kind", lambda info: info.rank)


def opened_by(num_ranks: int, closing: list[Any]) -> Pair:
    """A receiver that reads from that many learners."""
    publishers = [LocalPublisher(rank, num_ranks, OLD) for rank in range(num_ranks)]
    closing.extend(publisher.publisher for publisher in publishers)
    pair = Pair(publishers, ask_local, commit="staged")
    closing.append(pair.receiver)
    return pair


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("slow", [0, 1])
def test_probes_share_the_deadline_of_the_epochs_opening(
    slow: int, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(2, closing)
    late_s, is_late = 0.0, threading.Event()
    pair.receiver._context = replace(pair.receiver._context, clock=lambda: time.monotonic() + late_s)
    probe = ReceiverEpoch._probe

    def probe_slowly(self: ReceiverEpoch, info: PublisherInfo, *rest: Any) -> None:
        nonlocal late_s
        if info.rank != slow:
            assert is_late.wait(5)
        probe(self, info, *rest)
        if info.rank == slow:
            late_s += pair.request.deadline_s
            is_late.set()

    monkeypatch.setattr(ReceiverEpoch, "_probe", probe_slowly)
    with pytest.raises(PullTimeout, match=rf"learner {1 - slow} by shm: r0/0 did not get .* weight_sync\.timeout_s"):
        pair.receiver.open(pair.request)
    monkeypatch.undo()
    pair.receiver.open(pair.request)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("step", ["ping", "probe"])
def test_sources_are_reached_side_by_side_but_not_all_at_once(
    step: str, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(4, closing)
    monkeypatch.setattr(sources, "ASKED_AT_ONCE", 2)
    together, lock = threading.Barrier(2), threading.Lock()
    owner, name = {"ping": (ControlClient, "ping"), "probe": (ReceiverEpoch, "_probe")}[step]
    original, inside, most = getattr(owner, name), 0, 0

    def meet(*args: Any, **kwargs: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(5)
        original(*args, **kwargs)
        with lock:
            inside -= 1

    monkeypatch.setattr(owner, name, meet)
    pair.receiver.open(pair.request)
    assert most == 2
    assert list(pair.receiver._epoch.transports) == [0, 1, 2, 3]


@pytest.mark.usefixtures("apart")
def test_one_source_that_cannot_be_reached_ends_the_wait_for_the_others(
    closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = opened_by(3, closing)
    probe, is_waiting = ReceiverEpoch._probe, threading.Event()

    def fail_or_wait(self: ReceiverEpoch, info: PublisherInfo, reader: Any, check: Any) -> None:
        match info.rank:
            case 0:
                is_waiting.set()
                while True:
                    check()
                    time.sleep(0.005)
            case 1:
                assert is_waiting.wait(5)
                raise PublisherLost("learner 1 is gone")
            case _:
                probe(self, info, reader, check)

    monkeypatch.setattr(ReceiverEpoch, "_probe", fail_or_wait)
    started = time.monotonic()
    with pytest.raises(PublisherLost, match="learner 1 is gone"):
        pair.receiver.open(pair.request)
    assert time.monotonic() - started < pair.request.deadline_s / 2
    monkeypatch.undo()
    pair.receiver.open(pair.request)


def num_connected(party: Any) -> int:
    return party.counters().get("communicators", 0)


async def test_sources_are_connected_when_they_are_first_read_and_one_of_a_kind_when_the_epoch_opens() -> None:
    """Two learners of one node, read by gloo; what a replica reads from another one it needs no learner for."""
    replicas = [LocalReplica(f"r{number}") for number in range(4)]
    learners = [LocalPublisher(rank, 2, full_weights(0)) for rank in range(2)]
    coordinator = SyncCoordinator(learners, replicas, options=SyncOptions(transport="gloo", commit="staged"))
    await coordinator.open()
    try:
        epochs: list[Any] = [replica.receivers[0]._epoch for replica in replicas]
        assert [num_connected(epoch) for epoch in epochs] == [1, 1, 1, 1]
        assert [epoch.transports for epoch in epochs] == [dict.fromkeys(range(2), "gloo")] * 4
        for version in (1, 2, 3):
            for learner in learners:
                learner.full = full_weights(version)
            await coordinator.publish(version)
            await coordinator.sync(version)
            for replica in replicas:
                replica.assert_holds(full_weights(version))
            connected = [
                sum(reader._reader is not None and reader._reader._connection is not None for reader in readers)
                for readers in (epoch.readers.values() for epoch in epochs)
            ]
            relayed = [sum(bool(via) for via in epoch.relay._via.values()) for epoch in epochs]
            assert [a + b for a, b in zip(connected, relayed, strict=True)] == [2, 2, 2, 2], "one route to each source"
            if version == 1:
                before = [num_connected(one) for one in epochs]
                assert sum(connected) == 2, "each source enters the ring once"
        assert [num_connected(epoch) for epoch in epochs] == before, "it connected again"
    finally:
        await coordinator.close()


async def test_a_learner_that_cannot_be_read_like_the_others_is_read_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = LocalReplica("r0")
    learners = [LocalPublisher(rank, 3, full_weights(1)) for rank in range(3)]
    coordinator = SyncCoordinator(learners, [replica], options=SyncOptions(transport="auto", commit="staged"))
    await coordinator.open()
    try:
        epoch: Any = replica.receivers[0]._epoch
        first = next(rank for rank, reader in epoch.readers.items() if reader._reader is not None)
        mapped, victim = select.MappedReader, epoch.readers[(first + 1) % 3]._handles[0]

        num_refused = 0

        def refuse(backend: Any, arena: Any) -> Any:
            nonlocal num_refused
            if arena == victim:
                num_refused += 1
                raise TransportUnusable("no peer access")
            return mapped(backend, arena)

        monkeypatch.setattr(select, "MappedReader", refuse)
        await coordinator.publish(1)
        await coordinator.sync(1)
        replica.assert_holds(full_weights(1))
        assert epoch.transports == {rank: "gloo" if rank == (first + 1) % 3 else "ipc" for rank in range(3)}
        assert f"learner {(first + 1) % 3} cannot be reached by ipc: no peer access" in caplog.text
        before = num_refused
        await coordinator.publish(2)
        await coordinator.sync(2)
        assert num_refused == before, "what works for the others was tried again at once"
    finally:
        await coordinator.close()


async def test_a_faster_transport_that_failed_is_tried_again_by_one_reader_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replica = LocalReplica("r0")
    learners = [LocalPublisher(rank, 3, full_weights(0)) for rank in range(3)]
    coordinator = SyncCoordinator(learners, [replica], options=SyncOptions(transport="auto", commit="staged"))
    mapped, is_broken, tried = select.MappedReader, True, list[Any]()

    def map_or_refuse(backend: Any, arena: Any) -> Any:
        tried.append(arena)
        if is_broken:
            raise TransportUnusable("no peer access")
        return mapped(backend, arena)

    monkeypatch.setattr(select, "MappedReader", map_or_refuse)
    await coordinator.open()
    try:
        epoch: Any = replica.receivers[0]._epoch
        now = 0.0
        for reader in epoch.readers.values():
            reader._clock = lambda: now
            reader._node.retry_at = select.RETRY_FASTER_S
            reader._retry_at = 0.0

        async def tries(version: int, at_s: float) -> int:
            nonlocal now
            now = at_s
            tried.clear()
            for learner in learners:
                learner.full = full_weights(version)
            await coordinator.publish(version)
            await coordinator.sync(version)
            replica.assert_holds(full_weights(version))
            return len(tried)

        assert await tries(1, 0.0) == 0
        assert await tries(2, 59.0) == 0
        assert await tries(3, 61.0) == 1
        assert await tries(4, 122.0) == 0, "after a failure it is left alone for longer"
        slow = [reader._reader for reader in epoch.readers.values()]
        is_broken = False
        assert await tries(5, 190.0) >= 1
        await tries(6, 190.0)
        assert epoch.transports == dict.fromkeys(range(3), "ipc")
        assert all(reader._connection is None for reader in slow), "the slower way is still connected"
        assert await tries(7, 9999.0) == 0
        assert "learner 0 is read by ipc from now on, no longer by gloo" in caplog.text
    finally:
        await coordinator.close()
