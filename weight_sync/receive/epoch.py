"""What a worker reads from in one epoch and where it goes; and one version on its way, from several sources at a time.

Each source is a learner, or another replica that has the version already, reached by the best transport that works:
this is tried with one learner of each node when the epoch opens. After the last byte of a source the worker asks its
learner whether the slot still is what the coordinator pinned, and for the digests of what it packed. A source of which
a run differs is read once more, from the learner. Only then do the bytes count.
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

import numpy as np
import torch

from weight_sync import deadlines
from weight_sync.channel import CLIENT_FILES, ClientContext, ControlClient, make_room
from weight_sync.device.fused import BatchCopy, BatchDigest
from weight_sync.errors import (
    DigestMismatch,
    PlanMismatch,
    PublisherLost,
    PullTimeout,
    SlotOverwritten,
    TransportUnusable,
)
from weight_sync.messages import Check, Checked, PullReport, SlotAt
from weight_sync.node import node_id, reachable_host
from weight_sync.plan.agreement import open_pull
from weight_sync.receive.relay import Relay
from weight_sync.receive.staging import ParameterAddresses, UnchangedRuns, build_targets, parameter_bytes, parts_in
from weight_sync.transports import mapped, pair
from weight_sync.transports.base import Piece, ignore
from weight_sync.transports.select import NodeTransport, SelectedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.channel import Asked
    from weight_sync.device.base import Backend
    from weight_sync.messages import LinkRequest, OpenReceiver, PeerAddress, PublisherInfo
    from weight_sync.plan.types import PullPlan
    from weight_sync.receive.quantized import Reloads
    from weight_sync.receive.staging import Targets
    from weight_sync.transports.base import OnArrived, SourceReader


ASKED_AT_ONCE = 16
"""Sources that are asked, or connected and probed, at a time."""
READ_AT_ONCE = {**dict.fromkeys(mapped.MAPPED, 4), pair.HOST: 2}
"""Sources of a transport that are read at a time; of others one. Those run a kernel per batch at both ends: kernels of
two communicators that queue up behind each other in another order here than there would wait for each other."""
Slots = Mapping[int, SlotAt]
"""Learner rank -> where it holds the version."""
T = TypeVar("T")


@dataclass(slots=True)
class Deadline:
    """How long something is waited for."""

    at: float
    """By the receiver's clock. May still be moved, by a retry that joins what its first attempt began."""
    check: Callable[[], None] = lambda: None
    """Raises once nobody wants it any more; looked at all the while."""


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


def _kind(info: PublisherInfo) -> object:
    """Equal for learners of which one is enough to know how the others are reached."""
    return info.node, tuple(arena.transport for arena in info.arenas)


class ReceiverEpoch:
    """See the module docstring."""

    def __init__(self, request: OpenReceiver, context: WorkerContext, *, reloads: Reloads | None = None) -> None:
        """Prove this worker's part of the plan and prepare every copy.

        Raises:
            PlanMismatch: the plan is damaged, learners have another, or a run does not fit the parameters.
            DeviceError: no memory for what was asked for.
        """
        self.plan_root, self.plan = _own_part(request, context.worker)
        self.context = context
        self.owner = f"{request.replica}/{context.worker}"
        self._request = request
        self._host = reachable_host() if request.host is None else request.host
        self._alike: dict[object, list[int]] = {}
        """Learners of which one is enough to know how the others are reached."""
        self.targets: Targets = build_targets(
            self.plan, parameter_bytes(context.model), context.backend, commit=request.commit, reloads=reloads
        )
        with ExitStack() as undo:
            undo.callback(self.targets.close)
            self.sources = self._dial_sources()
            """By learner rank, in the order in which to read them."""
            undo.callback(self._hang_up)
            self.relay = Relay(
                context.backend,
                self.targets.buffer if request.relay else None,
                self.targets.pieces,
                owner=self.owner,
                host=self._host,
                dial=self._dial,
            )
            undo.callback(self.relay.close)
            self.arrived = self._digests_of(self.targets.arrivals) if request.verify else {}
            """Learner rank -> digests of its runs where they arrive; empty if nothing is verified."""
            spans = [(run.src_off, run.nbytes) for run in self.plan.runs]
            spans_by_source = {rank: [spans[i] for i in source.runs] for rank, source in self.sources.items()}
            keeps_digests = self.targets.is_staged and request.verify
            self.unchanged = UnchangedRuns(spans_by_source) if keeps_digests else None
            self._addresses = ParameterAddresses(context.model, self.targets.written)
            self.copy_from_buffer = BatchCopy(context.backend, self.targets.moves)
            """Device-local copy of every run into the parameters. Asynchronous where the device is."""
            undo.pop_all()

    @property
    def readers(self) -> dict[int, SelectedReader]:
        """By learner rank."""
        return {rank: source.reader for rank, source in self.sources.items()}

    @property
    def transports(self) -> dict[int, str]:
        """Learner rank -> how its slots are read."""
        return {rank: reader.transport for rank, reader in self.readers.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a better way is not used."""
        return tuple(f"learner {rank} by {why}" for rank, one in self.readers.items() for why in one.reasons)

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
        clock = self.context.clock
        deadline = clock() + deadline_s

        def ping(source: Source) -> None:
            left_s = deadline - clock()
            source.client.ping(deadline_s=min(deadlines.PEER_TIMEOUT_S, max(left_s, deadlines.GRACE_S)))

        def connect(source: Source) -> None:
            def check() -> None:
                if has_failed.is_set():
                    raise PullTimeout(f"{self.owner} could not reach another learner")
                if clock() >= deadline:
                    raise PullTimeout(
                        f"{self.owner} did not get its probe pattern of {source.info.probe_bytes} bytes in time; raise "
                        "weight_sync.timeout_s, or find out why this worker or the way to that learner is slow"
                    )

            source.reader.connect(check)

        # Not the same learner for all workers.
        turn = zlib.crc32(self.owner.encode())
        probed = [self.sources[ranks[turn % len(ranks)]] for ranks in self._alike.values()]
        # All pings before the patterns, which may take all the time: a learner that has none left to answer in is not
        # lost.
        at_all = partial(self.context.side_by_side, at_once=ASKED_AT_ONCE, on_failed=has_failed.set)
        at_all([partial(ping, source) for source in self.sources.values()])
        at_all([partial(connect, source) for source in probed])

    def link(self, request: LinkRequest) -> None:
        """Read the sources in another order, some of them from other replicas.

        Raises:
            PlanMismatch: these are not our sources.
        """
        order = [rank for stage in request.stages for rank in stage.ranks]
        if sorted(order) != sorted(self.sources):
            raise PlanMismatch(f"{self.owner} reads from {sorted(self.sources)}, the links name {order}")
        self.sources = {rank: self.sources[rank] for rank in order}
        self.relay.link(request)
        for rank in (rank for stage in request.stages if stage.via for rank in stage.ranks):
            self.sources[rank].reader.disconnect()

    def pull(self, version: int, slots: Slots, *, deadline: Deadline) -> PullReport:
        """Bring `version` into the staging buffer or, in place, the parameters, verified. If it raises, `invalidate`.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        return _VersionPull(self, version, slots, deadline).run()

    def ask_whether_intact(self, version: int, slots: Slots, *, deadline: Deadline) -> Callable[[], None]:
        """Ask every learner whether it holds the version there, without waiting. The result waits for the answers.

        Raises (the result):
            SlotOverwritten, PublisherLost, PullTimeout: one does not hold it any more, or is lost.
        """
        pull = _VersionPull(self, version, slots, deadline)
        questions = [(rank, pull.ask(rank)) for rank in self.sources]

        def require_intact() -> None:
            for rank, asked in questions:
                pull.sent_digests(rank, asked)

        return require_intact

    def invalidate(self) -> None:
        """After a pull that failed: nobody is to read what arrived."""
        self.relay.invalidate()

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
                f"{self.owner}: parameters moved since opening: {', '.join(moved[:5])} ({len(moved)} of them); "
                "something rebound them (sleep, quantisation, a reload): open a new epoch"
            )

    def counters(self) -> dict[str, int]:
        num_blocks = sum(block is not None for block in (self.targets.buffer, self.targets.derived))
        counts = Counter(allocations=num_blocks, sockets=len(self.sources) + 1)
        for part in (*self.readers.values(), self.relay):
            counts.update(part.counters())
        return dict(counts)

    def close(self) -> None:
        """Unmap, hang up and free, each whether or not the others fail; a failure is raised at the end."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self.targets.close)
            closing.callback(self.arrived.clear)
            closing.callback(self._hang_up)
            for reader in self.readers.values():
                closing.callback(reader.close)
            closing.callback(self.relay.close)

    def _hang_up(self) -> None:
        for source in self.sources.values():
            source.client.close()

    def _dial_sources(self) -> dict[int, Source]:
        infos, node = {info.rank: info for info in self._request.publishers}, node_id()
        num_learners = len(self.targets.pieces)
        make_room(CLIENT_FILES * num_learners, whom=f"{num_learners} learners")
        known: dict[object, NodeTransport] = {}
        sources: dict[int, Source] = {}
        for rank in sorted(self.targets.pieces):
            info, client = infos[rank], self._dial(infos[rank].address)
            self._alike.setdefault(_kind(info), []).append(rank)
            reader = SelectedReader(
                self.context.backend,
                rank,
                info.arenas,
                line=client,
                same_node=info.node == node,
                host=self._host,
                node=known.setdefault(_kind(info), NodeTransport()),
                probe=partial(self._probe, info),
                clock=self.context.clock,
            )
            runs = tuple(np.flatnonzero(self.plan.table[:, 0] == rank).tolist())
            sources[rank] = Source(info, client, reader, self.targets.pieces[rank], runs)
        return sources

    def _dial(self, address: PeerAddress) -> ControlClient:
        keys, epoch = self._request.keys, self._request.epoch
        context = ClientContext.instance()
        return ControlClient(context, address, keys, epoch=epoch, sender=self.owner, clock=self.context.clock)

    def _probe(self, info: PublisherInfo, reader: SourceReader, check: Callable[[], None]) -> None:
        pattern = torch.empty(info.probe_bytes, dtype=torch.uint8, device=self.context.device)
        reader.pull(info.arenas[0].num_slots, [Piece(0, pattern)], check=check)
        found = self.context.backend.digest(pattern)
        if found != info.probe_digest:
            raise TransportUnusable(
                f"the probe pattern of {info.probe_bytes} bytes from learner {info.rank} to {self.owner} arrived "
                f"with digest {found:016x}, written with {info.probe_digest:016x}"
            )

    def _digests_of(self, views: Sequence[torch.Tensor]) -> dict[int, BatchDigest]:
        """Source rank -> digest of its runs, given every run's bytes."""
        backend = self.context.backend
        return {rank: BatchDigest(backend, [views[i] for i in source.runs]) for rank, source in self.sources.items()}


def _own_part(request: OpenReceiver, worker: int) -> tuple[str, PullPlan]:
    """The plan's root, and this worker's part of it, which learners that opened serve."""
    root, plan = open_pull(request.plan, epoch=request.epoch, worker=worker)
    for info in request.publishers:
        if info.plan_root != root:
            raise PlanMismatch(
                f"learner {info.rank} agreed to plan {info.plan_root[:12]}, this worker got {root[:12]}; every party "
                "must open the same epoch"
            )
    missing = plan.bytes_by_source.keys() - {info.rank for info in request.publishers}
    if missing:
        raise PlanMismatch(f"worker {worker} reads from learners {sorted(missing)}, which did not open")
    return root, plan


class _Read(NamedTuple):
    """How one source was read."""

    rank: int
    seconds: float
    ended_at: float
    num_stalls: int
    skipped_bytes: int
    asked: Asked
    """The learner, for the digests of its runs."""


class _VersionPull:
    """One version on its way into this worker."""

    def __init__(self, epoch: ReceiverEpoch, version: int, slots: Slots, deadline: Deadline) -> None:
        self._epoch = epoch
        self._version = version
        self._slots = slots
        self._deadline = deadline
        self._clock = epoch.context.clock
        self._sources = epoch.sources
        self._has_failed = threading.Event()
        """One source has: the others stop."""

    def run(self) -> PullReport:
        """Bring the version to where its pieces go, verified.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        epoch = self._epoch
        # First: successors that are ahead wait for this version, and are notified if it is given up.
        epoch.relay.begin(self._version)
        began_at = self._clock()
        lanes, at_once = self._lanes()
        steps = [partial(self._read_all, lane) for lane in lanes]
        read = epoch.context.side_by_side(steps, at_once=at_once, on_failed=self._has_failed.set)
        found = [one for lane in read for one in lane]
        # After all bytes: digests read as fast as memory can, which a pull should not have to share.
        again = [retry for one in found if (retry := self._attest(one)) is not None]
        pull_s = max((one.ended_at for one in found), default=began_at) - began_at + sum(r.seconds for r in again)
        by_source = dict.fromkeys(self._sources, 0.0)
        for one in (*found, *again):
            by_source[one.rank] += one.seconds
        return PullReport(
            worker=epoch.plan.worker,
            version=self._version,
            pull_s=pull_s,
            pull_by_source=by_source,
            attest_s=self._clock() - began_at - pull_s,
            nbytes=epoch.plan.nbytes,
            skipped_bytes=sum({one.rank: one.skipped_bytes for one in (*found, *again)}.values()),
            num_runs=len(epoch.plan.runs),
            num_retries=len(again),
            num_stalls=sum(one.num_stalls for one in found),
        )

    def _lanes(self) -> tuple[list[list[int]], int]:
        """Sources that are read one after the other, beside those of other lanes; and how many lanes at a time."""
        in_turn: list[int] = []
        apart: dict[int, int] = {}
        for rank, source in self._sources.items():
            at_once = READ_AT_ONCE.get(source.reader.transport, 1)
            # What comes from a predecessor comes in the order of the links: nobody waits in a circle.
            if at_once == 1 or self._epoch.relay.hands_on(rank):
                in_turn.append(rank)
            else:
                apart[rank] = at_once
        lanes = [[rank] for rank in apart]
        return [in_turn, *lanes] if in_turn else lanes, min(apart.values(), default=0) + bool(in_turn)

    def _read_all(self, ranks: Sequence[int]) -> list[_Read]:
        return [self._read(rank) for rank in ranks]

    def _read(self, rank: int, *, is_retry: bool = False) -> _Read:
        source, slot, unchanged = self._sources[rank], self._slots[rank].slot, self._epoch.unchanged
        skipped_bytes = 0

        def keep_going() -> None:
            self._check()
            if self._clock() >= self._deadline.at:
                raise PullTimeout(
                    f"{self._epoch.owner}: version {self._version} did not arrive in time; it is not committed"
                )

        def direct(wanted: Sequence[Piece], on_arrived: OnArrived) -> None:
            nonlocal skipped_bytes
            if changed is None:
                source.reader.pull(slot, wanted, check=keep_going, on_arrived=on_arrived)
                return
            parts, arrived = parts_in(changed, wanted, on_arrived)
            skipped_bytes = max(0, self._epoch.plan.bytes_by_source[rank] - sum(part.dst.numel() for part in parts))
            if parts:
                arrived = ignore if on_arrived is ignore else arrived
                source.reader.pull(slot, parts, check=keep_going, on_arrived=arrived)
            else:
                on_arrived(len(wanted))

        keep_going()
        began_at = self._clock()
        changed = None
        if unchanged is not None:
            changed = unchanged.changed(rank, lambda: self.sent_digests(rank, self.ask(rank)))
        # A retry, and a source of which nothing has to be read, bypass the predecessors.
        is_own = is_retry or changed == []
        num_stalls = self._epoch.relay.pull(
            rank, source.pieces, version=self._version, direct=direct, check=keep_going, is_retry=is_own
        )
        ended_at = self._clock()
        # The learner answers while other sources are read, and digests taken.
        return _Read(rank, ended_at - began_at, ended_at, num_stalls, skipped_bytes, self.ask(rank))

    def _check(self) -> None:
        self._deadline.check()
        if self._has_failed.is_set():
            raise PullTimeout(
                f"{self._epoch.owner} stops reading version {self._version}: another source of it has failed"
            )

    def _attest(self, found: _Read) -> _Read | None:
        """What arrived from a learner is what it packed; what differs is read once more, past relays."""
        if not self._wrong_runs(found):
            return None
        again = self._read(found.rank, is_retry=True)
        if not (wrong := self._wrong_runs(again)):
            return again
        names = sorted({self._epoch.plan.runs[i].dst_param for i in wrong})
        num_runs = len(self._sources[found.rank].runs)
        raise DigestMismatch(
            f"{self._epoch.owner}: {len(wrong)} of {num_runs} runs from learner {found.rank} differ from what was "
            f"packed, twice: {', '.join(names[:5])}; suspect the link or the memory of either host"
        )

    def ask(self, rank: int) -> Asked:
        """Ask a learner, without waiting, whether its slot is whole, and for the digests of the runs of this worker."""
        at = self._slots[rank]
        request = Check(worker=self._epoch.plan.worker, slot=at.slot, generation=at.generation)
        return self._sources[rank].client.begin(request)

    def sent_digests(self, rank: int, asked: Asked) -> tuple[int, ...]:
        """Wait for them.

        Raises:
            SlotOverwritten: the slot was packed again while it was read.
            PublisherLost: no answer within `PEER_TIMEOUT_S`.
            PullTimeout: none either, and there was less time than that.
        """
        at, owner = self._slots[rank], self._epoch.owner
        patience_s = min(deadlines.PEER_TIMEOUT_S, max(self._deadline.at - self._clock(), deadlines.GRACE_S))
        try:
            checked = self._sources[rank].client.finish(asked, Checked, deadline_s=patience_s, check=self._check)
        except PublisherLost as error:
            if patience_s >= deadlines.PEER_TIMEOUT_S:
                raise
            raise PullTimeout(
                f"{owner}: only {patience_s:.1f} s were left to ask learner {rank}, which says nothing about "
                f"whether it lives: {error}"
            ) from error
        if not checked.is_intact:
            raise SlotOverwritten(
                f"slot {at.slot} of learner {rank} was packed again while {owner} read version {self._version} "
                "from it; what was read is torn and is not committed"
            )
        return checked.digests

    def _wrong_runs(self, read: _Read) -> list[int]:
        runs, digest = self._sources[read.rank].runs, self._epoch.arrived.get(read.rank)
        found = () if digest is None else digest()
        sent = self.sent_digests(read.rank, read.asked)
        if digest is None:
            return []
        if len(sent) != len(runs):
            raise PlanMismatch(
                f"{self._epoch.owner}: learner {read.rank} sent {len(sent)} digests for {len(runs)} runs; "
                "open both sides with the same plan and the same `verify`"
            )
        wrong = [i for i, a, b in zip(runs, sent, found, strict=True) if a != b]
        if self._epoch.unchanged is not None and not wrong:
            self._epoch.unchanged.verified(read.rank, sent)
        return wrong
