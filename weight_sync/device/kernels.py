"""Triton kernels that digest and move memory named by addresses. Imported only where `fused` found Triton usable.

Every kernel takes a table of addresses that lives on the device and is built once, so a call is one launch whatever the
number of tensors. Integers are 64 bits wide and wrap. Sizes are checked where the tables are built.
"""
# A jit function is source that Triton's own compiler reads: its parameters are tensors, pointers or compile-time
# constants, not what Python would make of them, and type annotations mean something else in it.
# pyright: basic, reportMissingImports=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

TILE_FIELDS: tl.constexpr = tl.constexpr(6)
"""int64 per tile of `move_tiles`: source address, destination address, columns, row stride, first column, count."""


@triton.jit
def mix(x):
    """The splitmix64 finalizer of `digest.mix`, on uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def mixed_sums(lower, upper, salt):
    """int64 of a block as it enters the fold; `lower` and `upper` are the weighted sums over the words' 32-bit halves.

    A word is `lower + (upper << 32)`, so the block's low sum follows from the two without a full product per word.
    """
    low = lower + (upper << 32)
    inner = mix((low + salt).to(tl.uint64, bitcast=True))
    return mix(inner + upper.to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)


@triton.jit
def digest_whole_blocks(
    addresses, salts, slots, weights, mixed, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`mixed[slots[i]]` for the whole, 16-aligned block at `addresses[i]`; ROWS blocks per program.

    Blocks of a program share the loads of the weights, which otherwise would be as many bytes as the data.
    """
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    base = tl.load(addresses + block).to(tl.pointer_type(tl.int64))
    column = tl.arange(0, COLUMNS)
    lower = tl.zeros((ROWS, COLUMNS), tl.int64)
    upper = tl.zeros((ROWS, COLUMNS), tl.int64)
    for first in range(0, WORDS, COLUMNS):
        # The compiler cannot know that an address from a table is aligned, and without it reads word by word.
        place = tl.multiple_of(base[:, None] + (first + column)[None, :], (16, 16))
        words = tl.load(place, eviction_policy="evict_first")
        weight = tl.load(weights + first + column)[None, :]
        lower += (words & 0xFFFFFFFF) * weight
        upper += (words >> 32) * weight
    value = mixed_sums(tl.sum(lower, axis=1), tl.sum(upper, axis=1), tl.load(salts + block))
    tl.store(mixed + tl.load(slots + block), value)


@triton.jit
def digest_any_block(addresses, sizes, salts, slots, weights, mixed, COLUMNS: tl.constexpr):
    """`mixed[slots[i]]` for the block of `sizes[i]` bytes at `addresses[i]`, at any alignment; one block per program.

    Reads the aligned words around the block and shifts; each of them holds at least one byte of the block, so it lies
    in the same page and can be read. Bytes past the end are made zero.
    """
    block = tl.program_id(0)
    address = tl.load(addresses + block)
    nbytes = tl.load(sizes + block)
    skip = address & 7
    shift = (skip * 8).to(tl.uint64)
    base = (address - skip).to(tl.pointer_type(tl.int64))
    column = tl.arange(0, COLUMNS)
    lower = tl.zeros((COLUMNS,), tl.int64)
    upper = tl.zeros((COLUMNS,), tl.int64)
    for first in range(0, ((nbytes + 7) // 8).to(tl.int32), COLUMNS):
        index = first + column
        left = nbytes - index.to(tl.int64) * 8
        here = tl.load(base + index, mask=left > 0, other=0).to(tl.uint64, bitcast=True)
        # The following word is needed for its first `skip` bytes, if any of them belongs to the block.
        after = tl.load(base + index + 1, mask=left > 8 - skip, other=0).to(tl.uint64, bitcast=True)
        # Two shifts, because one by 64 (when nothing is cut) is undefined.
        word = (here >> shift) | ((after << (63 - shift)) << 1)
        bits = (tl.minimum(tl.maximum(left, 0), 7) * 8).to(tl.uint64)
        one = tl.full((COLUMNS,), 1, tl.uint64)
        word = tl.where(left >= 8, word, word & ((one << bits) - 1)).to(tl.int64, bitcast=True)
        weight = tl.load(weights + index, mask=left > 0, other=0)
        lower += (word & 0xFFFFFFFF) * weight
        upper += (word >> 32) * weight
    value = mixed_sums(tl.sum(lower, axis=0), tl.sum(upper, axis=0), tl.load(salts + block))
    tl.store(mixed + tl.load(slots + block), value)


@triton.jit
def move_tiles(table, SOURCE: tl.constexpr, TARGET: tl.constexpr, WIDTH: tl.constexpr, VECTORS: tl.constexpr):
    """Copy one tile per program and cast it from SOURCE to TARGET, in vectors of WIDTH elements.

    A tile is `count` vectors, contiguous at the destination. At the source they start at vector `first column` of a row
    and go on in the following rows, `row stride` elements apart, after `columns` vectors. With WIDTH > 1 all addresses
    are 16-aligned, and the stride is too.
    """
    entry = table + tl.program_id(0).to(tl.int64) * TILE_FIELDS
    source = tl.load(entry).to(tl.pointer_type(SOURCE))
    target = tl.load(entry + 1).to(tl.pointer_type(TARGET))
    columns = tl.load(entry + 2).to(tl.int32)
    stride = tl.load(entry + 3)
    begin = tl.load(entry + 4).to(tl.int32)
    count = tl.load(entry + 5).to(tl.int32)
    lane = tl.arange(0, VECTORS)
    inside = tl.arange(0, WIDTH)[None, :]
    for first in range(0, count, VECTORS):
        vector = first + lane
        is_mine = (vector < count)[:, None]
        column = begin + vector
        row = tl.zeros((VECTORS,), tl.int32)
        # A division per vector costs more than its copy; most tiles stay within a row.
        if begin + count > columns:
            row = column // columns
            column = column - row * columns
        offset = row.to(tl.int64) * stride + column.to(tl.int64) * WIDTH
        source_at = source + (offset[:, None] + inside)
        target_at = target + (vector.to(tl.int64) * WIDTH)[:, None] + inside
        if WIDTH > 1:
            source_at = tl.multiple_of(source_at, (16, 16))
            target_at = tl.multiple_of(target_at, (16, 16))
        value = tl.load(source_at, mask=is_mine, eviction_policy="evict_first")
        tl.store(target_at, value.to(TARGET), mask=is_mine)
