"""What a receiver owns from `open` to `close`: mapped arenas, lines to the publishers, every copy it will make.

A version arrives source by source, in an order staggered between receivers: pull the pieces, compare the digest of each
run with the publisher's, pull that source once more if one differs, then give the lease back and ask whether the slot
still is what was leased. Only then do the bytes count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import zmq

from weight_sync.control import Membership
from weight_sync.control_client import ControlClient
from weight_sync.device.base import DeviceError
from weight_sync.errors import DigestMismatch, PlanMismatch, PullTimeout, TransportUnusable
from weight_sync.landing import Landing, build_landing, parameter_addresses, parameter_bytes
from weight_sync.plan import manifest_from_bytes, verify_manifest
from weight_sync.pull import staggered
from weight_sync.sources import SILENCE_S, Leases, Source
from weight_sync.transports.base import Piece, ReceiverEnd
from weight_sync.transports.select import open_receiver_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from weight_sync.device.base import Backend, Digester, Mover
    from weight_sync.types import Manifest, PullPlan
    from weight_sync.wire import OpenReceiver


class Pulled(NamedTuple):
    """What bringing one version cost."""

    pull_s: float = 0.0
    attest_s: float = 0.0
    seal_s: float = 0.0
    num_retries: int = 0
    by_source: tuple[tuple[int, float], ...] = ()
    """(learner rank, seconds of its pull)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The worker process that an epoch lives in."""

    model: torch.nn.Module
    backend: Backend
    worker: int
    device: torch.device
    clock: Callable[[], float]


def open_epoch(request: OpenReceiver, host: Host) -> ReceiverEpoch:
    """Re-hash the manifest, map the arenas and prepare every copy.

    Raises:
        PlanMismatch: a digest differs, or a run does not fit the parameters.
        TransportUnusable: an arena cannot be mapped.
    """
    manifest = manifest_from_bytes(request.manifest)
    verify_manifest(manifest)
    for info in request.publishers:
        if info.manifest_digest != manifest.digest:
            raise PlanMismatch(
                f"learner {info.rank} agreed to manifest {info.manifest_digest[:12]}, this worker got "
                f"{manifest.digest[:12]}; every party must open the same epoch"
            )
    plan = plan_of(manifest, host.worker)
    sources = {run.src_rank for run in plan.runs}
    arenas = {info.rank: info.arena for info in request.publishers if info.rank in sources}
    if missing := sources - arenas.keys():
        raise PlanMismatch(f"worker {host.worker} reads from learners {sorted(missing)}, which did not open")
    landing = build_landing(plan, parameter_bytes(host.model), host.backend, commit=request.commit)
    try:
        end = open_receiver_end(host.backend, arenas)
    except BaseException as error:
        if landing.shadow is not None:
            landing.shadow.close()
        if isinstance(error, DeviceError):
            message = f"{request.replica}/{host.worker} cannot map the learners' arenas: {error}"
            raise TransportUnusable(message) from error
        raise
    return ReceiverEpoch(request, manifest, landing=landing, end=end, host=host)


def plan_of(manifest: Manifest, worker: int) -> PullPlan:
    """
    Raises:
        PlanMismatch: the manifest does not know this worker.
    """
    for plan in manifest.pull:
        if plan.worker == worker:
            return plan
    raise PlanMismatch(f"the manifest has workers {[plan.worker for plan in manifest.pull]}, this is worker {worker}")


class ReceiverEpoch:
    """See the module docstring. `open_epoch` builds it."""

    def __init__(
        self, request: OpenReceiver, manifest: Manifest, *, landing: Landing, end: ReceiverEnd, host: Host
    ) -> None:
        self.plan = plan_of(manifest, host.worker)
        self.manifest_digest = manifest.digest
        self.landing = landing
        self._request = request
        self._end = end
        self._host = host
        self._holder = f"{request.replica}/{self.plan.worker}"
        self._context = zmq.Context()
        self._sources = self._connect()
        self._leases = Leases(
            self._sources, worker=self.plan.worker, holder=self._holder, ttl_s=request.lease_s, clock=host.clock
        )
        self._digesters: dict[tuple[int, bool], Digester] = {}
        self._mover: Mover | None = None

    def probe(self, *, deadline_s: float) -> None:
        """Greet every source and read the pattern it shows before its first version.

        Raises:
            TransportUnusable: what arrives is not what was written.
            PublisherLost: no answer.
        """
        give_up = self._host.clock() + deadline_s
        for rank, source in self._sources.items():
            source.client.hello(deadline_s=min(SILENCE_S, give_up - self._host.clock()))
            landing = torch.empty(source.info.probe_bytes, dtype=torch.uint8, device=self._host.device)
            self._end.pull(rank, 0, [Piece(0, landing)], check=lambda: None)
            found = self._host.backend.digest(landing)
            if found != source.info.probe_digest:
                raise TransportUnusable(
                    f"{source.info.arena.transport} from learner {rank} to {self._holder}: the probe pattern of "
                    f"{source.info.probe_bytes} bytes arrived with digest {found:016x}, "
                    f"written with {source.info.probe_digest:016x}"
                )

    def lease(self, version: int, *, give_up: float, ttl_s: float) -> None:
        """Hold `version` at every source, so that it is not superseded before it is pulled.

        Raises:
            VersionUnavailable, PublisherLost.
        """
        self._leases.take(version, give_up=give_up, ttl_s=ttl_s)

    def pull(self, version: int, *, give_up: float, check: Callable[[], None]) -> Pulled:
        """Bring `version` into the shadow (staged) or the parameters (in place), verified. `check` may raise to stop.

        Raises:
            PullTimeout, PublisherLost, DigestMismatch, LeaseExpired, VersionUnavailable.
        """
        try:
            return self._pull_all(version, give_up=give_up, check=check)
        except BaseException:
            self._leases.drop()
            raise

    def copy_from_shadow(self) -> None:
        """Device-local copy of every run into the parameters. Asynchronous where the device is."""
        if self._mover is None:
            pairs = list(zip(self.landing.params, self.landing.arrivals, strict=True))
            self._mover = self._host.backend.mover(pairs)
        self._mover()

    def live_digests(self) -> dict[int, tuple[int, ...]]:
        """Source rank -> digest of each of its runs, read from the live parameters, in plan order."""
        return {rank: self._digests(rank, is_live=True) for rank in self._sources}

    def check_addresses(self) -> None:
        """
        Raises:
            PlanMismatch: a parameter was rebound since the epoch opened, so writing to its old place would be in vain.
        """
        now = parameter_addresses(self._host.model)
        moved = [name for name, address in self.landing.addresses.items() if now.get(name) != address]
        if moved:
            raise PlanMismatch(
                f"{self._holder}: parameters moved since opening: {', '.join(moved[:5])} ({len(moved)} of them); "
                "something rebound them (sleep, quantisation, a reload): open a new epoch"
            )

    def counters(self) -> dict[str, int]:
        allocations = int(self.landing.shadow is not None)
        return {"allocations": allocations, "sockets": len(self._sources), **self._end.counters()}

    def close(self) -> None:
        self._leases.drop()
        for source in self._sources.values():
            source.client.close()
        self._context.term()
        self._digesters.clear()
        self._mover = None
        self._end.close()
        if self.landing.shadow is not None:
            self.landing.shadow.close()

    def _connect(self) -> dict[int, Source]:
        order = staggered(sorted(self.landing.pieces), self._request.stagger + self.plan.worker)
        infos = {info.rank: info for info in self._request.publishers}
        member = Membership(run_id=self._request.run_id, epoch=self._request.epoch, secret=self._request.secret)
        sources: dict[int, Source] = {}
        for rank in order:
            client = ControlClient(
                self._context, infos[rank].endpoint, membership=member, sender=self._holder, clock=self._host.clock
            )
            runs = tuple(i for i, run in enumerate(self.plan.runs) if run.src_rank == rank)
            sources[rank] = Source(infos[rank], client, self.landing.pieces[rank], runs)
        return sources

    def _pull_all(self, version: int, *, give_up: float, check: Callable[[], None]) -> Pulled:
        self._leases.take(version, give_up=give_up)

        def keep_going() -> None:
            check()
            if self._host.clock() >= give_up:
                raise PullTimeout(f"{self._holder}: version {version} did not arrive in time; it is not committed")
            self._leases.renew_if_due(give_up)

        total = Pulled(seal_s=max(self._leases[rank].seal_s for rank in self._sources) if self._sources else 0.0)
        for rank in self._sources:
            total = self._pull_source(rank, total, keep_going)
        self._leases.settle(version, give_up)
        return total

    def _pull_source(self, rank: int, total: Pulled, keep_going: Callable[[], None]) -> Pulled:
        clock, source = self._host.clock, self._sources[rank]
        spent_s = attest_s = 0.0
        for attempt in range(2):
            started = clock()
            self._end.pull(rank, self._leases[rank].slot, source.pieces, check=keep_going)
            pulled = clock()
            wrong = self._wrong_runs(rank) if self._request.verify else []
            spent_s += pulled - started
            attest_s += clock() - pulled
            if not wrong:
                return total._replace(
                    pull_s=total.pull_s + spent_s,
                    attest_s=total.attest_s + attest_s,
                    num_retries=total.num_retries + attempt,
                    by_source=(*total.by_source, (rank, spent_s)),
                )
            keep_going()
        names = sorted({self.plan.runs[i].dst_param for i in wrong})
        raise DigestMismatch(
            f"{self._holder}: {len(wrong)} of {len(source.runs)} runs from learner {rank} differ from what was packed, "
            f"twice: {', '.join(names[:5])}; suspect the link or the memory of either host"
        )

    def _wrong_runs(self, rank: int) -> list[int]:
        source, sent = self._sources[rank], self._leases[rank].digests
        if len(sent) != len(source.runs):
            raise PlanMismatch(
                f"{self._holder}: learner {rank} sent {len(sent)} digests for {len(source.runs)} runs; "
                "open both sides with the same manifest and the same `verify`"
            )
        found = self._digests(rank, is_live=False)
        return [i for i, a, b in zip(source.runs, sent, found, strict=True) if a != b]

    def _digests(self, rank: int, *, is_live: bool) -> tuple[int, ...]:
        """Digest of every run from `rank`, as the parameters hold it or as it arrived."""
        digester = self._digesters.get((rank, is_live))
        if digester is None:
            views = self.landing.params if is_live else self.landing.arrivals
            digester = self._host.backend.digester([views[i] for i in self._sources[rank].runs])
            self._digesters[rank, is_live] = digester
        return digester()
