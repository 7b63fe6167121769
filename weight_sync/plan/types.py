"""What a plan is made of: parameters, shards, recorded copies, layouts, and which bytes each party packs and pulls.

Offsets in arenas and engine parameters are in bytes; starts and sizes of boxes are in elements. What comes by the
hundred thousand is an int64 table with a column per field. Tables travel as differences from row to row, compressed:
their fields mostly grow by equal steps.

Example: FSDP2 over 2 ranks holds `q_proj.weight` [6, 4] as rows 0-3 and 3-6. An engine with TP=2 copies rows 0-3 of it
into rows 0-3 of its fused `qkv_proj.weight` on worker 0. The plan then lets rank 0 pack its rows 0-3 into its arena and
worker 0 pull that run of 3*4*2 bytes.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from weight_sync.errors import PlanMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T")

Version = int
"""Policy version: counts optimizer steps that were published. Version 0 is the initial checkpoint."""


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
NO_DIGESTS: Mapping[str, int] = MappingProxyType({})
MAX_PLAN_BYTES = 1 << 30
"""Of one party, unpacked; 30B of experts over 64 learner ranks and 8 workers make 20 MB. More is a bug or an attack."""


class ParamMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One parameter under its Hugging Face checkpoint name, with its full (unsharded) shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch dtype name on the wire, e.g. "bfloat16": what the engine stores, not what the optimizer holds."""


class ShardBox(NamedTuple):
    """The box of a parameter that a learner rank holds: `size[d]` elements from `start[d]` on in dimension d."""

    param: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    is_replicated: bool = False
    """Other ranks hold the same box, and should hold the same values."""


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


class Table(msgspec.Struct, frozen=True, array_like=True):
    """int64[rows, columns] on its way."""

    num_rows: int
    num_columns: int
    data: bytes

    @classmethod
    def of(cls, values: np.ndarray) -> Table:
        differences = np.diff(values.T, axis=1, prepend=0)
        num_rows, num_columns = values.shape
        return cls(num_rows, num_columns, np.ascontiguousarray(differences, "<i8").tobytes())

    def values(self) -> np.ndarray:
        """
        Raises:
            PlanMismatch: the data are not of this size.
        """
        if len(self.data) != 8 * self.num_rows * self.num_columns:
            raise PlanMismatch(f"a table of {self.num_rows} x {self.num_columns} came with {len(self.data)} bytes")
        differences = np.frombuffer(self.data, "<i8").reshape(self.num_columns, self.num_rows)
        return np.cumsum(differences, axis=1, dtype=np.int64).T


def to_wire(part: PackPlan | PullPlan) -> bytes:
    return zlib.compress(_ENCODER.encode(part), 1)


def from_wire(data: bytes, kind: type[T], *, max_bytes: int = MAX_PLAN_BYTES) -> T:
    """
    Args:
        kind: `PackPlan` or `PullPlan`.

    Raises:
        PlanMismatch: `data` are something else, or larger than any plan.
    """
    try:
        unpacking = zlib.decompressobj()
        raw = unpacking.decompress(data, max_bytes)
        if not unpacking.eof:
            raise ValueError(f"it is cut off, or larger than {max_bytes} bytes")
        return _DECODERS[kind].decode(raw)
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise PlanMismatch(
            f"a plan of {len(data)} bytes cannot be decoded: {error}; learner and engine must run the same version of "
            "weight_sync"
        ) from error


def _as_table(values: np.ndarray) -> Table:
    return Table.of(values)


def _as_values(_kind: type, table: object) -> np.ndarray:
    return msgspec.convert(table, Table).values()


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_as_table)


@dataclass(frozen=True, slots=True, eq=False)
class RankShards:
    """All boxes that one learner rank holds, none of them empty."""

    rank: int
    param: np.ndarray
    """int64[N], index into the learner's parameters."""
    start: np.ndarray
    """int64[N, D], D being the most dimensions of any parameter. Those that a parameter lacks have start 0, size 1."""
    size: np.ndarray
    digest: np.ndarray
    """int64[N], of the values of a box that other ranks hold too, else 0."""

    def to_table(self) -> Table:
        return Table.of(np.column_stack([self.param, self.start, self.size, self.digest]))

    @classmethod
    def from_table(cls, rank: int, params: Sequence[ParamMeta], table: Table) -> RankShards:
        """
        Raises:
            PlanMismatch: it is no table of boxes of these parameters.
        """
        values, num_dims = table.values(), most_dims(params)
        if values.shape[1] != 2 + 2 * num_dims or ((values[:, 0] < 0) | (values[:, 0] >= len(params))).any():
            raise PlanMismatch(f"rank {rank} describes {table.num_columns} columns, or boxes of other parameters")
        return cls(rank, values[:, 0], values[:, 1 : 1 + num_dims], values[:, 1 + num_dims : -1], values[:, -1])

    @classmethod
    def of(
        cls, rank: int, params: Sequence[ParamMeta], shards: Sequence[ShardBox], digests: Mapping[str, int] = NO_DIGESTS
    ) -> RankShards:
        """
        Args:
            digests: parameter -> 64 bits, of the shards that are replicated.

        Raises:
            PlanMismatch: a shard of no parameter, or with other dimensions than it.
        """
        index = {meta.name: i for i, meta in enumerate(params)}
        for name, start, size, _ in shards:
            if name not in index:
                raise PlanMismatch(f"rank {rank} holds {name}, which the learner's parameters do not list")
            if not len(start) == len(size) == len(params[index[name]].shape):
                raise PlanMismatch(
                    f"rank {rank} holds a box of {name} with {len(start)} and {len(size)} dimensions, its shape is "
                    f"{params[index[name]].shape}"
                )
        held = [shard for shard in shards if prod(shard.size)]
        num_dims = most_dims(params)
        return cls(
            rank,
            np.array([index[shard.param] for shard in held], np.int64),
            padded([shard.start for shard in held], num_dims, 0),
            padded([shard.size for shard in held], num_dims, 1),
            np.array([digests.get(shard.param, 0) for shard in held], np.uint64).view(np.int64),
        )


def most_dims(params: Sequence[ParamMeta]) -> int:
    return max((len(meta.shape) for meta in params), default=1) or 1


def padded(rows: Sequence[tuple[int, ...]], num_dims: int, fill: int) -> np.ndarray:
    """int64[R, num_dims], short rows filled up at their ends."""
    return np.array([(*row, *(fill,) * (num_dims - len(row))) for row in rows], np.int64).reshape(-1, num_dims)


class Run(NamedTuple):
    """`nbytes` contiguous bytes from a publisher's arena to an engine parameter."""

    src_rank: int
    src_off: int
    dst_param: str
    dst_off: int
    nbytes: int


class PackItem(NamedTuple):
    """A box of a rank's local shard, cast and written contiguously at `arena_off`. `start` is in local coordinates."""

    param: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    arena_off: int
    nbytes: int


class PackPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, eq=False):
    """What one learner rank writes into its arena for every version."""

    rank: int
    params: tuple[ParamMeta, ...]
    """Those that it packs, with the dtype that travels."""
    arena_bytes: int
    table: np.ndarray
    """int64[N, 2 + 2 D]: index into `params`, offset in the arena, start and size of the box."""
    segments: np.ndarray
    """int64[S, 2]: (offset, bytes) of the runs that are read from here, each once however many workers read it."""
    readers: np.ndarray
    """int64[M, 2]: (worker, index into `segments`) of every run that is read, in the order of the workers' plans."""

    @property
    def items(self) -> tuple[PackItem, ...]:
        num_dims = (self.table.shape[1] - 2) // 2
        found: list[PackItem] = []
        for index, offset, *box in self.table.tolist():
            meta = self.params[index]
            ndim = len(meta.shape)
            size = tuple(box[num_dims : num_dims + ndim])
            nbytes = prod(size) * DTYPE_BYTES[meta.dtype]
            found.append(PackItem(meta.name, tuple(box[:ndim]), size, offset, nbytes))
        return tuple(found)

    def segments_of_workers(self) -> dict[int, tuple[int, ...]]:
        """Worker -> index into `segments` of each of its runs, in the order of its plan."""
        workers, segments = self.readers.T
        return {worker: tuple(segments[workers == worker].tolist()) for worker in np.unique(workers).tolist()}


class PullPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True, eq=False, dict=True):
    """What one engine worker reads from the arenas for every version."""

    worker: int
    names: tuple[str, ...]
    """Engine parameters that it writes."""
    table: np.ndarray
    """int64[R, 5]: source rank, offset there, index into `names`, offset in that parameter, bytes."""

    @classmethod
    def of(cls, worker: int, runs: Sequence[Run]) -> PullPlan:
        index: dict[str, int] = {}
        rows = [(r.src_rank, r.src_off, index.setdefault(r.dst_param, len(index)), r.dst_off, r.nbytes) for r in runs]
        return cls(worker=worker, names=tuple(index), table=np.array(rows, np.int64).reshape(-1, 5))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        return tuple(Run(rank, off, self.names[i], to, n) for rank, off, i, to, n in self.table.tolist())

    @property
    def nbytes(self) -> int:
        return int(self.table[:, 4].sum())

    @property
    def bytes_by_source(self) -> Mapping[int, int]:
        """Source rank -> bytes that come from it, in the order of the ranks."""
        ranks, index = np.unique(self.table[:, 0], return_inverse=True)
        sums = np.zeros(len(ranks), np.int64)
        np.add.at(sums, index, self.table[:, 4])
        return dict(zip(ranks.tolist(), sums.tolist(), strict=True))


_DECODERS: dict[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_as_values) for kind in (PackPlan, PullPlan)
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """What all parties do in one epoch. Only the planner sees it whole: see `agreement`."""

    epoch: int
    params: tuple[ParamMeta, ...]
    """With the dtypes that travel."""
    pack: tuple[PackPlan, ...]
    pull: tuple[PullPlan, ...]
