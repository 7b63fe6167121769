"""WeightPublisher: one learner rank's side of weight sync.

    describe ─> open(epoch) ─> publish(v0) ─> publish(v1) ─> ... ─> close
                  │                ├ learner's thread: wait for a slot, pack (one pass over memory)
                  │                └ sealing thread: digest, make visible, seal (a lease is `pending` until then)
                  └ slots, control thread, probe pattern; nothing is allocated after the first publish

There is no collective and no full tensor: a rank packs boxes of its own shards, and ranks may publish in any order.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_sync.addresses import node_id, reachable_host
from weight_sync.arena import Arena
from weight_sync.control import (
    ControlServer,
    Dropped,
    DropRequest,
    LeaseGranted,
    LeaseRequest,
    Membership,
    PairDrop,
    PairMeet,
    PairSend,
    PairWatch,
    Pending,
    Released,
    ReleaseRequest,
    Renewed,
    RenewRequest,
    Request,
    Response,
)
from weight_sync.errors import PlanMismatch, VersionUnavailable, WeightSyncError
from weight_sync.pack import Packer, pack_steps
from weight_sync.plan import manifest_from_bytes, verify_manifest
from weight_sync.sealing import Sealer
from weight_sync.transports.offer import Offer, offered
from weight_sync.wire import (
    OpenPublisher,
    PackReport,
    PublishedDigests,
    PublisherInfo,
    PublisherLayout,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.types import Manifest, PackPlan, ParamMeta, ShardDesc

log = logging.getLogger(__name__)

MAX_LEASE_S = 3600.0


class Segments(NamedTuple):
    """The byte ranges of this rank that are digested, and which of them each worker pulls."""

    ranges: tuple[tuple[int, int], ...]
    """(arena offset, bytes), each once however many workers pull it."""
    of_worker: Mapping[int, tuple[int, ...]]
    """Worker -> index into `ranges` per run, in plan order."""


def segments_of(manifest: Manifest, rank: int) -> Segments:
    """What `rank` must digest. Pure."""
    index: dict[tuple[int, int], int] = {}
    of_worker: dict[int, tuple[int, ...]] = {}
    for plan in manifest.pull:
        runs = [(run.src_off, run.nbytes) for run in plan.runs if run.src_rank == rank]
        of_worker[plan.worker] = tuple(index.setdefault(run, len(index)) for run in runs)
    return Segments(tuple(index), of_worker)


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
    end: Offer
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

    def describe(self, params: Sequence[ParamMeta], shards: Sequence[ShardDesc]) -> bytes:
        """This rank's part of the learner's layout, as `weight_sync.layout.local_shards` found it."""
        return encode(PublisherLayout(rank=self._rank, params=tuple(params), shards=tuple(shards)))

    def open(self, request: bytes) -> bytes:
        """Allocate slots and serve an epoch; an epoch that is still open is closed first. Returns a `PublisherInfo`.

        Raises:
            PlanMismatch: the manifest's digest is wrong, or it knows nothing of this rank.
            TransportUnusable, DeviceError: the slots cannot be made.
        """
        opening = decode(request, OpenPublisher)
        manifest, plan = self._agree(opening)
        self.close()
        host = reachable_host() if opening.host is None else opening.host
        end = Offer(
            offered(opening.transport, self._backend),
            self._backend,
            slot_bytes=plan.arena_bytes,
            num_slots=opening.num_slots,
            host=host,
        )
        try:
            epoch = self._make_epoch(opening, manifest, plan, end)
            probe_bytes, probe_digest = self._write_probe(epoch)
            membership = Membership(run_id=opening.run_id, epoch=opening.epoch, secret=opening.secret)
            server = ControlServer(lambda sender, ask: _handle(epoch, sender, ask), membership, host=host)
        except BaseException:
            end.close()
            raise
        epoch.server = server
        self._epoch = epoch
        return encode(
            PublisherInfo(
                rank=self._rank,
                node=node_id(),
                endpoint=server.endpoint,
                arenas=end.handles,
                manifest_digest=manifest.digest,
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

    def digests(self, version: int) -> bytes:
        """`PublishedDigests` of a held version, computed now from the packed bytes.

        Raises:
            VersionUnavailable: the version is not held any more.
        """
        epoch = self._opened()
        epoch.sealer.wait(MAX_LEASE_S)
        lease = epoch.arena.lease(version, holder=f"learner {self._rank} self-test", ttl_s=MAX_LEASE_S)
        try:
            digests = epoch.sealer.digests_of(lease.slot)
        finally:
            epoch.arena.release(lease.lease_id, slot=lease.slot, generation=lease.generation)
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

    def _make_epoch(self, opening: OpenPublisher, manifest: Manifest, plan: PackPlan, end: Offer) -> Epoch:
        slots = [end.slot(index) for index in range(opening.num_slots)] if plan.arena_bytes else []
        segments = segments_of(manifest, self._rank)
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
            packer=Packer(self._backend, pack_steps(manifest, plan, slots), num_slots=opening.num_slots),
            sealer=sealer,
            reports={},
        )

    def _agree(self, opening: OpenPublisher) -> tuple[Manifest, PackPlan]:
        manifest = manifest_from_bytes(opening.manifest)
        verify_manifest(manifest)
        for plan in manifest.pack:
            if plan.rank == self._rank:
                return manifest, plan
        ranks = [plan.rank for plan in manifest.pack]
        raise PlanMismatch(f"the manifest packs ranks {ranks}, this is rank {self._rank}; describe every rank")

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
    """Answer one receiver. Runs in the control thread."""
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
        case PairMeet() | PairSend() | PairWatch() | PairDrop():
            return epoch.end.answer(sender, request)
        case _:
            raise VersionUnavailable(f"{sender} sent a {type(request).__name__}, which a publisher does not answer")


def _bounded_ttl(ttl_s: float) -> float:
    if not 0 < ttl_s <= MAX_LEASE_S:
        raise ValueError(f"ttl_s must be in (0, {MAX_LEASE_S}], got {ttl_s}")
    return ttl_s
