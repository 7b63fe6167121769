"""Pairs on the vendors' collective libraries: fakes, which refuse what the real ones refuse."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from tests.fakes.drivers.build import make_backend
from weight_sync.device import collectives
from weight_sync.device.collectives import Hccl, LinkBroken
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.device.conftest import Harness
    from weight_sync.device.collectives import DevicePair


class Both:
    """A vendor's fake library, and pairs whose ends are this process's devices 0 and 1."""

    def __init__(self, harness: Harness) -> None:
        assert harness.library is not None
        self.name, self.counter = harness.name, harness.counter
        self.library = ctypes.CDLL(harness.library)
        self.library.fake_num_misuses.restype = ctypes.c_long
        self._path = harness.library
        self._pairs: list[DevicePair] = []

    def build(self, store: Any, rank: int, *, device: int | None = None, timeout_s: float = 20.0) -> DevicePair:
        backend = make_backend(self.name, self._path)
        backend.set_device(rank if device is None else device)
        pair: Any = backend.connect_pair(store, rank=rank, timeout_s=timeout_s)
        self._pairs.append(pair)
        return pair

    def connect(self) -> tuple[DevicePair, DevicePair]:
        """(sender, receiver)."""
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            sender, receiver = pool.map(lambda rank: self.build(store, rank), (0, 1))
        return sender, receiver

    def close(self) -> None:
        self.library.fake_set_abort_ms(0)
        for pair in self._pairs:
            pair.abort()
        assert self.counter("events") == 0
        assert self.library.fake_num_misuses() == 0


@pytest.fixture
def both(accelerator: Harness) -> Iterator[Both]:
    both = Both(accelerator)
    yield both
    both.close()


def of(*values: int, size: int = 5) -> list[torch.Tensor]:
    return [torch.full((size,), value, dtype=torch.uint8) for value in values]


def test_messages_arrive_in_order_and_whole(both: Both) -> None:
    sender, receiver = both.connect()
    for seed in (1, 10):
        target = [*of(0, 0, 0), torch.zeros(3_000_001, dtype=torch.uint8)]
        large = (torch.arange(3_000_001) * seed % 251).to(torch.uint8)
        arriving = receiver.receive(target)
        assert sender.send([*of(seed, seed + 1, seed + 2), large]).is_done(20)
        assert arriving.is_done(20)
        assert [tensor[0].item() for tensor in target[:3]] == [seed, seed + 1, seed + 2]
        assert torch.equal(target[3], large)


def test_batches_under_way_are_told_apart(both: Both) -> None:
    sender, receiver = both.connect()
    first, second = of(0), of(0)
    arriving = [receiver.receive(first), receiver.receive(second)]
    assert sender.send(of(1)).is_done(20)
    assert arriving[0].is_done(20)
    assert first[0].tolist() == [1] * 5
    assert not arriving[1].is_done(0.05)
    assert sender.send(of(2)).is_done(20)
    assert arriving[1].is_done(20)
    assert second[0].tolist() == [2] * 5


def test_an_abort_that_hangs_stops_no_other_thread_and_leaves_memory_alone(both: Both) -> None:
    sender, receiver = both.connect()
    target = of(0)
    waiting = receiver.receive(target)
    both.library.fake_set_abort_ms(200)
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.monotonic()
    receiver.abort()
    took_s = time.monotonic() - started
    stop.set()
    ticking.join()
    assert took_s >= 0.2
    assert len([at for at in ticks if started < at < started + 0.2]) >= 10, "the interpreter lock was held"
    receiver.abort()
    with pytest.raises(LinkBroken, match="the group was aborted"):
        waiting.is_done(20)
    with pytest.raises(LinkBroken, match="the group was aborted"):
        receiver.receive(target)
    with pytest.raises(LinkBroken, match="remote"):
        sender.receive(of(0)).is_done(20)
    assert not target[0].any()


def test_an_abort_wakes_a_transfer_that_waits(both: Both) -> None:
    _, receiver = both.connect()
    waiting = receiver.receive(of(0))
    timer = threading.Timer(0.1, receiver.abort)
    timer.start()
    with pytest.raises(LinkBroken, match="the group was aborted"):
        waiting.is_done(20)
    timer.join()


def test_an_abort_that_does_not_return_is_reported_in_time(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, _ = both.connect()
    monkeypatch.setattr(collectives, "ABORT_S", 0.1)
    both.library.fake_set_abort_ms(500)
    with pytest.raises(LinkBroken, match="restart this process"):
        sender.abort()
    monkeypatch.undo()


def test_messages_of_other_sizes_break_the_link(both: Both) -> None:
    sender, receiver = both.connect()
    waiting = receiver.receive(of(0, size=6))
    with pytest.raises(LinkBroken):
        sender.send(of(1, size=5)).is_done(20)
        waiting.is_done(20)


def refused(both: Both, build: Callable[[], object]) -> str:
    with pytest.raises(LinkBroken) as failure:
        build()
    return str(failure.value)


def test_a_peer_that_cannot_join_is_reported(both: Both) -> None:
    stranger = dist.HashStore()
    stranger.set("root", b"?" * 128)  # type: ignore[arg-type]
    assert "failed" in refused(both, lambda: both.build(stranger, 1))
    silent = dist.HashStore()
    started = time.monotonic()
    assert "did not join within 0.2 s" in refused(both, lambda: both.build(silent, 1, timeout_s=0.2))
    if both.name != "npu":  # HCCL waits in its own call, for HCCL_CONNECT_TIMEOUT
        assert "did not join within 0.2 s" in refused(both, lambda: both.build(silent, 0, timeout_s=0.2))
    assert time.monotonic() - started < 10


def test_two_ends_on_one_device_are_refused(both: Both) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        builds = [pool.submit(both.build, store, rank, device=0) for rank in (0, 1)]
        assert all(isinstance(build.exception(20), LinkBroken) for build in builds)


def test_a_tensor_that_the_library_would_misread_is_refused(both: Both) -> None:
    sender, receiver = both.connect()
    bad = (torch.zeros(2, dtype=torch.uint8, device="meta"), torch.zeros(2), torch.zeros(4, dtype=torch.uint8)[::2])
    for tensor in bad:
        for operation in (sender.send, receiver.receive):
            with pytest.raises(ValueError, match="moves contiguous bytes on that device"):
                operation([tensor])


def test_hccl_has_small_buffers_and_says_when_they_do_not_fit(both: Both) -> None:
    if both.name != "npu":
        pytest.skip("HCCL's buffers")
    both.library.fake_set_total(ctypes.c_size_t((4 << 30) + (16 << 20)))
    pairs = [both.connect() for _ in range(64)]
    assert both.counter("used") == 64 * 2 * Hccl.PAIR_BYTES == 4 << 30, "two ends in this process"
    with pytest.raises(LinkBroken, match="HcclCommInitRootInfoConfig failed with 3"):
        both.build(dist.HashStore(), 0)
    for end in (end for pair in pairs for end in pair):
        end.abort()
    assert both.counter("used") == 0


def test_a_library_without_the_calls_says_what_to_use_instead(every: Harness) -> None:
    if every.is_cpu:
        return
    with pytest.raises(DeviceError, match=r"has no (nccl|Hccl).*use ipc, shm or gloo"):
        type(make_backend(every.name, every.library)._collectives)(ctypes.CDLL(None)).new_root()  # type: ignore[attr-defined]
