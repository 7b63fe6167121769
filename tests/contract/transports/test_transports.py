"""What every transport must do. Each runs on the cpu backend here; the others are added as parameters."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import PlanMismatch
from weight_sync.transports.base import Piece
from weight_sync.transports.select import AUTO_ORDER, candidates, open_publisher_end, open_receiver_end
from weight_sync.wire import ArenaHandle, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

SLOT_BYTES, NUM_SLOTS = 10_007, 3


def pattern(slot: int) -> torch.Tensor:
    return ((torch.arange(SLOT_BYTES) * 7 + slot * 13) % 251).to(torch.uint8)


def publish(transport: str, pipe: Connection) -> None:
    """A publisher process: fills its slots, hands out the handle, then obeys single letters."""
    end = open_publisher_end(transport, CpuBackend(), slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    for slot in range(NUM_SLOTS):
        end.slot(slot).copy_(pattern(slot))
        end.seal(slot)
    pipe.send_bytes(encode(end.handle))
    while (order := pipe.recv()) != "close":
        assert order == "repack"
        end.slot(0).copy_(pattern(9))
        end.seal(0)
        pipe.send("done")
    end.close()


class Remote:
    def __init__(self, transport: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=publish, args=(transport, theirs), daemon=True)
        self.process.start()
        assert self.pipe.poll(60)
        self.handle = decode(self.pipe.recv_bytes(), ArenaHandle)

    def repack(self) -> None:
        self.pipe.send("repack")
        assert self.pipe.poll(10)
        assert self.pipe.recv() == "done"

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        if self.process.is_alive():
            self.pipe.send("close")
        self.process.join(10)
        assert not self.process.is_alive()


@pytest.fixture(scope="module", params=AUTO_ORDER)
def remote(request: pytest.FixtureRequest) -> Iterator[Remote]:
    remote = Remote(request.param)
    yield remote
    remote.close()


def nothing() -> None:
    return None


def test_pieces_of_any_slot_arrive_as_they_were_packed(remote: Remote) -> None:
    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    for slot in (1, 2):
        whole, part = torch.zeros(SLOT_BYTES, dtype=torch.uint8), torch.zeros(13, dtype=torch.uint8)
        end.pull(4, slot, [Piece(0, whole), Piece(4091, part)], check=nothing)
        assert torch.equal(whole, pattern(slot))
        assert torch.equal(part, pattern(slot)[4091:4104])
    end.close()


def test_what_is_packed_later_is_seen_without_opening_again(remote: Remote) -> None:
    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    remote.repack()
    landing = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    end.pull(4, 0, [Piece(0, landing)], check=nothing)
    assert torch.equal(landing, pattern(9))
    end.close()


def test_check_stops_a_pull_between_pieces(remote: Remote) -> None:
    class Stop(Exception):
        pass

    calls = [0]

    def check() -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise Stop

    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    first, second = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(Stop):
        end.pull(4, 1, [Piece(8, first), Piece(16, second)], check=check)
    assert torch.equal(first, pattern(1)[8:16])
    assert not second.any()
    end.close()


def test_slot_outside_the_arena_is_refused(remote: Remote) -> None:
    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    with pytest.raises(ValueError, match=r"slot must be in \[0, 3\), got 3"):
        end.pull(4, 3, [], check=nothing)
    end.close()


def test_close_may_be_repeated(remote: Remote) -> None:
    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    end.close()
    end.close()


def test_rank_without_parameters_needs_no_memory() -> None:
    end = open_publisher_end("shm", CpuBackend(), slot_bytes=0, num_slots=2)
    assert end.handle.handle is None
    assert end.counters() == {"allocations": 0, "registrations": 0}
    end.close()


def test_ranks_must_agree_on_one_transport(remote: Remote) -> None:
    other = ArenaHandle(transport="pigeon", handle=None, slot_bytes=0, slot_stride=0, num_slots=1)
    with pytest.raises(PlanMismatch, match="pigeon"):
        open_receiver_end(CpuBackend(), {0: remote.handle, 1: other})


def test_auto_tries_the_fastest_first() -> None:
    assert candidates("auto") == ("ipc", "shm")
    assert candidates("shm") == ("shm",)
    with pytest.raises(ValueError, match=r"auto, ipc or shm, got 'rdma'"):
        candidates("rdma")


@pytest.mark.parametrize("make", [lambda: Remote("shm"), lambda: Remote("ipc")], ids=AUTO_ORDER[::-1])
def test_killed_publisher_leaves_no_memory_behind(make: Callable[[], Remote]) -> None:
    before = shared_memory_names()
    remote = make()
    end = open_receiver_end(CpuBackend(), {4: remote.handle})
    remote.kill()
    landing = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    end.pull(4, 1, [Piece(0, landing)], check=nothing)  # a mapping outlives its maker: no crash while reading
    assert torch.equal(landing, pattern(1))
    end.close()
    assert shared_memory_names() - before == set()


def shared_memory_names() -> set[str]:
    """Named shared memory that could be ours."""
    return {path.name for path in Path("/dev/shm").iterdir() if "tandem" in path.name or "weight" in path.name}
