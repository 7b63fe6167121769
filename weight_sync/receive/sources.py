"""What a worker reads from in one epoch, where it goes, and how that is found out.

Every source is reached by the best transport that works, tried with one learner of each node when the epoch opens;
`pull` brings the versions.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from weight_sync import deadlines
from weight_sync.channel import CLIENT_FILES, ClientContext, ControlClient, make_room
from weight_sync.device.fused import BatchCopy, BatchDigest
from weight_sync.errors import PlanMismatch, PullTimeout, TransportUnusable
from weight_sync.node import node_id, reachable_host
from weight_sync.plan.agreement import open_pull
from weight_sync.receive.pull import ASKED_AT_ONCE, Deadline, Source, VersionPull
from weight_sync.receive.relay import Relay
from weight_sync.receive.staging import ParameterAddresses, UnchangedRuns, build_targets, parameter_bytes
from weight_sync.transports.base import Piece
from weight_sync.transports.select import NodeTransport, SelectedReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weight_sync.messages import LinkRequest, OpenReceiver, PeerAddress, PublisherInfo
    from weight_sync.plan.types import PullPlan
    from weight_sync.receive.pull import PullStats, Slots, WorkerContext
    from weight_sync.receive.quantized import Reloads
    from weight_sync.receive.staging import Targets
    from weight_sync.transports.base import SourceReader


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
        self._owner = f"{request.replica}/{self.plan.worker}"
        self._host = reachable_host() if request.host is None else request.host
        self._alike: dict[object, list[int]] = {}
        """Learners of which one is enough to know how the others are reached."""
        self._sources = self._dial_sources()
        with ExitStack() as undo:
            undo.callback(self._hang_up)
            self._relay = Relay(
                context.backend,
                targets.buffer if request.relay else None,
                targets.pieces,
                owner=self._owner,
                host=self._host,
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
    def readers(self) -> dict[int, SelectedReader]:
        """By learner rank."""
        return {rank: source.reader for rank, source in self._sources.items()}

    @property
    def transports(self) -> dict[int, str]:
        """Learner rank -> how its slots are read."""
        return {rank: reader.transport for rank, reader in self.readers.items()}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why a better way is not used."""
        return tuple(f"learner {rank} by {why}" for rank, one in self.readers.items() for why in one.reasons)

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
                raise PullTimeout(f"{self._owner} could not reach another learner")

        deadline = Deadline(self._context.clock() + deadline_s, check)

        def ping(source: Source) -> None:
            left_s = deadline.at - self._context.clock()
            source.client.ping(deadline_s=min(deadlines.PEER_TIMEOUT_S, max(left_s, deadlines.GRACE_S)))

        # Not the same learner for all workers.
        turn = zlib.crc32(self._owner.encode())
        probed = [self._sources[ranks[turn % len(ranks)]] for ranks in self._alike.values()]
        # All pings before the patterns, which may take all the time: a learner that has none left to answer in is not
        # lost.
        at_all = partial(self._context.side_by_side, at_once=ASKED_AT_ONCE, on_failed=has_failed.set)
        at_all([partial(ping, source) for source in self._sources.values()])
        at_all([partial(self._connect_within, deadline, source) for source in probed])

    def _connect_within(self, deadline: Deadline, source: Source) -> None:
        def check() -> None:
            deadline.check()
            if self._context.clock() >= deadline.at:
                raise PullTimeout(
                    f"{self._owner} did not get its probe pattern of {source.info.probe_bytes} bytes in time; raise "
                    "weight_sync.timeout_s, or look why this worker or the way to that learner is slow"
                )

        source.reader.connect(check)

    def link(self, request: LinkRequest) -> None:
        """Read the sources in another order, some of them from other replicas.

        Raises:
            PlanMismatch: these are not our sources.
        """
        order = [rank for stage in request.stages for rank in stage.ranks]
        if sorted(order) != sorted(self._sources):
            raise PlanMismatch(f"{self._owner} reads from {sorted(self._sources)}, the links name {order}")
        self._sources = {rank: self._sources[rank] for rank in order}
        self._relay.link(request)
        for rank in (rank for stage in request.stages if stage.via for rank in stage.ranks):
            self._sources[rank].reader.disconnect()

    def pull(self, version: int, slots: Slots, *, deadline: Deadline) -> PullStats:
        """Bring `version` into the staging buffer or, in place, the parameters, verified. If it raises, `invalidate`.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        return self._version(version, slots, deadline).run()

    def ask_whether_intact(self, version: int, slots: Slots, *, deadline: Deadline) -> Callable[[], None]:
        """Ask every learner whether it holds the version there, without waiting. The result waits for the answers.

        Raises (the result):
            SlotOverwritten, PublisherLost, PullTimeout: one does not hold it any more, or is lost.
        """
        return self._version(version, slots, deadline).ask_whether_intact()

    def _version(self, version: int, slots: Slots, deadline: Deadline) -> VersionPull:
        return VersionPull(
            version=version,
            slots=slots,
            deadline=deadline,
            context=self._context,
            owner=self._owner,
            plan=self.plan,
            sources=self._sources,
            relay=self._relay,
            arrived=self._arrived,
            unchanged=self._unchanged,
        )

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
                f"{self._owner}: parameters moved since opening: {', '.join(moved[:5])} ({len(moved)} of them); "
                "something rebound them (sleep, quantisation, a reload): open a new epoch"
            )

    def counters(self) -> dict[str, int]:
        num_blocks = sum(block is not None for block in (self.targets.buffer, self.targets.derived))
        counts = Counter(allocations=num_blocks, sockets=len(self._sources) + 1)
        for part in (*self.readers.values(), self._relay):
            counts.update(part.counters())
        return dict(counts)

    def close(self) -> None:
        """Unmap, hang up and free, each whether or not the others fail; a failure is raised at the end."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self.targets.close)
            closing.callback(self._arrived.clear)
            closing.callback(self._hang_up)
            for reader in self.readers.values():
                closing.callback(reader.close)
            closing.callback(self._relay.close)

    def _hang_up(self) -> None:
        for source in self._sources.values():
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
                self._context.backend,
                rank,
                info.arenas,
                line=client,
                same_node=info.node == node,
                host=self._host,
                node=known.setdefault(_kind(info), NodeTransport()),
                probe=partial(self._probe, info),
                clock=self._context.clock,
            )
            runs = tuple(np.flatnonzero(self.plan.table[:, 0] == rank).tolist())
            sources[rank] = Source(info, client, reader, self.targets.pieces[rank], runs)
        return sources

    def _dial(self, address: PeerAddress) -> ControlClient:
        return ControlClient(
            ClientContext.instance(),
            address,
            self._request.keys,
            epoch=self._request.epoch,
            sender=self._owner,
            clock=self._context.clock,
        )

    def _probe(self, info: PublisherInfo, reader: SourceReader, check: Callable[[], None]) -> None:
        pattern = torch.empty(info.probe_bytes, dtype=torch.uint8, device=self._context.device)
        reader.pull(info.arenas[0].num_slots, [Piece(0, pattern)], check=check)
        found = self._context.backend.digest(pattern)
        if found != info.probe_digest:
            raise TransportUnusable(
                f"the probe pattern of {info.probe_bytes} bytes from learner {info.rank} to {self._owner} arrived "
                f"with digest {found:016x}, written with {info.probe_digest:016x}"
            )

    def _digests_of(self, views: Sequence[torch.Tensor]) -> dict[int, BatchDigest]:
        """Source rank -> digest of its runs, given every run's bytes."""
        backend = self._context.backend
        return {rank: BatchDigest(backend, [views[i] for i in source.runs]) for rank, source in self._sources.items()}
