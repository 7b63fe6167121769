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
import zmq.asyncio

from weight_sync.control import Membership
from weight_sync.errors import (
    DigestMismatch,
    PlanMismatch,
    PullTimeout,
    ReplicaDirty,
    TransportUnusable,
    WeightSyncError,
)
from weight_sync.members import Member, MemberState, Outcome, PublisherHandle, ReplicaHandle, gather_all
from weight_sync.plan import build_manifest, manifest_to_bytes
from weight_sync.transports.select import candidates
from weight_sync.types import Manifest, ParamMeta, SyncReport, WorkerLayout
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
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

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
        self._infos: tuple[PublisherInfo, ...] = ()
        self._layout: tuple[WorkerLayout, ...] = ()
        self._zmq: zmq.asyncio.Context | None = None
        self._membership_lock = asyncio.Lock()
        """A sync and a change of membership wait for each other."""
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
        manifest = await self._plan(layouts, give_up)
        reasons: list[str] = []
        for transport in candidates(self._options.transport):
            try:
                infos = await self._open_publishers(transport, manifest, give_up)
                await self._open_replicas(list(self._members.values()), manifest, infos, give_up)
            except TransportUnusable as error:
                log.warning("weight sync cannot use %s: %s", transport, error)
                reasons.append(f"{transport}: {error}")
                await self._close_parties()
            except BaseException:
                await self._close_parties()
                raise
            else:
                self.transport, self.manifest, self._infos = transport, manifest, infos
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
        return max(report.wait_s + report.pack_s for report in reports)

    async def sync(self, version: int) -> SyncReport:
        """Bring a published version to every live replica.

        Raises:
            WeightSyncError: no replica got it; the cause is the first replica's failure.
        """
        if version not in self._published:
            raise WeightSyncError(f"version {version} is not published (published: {sorted(self._published)})")
        async with self._membership_lock:
            packs = self._published[version]  # a newer version may be published while this one is on its way
            started = self._clock()
            members = [member for member in self._members.values() if member.state == "live"]
            if not members:
                raise ReplicaDirty(f"no live replica is left: {self.members}; restart them and open a new epoch")
            results = await self._bring(members, version, started + self._options.timeout_s)
        outcomes: list[Outcome] = []
        failures: list[BaseException] = []
        for result in results:
            (outcomes if isinstance(result, Outcome) else failures).append(result)  # pyright: ignore[reportArgumentType]
        if not outcomes:
            raise failures[0]
        return self._report(version, outcomes, packs=packs, started=started)

    async def join(self, replica: ReplicaHandle) -> int | None:
        """Let a new replica (or one that was restarted under its old name) into the epoch, with the newest version.

        The others go on untouched; a sync waits until the newcomer is done, at most `timeout_s`.

        Returns:
            The version it generates from now; None if nothing was published yet.

        Raises:
            PlanMismatch: it splits the model differently.
            WeightSyncError, TimeoutError: it could not be opened, or did not get the version. It is not a member then.
        """
        manifest, member = self._opened(), Member(replica, self._clock)
        async with self._membership_lock:
            give_up = self._clock() + self._options.timeout_s
            old = self._members.pop(replica.name, None)
            if old is not None:
                old.disconnect()
            baked = await self._bake(manifest.params, [member], give_up)
            if baked[replica.name] != self._layout:
                raise PlanMismatch(
                    f"replica {replica.name} splits the model differently from the others; start it alike"
                )
            try:
                await self._open_replicas([member], manifest, self._infos, give_up)
                if self._published:
                    result = (await self._bring([member], max(self._published), give_up))[0]
                    if isinstance(result, BaseException):
                        raise result
            except BaseException:
                member.disconnect()
                raise
            self._members[replica.name] = member
        log.info("%s joined epoch %d with version %s", replica.name, self._epoch, member.live_version)
        return member.live_version

    async def leave(self, name: str) -> None:
        """Take a replica out of the group, dead or alive. The others go on untouched.

        Raises:
            KeyError: no such member.
            WeightSyncError: it is the last one.
        """
        async with self._membership_lock:
            if len(self._members) == 1 and name in self._members:
                raise WeightSyncError(f"{name} is the last replica; close weight sync instead")
            member = self._members.pop(name)
            member.disconnect()
            await self._close_quietly([member.handle.call("ws_close", timeout_s=self._close_timeout_s)])

    async def _bring(self, members: Sequence[Member], version: int, give_up: float) -> list[Outcome | BaseException]:
        turnstile = asyncio.Semaphore(max(1, len(members) // 2))
        calls = (member.bring(version, give_up=give_up, turnstile=turnstile) for member in members)
        return await asyncio.gather(*calls, return_exceptions=True)

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
        if self._zmq is not None:
            self._zmq.destroy(0)
            self._zmq = None
        self.transport, self.manifest = "", None

    async def _describe(self, give_up: float) -> list[PublisherLayout]:
        answers = await self._on_publishers("ws_describe", timeout_s=self._left(give_up))
        layouts = [decode(answer, PublisherLayout) for answer in answers]
        for layout in layouts[1:]:
            if layout.params != layouts[0].params:
                raise PlanMismatch(f"learner ranks {layouts[0].rank} and {layout.rank} describe different parameters")
        return layouts

    async def _plan(self, layouts: Sequence[PublisherLayout], give_up: float) -> Manifest:
        params = layouts[0].params
        baked = await self._bake(params, list(self._members.values()), give_up)
        first_name, first = next(iter(baked.items()))
        for name, other in baked.items():
            if other != first:
                raise PlanMismatch(f"replicas {first_name} and {name} split the model differently; start them alike")
        self._layout = first
        shards = [shard for layout in layouts for shard in layout.shards]
        # Planning a large model takes a while; the loop has other things to do.
        return await asyncio.to_thread(build_manifest, epoch=self._epoch, params=params, shards=shards, workers=first)

    async def _bake(
        self, params: tuple[ParamMeta, ...], members: Sequence[Member], give_up: float
    ) -> dict[str, tuple[WorkerLayout, ...]]:
        request = encode(BakeRequest(params=params))
        replies = await self._on_replicas(members, "ws_bake", lambda _: request, give_up)
        return {
            name: tuple(open_reply(reply, WorkerLayout, party=f"{name}/{i}") for i, reply in enumerate(answers))
            for name, answers in replies.items()
        }

    async def _open_publishers(self, transport: str, manifest: Manifest, give_up: float) -> tuple[PublisherInfo, ...]:
        opening = OpenPublisher(
            run_id=self._run_id,
            secret=self._secret,
            epoch=self._epoch,
            manifest=manifest_to_bytes(manifest),
            transport=transport,
            num_slots=self._options.num_slots,
            verify=self._options.verify,
            host=self._options.host,
        )
        answers = await self._on_publishers("ws_open", encode(opening), timeout_s=self._left(give_up))
        return tuple(decode(answer, PublisherInfo) for answer in answers)

    async def _open_replicas(
        self, members: Sequence[Member], manifest: Manifest, infos: tuple[PublisherInfo, ...], give_up: float
    ) -> None:
        data, num_workers, options = manifest_to_bytes(manifest), len(manifest.pull), self._options

        def request(name: str) -> bytes:
            receiver = OpenReceiver(
                run_id=self._run_id,
                secret=self._secret,
                epoch=self._epoch,
                manifest=data,
                replica=name,
                stagger=list(self._members).index(name) * num_workers if name in self._members else 0,
                commit=options.commit,
                verify=options.verify,
                publishers=infos,
                deadline_s=self._left(give_up),
                host=options.host,
            )
            return encode(receiver)

        replies = await self._on_replicas(members, "ws_open", request, give_up)
        membership = Membership(run_id=self._run_id, epoch=self._epoch, secret=self._secret)
        for member in members:
            name = member.handle.name
            workers = [open_reply(reply, ReceiverInfo, party=f"{name}/{i}") for i, reply in enumerate(replies[name])]
            for info in workers:
                if info.manifest_digest != manifest.digest:
                    raise PlanMismatch(f"{name}/{info.worker} agreed to another manifest: {info.manifest_digest[:12]}")
                log.info("%s/%d: %s, %d bytes per sync", name, info.worker, info.commit, info.pull_bytes)
            member.connect([info.endpoint for info in workers], self._context(), membership)

    def _context(self) -> zmq.asyncio.Context:
        if self._zmq is None:
            self._zmq = zmq.asyncio.Context()
        return self._zmq

    def _report(
        self, version: int, outcomes: Sequence[Outcome], *, packs: Sequence[PackReport], started: float
    ) -> SyncReport:
        pulls = [report for outcome in outcomes for report in outcome.reports]
        ranks = {rank for report in pulls for rank in report.pull_by_source}
        counters: Counter[str] = Counter()
        for report in (*packs, *pulls):
            counters.update(report.counters)
        return SyncReport(
            version=version,
            pack_s=max(report.pack_s for report in packs),
            seal_s=max(report.seal_s for report in pulls),
            pull_s=max(report.pull_s for report in pulls),
            pull_by_source={
                rank: max(report.pull_by_source.get(rank, 0.0) for report in pulls) for rank in sorted(ranks)
            },
            pull_bytes_per_s=min((r.nbytes / r.pull_s for r in pulls if r.pull_s > 0), default=0.0),
            attest_s=max(report.attest_s for report in pulls),
            drain_s=max(outcome.drain_s for outcome in outcomes),
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
        self, members: Sequence[Member], method: str, request: Callable[[str], bytes], give_up: float
    ) -> dict[str, list[bytes]]:
        left_s = self._left(give_up)
        handles = [member.handle for member in members]
        replies = await gather_all(handle.call(method, request(handle.name), timeout_s=left_s) for handle in handles)
        return {handle.name: reply for handle, reply in zip(handles, replies, strict=True)}

    async def _close_parties(self) -> None:
        for member in self._members.values():
            member.disconnect()
        timeout_s = self._close_timeout_s
        await self._close_quietly(
            [
                *(member.handle.call("ws_close", timeout_s=timeout_s) for member in self._members.values()),
                *(publisher.call("ws_close", timeout_s=timeout_s) for publisher in self._publishers),
            ]
        )

    @property
    def _close_timeout_s(self) -> float:
        return min(10.0, self._options.timeout_s)

    async def _close_quietly(self, calls: Sequence[Awaitable[Any]]) -> None:
        """Best effort: a party that is dead already must not keep the others from closing."""
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
