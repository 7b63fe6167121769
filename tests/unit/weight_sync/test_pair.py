"""Pairs in one process: how pulls are cut, what either end refuses, and groups that are built while something else
happens. Real processes that die or stop: tests/contract/transports."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.channel import MAX_REQUEST_BYTES
from weight_sync.device.collectives import GlooGroup, LinkBroken
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import TransportUnusable, VersionUnavailable, WeightSyncError
from weight_sync.messages import ArenaHandle, Envelope, PairDrop, PairMeet, PairMet, PairSend, PairWatch
from weight_sync.transports import pair
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import SlotExporter
from weight_sync.transports.pair import PairReceiver, ReplicatedStore, Timing, batches, messages_of, orders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SLOT = bytes(range(8))


@given(st.lists(st.integers(1, 300 * 2**20), max_size=600), st.integers(1, 2**31))
def test_batches_hold_every_message_once_in_order_and_no_more_than_they_may(sizes: list[int], limit: int) -> None:
    found = list(batches(sizes, lambda size: size, limit_bytes=limit))
    assert [size for batch in found for size in batch] == sizes
    for batch in found:
        assert 0 < len(batch) <= pair.BATCH_MESSAGES
        assert sum(batch) <= limit or len(batch) == 1
    # No batch could have taken the next one's first message.
    for batch, following in itertools.pairwise(found):
        assert len(batch) == pair.BATCH_MESSAGES or sum(batch) + following[0] > limit


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 300)), max_size=20), st.integers(1, 100))
def test_pieces_are_cut_without_gap_or_overlap(pieces: list[tuple[int, int]], limit: int) -> None:
    cut = messages_of(
        [Piece(offset, torch.empty(size, dtype=torch.uint8)) for offset, size in pieces], limit_bytes=limit
    )
    assert [m.offset + i for m in cut for i in range(m.dst.numel())] == [o + i for o, n in pieces for i in range(n)]
    assert all(message.dst.numel() <= limit for message in cut)
    arrived = list(itertools.accumulate(message.dst.numel() for message in cut))
    ends = list(itertools.accumulate(size for _, size in pieces))
    assert [message.num_pieces for message in cut] == [sum(end <= now for end in ends) for now in arrived]


def test_the_largest_order_fits_into_a_control_frame() -> None:
    ranges = [(2**50 - number, pair.MESSAGE_BYTES - number) for number in range(pair.ORDER_MESSAGES + 7)]
    parts = list(orders(ranges))
    assert [len(part) for part in parts] == [pair.ORDER_MESSAGES, 7]
    request = PairSend(group=bytes(16), number=2**40, slot=2**20, ranges=tuple(parts[0]))
    frame = msgspec.msgpack.encode(Envelope(epoch=2**40, sender="s" * 200, request_id=2**50, request=request))
    assert len(frame) < MAX_REQUEST_BYTES


def test_stores_become_equal_however_many_answers_are_lost() -> None:
    left, right = ReplicatedStore(), ReplicatedStore()
    left.store.set("address", b"\x00\xff1")  # type: ignore[arg-type]
    right.store.set("mine", b"2")  # type: ignore[arg-type]
    assert left.own() == left.own() == {"address": b"\x00\xff1"}
    right.learn(left.own())
    assert right.own() == {"mine": b"2"}, "what was learned is not carried back"
    right.learn({"address": b"3", "mine": b"3"})
    left.learn(right.own())
    for one in (left, right):
        assert (one.store.get("address"), one.store.get("mine")) == (b"\x00\xff1", b"2")


class Group:
    """An end that remembers what it was told to send; what it receives is its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sent: list[bytes] = []
        self.aborted, self.may_finish = threading.Event(), threading.Event()
        self.may_finish.set()
        self.error: LinkBroken | None = None
        """Of every further transfer, and of an abort that cannot be had."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Group:
        self.sent.extend(bytes(tensor.tolist()) for tensor in tensors)
        return self

    def receive(self, tensors: Sequence[torch.Tensor]) -> Group:
        for tensor in tensors:
            tensor.fill_(self.number)
        return self

    def is_done(self, wait_s: float) -> bool:
        is_done = self.may_finish.wait(wait_s)
        if self.error is not None or self.aborted.is_set():
            raise self.error or LinkBroken("aborted")
        return is_done

    def abort(self) -> None:
        self.aborted.set()
        self.may_finish.set()
        if self.error is not None:
            raise self.error


class World:
    """A publisher with one slot of interest, ends that are built as told, and lines to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.groups: tuple[list[Group], list[Group]] = ([], [])
        """Ends that were built: the publisher's, the receivers'."""
        self.build: Callable[[int], Any] = lambda rank: Group(len(self.groups[rank]) + 1)
        self.num_building = self.most_building = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(CpuBackend, "connect_pair", self._connect)
        self.timing = Timing(stall_s=0.5, silence_s=5.0)
        self.exporter = SlotExporter(
            ("gloo",), CpuBackend(), slot_bytes=8, num_slots=2, host="127.0.0.1", timing=self.timing
        )
        self.exporter.slot(1).copy_(torch.tensor(list(SLOT), dtype=torch.uint8))
        self.asked: list[tuple[str, bytes]] = []
        self._asking = threading.Lock()
        self.answer = self.exporter.answer

    def _connect(self, store: Any, *, rank: int, **__: object) -> Any:
        with self._lock:
            self.num_building += rank == 0
            self.most_building = max(self.most_building, self.num_building)
        store.set(f"rank{rank}", b"!")
        try:
            group = self.build(rank)
            self.groups[rank].append(group)
            return group
        finally:
            with self._lock:
                self.num_building -= rank == 0

    def ask(self, request: Any, kind: type[Any], *, deadline_s: float, check: Callable[[], None] | None = None) -> Any:
        """As the line of receiver a/0."""
        with self.line():
            if check is not None:
                check()
            self.asked.append((type(request).__name__, request.group))
            return self.answer("a/0", request)

    @contextlib.contextmanager
    def line(self) -> Iterator[None]:
        """A line carries one question at a time, whoever asks it."""
        assert self._asking.acquire(timeout=1), "a question inside a question: a real line waits for ever"
        try:
            yield
        finally:
            self._asking.release()

    def receiver(self) -> PairReceiver:
        return PairReceiver(CpuBackend(), self.exporter.handles[0], self, host="127.0.0.1", timing=self.timing)

    def meet(self, sender: str, group: bytes, *, num_groups: int = 1) -> Group:
        self.exporter.answer(sender, PairMeet(group=group, entries={}))
        assert eventually(lambda: self.exporter.counters()["communicators"] == num_groups)
        return self.groups[0][-1]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    before = set(threading.enumerate())  # other tests' too
    world = World(monkeypatch)
    yield world
    world.exporter.close()
    assert eventually(lambda: not any("weight-sync-" in thread.name for thread in {*threading.enumerate()} - before))


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.005)
    return is_so()


def order(number: int, *ranges: tuple[int, int], slot: int = 1, group: bytes = b"g") -> PairSend:
    return PairSend(group=group, number=number, slot=slot, ranges=ranges)


def test_a_repeated_order_is_carried_out_once_and_a_missing_one_is_noticed(world: World) -> None:
    group, answer = world.meet("a/0", b"g"), world.exporter.answer
    for _ in range(3):
        answer("a/0", order(0, (6, 2), (0, 3)))
    answer("a/0", order(1, (3, 1)))
    with pytest.raises(ValueError, match="order 3 came before order 2"):
        answer("a/0", order(3))
    assert eventually(lambda: answer("a/0", PairWatch(group=b"g")).num_sent == 2)  # type: ignore[union-attr]
    assert group.sent == [SLOT[6:8], SLOT[0:3], SLOT[3:4]]
    world.exporter.close()
    assert group.aborted.wait(5)


@pytest.mark.parametrize(
    ("slot", "ranges"), [(3, ()), (-1, ()), (0, ((0, 9),)), (0, ((8, 1),)), (0, ((-1, 2),)), (0, ((3, 0),))]
)
def test_bytes_outside_the_slots_are_never_sent(world: World, slot: int, ranges: tuple[tuple[int, int], ...]) -> None:
    group = world.meet("a/0", b"g")
    with pytest.raises(ValueError, match=r"slot must be in|is not inside a slot of 8 bytes"):
        world.exporter.answer("a/0", order(0, *ranges, slot=slot))
    assert group.sent == []


def test_a_receiver_that_meets_again_leaves_its_old_group_and_nobody_elses(world: World) -> None:
    old = world.meet("a/0", b"old")
    other = world.meet("b/0", b"other", num_groups=2)
    new = world.meet("a/0", b"new", num_groups=3)
    assert old.aborted.wait(5)
    assert not other.aborted.is_set()
    assert not new.aborted.is_set()
    for request in (PairWatch(group=b"old"), order(0, group=b"old"), PairDrop(group=b"old")):
        with pytest.raises(VersionUnavailable, match="a group that is not its current one"):
            world.exporter.answer("a/0", request)
    with pytest.raises(VersionUnavailable):
        world.exporter.answer("b/0", PairWatch(group=b"new"))
    world.exporter.forget("b")
    assert other.aborted.wait(5)
    world.exporter.close()
    with pytest.raises(VersionUnavailable, match="this publisher closed"):
        world.exporter.answer("c/0", PairMeet(group=b"late", entries={}))


def test_a_send_that_stalls_drops_the_group_and_says_so(world: World) -> None:
    group = world.meet("a/0", b"g")
    group.may_finish.clear()
    world.exporter.answer("a/0", order(0, (0, 8)))
    assert group.aborted.wait(5)
    watch = PairWatch(group=b"g")
    assert eventually(lambda: "no progress within 0.5 s" in world.exporter.answer("a/0", watch).error)


def test_no_more_groups_are_built_at_a_time_than_a_process_can_bear(world: World) -> None:
    may_build = threading.Event()

    def build(rank: int) -> Group:
        assert may_build.wait(20)
        return Group(0)

    world.build = build
    for number in range(3 * pair.BUILDS_AT_ONCE):
        world.exporter.answer(f"r{number}/0", PairMeet(group=b"g", entries={}))
    assert eventually(lambda: world.num_building == pair.BUILDS_AT_ONCE)
    world.exporter.answer(f"r{number}/0", PairDrop(group=b"g"))
    may_build.set()
    assert eventually(lambda: world.exporter.counters()["communicators"] == 3 * pair.BUILDS_AT_ONCE - 1)
    assert world.most_building == pair.BUILDS_AT_ONCE
    assert len(world.groups[0]) == 3 * pair.BUILDS_AT_ONCE - 1, "the one that was not wanted any more was built"


class Stopped(Exception):
    pass


def pull(end: PairReceiver, *, check: Callable[[], None] = lambda: None) -> list[int]:
    target = torch.zeros(4, dtype=torch.uint8)
    end.pull(1, [Piece(0, target)], check=check)
    return target.tolist()


def test_a_pull_that_is_stopped_while_its_group_is_built_leaves_the_next_one_alone(world: World) -> None:
    is_building, may_build = threading.Event(), threading.Event()

    def build(rank: int) -> Group:
        number = len(world.groups[rank]) + 1
        if rank == 1 and not is_building.is_set():
            is_building.set()
            assert may_build.wait(20)
            number = 99
        return Group(number)

    def check() -> None:
        if is_building.is_set():
            raise Stopped

    world.build = build
    end = world.receiver()
    with pytest.raises(Stopped):
        pull(end, check=check)
    first = world.asked[0][1]
    assert world.asked[-1] == ("PairDrop", first)
    num_asked = len(world.asked)
    assert pull(end) == [1] * 4
    may_build.set()
    assert eventually(lambda: len(world.groups[1]) == 2)
    late = next(group for group in world.groups[1] if group.number == 99)
    assert late.aborted.wait(5), "the late group stays open"
    assert pull(end) == [1] * 4, "the third pull receives from the group of the first"
    assert not any(group == first for _, group in world.asked[num_asked:])
    assert end.counters()["communicators"] == 1
    end.close()
    assert all(group.aborted.is_set() for group in world.groups[1])


def test_a_check_may_use_the_line_that_the_pull_asks_on(world: World) -> None:
    """It renews leases there, whenever they are due."""

    def check() -> None:
        with world.line():
            pass

    end = world.receiver()
    assert [pull(end, check=check) for _ in range(2)] == [[1] * 4] * 2


def test_a_link_that_breaks_is_not_taken_for_a_lost_publisher_and_the_next_pull_has_a_new_group(world: World) -> None:
    """Of the publisher it tells nothing: a lost one would end the run, and this one answers."""
    end = world.receiver()
    assert pull(end) == [1] * 4
    world.groups[1][0].may_finish.clear()
    with pytest.raises(WeightSyncError, match=r"no progress within 0\.5 s") as failure:
        pull(end)
    assert type(failure.value) is WeightSyncError
    assert world.groups[1][0].aborted.is_set()
    assert pull(end) == [2] * 4


def test_memory_that_a_transfer_may_still_write_is_not_used_again(world: World) -> None:
    end = world.receiver()
    pull(end)
    world.groups[1][0].error = LinkBroken("did not abort")
    for message in ("did not abort", "still holds its memory; restart this process"):
        with pytest.raises(WeightSyncError, match=message):
            pull(end)


def test_a_failed_first_connection_lets_another_transport_be_tried(world: World) -> None:
    def build(rank: int) -> Group:
        raise LinkBroken("no such interface")

    world.build = build
    with pytest.raises(TransportUnusable, match="no such interface"):
        pull(world.receiver())


class SameDevice(CpuBackend):
    """Every process here computes on one and the same device."""

    collective = "cpu:gloo,cuda:nccl"

    def device_identity(self) -> str:
        return "GPU-7"


def test_a_device_is_not_connected_with_itself(world: World) -> None:
    arena = ArenaHandle(
        transport="nccl", handle=None, slot_bytes=8, slot_stride=4096, num_slots=1, host="127.0.0.1", device="GPU-7"
    )
    with pytest.raises(TransportUnusable, match="the learner and this worker share device GPU-7"):
        PairReceiver(SameDevice(), arena, world, host="127.0.0.1")


def test_a_gloo_group_is_aborted_from_another_thread_at_once() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        sender, receiver = pool.map(lambda rank: GlooGroup(store, rank=rank, timeout_s=20, host="127.0.0.1"), (0, 1))
    target = torch.zeros(4, dtype=torch.uint8)
    waiting = receiver.receive([target])
    assert not waiting.is_done(0.05)
    timer = threading.Timer(0.1, receiver.abort)
    timer.start()
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="gloo"):
        waiting.is_done(20)
    assert time.monotonic() - started < 15, "it waited for the group's own 20 s"
    timer.join()
    receiver.abort()
    with pytest.raises(LinkBroken):
        assert sender.send([torch.ones(4, dtype=torch.uint8)]).is_done(5)
        sender.receive([target]).is_done(5)
    sender.abort()
    assert not target.any()
    assert not any(thread.name == "gloo-transfer" for thread in threading.enumerate())


def test_a_peer_that_never_joins_shows_in_time() -> None:
    with pytest.raises(LinkBroken, match=r"gloo on 127\.0\.0\.1"):
        GlooGroup(dist.HashStore(), rank=0, timeout_s=0.3, host="127.0.0.1")


def test_answers_that_come_too_late_cost_nothing_and_pieces_are_reported_as_they_arrive() -> None:
    """The first answers with keys are lost on their way; the next ones have to bring those keys again."""
    offer = SlotExporter(("gloo",), CpuBackend(), slot_bytes=4000, num_slots=1, host="127.0.0.1")
    offer.slot(0).copy_((torch.arange(4000) % 251).to(torch.uint8))
    lost: list[PairMet] = []

    class LossyLine:
        def ask(self, request: Any, kind: type[Any], *, deadline_s: float, check: object = None) -> Any:
            while True:
                answer = offer.answer("r/0", request)
                if not isinstance(answer, PairMet) or not answer.entries or len(lost) == 3:
                    return answer
                lost.append(answer)  # and the line asks again

    end = PairReceiver(CpuBackend(), offer.handles[0], LossyLine(), host="127.0.0.1")
    target, arrived = torch.zeros(4000, dtype=torch.uint8), list[int]()
    pieces = [Piece(at, target[at : at + 5]) for at in range(0, 4000, 5)]
    end.pull(0, pieces, check=lambda: None, on_arrived=arrived.append)
    assert torch.equal(target, offer.slot(0))
    assert arrived == [256, 512, 768, 800]
    assert len(lost) == 3
    end.close()
    offer.close()
