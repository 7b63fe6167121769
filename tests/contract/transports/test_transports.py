"""What every transport must do. Each runs on the cpu backend here, or on a fake device; real devices are marked gpu."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.contract.transports.world import SLOT_BYTES, Kind, Local, Remote, pattern
from tests.fakes.relay_process import nothing
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import TransportUnusable
from weight_sync.messages import ArenaHandle
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import TRANSPORTS, SlotExporter, offered
from weight_sync.transports.pair import PairReceiver
from weight_sync.transports.select import usable

if TYPE_CHECKING:
    from weight_sync.device.base import Capabilities


def test_pieces_of_any_slot_arrive_as_they_were_packed(remote: Remote, local: Local) -> None:
    end = local.open_one(remote)
    for slot in (1, 2):
        whole, part = local.empty(), local.empty(13)
        end.pull(slot, [Piece(0, whole), Piece(4091, part)], check=nothing)
        assert torch.equal(whole.cpu(), pattern(slot))
        assert torch.equal(part.cpu(), pattern(slot)[4091:4104])
    # What is packed later is seen without opening again.
    remote.ask("pack", 0, pattern(9))
    end.pull(0, [Piece(0, whole)], check=nothing)
    assert torch.equal(whole.cpu(), pattern(9))


def test_a_thousand_pieces_arrive_each_in_its_place(remote: Remote, local: Local) -> None:
    end = local.open_one(remote)
    landing = local.empty()
    # Backwards and of many sizes: order and place in the slot have nothing to do with order and place at the engine.
    edges = sorted({0, SLOT_BYTES, *range(3, SLOT_BYTES, 10)})
    pieces = [Piece(start, landing[start:stop]) for start, stop in itertools.pairwise(edges)]
    end.pull(2, pieces[::-1], check=nothing)
    assert len(pieces) > 1000
    assert torch.equal(landing.cpu(), pattern(2))


def test_slot_outside_the_arena_is_refused(remote: Remote, local: Local) -> None:
    end = local.open_one(remote)
    with pytest.raises(ValueError, match=r"slot must be in \[0, 3\] \(the last is the probe\), got 4"):
        end.pull(4, [], check=nothing)
    with pytest.raises(ValueError, match=r"got -1"):
        end.pull(-1, [], check=nothing)


def test_check_stops_a_pull_and_the_next_one_works(remote: Remote, local: Local) -> None:
    class Stop(Exception):
        pass

    def check() -> None:
        raise Stop

    end = local.open_one(remote)
    landing = local.empty()
    with pytest.raises(Stop):
        end.pull(1, [Piece(0, landing)], check=check)
    assert not landing.any()
    end.pull(1, [Piece(0, landing)], check=nothing)
    assert torch.equal(landing.cpu(), pattern(1))


def test_counters_stay_what_they_are_over_fifty_pulls_and_close_may_be_repeated(remote: Remote, local: Local) -> None:
    end = local.open_one(remote)
    landing = local.empty()
    end.pull(1, [Piece(0, landing)], check=nothing)
    before, before_remote = end.counters(), remote.ask("see_counters")
    for number in range(50):
        end.pull(1 + number % 2, [Piece(0, landing)], check=nothing)
    assert end.counters() == before
    assert remote.ask("see_counters") == before_remote
    if remote.kind.is_pair:
        assert before["communicators"] == 1
    end.close()
    end.close()


@pytest.mark.parametrize("transport", ["ipc", "shm", "gloo"])
def test_rank_without_parameters_needs_no_memory(transport: str) -> None:
    end = SlotExporter((transport,), CpuBackend(), slot_bytes=0, num_slots=2, host="127.0.0.1")
    assert end.handles[0].handle is None
    assert set(end.counters().values()) == {0}
    with pytest.raises(ValueError, match="publishes nothing"):
        end.slot(0)
    end.close()
    end.close()


def test_auto_offers_the_fastest_first_and_only_what_shares_one_memory() -> None:
    class Device(CpuBackend):
        def __init__(self, name: str, collective: str, *, ipc: bool = True) -> None:
            super().__init__()
            self.name, self.collective, self._ipc = name, collective, ipc

        def capabilities(self) -> Capabilities:
            return replace(super().capabilities(), ipc=self._ipc)

    assert offered("auto", CpuBackend()) == ("ipc", "gloo")
    assert offered("auto", Device("cuda", "cpu:gloo,cuda:nccl")) == ("ipc", "nccl")
    assert offered("auto", Device("npu", "cpu:gloo,npu:hccl", ipc=False)) == ("hccl",)
    assert offered("auto", Device("xpu", "gloo")) == ("shm", "gloo")
    assert offered("nccl", CpuBackend()) == ("nccl",)
    with pytest.raises(ValueError, match=r"auto, ipc or nccl or hccl or shm or gloo, got 'rdma'"):
        offered("rdma", CpuBackend())


def test_memory_is_never_mapped_from_another_node() -> None:
    handles = [ArenaHandle(transport=t, handle=None, slot_bytes=0, slot_stride=0, num_slots=1) for t in TRANSPORTS]
    assert [handle.transport for handle in usable(handles, same_node=True)] == list(TRANSPORTS)
    assert [handle.transport for handle in usable(handles, same_node=False)] == ["nccl", "hccl", "gloo"]


def test_a_library_that_the_device_lacks_is_refused_when_the_epoch_opens() -> None:
    with pytest.raises(TransportUnusable, match=r"backend cpu .* has no nccl"):
        SlotExporter(("nccl",), CpuBackend(), slot_bytes=8, num_slots=1, host="127.0.0.1")
    arena = ArenaHandle(transport="nccl", handle=None, slot_bytes=8, slot_stride=4096, num_slots=1, host="127.0.0.1")
    with pytest.raises(TransportUnusable, match=r"backend cpu .* has no nccl"):
        PairReceiver(CpuBackend(), arena, line=None, host="127.0.0.1")  # type: ignore[arg-type]


def test_a_wildcard_is_no_address_to_be_reached_at() -> None:
    with pytest.raises(TransportUnusable, match=r"got '0\.0\.0\.0'; name one of this host's addresses"):
        SlotExporter(("gloo",), CpuBackend(), slot_bytes=8, num_slots=1, host="0.0.0.0")


def test_killed_publisher_leaves_no_memory_behind() -> None:
    before = shared_memory_names()
    remote = Remote(Kind("ipc")).wait()
    local = Local(remote.kind)
    end = local.open_one(remote)
    remote.kill()
    landing = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
    end.pull(1, [Piece(0, landing)], check=nothing)  # a mapping outlives its maker: no crash while reading
    assert torch.equal(landing, pattern(1))
    local.close()
    remote.close()
    assert shared_memory_names() - before == set()


def shared_memory_names() -> set[str]:
    """Named shared memory that could be ours."""
    return {path.name for path in Path("/dev/shm").iterdir() if "tandem" in path.name or "weight" in path.name}
