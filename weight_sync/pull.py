"""How one worker's runs become copies: split, merged and ordered. Pure arithmetic over the plan.

Staged pulls land in a shadow block that mirrors what a worker reads of each source, so neighbouring runs become one
large copy however scattered their destinations are. In-place pulls go run by run, straight into the parameters.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weight_sync.types import Run

PIECE_BYTES = 64 << 20
"""Largest single copy: 64 MiB reaches the full link speed; 4 MiB reaches three quarters of it."""
MERGE_GAP_BYTES = 4096
"""Runs closer than this are read together with the padding between them: a copy costs more than the padding."""
SHADOW_ALIGN_BYTES = 256


class Range(NamedTuple):
    """`nbytes` of source `src_rank` from `src_off`, mirrored at `shadow_off`."""

    src_rank: int
    src_off: int
    nbytes: int
    shadow_off: int


class ShadowPlan(NamedTuple):
    """Where everything a worker reads lies in its shadow block."""

    ranges: tuple[Range, ...]
    run_offsets: tuple[int, ...]
    """Shadow offset of each run, in plan order."""
    nbytes: int


def shadow_plan(runs: Sequence[Run]) -> ShadowPlan:
    """Merge runs into ranges and lay those out one after the other. A byte that two runs use is read once."""
    ranges: list[Range] = []
    shadow_off = 0
    for run in sorted(runs, key=lambda run: (run.src_rank, run.src_off, run.nbytes)):
        last = ranges[-1] if ranges else None
        if last and last.src_rank == run.src_rank and run.src_off <= last.src_off + last.nbytes + MERGE_GAP_BYTES:
            stop = max(last.src_off + last.nbytes, run.src_off + run.nbytes)
            ranges[-1] = last._replace(nbytes=stop - last.src_off)
        else:
            if last:
                shadow_off = -(-(last.shadow_off + last.nbytes) // SHADOW_ALIGN_BYTES) * SHADOW_ALIGN_BYTES
            ranges.append(Range(run.src_rank, run.src_off, run.nbytes, shadow_off))
    starts = [(r.src_rank, r.src_off) for r in ranges]
    offsets: list[int] = []
    for run in runs:
        home = ranges[bisect_right(starts, (run.src_rank, run.src_off)) - 1]
        offsets.append(home.shadow_off + run.src_off - home.src_off)
    nbytes = ranges[-1].shadow_off + ranges[-1].nbytes if ranges else 0
    return ShadowPlan(tuple(ranges), tuple(offsets), nbytes)


def pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the copies that `nbytes` contiguous bytes are moved in."""
    for start in range(0, nbytes, PIECE_BYTES):
        yield start, min(PIECE_BYTES, nbytes - start)


def staggered(ranks: Sequence[int], index: int) -> tuple[int, ...]:
    """Source order of the `index`-th receiver: it starts at another source than its neighbours and goes round.

    Two receivers that read one source share its egress (198 instead of 381 GB/s each); staggered they do not meet.
    """
    if not ranks:
        return ()
    start = index % len(ranks)
    return (*ranks[start:], *ranks[:start])
