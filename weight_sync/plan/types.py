"""What a plan is made of: parameters, shards, recorded copies, layouts, and which bytes each party packs and pulls.

All are frozen, slotted, keyword-only and made of plain values, so they travel as msgpack and hash the same everywhere.
Those that come by the hundred thousand are no business of the garbage collector (`gc=False`): they cannot form cycles.
Offsets of arenas are in bytes; starts and sizes of tensors are in elements.

Example: FSDP2 over 2 ranks holds `q_proj.weight` [6, 4] as rows 0-3 and 3-6. An engine with TP=2 copies rows 0-3 of it
into rows 0-3 of its fused `qkv_proj.weight` on worker 0. The plan then lets rank 0 pack its rows 0-3 into its arena and
worker 0 pull that run of 3*4*2 bytes.
"""

from __future__ import annotations

import msgspec

Version = int
"""Policy version: counts optimizer steps that were published. Version 0 is the initial checkpoint."""


class ParamMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One parameter under its Hugging Face checkpoint name, with its full (unsharded) shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch dtype name on the wire, e.g. "bfloat16": what the engine stores, not what the optimizer holds."""


class ShardDesc(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The rows (dimension 0) of a parameter that one learner rank holds. `row_start == row_stop` is an empty shard."""

    param: str
    rank: int
    row_start: int
    row_stop: int


class RecordedCopy(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One `copy_` of the engine's own weight loader: a box of a checkpoint tensor into a view of an engine tensor.

    The source box is `[src_start, src_start + src_size)` per dimension. The destination is the strided view
    `(dst_offset, src_size, dst_stride)` of the engine parameter, in elements.
    """

    src_param: str
    src_start: tuple[int, ...]
    src_size: tuple[int, ...]
    dst_param: str
    dst_offset: int
    dst_stride: tuple[int, ...]
    """One entry per source dimension."""


class EngineParam(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A parameter of the live engine model on one worker."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class WorkerLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine worker's loader did with a full set of checkpoint tensors."""

    worker: int
    """Rank of the worker inside its replica (TP and PP flattened)."""
    params: tuple[EngineParam, ...]
    copies: tuple[RecordedCopy, ...]
    decisions: tuple[str, ...] = ()
    """Which kinds of modules are written directly and which go through the fallback, and why: lines for the log."""


class Run(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """`nbytes` contiguous bytes from a publisher's arena to an engine parameter."""

    src_rank: int
    src_off: int
    dst_param: str
    dst_off: int
    nbytes: int


class PackItem(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A box of a rank's local shard, cast and written contiguously at `arena_off`. `start` is in local coordinates."""

    param: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    arena_off: int
    nbytes: int


class PackPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one learner rank writes into its arena for every version."""

    rank: int
    items: tuple[PackItem, ...]
    arena_bytes: int


class PullPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine worker reads from the arenas for every version."""

    worker: int
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The whole agreement of one epoch. `digest` is the sha256 of everything else in canonical msgpack."""

    epoch: int
    params: tuple[ParamMeta, ...]
    pack: tuple[PackPlan, ...]
    pull: tuple[PullPlan, ...]
    digest: str
