"""The plan: which bytes each learner rank packs, and which runs of them each engine worker pulls. Pure, no torch.

`build_manifest` intersects what learner ranks hold (`ShardDesc`) with what the engine's loader did (`WorkerLayout`).
Every intersection is a box of one shard. It is packed once, however many workers need it, and written contiguously:

    arena of rank 0:  [ boxes only worker 0 needs | boxes that workers 0 and 1 need | boxes only worker 1 needs ]

Inside a section boxes follow the order of the engine's parameters and of the bytes in them, so neighbours in the arena
are neighbours in the engine and their runs merge. Column strips (row-parallel layers) become contiguous when packed.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weight_sync.errors import PlanMismatch
from weight_sync.plan.checks import DTYPE_BYTES, input_problems, manifest_problems
from weight_sync.plan.geometry import TooScattered, dense_runs
from weight_sync.plan.types import Manifest, PackItem, PackPlan, PullPlan, Run

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weight_sync.plan.types import ParamMeta, RecordedCopy, ShardDesc, WorkerLayout


ALIGN_BYTES = 16
"""Items start here, so that a vectorised pack kernel never straddles; a run that goes on is not torn apart for it."""
MAX_MANIFEST_BYTES = 256 << 20
"""70B over 64 learner ranks and 8 workers makes 20 MB; more than this bound is a bug or an attack."""


class _Use(NamedTuple):
    """Where one worker wants a box: a strided view of one of its parameters, in elements."""

    worker: int
    param_index: int
    dst_param: str
    offset: int
    stride: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Box:
    """A box of one rank's shard, in coordinates of the full tensor, and everyone who wants it."""

    param: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    local_row: int
    """First row of the box, counted from the first row of the shard."""
    itemsize: int
    uses: list[_Use] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.itemsize

    def order(self) -> tuple[object, ...]:
        """Sort key: consumers, then place in the first consumer's model."""
        first = self.uses[0]
        workers = tuple(sorted({use.worker for use in self.uses}))
        return workers, first.param_index, first.offset, self.param, self.start, self.size


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
    boxes_by_rank = _intersect(params, shards, workers)
    pack: list[PackPlan] = []
    runs: defaultdict[int, list[Run]] = defaultdict(list)
    for rank in sorted(boxes_by_rank):
        ordered = sorted(boxes_by_rank[rank], key=_Box.order)
        offsets, arena_bytes = _place(ordered)
        items = tuple(_pack_item(box, offset) for box, offset in zip(ordered, offsets, strict=True))
        pack.append(PackPlan(rank=rank, items=items, arena_bytes=arena_bytes))
        for box, offset in zip(ordered, offsets, strict=True):
            for use in box.uses:
                runs[use.worker].extend(_runs_of_use(rank, box, offset, use))
    pull = [PullPlan(worker=w, runs=_merged(runs[w])) for w in sorted(layout.worker for layout in workers)]
    manifest = Manifest(epoch=epoch, params=tuple(params), pack=tuple(pack), pull=tuple(pull), digest="")
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


def _intersect(
    params: Sequence[ParamMeta], shards: Sequence[ShardDesc], workers: Sequence[WorkerLayout]
) -> dict[int, list[_Box]]:
    """Every box of every shard that some worker needs, once, with its users in worker order."""
    itemsize = {meta.name: DTYPE_BYTES[meta.dtype] for meta in params}
    by_param: defaultdict[str, list[ShardDesc]] = defaultdict(list)
    for shard in sorted(shards, key=lambda s: s.row_start):
        if shard.row_stop > shard.row_start:
            by_param[shard.param].append(shard)
    boxes: dict[tuple[int, str, tuple[int, ...], tuple[int, ...]], _Box] = {}
    for layout in sorted(workers, key=lambda w: w.worker):
        index = {param.name: i for i, param in enumerate(layout.params)}
        for copy in layout.copies:
            for shard, start, size, dst_offset in _cut(copy, by_param[copy.src_param]):
                key = (shard.rank, copy.src_param, start, size)
                box = boxes.get(key)
                if box is None:
                    box = boxes[key] = _Box(
                        param=copy.src_param,
                        start=start,
                        size=size,
                        local_row=start[0] - shard.row_start if start else 0,
                        itemsize=itemsize[copy.src_param],
                    )
                box.uses.append(
                    _Use(
                        worker=layout.worker,
                        param_index=index[copy.dst_param],
                        dst_param=copy.dst_param,
                        offset=dst_offset,
                        stride=copy.dst_stride,
                    )
                )
    result: dict[int, list[_Box]] = {shard.rank: [] for shard in shards}
    for (rank, _, _, _), box in boxes.items():
        result[rank].append(box)
    return result


def _cut(
    copy: RecordedCopy, shards: Sequence[ShardDesc]
) -> Iterator[tuple[ShardDesc, tuple[int, ...], tuple[int, ...], int]]:
    """Cut a recorded copy along the rows of the shards: (shard, start, size, dst_offset) of each part.

    `shards` are sorted by row and tile the rows, so those that matter are found by bisection.
    """
    if prod(copy.src_size) == 0:
        return
    row_start, row_size = (copy.src_start[0], copy.src_size[0]) if copy.src_start else (0, 1)
    at = bisect_right(shards, row_start, key=lambda s: s.row_start) - 1
    while at < len(shards) and shards[at].row_start < row_start + row_size:
        shard = shards[at]
        low = max(row_start, shard.row_start)
        rows = min(row_start + row_size, shard.row_stop) - low
        if not copy.src_start:
            yield shard, (), (), copy.dst_offset
        else:
            dst_offset = copy.dst_offset + (low - row_start) * copy.dst_stride[0]
            yield shard, (low, *copy.src_start[1:]), (rows, *copy.src_size[1:]), dst_offset
        at += 1


def _place(boxes: Sequence[_Box]) -> tuple[list[int], int]:
    """Arena offsets of boxes in this order, and the size of the arena, in bytes.

    A box that follows the box before it in the parameter of its first worker is placed without a gap (and is
    element-aligned, because both have the parameter's dtype). Any other starts at `ALIGN_BYTES`.
    """
    offsets: list[int] = []
    end = 0
    goes_on_at: tuple[int, str, int] | None = None
    for box in boxes:
        first = box.uses[0]
        if goes_on_at != (first.worker, first.dst_param, first.offset):
            end = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        offsets.append(end)
        end += box.nbytes
        starts, length = dense_runs(first.offset, box.size, first.stride)
        goes_on_at = (first.worker, first.dst_param, int(starts[-1]) + length)
    return offsets, -(-end // ALIGN_BYTES) * ALIGN_BYTES


def _pack_item(box: _Box, arena_off: int) -> PackItem:
    start = (box.local_row, *box.start[1:]) if box.start else ()
    return PackItem(param=box.param, start=start, size=box.size, arena_off=arena_off, nbytes=box.nbytes)


def _runs_of_use(rank: int, box: _Box, arena_off: int, use: _Use) -> Iterator[Run]:
    try:
        starts, length = dense_runs(use.offset, box.size, use.stride)
    except TooScattered as error:
        raise PlanMismatch(
            f"{box.param} lands in {use.dst_param} of worker {use.worker} as {error}; "
            "the engine stores it in another order, use the reload path for it"
        ) from error
    nbytes = length * box.itemsize
    for i, start in enumerate(starts.tolist()):
        yield Run(
            src_rank=rank,
            src_off=arena_off + i * nbytes,
            dst_param=use.dst_param,
            dst_off=start * box.itemsize,
            nbytes=nbytes,
        )


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs in arena order, neighbours in both arena and parameter joined."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda r: (r.src_rank, r.src_off, r.dst_param, r.dst_off)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and (last.src_rank, last.dst_param) == (run.src_rank, run.dst_param)
            and last.src_off + last.nbytes == run.src_off
            and last.dst_off + last.nbytes == run.dst_off
        ):
            merged[-1] = msgspec.structs.replace(last, nbytes=last.nbytes + run.nbytes)
        else:
            merged.append(run)
    return tuple(merged)
