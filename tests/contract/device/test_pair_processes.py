"""Pairs of two processes that die, stop or give up: on a fake NCCL here, on the real one where there are two devices.

On such a machine, where a process takes 15 s to start:

    pytest -q -s -m gpu tests/contract/device/test_pair_processes.py tests/contract/transports
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.fakes.drivers.build import compile_fakes, compiler, make_backend
from tests.fakes.drivers.peer import pattern
from tests.fakes.processes import Child
from weight_sync.device.collectives import LinkBroken, Nccl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weight_sync.device.base import Backend
    from weight_sync.device.collectives import DevicePair, Transfer


class Kind(NamedTuple):
    library: str | None
    """Fake library; None for the real thing."""
    message_bytes: int


class End:
    """One end of a pair, in its own process."""

    def __init__(self, kind: Kind, rank: int) -> None:
        self._kind, self._rank = kind, rank
        self._backend: Backend = make_backend("cuda", kind.library)
        self._backend.set_device(rank if kind.library is not None else 0)
        self._device = "cpu" if kind.library is not None else "cuda"
        if kind.library is not None:
            ctypes.CDLL(kind.library).fake_set_abort_ms(500)  # else nobody could tell whether it holds the lock
        self._pair: DevicePair | None = None
        self._target = self._empty(1)
        self._waiting: Transfer
        self._num_ticks = 0
        threading.Thread(target=self._tick, daemon=True).start()

    def connect(self, path: str, timeout_s: float = 60.0, max_ctas: int = Nccl.MAX_CTAS) -> tuple[float, int]:
        """(seconds, bytes of the device that it takes)."""
        if self._pair is not None:
            self._pair.abort()
        Nccl.MAX_CTAS = max_ctas
        free, started = self._backend.memory_info()[0], time.monotonic()
        store = dist.FileStore(path, 2)
        self._pair = self._backend.connect_pair(store, rank=self._rank, timeout_s=timeout_s)  # type: ignore[assignment]
        return time.monotonic() - started, free - self._backend.memory_info()[0]

    def send(self, seed: int, num: int, repeats: int = 1) -> None:
        messages = [pattern(self._kind.message_bytes, seed + i).to(self._device) for i in range(num)]
        self._backend.synchronize()
        for _ in range(repeats):
            assert self._own().send(messages).is_done(30.0)

    def receive(self, seed: int, num: int, repeats: int = 1) -> tuple[int, float]:
        """(messages that differ, seconds of the last time)."""
        targets = [self._empty(self._kind.message_bytes) for _ in range(num)]
        self._backend.synchronize()
        started = 0.0
        for _ in range(repeats):
            started = time.monotonic()
            assert self._own().receive(targets).is_done(30.0)
        spent_s = time.monotonic() - started
        expected = (pattern(self._kind.message_bytes, seed + i) for i in range(num))
        return sum(not torch.equal(a.cpu(), b) for a, b in zip(targets, expected, strict=True)), spent_s

    def begin_to_receive(self) -> None:
        self._target = self._empty(self._kind.message_bytes)
        self._backend.synchronize()
        self._waiting = self._own().receive([self._target])

    def finish(self, timeout_s: float) -> bool:
        return self._waiting.is_done(timeout_s)

    def abort(self) -> tuple[float, int]:
        """(seconds, turns of another thread meanwhile). What was to be received is left alone from then on."""
        started, before = time.monotonic(), self._num_ticks
        self._own().abort()
        spent_s, num_ticks = time.monotonic() - started, self._num_ticks - before
        left = self._target.clone()
        self._target.fill_(7)
        time.sleep(0.3)
        assert bool((self._target == 7).all()), "it was written after the abort"
        assert not left.any()
        return spent_s, num_ticks

    def use_torchs_own(self, path: str) -> float:
        """torch's collectives, in a process that has pairs of ours."""
        dist.init_process_group("nccl", store=dist.FileStore(path, 1), rank=0, world_size=1)
        value = torch.ones(4, device="cuda")
        dist.all_reduce(value)
        return float(value.sum())

    def close(self) -> None:
        """Its process ends: at once, since a library whose peer is lost may hold up an orderly exit."""
        os._exit(0)

    def _own(self) -> DevicePair:
        assert self._pair is not None
        return self._pair

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def _tick(self) -> None:
        while True:
            time.sleep(0.002)
            self._num_ticks += 1


class World:
    """Ends on two devices, and whole pairs of them."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind, self._directory, self._num_stores = kind, directory, 0
        self.children: list[Child] = []
        self.sender, self.receiver = self.start(0), self.start(1)

    @property
    def is_real(self) -> bool:
        return self.kind.library is None

    def start(self, rank: int) -> Child:
        if self.is_real:
            every = ",".join(map(str, range(torch.cuda.device_count())))
            own = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[rank]
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": own, "NCCL_NVLS_ENABLE": "0"}):
                child = Child(f"rank{rank}", End, self.kind, rank, context=multiprocessing.get_context("spawn"))
        else:
            child = Child(f"rank{rank}", End, self.kind, rank, preload=("tests.contract.device.test_pair_processes",))
        self.children.append(child)
        return child

    def store(self) -> str:
        self._num_stores += 1
        return str(self._directory / f"store{self._num_stores}")

    def connect(self, sender: Child, receiver: Child, **settings: int) -> tuple[float, int]:
        args = (self.store(), 60.0, *settings.values())
        sender.tell("connect", *args)
        receiver.ask("connect", *args, timeout_s=90)
        return sender.told(90)

    def move(self, sender: Child, receiver: Child, seed: int, num: int = 3, repeats: int = 1) -> float:
        """Bytes per second of the last time."""
        sender.tell("send", seed, num, repeats)
        wrong, spent_s = receiver.ask("receive", seed, num, repeats, timeout_s=90)
        sender.told(90)
        assert wrong == 0
        return num * self.kind.message_bytes / spent_s

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.close()


@pytest.fixture(
    scope="module",
    params=[
        "fake",
        pytest.param(
            "real",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a pair needs two CUDA devices"),
            ],
        ),
    ],
)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("pairs")
    if request.param == "real":
        kind = Kind(None, 64 << 20)
    elif compiler() is None:
        pytest.skip("no C compiler `cc` to build the fake libraries with")
    else:
        kind = Kind(compile_fakes(directory)["cuda"], 100_003)
    world = World(kind, directory)
    yield world
    world.close()


def test_bytes_arrive_beside_torchs_own_communicators(world: World) -> None:
    connect_s, nbytes = world.connect(world.sender, world.receiver)
    rate = world.move(world.sender, world.receiver, 1, num=8, repeats=3)
    print(f"\nconnect {connect_s:.2f} s, {nbytes / 2**20:.0f} MiB of the device, {rate / 1e9:.1f} GB/s")
    if world.is_real:
        for child in (world.sender, world.receiver):
            assert child.ask("use_torchs_own", world.store(), timeout_s=90) == 4.0
        for max_ctas in (2, 4, 8):
            connect_s, nbytes = world.connect(world.sender, world.receiver, max_ctas=max_ctas)
            rate = world.move(world.sender, world.receiver, 1, num=8, repeats=5)
            print(f"max_ctas {max_ctas}: connect {connect_s:.2f} s, {nbytes / 2**20:.0f} MiB, {rate / 1e9:.1f} GB/s")
    world.move(world.sender, world.receiver, 50)


def test_an_aborted_receive_ends_at_once_and_a_new_pair_works(world: World) -> None:
    world.connect(world.sender, world.receiver)
    world.move(world.sender, world.receiver, 3)
    world.receiver.ask("begin_to_receive", timeout_s=60)
    assert not world.receiver.ask("finish", 0.3, timeout_s=60)
    spent_s, num_ticks = world.receiver.ask("abort", timeout_s=60)
    print(f"\nabort took {spent_s:.3f} s, {num_ticks} turns of another thread")
    assert spent_s < 5
    assert num_ticks >= int(spent_s / 0.1), "the interpreter lock was held"
    assert world.is_real or spent_s >= 0.5
    with pytest.raises(LinkBroken, match="the group was aborted"):
        world.receiver.ask("finish", 1.0, timeout_s=60)
    world.sender.ask("abort", timeout_s=60)
    world.connect(world.sender, world.receiver)
    world.move(world.sender, world.receiver, 4)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_lost_in_mid_transfer_can_be_left(world: World, blow: signal.Signals) -> None:
    victim = world.start(0)
    world.connect(victim, world.receiver)
    world.move(victim, world.receiver, 5)
    world.receiver.ask("begin_to_receive", timeout_s=60)
    victim.signal(blow)
    started = time.monotonic()
    try:
        assert not world.receiver.ask(
            "finish", 2.0, timeout_s=60
        )  # a kernel that waits for flags in the memory of the dead
    except LinkBroken as error:
        print(f"\n{error}")
    noticed_s = time.monotonic() - started
    spent_s, _ = world.receiver.ask("abort", timeout_s=60)
    print(f"\n{blow.name}: noticed after {noticed_s:.2f} s, abort took {spent_s:.3f} s")
    assert spent_s < 5
    world.connect(world.sender, world.receiver)
    world.move(world.sender, world.receiver, 6)
    victim.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_joins_is_given_up_in_time(world: World, rank: int) -> None:
    lonely = (world.sender, world.receiver)[rank]
    with pytest.raises(LinkBroken, match=r"did not join within 1\.0 s"):
        lonely.ask("connect", world.store(), 1.0, timeout_s=60)
    world.connect(world.sender, world.receiver)
    world.move(world.sender, world.receiver, 7)
