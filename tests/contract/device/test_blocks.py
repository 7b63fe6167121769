"""Persistent blocks, IPC and copies: the same promises on every backend."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.drivers.peer import Peer, pattern
from trainer.driver.scratch import SCRATCH_PREFIX
from weight_sync.device import DeviceError
from weight_sync.device.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.contract.device.conftest import Harness

KIB = 1024


def test_a_block_is_a_flat_byte_tensor_of_the_size_asked_for_on_the_chosen_device_and_never_moves(
    every: Harness,
) -> None:
    device = every.backend.set_device(0)
    block = every.backend.alloc_persistent(3 * KIB + 5)
    assert (block.nbytes, block.tensor.shape, block.tensor.dtype) == (3 * KIB + 5, (3 * KIB + 5,), torch.uint8)
    assert block.tensor.device == device
    address = block.tensor.data_ptr()
    block.tensor.copy_(pattern(block.nbytes, 1))
    others = [every.backend.alloc_persistent(4 * KIB) for _ in range(5)]
    assert block.tensor.data_ptr() == address
    assert torch.equal(block.tensor.cpu(), pattern(block.nbytes, 1))
    for each in (block, *others):
        each.close()


def test_views_of_shared_host_memory_outlive_the_block() -> None:
    block = CpuBackend().alloc_persistent(4096)
    view = block.tensor[8:12]
    view.fill_(7)
    block.close()
    assert view.tolist() == [7] * 4


def test_close_twice_is_close_once_and_the_tensor_is_gone(every: Harness) -> None:
    block = every.backend.alloc_persistent(KIB)
    block.close()
    block.close()
    with pytest.raises(DeviceError, match="closed"):
        _ = block.tensor
    assert every.is_cpu or every.counter("frees") == 1


def test_two_processes_see_each_others_writes(every: Harness) -> None:
    block = every.backend.alloc_persistent(64 * KIB + 3)
    block.tensor.copy_(pattern(block.nbytes, 7))
    theirs = every.open_in_peer(every.backend.ipc_export(block))
    assert every.peer.call("read", theirs, 100, 50) == pattern(block.nbytes, 7)[100:150].numpy().tobytes()
    assert every.peer.call("digest", theirs) == every.backend.digest(block.tensor)
    every.peer.call("write", theirs, 64 * KIB, bytes([10, 11, 12]))
    assert block.tensor[64 * KIB :].tolist() == [10, 11, 12]
    every.close(theirs)
    assert block.tensor[64 * KIB :].tolist() == [10, 11, 12], "an importer that closes must not take the block away"
    block.close()


def test_a_block_of_another_process_can_be_opened_read_and_written(every: Harness) -> None:
    theirs = every.alloc(10 * KIB)
    every.peer.call("write", theirs, 0, pattern(10 * KIB, 3).numpy().tobytes())
    block = every.backend.ipc_open(every.peer.export(theirs))
    assert torch.equal(block.tensor.cpu(), pattern(10 * KIB, 3))
    local = torch.zeros(10 * KIB, dtype=torch.uint8)
    every.backend.copy_async(local, block.tensor)
    every.backend.synchronize()
    assert torch.equal(local, pattern(10 * KIB, 3))
    block.tensor[5] = 99
    assert every.peer.call("read", theirs, 5, 1) == b"\x63"
    block.close()


def test_handle_of_a_closed_block_is_refused(every: Harness) -> None:
    theirs = every.alloc()
    handle = every.peer.export(theirs)
    every.close(theirs)
    with pytest.raises(DeviceError, match=r"cannot open the block of process|no longer the exported block"):
        every.backend.ipc_open(handle)


@pytest.fixture
def victim() -> Iterator[Peer]:
    victim = Peer()
    yield victim
    victim.close()


def test_an_importer_survives_the_death_of_the_exporter_whose_handle_is_refused_and_who_leaves_nothing(
    every: Harness, victim: Peer
) -> None:
    """No cleanup code of ours runs. Reading on is safe (on cpu the mapping holds the pages)."""

    def names() -> set[str]:
        """Without the clusters of runs that other tests may start meanwhile."""
        found = {str(p) for d in ("/dev/shm", "/tmp") for p in Path(d).iterdir() if "tandem-" in p.name}
        return {name for name in found if SCRATCH_PREFIX not in name}

    before = names()
    handle = victim.export(victim.call("alloc", every.name, every.library, KIB))
    block = every.backend.ipc_open(handle)
    block.tensor.fill_(5)
    victim.kill()
    with pytest.raises(DeviceError, match=rf"\(pid {victim.pid}\) has ended"):
        every.backend.ipc_open(handle)
    assert int(block.tensor.sum()) == 5 * KIB
    block.close()
    assert names() <= before


def foreign_handle(every: Harness) -> None:
    every.backend.ipc_open(dataclasses.replace(every.handle(), backend="abacus"))


def imported_block(every: Harness) -> None:
    block = every.backend.ipc_open(every.handle())
    try:
        every.backend.ipc_export(block)
    finally:
        block.close()


COLUMN = torch.zeros(4, 4)[:, 0]
TENSOR: Any = torch.zeros(KIB, dtype=torch.uint8)
REFUSALS: dict[str, tuple[Callable[[Harness], object], str]] = {
    "a block of 0 bytes": (lambda h: h.backend.alloc_persistent(0), "at least 1 byte, got 0"),
    "a block of -1 bytes": (lambda h: h.backend.alloc_persistent(-1), "at least 1 byte, got -1"),
    "a handle of another kind of device": (foreign_handle, "device 'abacus' cannot be opened by '{name}'"),
    "a torch tensor as a block": (lambda h: h.backend.ipc_export(TENSOR), "alloc_persistent"),
    "an imported block to export": (imported_block, "only by the process that allocated it"),
    "a copy of unequal sizes": (
        lambda h: h.backend.copy_async(torch.zeros(8, dtype=torch.uint8), torch.zeros(3)),
        r"8 bytes of destination .* 12 bytes of source",
    ),
    "a copy of a strided source": (
        lambda h: h.backend.copy_async(torch.zeros(4), COLUMN), "source must be contiguous",
    ),
    "a copy to a strided destination": (
        lambda h: h.backend.copy_async(COLUMN, torch.zeros(4)), "destination must be contiguous",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_is_refused(every: Harness, what: str) -> None:
    action, message = REFUSALS[what]
    with pytest.raises(DeviceError, match=message.replace("{name}", every.name)):
        action(every)


def test_copy_moves_bytes_across_dtypes_and_shapes(every: Harness) -> None:
    block = every.backend.alloc_persistent(4 * KIB)
    source = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    stream = every.backend.new_stream()
    every.backend.copy_async(block.tensor, source, stream)
    every.backend.synchronize(stream)
    assert torch.equal(block.tensor.view(torch.float32).view(32, 32).cpu(), source)
    block.close()


def test_out_of_memory_names_requested_and_free_bytes(every: Harness) -> None:
    if not every.is_cpu:
        every.set_total(8 << 20)
    free, total = every.backend.memory_info()
    assert 0 < free <= total
    requested = (1 << 50) + 1
    with pytest.raises(DeviceError, match=rf"block of {requested} bytes: \d+ ") as caught:
        every.backend.alloc_persistent(requested)
    assert every.is_cpu or f"{free} of {total} bytes are free" in str(caught.value)


def test_devices_have_streams_and_the_host_has_none(every: Harness) -> None:
    stream = every.backend.new_stream()
    assert (stream is None) == every.is_cpu
    for one in (stream, None):
        with every.backend.use_stream(one):
            pass
    every.backend.synchronize()


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_hundred_rounds_leak_neither_memory_nor_file_descriptors(every: Harness) -> None:
    theirs = every.alloc()
    handle = every.peer.export(theirs)
    num_fds = num_open_files()
    for _ in range(100):
        block = every.backend.alloc_persistent(KIB)
        every.backend.ipc_export(block)
        opened = every.backend.ipc_open(handle)
        stream = every.backend.new_stream()
        every.backend.copy_async(block.tensor, opened.tensor, stream)
        every.backend.synchronize(stream)
        block.close()
        opened.close()
        del stream
    gc.collect()
    assert num_open_files() < num_fds + 10  # other threads of this process may open one or two
    every.close(theirs)
    if not every.is_cpu:
        assert every.counters("mallocs", "frees", "opens", "closes") == (100,) * 4
        assert every.counters("streams_created", "used") == (1, 0), "an unused stream is reused"
