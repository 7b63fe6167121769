"""The pull ceiling of this machine: the same bytes between the same devices, with nothing else around them.

Every learner process offers one plain persistent block. All engine workers start at the same instant and copy from each
learner what a pull takes from it, 64 MiB at a time, each starting at another learner. No plan, no lease, no digest.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from weight_sync.receive.staging import staggered

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from weight_sync.device.base import Backend, IpcHandle, PersistentBlock
    from weight_sync.plan.types import Manifest

PIECE_BYTES = 64 << 20
HEAD_START_S = 0.02
"""Between the order to copy and the instant at which all begin: enough for the order to reach everyone."""


class Volumes(NamedTuple):
    """How much each worker index takes from each learner rank, in bytes. Pure; see `volumes_of`."""

    of_worker: Mapping[int, Mapping[int, int]]

    def block_bytes(self, rank: int) -> int:
        """Size of the block that serves all workers: the most that any of them takes."""
        return max((taken.get(rank, 0) for taken in self.of_worker.values()), default=0)


def volumes_of(manifest: Manifest) -> Volumes:
    of_worker: dict[int, dict[int, int]] = {}
    for plan in manifest.pull:
        taken = of_worker.setdefault(plan.worker, {})
        for run in plan.runs:
            taken[run.src_rank] = taken.get(run.src_rank, 0) + run.nbytes
    return Volumes(of_worker)


class CeilingSource:
    """A learner's block."""

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self._block = backend.alloc_persistent(nbytes)
        self._block.tensor.fill_(1)
        backend.synchronize()
        self.handle = backend.ipc_export(self._block)

    def close(self) -> None:
        self._block.close()


class CeilingSink:
    """A worker's block, and the learners' blocks mapped."""

    def __init__(
        self, backend: Backend, handles: Mapping[int, IpcHandle], taken: Mapping[int, int], *, stagger: int
    ) -> None:
        self._backend = backend
        self._target: PersistentBlock = backend.alloc_persistent(sum(taken.values()))
        self._target.tensor.fill_(0)
        self._blocks = {rank: backend.ipc_open(handles[rank]) for rank in taken}
        self._stream = backend.new_stream()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        offset = 0
        for rank in staggered(sorted(taken), stagger):
            for start in range(0, taken[rank], PIECE_BYTES):
                size = min(PIECE_BYTES, taken[rank] - start)
                source = self._blocks[rank].tensor[start : start + size]
                self._copies.append((self._target.tensor[offset : offset + size], source))
                offset += size
        backend.synchronize()

    def copy(self, start_at: float) -> float:
        """Wait for the instant `start_at` (monotonic clock), copy everything once, and say how many seconds it took."""
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
