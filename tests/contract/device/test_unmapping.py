"""Importers unmap before the exporter frees: what the drivers ask for, and what a receiver does when one call fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from weight_sync.device import DeviceError
from weight_sync.transports.mapped import MappedReceiverEnd
from weight_sync.wire import ArenaHandle

if TYPE_CHECKING:
    from tests.contract.device.conftest import Harness

KIB = 1024


def test_what_another_process_has_mapped_is_not_freed_before_it_unmaps(accelerator: Harness) -> None:
    block = accelerator.backend.alloc_persistent(KIB)
    theirs = accelerator.open_in_peer(accelerator.backend.ipc_export(block))
    with pytest.raises(DeviceError):
        block.close()
    assert accelerator.counter("frees") == accelerator.counter("unexports") == 0
    accelerator.peer.call("close", block=theirs)
    block.close()
    assert accelerator.counter("frees") == 1


def test_what_could_not_be_freed_is_freed_before_the_next_block_is_allocated(accelerator: Harness) -> None:
    """The owner drops a block when it closes it, so no one else can try again."""
    block = accelerator.backend.alloc_persistent(KIB)
    theirs = accelerator.open_in_peer(accelerator.backend.ipc_export(block))
    with pytest.raises(DeviceError):
        block.close()
    del block
    accelerator.backend.alloc_persistent(KIB).close()
    assert accelerator.counter("frees") == 1, "it is mapped still"
    accelerator.peer.call("close", block=theirs)
    following = accelerator.backend.alloc_persistent(KIB)
    assert accelerator.counter("frees") == 2
    following.close()
    assert (accelerator.counter("frees"), accelerator.counter("used")) == (3, 0)


def test_what_could_not_be_unmapped_is_unmapped_before_the_next_block_is_opened(accelerator: Harness) -> None:
    first, second = [accelerator.peer.export(accelerator.call("alloc", nbytes=KIB)) for _ in range(2)]
    accelerator.fail(accelerator.function("IpcCloseMemHandle", "aclrtIpcMemClose"), 507899, times=1)
    with pytest.raises(DeviceError, match="507899"):
        accelerator.backend.ipc_open(first).close()
    opened = accelerator.backend.ipc_open(second)
    assert accelerator.counter("closes") == 1
    opened.close()


def test_a_mapping_that_cannot_be_closed_keeps_no_other_open(accelerator: Harness) -> None:
    blocks: list[Any] = [accelerator.call("alloc", nbytes=KIB) for _ in range(3)]
    arenas = {
        rank: ArenaHandle(
            transport="ipc",
            handle=accelerator.peer.export(block),
            slot_bytes=KIB,
            slot_stride=KIB,
            num_slots=1,
            host="",
            device="",
        )
        for rank, block in enumerate(blocks)
    }
    end = MappedReceiverEnd(accelerator.backend, accelerator.backend, arenas)
    accelerator.fail(accelerator.function("IpcCloseMemHandle", "aclrtIpcMemClose"), 507899, times=1)
    with pytest.raises(DeviceError, match="507899"):
        end.close()
    assert accelerator.counter("closes") == 2
    end.close()
    assert accelerator.counter("closes") == 3
    for block in blocks:
        accelerator.peer.call("close", block=block)
