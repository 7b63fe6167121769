"""What a worker reads from in one epoch: learners and relays, and the pull itself.

A version arrives source by source, from the learner or from another replica that has it already. After the last byte
the worker asks each learner whether its slot still is what the coordinator pinned, and for the digests of what it
packed. A source of which a run differs is pulled once more, from the learner. Only then do the bytes count.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import zmq

from weight_sync.channel import ControlClient
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
from weight_sync.receive.staging import Landing, ParameterAddresses, build_landing, parameter_bytes
from weight_sync.transports.base import OnArrived, Piece, SourceReader
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
REACHED_AT_ONCE = 16
"""Sources that are connected and probed at a time when an epoch opens."""


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
    give_up: Deadline


class Source(NamedTuple):
    """One publisher this worker reads from."""

    info: PublisherInfo
    client: ControlClient
    pieces: tuple[Piece, ...]
    runs: tuple[int, ...]
    """Indices into the plan's runs."""


class Pulled(NamedTuple):
    """What bringing one version cost."""

    pull_s: float = 0.0
    attest_s: float = 0.0
    num_retries: int = 0
    num_stalls: int = 0
    by_source: tuple[tuple[int, float], ...] = ()
    """(learner rank, seconds of its pull); twice where a digest differed."""

    def seconds_by_source(self) -> dict[int, float]:
        seconds: dict[int, float] = {}
        for rank, spent_s in self.by_source:
            seconds[rank] = seconds.get(rank, 0.0) + spent_s
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
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


def open_epoch(request: OpenReceiver, host: Host, *, reloads: Reloads | None = None) -> ReceiverEpoch:
    """Prove this worker's part of the plan and prepare every copy.

    Raises:
        PlanMismatch: the plan is damaged, learners have another, or a run does not fit the parameters.
        DeviceError: no memory for what was asked for.
    """
    root, plan = open_pull(request.plan, epoch=request.epoch, worker=host.worker)
    for info in request.publishers:
        if info.plan_root != root:
            raise PlanMismatch(
                f"learner {info.rank} agreed to plan {info.plan_root[:12]}, this worker got {root[:12]}; every party "
                "must open the same epoch"
            )
    missing = plan.bytes_by_source.keys() - {info.rank for info in request.publishers}
    if missing:
        raise PlanMismatch(f"worker {host.worker} reads from learners {sorted(missing)}, which did not open")
    views = parameter_bytes(host.model)
    landing = build_landing(plan, views, host.backend, commit=request.commit, reloads=reloads)
    try:
        return ReceiverEpoch(request, plan, root=root, landing=landing, host=host)
    except BaseException:
        landing.close()
        raise


def _kind(info: PublisherInfo) -> object:
    """Equal for learners of which one is enough to know how the others are reached."""
    return info.node, tuple(arena.transport for arena in info.arenas)


class ReceiverEpoch:
    """See the module docstring. `open_epoch` builds it."""

    def __init__(self, request: OpenReceiver, plan: PullPlan, *, root: str, landing: Landing, host: Host) -> None:
        self.plan = plan
        self.plan_root = root
        self.landing = landing
        self._request = request
        self._host = host
        self._holder = f"{request.replica}/{self.plan.worker}"
        self._sources = self._connect()
        self._readers: dict[int, SelectedReader] = {}
        with ExitStack() as undo:
            undo.callback(self._hang_up)
            self._relay = Relay(
                host.backend,
                landing.shadow if request.relay else None,
                landing.pieces,
                owner=self._holder,
                host=reachable_host() if request.host is None else request.host,
                dial=self._dial,
            )
            undo.callback(self._relay.close)
            self._arrived = self._digests_of(landing.arrivals) if request.verify else {}
            self._residence = ParameterAddresses(host.model, landing.written)
            self._copy: BatchCopy = BatchCopy(host.backend, landing.moves)
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

    def reach_all(self, *, deadline_s: float) -> None:
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

        give_up = Deadline(self._host.clock() + deadline_s, check)
        node, own = node_id(), self._request.host
        host = reachable_host() if own is None else own

        def ping(source: Source) -> None:
            left_s = give_up.at - self._host.clock()
            source.client.ping(deadline_s=min(SILENCE_S, max(left_s, LAST_WORD_S)))

        alike: dict[object, list[Source]] = {}
        for source in self._sources.values():
            alike.setdefault(_kind(source.info), []).append(source)
        for sources in alike.values():
            known = NodeTransport()
            for source in sources:
                self._readers[source.info.rank] = SelectedReader(
                    self._host.backend,
                    source.info.rank,
                    source.info.arenas,
                    line=source.client,
                    same_node=source.info.node == node,
                    host=host,
                    node=known,
                    probe=partial(self._probe, source),
                )
        # Not the same learner for all workers.
        turn = zlib.crc32(self._holder.encode())
        probed = [sources[turn % len(sources)] for sources in alike.values()]
        # All pings before the patterns, which may take all the time: a learner that has none left to answer in is not
        # lost.
        self._at_sources([*self._sources.values()], ping, on_failed=has_failed.set)
        connect = partial(self._connect_within, give_up)
        self._at_sources(probed, connect, on_failed=has_failed.set)

    def _connect_within(self, give_up: Deadline, source: Source) -> None:
        def check() -> None:
            give_up.check()
            if self._host.clock() >= give_up.at:
                raise PullTimeout(
                    f"{self._holder} did not get its probe pattern of {source.info.probe_bytes} bytes in time; raise "
                    "weight_sync.timeout_s, or look why this worker or the way to that learner is slow"
                )

        self._readers[source.info.rank].connect(check)

    def _at_sources(
        self, sources: Sequence[Source], step: Callable[[Source], None], *, on_failed: Callable[[], None]
    ) -> None:
        """Runs `step` at up to `REACHED_AT_ONCE` sources at a time. Once one has failed, calls `on_failed`, starts no
        more, waits for those under way, and raises the failure; of several, that of the first source."""
        with ThreadPoolExecutor(
            REACHED_AT_ONCE, thread_name_prefix="weight-sync-reach", initializer=self._host.choose_device
        ) as pool:
            steps = [pool.submit(step, source) for source in sources]
            done, pending = wait(steps, return_when=FIRST_EXCEPTION)
            failures = [failure for one in steps if one in done and (failure := one.exception()) is not None]
            if failures:
                on_failed()
                for one in pending:
                    one.cancel()
        if failures:
            raise failures[0]

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

    def pull(self, version: int, slots: Slots, *, give_up: Deadline) -> Pulled:
        """Bring `version` into the shadow (staged) or the parameters (in place), verified. Call `give_up` if it raises.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, SlotOverwritten.
        """
        # First: those who read from here and are ahead wait for this version, and are told if it is given up.
        self._relay.begin(version)
        pull = _Pull(version, slots, give_up)
        total = Pulled()
        for rank in self._sources:
            total = self._pull_source(rank, pull, total)
        # After all bytes: digests read as fast as memory can, which a pull should not have to share.
        for rank in self._sources:
            total = self._attest_source(rank, pull, total)
        return total

    def require_intact(self, version: int, slots: Slots, *, give_up: Deadline) -> None:
        """
        Raises:
            SlotOverwritten, PublisherLost, PullTimeout: a learner does not hold the version there any more, or is lost.
        """
        for rank in self._sources:
            self._sent_digests(rank, _Pull(version, slots, give_up))

    def give_up(self) -> None:
        """After a pull that failed: nobody is to read what arrived."""
        self._relay.give_up()

    def copy_from_shadow(self) -> None:
        """Device-local copy of every run into the parameters. Asynchronous where the device is."""
        self._copy()

    def live_digests(self) -> dict[int, tuple[int, ...]]:
        """Source rank -> digest of each of its runs, read from the live parameters, in plan order."""
        return {rank: digest() for rank, digest in self._digests_of(self.landing.params).items()}

    def check_addresses(self) -> None:
        """
        Raises:
            PlanMismatch: a parameter was rebound since the epoch opened, so writing to its old place would be in vain.
        """
        if moved := self._residence.moved():
            raise PlanMismatch(
                f"{self._holder}: parameters moved since opening: {', '.join(moved[:5])} ({len(moved)} of them); "
                "something rebound them (sleep, quantisation, a reload): open a new epoch"
            )

    def counters(self) -> dict[str, int]:
        num_blocks = sum(block is not None for block in (self.landing.shadow, self.landing.fallback))
        counts = Counter(allocations=num_blocks, sockets=len(self._sources) + 1)
        for part in (*self._readers.values(), self._relay):
            counts.update(part.counters())
        return dict(counts)

    def close(self) -> None:
        """Unmap, hang up and free, each whether or not the others fail; a failure is raised at the end."""
        with ExitStack() as closing:  # from the last to the first
            closing.callback(self.landing.close)
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
        for rank in sorted(self.landing.pieces):
            runs = tuple(i for i, run in enumerate(self.plan.runs) if run.src_rank == rank)
            sources[rank] = Source(infos[rank], self._dial(infos[rank].address), self.landing.pieces[rank], runs)
        return sources

    def _dial(self, address: PeerAddress) -> ControlClient:
        return ControlClient(
            zmq.Context.instance(),
            address,
            self._request.keys,
            epoch=self._request.epoch,
            sender=self._holder,
            clock=self._host.clock,
        )

    def _probe(self, source: Source, reader: SourceReader, check: Callable[[], None]) -> None:
        info = source.info
        landing = torch.empty(info.probe_bytes, dtype=torch.uint8, device=self._host.device)
        reader.pull(info.arenas[0].num_slots, [Piece(0, landing)], check=check)
        found = self._host.backend.digest(landing)
        if found != info.probe_digest:
            raise TransportUnusable(
                f"the probe pattern of {info.probe_bytes} bytes from learner {info.rank} to {self._holder} arrived "
                f"with digest {found:016x}, written with {info.probe_digest:016x}"
            )

    def _pull_source(self, rank: int, pull: _Pull, total: Pulled, *, is_retry: bool = False) -> Pulled:
        clock, source, reader = self._host.clock, self._sources[rank], self._readers[rank]
        slot = pull.slots[rank].slot

        def keep_going() -> None:
            pull.give_up.check()
            if clock() >= pull.give_up.at:
                raise PullTimeout(f"{self._holder}: version {pull.version} did not arrive in time; it is not committed")

        def direct(pieces: Sequence[Piece], on_arrived: OnArrived) -> None:
            reader.pull(slot, pieces, check=keep_going, on_arrived=on_arrived)

        keep_going()
        started = clock()
        num_stalls = self._relay.pull(
            rank, source.pieces, version=pull.version, direct=direct, check=keep_going, is_retry=is_retry
        )
        spent_s = clock() - started
        return total._replace(
            pull_s=total.pull_s + spent_s,
            num_retries=total.num_retries + is_retry,
            num_stalls=total.num_stalls + num_stalls,
            by_source=(*total.by_source, (rank, spent_s)),
        )

    def _attest_source(self, rank: int, pull: _Pull, total: Pulled) -> Pulled:
        """What arrived from a learner is what it packed; what differs is pulled once more, past relays."""
        wrong, total = self._timed_wrong_runs(rank, pull, total)
        if not wrong:
            return total
        total = self._pull_source(rank, pull, total, is_retry=True)
        wrong, total = self._timed_wrong_runs(rank, pull, total)
        if not wrong:
            return total
        names = sorted({self.plan.runs[i].dst_param for i in wrong})
        num_runs = len(self._sources[rank].runs)
        raise DigestMismatch(
            f"{self._holder}: {len(wrong)} of {num_runs} runs from learner {rank} differ from what was packed, twice: "
            f"{', '.join(names[:5])}; suspect the link or the memory of either host"
        )

    def _timed_wrong_runs(self, rank: int, pull: _Pull, total: Pulled) -> tuple[list[int], Pulled]:
        started = self._host.clock()
        wrong = self._wrong_runs(rank, self._sent_digests(rank, pull))
        return wrong, total._replace(attest_s=total.attest_s + self._host.clock() - started)

    def _sent_digests(self, rank: int, pull: _Pull) -> tuple[int, ...]:
        """The learner's own digests of the runs of this worker.

        Raises:
            SlotOverwritten: the slot was packed again while it was read.
            PublisherLost: no answer within `SILENCE_S`.
            PullTimeout: none either, and there was less time than that.
        """
        at, deadline = pull.slots[rank], pull.give_up
        patience_s = min(SILENCE_S, max(deadline.at - self._host.clock(), LAST_WORD_S))
        request = Check(worker=self.plan.worker, slot=at.slot, generation=at.generation)
        try:
            checked = self._sources[rank].client.ask(request, Checked, deadline_s=patience_s, check=deadline.check)
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

    def _wrong_runs(self, rank: int, sent: tuple[int, ...]) -> list[int]:
        if not self._request.verify:
            return []
        source = self._sources[rank]
        if len(sent) != len(source.runs):
            raise PlanMismatch(
                f"{self._holder}: learner {rank} sent {len(sent)} digests for {len(source.runs)} runs; "
                "open both sides with the same plan and the same `verify`"
            )
        found = self._arrived[rank]()
        return [i for i, a, b in zip(source.runs, sent, found, strict=True) if a != b]

    def _digests_of(self, views: Sequence[torch.Tensor]) -> dict[int, BatchDigest]:
        """Source rank -> digest of its runs, given every run's bytes."""
        backend = self._host.backend
        return {rank: BatchDigest(backend, [views[i] for i in source.runs]) for rank, source in self._sources.items()}
