"""Opens and closes an epoch: describe, record, plan, connect, and release.

    describe (learners) + record (replicas) ─> plan ─> open learners ─> open replicas (prove, map, probe) ─> link

A replica that joins later goes through record, open and link alone; learners and other replicas keep what they have.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from weight_sync import deadlines
from weight_sync.channel import PeerSilent, Switchboard, make_room, make_run_keys
from weight_sync.control.members import gather_all
from weight_sync.errors import PlanMismatch, PublisherLost, PullTimeout, WeightSyncError
from weight_sync.messages import (
    CommitMode,
    LinkRequest,
    Ok,
    OpenPublisher,
    OpenReceiver,
    Ping,
    PublisherInfo,
    PublisherLayout,
    ReceiverInfo,
    RecordedLayout,
    RecordRequest,
    ReplicaLeft,
    decode,
    encode,
    open_reply,
)
from weight_sync.plan.agreement import SharedPlan, share
from weight_sync.plan.planner import build_plan
from weight_sync.plan.routes import Peer, RelayMode, plan_routes
from weight_sync.plan.types import RankShards
from weight_sync.receive.staging import staging_layout
from weight_sync.transports.base import arena_bytes
from weight_sync.transports.pair import PAIR_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

    from weight_sync.channel import Line
    from weight_sync.control.members import Member, PublisherHandle, ReplicaHandle
    from weight_sync.messages import Request
    from weight_sync.plan.types import ParamMeta, Plan, WorkerLayout

R = TypeVar("R")
log = logging.getLogger(__name__)


class SyncOptions(msgspec.Struct, frozen=True, kw_only=True):
    transport: str = "auto"
    commit: CommitMode = "auto"
    num_slots: int = 2
    timeout_s: float = 120.0
    verify: bool = True
    host: str | None = "127.0.0.1"
    """Address that every party binds its control socket to; None lets each take the one that other nodes reach."""
    rolling: bool = True
    """At most half of the replicas commit at a time, so that the others go on generating. False where all of them stand
    still anyway."""
    relay: RelayMode = "auto"
    """Whether replicas hand versions on to each other where they outnumber the learners, or are on other nodes."""


class Agreement(NamedTuple):
    """What all members of an epoch share."""

    plan: SharedPlan
    publishers: tuple[PublisherInfo, ...]
    layout: tuple[bytes, ...]
    """Digests of what the loaders of a replica's workers do, the same for every replica."""


class EpochOpener:
    """Remembers the number of the epoch and the keys of the run; everything else is in the `Agreement` it returns."""

    def __init__(
        self, publishers: Sequence[PublisherHandle], *, options: SyncOptions, clock: Callable[[], float]
    ) -> None:
        self._publishers = tuple(publishers)
        self._options = options
        self._clock = clock
        self._keys = make_run_keys(secrets.token_hex(8))
        self._lines: Switchboard | None = None
        """To the workers and learners of this epoch."""
        self._learners: dict[int, Line] = {}
        self._epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    async def open(self, members: Sequence[Member], deadline: float) -> Agreement:
        """Begin a new epoch: plan, and open the learners. Nobody may map anything of an earlier one.

        Raises:
            PlanMismatch: learner and engine do not fit; nothing was moved.
            TransportUnusable, WeightSyncError: a learner cannot offer its weights.
        """
        self._epoch += 1
        self.hang_up()
        self._lines = Switchboard(self._keys, epoch=self._epoch)
        params, shards = await self._describe(deadline)
        recorded, layout = await self._record(params, members, deadline)
        first = members[0].name
        for name, other in recorded.items():
            if other != recorded[first]:
                raise PlanMismatch(f"replicas {first} and {name} split the model differently; start them alike")

        def plan() -> SharedPlan:
            whole = build_plan(epoch=self._epoch, params=params, shards=shards, workers=layout)
            for line in _memory_lines(whole, self._options):
                log.debug("%s", line)  # before anything is allocated
            return share(whole)

        shared = await asyncio.to_thread(plan)  # seconds for a large model; the loop has other things to do
        publishers = await self._open_publishers(shared, [shard.rank for shard in shards], deadline)
        agreement = Agreement(plan=shared, publishers=publishers, layout=recorded[first])
        self._learners = {info.rank: self._lines.dial(f"learner {info.rank}", info.address) for info in publishers}
        await self.on_learners(agreement, Ping(), Ok, deadline_s=self.left(deadline))
        return agreement

    async def check_layout(self, agreement: Agreement, member: Member, deadline: float) -> None:
        """
        Raises:
            PlanMismatch: a newcomer splits the model differently from the replicas of the epoch.
        """
        recorded, _ = await self._record(agreement.plan.params, [member], deadline, is_layout_known=True)
        if recorded[member.name] != agreement.layout:
            raise PlanMismatch(f"replica {member.name} splits the model differently from the others; start it alike")

    async def connect(self, agreement: Agreement, members: Sequence[Member], deadline: float) -> None:
        """Open the replicas' workers, and a line to each.

        Raises:
            PlanMismatch: a worker agreed to another plan.
            TransportUnusable: a worker cannot reach a learner.
        """
        plan, options = agreement.plan, self._options

        def request(name: str) -> bytes:
            opening = OpenReceiver(
                keys=self._keys,
                epoch=self._epoch,
                plan=plan.for_replica,
                replica=name,
                commit=options.commit,
                verify=options.verify,
                publishers=agreement.publishers,
                deadline_s=self.left(deadline),
                host=options.host,
                relay=options.relay != "off",
            )
            return encode(opening)

        replies = await self._on_replicas(members, "ws_open", request, deadline)
        if self._lines is None:
            raise WeightSyncError("weight sync is not open; call open first")
        num_workers = sum(map(len, replies.values()))
        make_room(num_workers + len(self._publishers), whom=f"{num_workers} workers")
        for member in members:
            parties = enumerate(replies[member.name])
            workers = tuple(open_reply(reply, ReceiverInfo, party=f"{member.name}/{i}") for i, reply in parties)
            for info in workers:
                _check_and_log(info, member.name, plan)
            member.connect(workers, self._lines)

    async def link(self, agreement: Agreement, members: Sequence[Member], deadline: float) -> None:
        """Tell every worker in which order, and from whom, to read its sources.

        Raises:
            WeightSyncError, TimeoutError: a worker did not take its links.
        """
        await self._link(agreement, members, deadline, relay=self._options.relay)

    async def unlink(self, agreement: Agreement | None, members: Sequence[Member], timeout_s: float) -> None:
        """Let each of `members` read from the learners alone: it unmaps the memory of whom it was linked to. Raises
        nothing of theirs; nothing to do without an agreement, which they would be linked by."""
        if agreement is not None:
            deadline = self._clock() + min(deadlines.UNLINK_S, timeout_s)
            telling = self._link(agreement, members, deadline, relay="off")
            await _quietly([telling], "did not unmap what it read from")

    async def _link(
        self, agreement: Agreement, members: Sequence[Member], deadline: float, *, relay: RelayMode
    ) -> None:
        workers = {member.name: member.workers for member in members}
        # Thousands of workers take a while; the loop has other things to do.
        requests = await asyncio.to_thread(_link_requests, agreement, workers, relay)
        num_readable = sum(bool(request.readers) for told in requests.values() for request in told)
        if num_readable:
            num_workers = sum(map(len, workers.values()))
            log.info("replicas hand versions on: %d of %d workers are read by others", num_readable, num_workers)
        if line := _pair_line(workers, requests):
            log.info("%s", line)  # before the first pull builds them

        async def tell(member: Member, index: int, request: LinkRequest) -> None:
            await member.ask(index, request, Ok, deadline_s=self.left(deadline))

        await gather_all(tell(m, index, request) for m in members for index, request in enumerate(requests[m.name]))

    async def on_learners(
        self, agreement: Agreement, request: Request, kind: type[R], *, deadline_s: float
    ) -> dict[int, R]:
        """Ask every learner's control thread, which may take its time to answer. Answers by rank.

        Raises:
            PublisherLost: one is silent.
            PullTimeout: one did not answer within `deadline_s`.
            WeightSyncError: (other) one refused. Every learner was asked all the same.
        """
        lines, ranks = self._lines, [info.rank for info in agreement.publishers]
        if lines is None:
            raise WeightSyncError("weight sync is not open; call open first")
        asking = (lines.ask_patiently(self._learners[rank], request, kind, deadline_s=deadline_s) for rank in ranks)
        try:
            return dict(zip(ranks, await gather_all(asking), strict=True))
        except PeerSilent as error:
            raise PublisherLost(str(error)) from error
        except TimeoutError as error:
            raise PullTimeout(str(error)) from error

    async def release(self, agreement: Agreement | None, replica: str, timeout_s: float) -> None:
        """Let every learner free what it keeps for a replica that left. Raises nothing of theirs."""
        if agreement is not None:
            within_s = min(deadlines.UNLINK_S, timeout_s)
            telling = self.on_learners(agreement, ReplicaLeft(replica=replica), Ok, deadline_s=within_s)
            await _quietly([telling], f"did not hear that {replica} left")

    async def close(self, agreement: Agreement | None, members: Sequence[Member], timeout_s: float) -> None:
        """Close everyone, all steps together within `timeout_s`. `agreement` is what they were linked by, None if they
        were not. Raises nothing of theirs."""
        now = asyncio.get_running_loop().time
        deadline = now() + timeout_s
        least_s = min(deadlines.UNLINK_S, timeout_s / 3)  # of each step, whoever hangs in another
        if len(members) > 1:
            await self.unlink(agreement, members, least_s)
        for member in members:
            member.disconnect()
        self.hang_up()
        replicas = [member.handle for member in members]
        await close_replicas(replicas, timeout_s=max(least_s, deadline - now() - least_s))
        closing = (_close_learner(one, max(least_s, deadline - now())) for one in self._publishers)
        await _quietly(closing, "did not close")

    def hang_up(self) -> None:
        """Close the lines to all workers. Idempotent."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    async def on_publishers(self, method: str, *args: object, timeout_s: float) -> list[bytes]:
        """The answer of every learner rank, in order."""
        calls = (publisher.call(method, *args, timeout_s=timeout_s) for publisher in self._publishers)
        return list(await gather_all(calls))

    def left(self, deadline: float) -> float:
        """
        Raises:
            PullTimeout: nothing.
        """
        left_s = deadline - self._clock()
        if left_s <= 0:
            raise PullTimeout(f"weight sync took longer than weight_sync.timeout_s = {self._options.timeout_s}")
        return left_s

    async def _describe(self, deadline: float) -> tuple[tuple[ParamMeta, ...], list[RankShards]]:
        answers = await self.on_publishers("ws_describe", timeout_s=self.left(deadline))
        return await asyncio.to_thread(_learner_layout, answers)

    async def _record(
        self,
        params: tuple[ParamMeta, ...],
        members: Sequence[Member],
        deadline: float,
        *,
        is_layout_known: bool = False,
    ) -> tuple[dict[str, tuple[bytes, ...]], tuple[WorkerLayout, ...]]:
        """Digests of each replica's layout; and, unless that is known, the layout of the first replica: those of the
        others are to be the same, and there may be hundreds of megabytes of them."""
        told = None if is_layout_known else members[0].name
        requests = {is_whole: encode(RecordRequest(params=params, is_whole=is_whole)) for is_whole in (True, False)}
        replies = await self._on_replicas(members, "ws_record", lambda name: requests[name == told], deadline)

        def read() -> dict[str, list[RecordedLayout]]:
            return {
                name: [open_reply(reply, RecordedLayout, party=f"{name}/{i}") for i, reply in enumerate(answers)]
                for name, answers in replies.items()
            }

        recorded = await asyncio.to_thread(read)
        layout = tuple(worker.layout for worker in recorded.get(told or "", ()) if worker.layout is not None)
        for line in dict.fromkeys(line for worker in layout for line in worker.decisions):
            log.debug("modules of the engines: %s", line)
        return {name: tuple(worker.digest for worker in workers) for name, workers in recorded.items()}, layout

    async def _open_publishers(
        self, plan: SharedPlan, ranks: Sequence[int], deadline: float
    ) -> tuple[PublisherInfo, ...]:
        """`ranks` are those of the publishers."""

        def request(data: bytes) -> bytes:
            opening = OpenPublisher(
                keys=self._keys,
                epoch=self._epoch,
                plan=data,
                transport=self._options.transport,
                num_slots=self._options.num_slots,
                verify=self._options.verify,
                host=self._options.host,
            )
            return encode(opening)

        left_s = self.left(deadline)
        calls = (
            publisher.call("ws_open", request(plan.for_learner[rank]), timeout_s=left_s)
            for publisher, rank in zip(self._publishers, ranks, strict=True)
        )
        return tuple(decode(answer, PublisherInfo) for answer in await gather_all(calls))

    async def _on_replicas(
        self, members: Sequence[Member], method: str, request: Callable[[str], bytes], deadline: float
    ) -> dict[str, list[Any]]:
        left_s = self.left(deadline)
        calls = (member.handle.call(method, request(member.name), timeout_s=left_s) for member in members)
        return {member.name: reply for member, reply in zip(members, await gather_all(calls), strict=True)}


def _link_requests(
    agreement: Agreement, members: Mapping[str, Sequence[ReceiverInfo]], relay: RelayMode
) -> dict[str, list[LinkRequest]]:
    """What each worker of each member is told, in their order."""
    parties = {
        name: [
            Peer(name=f"{name}/{info.worker}", worker=info.worker, node=info.node, relays=info.relay is not None)
            for info in workers
        ]
        for name, workers in members.items()
    }
    everyone = [(f"{name}/{info.worker}", info.relay) for name, workers in members.items() for info in workers]
    handles = {name: relay for name, relay in everyone if relay is not None}
    nodes = {info.rank: info.node for info in agreement.publishers}
    receivers = [party for team in parties.values() for party in team]
    routes = plan_routes(nodes, receivers, agreement.plan.sources, relay=relay)
    readers: dict[str, list[str]] = {name: [] for name in routes}
    for name, route in routes.items():
        for other in route.predecessors:
            readers[other].append(name)

    def request(name: str) -> LinkRequest:
        predecessors = tuple(handles[other] for other in routes[name].predecessors)
        return LinkRequest(stages=routes[name].stages, predecessors=predecessors, readers=tuple(readers[name]))

    return {name: [request(party.name) for party in team] for name, team in parties.items()}


def _pair_line(members: Mapping[str, Sequence[ReceiverInfo]], requests: Mapping[str, Sequence[LinkRequest]]) -> str:
    """What groups of two will take of the devices by these routes; empty if there are none."""
    nbytes: Counter[str] = Counter()
    for name, workers in members.items():
        for info, request in zip(workers, requests[name], strict=True):
            own = f"{name}/{info.worker}"
            direct = [rank for stage in request.stages if not stage.via for rank in stage.ranks]
            givers = [(f"learner {rank}", info.transports[rank]) for rank in direct]
            givers += [
                (giver.owner, next((a.transport for a in giver.arenas if a.transport in PAIR_BYTES), ""))
                for giver in request.predecessors
                if giver.node != info.node
            ]
            for giver, transport in givers:
                for party in (giver, own):
                    nbytes[party] += PAIR_BYTES.get(transport, 0)
    (party, most), total = max(nbytes.items(), key=lambda item: item[1], default=("", 0)), nbytes.total()
    return f"memory of groups of two: {_size(most)} of the device of {party}, {_size(total)} in all" if total else ""


def _check_and_log(info: ReceiverInfo, replica: str, plan: SharedPlan) -> None:
    if info.plan_root != plan.root:
        raise PlanMismatch(f"{replica}/{info.worker} agreed to another plan: {info.plan_root[:12]}")
    ways = ", ".join(f"learner {rank} by {how}" for rank, how in sorted(info.transports.items()))
    log.info(
        "%s/%d: %s; %s; %.1f MB per version, staging buffer %.1f MB",
        replica, info.worker, info.commit, ways, info.pull_bytes / 1e6, info.staging_bytes / 1e6,
    )  # fmt: skip
    for reason in info.reasons:
        log.warning("%s/%d does not read %s", replica, info.worker, reason)


def _learner_layout(answers: Sequence[bytes]) -> tuple[tuple[ParamMeta, ...], list[RankShards]]:
    """
    Raises:
        PlanMismatch: ranks describe different parameters, or rank 0 is missing.
    """
    layouts = [decode(answer, PublisherLayout) for answer in answers]
    first = next((layout for layout in layouts if layout.rank == 0), None)
    if first is None:
        raise PlanMismatch(f"learner rank 0 describes the parameters, got ranks {[x.rank for x in layouts]}")
    for layout in layouts:
        if layout.params_digest != first.params_digest:
            raise PlanMismatch(f"learner ranks {first.rank} and {layout.rank} describe different parameters")
    return first.params, [RankShards.from_table(x.rank, first.params, x.shards) for x in layouts]


def _memory_lines(plan: Plan, options: SyncOptions) -> list[str]:
    """What the parties are about to allocate, once for the whole epoch: per learner rank and per engine worker."""
    arenas = [
        f"rank {pack.rank} {options.num_slots} x {_size(pack.arena_bytes)}, with the probe "
        f"{_size(arena_bytes(pack.arena_bytes, options.num_slots))}"
        for pack in plan.pack
    ]
    match options.commit:
        case "inplace":
            none = "memory of engines: no staging buffer, commits are in place"
            return [f"memory of learners: {'; '.join(arenas)}", none]
        case "staged" | "auto":
            buffers = [f"worker {pull.worker} {_size(staging_layout(pull).nbytes)}" for pull in plan.pull]
            note = "" if options.commit == "staged" else ", if it fits into what is free then"
            return [
                f"memory of learners: {'; '.join(arenas)}",
                f"memory of engines, staging buffer in each replica{note}: {'; '.join(buffers)}",
            ]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


_HANDLE_FIRST_S = 0.05
"""A handle that keeps its own limit has the first word: it knows what to make of a party that is silent."""


async def close_replicas(replicas: Iterable[ReplicaHandle], *, timeout_s: float) -> None:
    """Close replicas that do not read from each other, all at once. Raises nothing of theirs."""
    await _quietly((_close_replica(replica, timeout_s) for replica in replicas), "did not close")


async def _close_replica(replica: ReplicaHandle, timeout_s: float) -> None:
    replies = await _within(timeout_s, replica.call("ws_close", timeout_s=timeout_s), f"replica {replica.name}")
    for worker, reply in enumerate(replies):
        open_reply(reply, type(None), party=f"{replica.name}/{worker}")


async def _close_learner(publisher: PublisherHandle, timeout_s: float) -> None:
    await _within(timeout_s, publisher.call("ws_close", timeout_s=timeout_s), f"learner rank {publisher.rank}")


async def _within(timeout_s: float, call: Coroutine[Any, Any, Any], who: str) -> Any:
    """The result. A handle may wait longer than it was told, for an answer that is on its way; this does not."""
    limit = asyncio.timeout(timeout_s + _HANDLE_FIRST_S)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise  # the party's own
        raise TimeoutError(f"{who} did not answer within {timeout_s:.1f} s") from error


async def _quietly(calls: Iterable[Awaitable[Any]], what: str) -> None:
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, Exception):
            # An error that Ray carried has the real one behind `cause`, and a traceback for a text.
            cause = getattr(result, "cause", result)
            log.warning("a party of weight sync %s: %s: %s", what, type(cause).__name__, cause)
