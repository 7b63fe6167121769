"""Fakes of the vendors' groups on host memory, for machines without their devices; their bytes are moved by gloo.

Like the real ones they connect at the first transfer, complete in the background, and report an aborted transfer as
complete. What runs above them is the real thing.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from weight_sync.device import collectives

if TYPE_CHECKING:
    import torch

HCCL_MODULE = "torch_npu._C._distributed_c10d"


class _HostGroup:
    class Options:
        _timeout: Any = None

    blocking_wait = ""
    """Variable without which a watchdog would end the process."""

    def __init__(self, store: Any, rank: int, size: int, options: _HostGroup.Options) -> None:
        assert os.environ[self.blocking_wait] == "1", "a watchdog would end the process"
        assert size == 2
        self._store, self._rank = store, rank
        self._timeout_s = options._timeout.total_seconds()
        self._gloo: collectives.GlooGroup | None = None
        self.is_aborted = False

    def _connected(self) -> collectives.GlooGroup:
        if self._gloo is None:
            self._gloo = collectives.GlooGroup(self._store, rank=self._rank, timeout_s=self._timeout_s)
        return self._gloo

    def abort(self) -> None:
        self.is_aborted = True
        if self._gloo is not None:
            self._gloo.abort()


class HostNccl(_HostGroup):
    """torch's ProcessGroupNCCL, which starts a batch when coalescing ends."""

    blocking_wait = "TORCH_NCCL_BLOCKING_WAIT"
    _batch: list[tuple[bool, torch.Tensor]] | None = None

    def _start_coalescing(self) -> None:
        assert self._batch is None
        self._batch = []

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((True, *tensors))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        assert self._batch is not None
        self._batch.append((False, *tensors))

    def _end_coalescing(self) -> HostWork:
        batch, self._batch = self._batch, None
        assert batch
        gloo = self._connected()
        return HostWork(self, [gloo.send([t]) if is_send else gloo.receive([t]) for is_send, t in batch])


class HostHccl(_HostGroup):
    """torch_npu's ProcessGroupHCCL, which starts each transfer by itself."""

    blocking_wait = "HCCL_BLOCKING_WAIT"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HostWork:
        assert peer == 1 - self._rank
        return HostWork(self, [self._connected().send(tensors)])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HostWork:
        assert peer == 1 - self._rank
        return HostWork(self, [self._connected().receive(tensors)])

    def abort_hccl_comm(self, reason: str) -> None:
        assert reason
        self.abort()


def put_hccl_in_place() -> None:
    """Where torch_npu would be."""
    for name in ("torch_npu", "torch_npu._C", HCCL_MODULE):
        module: Any = types.ModuleType(name)
        # Without a spec, torch's own search for extensions raises.
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules[HCCL_MODULE].ProcessGroupHCCL = HostHccl  # type: ignore[attr-defined]


class HostWork:
    """What a vendor's group returns for a transfer."""

    def __init__(self, group: _HostGroup, transfers: list[collectives.GlooTransfer]) -> None:
        self._group, self._transfers = group, transfers
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for transfer in self._transfers:
                transfer.wait(3600)
        except collectives.LinkBroken as error:
            self._error = None if self._group.is_aborted else RuntimeError(str(error))

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        assert self.is_completed(), "a wait on a device transfer cannot be woken"
        if self._error is not None:
            raise self._error
