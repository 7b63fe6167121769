"""Proof that a plan is whole: every byte of every engine parameter exactly once, inside its slot, in the right dtype.

Each function returns all problems as sentences instead of raising at the first: a renamed model has many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.plan.geometry import TooScattered, dense_runs, extent, merge_spans, num_uncovered, spans_of_runs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weight_sync.plan.types import (
        EngineParam,
        Manifest,
        PackItem,
        PackPlan,
        ParamMeta,
        PullPlan,
        RecordedCopy,
        Run,
        ShardDesc,
        WorkerLayout,
    )


DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes per element of the dtypes that can travel, by torch name."""
MAX_OFFSET = 1 << 60
"""Offsets and sizes stay far below the 64-bit limit, so that sums of two cannot overflow."""


def num_rows(meta: ParamMeta) -> int:
    """Rows that shards are counted in: dimension 0, or 1 for a scalar."""
    return meta.shape[0] if meta.shape else 1


def input_problems(
    params: Sequence[ParamMeta], shards: Sequence[ShardDesc], workers: Sequence[WorkerLayout]
) -> list[str]:
    """Why these three cannot become a manifest; empty if they can."""
    by_name = {meta.name: meta for meta in params}
    problems = _param_problems(params) + _shard_problems(by_name, shards)
    problems += [f"worker {w} occurs {n} times" for w, n in Counter(x.worker for x in workers).items() if n > 1]
    if not workers:
        problems.append("no engine worker; a manifest needs at least one")
    for layout in workers:
        problems += _worker_problems(by_name, layout)
    return problems + _unmatched_problems(by_name, workers)


def _param_problems(params: Sequence[ParamMeta]) -> list[str]:
    problems = [
        f"{name} is listed {n} times by the learner" for name, n in Counter(p.name for p in params).items() if n > 1
    ]
    for meta in params:
        if meta.dtype not in DTYPE_BYTES:
            problems.append(f"{meta.name} has dtype {meta.dtype!r}; allowed are {', '.join(DTYPE_BYTES)}")
        if any(n < 0 for n in meta.shape):
            problems.append(f"{meta.name} has the impossible shape {meta.shape}")
    return problems


def _shard_problems(by_name: Mapping[str, ParamMeta], shards: Sequence[ShardDesc]) -> list[str]:
    problems: list[str] = []
    filled: defaultdict[str, list[ShardDesc]] = defaultdict(list)
    for (name, rank), n in Counter((s.param, s.rank) for s in shards).items():
        if n > 1:
            problems.append(f"rank {rank} lists {n} shards of {name}; one is allowed")
    for shard in shards:
        meta = by_name.get(shard.param)
        if meta is None:
            problems.append(f"rank {shard.rank} holds {shard.param}, which the learner's parameters do not list")
        elif not 0 <= shard.row_start <= shard.row_stop <= num_rows(meta):
            problems.append(
                f"rank {shard.rank} holds rows {shard.row_start}-{shard.row_stop} of {shard.param}, "
                f"which has {num_rows(meta)} rows"
            )
        elif shard.row_stop > shard.row_start:
            filled[shard.param].append(shard)
    for name, meta in by_name.items():
        at = 0
        for shard in sorted(filled[name], key=lambda s: s.row_start):
            if shard.row_start != at:
                word = "are held by no rank" if shard.row_start > at else "are held twice"
                low, high = sorted((shard.row_start, at))
                problems.append(f"rows {low}-{high} of {name} {word} (at rank {shard.rank})")
            at = max(at, shard.row_stop)
        if at != num_rows(meta):
            problems.append(f"rows {at}-{num_rows(meta)} of {name} are held by no rank")
    return problems


def _worker_problems(by_name: Mapping[str, ParamMeta], layout: WorkerLayout) -> list[str]:
    engine = {param.name: param for param in layout.params}
    problems: list[str] = []
    landed: defaultdict[str, list[tuple[np.ndarray, int]]] = defaultdict(list)
    wrong_dtype: dict[str, str] = {}
    for copy in layout.copies:
        meta, param = by_name.get(copy.src_param), engine.get(copy.dst_param)
        where = f"worker {layout.worker}: {copy.src_param} -> {copy.dst_param}"
        if meta is None:
            problems.append(f"{where}: the learner has no parameter of that name")
        elif param is None:
            problems.append(f"{where}: the engine lists no parameter of that name")
        elif fault := _copy_fault(meta, param, copy):
            problems.append(f"{where}: {fault}")
        else:
            if meta.dtype != param.dtype:
                wrong_dtype[f"{copy.src_param}, {copy.dst_param}"] = f"{meta.dtype}, the engine stores {param.dtype}"
            try:
                landed[copy.dst_param].append(dense_runs(copy.dst_offset, copy.src_size, copy.dst_stride))
            except TooScattered as error:
                problems.append(f"{where}: {error}; the engine stores it in another order, use the reload path for it")
    problems += [
        f"worker {layout.worker}: {names}: the wire has {dtypes}; send what the engine stores (rollout dtype)"
        for names, dtypes in wrong_dtype.items()
    ]
    for name, runs in landed.items():
        _, num_twice = merge_spans(spans_of_runs(runs))
        if num_twice:
            problems.append(f"worker {layout.worker}: {num_twice} elements of {name} are written more than once")
    return problems


def _copy_fault(meta: ParamMeta, param: EngineParam, copy: RecordedCopy) -> str:
    ndim = len(meta.shape)
    if not len(copy.src_start) == len(copy.src_size) == len(copy.dst_stride) == ndim:
        return f"recorded with {len(copy.src_size)} dimensions, the learner's shape is {meta.shape}"
    if any(
        first < 0 or n < 0 or first + n > length
        for first, n, length in zip(copy.src_start, copy.src_size, meta.shape, strict=True)
    ):
        return f"box at {copy.src_start} of size {copy.src_size} exceeds the learner's shape {meta.shape}"
    if copy.dst_offset < 0 or any(step < 0 for step in copy.dst_stride):
        return f"destination offset {copy.dst_offset} and strides {copy.dst_stride} must not be negative"
    end = copy.dst_offset + extent(copy.src_size, copy.dst_stride)
    if end > prod(param.shape):
        return f"writes up to element {end} of {prod(param.shape)} (shape {param.shape})"
    return ""


def _unmatched_problems(by_name: Mapping[str, ParamMeta], workers: Sequence[WorkerLayout]) -> list[str]:
    """What only one side has. A worker of a pipeline or of expert parallelism loads a part, so all count together."""
    boxes: defaultdict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(set)
    for layout in workers:
        for copy in layout.copies:
            boxes[copy.src_param].add((copy.src_start, copy.src_size))
    problems: list[str] = []
    for name, meta in by_name.items():
        used = [(start, size) for start, size in boxes[name] if len(start) == len(size) == len(meta.shape)]
        if not prod(meta.shape) or len(used) < len(boxes[name]):
            continue  # nothing to send, or reported with its copies
        if not used:
            problems.append(
                f"{name} {meta.shape} is trained but no engine worker loads it; it would silently keep its old value"
            )
        elif missing := num_uncovered(meta.shape, used):
            problems.append(
                f"{missing} of {prod(meta.shape)} elements of {name} {meta.shape} are trained but no engine worker "
                "loads them; they would silently keep their old values"
            )
    written = {copy.dst_param for layout in workers for copy in layout.copies}
    sizes = {param.name: prod(param.shape) for layout in workers for param in layout.params}
    problems += [
        f"{name} of the engine ({num_elements} elements) receives nothing from the learner"
        for name, num_elements in sizes.items()
        if name not in written and num_elements
    ]
    return problems


def manifest_problems(manifest: Manifest) -> list[str]:
    """What is inconsistent inside a manifest, the digest aside."""
    problems = _param_problems(manifest.params)
    by_name = {meta.name: meta for meta in manifest.params if meta.dtype in DTYPE_BYTES}
    problems += [f"rank {r} has {n} pack plans" for r, n in Counter(p.rank for p in manifest.pack).items() if n > 1]
    problems += [f"worker {w} has {n} pull plans" for w, n in Counter(p.worker for p in manifest.pull).items() if n > 1]
    packed: dict[int, np.ndarray] = {}
    for plan in manifest.pack:
        problems += _pack_problems(by_name, plan)
        packed[plan.rank], num_twice = merge_spans(_spans((i.arena_off, i.nbytes) for i in plan.items))
        if num_twice:
            problems.append(f"rank {plan.rank}: {num_twice} bytes of the arena are packed more than once")
    for plan in manifest.pull:
        written: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for run, is_packed in zip(plan.runs, _are_packed(packed, plan.runs), strict=True):
            if run.nbytes <= 0 or run.src_off < 0 or not 0 <= run.dst_off < MAX_OFFSET:
                where = f"{_run_of(plan, run)} to {run.dst_param}+{run.dst_off}"
                problems.append(f"{where}: size or offset is out of range")
            elif not is_packed:
                problems.append(f"{_run_of(plan, run)} reads bytes that are not packed")
            written[run.dst_param].append((run.dst_off, run.nbytes))
        for name, spans in written.items():
            _, num_twice = merge_spans(_spans(spans))
            if num_twice:
                problems.append(f"worker {plan.worker}: {num_twice} bytes of {name} are written more than once")
    return problems


def _pack_problems(by_name: Mapping[str, ParamMeta], plan: PackPlan) -> list[str]:
    problems: list[str] = []
    for item in plan.items:
        fault = _item_fault(by_name.get(item.param), item, plan.arena_bytes)
        if fault:
            problems.append(f"rank {plan.rank}: {item.param} at byte {item.arena_off}: {fault}")
    return problems


def _item_fault(meta: ParamMeta | None, item: PackItem, arena_bytes: int) -> str:
    if meta is None:
        return "no such parameter"
    if len(item.start) != len(meta.shape) or len(item.size) != len(meta.shape):
        return f"box has {len(item.size)} dimensions, the parameter's shape is {meta.shape}"
    if any(a < 0 or n <= 0 or a + n > m for a, n, m in zip(item.start, item.size, meta.shape, strict=True)):
        return f"box at {item.start} of size {item.size} exceeds {meta.shape}"
    itemsize = DTYPE_BYTES[meta.dtype]
    if item.nbytes != prod(item.size) * itemsize:
        return f"{item.nbytes} bytes for {prod(item.size)} elements of {meta.dtype}"
    if item.arena_off < 0 or item.arena_off + item.nbytes > min(arena_bytes, MAX_OFFSET):
        return f"ends at byte {item.arena_off + item.nbytes} of an arena of {arena_bytes}"
    if item.arena_off % itemsize:
        return f"is not aligned to its {itemsize}-byte elements"
    return ""


def _spans(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """(offset, nbytes) -> int64[R, 2]; those that are reported as impossible anyway are left out."""
    spans = [(a, a + n) for a, n in pairs if n > 0 and 0 <= a < MAX_OFFSET and a + n <= MAX_OFFSET]
    return np.array(spans, np.int64).reshape(-1, 2)


def _are_packed(packed: Mapping[int, np.ndarray], runs: Sequence[Run]) -> list[bool]:
    """Which runs lie inside one of the disjoint sorted intervals that their rank packs."""
    by_rank: defaultdict[int, list[int]] = defaultdict(list)
    for i, run in enumerate(runs):
        by_rank[run.src_rank].append(i)
    inside = np.zeros(len(runs), bool)
    for rank, indices in by_rank.items():
        intervals = packed.get(rank)
        if intervals is not None and len(intervals):
            first = _clipped(runs[i].src_off for i in indices)
            last = _clipped(runs[i].src_off + runs[i].nbytes for i in indices)
            at = np.searchsorted(intervals[:, 0], first, side="right") - 1
            inside[indices] = (at >= 0) & (last <= intervals[at, 1])
    return inside.tolist()


def _clipped(offsets: Iterable[int]) -> np.ndarray:
    """int64[R]; what no arena can hold becomes an offset outside of all."""
    return np.fromiter((max(-1, min(offset, MAX_OFFSET + 1)) for offset in offsets), np.int64)


def _run_of(plan: PullPlan, run: Run) -> str:
    return f"worker {plan.worker}: run of {run.nbytes} bytes at {run.src_off} of rank {run.src_rank}"
