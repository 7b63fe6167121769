"""The plan: which bytes each learner rank packs, and which runs of them each engine worker pulls. Pure, no torch.

`build_manifest` intersects what learner ranks hold (`ShardDesc`) with what the engine's loader did (`WorkerLayout`).
Every intersection is a box of one shard. It is packed once, however many workers need it, and written contiguously:

    arena of rank 0:  [ boxes only worker 0 needs | boxes that workers 0 and 1 need | boxes only worker 1 needs ]

Inside a section boxes follow the order of the engine's parameters and of the bytes in them, so neighbours in the arena
are neighbours in the engine and their runs merge. Column strips (row-parallel layers) become contiguous when packed.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from weight_sync.errors import PlanMismatch
from weight_sync.plan.checks import DTYPE_BYTES, input_problems, manifest_problems, num_rows
from weight_sync.plan.geometry import dense_runs, extent
from weight_sync.plan.types import Manifest, PackItem, PackPlan, PullPlan, Run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weight_sync.plan.types import ParamMeta, ShardDesc, WorkerLayout


ALIGN_BYTES = 16
"""Items start here, so that a vectorised pack kernel never straddles; a run that goes on is not torn apart for it."""
MAX_MANIFEST_BYTES = 256 << 20
"""70B over 64 learner ranks and 8 workers makes 30 MB; more than this bound is a bug or an attack."""


class _Parts(NamedTuple):
    """Copies of the workers, cut along the rows of the shards: columns with an entry for each part.

    A part is a box of one shard that one worker wants. The parts of a box stand together, in the order of the workers.
    """

    copy: np.ndarray
    """Index into the copies."""
    rank: np.ndarray
    local_row: np.ndarray
    """First row of the box, counted from the first row of the shard."""
    row: np.ndarray
    """The same, counted from the first row of the tensor."""
    num_rows: np.ndarray
    dst_offset: np.ndarray
    """Elements."""
    box: np.ndarray
    """Number of the box, from 0, without gaps."""


class _Copies:
    """Copies that are not empty, in the order of the workers, as columns."""

    def __init__(self, params: Sequence[ParamMeta], workers: Sequence[WorkerLayout]) -> None:
        itemsizes = {meta.name: DTYPE_BYTES[meta.dtype] for meta in params}
        layouts = sorted(workers, key=lambda layout: layout.worker)
        indices = [{param.name: i for i, param in enumerate(layout.params)} for layout in layouts]
        rows = [(i, copy) for i, layout in enumerate(layouts) for copy in layout.copies if prod(copy.src_size)]
        self.rows = [copy for _, copy in rows]
        self.worker = _ints(layouts[i].worker for i, _ in rows)
        self.param_index = _ints(indices[i][copy.dst_param] for i, copy in rows)
        self.itemsize = _ints(itemsizes[copy.src_param] for copy in self.rows)
        self.first_row = _ints(copy.src_start[0] if copy.src_start else 0 for copy in self.rows)
        self.num_rows = _ints(copy.src_size[0] if copy.src_size else 1 for copy in self.rows)
        self.dst_offset = _ints(copy.dst_offset for copy in self.rows)
        self.row_stride = _ints(copy.dst_stride[0] if copy.dst_stride else 0 for copy in self.rows)
        self.row_elements = _ints(prod(copy.src_size[1:]) for copy in self.rows)
        self.row_extent = _ints(extent(copy.src_size[1:], copy.dst_stride[1:]) for copy in self.rows)
        self.src_name, _ = _ordinals(copy.src_param for copy in self.rows)
        self.dst_name, self.dst_names = _ordinals(copy.dst_param for copy in self.rows)
        self.inner_start, _ = _ordinals(copy.src_start[1:] for copy in self.rows)
        self.inner_size, _ = _ordinals(copy.src_size[1:] for copy in self.rows)
        self.view, self.views = _ordinals((copy.src_size[1:], copy.dst_stride) for copy in self.rows)


def build_manifest(
    *, epoch: int, params: Sequence[ParamMeta], shards: Sequence[ShardDesc], workers: Sequence[WorkerLayout]
) -> Manifest:
    """Agree on every byte of a sync before one moves.

    `shards` are those of all learner ranks together; every rank that occurs gets a `PackPlan`, be it empty. Replicas of
    the engine that are split alike share one manifest: `workers` are the workers of one replica.

    Where the engine keeps a parameter in float32 although the rollout dtype is shorter (routers, norms of some models),
    it is sent in float32; the manifest's `params` say so.

    Raises:
        PlanMismatch: learner and engine disagree; the message lists every problem.
    """
    params = _as_wide_as_stored(params, workers)
    problems = input_problems(params, shards, workers)
    if problems:
        raise _mismatch("the learner's parameters do not fit the engine's model", problems)
    copies = _Copies(params, workers)
    parts = _cut(copies, params, shards)
    boxes = _in_arena_order(copies, parts)
    offsets, arena_bytes = _place(copies, parts, boxes)
    pack = _pack_plans(copies, parts, boxes, offsets=offsets, arena_bytes=arena_bytes, shards=shards)
    pull = _pull_plans(copies, parts, boxes, offsets=offsets, workers=workers)
    manifest = Manifest(epoch=epoch, params=tuple(params), pack=pack, pull=pull, digest="")
    return msgspec.structs.replace(manifest, digest=manifest_digest(manifest))


def manifest_digest(manifest: Manifest) -> str:
    """sha256 (hex) over the canonical msgpack of everything but the digest itself."""
    body = (manifest.epoch, manifest.params, manifest.pack, manifest.pull)
    return hashlib.sha256(msgspec.msgpack.encode(body)).hexdigest()


def verify_manifest(manifest: Manifest) -> None:
    """Check a manifest that came over the wire: digest, bounds, overlaps, and that every run reads packed bytes.

    Raises:
        PlanMismatch: listing every problem.
    """
    expected = manifest_digest(manifest)
    problems = manifest_problems(manifest)
    if manifest.digest != expected:
        problems.insert(0, f"digest is {manifest.digest!r} but the contents hash to {expected!r}")
    if problems:
        raise _mismatch(f"manifest of epoch {manifest.epoch} is not consistent", problems)


def _mismatch(what: str, problems: Sequence[str]) -> PlanMismatch:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return PlanMismatch(f"{what} ({len(problems)} problem{'s' if len(problems) != 1 else ''}):{lines}")


def _as_wide_as_stored(params: Sequence[ParamMeta], workers: Sequence[WorkerLayout]) -> tuple[ParamMeta, ...]:
    stored: defaultdict[str, set[str]] = defaultdict(set)
    for layout in workers:
        dtypes = {param.name: param.dtype for param in layout.params}
        for copy in layout.copies:
            stored[copy.src_param].add(dtypes.get(copy.dst_param, ""))
    return tuple(
        msgspec.structs.replace(meta, dtype="float32")
        if meta.dtype in ("bfloat16", "float16") and stored[meta.name] == {"float32"}
        else meta
        for meta in params
    )


def _cut(copies: _Copies, params: Sequence[ParamMeta], shards: Sequence[ShardDesc]) -> _Parts:
    """Shards tile the rows of each parameter, so all rows of all parameters lie one after another on one line."""
    base = dict(zip((meta.name for meta in params), accumulate((num_rows(m) for m in params), initial=0), strict=False))
    held = sorted(
        (base[s.param] + s.row_start, s.row_stop - s.row_start, s.rank) for s in shards if s.row_stop > s.row_start
    )
    starts, sizes, ranks = np.array(held, np.int64).reshape(-1, 3).T
    origin = _ints(base[copy.src_param] for copy in copies.rows)
    first = np.searchsorted(starts, origin + copies.first_row, side="right") - 1
    last = np.searchsorted(starts, origin + copies.first_row + copies.num_rows - 1, side="right") - 1
    copy, nth = _expand(last - first + 1)
    shard = first[copy] + nth
    shard_row = starts[shard] - origin[copy]
    first_row = copies.first_row[copy]
    row = np.maximum(first_row, shard_row)
    num = np.minimum(first_row + copies.num_rows[copy], shard_row + sizes[shard]) - row
    offset = copies.dst_offset[copy] + (row - first_row) * copies.row_stride[copy]
    identity = (copies.inner_size[copy], copies.inner_start[copy], num, row, shard)
    order = np.lexsort(identity)
    box = np.cumsum(_changes(*(column[order] for column in identity))) - 1
    columns = (copy, ranks[shard], row - shard_row, row, num, offset)
    return _Parts(*(column[order] for column in columns), box=box)


def _in_arena_order(copies: _Copies, parts: _Parts) -> np.ndarray:
    """First part of every box, sorted by rank, consumers, and place in the first consumer's model."""
    first = np.flatnonzero(_changes(parts.box))
    workers = copies.worker[parts.copy].tolist()
    bounds = [*first.tolist(), len(workers)]
    consumers, _ = _ordinals(tuple(sorted(set(workers[a:b]))) for a, b in pairwise(bounds))
    copy = parts.copy[first]
    keys = (
        parts.rank[first], consumers, copies.param_index[copy], parts.dst_offset[first], copies.src_name[copy],
        parts.row[first], copies.inner_start[copy], parts.num_rows[first], copies.inner_size[copy],
    )  # fmt: skip
    return first[np.lexsort(keys[::-1])]


def _place(copies: _Copies, parts: _Parts, boxes: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """Arena offset of every box, and the size of each rank's arena, in bytes.

    A box that follows the box before it in the parameter of its first worker is placed without a gap (and is
    element-aligned, because both have the parameter's dtype). Any other starts at `ALIGN_BYTES`.
    """
    copy, rank, start = parts.copy[boxes], parts.rank[boxes], parts.dst_offset[boxes]
    stop = start + (parts.num_rows[boxes] - 1) * copies.row_stride[copy] + copies.row_extent[copy]
    opens = _changes(rank, copies.worker[copy], copies.param_index[copy])
    opens[1:] |= start[1:] != stop[:-1]
    nbytes = _nbytes(copies, parts, boxes)
    heads = np.flatnonzero(opens)
    sizes = -(-_sums(nbytes, heads) // ALIGN_BYTES) * ALIGN_BYTES
    # All arenas one after another; each begins where the first box of its rank does.
    ends = np.cumsum(sizes)
    within = np.cumsum(nbytes) - nbytes
    chain = np.cumsum(opens) - 1
    offsets = within - within[heads][chain] + (ends - sizes)[chain]
    bounds = np.flatnonzero(_changes(rank))
    arena_bytes = dict(zip(rank[bounds].tolist(), _sums(sizes, chain[bounds]).tolist(), strict=True))
    return offsets - np.repeat(offsets[bounds], np.diff(bounds, append=len(rank))), arena_bytes


def _pack_plans(
    copies: _Copies,
    parts: _Parts,
    boxes: np.ndarray,
    *,
    offsets: np.ndarray,
    arena_bytes: Mapping[int, int],
    shards: Sequence[ShardDesc],
) -> tuple[PackPlan, ...]:
    items: dict[int, list[PackItem]] = {rank: [] for rank in sorted({shard.rank for shard in shards})}
    columns = (parts.rank, parts.copy, parts.local_row, parts.num_rows)
    lists = [column[boxes].tolist() for column in columns]
    for rank, i, row, num, offset, nbytes in zip(
        *lists, offsets.tolist(), _nbytes(copies, parts, boxes).tolist(), strict=True
    ):
        copy = copies.rows[i]
        start = (row, *copy.src_start[1:]) if copy.src_start else ()
        size = (num, *copy.src_size[1:]) if copy.src_size else ()
        items[rank].append(PackItem(param=copy.src_param, start=start, size=size, arena_off=offset, nbytes=nbytes))
    return tuple(
        PackPlan(rank=rank, items=tuple(packed), arena_bytes=arena_bytes.get(rank, 0)) for rank, packed in items.items()
    )


def _pull_plans(
    copies: _Copies, parts: _Parts, boxes: np.ndarray, *, offsets: np.ndarray, workers: Sequence[WorkerLayout]
) -> tuple[PullPlan, ...]:
    """Runs in arena order, neighbours in both arena and parameter joined."""
    offset_of_box = np.empty_like(offsets)
    offset_of_box[parts.box[boxes]] = offsets
    part, nth, start, length = _runs(copies, parts)
    copy = parts.copy[part]
    nbytes = length * copies.itemsize[copy]
    src_off = offset_of_box[parts.box[part]] + nth * nbytes
    dst_off = (parts.dst_offset[part] + start) * copies.itemsize[copy]
    columns = (copies.worker[copy], parts.rank[part], src_off, copies.dst_name[copy], dst_off, nbytes)
    order = np.lexsort(columns[4::-1])
    worker, rank, src_off, name, dst_off, nbytes = (column[order] for column in columns)
    opens = _changes(worker, rank, name)
    opens[1:] |= (src_off[1:] != (src_off + nbytes)[:-1]) | (dst_off[1:] != (dst_off + nbytes)[:-1])
    heads = np.flatnonzero(opens)
    runs: dict[int, list[Run]] = {w: [] for w in sorted(layout.worker for layout in workers)}
    lists = [column[heads].tolist() for column in (worker, rank, src_off, name, dst_off)]
    for w, src_rank, src, i, dst, n in zip(*lists, _sums(nbytes, heads).tolist(), strict=True):
        runs[w].append(Run(src_rank=src_rank, src_off=src, dst_param=copies.dst_names[i], dst_off=dst, nbytes=n))
    return tuple(PullPlan(worker=w, runs=tuple(found)) for w, found in runs.items())


def _runs(copies: _Copies, parts: _Parts) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Contiguous runs of all parts: (part, how manieth of it, first element from that of the part, elements).

    Layers and experts repeat few views many times, so each view is split once. None is too scattered: a whole copy has
    at least as many runs as any of its parts, and `input_problems` has tried them.
    """
    view, most = copies.view[parts.copy], int(parts.num_rows.max(initial=0)) + 1
    distinct, index = np.unique(view * most + parts.num_rows, return_inverse=True)
    split: list[tuple[np.ndarray, int]] = []
    for key in distinct.tolist():
        inner, stride = copies.views[key // most]
        split.append(dense_runs(0, (key % most, *inner) if stride else (), stride))
    counts = _ints(len(starts) for starts, _ in split)
    lengths = _ints(length for _, length in split)
    flat = np.concatenate([np.zeros(0, np.int64), *(starts for starts, _ in split)])
    part, nth = _expand(counts[index])
    which = index[part]
    return part, nth, flat[(np.cumsum(counts) - counts)[which] + nth], lengths[which]


def _nbytes(copies: _Copies, parts: _Parts, boxes: np.ndarray) -> np.ndarray:
    copy = parts.copy[boxes]
    return parts.num_rows[boxes] * copies.row_elements[copy] * copies.itemsize[copy]


def _ints(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, np.int64)


def _ordinals(values: Iterable[Any]) -> tuple[np.ndarray, list[Any]]:
    """Each value's place among the distinct ones, and those, sorted."""
    values = list(values)
    distinct = sorted(set(values))
    place = {value: i for i, value in enumerate(distinct)}
    return _ints(place[value] for value in values), distinct


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
