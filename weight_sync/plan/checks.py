"""Proof that a plan is whole: every byte of every engine parameter exactly once, inside its slot, in the right dtype.

Each function returns all problems as sentences instead of raising at the first: a renamed model has many.

`input_problems` is about what the planner is given. Of what it makes, a party proves its own part (`pack_problems`,
`pull_problems`); the planner, who alone sees the whole, proves all parts and that they fit each other
(`plan_problems`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.plan.geometry import TooScattered, dense_runs, extent, merge_spans, num_uncovered, spans_of_runs
from weight_sync.plan.types import DTYPE_BYTES, most_dims, padded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weight_sync.plan.types import (
        EngineParam,
        PackPlan,
        ParamMeta,
        Plan,
        PullPlan,
        RankShards,
        RecordedCopy,
        WorkerLayout,
    )


MAX_OFFSET = 1 << 60
"""Offsets and sizes stay far below the 64-bit limit, so that sums of two cannot overflow."""
MAX_NAMED = 8
"""Faults of one kind that are named one by one."""


def input_problems(
    params: Sequence[ParamMeta], shards: Sequence[RankShards], workers: Sequence[WorkerLayout]
) -> list[str]:
    """Why these three cannot become a plan; empty if they can."""
    by_name = {meta.name: meta for meta in params}
    problems = _param_problems(params)
    if len(by_name) == len(params):
        problems += _shard_problems(params, shards)
    problems += [f"worker {w} occurs {n} times" for w, n in Counter(x.worker for x in workers).items() if n > 1]
    if not workers:
        problems.append("no engine worker; a plan needs at least one")
    for layout in workers:
        problems += _worker_problems(by_name, layout)
    return problems + _unmatched_problems(by_name, workers)


def _param_problems(params: Sequence[ParamMeta]) -> list[str]:
    problems = [
        f"{name} is listed {n} times by the learner" for name, n in Counter(p.name for p in params).items() if n > 1
    ]
    for meta in params:
        if meta.dtype not in DTYPE_BYTES:
            problems.append(f"{meta.name} has dtype {meta.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if any(n < 0 for n in meta.shape) or prod(meta.shape) > MAX_OFFSET >> 3:
            problems.append(f"{meta.name} has the impossible shape {meta.shape}")
    return problems


def _shard_problems(params: Sequence[ParamMeta], shards: Sequence[RankShards]) -> list[str]:
    """Every element must be held. Ranks may hold the same box, as replicas, but different boxes must not overlap."""
    problems = [f"rank {r} describes itself {n} times" for r, n in Counter(s.rank for s in shards).items() if n > 1]
    shapes = padded([meta.shape for meta in params], most_dims(params), 1)
    held, digests = [np.zeros((0, 2 + 2 * shapes.shape[1]), np.int64)], [np.zeros(0, np.int64)]
    for shard in shards:
        for i in np.flatnonzero(np.bincount(shard.param, minlength=1) > 1).tolist():
            problems.append(f"rank {shard.rank} lists more than one shard of {params[i].name}; one is allowed")
        outside = (shard.start < 0).any(1) | (shard.start + shard.size > shapes[shard.param]).any(1)
        for i in np.flatnonzero(outside).tolist():
            meta = params[int(shard.param[i])]
            box = _box(shard.start[i], shard.size[i], len(meta.shape))
            problems.append(f"rank {shard.rank} holds {box} of {meta.name}, whose shape is {meta.shape}")
        boxes = np.column_stack([shard.param, shard.start, shard.size, np.full(len(shard.param), shard.rank)])
        held.append(boxes[~outside])
        digests.append(shard.digest[~outside])
    boxes, digest = np.concatenate(held), np.concatenate(digests)
    order = np.lexsort(boxes.T[::-1])
    boxes, digest = boxes[order], digest[order]
    is_other = np.ones(len(boxes), bool)
    is_other[1:] = (boxes[1:, :-1] != boxes[:-1, :-1]).any(1)
    for i in np.flatnonzero(~is_other[1:] & (digest[1:] != digest[:-1])).tolist():
        meta, ranks = params[boxes[i, 0]], sorted(boxes[i : i + 2, -1].tolist())
        problems.append(f"ranks {ranks[0]} and {ranks[1]} are replicas, but hold different values of {meta.name}")
    return problems + _tiling_problems(params, shapes, boxes[is_other])


def _tiling_problems(params: Sequence[ParamMeta], shapes: np.ndarray, held: np.ndarray) -> list[str]:
    """`held` are different boxes, sorted: int64[N, 2 + 2 D] of parameter, start, size, a rank."""
    num_dims = shapes.shape[1]
    param, start, size = held[:, 0], held[:, 1 : 1 + num_dims], held[:, 1 + num_dims : -1]
    volume = np.zeros(len(params), np.int64)
    np.add.at(volume, param, size.prod(1))
    is_suspect = volume != shapes.prod(1)
    is_row = (size[:, 1:] == shapes[param, 1:]).all(1)
    is_cut = np.zeros(len(params), bool)
    is_cut[param[~is_row]] = True
    # By rows, each box must begin where the one before it ends.
    before = np.zeros(len(held), np.int64)
    before[1:] = np.where(param[1:] == param[:-1], (start + size)[:-1, 0], 0)
    is_suspect[param[start[:, 0] != before]] = True
    is_suspect |= is_cut
    problems: list[str] = []
    uncovered: dict[bytes, int] = {}
    first, last = (
        np.searchsorted(param, np.arange(len(params))),
        np.searchsorted(param, np.arange(len(params)), "right"),
    )
    for i in np.flatnonzero(is_suspect).tolist():
        meta, boxes = params[i], slice(first[i], last[i])
        if not is_cut[i]:
            problems += _row_problems(meta, start[boxes, 0], size[boxes, 0], held[boxes, -1])
            continue
        key = shapes[i].tobytes() + held[boxes, 1:-1].tobytes()  # many parameters are alike
        if key not in uncovered:
            sides = zip(start[boxes].tolist(), size[boxes].tolist(), strict=True)
            uncovered[key] = num_uncovered(tuple(shapes[i].tolist()), [(tuple(a), tuple(n)) for a, n in sides])
        if missing := uncovered[key]:
            problems.append(f"{missing} of {prod(meta.shape)} elements of {meta.name} are held by no rank")
        if twice := int(volume[i]) - (prod(meta.shape) - missing):
            problems.append(f"{twice} elements of {meta.name} are held in boxes that overlap and are not the same")
    return problems


def _row_problems(meta: ParamMeta, starts: np.ndarray, sizes: np.ndarray, ranks: np.ndarray) -> list[str]:
    problems: list[str] = []
    at, num_rows = 0, meta.shape[0] if meta.shape else 1
    for start, size, rank in zip(starts.tolist(), sizes.tolist(), ranks.tolist(), strict=True):
        if start != at:
            word = "are held by no rank" if start > at else "are held twice"
            low, high = sorted((start, at))
            problems.append(f"rows {low}-{high} of {meta.name} {word} (at rank {rank})")
        at = max(at, start + size)
    if at != num_rows and prod(meta.shape):
        problems.append(f"rows {at}-{num_rows} of {meta.name} are held by no rank")
    return problems


def _box(start: np.ndarray, size: np.ndarray, ndim: int) -> str:
    """ "[0:3, 2:4]"."""
    spans = [(a, a + n) for a, n in zip(start[: max(1, ndim)].tolist(), size.tolist(), strict=False)]
    return f"[{', '.join(f'{a}:{b}' for a, b in spans)}]"


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


def plan_problems(plan: Plan) -> list[str]:
    """What is inconsistent in any part of a plan, or between parts."""
    problems = [problem for pack in plan.pack for problem in pack_problems(pack)]
    problems += [problem for pull in plan.pull for problem in pull_problems(pull)]
    problems += [f"rank {r} has {n} pack plans" for r, n in Counter(p.rank for p in plan.pack).items() if n > 1]
    problems += [f"worker {w} has {n} pull plans" for w, n in Counter(p.worker for p in plan.pull).items() if n > 1]
    if problems:
        return problems
    empty = np.zeros((0, 4), np.int64)
    served = [
        np.column_stack([np.full(len(p.readers), p.rank), p.readers[:, :1], p.segments[p.readers[:, 1]]])
        for p in sorted(plan.pack, key=lambda pack: pack.rank)
    ]
    wanted = [
        np.column_stack([p.table[:, :1], np.full(len(p.table), p.worker), p.table[:, [1, 4]]])
        for p in sorted(plan.pull, key=lambda pull: pull.worker)
    ]
    # Learner by learner, worker by worker, each in the order of the worker's plan.
    here, there = (np.concatenate([empty, *tables]) for tables in (served, wanted))
    if here.shape != there.shape or (here != there[np.argsort(there[:, 0], kind="stable")]).any():
        problems.append("learners serve other runs than the ones that workers read")
    return problems


def pack_problems(plan: PackPlan) -> list[str]:
    """What is inconsistent in a learner rank's own part."""
    who, params = f"rank {plan.rank}", plan.params
    problems = _param_problems(params)
    num_dims = plan.table.shape[1] // 2 - 1
    if plan.table.shape[1] != 2 + 2 * num_dims or num_dims < most_dims(params):
        problems.append(f"{who}: items have {plan.table.shape[1]} columns, parameters up to {most_dims(params)} dims")
    if plan.segments.shape[1] != 2 or plan.readers.shape[1] != 2:
        problems.append(f"{who}: segments and readers must have 2 columns")
    if problems:
        return problems
    index, offset, start, size = plan.table[:, 0], plan.table[:, 1], *np.split(plan.table[:, 2:], 2, axis=1)
    if ((index < 0) | (index >= len(params))).any():
        return [f"{who}: items of no such parameter; there are {len(params)}"]
    shapes = padded([meta.shape for meta in params], num_dims, 1)[index]
    faults = [("exceeds the parameter's shape", (start < 0) | (size <= 0) | (start > shapes - size))]
    limit = min(plan.arena_bytes, MAX_OFFSET)
    itemsize = np.array([DTYPE_BYTES[meta.dtype] for meta in params], np.int64)[index]
    nbytes = np.where(faults[0][1].any(1), 0, size.prod(1) * itemsize)
    faults.append((f"ends beyond the arena of {limit} bytes", ((offset < 0) | (offset > limit - nbytes))[:, None]))
    faults.append(("is not aligned to its elements", (offset % itemsize != 0)[:, None]))
    for fault, mask in faults:
        for i in np.flatnonzero(mask.any(1))[:MAX_NAMED].tolist():
            box = _box(start[i], size[i], len(params[index[i]].shape))
            problems.append(f"{who}: {box} of {params[index[i]].name} at byte {offset[i]}: {fault}")
    if problems:
        return problems
    packed, num_twice = merge_spans(np.column_stack([offset, offset + nbytes]))
    if num_twice:
        problems.append(f"{who}: {num_twice} bytes of the arena are packed more than once")
    first, length = plan.segments.T
    at = np.searchsorted(packed[:, 0], first, side="right") - 1
    ends = packed[at, 1] if len(packed) else np.zeros(len(at), np.int64)
    wrong = (at < 0) | (first < 0) | (length <= 0) | (length > ends - first)
    for i in np.flatnonzero(wrong)[:MAX_NAMED].tolist():
        problems.append(f"{who}: a run of {length[i]} bytes at {first[i]} reads bytes that are not packed")
    if ((plan.readers[:, 1] < 0) | (plan.readers[:, 1] >= len(plan.segments))).any():
        problems.append(f"{who}: a worker reads a run that is not listed")
    return problems


def pull_problems(plan: PullPlan) -> list[str]:
    """What is inconsistent in an engine worker's own part, its parameters aside."""
    who = f"worker {plan.worker}"
    if plan.table.shape[1] != 5:
        return [f"{who}: runs must have 5 columns, got {plan.table.shape[1]}"]
    rank, src_off, index, dst_off, nbytes = plan.table.T
    if ((index < 0) | (index >= len(plan.names))).any():
        return [f"{who}: runs to no such parameter; there are {len(plan.names)}"]
    wrong = (rank < 0) | (nbytes <= 0) | (nbytes > MAX_OFFSET)
    wrong |= (src_off < 0) | (src_off > MAX_OFFSET) | (dst_off < 0) | (dst_off > MAX_OFFSET)
    problems = [
        f"{who}: run of {nbytes[i]} bytes at {src_off[i]} of rank {rank[i]} to {plan.names[index[i]]}+{dst_off[i]}: "
        "rank, size or offset is out of range"
        for i in np.flatnonzero(wrong)[:MAX_NAMED].tolist()
    ]
    if problems:
        return problems
    order = np.lexsort((dst_off, index))
    to, first, stop = index[order], dst_off[order], (dst_off + nbytes)[order]
    again = np.flatnonzero((to[1:] == to[:-1]) & (first[1:] < stop[:-1]))
    return [
        f"{who}: bytes of {plan.names[to[i]]} from {first[i + 1]} on are written more than once"
        for i in again[:MAX_NAMED].tolist()
    ]
