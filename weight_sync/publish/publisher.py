"""The learner's end: packs versions into slots, digests them and serves them to engine workers.

    describe ─> open(epoch) ─> publish(v0) ─> publish(v1) ─> ... ─> close
                  │                ├ learner's thread: wait for a slot, pack (one pass over memory)
                  │                └ sealing thread: digest, make visible, seal (pins wait for that)
                  └ slots, control thread, probe pattern; nothing is allocated after the first publish

There is no collective and no full tensor: a rank packs boxes of its own shards, and ranks may publish in any order.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from weight_sync import deadlines
from weight_sync.channel import ControlServer
from weight_sync.device.digest import digest_bytes
from weight_sync.device.fused import BatchDigest
from weight_sync.errors import PlanMismatch, PullTimeout, SlotOverwritten, VersionUnavailable, WeightSyncError
from weight_sync.messages import (
    Check,
    Checked,
    Ok,
    OpenPublisher,
    PackReport,
    Pin,
    PublishedDigests,
    PublisherInfo,
    PublisherLayout,
    ReplicaLeft,
    Request,
    Response,
    TransportRequest,
    Unpin,
    decode,
    encode,
)
from weight_sync.node import node_id, reachable_host
from weight_sync.plan.agreement import open_pack
from weight_sync.plan.types import RankShards
from weight_sync.publish.packer import Packer, pack_steps
from weight_sync.publish.slots import SlotTable
from weight_sync.transports.exporter import SlotExporter, offered

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from weight_sync.device.base import Backend
    from weight_sync.plan.types import PackPlan, ParamMeta, ShardBox


log = logging.getLogger(__name__)


class Sealer:
    """One thread, one slot at a time: digests what was packed, makes it visible, and opens it to readers."""

    def __init__(
        self,
        backend: Backend,
        end: SlotExporter,
        table: SlotTable,
        *,
        ranges: Sequence[tuple[int, int]],
        verify: bool,
        clock: Callable[[], float],
        rank: int,
    ) -> None:
        """`ranges` are (offset, bytes) within a slot."""
        self._end = end
        self._table = table
        self._verify = verify
        self._clock = clock
        self._rank = rank
        self._future: Future[None] | None = None
        self._version: int | None = None
        """What is being sealed, or was last."""
        slots = [end.slot(slot.index) for slot in table.slots] if ranges else []
        self._digests = [BatchDigest(backend, [slot[at : at + size] for at, size in ranges]) for slot in slots]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-sync-seal")

    def start(self, version: int, slot: int) -> None:
        """Seal `slot` in the background. The one before must have ended: call `wait` first."""
        self._version = version
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

    def digests_of(self, slot: int) -> tuple[int, ...]:
        """Digest of every range of a slot as it is now."""
        return self._digests[slot]() if self._digests else ()

    def close(self) -> None:
        """Waits for a slot that is being sealed. Idempotent."""
        with contextlib.suppress(WeightSyncError):
            self.wait(30.0)
        self._thread.shutdown(wait=False)
        self._digests.clear()

    def _seal(self, version: int, slot: int) -> None:
        started = self._clock()
        try:
            digests = self.digests_of(slot) if self._verify else ()
            if self._digests:
                self._end.seal(slot)
        except BaseException as error:
            why = f"learner rank {self._rank} could not seal version {version}: {type(error).__name__}: {error}"
            log.exception("%s", why)
            self._table.abort(slot, why)
            raise WeightSyncError(why) from error
        self._table.seal(slot, digests=digests, seal_s=self._clock() - started)


def probe_pattern(size: int, *, rank: int) -> torch.Tensor:
    """uint8[size] that differs from rank to rank and is no repetition of a shorter pattern."""
    counter = torch.arange(size, dtype=torch.int64)
    return ((counter * 2654435761 + rank * 40503 + (counter >> 8)) % 251).to(torch.uint8)


class Epoch:
    """Everything that lives from `open` to `close`."""

    def __init__(
        self, opening: OpenPublisher, plan: PackPlan, end: SlotExporter, backend: Backend, clock: Callable[[], float]
    ) -> None:
        slots = [end.slot(index) for index in range(opening.num_slots)] if plan.arena_bytes else []
        self.plan = plan
        self.end = end
        self.table = SlotTable(opening.num_slots, clock=clock)
        self.packer = Packer(backend, pack_steps(plan, slots), num_slots=opening.num_slots)
        ranges = [(offset, nbytes) for offset, nbytes in plan.segments.tolist()]
        self.sealer = Sealer(
            backend, end, self.table, ranges=ranges, verify=opening.verify, clock=clock, rank=plan.rank
        )
        self.segments_of = plan.segments_of_workers()
        self.nbytes = sum(item.nbytes for item in plan.items)
        """Packed for every version."""
        self.reports: dict[int, PackReport] = {}
        """Version -> report, of the versions that are still held."""
        self.server = ControlServer(self._answer, opening.keys, epoch=opening.epoch, host=host_of(opening))

    def close(self) -> None:
        with ExitStack() as closing:  # from the last to the first, whichever fails
            closing.callback(self.end.close)
            closing.callback(self.sealer.close)
            closing.callback(self.server.close)

    def _answer(self, sender: str, request: Request) -> Response | Future[Any]:
        """Answer the coordinator, or a receiver. Runs in the control thread."""
        match request:
            case Pin():
                if not 0 < request.ttl_s <= deadlines.MAX_PIN_S:
                    raise ValueError(f"ttl_s must be in (0, {deadlines.MAX_PIN_S}], got {request.ttl_s}")
                return self.table.pin(request.version, request.ttl_s)
            case Unpin():
                self.table.unpin(request.version)
            case Check():
                return self._check(sender, request)
            case ReplicaLeft():
                self.end.forget(request.replica)
            case TransportRequest():
                return self.end.answer(sender, request)
            case _:
                raise VersionUnavailable(f"{sender} sent a {type(request).__name__}, which a publisher does not answer")
        return Ok()

    def _check(self, sender: str, request: Check) -> Checked:
        """
        Raises:
            PlanMismatch: the plan has no such worker.
        """
        indices = self.segments_of.get(request.worker)
        if indices is None:
            raise PlanMismatch(f"{sender} asks as worker {request.worker}, the plan has no such worker")
        slot = self.table.holding(request.slot, request.generation)
        digests = slot.digests if slot is not None else ()
        return Checked(is_intact=slot is not None, digests=tuple(digests[i] for i in indices) if digests else ())


def host_of(opening: OpenPublisher) -> str:
    """Where this rank is reached."""
    return reachable_host() if opening.host is None else opening.host


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
        end = SlotExporter(
            offered(opening.transport, self._backend),
            self._backend,
            slot_bytes=plan.arena_bytes,
            num_slots=opening.num_slots,
            host=host_of(opening),
        )
        try:
            probe_bytes, probe_digest = self._write_probe(end) if plan.arena_bytes else (0, 0)
            self._epoch = epoch = Epoch(opening, plan, end, self._backend, self._clock)
        except BaseException:
            end.close()
            raise
        return encode(
            PublisherInfo(
                rank=self._rank,
                node=node_id(),
                address=epoch.server.address,
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
        if version in epoch.reports and epoch.table.slot_of(version) is not None:
            return encode(epoch.reports[version])
        started = self._clock()
        epoch.sealer.wait(deadline_s)
        slot = epoch.table.begin(version, deadline_s=max(0.0, started + deadline_s - self._clock()))
        begun = self._clock()
        try:
            epoch.packer.pack(slot, tensors)
        except BaseException as error:
            epoch.table.abort(slot, f"learner rank {self._rank} could not pack version {version}: {error}")
            raise
        report = PackReport(
            rank=self._rank,
            version=version,
            slot=slot,
            nbytes=epoch.nbytes,
            wait_s=begun - started,
            pack_s=self._clock() - begun,
            counters=self.counters(),
        )
        held = {v: report for v, report in epoch.reports.items() if epoch.table.slot_of(v) is not None}
        epoch.reports = {**held, version: report}
        epoch.sealer.start(version, slot)
        return encode(report)

    def digests(self, version: int, deadline_s: float) -> bytes:
        """`PublishedDigests` of a held version, computed now from the packed bytes. The caller has pinned it.

        Raises:
            VersionUnavailable: the version is not held any more.
            PullTimeout: it was not sealed within `deadline_s`.
            SlotOverwritten: the slot was packed again meanwhile.
        """
        epoch = self._opened()
        epoch.sealer.wait(deadline_s)
        pinned = epoch.table.slot_of(version)
        if pinned is None:
            raise VersionUnavailable(f"learner rank {self._rank} does not hold version {version} any more")
        slot, generation = pinned.index, pinned.generation
        digests = epoch.sealer.digests_of(slot)
        if epoch.table.holding(slot, generation) is None:
            raise SlotOverwritten(
                f"learner rank {self._rank} digested version {version} while its slot was packed again; pin it first"
            )
        by_worker = {w: tuple(digests[i] for i in indices) for w, indices in epoch.segments_of.items()}
        return encode(PublishedDigests(rank=self._rank, version=version, by_worker=by_worker))

    def counters(self) -> dict[str, int]:
        """What was allocated, registered and opened since the epoch began, and the fate of control frames."""
        epoch = self._opened()
        return {**epoch.end.counters(), "sockets": 1, **epoch.table.counters(), **epoch.server.counters()}

    def close(self) -> None:
        """Stop serving and free the slots, which receivers have unmapped before. Idempotent."""
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.close()

    def _opened(self) -> Epoch:
        if self._epoch is None:
            raise WeightSyncError(f"learner rank {self._rank} has no open epoch; the coordinator must open it first")
        return self._epoch

    def _write_probe(self, end: SlotExporter) -> tuple[int, int]:
        end.probe.copy_(probe_pattern(end.probe.numel(), rank=self._rank))
        self._backend.synchronize()
        return end.probe.numel(), self._backend.digest(end.probe)
