"""Shards that live elsewhere than the slots: what is copied, and what is left behind."""

from __future__ import annotations

import gc
import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.device.cpu import CpuBackend
from weight_sync.publish import packer as pack
from weight_sync.publish.packer import Packer, PackStep, in_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(4, 400))
def test_parts_cover_a_tensor_once_and_are_no_larger_than_they_may(shape: list[int], limit: int) -> None:
    source = torch.arange(prod(shape), dtype=torch.float32).view(shape)
    target = torch.full_like(source, -1)
    for to, part in in_parts(target, source, limit_bytes=limit):
        assert part.nbytes <= limit
        assert (to == -1).all(), "it was there already"
        to.copy_(part)
    assert torch.equal(target, source)


class Arrivals(TorchDispatchMode):
    """Bytes of everything that is brought to the device of the slots."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(found.nbytes)
        return found


def test_shards_on_the_host_pass_the_device_in_parts_and_nothing_of_them_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The meta device stands in for an accelerator: it has no bytes, but it is another one."""
    monkeypatch.setattr(pack, "PIECE_BYTES", 64)
    backend = CpuBackend()
    copies: list[Any] = []
    monkeypatch.setattr(pack, "BatchCopy", lambda *args: copies.append(args))
    views = tuple(torch.empty(10, 4, dtype=torch.bfloat16, device="meta") for _ in range(2))
    steps = [PackStep("w", (slice(0, 10), slice(0, 4)), views)]
    packer = Packer(backend, steps, num_slots=2)
    shard = torch.ones(10, 4)
    with Arrivals() as arrivals:
        packer.pack(0, {"w": shard})
        packer.pack(1, {"w": shard})
    assert arrivals.sizes == [64, 64, 32] * 2
    assert copies == [], "batch copies keep what they read alive"
    left = weakref.ref(shard)
    del shard
    gc.collect()
    assert left() is None
