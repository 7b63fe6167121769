"""Boxes, strides and runs of bytes.

A *box* is `(start, size)` per dimension of a row-major tensor. A *strided view* is `(offset, size, stride)`; all counts
are in elements. Nothing here needs memory in proportion to a tensor: only to the number of contiguous runs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence


MAX_BOXES = 1 << 16
"""Boxes that one copy may fall apart into before we call it a permutation and refuse it."""
MAX_RUNS = 1 << 20
"""Contiguous runs that one copy may fall apart into. More means that the engine stores it in another order."""


class TooScattered(Exception):
    """A view falls apart into too many pieces to be described as boxes or runs."""


class ViewDim(NamedTuple):
    """One dimension (size > 1) of a copy: how far a step goes in the source tensor and in the destination."""

    size: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxCopy:
    """A box of the source and the strided destination it lands in (one stride per source dimension)."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    dst_offset: int
    dst_stride: tuple[int, ...]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, e.g. (2, 3, 4) -> (12, 4, 1)."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to one past the last of a view with non-negative strides; 0 if the view is empty."""
    if any(n == 0 for n in size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def dense_runs(offset: int, size: Sequence[int], stride: Sequence[int]) -> tuple[np.ndarray, int]:
    """Split a strided view into the fewest contiguous runs that keep row-major order.

    Returns:
        int64[R] first element of each run, in row-major order of the view, and the common length of the runs.

    Raises:
        TooScattered: more than `MAX_RUNS` runs.

    Example: rows 0-2, columns 4-7 of a [4, 10] tensor: `dense_runs(4, (2, 3), (10, 1))` -> `([4, 14], 3)`.
    """
    starts, length = _runs_from_zero(tuple(size), tuple(stride))
    return starts + offset, length


@lru_cache(maxsize=256)
def _runs_from_zero(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """`dense_runs` of a view that starts at 0. Layers and experts repeat few shapes tens of thousands of times."""
    if any(n == 0 for n in size):
        return np.zeros(0, np.int64), 0
    length = 1
    dims = [(n, step) for n, step in zip(size, stride, strict=True) if n > 1]
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    num_runs = prod(n for n, _ in dims)
    if num_runs > MAX_RUNS:
        raise TooScattered(f"{num_runs} runs of {length} elements; at most {MAX_RUNS} are allowed")
    starts = np.zeros(1, np.int64)
    for n, step in dims:
        starts = (starts[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
    starts.flags.writeable = False
    return starts, length


def spans_of_runs(runs: Iterable[tuple[np.ndarray, int]]) -> np.ndarray:
    """Runs as `dense_runs` returns them -> int64[R, 2] of `[first, last + 1)`."""
    pairs = [np.stack([starts, starts + length], 1) for starts, length in runs if length]
    return np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int64)


def merge_spans(spans: np.ndarray) -> tuple[np.ndarray, int]:
    """Union of half-open spans, int64[R, 2], none of them empty.

    Returns:
        int64[I, 2], disjoint, sorted, touching ones joined; and how many elements were covered more than once
        (an element covered three times counts twice).
    """
    if not len(spans):
        return spans, 0
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    opens = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    first = spans[opens, 0]
    last = reach[np.concatenate([np.flatnonzero(opens)[1:] - 1, [len(spans) - 1]])]
    num_covered = int((last - first).sum())
    num_written = int((spans[:, 1] - spans[:, 0]).sum())
    return np.stack([first, last], 1), num_written - num_covered


def split_into_boxes(
    shape: Sequence[int], *, src_offset: int, dst_offset: int, dims: Sequence[ViewDim]
) -> list[BoxCopy]:
    """Describe a strided copy out of a row-major tensor of `shape` as boxes of that tensor.

    A view that splits, merges or drops dimensions is usually one box. Where it is not (every third head, say), the
    dimension with the longest source step is peeled off, one box per index.

    Raises:
        TooScattered: more than `MAX_BOXES` boxes.
    """
    done: list[BoxCopy] = []
    todo = [(src_offset, dst_offset, tuple(dims))]
    while todo:
        src, dst, rest = todo.pop()
        box = _as_box(shape, src, dst, rest)
        if box is not None:
            done.append(box)
            continue
        # A step of 0 repeats the same source elements; it can never be part of a box, so it goes first.
        outer = next((d for d in rest if d.src_stride == 0), max(rest, key=lambda d: d.src_stride))
        if len(done) + len(todo) + outer.size > MAX_BOXES:
            raise TooScattered(f"more than {MAX_BOXES} boxes of a tensor of shape {tuple(shape)}")
        inner = list(rest)
        inner.remove(outer)
        for i in reversed(range(outer.size)):
            todo.append((src + i * outer.src_stride, dst + i * outer.dst_stride, tuple(inner)))
    return done


def num_uncovered(shape: Sequence[int], boxes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """Elements of a tensor that lie in none of the boxes `(start, size)`; boxes may overlap.

    Example: `num_uncovered((4, 6), [((0, 0), (4, 3)), ((1, 2), (3, 4))])` -> 3, the end of the first row.
    """
    if not shape:
        return 0 if boxes else 1
    total = prod(shape)
    if any(prod(size) == total for _, size in boxes):
        return 0
    opens: defaultdict[int, list[int]] = defaultdict(list)
    closes: defaultdict[int, list[int]] = defaultdict(list)
    parts = [box for box in boxes if prod(box[1])]
    for i, (start, size) in enumerate(parts):
        opens[start[0]].append(i)
        closes[start[0] + size[0]].append(i)
    missing, active = 0, dict[int, None]()
    cuts = sorted({0, shape[0], *opens, *closes})
    for low, high in pairwise(cuts):
        for i in closes[low]:
            del active[i]
        active.update(dict.fromkeys(opens[low]))
        inner = {(parts[i][0][1:], parts[i][1][1:]) for i in active}
        missing += (high - low) * num_uncovered(shape[1:], inner)
    return missing


def _as_box(shape: Sequence[int], src_offset: int, dst_offset: int, dims: Sequence[ViewDim]) -> BoxCopy | None:
    """The copy as a single box, or None if it is not one."""
    start, size, dst_stride = _unravel(src_offset, shape), [1] * len(shape), [0] * len(shape)
    pending = sorted(dims, key=lambda d: d.src_stride, reverse=True)
    strides = row_major_strides(shape)
    for axis in reversed(range(len(shape))):
        while pending and pending[-1].src_stride < strides[axis] * shape[axis]:
            dim = pending.pop()
            # Steps of one axis must tile it without gaps, in the source and in the destination alike.
            if dim.src_stride != strides[axis] * size[axis]:
                return None
            if size[axis] > 1 and dim.dst_stride != dst_stride[axis] * size[axis]:
                return None
            dst_stride[axis] = dst_stride[axis] if size[axis] > 1 else dim.dst_stride
            room, ragged = divmod(shape[axis], size[axis])
            if dim.size > room:
                # A flattened view runs over the end of this axis: the part above belongs to the axes above.
                if ragged or dim.size % room:
                    return None
                pending.append(ViewDim(dim.size // room, dim.src_stride * room, dim.dst_stride * room))
            size[axis] *= min(dim.size, room)
        if start[axis] + size[axis] > shape[axis]:
            return None
    if pending:
        return None
    return BoxCopy(start=start, size=tuple(size), dst_offset=dst_offset, dst_stride=tuple(dst_stride))


def _unravel(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for length in reversed(shape):
        index.append(offset % length)
        offset //= length
    return tuple(reversed(index))
