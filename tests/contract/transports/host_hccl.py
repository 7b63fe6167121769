"""A fake of torch_npu's group on host memory, for machines without NPUs; with the fake libascendcl it makes a kind.

What runs above it is the real thing: `NpuBackend`, its `Offer` and `PairReceiverEnd`, and the group that they share.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.contract.transports.world import HostWork, Kind
from weight_sync.device.collectives import GlooGroup

if TYPE_CHECKING:
    import torch

    from weight_sync.device.base import Backend

MODULE = "torch_npu._C._distributed_c10d"


class HostHccl:
    """The interface of torch_npu's ProcessGroupHCCL, its bytes moved by gloo.

    Like the real one it connects at the first message, starts each by itself, completes in the background, and reports
    an aborted transfer as complete.
    """

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: HostHccl.Options) -> None:
        assert os.environ["HCCL_BLOCKING_WAIT"] == "1", "a watchdog would end the process"
        assert size == 2
        self._store, self._rank = store, rank
        self._timeout_s = options._timeout.total_seconds()
        self._gloo: GlooGroup | None = None
        self.is_aborted = False

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HostWork:
        assert peer == 1 - self._rank
        return HostWork(self, [self._connected().send(tensors)])

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> HostWork:
        assert peer == 1 - self._rank
        return HostWork(self, [self._connected().receive(tensors)])

    def abort_hccl_comm(self, reason: str) -> None:
        assert reason
        self.is_aborted = True
        if self._gloo is not None:
            self._gloo.abort()

    def _connected(self) -> GlooGroup:
        if self._gloo is None:
            self._gloo = GlooGroup(self._store, rank=self._rank, timeout_s=self._timeout_s)
        return self._gloo


@dataclass(frozen=True)
class HostHcclKind(Kind):
    """`Kind` whose processes find the fake where torch_npu would be."""

    def make_backend(self, *, device: int) -> Backend:
        for name in ("torch_npu", "torch_npu._C", MODULE):
            module: Any = types.ModuleType(name)
            # Without a spec, torch's own search for extensions raises.
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            sys.modules[name] = module
        sys.modules[MODULE].ProcessGroupHCCL = HostHccl  # type: ignore[attr-defined]
        return super().make_backend(device=device)
