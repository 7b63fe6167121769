"""Serving a version to other workers while it still arrives, and reading one that another worker serves.

Receivers with one worker index have equal staging layouts (`staging_layout` is pure), in which the pieces of a source
lie behind each other in pull order: a **stretch**. So all that a successor needs is a way to read that memory, which is
a slot like any learner's, and how far the stretch is filled.

    successor                                          predecessor
      await(version, rank, position) ────────────────> available(position), once there is more
      <══════ bytes, by ipc or a pair ═══════════════
      await(version, rank, -1) ──────────────────────> available(position): what was read is whole
      then it tells its own successors

The last question is what makes a read count: a predecessor begins a version before it writes the first byte of it, and
refuses questions for the version before from then on. Bytes that it received damaged are found by each who compares
digests. Whatever goes wrong, the next predecessor is asked for the rest, and the learner in the end.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from bisect import bisect_right
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weight_sync import deadlines
from weight_sync.device.base import require_alive
from weight_sync.device.cpu import CpuBackend
from weight_sync.errors import (
    DeviceError,
    PlanMismatch,
    PublisherLost,
    RelayStalled,
    VersionUnavailable,
    WeightSyncError,
)
from weight_sync.messages import ArenaHandle, Available, AwaitRequest, LinkRequest, Ok, Ping, RelayHandle
from weight_sync.node import node_id
from weight_sync.transports import pair
from weight_sync.transports.base import PIECE_BYTES, OnArrived, Piece, ignore
from weight_sync.transports.mapped import DEVICE
from weight_sync.transports.pair_sender import SenderPool
from weight_sync.transports.select import open_reader, usable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from weight_sync.channel import ControlClient
    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.messages import PeerAddress, Response, TransportRequest
    from weight_sync.transports.base import Check, SourceReader


log = logging.getLogger(__name__)


class Patience(NamedTuple):
    """How long a predecessor is waited for, in seconds."""

    news_s: float = 1.0
    """After this long without news it is asked whether it lives."""
    ping_s: float = 1.0
    """Its control thread answers within milliseconds; a process that does not is stopped or gone."""
    stuck_s: float = 10.0
    """A predecessor that lives and brings nothing loses patience with its own within seconds, and moves again; after
    several times that, it may be waiting for us."""


class Stretch(NamedTuple):
    """Where the pieces of one source lie in a staging buffer."""

    start: int
    ends: tuple[int, ...]
    """Offset behind each piece, in pull order. Between neighbours there is at most padding."""

    @property
    def nbytes(self) -> int:
        return self.ends[-1] - self.start


def stretches_of(buffer: PersistentBlock, pieces: Mapping[int, Sequence[Piece]]) -> dict[int, Stretch]:
    """Source rank -> where its pieces lie.

    Raises:
        ValueError: the pieces of a source do not rise through the block.
    """
    found: dict[int, Stretch] = {}
    base = buffer.tensor.data_ptr()
    for rank, each in sorted(pieces.items()):
        starts = [piece.dst.data_ptr() - base for piece in each]
        ends = [start + piece.dst.numel() for start, piece in zip(starts, each, strict=True)]
        if any(start < end for start, end in zip(starts[1:], ends[:-1], strict=True)):
            raise ValueError(f"pieces of source {rank} must rise through the buffer, as staging_layout lays them")
        found[rank] = Stretch(starts[0], tuple(ends))
    return found


class _StagingSlot:
    """A staging buffer as the one slot of a `SenderPool`."""

    num_slots = 1

    def __init__(self, backend: Backend, buffer: torch.Tensor) -> None:
        self.owner = backend
        self._buffer = buffer

    def readable(self, index: int) -> torch.Tensor:
        return self._buffer[: 0 if index else None]


class Relay:
    """One worker's place in its ring. Threads pull, sources from predecessors one after the other; the control thread
    passes successors' questions to `answer`.

    begin(v) ─> pull(source) ... ─> begin(v + 1) ...        invalidate(): nothing here is to be read
    """

    def __init__(
        self,
        backend: Backend,
        buffer: PersistentBlock | None,
        pieces: Mapping[int, Sequence[Piece]],
        *,
        owner: str,
        host: str,
        dial: Callable[[PeerAddress], ControlClient],
        patience: Patience | None = None,
    ) -> None:
        """
        Args:
            buffer: the staging buffer; None if this worker takes no part, and everything comes from the learners.
            pieces: source rank -> its copies into `buffer`.
            host: this process's address as successors on other nodes reach it.
            dial: opens a line to another worker's control server.
        """
        self._backend = backend
        self._buffer = buffer
        self._stretches = {} if buffer is None else stretches_of(buffer, pieces)
        self._layout = hashlib.sha256(msgspec.msgpack.encode(self._stretches)).hexdigest()
        self._owner = owner
        self._host = host
        self._dial = dial
        self._patience = Patience() if patience is None else patience
        self._link = LinkRequest(stages=(), predecessors=(), readers=())
        self._via: dict[int, tuple[int, ...]] = {}
        self._readers: dict[int, RelayReader | None] = {}
        """Index of a predecessor -> how it is read, once it was needed; None if it cannot be."""
        self._lock = threading.Lock()
        self._version = -1
        self._filled: dict[int, int] = {}
        self._over = ""
        """Why nothing more comes of this version; empty while it may."""
        self._waiting: dict[tuple[str, int], tuple[AwaitRequest, Future[Response]]] = {}
        """(successor, rank) -> the last question that has no answer yet."""
        self._arenas: tuple[ArenaHandle, ...] = ()
        self._senders: SenderPool | None = None
        if buffer is not None:
            self._arenas = tuple(_arenas(backend, buffer, host))
            self._senders = SenderPool(_StagingSlot(backend, buffer.tensor), host=host, timing=pair.Timing())

    def handle(self, address: PeerAddress) -> RelayHandle | None:
        """How others read from here, given the address of this process's control server; None if they cannot."""
        if not self._arenas:
            return None
        return RelayHandle(owner=self._owner, node=node_id(), address=address, arenas=self._arenas, layout=self._layout)

    def link(self, request: LinkRequest) -> None:
        """Read from these predecessors from now on, and from no others; free what is kept for successors that are gone
        (a killed one has not hung up)."""
        self._hang_up()
        if self._senders is None:
            return
        for reader in set(self._link.readers).difference(request.readers):
            self._senders.forget(reader.rpartition("/")[0])
        self._link = request
        self._via = {rank: stage.via for stage in self._link.stages for rank in stage.ranks}

    def hands_on(self, rank: int) -> bool:
        """Whether a predecessor is to hand this source on."""
        return bool(self._via.get(rank))

    def begin(self, version: int) -> None:
        """Call before the first byte of `version` is written: this is what tells readers of an earlier one that their
        time is over."""
        with self._lock:
            self._version, self._over = version, ""
            self._filled = dict.fromkeys(self._stretches, 0)
            self._tell()

    def pull(
        self,
        rank: int,
        pieces: Sequence[Piece],
        *,
        version: int,
        direct: Callable[[Sequence[Piece], OnArrived], None],
        check: Check,
        is_retry: bool,
    ) -> int:
        """Bring one source in, from the predecessors as far as they have it, else by `direct`; a retry from its start,
        and not from them. Returns how many predecessors failed."""
        if self._buffer is None:
            direct(pieces, ignore)
            return 0
        stretch, position, num_stalls = self._stretches[rank], 0, 0

        def arrived(upto: int) -> None:
            nonlocal position
            position = upto
            with self._lock:
                self._filled[rank] = upto
                self._tell()

        arrived(0)
        for index in () if is_retry else self._via.get(rank, ()):
            try:
                self._reader(index).pull(rank, stretch, version, check=check, on_arrived=arrived, position=position)
            except RelayStalled as stalled:
                log.warning("%s", stalled)
                num_stalls += 1
            else:
                return num_stalls
        done = bisect_right(stretch.ends, stretch.start + position)
        if self._link.readers:
            direct(pieces[done:], lambda num_pieces: arrived(stretch.ends[done + num_pieces - 1] - stretch.start))
        else:  # reports on the way cost time; a successor that is linked later finds it all
            direct(pieces[done:], ignore)
        arrived(stretch.nbytes)
        return num_stalls

    def invalidate(self, why: str = "gave that version up") -> None:
        """What the staging buffer holds is not to be read: successors go on elsewhere immediately. Idempotent."""
        with self._lock:
            self._over = self._over if self._over else why
            self._tell()

    def answer(self, sender: str, request: AwaitRequest | TransportRequest) -> Response | Future[Response]:
        """Answer a successor. Does not wait.

        Raises:
            VersionUnavailable: nothing of that version comes from here any more.
            ValueError: a source or range that does not exist.
        """
        if self._senders is None:
            raise ValueError(f"{self._owner} has nothing that {sender} could read")
        if not isinstance(request, AwaitRequest):
            return self._senders.answer(sender, request)
        if request.rank not in self._stretches:
            raise ValueError(f"rank must be one of {sorted(self._stretches)}, got {request.rank}")
        with self._lock:
            position = self._position(request)
            if position > request.position:
                return Available(position=position)
            answer: Future[Response] = Future()
            earlier = self._waiting.pop((sender, request.rank), None)
            if earlier is not None:  # nobody waits for it any more
                earlier[1].set_result(Available(position=position))
            self._waiting[sender, request.rank] = request, answer
            return answer

    def counters(self) -> dict[str, int]:
        """Readers are left out: they change with the membership, not with a sync."""
        return {"registrations": sum(arena.handle is not None for arena in self._arenas)}

    def close(self) -> None:
        """Turn successors away permanently, unmap and hang up. The staging buffer stays its owner's. Idempotent."""
        self.invalidate("has closed its epoch")
        with ExitStack() as closing:
            if self._senders is not None:
                closing.callback(self._senders.close, join_s=deadlines.SENDERS_CLOSE_S)
            closing.callback(self._hang_up)

    def _reader(self, index: int) -> RelayReader:
        """
        Raises:
            RelayStalled: this predecessor cannot be read.
        """
        handle = self._link.predecessors[index]
        with self._lock:
            if index not in self._readers:
                self._readers[index] = None
                try:
                    self._readers[index] = self._open(handle)
                except (DeviceError, WeightSyncError) as error:
                    log.warning("cannot read from %s, others give everything: %s", handle.owner, error)
            reader = self._readers[index]
        if reader is None:
            raise RelayStalled(f"{handle.owner} cannot be read from here")
        return reader

    def _open(self, handle: RelayHandle) -> RelayReader:
        """
        Raises:
            WeightSyncError: (or its subclass) the layouts differ, or there is no way to read that memory from here.
        """
        if handle.layout != self._layout:
            raise PlanMismatch(
                f"it lays out its staging buffer as {handle.layout[:12]}, this worker as {self._layout[:12]}; only "
                "workers with one index of one plan can relay to each other"
            )
        assert self._buffer is not None
        line, failures = self._dial(handle.address), list[str]()
        timing = pair.Timing(silence_s=self._patience.news_s + self._patience.ping_s)
        for arena in usable(handle.arenas, same_node=handle.node == node_id()):
            try:
                reader = open_reader(self._backend, arena, line=line, host=self._host, timing=timing)
            except (WeightSyncError, DeviceError) as error:
                failures.append(f"{arena.transport}: {error}")
            else:
                return RelayReader(
                    handle.owner, arena, reader, line, buffer=self._buffer.tensor, patience=self._patience
                )
        line.close()
        raise WeightSyncError("; ".join(failures) if failures else "it is on another node, and cannot send")

    def _hang_up(self) -> None:
        with self._lock, ExitStack() as closing:
            readers, self._readers = self._readers, {}
            for reader in readers.values():
                if reader is not None:
                    closing.callback(reader.close)

    def _position(self, request: AwaitRequest) -> int:
        """
        Raises:
            VersionUnavailable: the version asked for is over.
        """
        if self._version > request.version:
            raise VersionUnavailable(f"it went on to version {self._version}")
        if self._over:
            raise VersionUnavailable(f"it {self._over}")
        return self._filled[request.rank] if self._version == request.version else 0

    def _tell(self) -> None:
        """Answer those who waited for what there is now. Holds the lock."""
        for key, (request, answer) in [*self._waiting.items()]:
            try:
                position = self._position(request)
            except VersionUnavailable as over:
                answer.set_exception(over)
            else:
                if position <= request.position:
                    continue
                answer.set_result(Available(position=position))
            del self._waiting[key]


def _arenas(backend: Backend, buffer: PersistentBlock, host: str) -> Iterator[ArenaHandle]:
    """Every way to read a staging buffer, best first."""
    handle = ArenaHandle(
        transport=DEVICE, handle=None, slot_bytes=buffer.nbytes, slot_stride=buffer.nbytes, num_slots=1
    )
    if backend.capabilities().ipc:
        yield msgspec.structs.replace(handle, handle=backend.ipc_export(buffer))
    sender = pair.HOST if backend.name == CpuBackend.name else pair.device_transport(backend.collective)
    if sender is not None:
        yield msgspec.structs.replace(handle, transport=sender, host=host, device=backend.device_identity())


class RelayReader:
    """Reads sources out of a predecessor's staging buffer into the same places of one's own, one after the other."""

    def __init__(
        self,
        owner: str,
        arena: ArenaHandle,
        reader: SourceReader,
        line: ControlClient,
        *,
        buffer: torch.Tensor,
        patience: Patience,
    ) -> None:
        self._owner = owner
        self._process = {} if arena.handle is None else arena.handle.attributes
        self._reader = reader
        self._line = line
        self._buffer = buffer
        self._patience = patience
        self._lost = -1
        """The version that is expected from it no more."""

    def pull(
        self,
        rank: int,
        stretch: Stretch,
        version: int,
        *,
        check: Check,
        on_arrived: Callable[[int], None],
        position: int = 0,
    ) -> None:
        """Copy this source of `version` from `position` on as it becomes available, and wait for it.

        `check` is called at least every 50 ms and may raise to stop. `on_arrived` receives the position up to which the
        source is here, whole. When this returns or raises, no copy is under way any more.

        Raises:
            RelayStalled: the predecessor ended, gave this version up, went on to another one, or brought nothing for
                too long. What `on_arrived` received is here; ask another for the rest, also of other sources.
        """
        stopped: list[BaseException] = []
        available = position

        def go_on() -> None:
            try:
                check()
            except BaseException as error:
                stopped.append(error)
                raise
            if self._process:
                require_alive(self._process)

        def landed(num_parts: int) -> None:
            # The version may have changed under the copy; only this question tells that it did not.
            again, patience = AwaitRequest(version=version, rank=rank, position=-1), self._patience
            self._line.ask(again, Available, deadline_s=patience.news_s + patience.ping_s, check=go_on)
            on_arrived(min(position + num_parts * PIECE_BYTES, available))

        try:
            if version == self._lost:
                raise RelayStalled(f"version {version} is not expected from {self._owner} any more")
            while position < stretch.nbytes:
                available = self._await(AwaitRequest(version=version, rank=rank, position=position), go_on)
                stop = stretch.start + available
                starts = range(stretch.start + position, stop, PIECE_BYTES)
                parts = [Piece(at, self._buffer[at : min(at + PIECE_BYTES, stop)]) for at in starts]
                self._reader.pull(0, parts, check=go_on, on_arrived=landed)
                position = available
        except (WeightSyncError, DeviceError) as error:
            if stopped:
                raise
            self._lost = version
            raise RelayStalled(f"{self._owner} does not bring version {version} of learner {rank}: {error}") from error

    def _await(self, request: AwaitRequest, check: Check) -> int:
        """The position to which the predecessor has come, which is behind the one of `request`."""
        began = time.monotonic()
        while True:
            try:
                news = self._line.ask(request, Available, deadline_s=self._patience.news_s, check=check)
            except PublisherLost:
                try:
                    self._line.ask(Ping(), Ok, deadline_s=self._patience.ping_s, check=check)
                except PublisherLost:
                    raise PublisherLost(f"it was silent for {time.monotonic() - began:.1f} s") from None
            else:
                if news.position > request.position:
                    return news.position
            if (stuck_s := time.monotonic() - began) >= self._patience.stuck_s:
                raise PublisherLost(f"it lives, and brought nothing for {stuck_s:.1f} s; perhaps it waits for us")

    def close(self) -> None:
        """Unmap or leave, and hang up. Idempotent."""
        try:
            self._reader.close()
        finally:
            self._line.close()
