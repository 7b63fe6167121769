"""torch.cuda's view of raw memory, on a torch that behaves as with two devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weight_sync.device import torch_binding as binding
from weight_sync.device.torch_binding import TorchBinding

POINTER = 0x7F00
NBYTES = 16 << 30


class Tensor:
    def __init__(self, pointer: int) -> None:
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer

    def set_(self, storage: tuple[int, int]) -> Tensor:
        assert storage[1] == NBYTES
        return Tensor(storage[0])


class TwoDevices:
    """torch, where the memory at POINTER lies on device `home`: asked for it on another one, it makes a copy."""

    uint8 = torch.uint8
    device = torch.device
    __version__ = torch.__version__
    _C = SimpleNamespace(_construct_storage_from_data_pointer=lambda pointer, device, nbytes: (pointer, nbytes))

    def __init__(self, home: int) -> None:
        self.home = home
        self.copied_bytes = 0

    def as_tensor(self, data: Any, *, device: torch.device) -> Tensor:
        described = data.__cuda_array_interface__
        if device.index == self.home:
            return Tensor(described["data"][0])
        self.copied_bytes += described["shape"][0]
        return Tensor(POINTER + 1)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return Tensor(0)


@pytest.mark.parametrize(("home", "copied_bytes"), [(0, 0), (1, 1)])
def test_memory_of_another_device_is_viewed_without_a_copy_of_it(
    monkeypatch: pytest.MonkeyPatch, home: int, copied_bytes: int
) -> None:
    """One byte is what it costs to ask."""
    fake = TwoDevices(home)
    monkeypatch.setattr(binding, "torch", fake)
    assert TorchBinding("cuda").tensor_at(POINTER, NBYTES, 0).data_ptr() == POINTER
    assert fake.copied_bytes == copied_bytes
