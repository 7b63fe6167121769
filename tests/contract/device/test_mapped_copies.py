"""An interrupted pull leaves no copy running: the next pull writes to the same places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from weight_sync.device import DeviceError
from weight_sync.transports.base import Piece
from weight_sync.transports.inbound import Landing, Message
from weight_sync.transports.mapped import MappedReceiverEnd
from weight_sync.wire import ArenaHandle

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness

KIB = 1024


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
    theirs: Any = accelerator.call("alloc", nbytes=KIB)
    arena = ArenaHandle(
        transport="ipc",
        handle=accelerator.peer.export(theirs),
        slot_bytes=KIB,
        slot_stride=KIB,
        num_slots=1,
        host="",
        device="",
    )
    end = MappedReceiverEnd(backend, backend, {0: arena})
    under_way = refuse_copy(refused, backend, monkeypatch)
    target = torch.zeros(KIB, dtype=torch.uint8)
    with pytest.raises(DeviceError, match="does not copy this"):
        end.pull(0, 0, [Piece(at, target[at : at + 256]) for at in range(0, KIB, 256)], check=lambda: None)
    assert under_way == []
    end.close()
    accelerator.peer.call("close", block=theirs)


def test_what_came_through_host_memory_and_was_refused_half_way_is_waited_for(
    accelerator: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    landing = Landing(accelerator.backend, staged=True)
    batch = [Message(0, torch.zeros(8, dtype=torch.uint8)), Message(8, torch.zeros(8, dtype=torch.uint8))]
    targets = landing.targets(batch)
    under_way = refuse_copy(1, accelerator.backend, monkeypatch)
    with pytest.raises(DeviceError, match="does not copy this"):
        landing.deliver(batch, targets)
    assert under_way == []
    landing.close()
