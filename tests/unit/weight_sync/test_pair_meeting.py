"""Groups that are being built while something else happens: a pull that is stopped, or another group beside it."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
import types
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import zmq

from weight_sync.channel import ControlClient, ControlServer, make_run_keys
from weight_sync.device.collectives import CollectiveGroup, GlooGroup, LinkBroken, hccl_group, nccl_group
from weight_sync.device.cpu import CpuBackend
from weight_sync.device.select import build
from weight_sync.errors import PublisherLost, WeightSyncError
from weight_sync.messages import ArenaHandle, PairMeet, PairMet, PairSend, PairState
from weight_sync.transports import pair as inbound
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import Offer
from weight_sync.transports.pair import Inbound, Landing, PairReceiverEnd, StoreMirror, Timing

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
ARENA = ArenaHandle(transport="gloo", handle=None, slot_bytes=4, slot_stride=4096, num_slots=1, host="127.0.0.1")


class Stopped(Exception):
    pass


class NumberedGroup:
    """What arrives through it is its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_aborted = False

    def receive(self, tensors: list[torch.Tensor]) -> NumberedGroup:
        for tensor in tensors:
            tensor.fill_(self.number)
        return self

    def wait(self, timeout_s: float) -> None:
        assert not self.is_aborted, "a group that was aborted is of no use"

    def abort(self) -> None:
        self.is_aborted = True


class SlowLine:
    """A publisher that agrees to everything, but answers the `PairMeet` that ends the first meeting when told to."""

    def __init__(self) -> None:
        self.groups: list[NumberedGroup] = []
        self.meets: list[bytes] = []
        self.orders: list[tuple[bytes, int]] = []
        self.log: list[tuple[str, int]] = []
        self.is_held, self.may_answer = threading.Event(), threading.Event()

    def connect(self, mirror: StoreMirror) -> Any:
        self.groups.append(NumberedGroup(len(self.groups) + 1))
        return self.groups[-1]

    def ask(self, request: Any, kind: type[Any], *, deadline_s: float) -> Any:
        if isinstance(request, PairMeet):
            if request.group not in self.meets:
                self.meets.append(request.group)
            number = self.meets.index(request.group)
            self.log.append(("asked", number))
            if number == 0:
                self.is_held.set()
                assert self.may_answer.wait(10)
            self.log.append(("answered", number))
            return PairMet(entries={}, error="")
        if isinstance(request, PairSend):
            self.orders.append((request.group, request.number))
        return PairState(num_sent=0, error="")


@pytest.fixture
def line() -> SlowLine:
    return SlowLine()


def receiver(line: SlowLine) -> Inbound:
    return Inbound(ARENA, line, Landing(CpuBackend(), staged=False), connect=line.connect, timing=Timing())


def pull(end: Inbound) -> list[int]:
    landing = torch.zeros(4, dtype=torch.uint8)
    end.pull(0, [Piece(0, landing)], check=lambda: None)
    return landing.tolist()


def stop_while_meeting(end: Inbound, line: SlowLine, *, then: Callable[[], None] = lambda: None) -> threading.Thread:
    """A first pull that is stopped when its group is built on this side; calls `then` right before. Returns its
    thread."""

    def check() -> None:
        if line.is_held.is_set():
            then()
            raise Stopped

    before = set(threading.enumerate())
    found: list[threading.Thread] = []

    def notice() -> None:
        assert line.is_held.wait(10)
        found.extend(t for t in threading.enumerate() if t not in before and t.name == "weight-sync-pull")

    noticing = threading.Thread(target=notice)
    noticing.start()
    with pytest.raises(Stopped):
        end.pull(0, [Piece(0, torch.zeros(4, dtype=torch.uint8))], check=check)
    noticing.join(10)
    (thread,) = found
    return thread


def test_a_stopped_pull_that_meets_late_leaves_the_group_of_the_next_one_alone(
    line: SlowLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbound, "LEAVE_S", 0.02)  # its thread lives on, into the next pulls
    end = receiver(line)
    late = stop_while_meeting(end, line)
    assert pull(end) == [2] * 4
    line.may_answer.set()
    late.join(10)
    assert not late.is_alive()
    assert pull(end) == [2] * 4, "the third pull receives from the group of the first"
    assert [group.is_aborted for group in line.groups] == [True, False], "the late group stays open"
    assert line.orders == [(line.meets[1], 0), (line.meets[1], 1)]
    end.close()
    assert line.groups[1].is_aborted


def test_a_stopped_pull_says_no_more_to_the_publisher_once_the_next_one_begins(line: SlowLine) -> None:
    """Its late question, under its old group, would make the publisher drop the new one."""
    end = receiver(line)
    release = threading.Timer(1.0, line.may_answer.set)
    stop_while_meeting(end, line, then=release.start)
    assert pull(end) == [2] * 4
    release.join()
    of_first = [index for index, (_, number) in enumerate(line.log) if number == 0]
    of_second = [index for index, (_, number) in enumerate(line.log) if number == 1]
    assert of_first[-1] < of_second[0], line.log
    end.close()


def test_a_tensor_on_another_device_is_refused_and_not_lost() -> None:
    """The library would build a communicator for that device, which the other side never joins."""

    class Library:
        def send(self, tensors: Any, peer: int, tag: int) -> None:
            raise AssertionError("it was handed to the library")

        recv = send

    group = CollectiveGroup(Library, lambda _: None, name="nccl", rank=1, grouped=False, device=CPU)
    stray = torch.zeros(2, dtype=torch.uint8, device="meta")
    for operation in (group.send, group.receive):
        with pytest.raises(ValueError, match="nccl of cpu cannot move a tensor on meta"):
            operation([stray])


def test_an_answer_that_comes_too_late_costs_the_rendezvous_nothing() -> None:
    """The first answers with keys are lost on their way; the next ones have to bring those keys again."""
    offer = Offer(("gloo",), CpuBackend(), slot_bytes=4, num_slots=1, host="127.0.0.1", timing=Timing(connect_s=20))
    offer.slot(0).copy_(torch.arange(4, dtype=torch.uint8))
    lost: list[PairMet] = []

    class LossyLine:
        def ask(self, request: Any, kind: type[Any], *, deadline_s: float) -> Any:
            answer = offer.answer("r/0", request)
            if isinstance(answer, PairMet) and answer.entries and len(lost) < 3:
                lost.append(answer)
                raise PublisherLost("too late")
            return answer

    end = PairReceiverEnd(CpuBackend(), {0: offer.handles[0]}, {0: LossyLine()})
    try:
        landing = torch.zeros(4, dtype=torch.uint8)
        end.pull(0, 0, [Piece(0, landing)], check=lambda: None)
        assert landing.tolist() == [0, 1, 2, 3]
        assert len(lost) == 3
    finally:
        end.close()
        offer.close()


def test_a_link_that_breaks_is_not_taken_for_a_lost_publisher(line: SlowLine) -> None:
    """Of the publisher it tells nothing: a lost one would end the run, and this one answers."""
    line.may_answer.set()
    end = receiver(line)
    assert pull(end) == [1] * 4

    def broken(tensors: list[torch.Tensor]) -> None:
        raise LinkBroken("out of memory")

    line.groups[0].receive = broken
    with pytest.raises(WeightSyncError, match="out of memory") as failure:
        pull(end)
    assert type(failure.value) is WeightSyncError
    assert pull(end) == [2] * 4


def dawdle(monkeypatch: pytest.MonkeyPatch, owner: type[Any], name: str, chance: random.Random) -> None:
    """Before and after `owner.name`, wait for up to 5 ms."""
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(chance.uniform(0, 0.005))
        try:
            return original(*args, **kwargs)
        finally:
            time.sleep(chance.uniform(0, 0.005))

    monkeypatch.setattr(owner, name, slow)


def side_by_side(*calls: Callable[[], None], within_s: float = 20.0) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    give_up = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a group waits for ever"
    if errors:
        raise errors[0]


def test_two_receivers_in_one_process_connect_and_pull_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times, with pauses at every point where two rendezvous could get mixed up."""
    chance = random.Random(0)
    for owner, name in ((GlooGroup, "__init__"), (StoreMirror, "own"), (StoreMirror, "learn"), (ControlClient, "ask")):
        dawdle(monkeypatch, owner, name, chance)
    keys = make_run_keys("r")
    offer = Offer(("gloo",), CpuBackend(), slot_bytes=4096, num_slots=2, host="127.0.0.1")
    for slot in range(2):
        offer.slot(slot).copy_(torch.arange(4096).mul(slot + 3).remainder(251).to(torch.uint8))
    server = ControlServer(offer.answer, keys, epoch=1)
    context = zmq.Context()

    def receive(number: int) -> None:
        client = ControlClient(context, server.address, keys, epoch=1, sender=f"r{number}/0")
        end = PairReceiverEnd(CpuBackend(), {4: offer.handles[0]}, {4: client})
        try:
            for slot in (number, 1 - number):
                landing = torch.zeros(4096, dtype=torch.uint8)
                end.pull(4, slot, [Piece(at, landing[at : at + 512]) for at in range(0, 4096, 512)], check=lambda: None)
                assert torch.equal(landing, offer.slot(slot)), f"receiver {number} got other bytes than slot {slot}"
        finally:
            end.close()
            client.close()

    try:
        for _ in range(20):
            side_by_side(lambda: receive(0), lambda: receive(1))
        assert offer.counters()["communicators"] == 40
    finally:
        server.close()
        offer.close()
        context.term()


class Library:
    """A vendor's group that looks at its environment when it is built, as the real ones do."""

    class Options:
        _timeout: Any = None

    variable = "HCCL_BLOCKING_WAIT"
    seen: ClassVar[list[str | None]] = []

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        before = os.environ.get(self.variable)
        time.sleep(0.002)
        Library.seen.extend((before, os.environ.get(self.variable)))
        self._store, self._rank = store, rank

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Library:
        self._store.set("message", bytes(tensors[0].tolist()))
        return self

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Library:
        tensors[0].copy_(torch.tensor(list(self._store.get("message")), dtype=torch.uint8))
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None: ...


class CoalescedLibrary(Library):
    """As torch's ProcessGroupNCCL, which returns the work of a batch when coalescing ends."""

    variable = "TORCH_NCCL_BLOCKING_WAIT"

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Library:
        return self


@pytest.fixture(params=["cuda", "rocm", "npu"])
def build_group(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """What builds this vendor's groups, of a fake library; in a process that was started with its environment."""
    module: Any = types.ModuleType("torch_npu._C._distributed_c10d")
    module.ProcessGroupHCCL = Library
    for name in ("torch_npu", "torch_npu._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", CoalescedLibrary, raising=False)
    monkeypatch.setattr(Library, "seen", [])
    for variable in build(request.param).process_env("learner"):
        monkeypatch.setenv(variable.name, variable.value)
    return hccl_group if request.param == "npu" else nccl_group


def test_groups_built_at_once_each_find_their_environment_and_leave_none_behind(
    build_group: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, put_env = dict(os.environ), os.putenv

    def put_known(name: bytes, value: bytes) -> None:
        """A name that comes or goes moves the table that C code of other threads reads."""
        assert os.fsdecode(name) in before
        put_env(name, value)

    def refuse(name: bytes) -> None:
        raise AssertionError(f"{name!r} was removed")

    monkeypatch.setattr(os, "putenv", put_known)
    monkeypatch.setattr(os, "unsetenv", refuse)
    for _ in range(5):
        stores = [dist.HashStore() for _ in range(2)]
        side_by_side(
            *(
                lambda store=store, rank=rank: build_group(store, rank=rank, timeout_s=5.0, device=CPU) and None
                for store in stores
                for rank in (0, 1)
            )
        )
    assert set(Library.seen) == {"1"}
    assert len(Library.seen) == 40
    assert dict(os.environ) == before
