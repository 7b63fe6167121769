"""What only drivers do: current device per thread, error codes, streams, allocation granularity."""

from __future__ import annotations

import ctypes
import gc
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes.drivers.build import make_backend
from tests.fakes.drivers.host_npu import HostNpuBinding
from tests.fakes.drivers.peer import Peer, pattern
from weight_sync.device import DeviceError
from weight_sync.device.npu import NpuBackend
from weight_sync.receive.receiver import WeightReceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.contract.device.conftest import Harness

MIB = 1 << 20


def test_out_of_memory_first_takes_back_what_torch_caches_and_other_failures_are_not_retried(
    accelerator: Harness,
) -> None:
    accelerator.fail("Malloc", "aclrtMalloc", 207001 if accelerator.name == "npu" else 2)
    accelerator.backend.alloc_persistent(100).close()
    assert accelerator.binding.num_released == 1
    name = accelerator.fail("Malloc", "aclrtMalloc", 999)
    with pytest.raises(DeviceError, match=f"{name} failed with 999"):
        accelerator.backend.alloc_persistent(100)
    assert accelerator.binding.num_released == 1


def test_a_failed_call_leaves_no_error_behind_for_torch_to_trip_over(accelerator: Harness) -> None:
    accelerator.set_total(MIB)
    with pytest.raises(DeviceError):
        accelerator.backend.alloc_persistent(4 * MIB)
    assert accelerator.counter("last_error") == 0


def test_allocations_fill_whole_pages_so_that_ipc_shares_nothing_else_and_memory_info_follows(
    accelerator: Harness,
) -> None:
    accelerator.set_total(64 * MIB)
    assert accelerator.backend.memory_info() == (64 * MIB, 64 * MIB)
    assert accelerator.backend.device_bytes() == 64 * MIB
    block = accelerator.backend.alloc_persistent(4 * MIB + 1)
    assert (block.nbytes, accelerator.counter("used")) == (4 * MIB + 1, 6 * MIB)
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
    block = accelerator.backend.ipc_open(accelerator.handle())
    assert accelerator.counter("open_flags") == 1
    block.close()


def test_a_refused_handle_says_who_exported_it_and_what_to_check(accelerator: Harness) -> None:
    handle = accelerator.handle()
    name = accelerator.fail("IpcOpenMemHandle", "aclrtIpcMemImportByKey", 201)
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


CLOSINGS = {
    "unmapped": (("IpcCloseMemHandle", "aclrtIpcMemClose"), "closes", lambda h: h.backend.ipc_open(h.handle())),
    "freed": (("Free", "aclrtFree"), "frees", lambda h: h.backend.alloc_persistent(100)),
    "waited for": (("DeviceSynchronize", "aclrtSynchronizeDevice"), "frees", lambda h: h.backend.alloc_persistent(100)),
}


@pytest.mark.parametrize("what", CLOSINGS)
def test_a_block_that_could_not_be_closed_keeps_its_memory_and_is_closed_later_once(
    accelerator: Harness, what: str
) -> None:
    call, counter, make = CLOSINGS[what]
    block = make(accelerator)
    name = accelerator.fail(*call, 999)
    with pytest.raises(DeviceError, match=f"{name} failed with 999"):
        block.close()
    assert accelerator.counter(counter) == 0
    with pytest.raises(DeviceError, match="this persistent block is closed"):
        _ = block.tensor
    for _ in range(2):
        block.close()
    assert accelerator.counter(counter) == 1


def test_a_handle_that_cannot_be_withdrawn_does_not_keep_the_memory(libraries: dict[str, str]) -> None:
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


def test_copies_of_host_memory_are_host_to_host_and_an_empty_one_does_not_reach_the_driver(
    accelerator: Harness,
) -> None:
    accelerator.backend.copy_async(torch.zeros(0), torch.zeros(0))
    assert accelerator.counter("copies") == 0
    accelerator.backend.copy_async(torch.zeros(4), torch.ones(4))
    assert accelerator.counters("copies", "last_kind") == (accelerator.name != "npu", 0), "ACL has no such copies"


def test_use_stream_hands_the_drivers_stream_to_torch(accelerator: Harness) -> None:
    stream: Any = accelerator.backend.new_stream()
    with accelerator.backend.use_stream(stream):
        assert accelerator.binding.entered == [accelerator.binding.address_of(stream.in_torch)]


def test_a_stream_is_used_again_when_it_is_released_and_lives_as_long_as_the_process(accelerator: Harness) -> None:
    first: Any = accelerator.backend.new_stream()
    second: Any = accelerator.backend.new_stream()
    made = first.in_torch, second.in_torch
    assert len({accelerator.binding.address_of(each) for each in made}) == 2
    del second, first
    gc.collect()
    again: Any = accelerator.backend.new_stream()
    assert again.in_torch is made[1], "the one that was given back first"
    assert accelerator.counter("streams_created") == 2


def test_synchronize_waits_for_the_stream_it_is_given_and_refuses_a_foreign_one(accelerator: Harness) -> None:
    accelerator.backend.synchronize(accelerator.backend.new_stream())
    assert accelerator.counters("stream_syncs", "device_syncs") == (1, 0)
    accelerator.backend.synchronize()
    assert accelerator.counters("stream_syncs", "device_syncs") == (1, 1)
    with pytest.raises(DeviceError, match=r"new_stream\(\), got str"):
        accelerator.backend.synchronize("stream 7")


def test_a_helper_thread_works_on_the_chosen_device_which_has_its_vendors_name(accelerator: Harness) -> None:
    """Drivers keep the current device per thread; in a fresh thread it would be 0."""
    accelerator.backend.set_device(1)
    assert accelerator.backend.device_name() == "Fake 1"
    seen = []

    def work() -> None:
        block: Any = accelerator.backend.alloc_persistent(100)
        seen.append((accelerator.counter("device"), block.device_index))
        block.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert seen == [(1, 1)]
    with pytest.raises(DeviceError, match=r"must be in 0\.\.1 \(2 visible to this process\), got 2"):
        accelerator.backend.set_device(2)


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

    handle = accelerator.handle()
    monkeypatch.setattr(accelerator.binding, "tensor_at", refuse)
    makes: list[Callable[[], object]] = [
        lambda: accelerator.backend.alloc_persistent(100), lambda: accelerator.backend.ipc_open(handle)
    ]  # fmt: skip
    for make in makes:
        with pytest.raises(DeviceError, match="torch copied it"):
            make()
    assert accelerator.counters("used", "closes") == (0, 1)


@pytest.mark.parametrize("at", [(64, 64), (65, 64), (64, 97), (3, 5)])
@pytest.mark.parametrize("own_stream", [False, True])
def test_bytes_at_any_address_arrive(accelerator: Harness, at: tuple[int, int], own_stream: bool) -> None:
    backend = accelerator.backend
    blocks = [backend.alloc_persistent(4096) for _ in range(2)]
    dst, src = (block.tensor[start : start + 1001] for block, start in zip(blocks, at, strict=True))
    sent = pattern(1001, 7)
    backend.copy_async(src, sent)
    stream = backend.new_stream() if own_stream else None
    backend.copy_async(dst, src, stream)
    arrived = torch.zeros(1001, dtype=torch.uint8)
    backend.copy_async(arrived, dst, stream)
    backend.synchronize(stream)
    assert torch.equal(arrived, sent)
    for block in blocks:
        block.close()


def test_an_npu_is_used_by_no_thread_before_it_is_initialised_and_a_device_chosen(libraries: dict[str, str]) -> None:
    """As the fake refuses it: the first call of a fresh process is whatever the backend makes it."""
    with closing(Peer()) as peer:
        block = peer.call("alloc", "npu", libraries["npu"], 100)
        handle = peer.export(block)
        code = (
            "import threading, ctypes\n"
            "found = []\n"
            "backend = self._blocks[0][0]\n"
            "worker = threading.Thread(target=lambda: found.append(backend.memory_info()[0] > 0))\n"
            "worker.start(); worker.join()\n"
            "result = (found, ctypes.CDLL(backend._library_path).aclFinalize())"
        )
        assert peer.call("run", code) == ([True], 0)
        with pytest.raises(DeviceError, match="failed with 100001"):
            peer.call("give_up", block)
    assert handle.nbytes == 100


def test_weights_that_are_not_laid_out_in_rows_are_refused_with_the_settings_that_do_it(
    libraries: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NpuBackend, "torch_device", "cpu")  # torch knows the other name once torch_npu is imported
    binding = HostNpuBinding(libraries["npu"])
    backend = make_backend("npu", libraries["npu"], binding)
    model = torch.nn.Linear(4, 4)
    backend.check_layout(model.named_parameters())
    binding.module.formats_[model.weight.data_ptr()] = 29
    for check in (lambda: backend.check_layout(model.named_parameters()),
                  lambda: WeightReceiver(model, backend, worker=0)):  # fmt: skip
        with pytest.raises(DeviceError, match=r"weight \(format 29\).*VLLM_ASCEND_ENABLE_NZ=0.*weight_nz_mode=0"):
            check()


def test_a_library_without_the_calls_is_named(libraries: dict[str, str]) -> None:
    with pytest.raises(DeviceError, match="has no cudaSetDevice"):
        make_backend("cuda", libraries["rocm"]).alloc_persistent(100)
