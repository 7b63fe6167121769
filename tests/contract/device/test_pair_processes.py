"""Pairs of two processes on the real NCCL, where there are two devices.

Fakes of all vendors: test_collectives.py. Peers that die or stop in mid-transfer: tests/contract/transports.

    pytest -q -s -m gpu tests/contract/device/test_pair_processes.py tests/contract/transports
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from typing import TYPE_CHECKING
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.fakes.drivers.peer import pattern
from tests.fakes.processes import Child
from weight_sync.device.collectives import LinkBroken
from weight_sync.device.cuda import CudaBackend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from weight_sync.device.collectives import DevicePair, Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a pair needs two CUDA devices"),
]
NBYTES = 64 << 20


class End:
    """One end of a pair, in its own process, which sees one device."""

    def __init__(self, rank: int) -> None:
        self._rank, self._backend, self._num_ticks = rank, CudaBackend(), 0
        self._backend.set_device(0)
        self._target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        self._waiting: Transfer
        self._pair: DevicePair
        threading.Thread(target=self._tick, daemon=True).start()

    def connect(self, path: str, timeout_s: float = 60.0) -> None:
        self._pair = self._backend.connect_pair(dist.FileStore(path, 2), rank=self._rank, timeout_s=timeout_s)  # type: ignore[assignment]

    def send(self, seed: int) -> None:
        message = pattern(NBYTES, seed).cuda()
        self._backend.synchronize()
        assert self._pair.send([message]).is_done(30.0)

    def receive(self, seed: int) -> bool:
        self.begin_to_receive()
        assert self._waiting.is_done(30.0)
        return torch.equal(self._target.cpu(), pattern(NBYTES, seed))

    def begin_to_receive(self) -> None:
        self._target.zero_()
        self._backend.synchronize()
        self._waiting = self._pair.receive([self._target])

    def finish(self, timeout_s: float) -> bool:
        return self._waiting.is_done(timeout_s)

    def abort(self) -> tuple[float, int]:
        """(seconds, turns of another thread meanwhile). What was to be received is left alone from then on."""
        started, before = time.monotonic(), self._num_ticks
        self._pair.abort()
        spent_s, num_ticks = time.monotonic() - started, self._num_ticks - before
        self._target.fill_(7)
        time.sleep(0.3)
        assert bool((self._target == 7).all()), "it was written after the abort"
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

    def _tick(self) -> None:
        while True:
            time.sleep(0.002)
            self._num_ticks += 1


class World:
    def __init__(self, directory: Path) -> None:
        self._directory, self._num_stores = directory, 0
        self.ends = self.sender, self.receiver = self._start(0), self._start(1)

    def _start(self, rank: int) -> Child:
        every = ",".join(map(str, range(torch.cuda.device_count())))
        own = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")[rank]
        with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": own, "NCCL_NVLS_ENABLE": "0"}):
            return Child(f"rank{rank}", End, rank, context=multiprocessing.get_context("spawn"))

    def store(self) -> str:
        self._num_stores += 1
        return str(self._directory / f"store{self._num_stores}")

    def connect_and_move(self, *seeds: int) -> None:
        path = self.store()
        self.sender.tell("connect", path)
        self.receiver.ask("connect", path, timeout_s=90)
        self.sender.told(90)
        self.move(*seeds)

    def move(self, *seeds: int) -> None:
        for seed in seeds:
            self.sender.tell("send", seed)
            assert self.receiver.ask("receive", seed, timeout_s=90)
            self.sender.told(90)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("pairs"))
    yield world
    for end in world.ends:
        end.kill()
        end.close()


def test_bytes_arrive_beside_torchs_own_communicators(world: World) -> None:
    world.connect_and_move(1, 2, 3)
    for end in world.ends:
        assert end.ask("use_torchs_own", world.store(), timeout_s=90) == 4.0
    world.move(4)


def test_an_aborted_receive_ends_at_once_and_a_new_pair_works(world: World) -> None:
    world.connect_and_move(3)
    world.receiver.ask("begin_to_receive", timeout_s=60)
    assert not world.receiver.ask("finish", 0.3, timeout_s=60)
    spent_s, num_ticks = world.receiver.ask("abort", timeout_s=60)
    assert spent_s < 5
    assert num_ticks >= int(spent_s / 0.1), "the interpreter lock was held"
    with pytest.raises(LinkBroken, match="the group was aborted"):
        world.receiver.ask("finish", 1.0, timeout_s=60)
    world.sender.ask("abort", timeout_s=60)
    world.connect_and_move(4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_joins_is_given_up_in_time(world: World, rank: int) -> None:
    with pytest.raises(LinkBroken, match=r"did not join within 1\.0 s"):
        world.ends[rank].ask("connect", world.store(), 1.0, timeout_s=60)
    world.connect_and_move(7)
