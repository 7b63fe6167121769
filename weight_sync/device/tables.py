"""Tables that the fused kernels read: plain integers in, numpy arrays out. Knows no torch and no device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from weight_sync.device.digest import BLOCK_BYTES, GOLDEN, mix

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ALIGNMENT = 16
"""Bytes of the widest access of a thread, and what it has to be aligned to."""
TILE_VECTORS = 4096
"""Vectors per tile of a move: 64 KiB at the destination for vectors of 16 bytes."""
_MAX_COLUMNS = 1 << 30
"""Kernels count the vectors of a row in 32 bits. Also stands for a row that never ends."""
_CAST_WIDTH = 8
"""Elements per vector of a cast: 16 bytes of the 16-bit side."""


class DigestTable(NamedTuple):
    """All blocks of all views, and how their results come together.

    Blocks are int64[4, n]; the rows are address, size in bytes, salt ((1 + index within the view) * GOLDEN, wrapped)
    and slot (the block's number over all views, where its result goes).
    """

    num_blocks: int
    whole: np.ndarray
    """Aligned blocks of full size; their number is a multiple of the rows per program."""
    other: np.ndarray
    starts: np.ndarray
    """intp: first slot of every view that is not empty."""
    filled: np.ndarray
    """intp: those views."""
    lengths: np.ndarray
    """uint64[views]: each view's size, mixed."""


def digest_table(spans: Sequence[tuple[int, int]], *, rows: int) -> DigestTable:
    """From (address, bytes) per view; `rows` blocks make a program of the kernel for whole blocks."""
    views = np.array(spans, dtype=np.int64).reshape(-1, 2)
    nbytes = views[:, 1]
    counts = -(-nbytes // BLOCK_BYTES)
    starts = np.cumsum(counts) - counts
    slots = np.arange(counts.sum(), dtype=np.int64)
    of_view = np.repeat(np.arange(len(views)), counts)
    index = slots - starts[of_view]
    addresses = views[of_view, 0] + index * BLOCK_BYTES
    sizes = np.minimum(BLOCK_BYTES, nbytes[of_view] - index * BLOCK_BYTES)
    salts = ((index + 1).astype(np.uint64) * GOLDEN).view(np.int64)
    is_whole = (sizes == BLOCK_BYTES) & (addresses % ALIGNMENT == 0)
    whole = np.flatnonzero(is_whole)
    # The few that do not fill a program go the other way.
    is_whole[whole[len(whole) - len(whole) % rows :]] = False
    blocks = np.stack([addresses, sizes, salts, slots])
    filled = np.flatnonzero(counts)
    return DigestTable(
        num_blocks=len(slots),
        whole=blocks[:, is_whole],
        other=blocks[:, ~is_whole],
        starts=starts[filled],
        filled=filled,
        lengths=mix(nbytes.astype(np.uint64)),
    )


def fold(table: DigestTable, mixed: np.ndarray) -> tuple[int, ...]:
    """Digest of every view from its blocks' results, uint64[num_blocks]."""
    totals = table.lengths.copy()
    if table.filled.size:
        totals[table.filled] += np.add.reduceat(mixed, table.starts)
    return tuple(mix(totals).tolist())


class Operand(NamedTuple):
    """One end of a copy."""

    address: int
    dtype: str
    """As both torch and Triton name it."""
    itemsize: int

    def after(self, count: int) -> Operand:
        return self._replace(address=self.address + count * self.itemsize)


class Box(NamedTuple):
    """`rows` rows of `columns` contiguous elements that begin `stride` elements apart at the source."""

    rows: int
    columns: int
    stride: int


class MoveKind(NamedTuple):
    """What a move kernel is compiled for."""

    source: str
    target: str
    width: int
    """Elements per vector."""


Tiles = dict[MoveKind, list[np.ndarray]]
"""By kernel: int64[n, 6] tables, one row per tile; the fields are those of `kernels.move_tiles`."""


class Chunk(NamedTuple):
    """A way to cut a row into vectors. Counts are of bytes if they are only copied, of elements if they are cast."""

    kind: MoveKind
    span: int
    """Counts per vector."""
    source_align: int
    target_align: int

    def is_aligned(self, source: Operand, target: Operand) -> bool:
        return source.address % self.source_align == 0 and target.address % self.target_align == 0


_COPY_CHUNKS = (
    Chunk(MoveKind("int64", "int64", 2), 16, 16, 16),
    *(Chunk(MoveKind(f"int{8 * size}", f"int{8 * size}", 1), size, size, size) for size in (8, 4, 2, 1)),
)


def _cast_chunks(source: Operand, target: Operand) -> tuple[Chunk, ...]:
    wide, narrow = (MoveKind(source.dtype, target.dtype, width) for width in (_CAST_WIDTH, 1))
    return (
        Chunk(wide, _CAST_WIDTH, ALIGNMENT, ALIGNMENT),
        Chunk(narrow, 1, source.itemsize, target.itemsize),
    )


def collapse(shape: Sequence[int], strides: Sequence[int]) -> Box | None:
    """The box that a strided tensor (in elements) is; None if it takes more than two dimensions."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        else:
            dims.append((size, stride))
    match dims:
        case []:
            return Box(1, 1, 0)
        case [(size, 1)]:
            return Box(1, size, 0)
        case [(size, stride)]:
            return Box(size, 1, stride)
        case [(columns, 1), (rows, stride)]:
            return Box(rows, columns, stride)
        case _:
            return None


def tiles_of(box: Box, source: Operand, target: Operand) -> Tiles | None:
    """Tiles that move a box, or None if no kernel can.

    The widest chunk is taken that the alignment of everything allows. A box of one row may begin and end between two
    vectors: its two ends go in the narrowest chunk.
    """
    if source.address % source.itemsize or target.address % target.itemsize:
        return None
    if source.dtype == target.dtype:
        size = source.itemsize
        box = Box(box.rows, box.columns * size, box.stride * size)
        source, target = Operand(source.address, "int8", 1), Operand(target.address, "int8", 1)
        chunks = _COPY_CHUNKS
    else:
        chunks = _cast_chunks(source, target)
    # The narrowest chunk begins at once wherever it is asked to.
    chunk, head = next((chunk, head) for chunk in chunks for head in _heads(chunk, box, source, target))
    if box.rows > 1 and box.columns // chunk.span > _MAX_COLUMNS:
        return None
    body = (box.columns - head) // chunk.span * chunk.span
    found: Tiles = {}
    for part, start, count in (
        (chunks[-1], 0, head), (chunk, head, body), (chunks[-1], head + body, box.columns - head - body)
    ):  # fmt: skip
        if count > 0:
            tiles = _cut(part, box._replace(columns=count), source.after(start), target.after(start))
            found.setdefault(part.kind, []).append(tiles)
    return found


def _heads(chunk: Chunk, box: Box, source: Operand, target: Operand) -> Iterator[int]:
    """Where in a row whole vectors can begin. Among several rows all must be whole vectors."""
    if box.rows > 1:
        is_even = box.columns % chunk.span == 0 and box.stride * source.itemsize % chunk.source_align == 0
        yield from (0,) if is_even and chunk.is_aligned(source, target) else ()
    else:
        last = min(chunk.span, box.columns - chunk.span + 1)
        yield from (head for head in range(last) if chunk.is_aligned(source.after(head), target.after(head)))


def _cut(chunk: Chunk, box: Box, source: Operand, target: Operand) -> np.ndarray:
    """Tiles of TILE_VECTORS vectors, int64[n, 6]. A tile within one row starts at its own first vector."""
    columns = box.columns // chunk.span
    starts = np.arange(0, box.rows * columns, TILE_VECTORS, dtype=np.int64)
    counts = np.minimum(TILE_VECTORS, box.rows * columns - starts)
    row, begin = np.divmod(starts, columns)
    row_bytes, vector_bytes = box.stride * source.itemsize, chunk.span * source.itemsize
    wraps = begin + counts > columns
    fields = (
        source.address + row * row_bytes + np.where(wraps, 0, begin * vector_bytes),
        target.address + starts * chunk.span * target.itemsize,
        np.where(wraps, columns, _MAX_COLUMNS),
        # The kernel counts the stride in elements of its own dtype.
        np.full(len(starts), row_bytes * chunk.kind.width // vector_bytes),
        np.where(wraps, begin, 0),
        counts,
    )
    return np.stack(fields, axis=1)
