"""Serving a version to other workers while it still arrives, and reading one that another worker serves.

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
import logging
import time
from bisect import bisect_right
from collections import deque
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from weight_sync.device.cpu import CpuBackend
from weight_sync.device.process import require_alive
from weight_sync.errors import DeviceError, PlanMismatch, RelayStalled
from weight_sync.messages import RelayHandle
from weight_sync.transports import base as transport
from weight_sync.transports.base import PIECE_BYTES, OnArrived, ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from weight_sync.device.base import Backend, IpcHandle, PersistentBlock
    from weight_sync.messages import LinkRequest
    from weight_sync.receive.staging import Landing
    from weight_sync.transports.base import Piece


POLL_S = 0.0002
"""Between two looks at a page that shows nothing new."""
ALIVE_EVERY_S = 0.05
"""Between two looks whether the writer's process still lives."""
PATIENCE_S = 2.0
"""Silence after which a writer counts as stopped. It reports or beats every few milliseconds, except while it compares
digests; and an engine under load may keep its threads from running for a good part of a second."""
BEATS_FACTOR = 5.0
"""Behind a silent writer the whole line moves again after one patience; after several it can only be a circle."""

COUNT_BITS = 24
MAX_PIECES = (1 << COUNT_BITS) - 2
MAX_VERSION = (1 << (63 - COUNT_BITS)) - 2
_ENDED = (1 << COUNT_BITS) - 1
"""A count that no track reaches: the writer gave this version up."""
_CLOSED = -1
_WORD_BYTES = 8


class ProgressWriter:
    """The page of one receiver. Used by one thread, the one that pulls.

    begin(v) ─> advance(track, n) ... ─> begin(v + 1) ...        end(): nothing is to be read
    """

    def __init__(self, num_pieces: Sequence[int]) -> None:
        """
        Args:
            num_pieces: of each track.

        Raises:
            ValueError: a track has more pieces than can be counted.
            DeviceError: no shared memory.
        """
        if max(num_pieces, default=0) > MAX_PIECES:
            raise ValueError(f"a track has {max(num_pieces)} pieces, at most {MAX_PIECES} can be counted")
        host = CpuBackend()
        self._num_pieces = tuple(num_pieces)
        self._version: int | None = None
        self._block = host.alloc_persistent(_WORD_BYTES * (1 + len(num_pieces)))
        self._beats, self._tracks = _words_of(self._block)
        self.handle: IpcHandle = host.ipc_export(self._block)

    def begin(self, version: int) -> None:
        """From now on `version` is being filled in, and nothing of it is there yet."""
        if not 0 <= version <= MAX_VERSION:
            raise ValueError(f"version must be in [0, {MAX_VERSION}], got {version}")
        self._version = version
        self._mark(_word(version, 0))

    def advance(self, track: int, pieces_done: int) -> None:
        """
        Raises:
            ValueError: the track has no such count, or no version was begun.
        """
        if not 0 <= pieces_done <= self._num_pieces[track]:
            raise ValueError(f"pieces_done must be in [0, {self._num_pieces[track]}], got {pieces_done}")
        if self._version is None:
            raise ValueError("no version is being filled in; call begin first")
        self._tracks[track] = _word(self._version, pieces_done)

    def beat(self) -> None:
        """We are alive and wait ourselves."""
        self._beats[0] += 1

    def end(self) -> None:
        """The version that was begun is given up. Idempotent."""
        if self._version is not None:
            self._mark(_word(self._version, _ENDED))
            self._version = None

    def close(self) -> None:
        """Turn readers away for good. Idempotent."""
        self._version = None
        self._mark(_CLOSED)
        self._beats, self._tracks = _no_words(len(self._tracks))
        self._block.close()

    def _mark(self, word: int) -> None:
        # One by one: a filled slice might be written in other portions than words.
        for track in range(len(self._tracks)):
            self._tracks[track] = word


class ProgressReader:
    """Another receiver's page, and how long to wait for it. One reading thread.

    The time of a silence runs on from one track of a version to the next, so a silent writer costs a reader
    `patience_s` once and not once per track. A writer that only beats costs its time once per version.
    """

    def __init__(self, handle: IpcHandle, *, owner: str, patience_s: float, clock: Callable[[], float]) -> None:
        """
        Raises:
            DeviceError: the page cannot be mapped.
        """
        if patience_s <= 0:
            raise ValueError(f"patience_s must be > 0, got {patience_s}; every piece takes some time")
        self._handle = handle
        self._owner = owner
        self._patience_s = patience_s
        self._clock = clock
        self._block = CpuBackend().ipc_open(handle)
        self._beats, self._tracks = _words_of(self._block)
        self._version = -1
        self._beats_seen, self._tracks_seen = self._look()
        self._changed_at = self._moved_at = self._checked_at = clock()
        self._is_in_circle = False

    def start(self, version: int) -> None:
        """`ready` and `wait` are about `version` from now on."""
        if version != self._version:
            self._version = version
            self._beats_seen, self._tracks_seen = self._look()
            self._changed_at = self._moved_at = self._clock()
            self._is_in_circle = False

    def ready(self, track: int, *, landed: int) -> int:
        """Pieces of `track` that are there now; 0 if the writer has not come to this version yet.

        Raises:
            RelayStalled: it never will, or not any more; `landed` goes into the error.
        """
        word = int(self._tracks[track])
        if word == _CLOSED:
            raise self._stalled("has closed its epoch", landed)
        found, count = (word >> COUNT_BITS) - 1, word & ((1 << COUNT_BITS) - 1)
        if found > self._version:
            raise self._stalled(f"went on to version {found}", landed)
        if found < self._version:
            return 0
        if count == _ENDED:
            raise self._stalled("gave that version up", landed)
        return count

    def wait(self, *, landed: int) -> None:
        """Sleep a little.

        Raises:
            RelayStalled: waiting is over; `landed` goes into the error.
        """
        now, (beats, tracks) = self._clock(), self._look()
        if tracks != self._tracks_seen:
            self._moved_at = self._changed_at = now
        elif beats != self._beats_seen:
            self._changed_at = now
        self._beats_seen, self._tracks_seen = beats, tracks
        silent_s, stuck_s = now - self._changed_at, now - self._moved_at
        if silent_s >= self._patience_s:
            raise self._stalled(f"has made no progress for {silent_s:.1f} s", landed)
        self._is_in_circle |= stuck_s >= BEATS_FACTOR * self._patience_s
        if self._is_in_circle:
            raise self._stalled(f"has waited itself for {stuck_s:.1f} s, perhaps for this worker", landed)
        if now - self._checked_at >= ALIVE_EVERY_S:
            self._checked_at = now
            try:
                require_alive(self._handle.attributes)
            except DeviceError as error:
                raise self._stalled("has ended", landed) from error
        time.sleep(POLL_S)

    def close(self) -> None:
        """Idempotent."""
        self._beats, self._tracks = _no_words(len(self._tracks))
        self._block.close()

    def _look(self) -> tuple[bytes, bytes]:
        return self._beats.tobytes(), self._tracks.tobytes()

    def _stalled(self, what: str, landed: int) -> RelayStalled:
        return RelayStalled(
            f"{self._owner}, from whom version {self._version} is being read, {what}; the learner has it too",
            pieces_done=landed,
        )


def _words_of(block: PersistentBlock) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(beats, tracks). A mapping starts at a page boundary, so every word is aligned."""
    words = block.tensor.numpy().view(np.int64)
    return words[:1], words[1:]


def _no_words(num_tracks: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """What stands in for a page that is no longer mapped, so that a late look or beat touches no foreign memory."""
    return np.zeros(1, np.int64), np.full(num_tracks, _CLOSED, np.int64)


def _word(version: int, count: int) -> int:
    """A page of zeros shows no version, so versions are stored from 1."""
    return (version + 1) << COUNT_BITS | count


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
                "workers with one index of one plan can relay to each other"
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


log = logging.getLogger(__name__)


class RelayEnds:
    """An outlet, once the shadow block can be shared, and an inlet, once a predecessor is named. Both may be missing;
    then everything comes from the learners."""

    def __init__(self, backend: Backend, shadow: ShadowMap | None, outlet: RelayOutlet | None) -> None:
        self._backend = backend
        self._shadow = shadow
        self._outlet = outlet
        self._inlet: RelayInlet | None = None
        self._relayed: frozenset[int] = frozenset()
        self._is_read = False

    @classmethod
    def of(cls, landing: Landing, backend: Backend, *, owner: str, is_wanted: bool) -> RelayEnds:
        """For a staged landing in memory that can be shared; else ends that do nothing."""
        if landing.shadow is None or not is_wanted or not backend.capabilities().ipc:
            return cls(backend, None, None)
        shadow = map_shadow(landing.shadow, landing.pieces)
        return cls(backend, shadow, RelayOutlet(backend, shadow, owner=owner))

    @property
    def handle(self) -> RelayHandle | None:
        """How others read from here; None if they cannot."""
        return None if self._outlet is None else self._outlet.handle

    def link(self, request: LinkRequest) -> bool:
        """Take a new predecessor, or none. False if its memory cannot be read: then the learners give everything."""
        inlet, self._inlet = self._inlet, None
        if inlet is not None:
            inlet.close()
        self._relayed, self._is_read = frozenset(request.relayed), request.is_read
        if request.predecessor is None or self._shadow is None:
            return False
        try:
            self._inlet = RelayInlet(self._backend, request.predecessor, self._shadow)
        except (DeviceError, PlanMismatch) as error:
            log.warning("cannot read from %s, the learners give everything: %s", request.predecessor.owner, error)
            return False
        return True

    def begin(self, version: int) -> None:
        """Call before the first byte of `version` is written."""
        if self._outlet is not None:
            self._outlet.begin(version)

    def restart(self, rank: int) -> None:
        """The source is pulled again from its start."""
        if self._outlet is not None:
            self._outlet.advance(rank, 0)

    def pull(
        self,
        rank: int,
        pieces: Sequence[Piece],
        *,
        version: int,
        direct: Callable[[Sequence[Piece], OnArrived], None],
        check: Callable[[], None],
        may_relay: bool,
    ) -> bool:
        """Bring one source in, from the predecessor as far as it has it, else by `direct`. Whether it fell silent."""
        done, has_stalled = 0, False
        if self._inlet is not None and rank in self._relayed and may_relay:
            try:
                self._inlet.pull(rank, version, check=check, outlet=self._outlet)
                return False
            except RelayStalled as stalled:
                log.warning("%s", stalled)
                done, has_stalled = stalled.pieces_done, True
        outlet = self._outlet
        if outlet is not None and self._is_read:
            direct(pieces[done:], lambda num_pieces: outlet.advance(rank, done + num_pieces))
        else:
            direct(pieces[done:], ignore)
            if outlet is not None:  # reports on the way would cost time; whoever is linked to us later finds it all
                outlet.advance(rank, len(pieces))
        return has_stalled

    def give_up(self) -> None:
        """What the shadow holds is not to be read."""
        if self._outlet is not None:
            self._outlet.end()

    def counters(self) -> dict[str, int]:
        """The inlet is left out: it changes with the membership, not with a sync."""
        return {} if self._outlet is None else self._outlet.counters()

    def close(self) -> None:
        """Idempotent. Both are closed, also if one cannot be; that failure is raised at the end."""
        inlet, self._inlet = self._inlet, None
        with ExitStack() as closing:
            for end in (self._outlet, inlet):
                if end is not None:
                    closing.callback(end.close)
