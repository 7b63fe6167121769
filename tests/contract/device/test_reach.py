"""A receiver whose device is full reaches its learner another way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from weight_sync.errors import TransportUnusable
from weight_sync.transports.reach import Reach
from weight_sync.wire import ArenaHandle

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness
    from weight_sync.device.base import IpcHandle

NO_LINE: Any = None  # only transports that send ask for one


def arena(transport: str, handle: IpcHandle | None) -> ArenaHandle:
    return ArenaHandle(transport=transport, handle=handle, slot_bytes=100, slot_stride=100, num_slots=1)


def test_a_block_that_torch_has_no_memory_to_view_is_read_another_way(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pointer: int, nbytes: int, index: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 30.50 GiB")

    theirs = [
        accelerator.call("alloc", nbytes=100),
        accelerator.peer.call("alloc", name="cpu", library=None, nbytes=100),
    ]
    handles = [accelerator.peer.export(cast("int", each)) for each in theirs]
    monkeypatch.setattr(accelerator.binding, "tensor_at", refuse)
    reach = Reach(
        accelerator.backend,
        0,
        [arena("ipc", handles[0]), arena("shm", handles[1])],
        line=NO_LINE,
        same_node=True,
        host=None,
        probe=lambda end: None,
    )
    assert reach.transport == "shm"
    assert "ipc" in reach.reasons[0]
    assert "Tried to allocate 30.50 GiB" in reach.reasons[0]
    assert accelerator.counter("closes") == 1, "the block that was mapped for nothing"
    reach.close()
    for each in theirs:
        accelerator.peer.call("close", block=each)


def test_containers_that_count_as_two_nodes_are_told_what_makes_them_one(accelerator: Harness) -> None:
    with pytest.raises(TransportUnusable, match=r"another node.*--ipc=host --pid=host\) and run as the same user"):
        Reach(
            accelerator.backend,
            0,
            [arena("ipc", None)],
            line=NO_LINE,
            same_node=False,
            host=None,
            probe=lambda end: None,
        )
