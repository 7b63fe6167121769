"""The receiver's half of a pair: builds its member of the group when a pull needs one, orders bytes and takes them in.

A pull has a thread of its own for everything that may block in a library. The caller's thread looks at its `check`,
asks the publisher whether it is still there, and aborts the group if either says so.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import zmq

from weight_sync.control import PairDrop, PairMeet, PairMet, PairSend, PairState, PairWatch
from weight_sync.device.cpu import CpuBackend
from weight_sync.device.errors import DeviceError
from weight_sync.device.process_groups import LinkBroken
from weight_sync.errors import PublisherLost, TransportUnusable, WeightSyncError
from weight_sync.transports.base import Line, Piece, require_slot
from weight_sync.transports.messages import (
    BATCH_BYTES,
    BATCHES_IN_FLIGHT,
    MESSAGE_BYTES,
    STAGED_BYTES,
    Timing,
    batches,
    cut,
    orders,
)
from weight_sync.transports.rendezvous import StoreMirror

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from weight_sync.control import Request
    from weight_sync.device.base import Backend, PersistentBlock
    from weight_sync.device.process_groups import PairGroup, Transfer
    from weight_sync.wire import ArenaHandle

CHECK_S = 0.1
"""How often a waiting pull looks at its `check`."""
ASK_S = 0.4
"""One question. Short, because the line is shared with the thread that must get to its `check`."""
WATCH_S = 1.0
MEET_S = 0.005
LEAVE_S = 5.0
"""For the thread of an aborted pull to come back from the library."""
R = TypeVar("R")


class Message(NamedTuple):
    offset: int
    dst: torch.Tensor


class Landing:
    """Where messages arrive: in the pieces themselves, or in host memory next to them and from there by a copy."""

    def __init__(self, backend: Backend, *, staged: bool) -> None:
        """
        Raises:
            DeviceError: no memory for staging.
        """
        self._backend = backend
        self._stream: Any | None = backend.new_stream()
        self._blocks: list[PersistentBlock] = []
        self._turn = 0
        self.message_bytes = STAGED_BYTES if staged else MESSAGE_BYTES
        self.batch_bytes = STAGED_BYTES if staged else BATCH_BYTES
        if staged:
            self._blocks.extend(CpuBackend().alloc_persistent(STAGED_BYTES) for _ in range(BATCHES_IN_FLIGHT))

    def enter(self) -> contextlib.AbstractContextManager[None]:
        """Library calls of this thread wait for this end's own stream, not for the engine's compute."""
        self._backend.enter()
        return self._backend.use_stream(self._stream)

    def targets(self, batch: Sequence[Message]) -> list[torch.Tensor]:
        """What to receive `batch` into. A batch must be delivered before the next but one asks."""
        if not self._blocks:
            return [message.dst for message in batch]
        block, self._turn = self._blocks[self._turn].tensor, (self._turn + 1) % len(self._blocks)
        found: list[torch.Tensor] = []
        start = 0
        for message in batch:
            found.append(block[start : start + message.dst.numel()])
            start += message.dst.numel()
        return found

    def deliver(self, batch: Sequence[Message], arrived: Sequence[torch.Tensor]) -> None:
        """Bring what arrived into the pieces. Returns when it is there."""
        if not self._blocks:
            return
        try:
            for message, tensor in zip(batch, arrived, strict=True):
                self._backend.copy_async(message.dst, tensor, self._stream)
        finally:  # after an error too: whoever pulls again writes to the same places
            self._backend.synchronize(self._stream)

    def num_allocations(self) -> int:
        return len(self._blocks)

    def close(self) -> None:
        for block in self._blocks:
            block.close()
        self._blocks.clear()


class Standing:
    """A group that both sides are in, and how many orders went to it."""

    def __init__(self, group: PairGroup, group_id: bytes) -> None:
        self.group = group
        self.group_id = group_id
        self.num_orders = 0


class Job:
    """One pull."""

    def __init__(self, slot: int, messages: Sequence[Message], standing: Standing | None) -> None:
        """`standing` is the group to use; None if the pull must build one."""
        self.slot = slot
        self.standing = standing
        self.messages = messages
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.is_receiving = False
        """Messages may be on their way into the pieces."""
        self._is_cancelled = False
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """
        Raises:
            LinkBroken: nobody wants this any more.
        """
        if self._is_cancelled:
            raise LinkBroken("the pull was stopped")

    def begin_receiving(self, standing: Standing) -> None:
        """As `go_on`; if it does not raise, `cancel` knows the group, and that the pieces are in use."""
        with self._lock:
            self.go_on()
            self.standing = standing
            self.is_receiving = True

    def cancel(self) -> Standing | None:
        """The group that it uses or was to use. If it receives not yet, it never will."""
        with self._lock:
            self._is_cancelled = True
            return self.standing


class Inbound:
    """One publisher's pair. `connect` builds this side's member of a group; pulls come one at a time."""

    def __init__(
        self,
        arena: ArenaHandle,
        line: Line,
        landing: Landing,
        *,
        connect: Callable[[StoreMirror], PairGroup],
        timing: Timing,
    ) -> None:
        self.num_connected = 0
        self._arena = arena
        self._line = line
        self._landing = landing
        self._connect = connect
        self._timing = timing
        self._standing: Standing | None = None
        """Belongs to the caller's thread: what the thread of a stopped pull still does cannot reach the next pull."""
        self._stuck: threading.Thread | None = None

    def pull(self, slot: int, pieces: Iterable[Piece], *, check: Callable[[], None]) -> None:
        """As `ReceiverEnd.pull`."""
        require_slot(self._arena, slot)
        check()
        if self._stuck is not None:
            raise WeightSyncError(
                f"{self._name()}: an aborted transfer still holds its memory; restart this engine process"
            )
        limit_bytes = self._landing.message_bytes
        messages = [message for piece in pieces for message in _messages(piece, limit_bytes)]
        job = Job(slot, messages, self._standing)
        thread = threading.Thread(target=self._work, args=(job,), name="weight-sync-pull", daemon=True)
        thread.start()
        try:
            self._supervise(job, check)
            check()
        except BaseException:
            self._stop(job, thread)
            raise
        self._standing = job.standing

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._leave(self._standing)

    def _supervise(self, job: Job, check: Callable[[], None]) -> None:
        heard = watched = time.monotonic()
        while not job.done.wait(CHECK_S):
            check()
            now = time.monotonic()
            if not job.is_receiving:
                heard = now  # the thread itself asks the publisher
            elif now - watched > WATCH_S:
                watched = now
                heard = self._watch(job, heard)
        if job.error is not None:
            raise job.error

    def _watch(self, job: Job, heard: float) -> float:
        """When the publisher was last heard of.

        Raises:
            PublisherLost: too long ago.
            WeightSyncError: it says that the group fell.
        """
        assert job.standing is not None
        try:
            state = self._line.ask(PairWatch(group=job.standing.group_id), PairState, deadline_s=ASK_S)
        except PublisherLost as error:
            if time.monotonic() - heard > self._timing.silence_s:
                raise PublisherLost(f"{self._name()}: silent in the middle of a transfer: {error}") from error
            return heard
        if state.error:
            raise WeightSyncError(f"{self._name()}: it stopped sending: {state.error}")
        return time.monotonic()

    def _stop(self, job: Job, thread: threading.Thread) -> None:
        """Returns when the pull's thread is gone, so that it neither writes into the pieces nor speaks to the publisher
        any more (or remembers that this could not be had)."""
        try:
            self._leave(job.cancel())
        finally:
            thread.join(LEAVE_S)
            self._stuck = thread if job.is_receiving and thread.is_alive() else None

    def _leave(self, standing: Standing | None) -> None:
        self._standing = None
        if standing is None:
            return
        with contextlib.suppress(DeviceError):
            standing.group.abort()
        # A publisher that cannot be told notices by itself, later; and its line may be closed already.
        with contextlib.suppress(WeightSyncError, zmq.ZMQError):
            self._line.ask(PairDrop(group=standing.group_id), PairState, deadline_s=ASK_S / 2)

    def _work(self, job: Job) -> None:
        """The thread of a pull."""
        try:
            with self._landing.enter():
                standing = self._meet(job) if job.standing is None else job.standing
                self._begin(job, standing)
                self._receive(job, standing)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            job.error = self._explained(error)
        finally:
            job.done.set()

    def _begin(self, job: Job, standing: Standing) -> None:
        try:
            job.begin_receiving(standing)
        except LinkBroken:
            # Whoever stopped the pull did not know of this group, so nobody else will abort it.
            standing.group.abort()
            raise

    def _receive(self, job: Job, standing: Standing) -> None:
        for part in orders(job.messages):
            ranges = tuple((message.offset, message.dst.numel()) for message in part)
            order = PairSend(group=standing.group_id, number=standing.num_orders, slot=job.slot, ranges=ranges)
            standing.num_orders += 1
            state = self._ask(job, order, PairState)
            if state.error:
                raise LinkBroken(f"the publisher left the group: {state.error}")
        pending: deque[tuple[Transfer, list[Message], list[torch.Tensor]]] = deque()
        for part in orders(job.messages):
            for batch in batches(part, lambda message: message.dst.numel(), limit_bytes=self._landing.batch_bytes):
                if len(pending) == BATCHES_IN_FLIGHT:
                    self._finish(job, *pending.popleft())
                targets = self._landing.targets(batch)
                pending.append((standing.group.receive(targets), batch, targets))
        while pending:
            self._finish(job, *pending.popleft())

    def _finish(self, job: Job, transfer: Transfer, batch: list[Message], targets: list[torch.Tensor]) -> None:
        transfer.wait(self._timing.stall_s)
        job.go_on()
        self._landing.deliver(batch, targets)

    def _meet(self, job: Job) -> Standing:
        """Build both halves of a new group. The library blocks until the other half is there, so it has a thread."""
        group_id = secrets.token_bytes(16)
        mirror = StoreMirror()
        half = Half(lambda: self._connect(mirror))
        try:
            while True:
                is_built = half.done.wait(MEET_S)
                # Once more after it is built: the publisher may need what the library wrote last to finish its half.
                met = self._ask(job, PairMeet(group=group_id, entries=mirror.own()), PairMet)
                if met.error:
                    raise LinkBroken(f"the publisher could not join: {met.error}")
                mirror.learn(met.entries)
                if is_built:
                    break
            group = half.result()
        except BaseException:
            half.abandon()
            raise
        self.num_connected += 1
        return Standing(group, group_id)

    def _ask(self, job: Job, request: Request, kind: type[R]) -> R:
        """Ask until there is an answer. Every request of ours may be repeated.

        Raises:
            PublisherLost: none within `silence_s`.
        """
        give_up = time.monotonic() + self._timing.silence_s
        while True:
            job.go_on()
            try:
                return self._line.ask(request, kind, deadline_s=ASK_S)
            except PublisherLost:
                if time.monotonic() >= give_up:
                    raise

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, DeviceError):
            return error
        # Of this device, or of the link: the publisher may be well, and is asked when the pull is tried again.
        message = f"{self._name()}: {error}"
        return WeightSyncError(message) if self.num_connected else TransportUnusable(message)

    def _name(self) -> str:
        return f"{self._arena.transport} from the publisher at {self._arena.host}"


class Half:
    """This side's member of a group, being built in a thread."""

    def __init__(self, connect: Callable[[], PairGroup]) -> None:
        self.done = threading.Event()
        self._connect = connect
        self._group: PairGroup | None = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_abandoned = False
        threading.Thread(target=self._build, name="weight-sync-connect", daemon=True).start()

    def result(self) -> PairGroup:
        if self._group is None:
            raise self._error if self._error is not None else LinkBroken("the group was not built")
        return self._group

    def abandon(self) -> None:
        """Abort the group, now or when it is built: the library cannot be called back from that."""
        with self._lock:
            self._is_abandoned = True
        if self._group is not None:
            with contextlib.suppress(DeviceError):
                self._group.abort()

    def _build(self) -> None:
        try:
            group = self._connect()
            with self._lock:
                self._group = group
            if self._is_abandoned:
                group.abort()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        finally:
            self.done.set()


def _messages(piece: Piece, limit_bytes: int) -> Iterable[Message]:
    for offset, nbytes in cut(piece.src_off, piece.dst.numel(), limit_bytes=limit_bytes):
        start = offset - piece.src_off
        yield Message(offset, piece.dst[start : start + nbytes])
