"""The pull ceiling of this machine: the same bytes between the same devices, with nothing else around them.

Every learner process offers one plain persistent block. All engine workers start at the same instant and copy from each
learner what a pull takes from it, 64 MiB at a time, each starting at another learner. No plan, no lease, no digest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend, IpcHandle
    from weight_sync.plan.agreement import SharedPlan

PIECE_BYTES = 64 << 20
HEAD_START_S = 0.02
"""Between the order to copy and the instant at which all begin: enough for the order to reach everyone."""


def volumes_of(plan: SharedPlan) -> dict[int, Mapping[int, int]]:
    """Worker index -> learner rank -> bytes."""
    return {worker: plan.pull(worker).bytes_by_source for worker in plan.sources}


class Ceiling:
    """A worker's block, and the learners' blocks mapped. The `index`-th worker begins with the `index`-th learner."""

    def __init__(
        self, backend: Backend, handles: Mapping[int, IpcHandle], taken: Mapping[int, int], *, index: int
    ) -> None:
        self._backend = backend
        self._target = backend.alloc_persistent(sum(taken.values()))
        self._target.tensor.fill_(0)
        self._blocks = {rank: backend.ipc_open(handles[rank]) for rank in taken}
        self._stream = backend.new_stream()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset, ranks = 0, sorted(taken)
        first = index % max(1, len(ranks))
        for rank in (*ranks[first:], *ranks[:first]):
            for start in range(0, taken[rank], PIECE_BYTES):
                size = min(PIECE_BYTES, taken[rank] - start)
                source = self._blocks[rank].tensor[start : start + size]
                self._copies.append((self._target.tensor[offset : offset + size], source))
                offset += size
        backend.synchronize()

    def copy(self, start_at: float) -> float:
        """Copy everything once from the instant `start_at` (monotonic clock) on. Returns seconds."""
        time.sleep(max(0.0, start_at - time.monotonic()))
        started = time.monotonic()
        for target, source in self._copies:
            self._backend.copy_async(target, source, self._stream)
        self._backend.synchronize(self._stream)
        return time.monotonic() - started

    def close(self) -> None:
        self._copies.clear()
        for block in self._blocks.values():
            block.close()
        self._target.close()
