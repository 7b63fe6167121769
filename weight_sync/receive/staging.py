"""Where pulled bytes land: a staging buffer or the live parameters, and the copy from one to the other.

Built once per epoch. Afterwards a pull is a walk over these views.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from weight_sync.errors import DeviceError, PlanMismatch
from weight_sync.receive.quantized import VIRTUAL_PREFIXES, ModuleReload
from weight_sync.transports.base import Piece, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.messages import CommitMode
    from weight_sync.plan.types import PullPlan
    from weight_sync.receive.quantized import Reloads
    from weight_sync.transports.base import OnArrived


MERGE_GAP_BYTES = 4096
"""Runs closer than this are read together with the padding between them: a copy costs more than the padding."""
STAGING_ALIGN_BYTES = 256


class Range(NamedTuple):
    """`nbytes` of source `src_rank` from `src_off`, mirrored at `staging_off`."""

    src_rank: int
    src_off: int
    nbytes: int
    staging_off: int


class StagingLayout(NamedTuple):
    """Where everything a worker reads lies in its staging buffer."""

    ranges: tuple[Range, ...]
    run_offsets: tuple[int, ...]
    """Staging buffer offset of each run, in plan order."""
    nbytes: int


def staging_layout(plan: PullPlan) -> StagingLayout:
    """Merge runs into ranges and lay those out one after the other. A byte that two runs use is read once."""
    rank, src_off, _, _, nbytes = plan.table.T
    order = np.lexsort((nbytes, src_off, rank))
    rank, start, stop = rank[order], src_off[order], (src_off + nbytes)[order]
    is_first = np.diff(rank, prepend=-1) != 0
    reach = stop.copy()
    bounds = np.append(np.flatnonzero(is_first), len(rank))
    for source in map(slice, bounds[:-1], bounds[1:]):
        np.maximum.accumulate(stop[source], out=reach[source])
    opens = is_first
    opens[1:] |= start[1:] > reach[:-1] + MERGE_GAP_BYTES
    heads = np.flatnonzero(opens)
    last = np.append(heads, len(rank))[1:] - 1
    sizes = reach[last] - start[heads]
    aligned = -(-sizes // STAGING_ALIGN_BYTES) * STAGING_ALIGN_BYTES
    places = np.cumsum(aligned) - aligned
    offsets = np.empty_like(start)
    home = np.cumsum(opens) - 1
    offsets[order] = places[home] + start - start[heads][home]
    columns = (rank[heads], start[heads], sizes, places)
    ranges = tuple(map(Range, *(column.tolist() for column in columns)))
    return StagingLayout(ranges, tuple(offsets.tolist()), ranges[-1].staging_off + ranges[-1].nbytes if ranges else 0)


STAGING_HEADROOM = 0.9
"""`auto` stages only if the staging buffer takes at most this fraction of what is free."""


class Targets(NamedTuple):
    """Every place that bytes are written to, in plan order of the runs."""

    params: tuple[torch.Tensor, ...]
    """Run -> its bytes in the engine parameter; of a virtual parameter, where they stay until the next version."""
    arrivals: tuple[torch.Tensor, ...]
    """Run -> where a pull puts it: in the staging buffer, or `params` itself."""
    pieces: Mapping[int, tuple[Piece, ...]]
    """Source rank -> copies of a pull."""
    buffer: PersistentBlock | None
    written: frozenset[str]
    """Parameters that are written directly; they must stay where they are."""
    derived: ModuleReload | None = None
    """Modules that are derived again after the copies."""

    @property
    def is_staged(self) -> bool:
        return self.buffer is not None

    @property
    def moves(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """(parameter bytes, arrived bytes) of every copy that a staged commit makes; empty in place."""
        pairs = zip(self.params, self.arrivals, strict=True)
        return tuple((param, arrived) for param, arrived in pairs if param is not arrived)

    def close(self) -> None:
        """Free all memory. Idempotent."""
        try:
            if self.derived is not None:
                self.derived.close()
        finally:
            if self.buffer is not None:
                self.buffer.close()


def parameter_bytes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """uint8 views of every contiguous parameter and buffer, by every name it has.

    Views of the storage, not of the tensor: autograd and inference mode keep out of the way of in-place copies.
    """
    views: dict[str, torch.Tensor] = {}
    with torch.inference_mode(False):
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        for name, tensor in named:
            if tensor.numel() == 0 or not tensor.is_contiguous() or tensor.device.type == "meta":
                continue
            size = tensor.numel() * tensor.element_size()
            offset = tensor.storage_offset() * tensor.element_size()
            empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            views[name] = empty.set_(tensor.untyped_storage(), offset, (size,), (1,))
    return views


class ParameterAddresses:
    """Where the tensors of a model live, remembered so that a look whether one moved takes microseconds.

    Walking the modules of a 7B model takes milliseconds, in which an engine would stand still.
    """

    def __init__(self, model: torch.nn.Module, names: Collection[str]) -> None:
        """`names` are the tensors to watch; one that the model does not have counts as moved."""
        self._entries: list[tuple[str, dict[str, Any], str, int]] = [
            (name, registry, key, tensor.data_ptr())
            for prefix, module in model.named_modules()
            for registry in (module._parameters, module._buffers)
            for key, tensor in registry.items()
            if tensor is not None and (name := f"{prefix}.{key}" if prefix else key) in names
        ]
        self._missing = sorted(set(names) - {name for name, *_ in self._entries})

    def moved(self) -> list[str]:
        """Names of tensors that were rebound or whose memory is another one now."""
        return self._missing + [
            name
            for name, registry, key, address in self._entries
            if (tensor := registry.get(key)) is None or tensor.data_ptr() != address
        ]


def build_targets(
    plan: PullPlan,
    views: Mapping[str, torch.Tensor],
    backend: Backend,
    *,
    commit: CommitMode,
    reloads: Reloads | None = None,
) -> Targets:
    """
    Args:
        views: bytes of every engine parameter.
        reloads: what is derived again at every commit; None if every parameter is written directly.

    Raises:
        PlanMismatch: a run lies outside its parameter, or the engine has no such parameter.
        DeviceError: the staging buffer does not fit and `staged` was asked for, or what `reloads` needs does not.
    """
    layout = staging_layout(plan)
    is_virtual = [run.dst_param.startswith(VIRTUAL_PREFIXES) for run in plan.runs]
    with ExitStack() as undo:
        buffer = _make_buffer(layout, backend, commit)
        landed: list[torch.Tensor] | None = None
        if buffer is not None:
            undo.callback(buffer.close)
            places = zip(plan.runs, layout.run_offsets, strict=True)
            landed = [buffer.tensor[offset : offset + run.nbytes] for run, offset in places]
        derived = None
        if reloads is not None and (reloads.modules or reloads.reloader.dependents()):
            arrivals = None if landed is None else [*compress(zip(plan.runs, landed, strict=True), is_virtual)]
            derived = ModuleReload(reloads, backend, arrivals=arrivals)
            undo.callback(derived.close)
        everywhere = {**views, **({} if derived is None else derived.views)}
        targets = tuple(_destination(run.dst_param, run.dst_off, run.nbytes, everywhere) for run in plan.runs)
        undo.pop_all()
    written = frozenset(run.dst_param for run, virtual in zip(plan.runs, is_virtual, strict=True) if not virtual)
    if buffer is None or landed is None:
        spans = [(run.src_rank, run.src_off, target) for run, target in zip(plan.runs, targets, strict=True)]
        return Targets(targets, targets, _pieces(spans), None, written, derived)
    kept = tuple(at if virtual else own for own, at, virtual in zip(targets, landed, is_virtual, strict=True))
    spans = [(r.src_rank, r.src_off, buffer.tensor[r.staging_off : r.staging_off + r.nbytes]) for r in layout.ranges]
    return Targets(kept, tuple(landed), _pieces(spans), buffer, written, derived)


def _destination(name: str, offset: int, nbytes: int, views: Mapping[str, torch.Tensor]) -> torch.Tensor:
    view = views.get(name)
    if view is None:
        raise PlanMismatch(f"the plan writes {name}, which the engine does not have (or not contiguously)")
    if offset < 0 or offset + nbytes > view.numel():
        raise PlanMismatch(f"the plan writes bytes {offset}..{offset + nbytes} of {name}, which has {view.numel()}")
    return view[offset : offset + nbytes]


def _make_buffer(layout: StagingLayout, backend: Backend, commit: CommitMode) -> PersistentBlock | None:
    free, _ = backend.memory_info()
    if layout.nbytes == 0 or commit == "inplace" or (commit == "auto" and layout.nbytes > STAGING_HEADROOM * free):
        return None
    try:
        return backend.alloc_persistent(layout.nbytes)
    except DeviceError:
        if commit == "staged":
            raise
        return None


def _pieces(spans: Iterable[tuple[int, int, torch.Tensor]]) -> dict[int, tuple[Piece, ...]]:
    """Source rank -> copies of (rank, offset there, target)."""
    found: dict[int, list[Piece]] = {}
    for rank, at, target in spans:
        copies = found.setdefault(rank, [])
        copies += [Piece(at + start, target[start : start + size]) for start, size in pieces(target.numel())]
    return {rank: tuple(copies) for rank, copies in found.items()}


# What did not change since the version before


SKIP_GAP_BYTES = 256 << 10
"""Changed runs closer than this are read together: to start a copy takes as long as to copy this much."""
Spans = list[tuple[int, int]]
"""(first byte, end) in a source's slot: in order, and apart."""


class UnchangedRuns:
    """Which bytes of a version need not be read, because the staging buffer has them from the version before: a frozen
    tower, experts that no token reached, the base under an adapter.

    This only spares reads. What is in the buffer is digested all the same before it counts, and read if it differs.
    """

    def __init__(self, runs: Mapping[int, Sequence[tuple[int, int]]]) -> None:
        """`runs` are (offset in the slot, bytes) by source, in the order of its digests."""
        self._runs = runs
        self._last: dict[int, tuple[int, ...]] = {}
        """Source -> the digests of the runs that were verified last."""
        self._held: set[int] = set()
        """Sources whose bytes in the staging buffer are those of `_last`."""
        self._pays: set[int] = set()
        """Sources of which a run did not change last time: to know that before a read costs a question."""

    def changed(self, rank: int, ask: Callable[[], Sequence[int]]) -> Spans | None:
        """Which bytes of a source have to be read; None for all. Call it before anything of the source is written.

        `ask` brings the digests of the version that is to be read.
        """
        is_held = rank in self._held
        self._held.discard(rank)
        if not is_held or rank not in self._pays:
            return None
        runs = zip(self._runs[rank], self._last[rank], ask(), strict=True)
        return merged_spans(run for run, before, now in runs if before != now)

    def verified(self, rank: int, sent: tuple[int, ...]) -> None:
        """The staging buffer holds what the learner sent with these digests."""
        is_any_equal = any(before == now for before, now in zip(self._last.get(rank, ()), sent, strict=False))
        (self._pays.add if is_any_equal else self._pays.discard)(rank)
        self._last[rank] = sent
        self._held.add(rank)


def merged_spans(runs: Iterable[tuple[int, int]]) -> Spans:
    """Spans of (offset, bytes), with the small gaps between them filled."""
    spans: Spans = []
    for start, nbytes in sorted(runs):
        if spans and start <= spans[-1][1] + SKIP_GAP_BYTES:
            spans[-1] = spans[-1][0], max(spans[-1][1], start + nbytes)
        else:
            spans.append((start, start + nbytes))
    return spans


def parts_in(spans: Spans, pieces: Sequence[Piece], on_arrived: OnArrived) -> tuple[list[Piece], OnArrived]:
    """The parts of `pieces` that lie in `spans`, and what to call with the number of those that have arrived:
    `on_arrived` receives the number of pieces that are then whole."""
    ends = [end for _, end in spans]
    parts: list[Piece] = []
    owners: list[int] = []
    for index, (offset, dst) in enumerate(pieces):
        stop = offset + dst.numel()
        for start, end in spans[bisect_right(ends, offset) :]:
            if start >= stop:
                break
            first, last = max(start, offset), min(end, stop)
            parts.append(Piece(first, dst[first - offset : last - offset]))
            owners.append(index)
    # All pieces before the one that the next part belongs to.
    whole = [*owners[1:], len(pieces)]
    return parts, lambda num_parts: on_arrived(whole[num_parts - 1])
