"""Tensors that leave the device for the host and come back, where learner and engine alternate on one device.

The storages are emptied and filled again in place, so every tensor and view of them stays valid: FSDP2, the optimizer
and the publisher of weight sync need not know, as long as none of them reads while the bytes are on the host.
"""

from __future__ import annotations

import contextlib
import math
import time
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
MAX_LEFT_BYTES = 1 << 29
"""That torch's cache may keep of a device that the learner has left."""


def host_memory(sizes: Sequence[int], *, block_bytes: int, is_pinned: bool) -> list[Tensor]:
    """uint8[size] for every size, in as few blocks as their order allows; a larger one has a separate block."""
    places: list[tuple[int, int]] = []
    used: list[int] = []
    shared: int | None = None
    for size in sizes:
        needed = math.ceil(size / ALIGNMENT) * ALIGNMENT
        block = shared
        if block is None or used[block] + needed > block_bytes:
            block = len(used)
            used.append(0)
            shared = shared if needed > block_bytes else block
        places.append((block, used[block]))
        used[block] += needed
    blocks = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_pinned) for nbytes in used]
    return [blocks[block][offset : offset + size] for (block, offset), size in zip(places, sizes, strict=True)]


def take_block(backend: Backend, total_bytes: int) -> None:
    """Have torch cache in one block what is missing from so many bytes of the device. Raises OutOfMemoryError."""
    device = backend.torch_device
    missing = total_bytes - torch.get_device_module(device).memory_allocated()
    torch.empty(max(0, missing), dtype=torch.uint8, device=device)


class CpuOffload:
    """The storages of some tensors, on the device or on the host. Not thread-safe. Host memory is allocated at the
    first `to_host` and kept, page-locked where that is faster."""

    def __init__(self, tensors: Iterable[Tensor], *, backend: Backend, block_bytes: int = BLOCK_BYTES) -> None:
        """Tensors (or shards of DTensors) on other devices than the backend's stay: they are offloaded already."""
        self._backend = backend
        local = [local_tensor(tensor) for tensor in tensors]
        here = [tensor.untyped_storage() for tensor in local if tensor.device.type == backend.torch_device]
        self._storages: dict[int, UntypedStorage] = {storage._cdata: storage for storage in here if storage.nbytes()}
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        self._block_bytes = block_bytes
        self._host: dict[int, Tensor] = {}
        self._peak_bytes = 0
        """Of the last turn."""
        self._takes_one_block = backend.torch_device != "cpu"
        self.is_on_host = False

    @property
    def nbytes(self) -> int:
        """What moves."""
        return sum(self._sizes.values())

    def to_host(self) -> None:
        """Copy everything to the host and free the device memory. Idempotent."""
        if self.is_on_host:
            return
        if not self._host:
            sizes, is_pinned = list(self._sizes.values()), self._backend.torch_device != "cpu"
            memory = host_memory(sizes, block_bytes=self._block_bytes, is_pinned=is_pinned)
            self._host = dict(zip(self._sizes, memory, strict=True))
        self._backend.synchronize()  # a stream may still compute on them
        for key, storage in self._storages.items():
            self._host[key].copy_(_bytes_of(storage), non_blocking=True)
        self._backend.synchronize()
        for storage in self._storages.values():
            storage.resize_(0)
        self._backend.release_cached()
        self.is_on_host = True
        if self._takes_one_block:
            memory = torch.get_device_module(self._backend.torch_device)
            self._peak_bytes = memory.max_memory_allocated()
            # Something that outlived its step holds the block, and the engine lacks all of it.
            self._takes_one_block = memory.memory_reserved() - memory.memory_allocated() < MAX_LEFT_BYTES

    def to_device(self, *, patience_s: float = PATIENCE_S) -> None:
        """Allocate the device memory again and copy everything back. Idempotent. Raises LearnerError if the device
        still has too little memory after `patience_s`, in which a process that was killed may free its own."""
        if not self.is_on_host:
            return
        give_up = time.monotonic() + patience_s
        if self._takes_one_block:
            self._take_one_block()
        for key, storage in self._storages.items():
            while not self._take(storage, self._sizes[key]):
                if time.monotonic() >= give_up:
                    free, total = self._backend.memory_info()
                    raise LearnerError(
                        f"the learner needs {self.nbytes / 2**30:.2f} GiB of its device and finds {free / 2**30:.2f} "
                        f"of {total / 2**30:.2f} GiB free; an engine did not free its memory, or the arena, "
                        "contexts and captured graphs leave too little"
                    )
                time.sleep(RETRY_S)
            _bytes_of(storage).copy_(self._host[key], non_blocking=True)
        self._backend.synchronize()
        self.is_on_host = False

    def _take_one_block(self) -> None:
        """Have torch cache what the learner took at most in its last turn, in one allocation: hundreds of small ones,
        for what comes back and in the next forward, take longer than the copy."""
        with contextlib.suppress(torch.OutOfMemoryError):  # then it takes pieces, as far as there is room
            take_block(self._backend, self._peak_bytes)
        torch.get_device_module(self._backend.torch_device).reset_peak_memory_stats()

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
        whole = self._host[key].view(local.dtype)
        # An offset counts from the beginning of the memory, which here is that of a block.
        offset = whole.storage_offset() + local.storage_offset()
        return sharded_like(tensor, whole.as_strided(local.size(), local.stride(), offset))


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8[n] over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # pyright: ignore[reportArgumentType]
