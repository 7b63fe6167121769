"""Persistent blocks, IPC and copies: the same promises on every backend."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.drivers.build import make_backend
from tests.fakes.drivers.peer import Peer, decode_handle
from trainer.driver.cluster import SCRATCH_PREFIX
from weight_sync.device import DeviceError
from weight_sync.device.cpu import CpuBackend

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness

KIB = 1024


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    return ((torch.arange(nbytes) * 131 + seed) % 251).to(torch.uint8)


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_block_is_a_flat_byte_tensor_of_exactly_the_size_asked_for(every: Harness) -> None:
    block = every.backend.alloc_persistent(3 * KIB + 5)
    assert block.nbytes == 3 * KIB + 5
    assert block.tensor.dtype == torch.uint8
    assert block.tensor.shape == (3 * KIB + 5,)
    block.tensor.copy_(pattern(block.nbytes, 1))
    assert torch.equal(block.tensor.cpu(), pattern(block.nbytes, 1))
    block.close()


def test_a_block_never_moves(every: Harness) -> None:
    block = every.backend.alloc_persistent(4 * KIB)
    address = block.tensor.data_ptr()
    others = [every.backend.alloc_persistent(4 * KIB) for _ in range(5)]
    assert block.tensor.data_ptr() == address
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
    if every.name != "cpu":
        assert every.counter("frees") == 1


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_empty_block_is_refused(every: Harness, nbytes: int) -> None:
    with pytest.raises(DeviceError, match=f"at least 1 byte, got {nbytes}"):
        every.backend.alloc_persistent(nbytes)


def test_two_processes_see_each_others_writes(every: Harness) -> None:
    block = every.backend.alloc_persistent(64 * KIB + 3)
    block.tensor.copy_(pattern(block.nbytes, 7))
    theirs = every.open_in_peer(every.backend.ipc_export(block))
    assert (
        every.peer.call("read", block=theirs, offset=100, nbytes=50)
        == bytes(pattern(block.nbytes, 7)[100:150].numpy()).hex()
    )
    assert every.peer.call("digest", block=theirs) == every.backend.digest(block.tensor)
    every.peer.call("write", block=theirs, offset=64 * KIB, data="0a0b0c")
    assert block.tensor[64 * KIB :].tolist() == [10, 11, 12]
    every.close(theirs)
    assert block.tensor[64 * KIB :].tolist() == [10, 11, 12], "an importer that closes must not take the block away"
    block.close()


def test_a_block_of_another_process_can_be_opened_read_and_written(every: Harness) -> None:
    theirs = every.alloc(10 * KIB)
    every.peer.call("fill", block=theirs, seed=3)
    block = every.backend.ipc_open(every.peer.export(theirs))
    assert torch.equal(block.tensor.cpu(), pattern(10 * KIB, 3))
    local = torch.zeros(10 * KIB, dtype=torch.uint8)
    every.backend.copy_async(local, block.tensor)
    every.backend.synchronize()
    assert torch.equal(local, pattern(10 * KIB, 3))
    block.tensor[5] = 99
    assert every.peer.call("read", block=theirs, offset=5, nbytes=1) == "63"
    block.close()


def test_handle_of_a_closed_block_is_refused(every: Harness) -> None:
    theirs = every.alloc()
    handle = every.peer.export(theirs)
    every.close(theirs)
    with pytest.raises(DeviceError, match=r"cannot open the block of process|no longer the exported block"):
        every.backend.ipc_open(handle)


def test_handle_of_a_killed_exporter_is_refused(every: Harness) -> None:
    victim: Any = every.call("victim", nbytes=KIB)
    handle = decode_handle(victim["handle"])
    block = every.backend.ipc_open(handle)
    every.peer.call("kill_victim", pid=victim["pid"])
    with pytest.raises(DeviceError, match=rf"\(pid {victim['pid']}\) has ended"):
        every.backend.ipc_open(handle)
    block.close()


def test_an_importer_survives_the_death_of_the_exporter(every: Harness) -> None:
    """Reading on is safe (on cpu the mapping holds the pages); only a new open is refused."""
    victim: Any = every.call("victim", nbytes=KIB)
    block = every.backend.ipc_open(decode_handle(victim["handle"]))
    block.tensor.fill_(5)
    every.peer.call("kill_victim", pid=victim["pid"])
    assert int(block.tensor.sum()) == 5 * KIB
    block.close()


def test_nothing_is_left_in_any_file_system_after_sigkill(every: Harness) -> None:
    def names() -> set[str]:
        """Without the clusters of runs that other tests may start meanwhile."""
        found = {str(p) for d in ("/dev/shm", "/tmp") for p in Path(d).iterdir() if "tandem-" in p.name}
        return {name for name in found if SCRATCH_PREFIX not in name}

    before = names()
    victim: Any = every.call("victim", nbytes=64 * KIB)
    block = every.backend.ipc_open(decode_handle(victim["handle"]))
    every.peer.call("kill_victim", pid=victim["pid"])
    block.close()
    assert names() == before


def test_handle_of_another_kind_of_device_is_refused(every: Harness) -> None:
    theirs = every.alloc()
    foreign = dataclasses.replace(every.peer.export(theirs), backend="abacus")
    with pytest.raises(DeviceError, match=f"device 'abacus' cannot be opened by '{every.name}'"):
        every.backend.ipc_open(foreign)


def test_a_torch_tensor_is_refused_by_type(every: Harness) -> None:
    tensor: Any = torch.zeros(KIB, dtype=torch.uint8)
    with pytest.raises(DeviceError, match="alloc_persistent"):
        every.backend.ipc_export(tensor)


def test_an_imported_block_cannot_be_exported_again(every: Harness) -> None:
    theirs = every.alloc()
    block = every.backend.ipc_open(every.peer.export(theirs))
    with pytest.raises(DeviceError, match="only by the process that allocated it"):
        every.backend.ipc_export(block)
    block.close()


def test_copy_moves_bytes_across_dtypes_and_shapes(every: Harness) -> None:
    block = every.backend.alloc_persistent(4 * KIB)
    source = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    stream = every.backend.new_stream()
    every.backend.copy_async(block.tensor, source, stream)
    every.backend.synchronize(stream)
    assert torch.equal(block.tensor.view(torch.float32).view(32, 32).cpu(), source)
    block.close()


def test_copy_of_unequal_sizes_is_refused(every: Harness) -> None:
    with pytest.raises(DeviceError, match=r"8 bytes of destination .* 12 bytes of source"):
        every.backend.copy_async(torch.zeros(8, dtype=torch.uint8), torch.zeros(3))


def test_copy_of_strided_tensors_is_refused(every: Harness) -> None:
    column = torch.zeros(4, 4)[:, 0]
    with pytest.raises(DeviceError, match="source must be contiguous"):
        every.backend.copy_async(torch.zeros(4), column)
    with pytest.raises(DeviceError, match="destination must be contiguous"):
        every.backend.copy_async(column, torch.zeros(4))


def test_out_of_memory_names_requested_and_free_bytes(every: Harness) -> None:
    if every.name != "cpu":
        every.set_total(8 << 20)
    free, total = every.backend.memory_info()
    assert 0 < free <= total
    requested = (1 << 50) + 1
    with pytest.raises(DeviceError, match=rf"block of {requested} bytes: \d+ ") as caught:
        every.backend.alloc_persistent(requested)
    if every.name != "cpu":
        assert f"{free} of {total} bytes are free" in str(caught.value)


def test_streams_exist_where_the_backend_says_so(every: Harness) -> None:
    stream = every.backend.new_stream()
    assert (stream is not None) == every.backend.capabilities().streams
    with every.backend.use_stream(stream):
        pass
    with every.backend.use_stream(None):
        pass
    every.backend.synchronize()


def test_set_device_returns_the_device_that_blocks_live_on(every: Harness) -> None:
    device = every.backend.set_device(0)
    block = every.backend.alloc_persistent(KIB)
    assert block.tensor.device == device
    block.close()


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
    if every.name != "cpu":
        assert every.counter("mallocs") == every.counter("frees") == 100
        assert every.counter("opens") == every.counter("closes") == 100
        assert every.counter("streams_created") == 1, "an unused one is reused"
        assert every.counter("used") == 0


def test_a_process_killed_outright_takes_the_blocks_of_all_backends_along(libraries: dict[str, str]) -> None:
    """The whole process, not a forked child of it: no cleanup code of ours runs."""
    peer = Peer()
    handles = []
    for name, library in {"cpu": None, **libraries}.items():
        theirs = peer.call("alloc", name=name, library=library, nbytes=KIB)
        handles.append((make_backend(name, library), peer.export(theirs)))
    peer.kill()
    for backend, handle in handles:
        with pytest.raises(DeviceError, match="has ended"):
            backend.ipc_open(handle)
