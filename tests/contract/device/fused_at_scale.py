"""Fused digests and moves on a real device: every bit pattern, and the sizes of a model of 7 billion parameters.

Called in the peer of test_cuda_real.py. Rates are of wall-clock time, results included: best of several calls.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch

from weight_sync.device.digest import digest_bytes
from weight_sync.device.fused import BatchCopy, BatchDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weight_sync.device.base import Backend

GIB = 1 << 30
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HIDDEN, INNER, KV, VOCABULARY, LAYERS = 3584, 18944, 512, 152064, 28


def model_shapes() -> Iterator[tuple[int, int]]:
    """(rows, columns) of every weight of a model of 7.6 billion parameters; a vector is one row."""
    yield from ((VOCABULARY, HIDDEN), (VOCABULARY, HIDDEN), (1, HIDDEN))
    for _ in range(LAYERS):
        yield from ((HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN))
        yield from ((1, HIDDEN), (1, KV), (1, KV), (1, HIDDEN), (1, HIDDEN))
        yield from ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))


def random_block(backend: Backend, nbytes: int) -> Any:
    block = backend.alloc_persistent(nbytes)
    for start in range(0, nbytes, GIB):
        part = block.tensor[start : start + GIB]
        part.random_(0, 256)
    backend.synchronize()
    return block


def ragged_views(data: torch.Tensor) -> list[torch.Tensor]:
    """Views of `data` of all sizes, one after another, beginning at any byte."""
    views: list[torch.Tensor] = [data[:0]]
    start = 0
    for size in itertools.cycle((1, 65536, 9, 7 * 65536 + 13, 40_000_000, 4 * 65536, 70_001, 16, 3)):
        if start + size > data.numel():
            break
        views.append(data[start : start + size])
        start += size
    return views


def wrong_digests(backend: Backend, nbytes: int) -> dict[str, int]:
    block = random_block(backend, nbytes)
    views = ragged_views(block.tensor)
    digest = BatchDigest(backend, views)
    assert digest._kernels is not None, "the kernels are not used"
    found = digest()
    wrong = sum(got != digest_bytes(view) for got, view in zip(found, views, strict=True))
    block.tensor[nbytes // 2] ^= 1
    backend.synchronize()
    changed = sum(a != b for a, b in zip(digest(), found, strict=True))
    block.close()
    return {"views": len(views), "wrong": wrong, "changed": changed}


def wrong_casts(backend: Backend) -> dict[str, int]:
    """Number of bit patterns that a cast brings to other bits than torch, by pair; all patterns of every dtype."""
    return {
        f"{source} to {target}": _wrong_casts(backend, source, target)
        for source, target in itertools.permutations(FLOATS, 2)
    }


def _wrong_casts(backend: Backend, source: torch.dtype, target: torch.dtype) -> int:
    as_int, to_int = (torch.int32 if dtype == torch.float32 else torch.int16 for dtype in (source, target))
    num_patterns = 1 << (8 * source.itemsize)
    chunk = min(num_patterns, 1 << 28)
    values = torch.empty(chunk, dtype=source, device=backend.torch_device)
    result = torch.empty(chunk, dtype=target, device=backend.torch_device)
    copy = BatchCopy(backend, [(result, values)])
    assert (len(copy._launches), len(copy._through_torch[0])) == (1, 0), "the kernels are not used"
    wrong = 0
    for first in range(-num_patterns // 2, num_patterns // 2, chunk):
        torch.arange(first, first + chunk, dtype=as_int, out=values.view(as_int))
        copy()
        wrong += int((result.view(to_int) != values.to(target).view(to_int)).sum())
    return wrong


def wrong_boxes(backend: Backend, nbytes: int) -> dict[str, int]:
    """Number of wrong elements of boxes with all kinds of strides and alignment, by pair of dtypes."""
    wrong: dict[str, int] = {}
    for source, target in itertools.product(FLOATS, repeat=2):
        values = torch.randn(nbytes // (4096 * source.itemsize), 4096, device=backend.torch_device).to(source)
        flat = values.view(-1)
        boxes = [
            values, values[:, 1024:3072], values[1:, 7:4001], values[:, 5], flat[1:-3], flat[2::3], values[:, 8:16],
            values.view(-1, 64, 64)[:, 1:9, 3:44],
        ]  # fmt: skip
        pairs = [(torch.empty(box.shape, dtype=target, device=box.device), box) for box in boxes]
        copy = BatchCopy(backend, pairs)
        assert len(copy._through_torch[0]) == 1
        stream = backend.new_stream()
        backend.synchronize()
        copy(stream)
        backend.synchronize(stream)
        wrong[f"{source} to {target}"] = sum(int((result != box.to(target)).sum()) for result, box in pairs)
    return wrong


def copy_rate(backend: Backend) -> float:
    """GB/s read plus written by torch's copy within the device: what the others are measured against."""
    source, target = (torch.zeros(4 * GIB, dtype=torch.uint8, device=backend.torch_device) for _ in range(2))
    return 2 * source.numel() / _best_s(backend, lambda: target.copy_(source)) / 1e9


def digest_rate(backend: Backend) -> dict[str, float]:
    """All bfloat16 weights, one view each."""
    sizes = [2 * rows * columns for rows, columns in model_shapes()]
    block = random_block(backend, sum(sizes))
    ends = list(itertools.accumulate(sizes))
    digest = BatchDigest(backend, [block.tensor[end - size : end] for size, end in zip(sizes, ends, strict=True)])
    seconds = _best_s(backend, digest)
    block.close()
    return {"ms": seconds * 1e3, "GB/s": sum(sizes) / seconds / 1e9, "views": len(sizes)}


def pack_rate(backend: Backend) -> dict[str, float]:
    """A quarter of every float32 weight into one block of bfloat16. The weights that tensor parallelism cuts along
    columns are two boxes each."""
    boxes: list[torch.Tensor] = []
    for rows, columns in model_shapes():
        shard = torch.randn(max(1, rows // 4), columns, device=backend.torch_device)
        is_cut = rows == HIDDEN
        boxes.extend(shard.chunk(2, dim=1) if is_cut else (shard,))
    block = backend.alloc_persistent(2 * sum(box.numel() for box in boxes))
    packed, pairs, start = block.tensor.view(torch.bfloat16), list[tuple[torch.Tensor, torch.Tensor]](), 0
    for box in boxes:
        pairs.append((packed[start : start + box.numel()].view(box.shape), box))
        start += box.numel()
    seconds, copy = _move_s(backend, pairs)
    is_right = all(torch.equal(target, source.to(torch.bfloat16)) for target, source in pairs)
    block.close()
    rate = 3 * sum(target.nbytes for target, _ in pairs) / seconds / 1e9
    return {"ms": seconds * 1e3, "GB/s": rate, "launches": len(copy._launches), "right": float(is_right)}


def commit_rate(backend: Backend) -> dict[str, float]:
    """Bytes of a staging buffer into bfloat16 parameters, each in four runs, as four learners hold them."""
    params = [torch.zeros(r, c, dtype=torch.bfloat16, device=backend.torch_device) for r, c in model_shapes()]
    block = random_block(backend, 2 * sum(param.numel() for param in params))
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    start = 0
    for param in params:
        for run in param.view(-1).view(torch.uint8).chunk(4):
            pairs.append((run, block.tensor[start : start + run.numel()]))
            start += run.numel()
    seconds, copy = _move_s(backend, pairs)
    is_right = all(torch.equal(target, source) for target, source in pairs)
    block.close()
    rate = 2 * sum(target.nbytes for target, _ in pairs) / seconds / 1e9
    return {"ms": seconds * 1e3, "GB/s": rate, "launches": len(copy._launches), "right": float(is_right)}


def _move_s(backend: Backend, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[float, BatchCopy]:
    copy = BatchCopy(backend, pairs)
    assert copy._launches, "the kernels are not used"
    stream = backend.new_stream()
    backend.synchronize()

    def move() -> None:
        copy(stream)
        backend.synchronize(stream)

    return _best_s(backend, move), copy


def _best_s(backend: Backend, work: Callable[[], object], repeats: int = 8) -> float:
    times: list[float] = []
    for _ in range(repeats):
        backend.synchronize()
        start = time.perf_counter()
        work()
        backend.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)
