"""Blocks of another process: importers unmap before the exporter frees, an interrupted pull leaves no copy running, and
a receiver whose device is full reaches its learner another way."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.drivers.build import make_backend
from tests.fakes.drivers.peer import pattern
from weight_sync.device import DeviceError, driver
from weight_sync.device.driver import _BounceBuffers
from weight_sync.errors import TransportUnusable
from weight_sync.messages import ArenaHandle
from weight_sync.transports.base import Piece
from weight_sync.transports.exporter import SlotExporter
from weight_sync.transports.mapped import MappedReader
from weight_sync.transports.pair import Message, ReceiveBuffer
from weight_sync.transports.select import NodeTransport, SelectedReader

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness
    from weight_sync.device.base import IpcHandle

KIB = 1024


def arena(handle: IpcHandle | None, transport: str = "ipc") -> ArenaHandle:
    return ArenaHandle(transport=transport, handle=handle, slot_bytes=KIB, slot_stride=KIB, num_slots=1)


def test_what_another_process_has_mapped_is_not_freed_before_it_unmaps(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(KIB)
    theirs = accelerator.open_in_peer(accelerator.backend.ipc_export(block))
    with pytest.raises(DeviceError):
        block.close()
    assert accelerator.counter("frees") == accelerator.counter("unexports") == 0
    accelerator.close(theirs)
    block.close()
    assert accelerator.counter("frees") == 1


def test_what_could_not_be_freed_is_freed_before_the_next_block_is_allocated(accelerator: Harness) -> None:
    """The owner drops a block when it closes it, so no one else can try again."""
    block = accelerator.backend.alloc_persistent(KIB)
    theirs = accelerator.open_in_peer(accelerator.backend.ipc_export(block))
    with pytest.raises(DeviceError):
        block.close()
    del block
    accelerator.backend.alloc_persistent(KIB).close()
    assert accelerator.counter("frees") == 1, "it is mapped still"
    accelerator.close(theirs)
    following = accelerator.backend.alloc_persistent(KIB)
    assert accelerator.counter("frees") == 2
    following.close()
    assert accelerator.counters("frees", "used") == (3, 0)


def test_what_could_not_be_unmapped_is_unmapped_before_the_next_block_is_opened(accelerator: Harness) -> None:
    first, second = [accelerator.handle() for _ in range(2)]
    accelerator.fail("IpcCloseMemHandle", "aclrtIpcMemClose", 507899)
    with pytest.raises(DeviceError, match="507899"):
        accelerator.backend.ipc_open(first).close()
    opened = accelerator.backend.ipc_open(second)
    assert accelerator.counter("closes") == 1
    opened.close()


def wait_for_pinning() -> None:
    for thread in threading.enumerate():
        if thread.name == "weight-sync-pin":
            thread.join(10)


@pytest.mark.parametrize("is_refused", [False, True])
def test_host_memory_is_pinned_on_both_sides_and_arrives_just_the_same_where_the_driver_refuses(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_refused: bool
) -> None:
    monkeypatch.setattr(driver, "_refused_by", set())
    if is_refused:
        accelerator.fail("HostRegister", "aclrtHostRegisterV2", 801, times=2)
    backend = accelerator.backend
    slots = SlotExporter(("shm",), backend, slot_bytes=10 * KIB, num_slots=2, host="")
    end = MappedReader(backend, slots.handles[0])
    wait_for_pinning()
    target = backend.alloc_persistent(10 * KIB)
    for slot in (1, 0):
        slots.slot(slot).copy_(pattern(10 * KIB, slot))
        slots.seal(slot)
        end.pull(slot, [Piece(0, target.tensor)], check=lambda: None)
        assert torch.equal(target.tensor, pattern(10 * KIB, slot))
    assert accelerator.counters("registered", "unmapped_registered") == (0 if is_refused else 4, 0)
    if not is_refused or accelerator.name == "npu":
        assert accelerator.counter("pinned_copies") == accelerator.counter("copies")
    end.close()
    slots.close()
    assert accelerator.counters("registered", "unmapped_registered") == (0, 0)
    assert accelerator.counters("registers", "unregisters") == ((0, 0) if is_refused else (4, 4))
    assert len([record for record in caplog.records if "failed with 801" in record.message]) == is_refused


@pytest.mark.parametrize("on_host", [True, False])
def test_a_slot_is_sealed_past_the_learners_compute(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch, on_host: bool
) -> None:
    backend: Any = accelerator.backend
    slots = SlotExporter(("shm" if on_host else "ipc",), backend, slot_bytes=8, num_slots=2, host="")
    under_way = refuse_copy(2, backend, monkeypatch)
    monkeypatch.setattr(backend, "synchronize_current", None)  # the learner's kernels are queued there
    before = accelerator.counter("device_syncs")
    slots.slot(1).copy_(torch.arange(8, dtype=torch.uint8))
    slots.seal(1)
    assert slots.readable(1).tolist() == list(range(8))
    assert (under_way, accelerator.counter("device_syncs")) == ([], before)
    assert accelerator.counter("copies") == on_host
    slots.close()


def test_memory_that_is_closed_while_it_is_pinned_is_let_go_of_first(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning takes seconds for a large model, and closes wait for one piece of it, not for all."""
    backend: Any = accelerator.backend
    register, first, go_on = backend._driver.host_register, threading.Event(), threading.Event()

    def slowly(pointer: int, nbytes: int) -> None:
        register(pointer, nbytes)
        first.set()
        assert go_on.wait(10)

    monkeypatch.setattr(backend._driver, "host_register", slowly)
    slots = SlotExporter(("shm",), backend, slot_bytes=KIB, num_slots=2, host="")
    assert first.wait(10)
    closing = threading.Thread(target=slots.close)
    closing.start()
    closing.join(0.1)
    assert accelerator.counters("unregisters", "unmapped_registered") == (0, 0)
    go_on.set()
    closing.join(10)
    assert accelerator.counters("registers", "unregisters", "unmapped_registered") == (1, 1, 0)


def test_memory_that_is_not_pinned_goes_to_an_npu_and_back_by_way_of_pinned_memory(
    libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ACL moves no other, and none between two places of the host; the fake refuses both."""
    monkeypatch.setattr(_BounceBuffers, "NBYTES", 512)
    backend = make_backend("npu", libraries["npu"])
    block = backend.alloc_persistent(10 * KIB)
    streams = [backend.new_stream() for _ in range(2)]
    for round in range(3):
        arrived, copied = (torch.zeros(10 * KIB - round, dtype=torch.uint8) for _ in range(2))
        backend.copy_async(block.tensor[round:], pattern(10 * KIB - round, round), streams[round % 2])
        backend.copy_async(arrived, block.tensor[round:], streams[round % 2])
        backend.copy_async(copied, arrived, streams[0])
        assert torch.equal(copied, pattern(10 * KIB - round, round))
    block.close()


def test_errors_of_a_driver_reach_other_processes(accelerator: Harness) -> None:
    name = accelerator.fail("Malloc", "aclrtMalloc", 999)
    with pytest.raises(DeviceError) as caught:
        accelerator.backend.alloc_persistent(100)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))
    assert name in str(again)


def test_host_memory_that_the_driver_does_not_let_go_of_stays_mapped(
    accelerator: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    slots = SlotExporter(("shm",), accelerator.backend, slot_bytes=KIB, num_slots=1, host="")
    wait_for_pinning()
    accelerator.fail("HostUnregister", "aclrtHostUnregister", 999)
    slots.close()
    del slots
    gc.collect()
    assert accelerator.counters("registered", "unmapped_registered") == (1, 0)
    assert "stays mapped until this process ends" in caplog.text


def refuse_copy(refused: int, backend: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The driver takes so many copies; returns the streams of those that were not waited for."""
    under_way: list[Any] = []
    copy, wait = backend.copy_async, backend.synchronize

    def copy_async(dst: torch.Tensor, src: torch.Tensor, stream: Any) -> None:
        if len(under_way) == refused:
            raise DeviceError("the driver does not copy this")
        copy(dst, src, stream)
        under_way.append(stream)

    def synchronize(stream: Any) -> None:
        wait(stream)
        under_way[:] = [one for one in under_way if one is not stream]

    monkeypatch.setattr(backend, "copy_async", copy_async)
    monkeypatch.setattr(backend, "synchronize", synchronize)
    return under_way


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_copies_that_were_queued_before_one_was_refused_are_waited_for(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    backend: Any = accelerator.backend
    end = MappedReader(backend, arena(accelerator.handle()))
    under_way = refuse_copy(refused, backend, monkeypatch)
    target = torch.zeros(KIB, dtype=torch.uint8)
    with pytest.raises(DeviceError, match="does not copy this"):
        end.pull(0, [Piece(at, target[at : at + 256]) for at in range(0, KIB, 256)], check=lambda: None)
    assert under_way == []
    end.close()


def test_what_came_through_host_memory_and_was_refused_half_way_is_waited_for(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = ReceiveBuffer(accelerator.backend, staged=True)
    wait_for_pinning()
    assert accelerator.counter("registered") == 2
    batch = [Message(at, torch.zeros(8, dtype=torch.uint8), 1) for at in (0, 8)]
    targets = landing.targets(batch)
    under_way = refuse_copy(1, accelerator.backend, monkeypatch)
    with pytest.raises(DeviceError, match="does not copy this"):
        landing.deliver(batch, targets)
    assert under_way == []
    landing.close()
    assert accelerator.counters("registered", "unmapped_registered") == (0, 0)


def selected(accelerator: Harness, arenas: list[ArenaHandle], *, same_node: bool) -> SelectedReader:
    no_line: Any = None  # only transports that send ask for one
    reader = SelectedReader(
        accelerator.backend, 0, arenas, line=no_line, same_node=same_node, host=None, node=NodeTransport(),
        probe=lambda reader, check: None,
    )  # fmt: skip
    reader.connect(lambda: None)
    return reader


def test_a_block_that_torch_has_no_memory_to_view_is_read_another_way(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pointer: int, nbytes: int, index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.50 GiB")

    theirs = accelerator.peer.call("alloc", "cpu", None, KIB)
    mapped, shared = accelerator.handle(), accelerator.peer.export(theirs)
    monkeypatch.setattr(accelerator.binding, "tensor_at", refuse)
    found = selected(accelerator, [arena(mapped), arena(shared, "shm")], same_node=True)
    assert found.transport == "shm"
    assert "ipc" in found.reasons[0]
    assert "Tried to allocate 30.50 GiB" in found.reasons[0]
    assert accelerator.counter("closes") == 2, "the block was mapped twice for nothing"
    found.close()
    accelerator.peer.call("give_up", theirs)


def test_the_error_of_containers_that_count_as_two_nodes_names_the_options_that_make_them_one(
    accelerator: Harness,
) -> None:
    with pytest.raises(TransportUnusable, match=r"another node.*--ipc=host --pid=host\) and run as the same user"):
        selected(accelerator, [arena(None)], same_node=False)
