"""Sealing beside training: on which stream, and what is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from weight_sync.device.cpu import CpuBackend
from weight_sync.transports.slots import DeviceSlots, HostSlots

if TYPE_CHECKING:
    from weight_sync.transports.slots import Slots


class Accelerator(CpuBackend):
    """Host memory under another name, which writes down its streams."""

    name = "accelerator"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def new_stream(self) -> Any:
        return "own"

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None:
        self.calls.append(("copy", stream))
        super().copy_async(dst, src)

    def synchronize(self, stream: Any | None = None) -> None:
        self.calls.append(("wait", stream))

    def synchronize_current(self) -> None:
        raise AssertionError("the learner's kernels are queued there")


@pytest.mark.parametrize(("kind", "calls"), [(HostSlots, [("copy", "own"), ("wait", "own")]), (DeviceSlots, [])])
def test_a_slot_is_sealed_past_the_learners_compute(kind: type[Slots], calls: list[tuple[str, str]]) -> None:
    backend = Accelerator()
    slots = kind(backend, slot_bytes=8, num_slots=2)
    try:
        slots.packable(1).copy_(torch.arange(8, dtype=torch.uint8))
        slots.seal(1)
        assert slots.readable(1).tolist() == list(range(8))
        assert backend.calls == calls
    finally:
        slots.close()
