"""Tables of the fused kernels, replayed in plain Python over a made-up memory."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.device.digest import BLOCK_BYTES, digest_bytes, mix, weights_on
from weight_sync.device.tables import (
    ALIGNMENT,
    TILE_VECTORS,
    Box,
    MoveKind,
    Operand,
    collapse,
    digest_table,
    fold,
    tiles_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZES = {"int8": 1, "int16": 2, "int32": 4, "int64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def copies(kind: MoveKind, tiles: np.ndarray) -> Iterator[tuple[int, int]]:
    """(source address, destination address) of every element, as the kernel's docstring says."""
    read, write = SIZES[kind.source], SIZES[kind.target]
    for source, target, columns, stride, begin, count in tiles.tolist():
        assert 0 < count <= TILE_VECTORS
        for vector in range(count):
            row, column = divmod(begin + vector, columns)
            at = source + (row * stride + column * kind.width) * read
            to = target + vector * kind.width * write
            if kind.width > 1:
                assert at % ALIGNMENT == 0
                assert to % ALIGNMENT == 0
            assert at % read == 0
            assert to % write == 0
            yield from ((at + i * read, to + i * write) for i in range(kind.width))


def replayed(tables: dict[MoveKind, list[np.ndarray]], *, is_copy: bool) -> dict[int, int]:
    """Destination address -> source address, of every byte if it is a copy and of every element if it is a cast."""
    found: dict[int, int] = {}
    for kind, parts in tables.items():
        for at, to in (pair for part in parts for pair in copies(kind, part)):
            for i in range(SIZES[kind.source] if is_copy else 1):
                assert to + i not in found, "written twice"
                found[to + i] = at + i
    return found


def wanted(box: Box, source: Operand, target: Operand, *, is_copy: bool) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, (row, column) in enumerate(product(range(box.rows), range(box.columns))):
        at = source.address + (row * box.stride + column) * source.itemsize
        to = target.address + number * target.itemsize
        for i in range(source.itemsize if is_copy else 1):
            found[to + i] = at + i
    return found


@st.composite
def moves(draw: st.DrawFn) -> tuple[Box, Operand, Operand]:
    source = draw(st.sampled_from(["int8", "bfloat16", "float32", "int64"]))
    target = draw(st.sampled_from([source, "bfloat16", "float32"] if source in {"bfloat16", "float32"} else [source]))
    rows = draw(st.sampled_from([1, 1, 2, 3, 7]))
    columns = draw(st.one_of(st.integers(1, 70), st.sampled_from([8, 16, 64, 128, 4096, 20000])))
    stride = columns + draw(st.sampled_from([0, 1, 3, 4, 8, 16, 64]))
    addresses = (draw(st.integers(0, 40)), draw(st.integers(0, 40)))
    ends = [
        Operand(1 << 20 | place * SIZES[dtype], dtype, SIZES[dtype])
        for place, dtype in zip(addresses, (source, target), strict=True)
    ]
    return Box(rows, columns, stride), ends[0], ends[1]


@given(move=moves())
@settings(deadline=None, max_examples=60)
def test_tiles_move_every_byte_once_and_to_its_place(move: tuple[Box, Operand, Operand]) -> None:
    box, source, target = move
    is_copy = source.dtype == target.dtype
    tables = tiles_of(box, source, target)
    assert tables is not None
    assert replayed(tables, is_copy=is_copy) == wanted(box, source, target, is_copy=is_copy)


def test_a_row_that_both_sides_begin_off_by_the_same_is_moved_in_wide_vectors_between_its_ends() -> None:
    tables = tiles_of(Box(1, 1003, 0), Operand(4096 + 5, "uint8", 1), Operand(8192 + 21, "uint8", 1))
    assert tables is not None
    counts = {kind: sum(int(part[:, 5].sum()) for part in parts) for kind, parts in tables.items()}
    assert counts == {MoveKind("int64", "int64", 2): 62, MoveKind("int8", "int8", 1): 11}


def test_one_misaligned_side_narrows_the_vectors_no_more_than_it_must() -> None:
    for shift, bits in ((8, 64), (4, 32), (2, 16), (1, 8)):
        tables = tiles_of(Box(5, 64, 128), Operand(4096, "uint8", 1), Operand(8192 + shift, "uint8", 1))
        assert tables is not None
        assert list(tables) == [MoveKind(f"int{bits}", f"int{bits}", 1)]


def test_shards_of_a_model_need_one_kernel() -> None:
    """float32 shards cut along rows and along columns, packed one after another in bfloat16."""
    offset, kinds = 0, set()
    for rows, columns, stride in ((1, 896 * 3584, 0), (1, 3584, 0), (896, 9472, 18944), (128, 1792, 3584)):
        source = Operand((1 << 30) + 4 * offset, "float32", 4)
        tables = tiles_of(Box(rows, columns, stride), source, Operand((1 << 40) + 2 * offset, "bfloat16", 2))
        assert tables is not None
        kinds |= set(tables)
        offset += rows * columns
    assert kinds == {MoveKind("float32", "bfloat16", 8)}


def test_rows_too_long_for_the_kernels_counters_are_left_to_torch() -> None:
    sides = Operand(1 << 20, "int8", 1), Operand(1 << 50, "int8", 1)
    columns = 17 << 31
    assert tiles_of(Box(2, columns, columns + 16), *sides) is None
    one_row = tiles_of(Box(1, columns, 0), *sides)
    assert one_row is not None
    ((kind, (tiles,)),) = one_row.items()
    assert int(tiles[:, 5].sum()) * kind.width * 8 == columns
    assert (np.diff(tiles[:, 0]) == TILE_VECTORS * 16).all()


@pytest.mark.parametrize(
    ("view", "box"),
    [
        (torch.zeros(6, 8, 10), Box(1, 480, 0)),
        (torch.zeros(6, 80)[:, 20:50], Box(6, 30, 80)),
        (torch.zeros(6, 8, 10)[:, 2:5], Box(6, 30, 80)),
        (torch.zeros(6, 8, 10)[2:3, 2:5], Box(1, 30, 0)),
        (torch.zeros(50)[::5], Box(10, 1, 5)),
        (torch.zeros(()), Box(1, 1, 0)),
        (torch.zeros(8).expand(5, 8), Box(5, 8, 0)),
        (torch.zeros(6, 8, 10)[:, 2:5, 3:9], None),
        (torch.zeros(6, 8).t(), None),
    ],
)
def test_contiguous_dimensions_collapse(view: torch.Tensor, box: Box | None) -> None:
    assert collapse(view.shape, view.stride()) == box


@given(
    sizes=st.lists(st.sampled_from([0, 1, 9, 999, BLOCK_BYTES, 2 * BLOCK_BYTES + 3]), max_size=6),
    rows=st.integers(1, 4),
)
@settings(deadline=None, max_examples=30)
def test_blocks_folded_by_the_table_give_the_digest(sizes: list[int], rows: int) -> None:
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, sum(sizes) + 16, dtype=np.uint8))
    starts = np.cumsum([0, *sizes])[: len(sizes)].tolist()
    views = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    table = digest_table([(view.data_ptr(), view.numel()) for view in views], rows=rows)
    assert table.whole.shape[1] % rows == 0
    assert (table.whole[0] % ALIGNMENT == 0).all()

    mixed = np.zeros(table.num_blocks, np.uint64)
    weights = weights_on("cpu").numpy()
    for blocks in (table.whole, table.other):
        for address, size, salt, slot in blocks.T.tolist():
            words = np.zeros(BLOCK_BYTES // 8, np.int64)
            start = address - data.data_ptr()
            words.view(np.uint8)[:size] = data[start : start + size].numpy()
            low, high = (words * weights).sum(), ((words >> 32) * weights).sum()
            salted = np.array([low], np.int64).view(np.uint64) + np.array([salt], np.int64).view(np.uint64)
            mixed[slot] = mix(mix(salted) + np.array([high], np.int64).view(np.uint64))[0]
    for _ in range(2):
        assert fold(table, mixed) == tuple(digest_bytes(view) for view in views)
