"""Digests and copies of many tensors at once: by torch, or in one kernel launch each where there are kernels.

    views, pairs ─> tables of addresses (numpy, pure) ─> device ─> kernels (Triton) ─> one copy back, one fold

The tables are built once. `FusedKernels.open` compiles the kernels and compares their results with torch's, so where
Triton is missing or gets them wrong, torch does the work.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from weight_sync.device.digest import BLOCK_BYTES, BLOCK_WORDS, digest_bytes, weights_on
from weight_sync.device.tables import MoveKind, Operand, Tiles, collapse, digest_table, fold, tiles_of
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from weight_sync.device.base import Backend

log = logging.getLogger(__name__)

_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Casts among these are rounded once, so there is one right result."""
_HARD_TO_ROUND = (1 / 3, -1e-40, 65520.0, -torch.inf, *(1 + step * 2.0**-bits for bits in (8, 11) for step in (1, 3)))
"""Ties between neighbours in 16 bits, values that overflow, and ones that are easily flushed to zero."""

# Shapes of the launches, chosen for 16 words in flight per thread. WARPS go with the line they stand on.
_BLOCK_ROWS, _BLOCK_COLUMNS, _BLOCK_WARPS = 4, 512, 4
_ANY_COLUMNS, _ANY_WARPS = 1024, 4
_MOVE_VECTORS, _MOVE_WARPS = 1024, 8


class FusedKernels:
    """The kernels as they work on one device. Made by `open`."""

    def __init__(self, backend: Backend, device: torch.device, module: ModuleType) -> None:
        self.backend = backend
        self.device = device
        self._module = module
        self._proven: dict[MoveKind, bool] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, backend: Backend, device: torch.device) -> FusedKernels | str:
        """The kernels for `device` (current in this thread), tried out; or why there are none."""
        try:
            from weight_sync.device import kernels
        except ImportError as error:
            return f"Triton cannot be imported ({error})"
        found = cls(backend, device, kernels)
        try:
            is_right = found._digests_right() and found._moves_as_torch(MoveKind("int64", "int64", 2))
        except Exception as error:  # noqa: BLE001 - compilers and drivers fail in ways of their own; torch is always there
            return f"they do not compile or run on {device} ({type(error).__name__}: {error})"
        return found if is_right else f"their results on {device} differ from torch's"

    def digest_whole(self, blocks: Sequence[torch.Tensor], mixed: torch.Tensor) -> None:
        """Launch on the current stream: every block's result into int64 `mixed`, at its slot. For `DigestTable.whole`,
        whose rows are `blocks`."""
        addresses, _, salts, slots = blocks
        if len(slots):
            self._module.digest_whole_blocks[(len(slots) // _BLOCK_ROWS,)](
                addresses, salts, slots, weights_on(str(self.device)), mixed,
                WORDS=BLOCK_WORDS, ROWS=_BLOCK_ROWS, COLUMNS=_BLOCK_COLUMNS, num_warps=_BLOCK_WARPS,
            )  # fmt: skip

    def digest_other(self, blocks: Sequence[torch.Tensor], mixed: torch.Tensor) -> None:
        """As `digest_whole`, for `DigestTable.other`."""
        if len(blocks[0]):
            self._module.digest_any_block[(len(blocks[0]),)](
                *blocks, weights_on(str(self.device)), mixed, COLUMNS=_ANY_COLUMNS, num_warps=_ANY_WARPS
            )

    def move(self, kind: MoveKind, table: torch.Tensor) -> None:
        """Launch on the current stream: every tile of int64[n, 6] `table`."""
        source, target = getattr(self._module.tl, kind.source), getattr(self._module.tl, kind.target)
        self._module.move_tiles[(len(table),)](
            table, SOURCE=source, TARGET=target, WIDTH=kind.width, VECTORS=_MOVE_VECTORS, num_warps=_MOVE_WARPS
        )

    def pair_tiles(self, target: torch.Tensor, source: torch.Tensor) -> Tiles | None:
        """Tables that copy `source` to `target`; None where no kernel can (rare dtypes, more than two dimensions)."""
        if source.dtype != target.dtype and not {source.dtype, target.dtype} <= set(_CAST_DTYPES):
            return None
        if source.is_conj() or source.is_neg():
            return None
        box = collapse(source.shape, source.stride())
        tiles = None if box is None else tiles_of(box, _operand(source), _operand(target))
        return None if tiles is None or not all(map(self.moves_right, tiles)) else tiles

    def moves_right(self, kind: MoveKind) -> bool:
        """Whether the kernel for `kind` does as torch does; compiles it, so that its first use is quick.

        The log says once why one does not.
        """
        with self._lock:
            if kind not in self._proven:
                reason = "gives other results than torch"
                try:
                    self._proven[kind] = self._moves_as_torch(kind)
                except Exception as error:  # noqa: BLE001 - as in `open`: one kind may not compile where the others do
                    self._proven[kind] = False
                    reason = f"does not compile or run ({type(error).__name__}: {error})"
                if not self._proven[kind]:
                    name, device = self.backend.name, self.device
                    log.warning("%s: torch is used for %s on %s: the kernel %s", name, kind, device, reason)
            return self._proven[kind]

    def _moves_as_torch(self, kind: MoveKind) -> bool:
        """Tried with rows of vectors out of a wider matrix."""
        dtypes = getattr(torch, kind.source), getattr(torch, kind.target)
        values = torch.tensor(_HARD_TO_ROUND) if dtypes[0].is_floating_point else torch.arange(-len(_HARD_TO_ROUND), 0)
        num_rows, num_vectors = len(_HARD_TO_ROUND), 3
        source = values.to(dtypes[0]).repeat(2 * num_vectors * kind.width).view(num_rows, -1).to(self.device)
        box = source[:, kind.width * num_vectors :]
        target = torch.zeros(box.shape, dtype=dtypes[1], device=self.device)
        tile = [box.data_ptr(), target.data_ptr(), num_vectors, box.stride(0), 0, num_rows * num_vectors]
        self.move(kind, torch.tensor([tile], dtype=torch.int64, device=self.device))
        return torch.equal(target, box.to(target.dtype))

    def _digests_right(self) -> bool:
        nbytes = (_BLOCK_ROWS + 1) * BLOCK_BYTES + 13
        data = torch.arange(nbytes, device=self.device).mul_(131).remainder_(251).to(torch.uint8)
        views = (data, data[5:200], data[:0])
        self.backend.synchronize()
        return BatchDigest(self.backend, views, self)() == tuple(map(digest_bytes, views))


_opened: dict[torch.device, FusedKernels | str] = {}
_opening = threading.Lock()


def kernels_for(backend: Backend, tensors: Iterable[torch.Tensor]) -> FusedKernels | None:
    """The fused kernels, if all of `tensors` lie on the current device and it has them. The log says once if not."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return None
    (device,) = devices
    if device.type == "cpu" or device.index != backend.enter():
        return None
    with _opening:
        if device not in _opened:
            reason = backend.no_fused_kernels
            _opened[device] = FusedKernels.open(backend, device) if reason is None else reason
            if isinstance(_opened[device], str):
                log.info("%s: no fused kernels, torch is used: %s", backend.name, _opened[device])
        found = _opened[device]
    return None if isinstance(found, str) else found


class BatchDigest:
    """Digests of views (contiguous, uint8) that stay where they are, and are kept alive. One thread at a time."""

    def __init__(self, backend: Backend, views: Sequence[torch.Tensor], kernels: FusedKernels | None = None) -> None:
        """
        Raises:
            DeviceError: a view is not made of bytes, or is not contiguous.
        """
        for index, view in enumerate(views):
            if view.dtype != torch.uint8 or not view.is_contiguous():
                raise DeviceError(
                    f"a batch digest takes contiguous uint8 views, got number {index} with {view.dtype}, shape "
                    f"{tuple(view.shape)} and strides {view.stride()}; give it slices of the buffer's bytes"
                )
        self._backend = backend
        self._views = tuple(views)
        self._stream = backend.new_stream()
        self._kernels = kernels = kernels_for(backend, views) if kernels is None else kernels
        if kernels is not None:
            device = kernels.device
            self._table = digest_table([(view.data_ptr(), view.numel()) for view in views], rows=_BLOCK_ROWS)
            self._whole, self._other = (
                [torch.from_numpy(row).to(device) for row in np.ascontiguousarray(blocks)]
                for blocks in (self._table.whole, self._table.other)
            )
            self._mixed = torch.zeros(self._table.num_blocks, dtype=torch.int64, device=device)
            # Pinned, or the copy back would go through a buffer of the driver's.
            self._host = torch.zeros(self._table.num_blocks, dtype=torch.int64, pin_memory=device.type != "cpu")
            backend.synchronize()

    def __call__(self) -> tuple[int, ...]:
        """Digest of every view as it is now, in order; each equals `Backend.digest(view)`.

        Blocks until they are known. Runs on a stream of its own and waits for no other: what writes the views must be
        finished. Allocates nothing on the device after the first call.
        """
        self._backend.enter()
        with self._backend.use_stream(self._stream):
            if self._kernels is None:
                return tuple(map(digest_bytes, self._views))
            self._kernels.digest_whole(self._whole, self._mixed)
            self._kernels.digest_other(self._other, self._mixed)
        if self._table.num_blocks:
            self._backend.copy_async(self._host, self._mixed, self._stream)
            self._backend.synchronize(self._stream)
        return fold(self._table, self._host.numpy().view(np.uint64))


class BatchCopy:
    """Copies `source` to `target` for each (target, source), which stay where they are and are kept alive.

    Shapes are equal, targets contiguous and apart from all sources; sources may have any strides. Where dtypes differ
    values are cast as `Tensor.to` casts them. A launch per kind of move, usually one in all; what no kernel can move
    goes through torch.
    """

    def __init__(
        self,
        backend: Backend,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kernels: FusedKernels | None = None,
    ) -> None:
        """
        Raises:
            DeviceError: a shape differs, or a target is not contiguous.
        """
        if kernels is None:
            kernels = kernels_for(backend, (tensor for pair in pairs for tensor in pair))
        self._backend = backend
        self._kernels = kernels
        self._through_torch: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        tiles: Tiles = {}
        for index, (target, source) in enumerate(pairs):
            if target.shape != source.shape or not target.is_contiguous():
                raise DeviceError(
                    f"a batch copy takes contiguous destinations of their source's shape, got number {index} with "
                    f"destination {tuple(target.shape)} (strides {target.stride()}) and source {tuple(source.shape)}"
                )
            found = None if kernels is None or not target.numel() else kernels.pair_tiles(target, source)
            for kind, parts in ({} if found is None else found).items():
                tiles.setdefault(kind, []).extend(parts)
            if found is None and target.numel():
                for tensors, tensor in zip(self._through_torch, (target, source), strict=True):
                    tensors.append(tensor.detach())
        self._kept_alive = tuple(pairs)
        self._launches: list[tuple[MoveKind, torch.Tensor]] = []
        if kernels is not None:
            for kind, parts in tiles.items():
                self._launches.append((kind, torch.from_numpy(np.concatenate(parts)).to(kernels.device)))
            backend.synchronize()

    def __call__(self, stream: Any | None = None) -> None:
        """Copy every pair, asynchronously on `stream` (None: the current one); `Backend.synchronize(stream)` waits."""
        self._backend.enter()
        with self._backend.use_stream(stream):
            if self._kernels is not None:
                for kind, table in self._launches:
                    self._kernels.move(kind, table)
            copy_all(*self._through_torch)


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy and cast every source to its target by torch, on the current stream."""
    if targets:
        with torch.no_grad():
            # Falls back to one copy_ each, below Python, for what it cannot group.
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
