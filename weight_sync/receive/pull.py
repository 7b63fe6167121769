"""One version on its way into an engine worker, from several sources at a time.

Each source is a learner, or another replica that has the version already. After the last byte of a source the worker
asks its learner whether the slot still is what the coordinator pinned, and for the digests of what it packed. A source
of which a run differs is read once more, from the learner. Only then do the bytes count.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from weight_sync import deadlines
from weight_sync.errors import DigestMismatch, PlanMismatch, PublisherLost, PullTimeout, SlotOverwritten
from weight_sync.messages import Check, Checked, SlotAt
from weight_sync.receive.staging import parts_in
from weight_sync.transports import mapped, pair
from weight_sync.transports.base import ignore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weight_sync.channel import Asked, ControlClient
    from weight_sync.device.base import Backend
    from weight_sync.device.fused import BatchDigest
    from weight_sync.messages import PublisherInfo
    from weight_sync.plan.types import PullPlan
    from weight_sync.receive.relay import Relay
    from weight_sync.receive.staging import UnchangedRuns
    from weight_sync.transports.base import OnArrived, Piece
    from weight_sync.transports.select import SelectedReader


ASKED_AT_ONCE = 16
"""Sources that are asked, or connected and probed, at a time."""
READ_AT_ONCE = {**dict.fromkeys(mapped.MAPPED, 4), pair.HOST: 2}
"""Sources of a transport that are read at a time; of others one. Those run a kernel per batch at both ends: kernels of
two communicators that queue up behind each other in another order here than there would wait for each other."""
Slots = Mapping[int, SlotAt]
"""Learner rank -> where it holds the version."""
T = TypeVar("T")


def _is_wanted() -> None:
    pass


@dataclass(slots=True)
class Deadline:
    """How long something is waited for."""

    at: float
    """By the receiver's clock. May still be moved, by a retry that joins what its first attempt began."""
    check: Callable[[], None] = _is_wanted
    """Raises once nobody wants it any more; looked at all the while."""


class PullStats(NamedTuple):
    """What bringing one version cost."""

    pull_s: float = 0.0
    attest_s: float = 0.0
    num_retries: int = 0
    num_stalls: int = 0
    skipped_bytes: int = 0
    by_source: Mapping[int, float] = {}
    """Learner rank -> seconds of its read, and of the second one where a digest differed."""


class Source(NamedTuple):
    """One publisher this worker reads from."""

    info: PublisherInfo
    client: ControlClient
    reader: SelectedReader
    pieces: tuple[Piece, ...]
    runs: tuple[int, ...]
    """Indices into the plan's runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The worker process that an epoch lives in."""

    model: torch.nn.Module
    backend: Backend
    worker: int
    device: torch.device
    clock: Callable[[], float]

    def choose_device(self) -> None:
        """In every thread of ours: drivers, and torch, keep a current device per thread."""
        if self.device.index is not None:
            self.backend.set_device(self.device.index)

    def side_by_side(self, steps: Sequence[Callable[[], T]], *, at_once: int, on_failed: Callable[[], None]) -> list[T]:
        """The results of `steps`, which begin in this order, up to `at_once` at a time: in this thread, and in others
        that do not keep the process from ending. Once one has failed, calls `on_failed`, begins no more, waits for
        those under way, and raises the first failure."""
        turns, results, failures = itertools.count(), dict[int, T](), list[BaseException]()

        def work() -> None:
            try:
                self.choose_device()
                while not failures and (turn := next(turns)) < len(steps):
                    results[turn] = steps[turn]()
            except BaseException as error:  # noqa: BLE001 - raised below
                failures.append(error)
                on_failed()

        others = [pair.in_thread("weight-sync-source", work) for _ in range(min(at_once, len(steps)) - 1)]
        work()
        wait(others)
        if failures:
            raise failures[0]
        return [results[turn] for turn in range(len(steps))]


class _Read(NamedTuple):
    """How one source was read."""

    rank: int
    began_at: float
    ended_at: float
    num_stalls: int
    skipped_bytes: int
    asked: Asked
    """The learner, for the digests of its runs."""


@dataclass(slots=True, kw_only=True, eq=False)
class VersionPull:
    """See the module docstring."""

    version: int
    slots: Slots
    deadline: Deadline
    context: WorkerContext
    owner: str
    """ "replica/worker"."""
    plan: PullPlan
    sources: Mapping[int, Source]
    """By learner rank, in the order in which to read them."""
    relay: Relay
    arrived: Mapping[int, BatchDigest]
    """Learner rank -> digests of its runs where they arrive; empty if nothing is verified."""
    unchanged: UnchangedRuns | None
    _has_failed: threading.Event = field(default_factory=threading.Event)
    """One source has: the others stop."""

    def run(self) -> PullStats:
        """Bring the version to where its pieces go, verified.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        # First: successors that are ahead wait for this version, and are notified if it is given up.
        self.relay.begin(self.version)
        began_at = self.context.clock()
        in_turn, apart, at_once = self._order()
        steps = [partial(self._read_all, lane) for lane in ([in_turn] if in_turn else []) + [[rank] for rank in apart]]
        lanes = self.context.side_by_side(steps, at_once=at_once, on_failed=self._has_failed.set)
        found = [one for lane in lanes for one in lane]
        # After all bytes: digests read as fast as memory can, which a pull should not have to share.
        again = [retry for one in found if (retry := self._attest(one)) is not None]
        pull_s = max((one.ended_at for one in found), default=began_at) - began_at
        again_s = sum(retry.ended_at - retry.began_at for retry in again)
        by_source = dict.fromkeys(self.sources, 0.0)
        for one in (*found, *again):
            by_source[one.rank] += one.ended_at - one.began_at
        return PullStats(
            pull_s=pull_s + again_s,
            attest_s=self.context.clock() - began_at - pull_s - again_s,
            num_retries=len(again),
            num_stalls=sum(one.num_stalls for one in found),
            skipped_bytes=sum({one.rank: one.skipped_bytes for one in (*found, *again)}.values()),
            by_source=by_source,
        )

    def ask_whether_intact(self) -> Callable[[], None]:
        """Ask every learner whether it holds the version there, without waiting. The result waits for the answers.

        Raises (the result):
            SlotOverwritten, PublisherLost, PullTimeout: one does not hold it any more, or is lost.
        """
        questions = [(rank, self._ask(rank)) for rank in self.sources]

        def require_intact() -> None:
            for rank, asked in questions:
                self._sent_digests(rank, asked)

        return require_intact

    def _order(self) -> tuple[list[int], list[int], int]:
        """Sources that are read one after the other, those that are read beside them, and how many at a time."""
        in_turn: list[int] = []
        apart: dict[int, int] = {}
        for rank, source in self.sources.items():
            at_once = READ_AT_ONCE.get(source.reader.transport, 1)
            # What comes from a predecessor comes in the order of the links: nobody waits in a circle.
            if at_once == 1 or self.relay.hands_on(rank):
                in_turn.append(rank)
            else:
                apart[rank] = at_once
        return in_turn, [*apart], min(apart.values(), default=0) + bool(in_turn)

    def _read_all(self, ranks: Sequence[int]) -> list[_Read]:
        return [self._read(rank) for rank in ranks]

    def _read(self, rank: int, *, is_retry: bool = False) -> _Read:
        clock, source, slot = self.context.clock, self.sources[rank], self.slots[rank].slot
        skipped_bytes = 0

        def keep_going() -> None:
            self._check()
            if clock() >= self.deadline.at:
                raise PullTimeout(f"{self.owner}: version {self.version} did not arrive in time; it is not committed")

        def direct(wanted: Sequence[Piece], on_arrived: OnArrived) -> None:
            nonlocal skipped_bytes
            if changed is None:
                source.reader.pull(slot, wanted, check=keep_going, on_arrived=on_arrived)
                return
            parts, arrived = parts_in(changed, wanted, on_arrived)
            skipped_bytes = max(0, self.plan.bytes_by_source[rank] - sum(part.dst.numel() for part in parts))
            if parts:
                arrived = ignore if on_arrived is ignore else arrived
                source.reader.pull(slot, parts, check=keep_going, on_arrived=arrived)
            else:
                on_arrived(len(wanted))

        keep_going()
        began_at = clock()
        changed = None
        if self.unchanged is not None:
            changed = self.unchanged.changed(rank, lambda: self._sent_digests(rank, self._ask(rank)))
        # A retry, and a source of which nothing has to be read, bypass the predecessors.
        is_own = is_retry or changed == []
        num_stalls = self.relay.pull(
            rank, source.pieces, version=self.version, direct=direct, check=keep_going, is_retry=is_own
        )
        # The learner answers while other sources are read, and digests taken.
        return _Read(rank, began_at, clock(), num_stalls, skipped_bytes, self._ask(rank))

    def _check(self) -> None:
        self.deadline.check()
        if self._has_failed.is_set():
            raise PullTimeout(f"{self.owner} stops reading version {self.version}: another source of it has failed")

    def _attest(self, found: _Read) -> _Read | None:
        """What arrived from a learner is what it packed; what differs is read once more, past relays."""
        if not self._wrong_runs(found):
            return None
        again = self._read(found.rank, is_retry=True)
        if not (wrong := self._wrong_runs(again)):
            return again
        names = sorted({self.plan.runs[i].dst_param for i in wrong})
        num_runs = len(self.sources[found.rank].runs)
        raise DigestMismatch(
            f"{self.owner}: {len(wrong)} of {num_runs} runs from learner {found.rank} differ from what was packed, "
            f"twice: {', '.join(names[:5])}; suspect the link or the memory of either host"
        )

    def _ask(self, rank: int) -> Asked:
        """Ask a learner, without waiting, whether its slot is whole, and for the digests of the runs of this worker."""
        at = self.slots[rank]
        request = Check(worker=self.plan.worker, slot=at.slot, generation=at.generation)
        return self.sources[rank].client.begin(request)

    def _sent_digests(self, rank: int, asked: Asked) -> tuple[int, ...]:
        """Wait for them.

        Raises:
            SlotOverwritten: the slot was packed again while it was read.
            PublisherLost: no answer within `PEER_TIMEOUT_S`.
            PullTimeout: none either, and there was less time than that.
        """
        at = self.slots[rank]
        patience_s = min(deadlines.PEER_TIMEOUT_S, max(self.deadline.at - self.context.clock(), deadlines.GRACE_S))
        try:
            checked = self.sources[rank].client.finish(asked, Checked, deadline_s=patience_s, check=self._check)
        except PublisherLost as error:
            if patience_s >= deadlines.PEER_TIMEOUT_S:
                raise
            raise PullTimeout(
                f"{self.owner}: only {patience_s:.1f} s were left to ask learner {rank}, which says nothing about "
                f"whether it lives: {error}"
            ) from error
        if not checked.is_intact:
            raise SlotOverwritten(
                f"slot {at.slot} of learner {rank} was packed again while {self.owner} read version {self.version} "
                "from it; what was read is torn and is not committed"
            )
        return checked.digests

    def _wrong_runs(self, read: _Read) -> list[int]:
        runs, digest = self.sources[read.rank].runs, self.arrived.get(read.rank)
        found = () if digest is None else digest()
        sent = self._sent_digests(read.rank, read.asked)
        if digest is None:
            return []
        if len(sent) != len(runs):
            raise PlanMismatch(
                f"{self.owner}: learner {read.rank} sent {len(sent)} digests for {len(runs)} runs; "
                "open both sides with the same plan and the same `verify`"
            )
        wrong = [i for i, a, b in zip(runs, sent, found, strict=True) if a != b]
        if self.unchanged is not None and not wrong:
            self.unchanged.verified(read.rank, sent)
        return wrong
