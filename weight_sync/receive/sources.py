"""What a worker reads from in one epoch: learners and relays, and the pull itself.

A version arrives from several sources at a time, each a learner or another replica that has it already. After the last
byte of a source the worker asks its learner whether the slot still is what the coordinator pinned, and for the digests
of what it packed. A source of which a run differs is pulled once more, from the learner. Only then do the bytes count.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import zmq

from weight_sync.channel import Asked, ControlClient
from weight_sync.device.fused import BatchCopy, BatchDigest
from weight_sync.errors import (
    DigestMismatch,
    PlanMismatch,
    PublisherLost,
    PullTimeout,
    SlotOverwritten,
    TransportUnusable,
)
from weight_sync.messages import Check, Checked, SlotAt
from weight_sync.node import node_id, reachable_host
from weight_sync.plan.agreement import open_pull
from weight_sync.receive.relay import Relay
from weight_sync.receive.staging import (
    ParameterAddresses,
    Targets,
    UnchangedRuns,
    build_targets,
    parameter_bytes,
    parts_in,
)
from weight_sync.transports import mapped, pair
from weight_sync.transports.base import OnArrived, Piece, SourceReader, ignore
from weight_sync.transports.select import NodeTransport, SelectedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.messages import LinkRequest, OpenReceiver, PeerAddress, PublisherInfo
    from weight_sync.plan.types import PullPlan
    from weight_sync.receive.quantized import Reloads


SILENCE_S = 10.0
"""Publishers answer from a thread of their own, at once; one that is silent for this long is lost."""
LAST_WORD_S = 0.2
"""For a question at the end of a deadline, or after a failure."""
ASKED_AT_ONCE = 16
"""Sources that are asked, or connected and probed, at a time."""
READ_AT_ONCE = {**dict.fromkeys(mapped.MAPPED, 4), pair.HOST: 2}
"""Sources of a transport that are read at a time; of others one. Those run a kernel per batch at both ends: kernels of
two communicators that queue up behind each other in another order here than there would wait for each other."""
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


Slots = Mapping[int, SlotAt]
"""Learner rank -> where it holds the version."""


class _Pull(NamedTuple):
    version: int
    slots: Slots
    deadline: Deadline
    has_failed: threading.Event
    """At one source: the others stop."""


class _SourcePull(NamedTuple):
    """How one source was read."""

    rank: int
    began_at: float
    ended_at: float
    num_stalls: int
    skipped_bytes: int
    asked: Asked
    """For the learner's digests of its runs."""


class Source(NamedTuple):
    """One publisher this worker reads from."""

    info: PublisherInfo
    client: ControlClient
    pieces: tuple[Piece, ...]
    runs: tuple[int, ...]
    """Indices into the plan's runs."""


class PullStats(NamedTuple):
    """What bringing one version cost."""

    pull_s: float = 0.0
    attest_s: float = 0.0
    num_retries: int = 0
    num_stalls: int = 0
    skipped_bytes: int = 0
    by_source: Mapping[int, float] = {}
    """Learner rank -> seconds of its pull, and of the second one where a digest differed."""


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


def open_epoch(request: OpenReceiver, context: WorkerContext, *, reloads: Reloads | None = None) -> ReceiverEpoch:
    """Prove this worker's part of the plan and prepare every copy.

    Raises:
        PlanMismatch: the plan is damaged, learners have another, or a run does not fit the parameters.
        DeviceError: no memory for what was asked for.
    """
    root, plan = open_pull(request.plan, epoch=request.epoch, worker=context.worker)
    for info in request.publishers:
        if info.plan_root != root:
            raise PlanMismatch(
                f"learner {info.rank} agreed to plan {info.plan_root[:12]}, this worker got {root[:12]}; every party "
                "must open the same epoch"
            )
    missing = plan.bytes_by_source.keys() - {info.rank for info in request.publishers}
    if missing:
        raise PlanMismatch(f"worker {context.worker} reads from learners {sorted(missing)}, which did not open")
    views = parameter_bytes(context.model)
    targets = build_targets(plan, views, context.backend, commit=request.commit, reloads=reloads)
    try:
        return ReceiverEpoch(request, plan, root=root, targets=targets, context=context)
    except BaseException:
        targets.close()
        raise


def _kind(info: PublisherInfo) -> object:
    """Equal for learners of which one is enough to know how the others are reached."""
    return info.node, tuple(arena.transport for arena in info.arenas)


class ReceiverEpoch:
    """See the module docstring. `open_epoch` builds it."""

    def __init__(
        self, request: OpenReceiver, plan: PullPlan, *, root: str, targets: Targets, context: WorkerContext
    ) -> None:
        self.plan = plan
        self.plan_root = root
        self.targets = targets
        self._request = request
        self._context = context
        self._holder = f"{request.replica}/{self.plan.worker}"
        self._sources = self._connect()
        self._readers: dict[int, SelectedReader] = {}
        with ExitStack() as undo:
            undo.callback(self._hang_up)
            self._relay = Relay(
                context.backend,
                targets.buffer if request.relay else None,
                targets.pieces,
                owner=self._holder,
                host=reachable_host() if request.host is None else request.host,
                dial=self._dial,
            )
            undo.callback(self._relay.close)
            self._arrived = self._digests_of(targets.arrivals) if request.verify else {}
            spans = [(run.src_off, run.nbytes) for run in plan.runs]
            spans_by_source = {rank: [spans[i] for i in source.runs] for rank, source in self._sources.items()}
            self._unchanged = UnchangedRuns(spans_by_source) if targets.is_staged and request.verify else None
            self._addresses = ParameterAddresses(context.model, targets.written)
            self._copy: BatchCopy = BatchCopy(context.backend, targets.moves)
            undo.pop_all()

    @property
    def transports(self) -> dict[int, str]:
        """Learner rank -> how its slots are read."""
        return {rank: self._readers[rank].transport for rank in self._sources}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a better way is not used."""
        return tuple(f"learner {rank} by {why}" for rank, one in self._readers.items() for why in one.reasons)

    @property
    def relay(self) -> Relay:
        return self._relay

    def connect_sources(self, *, deadline_s: float) -> None:
        """Ping every source, and read the pattern that it shows before its first version, by the best transport that
        works, from one source of each node and set of transports; the others are connected when they are first read.
        Several at once: a new connection takes up to a second.

        Raises:
            TransportUnusable: no transport works.
            PublisherLost: no answer.
            PullTimeout: the patterns did not arrive within `deadline_s`.
        """
        has_failed = threading.Event()

        def check() -> None:
            if has_failed.is_set():
                raise PullTimeout(f"{self._holder} could not reach another learner")

        deadline = Deadline(self._context.clock() + deadline_s, check)
        node, own = node_id(), self._request.host
        host = reachable_host() if own is None else own

        def ping(source: Source) -> None:
            left_s = deadline.at - self._context.clock()
            source.client.ping(deadline_s=min(SILENCE_S, max(left_s, LAST_WORD_S)))

        alike: dict[object, list[Source]] = {}
        for source in self._sources.values():
            alike.setdefault(_kind(source.info), []).append(source)
        for sources in alike.values():
            known = NodeTransport()
            for source in sources:
                self._readers[source.info.rank] = SelectedReader(
                    self._context.backend,
                    source.info.rank,
                    source.info.arenas,
                    line=source.client,
                    same_node=source.info.node == node,
                    host=host,
                    node=known,
                    probe=partial(self._probe, source),
                    clock=self._context.clock,
                )
        # Not the same learner for all workers.
        turn = zlib.crc32(self._holder.encode())
        probed = [sources[turn % len(sources)] for sources in alike.values()]
        # All pings before the patterns, which may take all the time: a learner that has none left to answer in is not
        # lost.
        at_all = partial(self._side_by_side, at_once=ASKED_AT_ONCE, on_failed=has_failed.set)
        at_all([partial(ping, source) for source in self._sources.values()])
        at_all([partial(self._connect_within, deadline, source) for source in probed])

    def _connect_within(self, deadline: Deadline, source: Source) -> None:
        def check() -> None:
            deadline.check()
            if self._context.clock() >= deadline.at:
                raise PullTimeout(
                    f"{self._holder} did not get its probe pattern of {source.info.probe_bytes} bytes in time; raise "
                    "weight_sync.timeout_s, or look why this worker or the way to that learner is slow"
                )

        self._readers[source.info.rank].connect(check)

    def _side_by_side(
        self, steps: Sequence[Callable[[], T]], *, at_once: int, on_failed: Callable[[], None]
    ) -> list[T]:
        """The results of `steps`, which begin in this order, up to `at_once` at a time: in this thread, and in others
        that do not keep the process from ending. Once one has failed, calls `on_failed`, begins no more, waits for
        those under way, and raises the first failure."""
        turns, results, failures = itertools.count(), dict[int, T](), list[BaseException]()

        def work() -> None:
            try:
                self._context.choose_device()
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

    def link(self, request: LinkRequest) -> None:
        """Read the sources in another order, some of them from other replicas.

        Raises:
            PlanMismatch: these are not our sources.
        """
        order = [rank for stage in request.stages for rank in stage.ranks]
        if sorted(order) != sorted(self._sources):
            raise PlanMismatch(f"{self._holder} reads from {sorted(self._sources)}, was told {order}")
        self._sources = {rank: self._sources[rank] for rank in order}
        self._relay.link(request)
        for rank in (rank for stage in request.stages if stage.via for rank in stage.ranks):
            self._readers[rank].disconnect()

    def pull(self, version: int, slots: Slots, *, deadline: Deadline) -> PullStats:
        """Bring `version` into the staging buffer or, in place, the parameters, verified. If it raises, `invalidate`.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        # First: those who read from here and are ahead wait for this version, and are told if it is given up.
        self._relay.begin(version)
        pull = _Pull(version, slots, deadline, threading.Event())
        began_at = self._context.clock()
        in_turn, apart, at_once = self._order()
        steps = [partial(self._pull_sources, pull, sources) for sources in (*([in_turn] if in_turn else ()), *apart)]
        lanes = self._side_by_side(steps, at_once=at_once, on_failed=pull.has_failed.set)
        found = [one for lane in lanes for one in lane]
        # After all bytes: digests read as fast as memory can, which a pull should not have to share.
        again = [retry for one in found if (retry := self._attest(pull, one)) is not None]
        pull_s = max((one.ended_at for one in found), default=began_at) - began_at
        again_s = sum(retry.ended_at - retry.began_at for retry in again)
        by_source = dict.fromkeys(self._sources, 0.0)
        for one in (*found, *again):
            by_source[one.rank] += one.ended_at - one.began_at
        return PullStats(
            pull_s=pull_s + again_s,
            attest_s=self._context.clock() - began_at - pull_s - again_s,
            num_retries=len(again),
            num_stalls=sum(one.num_stalls for one in found),
            skipped_bytes=sum({one.rank: one.skipped_bytes for one in (*found, *again)}.values()),
            by_source=by_source,
        )

    def ask_whether_intact(self, slots: Slots) -> dict[int, Asked]:
        """Ask every learner, without waiting; see `require_intact`."""
        return {rank: self._ask(slots, rank) for rank in self._sources}

    def require_intact(self, version: int, slots: Slots, asked: Mapping[int, Asked], *, deadline: Deadline) -> None:
        """Wait for the answers to `ask_whether_intact`.

        Raises:
            SlotOverwritten, PublisherLost, PullTimeout: a learner does not hold the version there any more, or is lost.
        """
        pull = _Pull(version, slots, deadline, threading.Event())
        for rank, question in asked.items():
            self._sent_digests(pull, rank, question)

    def invalidate(self) -> None:
        """After a pull that failed: nobody is to read what arrived."""
        self._relay.invalidate()

    def copy_from_buffer(self) -> None:
        """Device-local copy of every run into the parameters. Asynchronous where the device is."""
        self._copy()

    def live_digests(self) -> dict[int, tuple[int, ...]]:
        """Source rank -> digest of each of its runs, read from the live parameters, in plan order."""
        return {rank: digest() for rank, digest in self._digests_of(self.targets.params).items()}

    def check_addresses(self) -> None:
        """
        Raises:
            PlanMismatch: a parameter was rebound since the epoch opened, so writing to its old place would be in vain.
        """
        if moved := self._addresses.moved():
            raise PlanMismatch(
                f"{self._holder}: parameters moved since opening: {', '.join(moved[:5])} ({len(moved)} of them); "
                "something rebound them (sleep, quantisation, a reload): open a new epoch"
            )

    def counters(self) -> dict[str, int]:
        num_blocks = sum(block is not None for block in (self.targets.buffer, self.targets.derived))
        counts = Counter(allocations=num_blocks, sockets=len(self._sources) + 1)
        for part in (*self._readers.values(), self._relay):
            counts.update(part.counters())
        return dict(counts)

    def close(self) -> None:
        """Unmap, hang up and free, each whether or not the others fail; a failure is raised at the end."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self.targets.close)
            closing.callback(self._arrived.clear)
            closing.callback(self._hang_up)
            for reader in self._readers.values():
                closing.callback(reader.close)
            closing.callback(self._relay.close)

    def _hang_up(self) -> None:
        for source in self._sources.values():
            source.client.close()

    def _connect(self) -> dict[int, Source]:
        infos = {info.rank: info for info in self._request.publishers}
        sources: dict[int, Source] = {}
        for rank in sorted(self.targets.pieces):
            runs = tuple(i for i, run in enumerate(self.plan.runs) if run.src_rank == rank)
            sources[rank] = Source(infos[rank], self._dial(infos[rank].address), self.targets.pieces[rank], runs)
        return sources

    def _dial(self, address: PeerAddress) -> ControlClient:
        return ControlClient(
            zmq.Context.instance(),
            address,
            self._request.keys,
            epoch=self._request.epoch,
            sender=self._holder,
            clock=self._context.clock,
        )

    def _probe(self, source: Source, reader: SourceReader, check: Callable[[], None]) -> None:
        info = source.info
        pattern = torch.empty(info.probe_bytes, dtype=torch.uint8, device=self._context.device)
        reader.pull(info.arenas[0].num_slots, [Piece(0, pattern)], check=check)
        found = self._context.backend.digest(pattern)
        if found != info.probe_digest:
            raise TransportUnusable(
                f"the probe pattern of {info.probe_bytes} bytes from learner {info.rank} to {self._holder} arrived "
                f"with digest {found:016x}, written with {info.probe_digest:016x}"
            )

    def _order(self) -> tuple[list[int], list[list[int]], int]:
        """Sources that are read one after the other, those that are read beside them, and how many at a time."""
        in_turn: list[int] = []
        apart: dict[int, int] = {}
        for rank in self._sources:
            at_once = READ_AT_ONCE.get(self._readers[rank].transport, 1)
            # What comes from a predecessor comes in the order of the links: nobody waits in a circle.
            if at_once == 1 or self._relay.hands_on(rank):
                in_turn.append(rank)
            else:
                apart[rank] = at_once
        return in_turn, [[rank] for rank in apart], min(apart.values(), default=0) + bool(in_turn)

    def _pull_sources(self, pull: _Pull, ranks: Sequence[int]) -> list[_SourcePull]:
        return [self._pull_source(pull, rank) for rank in ranks]

    def _pull_source(self, pull: _Pull, rank: int, *, is_retry: bool = False) -> _SourcePull:
        clock, reader, slot = self._context.clock, self._readers[rank], pull.slots[rank].slot
        pieces, skipped_bytes = self._sources[rank].pieces, 0

        def keep_going() -> None:
            self._check(pull)
            if clock() >= pull.deadline.at:
                raise PullTimeout(f"{self._holder}: version {pull.version} did not arrive in time; it is not committed")

        def direct(wanted: Sequence[Piece], on_arrived: OnArrived) -> None:
            nonlocal skipped_bytes
            if changed is None:
                reader.pull(slot, wanted, check=keep_going, on_arrived=on_arrived)
                return
            parts, arrived = parts_in(changed, wanted, on_arrived)
            skipped_bytes = max(0, self.plan.bytes_by_source[rank] - sum(part.dst.numel() for part in parts))
            if parts:
                reader.pull(slot, parts, check=keep_going, on_arrived=ignore if on_arrived is ignore else arrived)
            else:
                on_arrived(len(wanted))

        keep_going()
        began_at = clock()
        changed = None
        if self._unchanged is not None:
            changed = self._unchanged.changed(rank, lambda: self._sent_digests(pull, rank, self._ask(pull.slots, rank)))
        # A retry, and what need not be read at all, is no matter of the predecessors.
        is_own = is_retry or changed == []
        num_stalls = self._relay.pull(
            rank, pieces, version=pull.version, direct=direct, check=keep_going, is_retry=is_own
        )
        ended_at = clock()
        # The learner answers while other sources are read, and digests taken.
        return _SourcePull(rank, began_at, ended_at, num_stalls, skipped_bytes, self._ask(pull.slots, rank))

    def _check(self, pull: _Pull) -> None:
        pull.deadline.check()
        if pull.has_failed.is_set():
            raise PullTimeout(f"{self._holder} stops reading version {pull.version}: another source of it has failed")

    def _attest(self, pull: _Pull, found: _SourcePull) -> _SourcePull | None:
        """What arrived from a learner is what it packed; what differs is pulled once more, past relays."""
        rank = found.rank
        if not self._wrong_runs(pull, found):
            return None
        again = self._pull_source(pull, rank, is_retry=True)
        if not (wrong := self._wrong_runs(pull, again)):
            return again
        names = sorted({self.plan.runs[i].dst_param for i in wrong})
        num_runs = len(self._sources[rank].runs)
        raise DigestMismatch(
            f"{self._holder}: {len(wrong)} of {num_runs} runs from learner {rank} differ from what was packed, twice: "
            f"{', '.join(names[:5])}; suspect the link or the memory of either host"
        )

    def _ask(self, slots: Slots, rank: int) -> Asked:
        """Ask a learner, without waiting, whether its slot is whole, and for the digests of the runs of this worker."""
        at = slots[rank]
        request = Check(worker=self.plan.worker, slot=at.slot, generation=at.generation)
        return self._sources[rank].client.begin(request)

    def _sent_digests(self, pull: _Pull, rank: int, asked: Asked) -> tuple[int, ...]:
        """Wait for them.

        Raises:
            SlotOverwritten: the slot was packed again while it was read.
            PublisherLost: no answer within `SILENCE_S`.
            PullTimeout: none either, and there was less time than that.
        """
        at = pull.slots[rank]
        patience_s = min(SILENCE_S, max(pull.deadline.at - self._context.clock(), LAST_WORD_S))
        try:
            checked = self._sources[rank].client.finish(
                asked, Checked, deadline_s=patience_s, check=partial(self._check, pull)
            )
        except PublisherLost as error:
            if patience_s >= SILENCE_S:
                raise
            raise PullTimeout(
                f"{self._holder}: only {patience_s:.1f} s were left to ask learner {rank}, which says nothing about "
                f"whether it lives: {error}"
            ) from error
        if not checked.is_intact:
            raise SlotOverwritten(
                f"slot {at.slot} of learner {rank} was packed again while {self._holder} read version {pull.version} "
                "from it; what was read is torn and is not committed"
            )
        return checked.digests

    def _wrong_runs(self, pull: _Pull, pulled: _SourcePull) -> list[int]:
        rank, is_verified = pulled.rank, self._request.verify
        found = self._arrived[rank]() if is_verified else ()
        sent = self._sent_digests(pull, rank, pulled.asked)
        if not is_verified:
            return []
        source = self._sources[rank]
        if len(sent) != len(source.runs):
            raise PlanMismatch(
                f"{self._holder}: learner {rank} sent {len(sent)} digests for {len(source.runs)} runs; "
                "open both sides with the same plan and the same `verify`"
            )
        wrong = [i for i, a, b in zip(source.runs, sent, found, strict=True) if a != b]
        if self._unchanged is not None and not wrong:
            self._unchanged.verified(rank, sent)
        return wrong

    def _digests_of(self, views: Sequence[torch.Tensor]) -> dict[int, BatchDigest]:
        """Source rank -> digest of its runs, given every run's bytes."""
        backend = self._context.backend
        return {rank: BatchDigest(backend, [views[i] for i in source.runs]) for rank, source in self._sources.items()}
