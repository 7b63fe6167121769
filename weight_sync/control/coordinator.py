"""The driver's end: publishes a version, brings it to every replica, and lets replicas join and leave.

    open():     describe + record ─> plan ─> open learners ─> open replicas (prove, map, probe) ─> ready
    publish(v): all learner ranks pack
    sync(v):    pin v at every learner rank; all replicas prefetch beside generation; unpin
                then, at most half of them at a time:  [freeze lock] pause ─> commit ─> label ─> resume

    join(replica), leave(name): the others are not disturbed

One deadline is shared by everyone in a sync. A replica that fails is tried once more, then marked dead (or dirty) and
left out until it joins again. A learner that fails is an error: there is no training without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from weight_sync import deadlines
from weight_sync.control.epoch import Agreement, EpochOpener, SyncOptions, close_replicas
from weight_sync.control.members import (
    Member,
    MemberState,
    PublisherHandle,
    ReplicaHandle,
    ReplicaState,
    ReplicaSync,
    VersionPin,
    nothing,
)
from weight_sync.errors import DigestMismatch, PullTimeout, ReplicaDirty, VersionUnavailable, WeightSyncError
from weight_sync.messages import PackReport, PublishedDigests, RunDigests, SyncReport, decode, open_reply

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

    from weight_sync.plan.agreement import SharedPlan
    from weight_sync.plan.types import PullPlan


def _differing_params(plan: PullPlan, live: RunDigests, packed: dict[int, dict[int, tuple[int, ...]]]) -> list[str]:
    """Engine parameters of which a run does not hold the learner's bytes. Pure."""
    wrong: set[str] = set()
    for rank, found in live.by_rank.items():
        names = [run.dst_param for run in plan.runs if run.src_rank == rank]
        expected = packed[rank][plan.worker]
        wrong.update(name for name, a, b in zip(names, found, expected, strict=True) if a != b)
    return sorted(wrong)


def sync_report(
    pin: VersionPin,
    by_replica: Mapping[str, ReplicaSync],
    *,
    packs: Sequence[PackReport],
    members: Collection[Member],
    started: float,
    ended: float,
) -> SyncReport:
    """
    Args:
        pin: of the version.
        by_replica: of the replicas that got it, at least one.
        packs: of the learner ranks.
        members: all replicas, as they are after the sync.
        started, ended: on the coordinator's clock.
    """
    synced = by_replica.values()
    pulls = [report for result in synced for report in result.reports]
    lived = [m.live_version for m in members if m.state.public == "live" and m.live_version is not None]
    ranks = {rank for report in pulls for rank in report.pull_by_source}
    counters: Counter[str] = Counter()
    for report in (*packs, *pulls):
        counters.update(report.counters)
    return SyncReport(
        version=pin.version,
        pack_s=max(report.pack_s for report in packs),
        seal_s=pin.seal_s,
        pin_s=0.0 if pin.pinned_at is None else min(pin.pinned_at, ended) - started,
        pull_s=max(report.pull_s for report in pulls),
        pull_by_source={rank: max(report.pull_by_source.get(rank, 0.0) for report in pulls) for rank in sorted(ranks)},
        pull_bytes_per_s=min(((r.nbytes - r.skipped_bytes) / r.pull_s for r in pulls if r.pull_s > 0), default=0.0),
        attest_s=max(report.attest_s for report in pulls),
        drain_s=max(result.drain_s for result in synced),
        pause_s=max(result.pause_s for result in synced),
        commit_s=max(report.commit_s for report in pulls),
        resume_s=max(result.resume_s for result in synced),
        end_to_end_s=ended - started,
        nbytes=sum(report.nbytes for report in pulls),
        skipped_bytes=sum(report.skipped_bytes for report in pulls),
        num_runs=sum(report.num_runs for report in pulls),
        num_stalls=sum(report.num_stalls for report in pulls),
        num_retries=sum(result.num_retries for result in synced),
        version_lag=pin.version - min(lived, default=pin.version),
        replicas_live=len(synced),
        replicas_skipped=len(members) - len(synced),
        counters=dict(sorted(counters.items())),
        replicas={name: result.times(started) for name, result in by_replica.items()},
    )


log = logging.getLogger(__name__)

__all__ = ["PublisherHandle", "ReplicaHandle", "SyncCoordinator", "SyncOptions"]


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
        self._listeners: list[Callable[[], object]] = []
        self._members = {replica.name: self._member(replica, clock) for replica in replicas}
        self._options = options
        self._clock = clock
        self._opener = EpochOpener(publishers, options=options, clock=clock)
        self._agreement: Agreement | None = None
        self._published: dict[int, list[PackReport]] = {}
        self._pin: VersionPin | None = None
        """The last one."""
        self._is_packing = False
        """The learners may be writing over the version that is published."""
        self._is_linked = True
        """Every worker knows whom to read from. Some that do not could wait for each other in a circle."""
        self._membership_lock = asyncio.Lock()
        """A sync and a change of membership wait for each other."""

    @property
    def plan(self) -> SharedPlan | None:
        """The plan in use; None before `open`."""
        return None if self._agreement is None else self._agreement.plan

    @property
    def transport(self) -> str:
        """Every way that some worker reads some learner by, such as "ipc" or "gloo+ipc"; empty before `open`."""
        infos = [info for member in self._members.values() for info in member.workers]
        return "+".join(sorted({how for info in infos for how in info.transports.values()}))

    @property
    def members(self) -> dict[str, MemberState]:
        return {name: member.state.public for name, member in self._members.items()}

    def on_change(self, callback: Callable[[], object]) -> None:
        """Have `callback` called, in the event loop, right after every change of `members`. It must not raise."""
        self._listeners.append(callback)

    def _changed(self) -> None:
        for callback in self._listeners:
            callback()

    def _member(self, replica: ReplicaHandle, clock: Callable[[], float]) -> Member:
        return Member(replica, clock, on_change=self._changed)

    @property
    def live_versions(self) -> dict[str, int | None]:
        """Replica -> the version it generates from; None before its first sync."""
        return {name: member.live_version for name, member in self._members.items()}

    async def open(self) -> None:
        """Agree on a plan and connect everyone. Called again, it closes all and starts a new epoch with all replicas.
        A replica that leaves meanwhile waits until it is open, and one that was joining the epoch before is refused.

        Raises:
            PlanMismatch: learner and engine do not fit; nothing was moved.
            TransportUnusable: no transport works between them.
            WeightSyncError: (other) a party failed; everything is closed again.
        """
        await self.close()  # an epoch of another coordinator, too: a learner that opens frees its slots, mapped or not
        async with self._membership_lock:
            deadline = self._clock() + self._options.timeout_s
            members = list(self._members.values())
            for member in members:
                member.apply("open")
                member.live_version = None
            self._published.clear()
            agreement = None
            try:
                agreement = await self._opener.open(members, deadline)
                await self._opener.connect(agreement, members, deadline)
                await self._opener.link(agreement, members, deadline)
            except BaseException:
                await self._close_parties(agreement)
                raise
            self._agreement = agreement
            log.debug("weight sync epoch %d, plan %s", self._opener.epoch, agreement.plan.root[:12])

    async def publish(self, version: int) -> float:
        """Let all learner ranks pack `version` from their current weights. Returns seconds of the slowest.

        Raises:
            PullTimeout: a rank got no slot within `timeout_s`; names the replicas that still read from them.
            WeightSyncError: (other) a rank could not; its message says why.
            TimeoutError: a rank did not answer.
        """
        timeout_s = self._options.timeout_s
        self._is_packing = True
        try:
            # A rank that finds no free slot is to say so before we stop waiting.
            answers = await self._opener.on_publishers(
                "ws_publish", version, timeout_s, timeout_s=timeout_s + deadlines.ANSWER_S
            )
            reports = [decode(answer, PackReport) for answer in answers]
            self._published = {version: reports}
        except PullTimeout as error:
            if self._pin is None or not self._pin.holders:
                raise
            readers = ", ".join(sorted(self._pin.holders))
            raise PullTimeout(f"{error}; version {self._pin.version} is still read by {readers}") from error
        finally:
            self._is_packing = False
        return max(report.wait_s + report.pack_s for report in reports)

    async def sync(self, version: int) -> SyncReport:
        """Bring a published version to every live replica; one that has it, or a newer one, keeps what it has.

        Raises:
            VersionUnavailable: a newer version has taken its place in the learners' slots. Nobody is worse off, and
                some replicas may have it; it must not count as live before all have it, or a newer one.
            WeightSyncError: (other) no replica got it; the cause is the first replica's failure.
        """
        if version not in self._published:
            raise WeightSyncError(f"version {version} is not published (published: {sorted(self._published)})")
        packs = self._published[version]  # a newer version may be published while this one waits or is on its way
        async with self._somebody_free() as members:
            if not self._is_linked:
                await self._relink()
            started = self._clock()  # after the wait
            pin = self._pin_of(version)
            pin.pinned_at = None
            results = await self._bring(members, pin, started + self._options.timeout_s)
            if any(member.state is not ReplicaState.LIVE for member in members):
                await self._relink()
        synced = {
            member.name: result
            for member, result in zip(members, results, strict=True)
            if isinstance(result, ReplicaSync)
        }
        for member, result in zip(members, results, strict=True):
            if isinstance(result, VersionUnavailable) and member.state is ReplicaState.LIVE:
                raise result  # it generates from older weights than the others, until it gets the newer version
        if not synced:
            raise next(result for result in results if isinstance(result, BaseException))
        everyone = self._members.values()
        return sync_report(pin, synced, packs=packs, members=everyone, started=started, ended=self._clock())

    @asynccontextmanager
    async def _somebody_free(self) -> AsyncIterator[list[Member]]:
        """Holds the membership, and yields the live replicas that are neither leased nor replaced; skips the rest.

        Waits: while there is none, without the lock: a newcomer can join meanwhile, and be free.
        Unblocked by: the end of a lease, a newcomer, the loss of the last one.

        Raises:
            ReplicaDirty: no replica is live.
        """
        while True:
            async with self._membership_lock:
                live = self._live()
                if not live:
                    raise ReplicaDirty(f"no live replica is left: {self.members}; restart them and open a new epoch")
                if self._free():
                    for member in live:
                        await member.skip()
                    yield self._free()  # a lease may have ended meanwhile
                    return
            await asyncio.sleep(deadlines.LOOK_S)

    async def join(self, replica: ReplicaHandle) -> int | None:
        """Let a new replica (or one that was restarted under its old name) into the epoch, with the newest version.

        The others go on untouched; a sync waits while the newcomer pulls, at most `timeout_s`.

        Returns:
            The version it generates from now; None if nothing was published yet.

        Raises:
            PlanMismatch: it splits the model differently.
            WeightSyncError, TimeoutError: it could not be opened, or did not get the version. It is not a member then.
        """
        agreement, member = self._opened(), self._member(replica, self._clock)
        try:
            await self._unlink(replica.name)
            deadline = self._clock() + self._options.timeout_s
            await self._opener.check_layout(agreement, member, deadline)
            self._require_current(agreement, replica.name)
            await self._opener.connect(agreement, [member], deadline)
            # From here a sync waits, or the newcomer would miss it and generate from older weights than the others.
            async with self._membership_lock:
                self._require_current(agreement, replica.name)
                await self._catch_up(member, self._clock() + self._options.timeout_s)  # waiting for the turn took none
                member.apply("open")
                old, self._members[replica.name] = self._members.get(replica.name), member
                if old is not None:
                    old.apply("leave")
                    old.disconnect()
                self._changed()
                await self._relink()
        except BaseException:
            old = self._members.get(replica.name)
            if old is not member:
                self._is_linked = False  # the one that it would have replaced is a member still
                member.disconnect()
                if old is not None and old.state is ReplicaState.REPLACING:
                    old.apply("keep")
                if self._agreement is agreement or old is None or old.handle is not replica:
                    await close_replicas([replica], timeout_s=self._close_timeout_s)
            raise
        log.info("%s joined epoch %d with version %s", replica.name, self._opener.epoch, member.live_version)
        return member.live_version

    async def _catch_up(self, member: Member, deadline: float) -> None:
        """Bring the newest version to a newcomer; a newer one may take its place meanwhile."""
        while self._published and member.live_version != max(self._published):
            version = max(self._published)
            result = (await self._bring([member], self._pin_of(version), deadline))[0]
            if isinstance(result, VersionUnavailable) and self._clock() < deadline:
                if max(self._published) > version:
                    continue
                if self._is_packing:  # the newer one that takes its slot is not there yet
                    await asyncio.sleep(deadlines.LOOK_S)
                    continue
            if isinstance(result, BaseException):
                raise result
            return

    async def leave(self, name: str) -> None:
        """Take a replica out of the group, dead or alive. The others go on, and unmap its memory before it closes.

        Raises:
            KeyError: no such member.
            WeightSyncError: it is the last one.
        """
        async with self._membership_lock:
            if len(self._members) == 1 and name in self._members:
                raise WeightSyncError(f"{name} is the last replica; close weight sync instead")
            member = self._members.pop(name)
            member.apply("leave")
            member.disconnect()
            # A lost one has the links of its last sync, perhaps to the one that leaves.
            aside = (ReplicaState.LIVE, ReplicaState.HELD)
            lost = [other for other in self._members.values() if other.state not in aside]
            try:
                unlinked = self._opener.unlink(self._agreement, lost, self._close_timeout_s)
                await asyncio.gather(self._relink(), unlinked)
            finally:
                await close_replicas([member.handle], timeout_s=self._close_timeout_s)
                await self._opener.release(self._agreement, name, self._close_timeout_s)

    async def _unlink(self, name: str) -> None:
        """Nobody reads from a member that is about to be replaced: if it opens anew in the same process, what it has
        shared goes."""
        old = self._members.get(name)
        if old is not None and old.state.public == "live":
            async with self._membership_lock:
                if old.state.public == "live":
                    old.apply("replace")
                # Lost ones too: their processes may live, and map what is about to be freed.
                lost = [other for other in self._members.values() if other.state.public != "live"]
                unlinked = self._opener.unlink(self._agreement, lost, self._close_timeout_s)
                await asyncio.gather(self._relink(self._free()), unlinked)

    def _free(self) -> list[Member]:
        return [member for member in self._members.values() if member.state is ReplicaState.LIVE]

    def _live(self) -> list[Member]:
        """Whoever need not be replaced."""
        return [member for member in self._members.values() if member.state.public == "live"]

    async def _relink(self, members: Sequence[Member] | None = None) -> None:
        """After a change of membership; `members` only, as if there were no others, if they are given. Links only save
        time: whoever misses them reads from the learners in the end, so a failure is logged, and the next sync tries
        again. A leased one gets none, and is not waited for: it reads nothing before the end of its lease."""
        is_whole = members is None
        was_linked, self._is_linked = self._is_linked, False
        try:
            together = self._free() if members is None else members
            await self._opener.link(self._opened(), together, self._clock() + deadlines.LINK_S)
            self._is_linked = is_whole or was_linked
        except (WeightSyncError, TimeoutError) as error:
            log.warning("not every worker learned whom to read from: %s", error)
        if is_whole:
            leased = [member for member in self._members.values() if member.state is ReplicaState.HELD]
            await self._opener.unlink(self._agreement, leased, self._close_timeout_s)

    async def _bring(
        self, members: Sequence[Member], pin: VersionPin, deadline: float
    ) -> list[ReplicaSync | BaseException]:
        """Of each member, how it took the version. If the learners cannot hold it, that is no member's failure."""
        found: dict[str, ReplicaSync | BaseException] = {m.name: o for m in members if (o := m.result_of(pin.version))}
        lacking = [member for member in members if member.name not in found]
        commit_slots = asyncio.Semaphore(max(1, len(members) // 2) if self._options.rolling else len(members))
        try:
            for member in lacking:
                await pin.hold(member.name, deadline - self._clock())
        except (WeightSyncError, TimeoutError) as error:
            for member in lacking:
                pin.release(member.name)
            return [found.get(member.name, error) for member in members]
        calls = (member.bring(pin, deadline=deadline, commit_slots=commit_slots) for member in lacking)
        results = await asyncio.gather(*calls, return_exceptions=True)
        found |= {member.name: result for member, result in zip(lacking, results, strict=True)}
        return [found[member.name] for member in members]

    def _pin_of(self, version: int) -> VersionPin:
        """Shared by all that hold the version: the end of one must not unpin it for another."""
        if self._pin is None or self._pin.version != version:
            ask = partial(self._opener.on_learners, self._opened())
            self._pin = VersionPin(ask, version, clock=self._clock)
        return self._pin

    async def self_test(self) -> None:
        """Compare, run by run, the live parameters of every live replica with the learners' packed bytes.

        Raises:
            DigestMismatch: names replica, worker and parameters that differ.
            WeightSyncError: nothing was synced yet.
        """
        plan = self._opened().plan
        if not self._published:
            raise WeightSyncError("nothing was published yet; publish and sync a version first")
        timeout_s, pin = self._options.timeout_s, self._pin_of(max(self._published))
        live, version = self._live(), pin.version
        await pin.hold("self-test", timeout_s)
        try:
            answering_s = timeout_s + deadlines.ANSWER_S
            answers = await self._opener.on_publishers("ws_digests", version, timeout_s, timeout_s=answering_s)
            packed = {d.rank: d.by_worker for d in (decode(answer, PublishedDigests) for answer in answers)}
            for member in live:
                for worker, reply in enumerate(await member.handle.call("ws_digests", timeout_s=timeout_s)):
                    party = f"{member.name}/{worker}"
                    held = open_reply(reply, RunDigests, party=party)
                    if held.version != version:
                        raise WeightSyncError(
                            f"{party} holds version {held.version}, not {version}; sync before the test"
                        )
                    if wrong := _differing_params(plan.pull(worker), held, packed):
                        names = ", ".join(wrong)
                        raise DigestMismatch(f"{party} differs from the learner in {names} at version {version}")
        finally:
            pin.release("self-test")

    @asynccontextmanager
    async def freeze(self, replica: str) -> AsyncIterator[int | None]:
        """Keep a replica at its version: its commits wait until the block ends. Yields that version.

        The wait is not counted against a sync's deadline.
        """
        member = self._members[replica]
        async with member.commit_lock:
            yield member.live_version

    @asynccontextmanager
    async def lease(
        self, replica: str, *, before_skipped: Callable[[], Awaitable[None]] = nothing
    ) -> AsyncIterator[int | None]:
        """As `freeze`, but syncs skip the replica while others are live, and wait before they begin while none is.
        Waits for a sync that is under way, which would otherwise wait for the end of the block.

        When the block ends in order, the replica gets the newest version; if it cannot take it, it is lost as after a
        failed sync, and nothing is raised.

        Args:
            before_skipped: awaited once, before the first sync that skips the replica.

        Raises:
            KeyError: no such member.
        """
        member = await self._begin_lease(replica, before_skipped)
        try:
            async with member.commit_lock:
                yield member.live_version
        except (asyncio.CancelledError, GeneratorExit):
            member.end_lease(before_skipped)
            self._is_linked = False  # the next sync takes it along
            raise
        except BaseException:
            await self._end_lease(member, before_skipped)
            raise
        await self._end_lease(member, before_skipped)

    async def _begin_lease(self, replica: str, before_skipped: Callable[[], Awaitable[None]]) -> Member:
        # All under the lock: a sync that waited for it longer takes the replica along, and everybody knows.
        async with self._membership_lock:
            member = self._members[replica]
            member.begin_lease(before_skipped)
            try:
                await self._relink()  # nobody is to read from a replica that gets nothing
            except BaseException:
                member.end_lease(before_skipped)
                raise
            return member

    async def _end_lease(self, member: Member, before_skipped: Callable[[], Awaitable[None]]) -> None:
        member.end_lease(before_skipped)
        async with self._membership_lock:
            if member.state is not ReplicaState.LIVE:
                return
            await self._relink([member])  # alone: its neighbours may not have the newest version yet
            try:
                await self._catch_up(member, self._clock() + self._options.timeout_s)
            except (WeightSyncError, TimeoutError) as error:
                if member.state is ReplicaState.LIVE:
                    member.apply("lose")
                log.warning("%s is lost after its lease: %s", member.name, error)
            await self._relink()  # with it, if it is still there

    async def close(self) -> None:
        """Close every party that still answers, whoever maps memory before those that own it. Idempotent."""
        agreement, self._agreement = self._agreement, None
        await self._close_parties(agreement)

    async def _close_parties(self, agreement: Agreement | None) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            await pin.close()
        members = list(self._members.values())
        await self._opener.close(agreement, members, self._close_timeout_s)

    @property
    def _close_timeout_s(self) -> float:
        return min(deadlines.CLOSE_S, self._options.timeout_s)

    def _require_current(self, agreement: Agreement, name: str) -> None:
        """
        Raises:
            WeightSyncError: weight sync was closed, or opened again, while this replica joined.
        """
        if self._agreement is not agreement:
            raise WeightSyncError(f"weight sync was closed or opened again while {name} joined; join again")

    def _opened(self) -> Agreement:
        if self._agreement is None:
            raise WeightSyncError("weight sync is not open; call open first")
        return self._agreement
