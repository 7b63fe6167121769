"""Two-sided transports in one process: how pulls are cut, what the publisher refuses, and the vendors' groups."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.channel import MAX_REQUEST_BYTES
from weight_sync.device import collectives as process_groups
from weight_sync.device.collectives import HCCL_SWITCHES, GlooGroup, LinkBroken, hccl_group, nccl_group
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import TransportUnusable, VersionUnavailable
from weight_sync.messages import ArenaHandle, Envelope, PairDrop, PairMeet, PairSend, PairWatch
from weight_sync.transports import pair as messages
from weight_sync.transports import pair_sender as outbound
from weight_sync.transports.exporter import Offer
from weight_sync.transports.pair import PairReceiverEnd, StoreMirror, Timing, batches, cut, orders, own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 300 * 2**20), max_size=600), st.integers(1, 2**31))
def test_batches_hold_every_message_once_in_order_and_no_more_than_they_may(sizes: list[int], limit: int) -> None:
    found = list(batches(sizes, lambda size: size, limit_bytes=limit))
    assert [size for batch in found for size in batch] == sizes
    for batch in found:
        assert 0 < len(batch) <= messages.BATCH_MESSAGES
        assert sum(batch) <= limit or len(batch) == 1
    # No batch could have taken the next one's first message.
    for batch, following in itertools.pairwise(found):
        assert len(batch) == messages.BATCH_MESSAGES or sum(batch) + following[0] > limit


@given(st.integers(0, 2**40), st.integers(1, 2**30), st.integers(2**20, 2**27))
def test_a_piece_is_cut_without_gap_or_overlap(offset: int, nbytes: int, limit: int) -> None:
    found = list(cut(offset, nbytes, limit_bytes=limit))
    assert [start for start, _ in found] == [offset + limit * number for number in range(len(found))]
    assert all(size <= limit for _, size in found)
    assert sum(size for _, size in found) == nbytes


def test_the_largest_order_fits_into_a_control_frame() -> None:
    ranges = [(2**50 - number, messages.MESSAGE_BYTES - number) for number in range(messages.ORDER_MESSAGES + 7)]
    parts = list(orders(ranges))
    assert [len(part) for part in parts] == [messages.ORDER_MESSAGES, 7]
    request = PairSend(group=bytes(16), number=2**40, slot=2**20, ranges=tuple(parts[0]))
    frame = msgspec.msgpack.encode(Envelope(epoch=2**40, sender="s" * 200, request_id=2**50, request=request))
    assert len(frame) < MAX_REQUEST_BYTES


def test_stores_become_equal_however_many_answers_are_lost() -> None:
    left, right = StoreMirror(), StoreMirror()
    left.store.set("address", b"\x00\xff1")
    right.store.set("mine", b"2")
    assert left.own() == left.own() == {"address": b"\x00\xff1"}
    right.learn(left.own())
    assert right.own() == {"mine": b"2"}, "what was learned is not carried back"
    right.learn({"address": b"3", "mine": b"3"})
    left.learn(right.own())
    for mirror in (left, right):
        assert (mirror.store.get("address"), mirror.store.get("mine")) == (b"\x00\xff1", b"2")


def test_there_is_no_address_that_leads_to_nowhere() -> None:
    assert own_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(TransportUnusable, match=r"no route to the publisher at 'no\.such\.host\.invalid'"):
        own_address("no.such.host.invalid")


class Recorder:
    """A group that remembers what it was told to send."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.aborted = threading.Event()
        self.may_finish = threading.Event()
        self.may_finish.set()

    def send(self, tensors: Sequence[torch.Tensor]) -> Recorder:
        self.sent.extend(bytes(tensor.tolist()) for tensor in tensors)
        return self

    def wait(self, timeout_s: float) -> None:
        if not self.may_finish.wait(timeout_s) or self.aborted.is_set():
            raise LinkBroken("no progress")

    def abort(self) -> None:
        self.aborted.set()
        self.may_finish.set()


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> tuple[Offer, list[Recorder]]:
    groups: list[Recorder] = []

    def connect(*_: object) -> Recorder:
        groups.append(Recorder())
        return groups[-1]

    monkeypatch.setattr(outbound.Sender, "connect", connect)
    offer = Offer(("gloo",), CpuBackend(), slot_bytes=8, num_slots=2, host="127.0.0.1", timing=Timing(stall_s=0.5))
    offer.slot(1).copy_(torch.arange(8, dtype=torch.uint8))
    return offer, groups


def eventually(is_so: Callable[[], bool]) -> bool:
    give_up = time.monotonic() + 20
    while not is_so() and time.monotonic() < give_up:
        time.sleep(0.005)
    return is_so()


def num_sent(end: Offer, group: bytes) -> int:
    state = end.answer("a/0", PairWatch(group=group))
    assert state.error == ""
    return state.num_sent


def test_a_repeated_order_is_carried_out_once_and_a_missing_one_is_noticed(
    publisher: tuple[Offer, list[Recorder]],
) -> None:
    end, groups = publisher
    end.answer("a/0", PairMeet(group=b"g", entries={}))
    first = PairSend(group=b"g", number=0, slot=1, ranges=((6, 2), (0, 3)))
    for _ in range(3):
        end.answer("a/0", first)
    end.answer("a/0", PairSend(group=b"g", number=1, slot=1, ranges=((3, 1),)))
    with pytest.raises(ValueError, match="order 3 came before order 2"):
        end.answer("a/0", PairSend(group=b"g", number=3, slot=1, ranges=()))
    assert eventually(lambda: num_sent(end, b"g") == 2)
    assert groups[0].sent == [b"\x06\x07", b"\x00\x01\x02", b"\x03"]
    assert eventually(lambda: not any("weight-sync-to" in thread.name for thread in threading.enumerate()))
    end.close()
    assert groups[0].aborted.wait(5)


@pytest.mark.parametrize(
    ("slot", "ranges"), [(3, ()), (-1, ()), (0, ((0, 9),)), (0, ((8, 1),)), (0, ((-1, 2),)), (0, ((3, 0),))]
)
def test_bytes_outside_the_slots_are_never_sent(
    publisher: tuple[Offer, list[Recorder]], slot: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    end, groups = publisher
    end.answer("a/0", PairMeet(group=b"g", entries={}))
    with pytest.raises(ValueError, match=r"slot must be in|is not inside a slot of 8 bytes"):
        end.answer("a/0", PairSend(group=b"g", number=0, slot=slot, ranges=ranges))
    assert eventually(lambda: len(groups) == 1)
    assert groups[0].sent == []
    end.close()


def test_a_receiver_that_meets_again_leaves_its_old_group_and_nobody_elses(
    publisher: tuple[Offer, list[Recorder]],
) -> None:
    end, groups = publisher
    for number, (sender, group) in enumerate((("a/0", b"old"), ("b/0", b"other"), ("a/0", b"new")), start=1):
        end.answer(sender, PairMeet(group=group, entries={}))
        assert eventually(lambda number=number: end.counters()["communicators"] == len(groups) == number)
    old, other, new = groups
    assert old.aborted.wait(5)
    assert not other.aborted.is_set()
    assert not new.aborted.is_set()
    late = PairSend(group=b"old", number=0, slot=0, ranges=())
    for request in (PairWatch(group=b"old"), late, PairDrop(group=b"old")):
        with pytest.raises(VersionUnavailable, match="a group that is not its current one"):
            end.answer("a/0", request)
    with pytest.raises(VersionUnavailable):
        end.answer("b/0", PairWatch(group=b"new"))
    end.close()
    with pytest.raises(VersionUnavailable, match="this publisher closed"):
        end.answer("c/0", PairMeet(group=b"late", entries={}))


def test_a_send_that_stalls_drops_the_group_and_says_so(
    publisher: tuple[Offer, list[Recorder]],
) -> None:
    end, groups = publisher
    end.answer("a/0", PairMeet(group=b"g", entries={}))
    assert eventually(lambda: len(groups) == 1)
    groups[0].may_finish.clear()
    end.answer("a/0", PairSend(group=b"g", number=0, slot=1, ranges=((0, 8),)))
    assert groups[0].aborted.wait(5)
    assert eventually(lambda: "no progress" in end.answer("a/0", PairWatch(group=b"g")).error)
    assert eventually(lambda: not any("weight-sync-to" in thread.name for thread in threading.enumerate()))
    end.close()


class SameDevice(CpuBackend):
    """Every process here computes on one and the same device."""

    collective = "cpu:gloo,cuda:nccl"

    def device_identity(self) -> str:
        return "GPU-7"


def test_a_device_is_not_connected_with_itself() -> None:
    handle = ArenaHandle(
        transport="nccl", handle=None, slot_bytes=8, slot_stride=4096, num_slots=1, host="127.0.0.1", device="GPU-7"
    )
    with pytest.raises(TransportUnusable, match="learner 3 and this worker share device GPU-7"):
        PairReceiverEnd(SameDevice(), {3: handle}, {})


def both(build: Callable[[int], Any]) -> tuple[Any, Any]:
    """Both members of a group, built side by side."""
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda rank=rank: found.update({rank: build(rank)})) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found[0], found[1]


class Work:
    """What a collective library gives back: completes by itself, and `wait` only raises what went wrong."""

    def __init__(self, transfer: process_groups.GlooTransfer) -> None:
        self._error = ""
        self._thread = threading.Thread(target=self._run, args=(transfer,), daemon=True)
        self._thread.start()

    def _run(self, transfer: process_groups.GlooTransfer) -> None:
        try:
            transfer.wait(60)
        except LinkBroken as error:
            self._error = str(error)

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)


class FakeLibrary:
    """torch_npu's ProcessGroupHCCL on host memory: same constructor, same `abort_hccl_comm`; gloo moves the bytes."""

    class Options:
        _timeout: Any = None
        hccl_config: Any = None

    seen: tuple[tuple[str | None, ...], ...] = ()

    def __init__(self, store: Any, rank: int, size: int, options: FakeLibrary.Options) -> None:
        names = ("HCCL_BLOCKING_WAIT", "TORCH_HCCL_BLOCKING_WAIT", "HCCL_ASYNC_ERROR_HANDLING")
        FakeLibrary.seen = (*FakeLibrary.seen, tuple(os.environ.get(name) for name in names))
        assert options.hccl_config == {"hccl_buffer_size": 16}, "MiB, twice per group"
        timeout_s = options._timeout.total_seconds()
        self._connect = lambda: GlooGroup(store, rank=rank, timeout_s=timeout_s, host="127.0.0.1")
        self._connected: GlooGroup | None = None

    def _group(self) -> GlooGroup:
        """The library connects with the first message, not when it is built."""
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return Work(self._group().send(tensors))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
        return Work(self._group().receive(tensors))

    def abort_hccl_comm(self, reason: str) -> None:
        assert "peer" in reason
        self._group().abort()


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torch_npu._C._distributed_c10d")
    module.ProcessGroupHCCL = FakeLibrary
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(FakeLibrary, "seen", ())


@pytest.mark.usefixtures("torch_npu")
def test_the_npu_group_moves_bytes_and_sets_its_environment_for_the_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for switch in HCCL_SWITCHES:
        monkeypatch.setenv(switch.name, switch.value)
    store = dist.HashStore()
    sender, receiver = both(lambda rank: hccl_group(store, rank=rank, timeout_s=20, device=CPU))
    assert FakeLibrary.seen == (("1", "1", "0"),) * 2
    assert {switch.name: os.environ[switch.name] for switch in HCCL_SWITCHES} == {
        s.name: s.value for s in HCCL_SWITCHES
    }
    target = [torch.zeros(5, dtype=torch.uint8) for _ in range(3)]
    arriving = receiver.receive(target)
    sender.send([torch.full((5,), number, dtype=torch.uint8) for number in (1, 2, 3)]).wait(10)
    arriving.wait(10)
    assert [tensor.tolist() for tensor in target] == [[1] * 5, [2] * 5, [3] * 5]
    waiting = receiver.receive(target)
    receiver.abort()
    receiver.abort()
    with pytest.raises(LinkBroken, match="the group was aborted"):
        waiting.wait(10)
    with pytest.raises(LinkBroken, match="the group was aborted"):
        receiver.receive(target)
    with pytest.raises(LinkBroken, match=r"gloo|hccl"):
        sender.receive([torch.zeros(1, dtype=torch.uint8)]).wait(10)
    sender.abort()


@pytest.mark.usefixtures("torch_npu")
def test_a_device_transfer_without_progress_is_given_up_in_time() -> None:
    store = dist.HashStore()
    sender, receiver = both(lambda rank: hccl_group(store, rank=rank, timeout_s=20, device=CPU))
    started = time.monotonic()
    with pytest.raises(LinkBroken, match=r"no progress within 0\.2 s"):
        receiver.receive([torch.zeros(5, dtype=torch.uint8)]).wait(0.2)
    assert time.monotonic() - started < 15, "it waited for the group's own 20 s"
    receiver.abort()
    sender.abort()


def test_a_torch_without_the_library_says_what_to_use_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(process_groups.DeviceError, match="built without NCCL; use ipc, shm or gloo"):
        nccl_group(dist.HashStore(), rank=0, timeout_s=1, device=CPU)


def test_a_gloo_group_is_aborted_from_another_thread_at_once() -> None:
    store = dist.HashStore()
    sender, receiver = both(lambda rank: GlooGroup(store, rank=rank, timeout_s=20, host="127.0.0.1"))
    target = torch.zeros(4, dtype=torch.uint8)
    waiting = receiver.receive([target])
    timer = threading.Timer(0.1, receiver.abort)
    timer.start()
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="gloo"):
        waiting.wait(20)
    assert time.monotonic() - started < 15, "it waited for the group's own 20 s"
    timer.join()
    with pytest.raises(LinkBroken):
        sender.send([torch.ones(4, dtype=torch.uint8)]).wait(5)
        sender.receive([target]).wait(5)
    assert not target.any()


def test_a_peer_that_never_joins_shows_in_time() -> None:
    with pytest.raises(LinkBroken, match=r"gloo on 127\.0\.0\.1"):
        GlooGroup(dist.HashStore(), rank=0, timeout_s=0.3, host="127.0.0.1")
