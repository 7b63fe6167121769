"""SyncCoordinator: brings every published version to every replica. Plain asyncio, tensors never pass here.

    open():     describe + bake ─> manifest ─> open learners ─> open replicas (re-hash, map, probe) ─> ready
    publish(v): all learner ranks pack
    sync(v):    all replicas prefetch beside generation
                then, at most half of them at a time:  [freeze lock] pause ─> commit ─> label ─> resume

One deadline is shared by everyone in a sync. A replica that fails is tried once more, then marked dead (or dirty) and
left out until the next `open`. A learner that fails is an error: there is no training without it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from weight_sync.errors import (
    DigestMismatch,
    PlanMismatch,
    PullTimeout,
    ReplicaDirty,
    TransportUnusable,
    WeightSyncError,
)
from weight_sync.members import Member, MemberState, Outcome, PublisherHandle, ReplicaHandle
from weight_sync.plan import build_manifest, manifest_to_bytes
from weight_sync.transports.select import candidates
from weight_sync.types import Manifest, SyncReport, WorkerLayout
from weight_sync.wire import (
    BakeRequest,
    CommitMode,
    OpenPublisher,
    OpenReceiver,
    PackReport,
    PublishedDigests,
    PublisherInfo,
    PublisherLayout,
    ReceiverInfo,
    RunDigests,
    decode,
    encode,
    open_reply,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

log = logging.getLogger(__name__)

__all__ = ["PublisherHandle", "ReplicaHandle", "SyncCoordinator", "SyncOptions"]


class SyncOptions(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = "auto"
    commit: CommitMode = "auto"
    num_slots: int = 2
    timeout_s: float = 120.0
    verify: bool = True
    host: str = "127.0.0.1"
    """Address that learners bind their control socket to."""


class SyncCoordinator:
    """See the module docstring. Owned by one event loop; one `publish` or `sync` at a time."""

    def __init__(
        self,
        publishers: Sequence[PublisherHandle],
        replicas: Sequence[ReplicaHandle],
        *,
        options: SyncOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        names = [replica.name for replica in replicas]
        if not publishers or not replicas or len(set(names)) != len(names):
            raise ValueError(
                f"need at least one learner rank and one replica with names of their own, got {len(publishers)} ranks "
                f"and replicas {names}"
            )
        self._publishers = tuple(publishers)
        self._members = {replica.name: Member(replica, clock) for replica in replicas}
        self._options = options
        self._clock = clock
        self._run_id = secrets.token_hex(8)
        self._secret = secrets.token_bytes(32)
        self._epoch = 0
        self._published: dict[int, list[PackReport]] = {}
        self.transport = ""
        """The transport in use; empty before `open`."""
        self.manifest: Manifest | None = None
        """The plan in use; None before `open`."""

    @property
    def members(self) -> dict[str, MemberState]:
        return {name: member.state for name, member in self._members.items()}

    @property
    def live_versions(self) -> dict[str, int | None]:
        """Replica -> the version it generates from; None before its first sync."""
        return {name: member.live_version for name, member in self._members.items()}

    async def open(self) -> None:
        """Agree on a plan and connect everyone. Called again, it starts a new epoch with all replicas.

        Raises:
            PlanMismatch: learner and engine do not fit; nothing was moved.
            TransportUnusable: no transport works between them.
            WeightSyncError: (other) a party failed; everything is closed again.
        """
        give_up = self._clock() + self._options.timeout_s
        self._epoch += 1
        for member in self._members.values():
            member.state, member.live_version = "live", None
        layouts = await self._describe(give_up)
        manifest = await self._bake(layouts, give_up)
        reasons: list[str] = []
        for transport in candidates(self._options.transport):
            try:
                await self._open_transport(transport, manifest, give_up)
            except TransportUnusable as error:
                log.warning("weight sync cannot use %s: %s", transport, error)
                reasons.append(f"{transport}: {error}")
                await self._close_parties()
            except BaseException:
                await self._close_parties()
                raise
            else:
                self.transport, self.manifest = transport, manifest
                self._published.clear()
                log.info("weight sync epoch %d over %s, manifest %s", self._epoch, transport, manifest.digest[:12])
                return
        raise TransportUnusable(f"no transport works: {'; '.join(reasons)}")

    async def publish(self, version: int) -> float:
        """Let all learner ranks pack `version` from their current weights. Returns seconds of the slowest.

        Raises:
            WeightSyncError: a rank could not; its message says why.
            TimeoutError: a rank did not answer.
        """
        timeout_s = self._options.timeout_s
        answers = await self._on_publishers("ws_publish", version, timeout_s, timeout_s=timeout_s)
        reports = [decode(answer, PackReport) for answer in answers]
        self._published = {version: reports}
        return max(report.wait_s + report.pack_s + report.digest_s for report in reports)

    async def sync(self, version: int) -> SyncReport:
        """Bring a published version to every live replica.

        Raises:
            WeightSyncError: no replica got it; the cause is the first replica's failure.
        """
        if version not in self._published:
            raise WeightSyncError(f"version {version} is not published (published: {sorted(self._published)})")
        packs = self._published[version]  # a newer version may be published while this one is on its way
        started = self._clock()
        members = [member for member in self._members.values() if member.state == "live"]
        if not members:
            raise ReplicaDirty(f"no live replica is left: {self.members}; restart them and open a new epoch")
        give_up = started + self._options.timeout_s
        turnstile = asyncio.Semaphore(max(1, len(members) // 2))
        results = await asyncio.gather(
            *(member.bring(version, give_up=give_up, turnstile=turnstile) for member in members), return_exceptions=True
        )
        outcomes: list[Outcome] = []
        failures: list[BaseException] = []
        for result in results:
            (outcomes if isinstance(result, Outcome) else failures).append(result)  # pyright: ignore[reportArgumentType]
        if not outcomes:
            raise failures[0]
        return self._report(version, outcomes, packs=packs, started=started)

    async def self_test(self) -> None:
        """Compare, run by run, the live parameters of every live replica with the learners' packed bytes.

        Raises:
            DigestMismatch: names replica, worker and parameters that differ.
            WeightSyncError: nothing was synced yet.
        """
        manifest, timeout_s = self._opened(), self._options.timeout_s
        if not self._published:
            raise WeightSyncError("nothing was published yet; publish and sync a version first")
        version = max(self._published)
        answers = await self._on_publishers("ws_digests", version, timeout_s=timeout_s)
        packed = {d.rank: d.by_worker for d in (decode(answer, PublishedDigests) for answer in answers)}
        for name, member in self._members.items():
            if member.state != "live":
                continue
            replies = await member.handle.call("ws_digests", timeout_s=timeout_s)
            for worker, reply in enumerate(replies):
                party = f"{name}/{worker}"
                live = open_reply(reply, RunDigests, party=party)
                if live.version != version:
                    raise WeightSyncError(f"{party} holds version {live.version}, not {version}; sync before the test")
                wrong = _differing_params(manifest, worker, live, packed)
                if wrong:
                    raise DigestMismatch(f"{party} differs from the learner in {', '.join(wrong)} at version {version}")

    @asynccontextmanager
    async def freeze(self, replica: str) -> AsyncIterator[int | None]:
        """Keep a replica at its version: its commits wait until the block ends. Yields that version.

        The wait is not counted against a sync's deadline.
        """
        member = self._members[replica]
        async with member.commit_lock:
            yield member.live_version

    async def close(self) -> None:
        """Close every party that still answers. Idempotent."""
        await self._close_parties()
        self.transport, self.manifest = "", None

    async def _describe(self, give_up: float) -> list[PublisherLayout]:
        answers = await self._on_publishers("ws_describe", timeout_s=self._left(give_up))
        layouts = [decode(answer, PublisherLayout) for answer in answers]
        for layout in layouts[1:]:
            if layout.params != layouts[0].params:
                raise PlanMismatch(f"learner ranks {layouts[0].rank} and {layout.rank} describe different parameters")
        return layouts

    async def _bake(self, layouts: Sequence[PublisherLayout], give_up: float) -> Manifest:
        request = encode(BakeRequest(params=layouts[0].params))
        baked: dict[str, tuple[WorkerLayout, ...]] = {}
        for name, replies in (await self._on_replicas(give_up, "ws_bake", lambda _: request)).items():
            baked[name] = tuple(open_reply(reply, WorkerLayout, party=f"{name}/{i}") for i, reply in enumerate(replies))
            self._members[name].num_workers = len(replies)
        first_name, first = next(iter(baked.items()))
        for name, other in baked.items():
            if other != first:
                raise PlanMismatch(f"replicas {first_name} and {name} split the model differently; start them alike")
        shards = [shard for layout in layouts for shard in layout.shards]
        # Planning a large model takes a while; the loop has other things to do.
        return await asyncio.to_thread(
            build_manifest, epoch=self._epoch, params=layouts[0].params, shards=shards, workers=first
        )

    async def _open_transport(self, transport: str, manifest: Manifest, give_up: float) -> None:
        data, options = manifest_to_bytes(manifest), self._options
        opening = OpenPublisher(
            run_id=self._run_id,
            secret=self._secret,
            epoch=self._epoch,
            manifest=data,
            transport=transport,
            num_slots=options.num_slots,
            verify=options.verify,
            host=options.host,
        )
        answers = await self._on_publishers("ws_open", encode(opening), timeout_s=self._left(give_up))
        infos = tuple(decode(answer, PublisherInfo) for answer in answers)
        staggers, total = {}, 0
        for name, member in self._members.items():
            staggers[name] = total
            total += member.num_workers

        def request(name: str) -> bytes:
            receiver = OpenReceiver(
                run_id=self._run_id,
                secret=self._secret,
                epoch=self._epoch,
                manifest=data,
                replica=name,
                stagger=staggers[name],
                commit=options.commit,
                verify=options.verify,
                publishers=infos,
                deadline_s=self._left(give_up),
            )
            return encode(receiver)

        for name, replies in (await self._on_replicas(give_up, "ws_open", request)).items():
            for worker, reply in enumerate(replies):
                info = open_reply(reply, ReceiverInfo, party=f"{name}/{worker}")
                if info.manifest_digest != manifest.digest:
                    raise PlanMismatch(f"{name}/{worker} agreed to another manifest: {info.manifest_digest[:12]}")
                log.info("%s/%d: %s, %d bytes per sync", name, worker, info.commit, info.pull_bytes)

    def _report(
        self, version: int, outcomes: Sequence[Outcome], *, packs: Sequence[PackReport], started: float
    ) -> SyncReport:
        pulls = [report for outcome in outcomes for report in outcome.reports]
        counters: Counter[str] = Counter()
        for report in (*packs, *pulls):
            counters.update(report.counters)
        return SyncReport(
            version=version,
            pack_s=max(report.pack_s + report.digest_s for report in packs),
            pull_s=max(report.pull_s for report in pulls),
            attest_s=max(report.attest_s for report in pulls),
            pause_s=max(outcome.pause_s for outcome in outcomes),
            commit_s=max(report.commit_s for report in pulls),
            end_to_end_s=self._clock() - started,
            nbytes=sum(report.nbytes for report in pulls),
            num_runs=sum(report.num_runs for report in pulls),
            num_retries=sum(outcome.num_retries for outcome in outcomes),
            replicas_live=len(outcomes),
            replicas_skipped=len(self._members) - len(outcomes),
            counters=dict(sorted(counters.items())),
        )

    async def _on_publishers(self, method: str, *args: object, timeout_s: float) -> list[bytes]:
        calls = (publisher.call(method, *args, timeout_s=timeout_s) for publisher in self._publishers)
        return list(await gather_all(calls))

    async def _on_replicas(
        self, give_up: float, method: str, request: Callable[[str], bytes]
    ) -> dict[str, list[bytes]]:
        left_s = self._left(give_up)
        calls = (member.handle.call(method, request(name), timeout_s=left_s) for name, member in self._members.items())
        return dict(zip(self._members, await gather_all(calls), strict=True))

    async def _close_parties(self) -> None:
        """Best effort: a party that is dead already must not keep the others from closing."""
        timeout_s = min(10.0, self._options.timeout_s)
        calls = [
            *(member.handle.call("ws_close", timeout_s=timeout_s) for member in self._members.values()),
            *(publisher.call("ws_close", timeout_s=timeout_s) for publisher in self._publishers),
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, Exception):
                # An error that Ray carried has the real one behind `cause`, and a traceback for a text.
                cause = getattr(result, "cause", result)
                log.warning("a party of weight sync did not close: %s: %s", type(cause).__name__, cause)

    def _opened(self) -> Manifest:
        if self.manifest is None:
            raise WeightSyncError("weight sync is not open; call open first")
        return self.manifest

    def _left(self, give_up: float) -> float:
        left_s = give_up - self._clock()
        if left_s <= 0:
            raise PullTimeout(f"weight sync took longer than weight_sync.timeout_s = {self._options.timeout_s}")
        return left_s


async def gather_all(calls: Any) -> list[Any]:
    """All results in order. Waits for every call, then raises the first failure, so that none is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _differing_params(
    manifest: Manifest, worker: int, live: RunDigests, packed: dict[int, dict[int, tuple[int, ...]]]
) -> list[str]:
    """Engine parameters of which a run does not hold the learner's bytes. Pure."""
    plan = next(plan for plan in manifest.pull if plan.worker == worker)
    wrong: set[str] = set()
    for rank, found in live.by_rank.items():
        names = [run.dst_param for run in plan.runs if run.src_rank == rank]
        expected = packed[rank][worker]
        wrong.update(name for name, a, b in zip(names, found, expected, strict=True) if a != b)
    return sorted(wrong)
