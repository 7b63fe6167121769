"""The learner's end: packs versions into slots, digests them and serves them to engine workers.

    describe ─> open(epoch) ─> publish(v0) ─> publish(v1) ─> ... ─> close
                  │                ├ learner's thread: wait for a slot, pack (one pass over memory)
                  │                └ sealing thread: digest, make visible, seal (a lease is `pending` until then)
                  └ slots, control thread, probe pattern; nothing is allocated after the first publish

There is no collective and no full tensor: a rank packs boxes of its own shards, and ranks may publish in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_sync.channel import ControlServer
from weight_sync.device.digest import digest_bytes
from weight_sync.device.fused import BatchDigest
from weight_sync.errors import LeaseExpired, PlanMismatch, PullTimeout, VersionUnavailable, WeightSyncError
from weight_sync.messages import (
    Dropped,
    DropRequest,
    LeaseGranted,
    LeaseRequest,
    OpenPublisher,
    PackReport,
    PairDrop,
    PairMeet,
    PairSend,
    PairWatch,
    Pending,
    PublishedDigests,
    PublisherInfo,
    PublisherLayout,
    Released,
    ReleaseRequest,
    Renewed,
    RenewRequest,
    ReplicaLeft,
    Request,
    Response,
    decode,
    encode,
)
from weight_sync.node import node_id, reachable_host
from weight_sync.plan.agreement import open_pack
from weight_sync.plan.types import RankShards
from weight_sync.publish.packer import Packer, pack_steps
from weight_sync.publish.slots import Arena
from weight_sync.transports.exporter import SlotExporter, offered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import PackPlan, ParamMeta, ShardBox


log = logging.getLogger(__name__)


class Sealed(NamedTuple):
    """What is known of a sealed slot."""

    digests: tuple[int, ...] = ()
    """One per range; empty if the run does not verify."""
    seconds: float = 0.0


class Sealer:
    """One thread, one slot at a time."""

    def __init__(
        self,
        backend: Backend,
        end: SlotExporter,
        arena: Arena,
        *,
        ranges: Sequence[tuple[int, int]],
        num_slots: int,
        verify: bool,
        clock: Callable[[], float],
        rank: int,
    ) -> None:
        """`ranges` are (offset, bytes) within a slot."""
        self._end = end
        self._arena = arena
        self._ranges = tuple(ranges)
        self._verify = verify
        self._clock = clock
        self._rank = rank
        self._lock = threading.Lock()
        self._version: int | None = None
        self._failed: tuple[int, str] | None = None
        """The last version that could not be sealed, and why."""
        self._future: Future[None] | None = None
        self._sealed: dict[int, Sealed] = {}
        self._digests: tuple[BatchDigest, ...] = ()
        if self._ranges:
            slots = [end.slot(index) for index in range(num_slots)]
            self._digests = tuple(
                BatchDigest(backend, [slot[start : start + size] for start, size in self._ranges]) for slot in slots
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync-seal")

    def start(self, version: int, slot: int) -> None:
        """Seal `slot` in the background. The one before must have ended: call `wait` first."""
        with self._lock:
            self._version, self._failed = version, None
        self._future = self._thread.submit(self._seal, version, slot)

    def wait(self, timeout_s: float) -> None:
        """Until nothing is being sealed.

        Raises:
            PullTimeout: it takes longer than `timeout_s`.
            WeightSyncError: sealing the version before failed, so nobody could read it.
        """
        future, self._future = self._future, None
        if future is None:
            return
        try:
            future.result(timeout_s)
        except FutureTimeout:
            self._future = future
            raise PullTimeout(
                f"learner rank {self._rank} is still sealing version {self._version} after {timeout_s:.1f} s; "
                "is its device stuck?"
            ) from None

    def is_sealing(self, version: int) -> bool:
        with self._lock:
            return self._version == version

    def require_not_failed(self, version: int) -> None:
        """
        Raises:
            VersionUnavailable: `version` could not be sealed; says why. No engine is to blame for that.
        """
        with self._lock:
            failed = self._failed
        if failed is not None and failed[0] == version:
            raise VersionUnavailable(failed[1])

    def sealed(self, slot: int) -> Sealed:
        return self._sealed.get(slot, Sealed())

    def digests_of(self, slot: int) -> tuple[int, ...]:
        """Digest of every range of a slot as it is now."""
        return self._digests[slot]() if self._ranges else ()

    def close(self) -> None:
        """Waits for a slot that is being sealed. Idempotent."""
        with contextlib.suppress(WeightSyncError):
            self.wait(30.0)
        self._thread.shutdown(wait=False)
        self._digests = ()

    def _seal(self, version: int, slot: int) -> None:
        started = self._clock()
        try:
            digests = self.digests_of(slot) if self._verify else ()
            if self._ranges:
                self._end.seal(slot)
        except BaseException as error:
            self._arena.abort(slot)
            why = f"learner rank {self._rank} could not seal version {version}: {type(error).__name__}: {error}"
            log.exception("%s", why)
            with self._lock:
                self._version, self._failed = None, (version, why)
            raise WeightSyncError(why) from error
        self._sealed[slot] = Sealed(digests, self._clock() - started)
        with self._lock:
            self._arena.seal(slot, version)
            self._version = None


MAX_LEASE_S = 3600.0


class Segments(NamedTuple):
    """The byte ranges of this rank that are digested, and which of them each worker pulls."""

    ranges: tuple[tuple[int, int], ...]
    """(arena offset, bytes), each once however many workers pull it."""
    of_worker: Mapping[int, tuple[int, ...]]
    """Worker -> index into `ranges` per run, in plan order."""


def segments_of(plan: PackPlan) -> Segments:
    """What a rank must digest. Pure."""
    workers, segments = plan.readers.T
    of_worker = {w: tuple(segments[workers == w].tolist()) for w in sorted(set(workers.tolist()))}
    return Segments(tuple((offset, nbytes) for offset, nbytes in plan.segments.tolist()), of_worker)


def probe_pattern(size: int, *, rank: int) -> torch.Tensor:
    """uint8[size] that differs from rank to rank and is no repetition of a shorter pattern."""
    counter = torch.arange(size, dtype=torch.int64)
    return ((counter * 2654435761 + rank * 40503 + (counter >> 8)) % 251).to(torch.uint8)


@dataclass(slots=True, kw_only=True)
class Epoch:
    """Everything that lives from `open` to `close`."""

    request: OpenPublisher
    plan: PackPlan
    segments: Segments
    arena: Arena
    end: SlotExporter
    packer: Packer
    sealer: Sealer
    reports: dict[int, PackReport]
    """Version -> report, of the versions that are still held."""
    server: ControlServer | None = None

    def holds(self, version: int) -> bool:
        return self.sealer.is_sealing(version) or self.arena.slot_of(version) is not None


class WeightPublisher:
    """See the module docstring. Not thread-safe: one thread opens, publishes and closes."""

    def __init__(self, backend: Backend, *, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._rank = rank
        self._clock = clock
        self._epoch: Epoch | None = None

    def describe(
        self, params: Sequence[ParamMeta], shards: Sequence[ShardBox], tensors: Mapping[str, torch.Tensor]
    ) -> bytes:
        """This rank's part of the learner's layout, as `weight_sync.publish.shards.local_shards` found it. Reads the
        shards that other ranks hold too, since all must have the same values."""
        params = tuple(params)
        digests = {box.param: digest_bytes(tensors[box.param].contiguous()) for box in shards if box.is_replicated}
        return encode(
            PublisherLayout(
                rank=self._rank,
                params=params if self._rank == 0 else (),
                params_digest=hashlib.sha256(encode(params)).digest(),
                shards=RankShards.of(self._rank, params, shards, digests).to_table(),
            )
        )

    def open(self, request: bytes) -> bytes:
        """Allocate slots and serve an epoch; an epoch that is still open is closed first. Returns a `PublisherInfo`.

        Raises:
            PlanMismatch: this rank's part of the plan is damaged or inconsistent, or there is none.
            TransportUnusable, DeviceError: the slots cannot be made.
        """
        opening = decode(request, OpenPublisher)
        root, plan = open_pack(opening.plan, epoch=opening.epoch, rank=self._rank)
        self.close()
        host = reachable_host() if opening.host is None else opening.host
        end = SlotExporter(
            offered(opening.transport, self._backend),
            self._backend,
            slot_bytes=plan.arena_bytes,
            num_slots=opening.num_slots,
            host=host,
        )
        try:
            epoch = self._make_epoch(opening, plan, end)
            probe_bytes, probe_digest = self._write_probe(epoch)
            server = ControlServer(
                lambda sender, ask: _handle(epoch, sender, ask), opening.keys, epoch=opening.epoch, host=host
            )
        except BaseException:
            end.close()
            raise
        epoch.server = server
        self._epoch = epoch
        return encode(
            PublisherInfo(
                rank=self._rank,
                node=node_id(),
                address=server.address,
                arenas=end.handles,
                plan_root=root,
                probe_bytes=probe_bytes,
                probe_digest=probe_digest,
            )
        )

    def publish(self, version: int, tensors: Mapping[str, torch.Tensor], *, deadline_s: float) -> bytes:
        """Pack `version` from this rank's local shards and offer it. Returns a `PackReport`.

        A version that is still held is not packed again, so a retry is safe. `tensors` are local shards (any float
        dtype) by parameter name; parameters of which this rank holds nothing may be missing.

        Raises:
            PullTimeout: no slot became free within `deadline_s`; says which engines hold them.
            PlanMismatch: a tensor is missing or does not have the planned shape.
            ValueError: an older version than the newest published.
        """
        epoch = self._opened()
        if version in epoch.reports and epoch.holds(version):
            return encode(epoch.reports[version])
        started = self._clock()
        epoch.sealer.wait(deadline_s)
        slot = epoch.arena.begin(version, deadline_s=max(0.0, started + deadline_s - self._clock()))
        begun = self._clock()
        try:
            epoch.packer.pack(slot, tensors)
        except BaseException:
            epoch.arena.abort(slot)
            raise
        report = PackReport(
            rank=self._rank,
            version=version,
            slot=slot,
            nbytes=sum(item.nbytes for item in epoch.plan.items),
            wait_s=begun - started,
            pack_s=self._clock() - begun,
            counters=self.counters(),
        )
        epoch.reports = {**{v: r for v, r in epoch.reports.items() if epoch.holds(v)}, version: report}
        epoch.sealer.start(version, slot)
        return encode(report)

    def digests(self, version: int, deadline_s: float) -> bytes:
        """`PublishedDigests` of a held version, computed now from the packed bytes. Holds its slot for at most
        `deadline_s`.

        Raises:
            VersionUnavailable: the version is not held any more.
            PullTimeout: it was not sealed within `deadline_s`.
            LeaseExpired: it took longer than `deadline_s`, and the slot was packed again meanwhile.
        """
        epoch, started = self._opened(), self._clock()
        epoch.sealer.wait(deadline_s)
        left_s = max(0.0, started + deadline_s - self._clock())
        lease = epoch.arena.lease(version, holder=f"learner {self._rank} self-test", ttl_s=left_s)
        try:
            digests = epoch.sealer.digests_of(lease.slot)
        finally:
            is_intact = epoch.arena.release(lease.lease_id, slot=lease.slot, generation=lease.generation)
        if not is_intact:
            raise LeaseExpired(
                f"learner rank {self._rank} took longer than {deadline_s:.1f} s to digest version {version}, and its "
                "slot was packed again meanwhile; raise weight_sync.timeout_s"
            )
        by_worker = {w: tuple(digests[i] for i in indices) for w, indices in epoch.segments.of_worker.items()}
        return encode(PublishedDigests(rank=self._rank, version=version, by_worker=by_worker))

    def counters(self) -> dict[str, int]:
        """What was allocated, registered and opened since the epoch began, and the fate of control frames."""
        epoch = self._opened()
        control = {} if epoch.server is None else epoch.server.counters()
        return {**epoch.end.counters(), "sockets": 1, **epoch.arena.counters(), **control}

    def close(self) -> None:
        """Stop serving and free the slots, which receivers have unmapped before. Idempotent."""
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        with ExitStack() as closing:  # from the last to the first, whichever fails
            closing.callback(epoch.end.close)
            closing.callback(epoch.sealer.close)
            if epoch.server is not None:
                closing.callback(epoch.server.close)

    def _make_epoch(self, opening: OpenPublisher, plan: PackPlan, end: SlotExporter) -> Epoch:
        slots = [end.slot(index) for index in range(opening.num_slots)] if plan.arena_bytes else []
        segments = segments_of(plan)
        arena = Arena(opening.num_slots, clock=self._clock)
        sealer = Sealer(
            self._backend,
            end,
            arena,
            ranges=segments.ranges,
            num_slots=opening.num_slots,
            verify=opening.verify,
            clock=self._clock,
            rank=self._rank,
        )
        return Epoch(
            request=opening,
            plan=plan,
            segments=segments,
            arena=arena,
            end=end,
            packer=Packer(self._backend, pack_steps(plan, slots), num_slots=opening.num_slots),
            sealer=sealer,
            reports={},
        )

    def _opened(self) -> Epoch:
        if self._epoch is None:
            raise WeightSyncError(f"learner rank {self._rank} has no open epoch; the coordinator must open it first")
        return self._epoch

    def _write_probe(self, epoch: Epoch) -> tuple[int, int]:
        if not epoch.plan.arena_bytes:
            return 0, 0
        page = epoch.end.probe
        page.copy_(probe_pattern(page.numel(), rank=self._rank))
        self._backend.synchronize()
        return page.numel(), self._backend.digest(page)


def _handle(epoch: Epoch, sender: str, request: Request) -> Response:
    """Answer one receiver, or the coordinator. Runs in the control thread."""
    arena = epoch.arena
    match request:
        case LeaseRequest():
            indices = epoch.segments.of_worker.get(request.worker)
            if indices is None:
                raise PlanMismatch(f"{sender} asks as worker {request.worker}, the plan has no such worker")
            if epoch.sealer.is_sealing(request.version):
                return Pending()
            epoch.sealer.require_not_failed(request.version)
            lease = arena.lease(request.version, holder=sender, ttl_s=_bounded_ttl(request.ttl_s))
            sealed = epoch.sealer.sealed(lease.slot)
            return LeaseGranted(
                lease_id=lease.lease_id,
                slot=lease.slot,
                generation=lease.generation,
                digests=tuple(sealed.digests[i] for i in indices) if sealed.digests else (),
                seal_s=sealed.seconds,
            )
        case RenewRequest():
            arena.renew(request.lease_id, ttl_s=_bounded_ttl(request.ttl_s))
            return Renewed()
        case ReleaseRequest():
            is_intact = arena.release(request.lease_id, slot=request.slot, generation=request.generation)
            return Released(is_intact=is_intact)
        case DropRequest():
            arena.drop(sender)
            return Dropped()
        case ReplicaLeft():
            epoch.end.forget(request.replica)
            return Dropped()
        case PairMeet() | PairSend() | PairWatch() | PairDrop():
            return epoch.end.answer(sender, request)
        case _:
            raise VersionUnavailable(f"{sender} sent a {type(request).__name__}, which a publisher does not answer")


def _bounded_ttl(ttl_s: float) -> float:
    if not 0 < ttl_s <= MAX_LEASE_S:
        raise ValueError(f"ttl_s must be in (0, {MAX_LEASE_S}], got {ttl_s}")
    return ttl_s
