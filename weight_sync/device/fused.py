"""Digests and moves of many tensors in one kernel launch: tables of addresses on the device, built once.

    views, pairs ─> tables (numpy, pure) ─> device ─> kernels (Triton) ─> one copy back, one fold

Used by accelerator backends where `FusedKernels.open` succeeds: it compiles the kernels and compares what they do with
torch, so a device or a Triton that gets them wrong is served by `plain` instead.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weight_sync.device.digest import BLOCK_BYTES, BLOCK_WORDS, digest_bytes, weights_on
from weight_sync.device.plain import copy_all, require_bytes, require_pairs
from weight_sync.device.tables import Blocks, MoveKind, Operand, Tiles, collapse, digest_table, fold, tiles_of

if TYPE_CHECKING:
    from collections.abc import Sequence
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
            is_right = found._digests_right() and found._try_move(MoveKind("int64", "int64", 2))
        except Exception as error:  # noqa: BLE001 - compilers and drivers fail in ways of their own; torch is always there
            return f"they do not compile or run on {device} ({type(error).__name__}: {error})"
        return found if is_right else f"their results on {device} differ from torch's"

    def digest_blocks(self, whole: DeviceBlocks, other: DeviceBlocks, mixed: torch.Tensor) -> None:
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
        return FusedDigester(self, views)() == tuple(digest_bytes(view) for view in views)


class DeviceBlocks(NamedTuple):
    """`tables.Blocks` on the device."""

    count: int
    addresses: torch.Tensor
    sizes: torch.Tensor
    salts: torch.Tensor
    slots: torch.Tensor


class FusedDigester:
    """Digests of views that stay where they are. What writes them must be finished (synchronised) before a call.

    One thread at a time. The views are kept alive.
    """

    def __init__(self, kernels: FusedKernels, views: Sequence[torch.Tensor]) -> None:
        self._kernels = kernels
        self._views = require_bytes(views)
        spans = [(view.data_ptr(), view.numel()) for view in self._views]
        self._table = digest_table(spans, rows=_BLOCK_ROWS)
        self._whole = _blocks_on(kernels.device, self._table.whole)
        self._other = _blocks_on(kernels.device, self._table.other)
        self._mixed = torch.zeros(self._table.num_blocks, dtype=torch.int64, device=kernels.device)
        # Pinned, or the copy back would go through a buffer of the driver's.
        is_pinned = kernels.device.type != "cpu"
        self._host = torch.zeros(self._table.num_blocks, dtype=torch.int64, pin_memory=is_pinned)
        self._result = self._host.numpy().view(np.uint64)
        self._stream = kernels.backend.new_stream()
        kernels.backend.synchronize()

    def __call__(self) -> tuple[int, ...]:
        backend = self._kernels.backend
        if self._table.num_blocks:
            backend.enter()
            with backend.use_stream(self._stream):
                self._kernels.digest_blocks(self._whole, self._other, self._mixed)
            backend.copy_async(self._host, self._mixed, self._stream)
            backend.synchronize(self._stream)
        return fold(self._table, self._result)


class FusedMover:
    """Copies and casts between tensors that stay where they are: a launch per kind of move, usually one in all.

    The tensors are kept alive. What no kernel can move (more than two dimensions, rare dtypes) goes through torch.
    """

    def __init__(self, kernels: FusedKernels, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._kernels = kernels
        self._pairs = require_pairs(pairs)
        self.nbytes = sum(target.numel() * target.element_size() for target, _ in self._pairs)
        found: Tiles = {}
        rest: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in self._pairs:
            tiles = _pair_tiles(target, source)
            if tiles is None or not all(kernels.moves_right(kind) for kind in tiles):
                rest.append((target, source))
                continue
            for kind, parts in tiles.items():
                found.setdefault(kind, []).extend(parts)
        self._launches = [
            (kind, torch.from_numpy(np.concatenate(parts)).to(kernels.device)) for kind, parts in found.items()
        ]
        self._rest = [target for target, _ in rest], [source for _, source in rest]
        kernels.backend.synchronize()

    def __call__(self, stream: Any | None = None) -> None:
        backend = self._kernels.backend
        backend.enter()
        with backend.use_stream(stream):
            for kind, table in self._launches:
                self._kernels.move(kind, table)
            copy_all(*self._rest)

    @property
    def num_launches(self) -> int:
        """Kernels per call, what goes through torch left out."""
        return len(self._launches)

    @property
    def num_through_torch(self) -> int:
        """Pairs that no kernel moves."""
        return len(self._rest[0])


def _blocks_on(device: torch.device, blocks: Blocks) -> DeviceBlocks:
    columns = (torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in blocks)
    return DeviceBlocks(len(blocks.addresses), *columns)


def _pair_tiles(target: torch.Tensor, source: torch.Tensor) -> Tiles | None:
    if source.dtype != target.dtype and not {source.dtype, target.dtype} <= set(_CAST_DTYPES):
        return None
    if source.is_conj() or source.is_neg():
        return None
    box = collapse(source.shape, source.stride())
    if box is None:
        return None
    return tiles_of(box, _operand(source), _operand(target))


def _operand(tensor: torch.Tensor) -> Operand:
    return Operand(tensor.data_ptr(), str(tensor.dtype).removeprefix("torch."), tensor.element_size())
