"""What only drivers do: current device per thread, error codes, streams, allocation granularity."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weight_sync.device import DeviceError

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness

MIB = 1 << 20


def test_a_device_has_the_name_that_its_vendor_gave_it(accelerator: Harness) -> None:
    accelerator.backend.set_device(1)
    assert accelerator.backend.device_name() == "Fake 1"


def test_out_of_memory_first_takes_back_what_torch_caches(accelerator: Harness) -> None:
    code = 207001 if accelerator.name == "npu" else 2
    accelerator.fail(accelerator.function("Malloc", "aclrtMalloc"), code, times=1)
    block = accelerator.backend.alloc_persistent(100)
    assert accelerator.binding.num_released == 1
    block.close()


def test_other_allocation_failures_are_not_retried(accelerator: Harness) -> None:
    name = accelerator.function("Malloc", "aclrtMalloc")
    accelerator.fail(name, 999, times=1)
    with pytest.raises(DeviceError, match=f"{name} failed with 999"):
        accelerator.backend.alloc_persistent(100)
    assert accelerator.binding.num_released == 0


def test_a_failed_call_leaves_no_error_behind_for_torch_to_trip_over(accelerator: Harness) -> None:
    accelerator.set_total(MIB)
    with pytest.raises(DeviceError):
        accelerator.backend.alloc_persistent(4 * MIB)
    assert accelerator.counter("last_error") == 0


def test_allocations_fill_whole_pages_so_that_ipc_shares_nothing_else(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(2 * MIB + 1)
    assert block.nbytes == 2 * MIB + 1
    assert accelerator.counter("used") == 4 * MIB
    block.close()


def test_memory_info_follows_allocations(accelerator: Harness) -> None:
    accelerator.set_total(64 * MIB)
    assert accelerator.backend.memory_info() == (64 * MIB, 64 * MIB)
    block = accelerator.backend.alloc_persistent(6 * MIB)
    assert accelerator.backend.memory_info() == (58 * MIB, 64 * MIB)
    block.close()
    assert accelerator.backend.memory_info() == (64 * MIB, 64 * MIB)


def test_exporting_twice_registers_once(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(100)
    assert accelerator.backend.ipc_export(block) == accelerator.backend.ipc_export(block)
    assert accelerator.counter("exports") == 1
    block.close()
    assert accelerator.counter("unexports") == (1 if accelerator.name == "npu" else 0)


def test_opening_asks_for_peer_access(accelerator: Harness) -> None:
    theirs = accelerator.alloc(100)
    block = accelerator.backend.ipc_open(accelerator.peer.export(theirs))
    assert accelerator.counter("open_flags") == 1
    block.close()


def test_a_refused_handle_says_who_exported_it_and_what_to_check(accelerator: Harness) -> None:
    theirs = accelerator.alloc(100)
    handle = accelerator.peer.export(theirs)
    name = accelerator.function("IpcOpenMemHandle", "aclrtIpcMemImportByKey")
    accelerator.fail(name, 201)
    with pytest.raises(DeviceError, match=rf"process {accelerator.peer.pid} .*{name} failed with 201 .*; .*same user"):
        accelerator.backend.ipc_open(handle)


def test_a_process_does_not_open_its_own_handle(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(100)
    with pytest.raises(DeviceError, match="use the block itself"):
        accelerator.backend.ipc_open(accelerator.backend.ipc_export(block))
    block.close()


def test_closing_waits_for_copies_in_flight(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(100)
    before = accelerator.counter("device_syncs")
    block.close()
    assert accelerator.counter("device_syncs") == before + 1


def test_a_block_that_could_not_be_freed_can_be_closed_again(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend: Any = accelerator.backend
    block = backend.alloc_persistent(100)
    free, refusals = backend._driver.free, [DeviceError("cudaFree failed with 999")]

    def refuse_once(pointer: int) -> None:
        if refusals:
            raise refusals.pop()
        free(pointer)

    monkeypatch.setattr(backend._driver, "free", refuse_once)
    with pytest.raises(DeviceError, match="failed with 999"):
        block.close()
    with pytest.raises(DeviceError, match="this persistent block is closed"):
        _ = block.tensor
    for _ in range(2):
        block.close()
    assert (accelerator.counter("frees"), accelerator.counter("used")) == (1, 0)


def test_a_block_that_could_not_be_unmapped_can_be_closed_again(accelerator: Harness) -> None:
    theirs = accelerator.alloc(100)
    block = accelerator.backend.ipc_open(accelerator.peer.export(theirs))
    refused = accelerator.function("IpcCloseMemHandle", "aclrtIpcMemClose")
    accelerator.fail(refused, 999)
    with pytest.raises(DeviceError, match=f"{refused} failed with 999"):
        block.close()
    for _ in range(2):
        block.close()
    assert accelerator.counter("closes") == 1


def test_copies_that_cannot_be_waited_for_keep_their_memory(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(100)
    refused = accelerator.function("DeviceSynchronize", "aclrtSynchronizeDevice")
    accelerator.fail(refused, 999)
    with pytest.raises(DeviceError, match=f"{refused} failed with 999"):
        block.close()
    assert accelerator.counter("frees") == 0
    block.close()
    assert accelerator.counter("frees") == 1


def test_a_handle_that_cannot_be_withdrawn_does_not_keep_the_memory(libraries: dict[str, str]) -> None:
    from tests.fakes.drivers.build import make_backend

    library = ctypes.CDLL(libraries["npu"])
    library.fake_reset()
    backend = make_backend("npu", libraries["npu"])
    block = backend.alloc_persistent(100)
    backend.ipc_export(block)
    library.fake_fail(b"aclrtIpcMemClose", 999, 1)
    counts = []
    with pytest.raises(DeviceError, match="aclrtIpcMemClose failed with 999"):
        block.close()
    for _ in range(2):
        counts.append((library.fake_counter(b"frees"), library.fake_counter(b"unexports")))
        block.close()
    assert counts == [(1, 0), (1, 1)], "what was done is not done again"


def test_copy_direction_is_host_to_host_for_views_in_host_memory(accelerator: Harness) -> None:
    accelerator.backend.copy_async(torch.zeros(4), torch.ones(4))
    assert accelerator.counter("copies") == 1
    assert accelerator.counter("last_kind") == 0


def test_an_empty_copy_does_not_reach_the_driver(accelerator: Harness) -> None:
    accelerator.backend.copy_async(torch.zeros(0), torch.zeros(0))
    assert accelerator.counter("copies") == 0


def test_use_stream_hands_the_drivers_stream_to_torch(accelerator: Harness) -> None:
    stream: Any = accelerator.backend.new_stream()
    with accelerator.backend.use_stream(stream):
        assert accelerator.binding.entered == [accelerator.binding.address_of(stream.in_torch)]


def test_a_stream_is_used_again_when_nobody_holds_it_and_lives_as_long_as_the_process(accelerator: Harness) -> None:
    first: Any = accelerator.backend.new_stream()
    second: Any = accelerator.backend.new_stream()
    made = first.in_torch, second.in_torch
    addresses = [accelerator.binding.address_of(each) for each in made]
    assert addresses[0] != addresses[1]
    del second, first
    gc.collect()
    again: Any = accelerator.backend.new_stream()
    assert again.in_torch is made[1], "the one that was given back first"
    assert accelerator.counter("streams_created") == 2


def test_a_stream_of_somebody_else_is_refused(accelerator: Harness) -> None:
    with pytest.raises(DeviceError, match=r"new_stream\(\), got str"):
        accelerator.backend.synchronize("stream 7")


def test_synchronize_waits_for_the_stream_it_is_given(accelerator: Harness) -> None:
    stream = accelerator.backend.new_stream()
    accelerator.backend.synchronize(stream)
    assert (accelerator.counter("stream_syncs"), accelerator.counter("device_syncs")) == (1, 0)
    accelerator.backend.synchronize()
    assert (accelerator.counter("stream_syncs"), accelerator.counter("device_syncs")) == (1, 1)


def test_a_device_that_is_not_there_is_refused(accelerator: Harness) -> None:
    with pytest.raises(DeviceError, match=r"must be in 0\.\.1 \(2 visible to this process\), got 2"):
        accelerator.backend.set_device(2)


def test_a_helper_thread_works_on_the_chosen_device(accelerator: Harness) -> None:
    """Drivers keep the current device per thread; in a fresh thread it would be 0."""
    accelerator.backend.set_device(1)
    seen = []

    def work() -> None:
        block: Any = accelerator.backend.alloc_persistent(100)
        seen.append((accelerator.counter("device"), block.device_index))
        block.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [(1, 1)]


def test_without_set_device_torchs_choice_counts(accelerator: Harness) -> None:
    accelerator.binding.set_device(1)
    block: Any = accelerator.backend.alloc_persistent(100)
    assert block.device_index == 1
    assert accelerator.backend.ipc_export(block).device_index == 1
    block.close()


@pytest.mark.parametrize("kind", [DeviceError, torch.OutOfMemoryError])
def test_memory_that_torch_cannot_view_is_given_back(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def refuse(pointer: int, nbytes: int, index: int) -> torch.Tensor:
        raise kind("torch copied it")

    theirs = accelerator.alloc(100)
    handle = accelerator.peer.export(theirs)
    monkeypatch.setattr(accelerator.binding, "tensor_at", refuse)
    with pytest.raises(DeviceError, match="torch copied it"):
        accelerator.backend.alloc_persistent(100)
    with pytest.raises(DeviceError, match="torch copied it"):
        accelerator.backend.ipc_open(handle)
    assert accelerator.counter("used") == 0
    assert accelerator.counter("closes") == 1


def test_a_library_without_the_calls_is_named(libraries: dict[str, str]) -> None:
    from tests.fakes.drivers.build import make_backend

    backend = make_backend("cuda", libraries["rocm"])
    with pytest.raises(DeviceError, match="has no cudaSetDevice"):
        backend.alloc_persistent(100)
