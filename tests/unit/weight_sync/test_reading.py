"""How workers read learners: which transport they take and take again, how many at a time, and on which device."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.sync_world import FusedModel, LocalReplica, World, opened
from weight_sync.channel import ControlClient
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PublisherLost, PullTimeout, TransportUnusable, WeightSyncError
from weight_sync.receive import epoch as sources
from weight_sync.receive.epoch import ReceiverEpoch
from weight_sync.receive.receiver import WeightReceiver, WorkerService
from weight_sync.transports import select

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weight_sync.messages import PublisherInfo


def epoch_of(replica: LocalReplica) -> Any:
    return replica.receivers[0]._epoch


# Which transport


def refuse(_backend: Any, _arena: Any) -> Any:
    raise TransportUnusable("no peer access")


async def test_one_failed_attempt_does_not_cost_a_learner_its_best_transport(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapped, asked = select.MappedReader, list[Any]()

    def refuse_once(backend: Any, arena: Any) -> Any:
        asked.append(arena)
        if asked.count(arena) == 1:
            raise TransportUnusable("the driver was busy")
        return mapped(backend, arena)

    monkeypatch.setattr(select, "MappedReader", refuse_once)
    async with opened(2, 1, transport="auto") as world:
        await world.step(1)
        world.assert_all_hold(1)
        assert len(asked) == 4
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        wanted = "learner {} was not reached by ipc, which is tried once more: the driver was busy"
        assert sorted(warned) == [wanted.format(0), wanted.format(1)]
        assert world.coordinator.transport == "ipc"


async def test_auto_lets_the_learner_send_when_its_memory_cannot_be_mapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(select, "MappedReader", refuse)
    async with opened(2, 1, transport="auto") as world:
        assert world.coordinator.transport == "gloo"
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        # In the worker's own log, and for all learners in that of the coordinator, which people read.
        assert sum("cannot be reached by ipc: no peer access" in message for message in warned) == 1
        for rank in (0, 1):
            assert f"r0/0 does not read learner {rank} by ipc: no peer access" in warned
        await world.step(1)
        world.assert_all_hold(1)


async def test_a_transport_that_does_not_work_is_an_error_when_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(select, "MappedReader", refuse)
    world = World(1, 1, transport="ipc")
    with pytest.raises(TransportUnusable, match="no peer access"):
        await world.coordinator.open()


async def test_a_learner_that_cannot_be_read_like_the_others_is_read_another_way(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(3, 1, transport="auto", commit="staged") as world:
        epoch = epoch_of(world.replicas[0])
        first = next(rank for rank, reader in epoch.readers.items() if reader._reader is not None)
        other = (first + 1) % 3
        mapped, victim, refused = select.MappedReader, epoch.readers[other]._handles[0], list[Any]()

        def refuse_one(backend: Any, arena: Any) -> Any:
            if arena == victim:
                refused.append(arena)
                raise TransportUnusable("no peer access")
            return mapped(backend, arena)

        monkeypatch.setattr(select, "MappedReader", refuse_one)
        await world.step(1)
        world.assert_all_hold(1)
        assert epoch.transports == {rank: "gloo" if rank == other else "ipc" for rank in range(3)}
        assert f"learner {other} cannot be reached by ipc: no peer access" in caplog.text
        before = len(refused)
        await world.step(2)
        assert len(refused) == before, "what works for the others was tried again at once"


async def test_a_faster_transport_that_failed_is_tried_again_by_one_reader_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mapped, is_broken, tried, now = select.MappedReader, True, list[Any](), 0.0

    def map_or_refuse(backend: Any, arena: Any) -> Any:
        tried.append(arena)
        return refuse(backend, arena) if is_broken else mapped(backend, arena)

    monkeypatch.setattr(select, "MappedReader", map_or_refuse)
    async with opened(3, 1, transport="auto", commit="staged") as world:
        epoch = epoch_of(world.replicas[0])
        for reader in epoch.readers.values():
            reader._clock = lambda: now
            reader._node.retry_at = select.RETRY_FASTER_S
            reader._retry_at = 0.0

        async def tries(version: int, at_s: float) -> int:
            nonlocal now
            now = at_s
            tried.clear()
            await world.step(version)
            world.assert_all_hold(version)
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


async def test_sources_are_connected_when_they_are_first_read_and_one_of_a_kind_when_the_epoch_opens() -> None:
    """Two learners of one node, read by gloo; what a replica reads from another one it needs no learner for."""
    async with opened(2, 4, transport="gloo", commit="staged") as world:
        epochs = [epoch_of(replica) for replica in world.replicas]
        connections = [[epoch.counters()["communicators"] for epoch in epochs]]
        assert connections == [[1, 1, 1, 1]]
        assert [epoch.transports for epoch in epochs] == [dict.fromkeys(range(2), "gloo")] * 4
        for version in (1, 2, 3):
            await world.step(version)
            world.assert_all_hold(version)
            direct = [
                sum(reader._reader is not None and reader._reader._connection is not None for reader in readers)
                for readers in (epoch.readers.values() for epoch in epochs)
            ]
            relayed = [sum(bool(via) for via in epoch.relay._via.values()) for epoch in epochs]
            assert [a + b for a, b in zip(direct, relayed, strict=True)] == [2, 2, 2, 2], "one route to each source"
            assert sum(direct) == 2, "each source enters the ring once"
            connections.append([epoch.counters()["communicators"] for epoch in epochs])
        assert connections[1] == connections[3], "it connected again"


# Learners are reached when an epoch opens, which takes no longer than it may, and blames nobody who lives


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every learner has to be probed by itself, as if each were on another node."""
    monkeypatch.setattr(sources, "_kind", lambda info: info.rank)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("slow", [0, 1])
async def test_probes_share_the_deadline_of_the_epochs_opening(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(2, 1, transport="shm", timeout_s=60.0)
    late_s, is_late, probe = 0.0, threading.Event(), ReceiverEpoch._probe
    receiver = world.replicas[0].receivers[0]
    receiver._context = replace(receiver._context, clock=lambda: time.monotonic() + late_s)

    def probe_slowly(self: ReceiverEpoch, info: PublisherInfo, *rest: Any) -> None:
        nonlocal late_s
        if info.rank != slow:
            assert is_late.wait(30)
        probe(self, info, *rest)
        if info.rank == slow:
            late_s += 60.0
            is_late.set()

    with monkeypatch.context() as patch:
        patch.setattr(ReceiverEpoch, "_probe", probe_slowly)
        words = rf"learner {1 - slow} by shm: r0/0 did not get .* weight_sync\.timeout_s"
        with pytest.raises(PullTimeout, match=words):
            await world.coordinator.open()
    await world.coordinator.open()
    await world.coordinator.close()


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("owner", "name"), [(ControlClient, "ping"), (ReceiverEpoch, "_probe")])
async def test_sources_are_reached_side_by_side_but_not_all_at_once(
    owner: type[Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ASKED_AT_ONCE", 2)
    together, lock = threading.Barrier(2), threading.Lock()
    original, inside, most = getattr(owner, name), 0, 0

    def meet(*args: Any, **kwargs: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(30)
        original(*args, **kwargs)
        with lock:
            inside -= 1

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, meet)
        async with opened(4, 1) as world:
            assert list(epoch_of(world.replicas[0]).transports) == [0, 1, 2, 3]
    assert most == 2


@pytest.mark.usefixtures("apart")
async def test_one_source_that_cannot_be_reached_ends_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    is_waiting, probe = threading.Event(), ReceiverEpoch._probe

    def fail_or_wait(self: ReceiverEpoch, info: PublisherInfo, reader: Any, check: Any) -> None:
        match info.rank:
            case 0:
                is_waiting.set()
                while True:
                    check()
                    time.sleep(0.005)
            case 1:
                assert is_waiting.wait(30)
                raise PublisherLost("learner 1 is gone")
            case _:
                probe(self, info, reader, check)

    world = World(3, 1, timeout_s=60.0)
    monkeypatch.setattr(ReceiverEpoch, "_probe", fail_or_wait)
    started = time.monotonic()
    with pytest.raises(PublisherLost, match="learner 1 is gone"):
        await world.coordinator.open()
    assert time.monotonic() - started < 30.0


# A version comes from several learners side by side, a few at a time


def watch(replica: LocalReplica, around: Callable[[int, Callable[[], None], Callable[[], None]], None]) -> None:
    """Every read of a source goes through `around(rank, read, check)`."""
    for rank, reader in epoch_of(replica).readers.items():
        pull = reader.pull

        def watched(*args: Any, rank: int = rank, pull: Any = pull, check: Any, **options: Any) -> None:
            around(rank, lambda: pull(*args, check=check, **options), check)

        reader.pull = watched


@pytest.mark.parametrize("commit", ["staged", "inplace"])
@pytest.mark.parametrize(("transport", "num_at_once"), [("ipc", 4), ("gloo", 2)])
async def test_a_few_sources_are_read_at_a_time(transport: str, num_at_once: int, commit: str) -> None:
    now, most, changed = 0, 0, threading.Condition()

    def count(_rank: int, read: Callable[[], None], _check: Callable[[], None]) -> None:
        """Waits until there were as many reads as are expected, and then a moment for more."""
        nonlocal now, most
        with changed:
            now, most = now + 1, max(most, now + 1)
            changed.notify_all()
            changed.wait_for(lambda: most >= num_at_once, 10)
        time.sleep(0.02)
        read()
        with changed:
            now -= 1

    async with opened(5, 1, transport=transport, commit=commit) as world:
        await world.step(1)
        watch(world.replicas[0], count)
        report = await world.step(2)
        world.assert_all_hold(2)
        assert most == num_at_once
        assert len(report.pull_by_source) == 5
        assert report.pull_s < sum(report.pull_by_source.values())


async def test_what_other_workers_hand_on_comes_in_its_order_beside_what_learners_give() -> None:
    """Out of order, workers of a ring could wait for each other in a circle."""
    async with opened(3, 4, transport="gloo", commit="staged") as world:
        await world.step(1)
        relays = [epoch_of(replica).relay for replica in world.replicas]
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
        report = await world.step(2)
        assert order == [rank for rank in relayed for _ in range(2)]
        assert (report.num_stalls, len(report.pull_by_source)) == (0, 3)
        world.assert_all_hold(2)


async def test_the_failure_of_one_source_stops_the_others_before_the_pull_ends() -> None:
    reading: set[int] = set()

    def fail_or_wait(rank: int, _read: Callable[[], None], check: Callable[[], None]) -> None:
        if rank == 1:
            raise WeightSyncError("its link is down")
        reading.add(rank)
        until = time.monotonic() + 20
        try:
            while time.monotonic() < until:
                check()
                time.sleep(0.002)
        finally:
            time.sleep(0.02)
            reading.remove(rank)

    async with opened(4, 1, timeout_s=60.0) as world:
        await world.step(1)
        watch(world.replicas[0], fail_or_wait)
        started = time.monotonic()
        with pytest.raises(WeightSyncError, match="its link is down"):
            await world.step(2)
        assert time.monotonic() - started < 15
        assert not reading, "one still wrote into the staging buffer"
        world.assert_all_hold(1)


# Every thread of a receiver works on the device of its worker

DEVICE = torch.device("cpu", 3)
PULLING = ("weight-sync-pull", "weight-sync-source")
DEVICE_CALLS = ("alloc_persistent", "ipc_open", "ipc_export", "new_stream", "copy_async", "synchronize", "enter",
                "digest", "memory_info")  # fmt: skip


class RecordingBackend(CpuBackend):
    """As a driver has it: a device chosen by `set_device`, and in each thread torch's own, which is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self._chosen = 0
        self._of_thread = threading.local()
        self.seen: defaultdict[str, set[tuple[str, int, int]]] = defaultdict(set)
        """Thread -> (call, device of the driver, device of torch)."""

    def set_device(self, index: int) -> torch.device:
        self._chosen = self._of_thread.index = index
        return DEVICE

    def note(self, call: str) -> None:
        thread = threading.current_thread().name.rstrip("0123456789-_")
        self.seen[thread].add((call, self._chosen, getattr(self._of_thread, "index", 0)))


def _noted(name: str) -> Any:
    original = getattr(CpuBackend, name)

    def call(self: RecordingBackend, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        if name == "copy_async":
            time.sleep(0.02)  # so that no thread of a pull does it all
        return original(self, *args, **kwargs)

    return call


for _name in DEVICE_CALLS:
    setattr(RecordingBackend, _name, _noted(_name))


class OnDevice3(FusedModel):
    """Host memory that says it lies on a device with a number."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        for parameter in super().parameters(recurse):
            yield type("Parameter", (), {"device": DEVICE, "dtype": parameter.dtype})


def on_device_3(name: str, backend: RecordingBackend) -> LocalReplica:
    made = LocalReplica(name)
    made.models[0] = OnDevice3()
    receiver = WeightReceiver(made.models[0], backend, worker=0)
    made.receivers[0], made.services[0] = receiver, WorkerService(lambda: receiver)
    return made


async def test_threads_of_a_receiver_work_on_the_device_of_its_worker() -> None:
    """Relays are on, so the threads of a pull map another replica's memory and make streams."""
    backends = [RecordingBackend() for _ in range(3)]
    replicas = [on_device_3(f"r{i}", backend) for i, backend in enumerate(backends)]
    async with opened(2, replicas, commit="staged") as world:
        await world.step(1)
        world.assert_all_hold(1)
    for backend in backends:
        for thread, calls in backend.seen.items():
            wrong = {call for call, chosen, _ in calls if chosen != DEVICE.index}
            assert not wrong, f"{thread} made {sorted(wrong)} on device 0"
        for thread in PULLING:
            assert {index for *_, index in backend.seen[thread]} <= {DEVICE.index}, f"torch of {thread} is on 0"
    for thread in PULLING:
        assert any(backend.seen[thread] for backend in backends), f"{thread} did nothing"
    by_pull = set().union(*(backend.seen[thread] for backend in backends for thread in PULLING))
    assert {call for call, *_ in by_pull} >= {"ipc_open", "new_stream"}, "no replica was linked to another"
