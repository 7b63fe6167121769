"""The plan: which bytes each learner rank packs, and which runs of them each engine worker pulls. Pure, no torch.

`build_plan` intersects what learner ranks hold (`RankShards`) with what the engine's loader did (`WorkerLayout`). Every
intersection is a box of one shard. It is packed once, however many workers need it, and written contiguously:

    arena of rank 0:  [ boxes only worker 0 needs | boxes that workers 0 and 1 need | boxes only worker 1 needs ]

Inside a section boxes follow the order of the engine's parameters and of the bytes in them, so neighbours in the arena
are neighbours in the engine and their runs merge. Column strips (row-parallel layers) become contiguous when packed.
A box that several ranks hold (HSDP) is served in parts, each rank an equal share of all bytes that they have in common.

Models of experts make millions of boxes, so everything below is numpy, with a row per box.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from weight_sync.errors import PlanMismatch
from weight_sync.plan.checks import input_problems, plan_problems
from weight_sync.plan.geometry import dense_runs
from weight_sync.plan.types import DTYPE_BYTES, PackPlan, Plan, PullPlan, most_dims, padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weight_sync.plan.types import ParamMeta, RankShards, WorkerLayout


ALIGN_BYTES = 64
"""Items start here, so that a vectorised pack kernel never straddles and every vendor's copy engine takes them; a run
that goes on is not torn apart for it."""


class _Boxes(NamedTuple):
    """What ranks serve: boxes that tile every parameter."""

    rank: np.ndarray
    param: np.ndarray
    start: np.ndarray
    """int64[N, D], in the parameter."""
    size: np.ndarray
    origin: np.ndarray
    """int64[N, D]: where the shard that the box is part of begins."""


class _Copies(NamedTuple):
    """Copies that are not empty, in the order of the workers."""

    worker: np.ndarray
    src: np.ndarray
    """Index of the parameter."""
    start: np.ndarray
    size: np.ndarray
    dst: np.ndarray
    """Index into the sorted names of all engine parameters."""
    dst_order: np.ndarray
    """Place of that parameter in its worker's model."""
    dst_offset: np.ndarray
    stride: np.ndarray


class _Parts(NamedTuple):
    """Boxes of one shard that one worker wants. The parts of a box stand together, in the order of the workers."""

    copy: np.ndarray
    """Index into the copies."""
    shard: np.ndarray
    """Index into the boxes that are served."""
    start: np.ndarray
    """int64[P, D], in the parameter."""
    size: np.ndarray
    dst_offset: np.ndarray
    """Elements."""
    box: np.ndarray
    """Number of the box, from 0, without gaps."""


def build_plan(
    *, epoch: int, params: Sequence[ParamMeta], shards: Sequence[RankShards], workers: Sequence[WorkerLayout]
) -> Plan:
    """Agree on every byte of a sync before one moves.

    `shards` has an entry for every learner rank, and each gets a `PackPlan`, be it empty. Replicas of the engine that
    are split alike share one plan: `workers` are the workers of one replica.

    Where the engine keeps a parameter in float32 although the rollout dtype is shorter (routers, norms of some models),
    it is sent in float32; the plan's `params` say so.

    Raises:
        PlanMismatch: learner and engine disagree; the message lists every problem.
    """
    params = _as_wide_as_stored(params, workers)
    problems = input_problems(params, shards, workers)
    if problems:
        raise mismatch("the learner's parameters do not fit the engine's model", problems)
    itemsize = np.array([DTYPE_BYTES[meta.dtype] for meta in params], np.int64)
    served = _spread(params, shards, itemsize)
    names = sorted({param.name for layout in workers for param in layout.params})
    copies = _columns(params, workers, names)
    parts = _cut(params, served, copies)
    boxes = _in_arena_order(served, copies, parts)
    offsets, arena_bytes = _place(served, copies, parts, boxes, itemsize)
    runs = _runs(served, copies, parts, _scatter(parts.box[boxes], offsets), itemsize)
    shard = parts.shard[boxes]
    packed = _Packed(
        rank=served.rank[shard],
        param=served.param[shard],
        box=np.hstack([offsets[:, None], parts.start[boxes] - served.origin[shard], parts.size[boxes]]),
    )
    return Plan(
        epoch=epoch,
        params=params,
        pack=_pack_plans(params, sorted(shard.rank for shard in shards), packed, arena_bytes, runs),
        pull=_pull_plans(names, sorted(layout.worker for layout in workers), runs),
    )


def check_plan(plan: Plan) -> None:
    """Prove, apart from how it was made, that a plan is whole: see `checks.plan_problems`.

    Raises:
        PlanMismatch: listing every problem.
    """
    problems = plan_problems(plan)
    if problems:
        raise mismatch(f"the plan of epoch {plan.epoch} is not consistent", problems)


def mismatch(what: str, problems: Sequence[str]) -> PlanMismatch:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return PlanMismatch(f"{what} ({len(problems)} problem{'s' if len(problems) != 1 else ''}):{lines}")


def _as_wide_as_stored(params: Sequence[ParamMeta], workers: Sequence[WorkerLayout]) -> tuple[ParamMeta, ...]:
    stored: dict[str, set[str]] = {meta.name: set() for meta in params}
    for layout in workers:
        dtypes = {param.name: param.dtype for param in layout.params}
        for copy in layout.copies:
            stored.setdefault(copy.src_param, set()).add(dtypes.get(copy.dst_param, ""))
    return tuple(
        msgspec.structs.replace(meta, dtype="float32")
        if meta.dtype in ("bfloat16", "float16") and stored[meta.name] == {"float32"}
        else meta
        for meta in params
    )


def _spread(params: Sequence[ParamMeta], shards: Sequence[RankShards], itemsize: np.ndarray) -> _Boxes:
    """Which rank serves what. Where m ranks hold the same boxes, these are lined up in the order of the parameters, and
    the line is cut at the rows nearest to its m-ths: no more than m - 1 boxes are torn."""
    rank = np.repeat(np.array([shard.rank for shard in shards], np.int64), [len(shard.param) for shard in shards])
    param = np.concatenate([shard.param for shard in shards])
    start = np.concatenate([shard.start for shard in shards])
    size = np.concatenate([shard.size for shard in shards])
    order = np.lexsort((rank, *size.T[::-1], *start.T[::-1], param))
    rank, param, start, size = rank[order], param[order], start[order], size[order]
    heads = np.flatnonzero(_changes(param, *start.T, *size.T))
    if len(heads) == len(rank):
        return _Boxes(rank, param, start, size, start)
    holders = np.diff(heads, append=len(rank))
    group = _sets(rank, heads)
    nbytes = size[heads].prod(1) * itemsize[param[heads]]
    by_group = np.argsort(group, kind="stable")
    begins = np.empty_like(nbytes)
    begins[by_group] = _running(nbytes[by_group], np.flatnonzero(_changes(group[by_group])))
    total = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(total, group, nbytes)
    box, nth = _expand(holders)
    # Floor division on both sides: the rows of neighbours meet.
    row_bytes, rows = (nbytes // size[heads, 0])[box], size[heads, 0][box]
    bounds = [(total[group[box]] * (nth + k) // holders[box] - begins[box]) // row_bytes for k in (0, 1)]
    first, last = (np.clip(bound, 0, rows) for bound in bounds)
    kept = last > first
    start, size, origin = start[heads][box], size[heads][box], start[heads][box]
    start[:, 0] += first
    size[:, 0] = last - first
    return _Boxes(rank[kept], param[heads][box][kept], start[kept], size[kept], origin[kept])


def _columns(params: Sequence[ParamMeta], workers: Sequence[WorkerLayout], names: Sequence[str]) -> _Copies:
    num_dims = most_dims(params)
    index = {meta.name: i for i, meta in enumerate(params)}
    place = {name: i for i, name in enumerate(names)}
    layouts = sorted(workers, key=lambda layout: layout.worker)
    orders = [{param.name: i for i, param in enumerate(layout.params)} for layout in layouts]
    rows = [(i, copy) for i, layout in enumerate(layouts) for copy in layout.copies if prod(copy.src_size)]
    return _Copies(
        worker=_ints(layouts[i].worker for i, _ in rows),
        src=_ints(index[copy.src_param] for _, copy in rows),
        start=padded([copy.src_start for _, copy in rows], num_dims, 0),
        size=padded([copy.src_size for _, copy in rows], num_dims, 1),
        dst=_ints(place[copy.dst_param] for _, copy in rows),
        dst_order=_ints(orders[i][copy.dst_param] for i, copy in rows),
        dst_offset=_ints(copy.dst_offset for _, copy in rows),
        stride=padded([copy.dst_stride for _, copy in rows], num_dims, 0),
    )


def _cut(params: Sequence[ParamMeta], served: _Boxes, copies: _Copies) -> _Parts:
    """All rows of all parameters lie one after another on one line, on which each copy finds the boxes that it needs:
    those whose rows meet its own, and of these the ones that it meets in every dimension."""
    rows = np.array([meta.shape[0] if meta.shape else 1 for meta in params], np.int64)
    base = np.cumsum(rows) - rows
    begins = base[served.param] + served.start[:, 0]
    order = np.argsort(begins, kind="stable")
    begins = begins[order]
    reach = np.maximum.accumulate(begins + served.size[order, 0])
    wanted = base[copies.src] + copies.start[:, 0]
    first = np.searchsorted(reach, wanted, side="right")
    copy, nth = _expand(np.searchsorted(begins, wanted + copies.size[:, 0]) - first)
    shard = order[first[copy] + nth]
    start = np.maximum(copies.start[copy], served.start[shard])
    stop = np.minimum(copies.start[copy] + copies.size[copy], served.start[shard] + served.size[shard])
    meets = (stop > start).all(1)
    copy, shard, start, stop = copy[meets], shard[meets], start[meets], stop[meets]
    offset = copies.dst_offset[copy] + ((start - copies.start[copy]) * copies.stride[copy]).sum(1)
    order = np.lexsort((copy, *(stop - start).T[::-1], *start.T[::-1], shard))
    copy, shard, start, size, offset = (each[order] for each in (copy, shard, start, stop - start, offset))
    return _Parts(copy, shard, start, size, offset, box=np.cumsum(_changes(shard, *start.T, *size.T)) - 1)


def _in_arena_order(served: _Boxes, copies: _Copies, parts: _Parts) -> np.ndarray:
    """First part of every box, sorted by rank, consumers, and place in the first consumer's model."""
    first = np.flatnonzero(_changes(parts.box))
    consumers = _sets(copies.worker[parts.copy], first)
    copy, shard = parts.copy[first], parts.shard[first]
    keys = (served.rank[shard], consumers, copies.dst_order[copy], parts.dst_offset[first])
    return first[np.lexsort(keys[::-1])]


def _place(
    served: _Boxes, copies: _Copies, parts: _Parts, boxes: np.ndarray, itemsize: np.ndarray
) -> tuple[np.ndarray, dict[int, int]]:
    """Arena offset of every box, and the size of each rank's arena, in bytes.

    A box that follows the box before it in the parameter of its first worker is placed without a gap (and is
    element-aligned, because both have the parameter's dtype). Any other starts at `ALIGN_BYTES`.
    """
    copy, rank, start = parts.copy[boxes], served.rank[parts.shard[boxes]], parts.dst_offset[boxes]
    stop = start + 1 + ((parts.size[boxes] - 1) * copies.stride[copy]).sum(1)
    opens = _changes(rank, copies.worker[copy], copies.dst[copy])
    opens[1:] |= start[1:] != stop[:-1]
    nbytes = parts.size[boxes].prod(1) * itemsize[copies.src[copy]]
    heads = np.flatnonzero(opens)
    sizes = -(-_sums(nbytes, heads) // ALIGN_BYTES) * ALIGN_BYTES
    bounds = np.flatnonzero(_changes(rank))
    chain = np.cumsum(opens) - 1
    chain_offsets = _running(sizes, chain[bounds])
    arena_bytes = dict(zip(rank[bounds].tolist(), _sums(sizes, chain[bounds]).tolist(), strict=True))
    return chain_offsets[chain] + _running(nbytes, heads), arena_bytes


class _Runs(NamedTuple):
    """Sorted by worker, then in arena order."""

    worker: np.ndarray
    rank: np.ndarray
    src_off: np.ndarray
    dst: np.ndarray
    dst_off: np.ndarray
    nbytes: np.ndarray


def _runs(served: _Boxes, copies: _Copies, parts: _Parts, offset_of_box: np.ndarray, itemsize: np.ndarray) -> _Runs:
    """Neighbours in both arena and parameter are joined."""
    part, nth, start, length = _dense_runs(copies, parts)
    copy = parts.copy[part]
    width = itemsize[copies.src[copy]]
    nbytes = length * width
    src_off = offset_of_box[parts.box[part]] + nth * nbytes
    dst_off = (parts.dst_offset[part] + start) * width
    columns = (copies.worker[copy], served.rank[parts.shard[part]], src_off, copies.dst[copy], dst_off)
    order = np.lexsort(columns[::-1])
    worker, rank, src_off, dst, dst_off = (column[order] for column in columns)
    nbytes = nbytes[order]
    opens = _changes(worker, rank, dst)
    opens[1:] |= (src_off[1:] != (src_off + nbytes)[:-1]) | (dst_off[1:] != (dst_off + nbytes)[:-1])
    heads = np.flatnonzero(opens)
    return _Runs(*(column[heads] for column in (worker, rank, src_off, dst, dst_off)), nbytes=_sums(nbytes, heads))


def _dense_runs(copies: _Copies, parts: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Contiguous runs of all parts: (part, its number in that part, first element from that of the part, elements).

    Layers and experts repeat few views many times, so each view is split once. None is too scattered: a whole copy has
    at least as many runs as any of its parts, and `input_problems` has tried them.
    """
    stride, _ = _numbered(*copies.stride.T)
    view, example = _numbered(stride[parts.copy], *parts.size.T)
    split = [
        dense_runs(0, size, step)
        for size, step in zip(parts.size[example].tolist(), copies.stride[parts.copy[example]].tolist(), strict=True)
    ]
    counts = _ints(len(starts) for starts, _ in split)
    lengths = _ints(length for _, length in split)
    flat = np.concatenate([np.zeros(0, np.int64), *(starts for starts, _ in split)])
    part, nth = _expand(counts[view])
    which = view[part]
    return part, nth, flat[(np.cumsum(counts) - counts)[which] + nth], lengths[which]


class _Packed(NamedTuple):
    """Boxes in the order of the arenas, sorted by rank."""

    rank: np.ndarray
    param: np.ndarray
    box: np.ndarray
    """int64[N, 1 + 2 D]: offset in the arena, start in the shard, size."""


def _pack_plans(
    params: Sequence[ParamMeta], ranks: Sequence[int], packed: _Packed, arena_bytes: Mapping[int, int], runs: _Runs
) -> tuple[PackPlan, ...]:
    segment, example = _numbered(runs.rank, runs.src_off, runs.nbytes)
    segments = np.stack([runs.src_off[example], runs.nbytes[example]], 1)
    by_rank = np.argsort(runs.rank, kind="stable")
    readers = np.stack([runs.worker[by_rank], segment[by_rank]], 1)
    columns = (packed.rank, runs.rank[example], runs.rank[by_rank])
    plans: list[PackPlan] = []
    for rank in ranks:
        items, listed, read = (slice(*np.searchsorted(column, (rank, rank + 1)).tolist()) for column in columns)
        used, index = np.unique(packed.param[items], return_inverse=True)
        plan = PackPlan(
            rank=rank,
            params=tuple(params[i] for i in used.tolist()),
            arena_bytes=arena_bytes.get(rank, 0),
            table=np.column_stack([index, packed.box[items]]),
            segments=segments[listed],
            readers=readers[read] - np.array([0, listed.start]),
        )
        plans.append(plan)
    return tuple(plans)


def _pull_plans(names: list[str], workers: Sequence[int], runs: _Runs) -> tuple[PullPlan, ...]:
    plans: list[PullPlan] = []
    for worker in workers:
        own = slice(*np.searchsorted(runs.worker, (worker, worker + 1)).tolist())
        used, index = np.unique(runs.dst[own], return_inverse=True)
        table = np.stack([runs.rank[own], runs.src_off[own], index, runs.dst_off[own], runs.nbytes[own]], 1)
        plans.append(PullPlan(worker=worker, names=tuple(names[i] for i in used.tolist()), table=table))
    return tuple(plans)


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _numbered(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place among the distinct ones, which are sorted by the first column, then the second, ...; and the
    index of an example of each."""
    order = np.lexsort(columns[::-1])
    opens = _changes(*(column[order] for column in columns))
    return _scatter(order, np.cumsum(opens) - 1), order[opens]


def _sets(values: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """A number for each stretch of values that begins at `heads`, the same for equal sets of values. Sets are numbered
    as sorted tuples of their values are: (0,), (0, 1), (1,)."""
    distinct, place = np.unique(values, return_inverse=True)
    # One bit for each value, the smallest first, in as many words as it takes; words never use their sign.
    words: list[np.ndarray] = []
    for first in range(0, len(distinct), 62):
        inside = (place >= first) & (place < first + 62)
        bits = np.where(inside, np.int64(1) << np.where(inside, 61 - (place - first), 0), 0)
        words.append(np.bitwise_or.reduceat(bits, heads) if len(heads) else np.zeros(0, np.int64))
    number, example = _numbered(*words)
    bounds = np.append(heads, len(values))
    tuples = [tuple(sorted(set(values[bounds[i] : bounds[i + 1]].tolist()))) for i in example.tolist()]
    rank = {found: i for i, found in enumerate(sorted(tuples))}
    return _ints(rank[found] for found in tuples)[number]


def _scatter(index: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`values[i]` at `index[i]`, a permutation."""
    result = np.empty_like(values)
    result[index] = values
    return result


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[2, 0, 3] -> ([0, 0, 2, 2, 2], [0, 1, 0, 1, 2])."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def _changes(*columns: np.ndarray) -> np.ndarray:
    """Where some column differs from the entry before, the first entry included."""
    differs = np.ones(len(columns[0]), bool)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return differs


def _sums(values: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Sums of the stretches that begin at `heads`."""
    return np.add.reduceat(values, heads) if len(heads) else np.zeros(0, np.int64)


def _running(values: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Sum of all values before each, within its stretch."""
    before = np.cumsum(values) - values
    return before - np.repeat(before[heads], np.diff(heads, append=len(values)))
