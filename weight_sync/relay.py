"""One replica's shadow block as a source for the next: reading a version from a receiver while it still arrives there.

Receivers with one worker index have equal shadow layouts (`pull.shadow_plan` is pure), in which the pieces of a source
lie behind each other in pull order. So all that a successor needs is that memory and how far it is filled.

     predecessor                                         successor
     ┌──────────── shadow ────────────┐    copies        ┌──────────── shadow ────────────┐
     │ source 0 ████████████████░░░░░ │ ───────────────> │ source 0 ███████████░░░░░░░░░░ │ ──> its own successor
     └────────────────────────────────┘                  └────────────────────────────────┘
       RelayOutlet: progress page ──── looked at ──────>   RelayInlet

How a receiver brings one source in, whatever its route:

    outlet.begin(version)                          # once, before the first byte of any source
    done = 0
    if predecessor is not None:
        try:
            inlet.pull(rank, version, check=check, outlet=outlet)
            done = len(pieces)
        except RelayStalled as stalled:            # went silent, died, gave up: the learner has the rest
            done = stalled.pieces_done
    end.pull(rank, slot, pieces[done:], check=check, on_arrived=lambda n: outlet.advance(rank, done + n))

It compares the digests of what arrived as ever: bytes that a predecessor received damaged are found by each who copies
them. To pull a source again, `outlet.advance(rank, 0)` first.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weight_sync.device.errors import DeviceError
from weight_sync.errors import PlanMismatch
from weight_sync.progress import PATIENCE_S, ProgressReader, ProgressWriter
from weight_sync.pull import PIECE_BYTES
from weight_sync.transports import base as transport
from weight_sync.types import RelayHandle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.transports.base import Piece


class Stretch(NamedTuple):
    """Where the pieces of one source lie in a shadow block."""

    start: int
    ends: tuple[int, ...]
    """Offset behind each piece, in pull order. Between neighbours there is at most padding."""


class ShadowMap(NamedTuple):
    """A receiver's shadow block and where each source lies in it. `map_shadow` makes it."""

    block: PersistentBlock
    stretches: Mapping[int, Stretch]
    """Source rank -> its stretch, by rank."""
    digest: str
    """Equal for two receivers exactly if their layouts are."""


def map_shadow(block: PersistentBlock, pieces: Mapping[int, Sequence[Piece]]) -> ShadowMap:
    """Where the pieces of each source (those of a `Landing`) lie in `block`.

    Raises:
        ValueError: a piece lies outside the block, or the pieces of a source are not one rising stretch of it that no
            other source has bytes in.
    """
    stretches: dict[int, Stretch] = {}
    base = block.tensor.data_ptr()
    for rank, each in sorted(pieces.items()):
        if not each:
            continue
        starts = [piece.dst.data_ptr() - base for piece in each]
        ends = [start + piece.dst.numel() for start, piece in zip(starts, each, strict=True)]
        if min(starts) < 0 or max(ends) > block.nbytes:
            raise ValueError(f"pieces of source {rank} lie outside the shadow block; only staged pulls can be relayed")
        if any(start < end for start, end in zip(starts[1:], ends[:-1], strict=True)):
            raise ValueError(f"pieces of source {rank} must rise through the shadow block, as shadow_plan lays them")
        stretches[rank] = Stretch(starts[0], tuple(ends))
    filled = sorted((found.start, found.ends[-1]) for found in stretches.values())
    if any(start < end for (start, _), (_, end) in zip(filled[1:], filled[:-1], strict=True)):
        raise ValueError("sources must lie behind each other in the shadow block, as shadow_plan lays them")
    facts = msgspec.msgpack.encode((block.nbytes, stretches))
    return ShadowMap(block, stretches, hashlib.sha256(facts).hexdigest())


class RelayOutlet:
    """Offers a receiver's shadow block to others. Used by one thread, the one that pulls.

    begin(v) ─> advance(source, n) ... ─> begin(v + 1) ...        end(): nothing here is to be read
    """

    def __init__(self, backend: Backend, own: ShadowMap, *, owner: str) -> None:
        """
        Raises:
            DeviceError: this memory cannot be shared between processes.
        """
        if not backend.capabilities().ipc:
            raise DeviceError(f"device {backend.name} cannot share memory between processes, so {owner} cannot relay")
        shadow = backend.ipc_export(own.block)
        self._track = {rank: track for track, rank in enumerate(own.stretches)}
        self._progress = ProgressWriter([len(stretch.ends) for stretch in own.stretches.values()])
        self.handle = RelayHandle(owner=owner, shadow=shadow, progress=self._progress.handle, layout=own.digest)

    def begin(self, version: int) -> None:
        """From now on the shadow is filled with `version`, nothing of which is there yet.

        Call before its first byte is written: this is what tells readers of an earlier version that their time is over.
        """
        self._progress.begin(version)

    def advance(self, source: int, pieces_done: int) -> None:
        """The first `pieces_done` pieces of `source` have arrived and were waited for; 0 before it is pulled again.

        Raises:
            ValueError: the source has fewer pieces, or no version was begun.
        """
        self._progress.advance(self._track[source], pieces_done)

    def beat(self) -> None:
        """We are alive and wait ourselves; so those who wait for us go on waiting."""
        self._progress.beat()

    def end(self) -> None:
        """What the shadow holds is not to be read (the pull failed): readers go to the learner at once. Idempotent."""
        self._progress.end()

    def counters(self) -> dict[str, int]:
        return {"allocations": 1, "registrations": 2}

    def close(self) -> None:
        """Turn readers away for good and free the progress page. The shadow block stays its owner's. Idempotent."""
        self._progress.close()


class RelayInlet:
    """Reads sources out of another receiver's shadow block into the same places of one's own. One pull at a time."""

    def __init__(
        self,
        backend: Backend,
        handle: RelayHandle,
        own: ShadowMap,
        *,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            patience_s: how long the predecessor may stay silent while we wait for it.

        Raises:
            PlanMismatch: the layouts differ.
            DeviceError: the blocks cannot be mapped.
        """
        if handle.layout != own.digest:
            raise PlanMismatch(
                f"{handle.owner} lays out its shadow as {handle.layout[:12]}, this worker as {own.digest[:12]}; only "
                "workers with one index of one manifest can relay to each other"
            )
        self._backend = backend
        self._own = own
        self._track = {rank: track for track, rank in enumerate(own.stretches)}
        self._streams: tuple[Any | None, ...] = tuple(backend.new_stream() for _ in range(transport.BATCHES_IN_FLIGHT))
        self._progress = ProgressReader(handle.progress, owner=handle.owner, patience_s=patience_s, clock=clock)
        try:
            self._shadow = backend.ipc_open(handle.shadow)
        except BaseException:
            self._progress.close()
            raise

    def pull(self, source: int, version: int, *, check: Callable[[], None], outlet: RelayOutlet | None = None) -> None:
        """Copy `source` of `version` as it becomes available, and wait for it.

        `check` is called once per look and per batch of copies, so about every millisecond, and may raise to stop.
        `outlet` is our own: it is told what has arrived, so that the next in line goes on. When this returns or raises,
        no copy is under way any more.

        Raises:
            RelayStalled: the predecessor ended, gave this version up, went on to another one, or was silent for
                `patience_s`. The first `pieces_done` pieces have arrived whole; ask the learner for the rest only.
        """
        stretch, track = self._own.stretches[source], self._track[source]
        queued, landed = 0, 0
        flying: deque[tuple[Any | None, int]] = deque()
        free = deque(self._streams)
        self._progress.start(version)
        try:
            while landed < len(stretch.ends):
                check()
                ready = self._progress.ready(track, landed=landed)
                if queued < ready and free:
                    stream = free.popleft()
                    queued = self._queue(stretch, queued, ready, stream)
                    flying.append((stream, queued))
                elif flying:
                    stream, arrived = flying.popleft()
                    self._backend.synchronize(stream)
                    free.append(stream)
                    # The version may have changed under the copy; only this look tells that it did not.
                    self._progress.ready(track, landed=landed)
                    landed = arrived
                    if outlet is not None:
                        outlet.advance(source, landed)
                else:
                    if outlet is not None:
                        outlet.beat()
                    self._progress.wait(landed=landed)
        finally:
            # Whoever takes over writes to the same places; nothing of ours may land there later.
            for stream in self._streams:
                self._backend.synchronize(stream)

    def counters(self) -> dict[str, int]:
        return {"registrations": 2}

    def close(self) -> None:
        """Unmap both blocks. Idempotent."""
        try:
            self._shadow.close()
        finally:
            self._progress.close()

    def _queue(self, stretch: Stretch, queued: int, ready: int, stream: Any | None) -> int:
        """Start to copy the next batch. Returns the number of pieces that are then under way or done.

        Pieces of a source are neighbours here, so a batch of them is one run of bytes however small they are.
        """
        start = stretch.ends[queued - 1] if queued else stretch.start
        upto = min(ready, max(queued + 1, bisect_right(stretch.ends, start + transport.BATCH_BYTES)))
        stop = stretch.ends[upto - 1]
        ours, theirs = self._own.block.tensor, self._shadow.tensor
        for at in range(start, stop, PIECE_BYTES):
            until = min(stop, at + PIECE_BYTES)
            self._backend.copy_async(ours[at:until], theirs[at:until], stream)
        return upto
