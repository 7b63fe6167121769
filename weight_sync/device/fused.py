"""Digests and copies of many tensors at once: by torch, or in one kernel launch each where there are kernels.

    views, pairs ─> tables of addresses (numpy, pure) ─> device ─> kernels (Triton) ─> one copy back, one fold

The tables are built once. `FusedKernels.open` compiles the kernels and compares their results with torch's, so where
Triton is missing or gets them wrong, torch does the work.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from weight_sync.device.digest import BLOCK_BYTES, BLOCK_WORDS, digest_bytes, weights_on
from weight_sync.device.tables import Blocks, MoveKind, Operand, Tiles, collapse, digest_table, fold, tiles_of
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

log = logging.getLogger(__name__)

_CAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Casts among these are rounded once, so there is one right result."""

_HARD_TO_ROUND = (1 / 3, -1e-40, 65520.0, -torch.inf, *(1 + step * 2.0**-bits for bits in (8, 11) for step in (1, 3)))
"""Ties between neighbours in 16 bits, values that overflow, and ones that are easily flushed to zero."""

# Shapes of the launches, chosen for 16 words in flight per thread. WARPS go with the line they stand on.
_BLOCK_ROWS, _BLOCK_COLUMNS, _BLOCK_WARPS = 4, 512, 4
_ANY_COLUMNS, _ANY_WARPS = 1024, 4
_MOVE_VECTORS, _MOVE_WARPS = 1024, 8


class Device(Protocol):
    """The part of a `Backend` that is used here."""

    name: str

    def enter(self) -> None: ...

    def new_stream(self) -> Any | None: ...

    def use_stream(self, stream: Any | None) -> AbstractContextManager[None]: ...

    def copy_async(self, dst: torch.Tensor, src: torch.Tensor, stream: Any | None = None) -> None: ...

    def synchronize(self, stream: Any | None = None) -> None: ...


class FusedKernels:
    """The kernels as they work on one device. Made by `open`."""

    def __init__(self, backend: Device, device: torch.device, module: ModuleType) -> None:
        self.backend = backend
        self.device = device
        self._module = module
        self._proven: dict[MoveKind, bool] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, backend: Device, device: torch.device) -> FusedKernels | str:
        """The kernels for `device` (current in this thread), tried out; or why there are none."""
        try:
            from weight_sync.device import kernels
        except ImportError as error:
            return f"Triton cannot be imported ({error})"
        found = cls(backend, device, kernels)
        try:
            is_right = found._digests_right() and found._try_move(MoveKind("int64", "int64", 2))
        except Exception as error:  # noqa: BLE001 - compilers and drivers fail in ways of their own; torch is always there
            return f"they do not compile or run on {device} ({type(error).__name__}: {error})"
        return found if is_right else f"their results on {device} differ from torch's"

    def digest_blocks(self, whole: _DeviceBlocks, other: _DeviceBlocks, mixed: torch.Tensor) -> None:
        """Launch on the current stream: every block's result into int64 `mixed`, at its slot."""
        weights = weights_on(str(self.device))
        if whole.count:
            self._module.digest_whole_blocks[(whole.count // _BLOCK_ROWS,)](
                whole.addresses,
                whole.salts,
                whole.slots,
                weights,
                mixed,
                WORDS=BLOCK_WORDS,
                ROWS=_BLOCK_ROWS,
                COLUMNS=_BLOCK_COLUMNS,
                num_warps=_BLOCK_WARPS,
            )
        if other.count:
            self._module.digest_any_block[(other.count,)](
                other.addresses,
                other.sizes,
                other.salts,
                other.slots,
                weights,
                mixed,
                COLUMNS=_ANY_COLUMNS,
                num_warps=_ANY_WARPS,
            )

    def move(self, kind: MoveKind, table: torch.Tensor) -> None:
        """Launch on the current stream: every tile of int64[n, 6] `table`."""
        self._module.move_tiles[(table.shape[0],)](
            table,
            SOURCE=getattr(self._module.tl, kind.source),
            TARGET=getattr(self._module.tl, kind.target),
            WIDTH=kind.width,
            VECTORS=_MOVE_VECTORS,
            num_warps=_MOVE_WARPS,
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
                reason = self._why_wrong(kind)
                if reason is not None:
                    name, (source, target, width) = self.backend.name, kind
                    log.warning(
                        "%s: torch is used for %s to %s (%d in a vector): the kernel %s",
                        name, source, target, width, reason,
                    )  # fmt: skip
                self._proven[kind] = reason is None
            return self._proven[kind]

    def _why_wrong(self, kind: MoveKind) -> str | None:
        try:
            is_right = self._try_move(kind)
        except Exception as error:  # noqa: BLE001 - as in `open`: one kind may not compile where the others do
            return f"does not compile or run on {self.device} ({type(error).__name__}: {error})"
        return None if is_right else f"gives other results than torch on {self.device}"

    def _try_move(self, kind: MoveKind) -> bool:
        """Rows of vectors out of a wider matrix."""
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


class BatchDigest:
    """Digests of views that stay where they are, and are kept alive. One thread at a time."""

    def __init__(self, backend: Device, views: Sequence[torch.Tensor], kernels: FusedKernels | None = None) -> None:
        self._backend = backend
        self._views = _require_bytes(views)
        self._stream = backend.new_stream()
        self._fused = None if kernels is None else _FusedDigest(kernels, self._views)

    def __call__(self) -> tuple[int, ...]:
        """Digest of every view as it is now, in order; each equals `Backend.digest(view)`.

        Blocks until they are known. Runs on a stream of its own and waits for no other: what writes the views must be
        finished. Allocates nothing on the device after the first call.
        """
        self._backend.enter()
        with self._backend.use_stream(self._stream):
            if self._fused is None:
                return tuple(map(digest_bytes, self._views))
            self._fused.launch()
        return self._fused.result(self._stream)


class _DeviceBlocks(NamedTuple):
    """`tables.Blocks` on the device."""

    count: int
    addresses: torch.Tensor
    sizes: torch.Tensor
    salts: torch.Tensor
    slots: torch.Tensor


class _FusedDigest:
    """The tables of a `BatchDigest`, and where their results go."""

    def __init__(self, kernels: FusedKernels, views: Sequence[torch.Tensor]) -> None:
        self._kernels = kernels
        self._table = digest_table([(view.data_ptr(), view.numel()) for view in views], rows=_BLOCK_ROWS)
        self._whole = _blocks_on(kernels.device, self._table.whole)
        self._other = _blocks_on(kernels.device, self._table.other)
        self._mixed = torch.zeros(self._table.num_blocks, dtype=torch.int64, device=kernels.device)
        # Pinned, or the copy back would go through a buffer of the driver's.
        is_pinned = kernels.device.type != "cpu"
        self._host = torch.zeros(self._table.num_blocks, dtype=torch.int64, pin_memory=is_pinned)
        kernels.backend.synchronize()

    def launch(self) -> None:
        if self._table.num_blocks:
            self._kernels.digest_blocks(self._whole, self._other, self._mixed)

    def result(self, stream: Any | None) -> tuple[int, ...]:
        if self._table.num_blocks:
            self._kernels.backend.copy_async(self._host, self._mixed, stream)
            self._kernels.backend.synchronize(stream)
        return fold(self._table, self._host.numpy().view(np.uint64))


class BatchCopy:
    """Copies and casts between tensors that stay where they are, and are kept alive.

    A launch per kind of move, usually one in all. What no kernel can move goes through torch.
    """

    def __init__(
        self,
        backend: Device,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        kernels: FusedKernels | None = None,
    ) -> None:
        self._backend = backend
        self._kernels = kernels
        self._pairs = _require_pairs(pairs)
        self.nbytes = sum(target.numel() * target.element_size() for target, _ in self._pairs)
        """Written by one call."""
        self._launches: list[tuple[MoveKind, torch.Tensor]] = []
        rest = self._pairs if kernels is None else self._plan_launches(kernels)
        self._through_torch = [target for target, _ in rest], [source for _, source in rest]

    def _plan_launches(self, kernels: FusedKernels) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Upload the tables of what kernels move; returns the other pairs."""
        found: Tiles = {}
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in self._pairs:
            tiles = kernels.pair_tiles(target, source)
            if tiles is None:
                rest.append((target, source))
                continue
            for kind, parts in tiles.items():
                found.setdefault(kind, []).extend(parts)
        for kind, parts in found.items():
            self._launches.append((kind, torch.from_numpy(np.concatenate(parts)).to(kernels.device)))
        self._backend.synchronize()
        return rest

    def __call__(self, stream: Any | None = None) -> None:
        """Copy every pair, asynchronously on `stream` (None: the current one); `Backend.synchronize(stream)` waits."""
        self._backend.enter()
        with self._backend.use_stream(stream):
            if self._kernels is not None:
                for kind, table in self._launches:
                    self._kernels.move(kind, table)
            copy_all(*self._through_torch)


def _blocks_on(device: torch.device, blocks: Blocks) -> _DeviceBlocks:
    columns = (torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in blocks)
    return _DeviceBlocks(len(blocks.addresses), *columns)


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy and cast every source to its target by torch, on the current stream."""
    if targets:
        with torch.no_grad():
            # Falls back to one copy_ each, below Python, for what it cannot group.
            torch._foreach_copy_(targets, sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]


def _require_bytes(views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
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
    return tuple(views)


def _require_pairs(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pairs that hold anything, detached.

    Raises:
        DeviceError: a destination is not contiguous, or its shape is not its source's.
    """
    filled: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index, (target, source) in enumerate(pairs):
        if target.shape != source.shape or not target.is_contiguous():
            raise DeviceError(
                f"a batch copy takes contiguous destinations of their source's shape, got number {index} with "
                f"destination {tuple(target.shape)} (strides {target.stride()}) and source {tuple(source.shape)}"
            )
        if target.numel():
            filled.append((target.detach(), source.detach()))
    return filled
