"""Tensors that leave the device for the host and come back, where learner and engine take turns on one device.

The storages are emptied and filled again in place. Whoever holds a tensor, or a view of it, keeps it: FSDP2, the
optimizer and the publisher of weight sync notice nothing, as long as nobody reads while the bytes are on the host.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.errors import LearnerError
from trainer.learner.fsdp import local_tensor, sharded_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, UntypedStorage

    from weight_sync.device.base import Backend

BLOCK_BYTES = 1 << 30
"""Host memory is taken in blocks of this size: page-locking rounds every piece up to a power of two."""
ALIGNMENT = 64
PATIENCE_S, RETRY_S = 60.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a storage lies on the host."""

    block: int
    offset: int


def place(sizes: Sequence[int], *, block_bytes: int) -> tuple[list[Place], list[int]]:
    """Lay storages of these sizes, in bytes, into as few blocks as their order allows; none is cut.

    Returns:
        The place of each, and the sizes of the blocks; one that is larger than a block has one of its own.
    """
    places: list[Place] = []
    used: list[int] = []
    current: int | None = None
    for size in sizes:
        needed = math.ceil(size / ALIGNMENT) * ALIGNMENT
        if needed > block_bytes:
            places.append(Place(block=len(used), offset=0))
            used.append(needed)
            continue
        if current is None or used[current] + needed > block_bytes:
            current = len(used)
            used.append(0)
        places.append(Place(block=current, offset=used[current]))
        used[current] += needed
    return places, used


class CpuOffload:
    """The storages behind some tensors, on the device or on the host. Not thread-safe.

    Host memory is taken at the first `to_host` and kept: page-locked, where the device can copy from it faster.
    """

    def __init__(self, tensors: Iterable[Tensor], *, backend: Backend, block_bytes: int = BLOCK_BYTES) -> None:
        """Tensors (or shards of DTensors) on other devices than the backend's are left alone: they are offloaded
        already."""
        self._backend = backend
        local = [local_tensor(tensor) for tensor in tensors]
        here = [tensor.untyped_storage() for tensor in local if tensor.device.type == backend.torch_device]
        self._storages: dict[int, UntypedStorage] = {storage._cdata: storage for storage in here if storage.nbytes()}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        places, self._block_sizes = place(list(self._sizes.values()), block_bytes=block_bytes)
        self._places = dict(zip(self._sizes, places, strict=True))
        self._blocks: list[Tensor] = []
        self.is_on_host = False

    @property
    def nbytes(self) -> int:
        """What moves."""
        return sum(self._sizes.values())

    def to_host(self) -> None:
        """Copy everything to the host and give the device memory back. Does nothing if it is there."""
        if self.is_on_host:
            return
        if not self._blocks:
            pinned = self._backend.torch_device != "cpu"
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in self._block_sizes]
        self._backend.synchronize()  # whoever still computes on them, on whatever stream
        for key, storage in self._storages.items():
            self._host(key).copy_(_bytes_of(storage), non_blocking=True)
        self._backend.synchronize()
        for storage in self._storages.values():
            storage.resize_(0)
        self._backend.release_cached()
        self.is_on_host = True

    def to_device(self, *, patience_s: float = PATIENCE_S) -> None:
        """Take the device memory again and copy everything back. Does nothing if it is there.

        Raises:
            LearnerError: the device still has too little memory after `patience_s`, in which a process that was killed
                may give its own back.
        """
        if not self.is_on_host:
            return
        give_up = time.monotonic() + patience_s
        for key, storage in self._storages.items():
            while not self._take(storage, self._sizes[key]):
                if time.monotonic() >= give_up:
                    free, total = self._backend.memory_info()
                    raise LearnerError(
                        f"the learner needs {self.nbytes / 2**30:.2f} GiB of its device and finds {free / 2**30:.2f} "
                        f"of {total / 2**30:.2f} GiB free; an engine did not give its memory back, or the arena, "
                        "contexts and captured graphs leave too little"
                    )
                time.sleep(RETRY_S)
            _bytes_of(storage).copy_(self._host(key), non_blocking=True)
        self._backend.synchronize()
        self.is_on_host = False

    def _take(self, storage: UntypedStorage, nbytes: int) -> bool:
        try:
            storage.resize_(nbytes)
        except torch.OutOfMemoryError:
            return False
        return True

    def require_onloaded(self, what: str) -> None:
        """Raises LearnerError if the bytes are on the host while `what` needs them."""
        if self.is_on_host:
            raise LearnerError(
                f"{what} needs the learner's memory on the device, and it is offloaded; call onload first"
            )

    def host_view(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or while it is on the host one of the same shape over its bytes there, read-only."""
        local = local_tensor(tensor)
        key = local.untyped_storage()._cdata
        if not self.is_on_host or key not in self._storages:
            return tensor
        whole = self._host(key).view(local.dtype)
        # An offset counts from the beginning of the memory, which here is that of a block.
        offset = whole.storage_offset() + local.storage_offset()
        return sharded_like(tensor, whole.as_strided(local.size(), local.stride(), offset))

    def _host(self, key: int) -> Tensor:
        """uint8[n]: the host's bytes of a storage."""
        where = self._places[key]
        return self._blocks[where.block][where.offset : where.offset + self._sizes[key]]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8[n] over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
