"""How far a receiver has come with a version, for others of its host to see: one page of shared memory.

    word 0: beats      then one word per track: (version, pieces done)

A track is a source of the receiver's shadow block. Written by one thread of one process, read by any.

**Why a look is consistent.** A word is one aligned 64-bit integer. Loads and stores of such a word are single
instructions, so version and count always belong together. The writer stores a count after it waited for the copies, the
reader loads it before it queues its own. Between them stand the driver's fences (an accelerator's copy is complete when
`synchronize` returns, and starts by a system call or a doorbell) or, for copies by the processor, the ordering of
x86-64; a weaker processor gets its fences from the interpreter lock, which is let go and taken again around every copy.
Before the writer overwrites anything it moves all words to the next version (`begin`), and the reader looks again after
its copies: if the version is the same, nothing it read belonged to another (a seqlock). Whatever slips through is found
by the digests.

**Why nobody waits for the dead.** A process that is killed or stopped cannot be asked, so nothing is: readers notice
that it has ended, or that its page does not change for `patience_s`. A receiver that waits itself beats meanwhile, so
only the neighbour of a silent one loses patience, and those behind that neighbour stay in line.

**Why nobody waits in a circle.** A worker that did not learn its new links keeps the old ones, and with those receivers
may wait for each other, all of them beating. So beats without a new piece are waited for only `BEATS_FACTOR` times as
long as silence.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.device.cpu import CpuBackend
from weight_sync.device.errors import DeviceError
from weight_sync.device.exporter import require_alive
from weight_sync.errors import RelayStalled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from weight_sync.device.base import IpcHandle, PersistentBlock

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
