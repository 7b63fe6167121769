"""torch_npu's queue on the host: nothing that the backend promises may be left in it. `NpuBinding` is the real one."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from tests.fakes.drivers.host_npu import HostNpuBinding
from weight_sync.device import DeviceError, fused
from weight_sync.device.npu import NpuBackend
from weight_sync.publish.packer import Packer, PackStep

if TYPE_CHECKING:
    from weight_sync.device.base import Backend


@pytest.fixture
def library(libraries: dict[str, str]) -> ctypes.CDLL:
    loaded = ctypes.CDLL(libraries["npu"])
    loaded.fake_reset()
    return loaded


@pytest.fixture
def binding(library: ctypes.CDLL) -> HostNpuBinding:
    return HostNpuBinding(library._name)


@pytest.fixture
def backend(library: ctypes.CDLL, binding: HostNpuBinding) -> Backend:
    return NpuBackend(library=library._name, binding=binding)


def test_what_is_packed_is_in_the_slot_when_pack_returns(
    backend: Backend, binding: HostNpuBinding, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_all = fused.copy_all
    monkeypatch.setattr(fused, "copy_all", lambda *lists: binding.queue.put(partial(copy_all, *lists)))
    slot, shard = torch.zeros(8), torch.ones(8)
    packer = Packer(backend, [PackStep("w", (slice(0, 8),), (slot,))], num_slots=1)
    packer.pack(0, {"w": shard})
    assert slot.tolist() == [1.0] * 8
    shard.fill_(7)
    binding.queue.drain()
    assert slot.tolist() == [1.0] * 8, "a version that changes after it was packed"


def test_a_copy_on_a_stream_comes_after_what_torch_was_asked_to_do_there(
    backend: Backend, binding: HostNpuBinding
) -> None:
    source, target = torch.zeros(8), torch.zeros(8)
    stream = backend.new_stream()
    with backend.use_stream(stream):
        binding.queue.put(lambda: source.fill_(3))
    backend.copy_async(target, source, stream)
    assert target.tolist() == [3.0] * 8


def test_a_copy_on_a_stream_does_not_wait_for_what_torch_was_asked_to_do_on_others(
    backend: Backend, binding: HostNpuBinding
) -> None:
    """The engine's next step, say, of which there is always more to launch, while a version arrives in many pieces."""
    stream, done = backend.new_stream(), list[bool]()
    binding.queue.put(lambda: done.append(True))
    for _ in range(3):
        backend.copy_async(torch.zeros(8), torch.ones(8), stream)
    assert done == []


def test_waiting_for_a_stream_waits_for_what_torch_was_asked_to_do_there(
    backend: Backend, binding: HostNpuBinding
) -> None:
    stream, done = backend.new_stream(), list[bool]()
    with backend.use_stream(stream), pytest.raises(ValueError, match="half-way"):
        binding.queue.put(lambda: done.append(True))
        raise ValueError("half-way")
    assert done == [True]
    binding.queue.put(lambda: done.append(True))
    backend.synchronize(stream)
    assert done == [True, True]


@pytest.mark.parametrize("which", ["device", "current stream"])
def test_waiting_waits_for_what_is_in_the_queue_too(backend: Backend, binding: HostNpuBinding, which: str) -> None:
    done: list[bool] = []
    binding.queue.put(lambda: done.append(True))
    if which == "device":
        backend.synchronize()
    else:
        backend.synchronize_current()
    assert done == [True]


def test_memory_is_not_freed_below_an_operator_in_the_queue(
    backend: Backend, binding: HostNpuBinding, library: ctypes.CDLL
) -> None:
    block = backend.alloc_persistent(100)
    frees: list[int] = []
    binding.queue.put(lambda: frees.append(library.fake_counter(b"frees")))
    block.close()
    assert frees == [0]


def test_a_queue_that_cannot_be_launched_is_an_error_and_not_the_default_stream(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu gives a null pointer then, which the driver would take for its default stream."""
    stream = backend.new_stream()
    monkeypatch.setattr(stream.in_torch, "_address", 0)  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(DeviceError, match="could not launch"):
        backend.synchronize(stream)
