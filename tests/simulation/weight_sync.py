"""What the real `SyncCoordinator` talks to in a simulation: one learner's slots, workers' control lines, engine hosts.

    SyncCoordinator ──ws_publish, pin, unpin──> Learner (the real SlotTable)
          │   └────── prefetch ──> Lines ──── is it whole? ──────┘
          └────────── commit ──> Host ──> ScriptedReplica

No bytes move; what is held, pinned, written over and missed is as it would be.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from weight_sync.control.coordinator import SyncCoordinator, SyncOptions
from weight_sync.errors import PullTimeout, VersionUnavailable
from weight_sync.messages import (
    CommitResult,
    Ok,
    PackReport,
    Pin,
    Pinned,
    PrefetchRequest,
    PullReport,
    Reply,
    Unpin,
    encode,
)
from weight_sync.publish.slots import SlotTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.scripted_replica import ScriptedReplica
    from tests.simulation.fleet import Fleet
    from weight_sync.control.members import Member

TIMEOUT_S = 100_000.0
"""Of a sync: slow ones are no failures here."""
IN_TURNS_S = 500.0
"""Of a sync for which everybody waits; a replica that is slower is lost."""
LOOK_S = 0.5
"""Between two looks for a free slot."""


def now() -> float:
    return asyncio.get_running_loop().time()


class Learner:
    """One rank that packs into the real table of slots."""

    rank = 0

    def __init__(self, fleet: Fleet) -> None:
        self.slots = SlotTable(fleet.plan.num_arena_slots, clock=now)
        self.num_missing = 0
        """Versions that somebody asked for too late."""
        self._fleet = fleet
        self._is_packing = False
        self.num_missing_while_packing = 0

    async def publish(self, version: int) -> list[bytes]:
        while (slot := self.slots.try_begin(version)) is None:
            await asyncio.sleep(LOOK_S)
        self._is_packing = True
        await asyncio.sleep(self._fleet.plan.pack_s)
        self.slots.seal(slot)
        self._is_packing = False
        return [encode(PackReport(rank=0, version=version, slot=slot, nbytes=1, wait_s=0.0, pack_s=0.01, counters={}))]

    def pin(self, version: int, ttl_s: float) -> Pinned:
        try:
            return self.slots.pin(version, ttl_s).result(0)
        except VersionUnavailable:
            self.num_missing += 1
            self.num_missing_while_packing += self._is_packing
            raise

    async def call(self, method: str, *_: object, timeout_s: float) -> Any:
        raise AssertionError(f"{method} within {timeout_s} s: publishing goes through `Opener`")


class Host:
    """A replica as the coordinator sees it."""

    def __init__(self, replica: ScriptedReplica, fleet: Fleet) -> None:
        self.name, self.replica = replica.name, replica
        self._fleet = fleet

    async def call(self, method: str, *_: object, timeout_s: float) -> list[Any]:
        if self.replica.is_dead:
            raise ConnectionError(f"{self.name} is dead, {method} within {timeout_s} s came too late")
        return []

    async def commit(self, version: int, method: str, *_: object, timeout_s: float) -> CommitResult:
        assert method == "ws_commit"
        fleet, replica = self._fleet, self.replica
        assert not fleet.is_learner_here, f"{self.name} wakes where the learner is"
        if self.name in fleet.missing:
            fleet.missing.discard(self.name)
            raise ConnectionError(f"{self.name} misses a commit")
        while self.name in fleet.hanging and not replica.is_dead:
            await asyncio.sleep(1.0)
        if replica.is_dead:
            raise ConnectionError(f"{self.name} is dead, its {timeout_s} s are over")
        replica.commit(version, pause_s=fleet.plan.pause_s, gives_back=fleet.plan.aborts_at_commit)
        await asyncio.sleep(fleet.plan.pause_s)
        report = PullReport(
            worker=0,
            version=version,
            pull_s=1.0,
            pull_by_source={0: 1.0},
            attest_s=0.0,
            commit_s=0.0,
            nbytes=1,
            num_runs=1,
            num_retries=0,
            num_stalls=0,
            counters={},
        )
        return CommitResult(results=[encode(Reply(ok=True, value=encode(report)))], pause_s=fleet.plan.pause_s)


class Lines:
    """The control line to the one worker of a replica. Pulls take a Pareto time; now and then one comes to nothing."""

    def __init__(self, host: Host, fleet: Fleet) -> None:
        self._host, self._fleet = host, fleet

    def dial(self, peer: str, address: object) -> str:
        return peer

    def hang_up(self, line: str) -> None: ...

    async def ask_patiently(self, line: str, request: object, kind: type, *, deadline_s: float) -> object:
        if self._host.replica.is_dead:
            await asyncio.sleep(deadline_s)
            raise TimeoutError(f"{self._host.name} is dead")
        match request:
            case PrefetchRequest():
                return await self._pull(request)
            case _:
                raise AssertionError(f"unexpected {request}")

    async def _pull(self, request: PrefetchRequest) -> Ok:
        rng, plan, version = self._fleet.rng, self._fleet.plan, request.version
        fails = rng.random() < plan.failed_pull_frac and version > 0  # a run whose first sync fails has not begun
        await asyncio.sleep(plan.sync_s / 3 * rng.paretovariate(1.5))
        if fails:
            raise PullTimeout(f"version {version} did not arrive")
        for _, slot, generation in request.slots:
            assert self._fleet.learner.slots.holding(slot, generation), "it was written over"
        return Ok()


class Opener:
    """Instead of an `EpochOpener`: everybody agrees at once."""

    def __init__(self, fleet: Fleet) -> None:
        self.epoch = 1
        self._fleet = fleet

    async def open(self, _members: Sequence[Member], _give_up: float) -> Any:
        return SimpleNamespace(plan=SimpleNamespace(root="simulated"))

    async def check_layout(self, _agreement: Any, _member: Member, _give_up: float) -> None: ...

    async def connect(self, _agreement: Any, members: Sequence[Member], _give_up: float) -> None:
        for member in members:
            host: Any = member.handle
            worker: Any = SimpleNamespace(worker=0, commit="staged", address=None)
            lines: Any = Lines(host, self._fleet)
            member.connect((worker,), lines)

    async def link(self, _agreement: Any, _members: Sequence[Member], _give_up: float) -> None: ...

    async def unlink(self, _agreement: Any, _members: Sequence[Member], _within_s: float) -> None: ...

    async def release(self, _agreement: Any, _replica: str, _within_s: float) -> None: ...

    async def on_learners(self, _agreement: Any, request: Any, _kind: type, *, deadline_s: float) -> dict[int, Any]:
        learner = self._fleet.learner
        match request:
            case Pin():
                return {0: learner.pin(request.version, request.ttl_s)}
            case Unpin():
                learner.slots.unpin(request.version)
                return {0: Ok()}
            case _:
                raise AssertionError(f"unexpected {request} within {deadline_s} s")

    async def close(self, _agreement: Any, members: Sequence[Member], _timeout_s: float) -> None:
        for member in members:
            member.disconnect()

    async def on_publishers(self, method: str, version: int, *_: object, timeout_s: float) -> list[bytes]:
        assert method == "ws_publish"
        async with asyncio.timeout(timeout_s):
            return await self._fleet.learner.publish(version)


def make_coordinator(fleet: Fleet) -> SyncCoordinator:
    in_turns = fleet.plan.shares_devices
    coordinator = SyncCoordinator(
        [fleet.learner],
        [Host(replica, fleet) for replica in fleet.replicas.values()],
        options=SyncOptions(timeout_s=IN_TURNS_S if in_turns else TIMEOUT_S, rolling=not in_turns),
        clock=asyncio.get_running_loop().time,
    )
    anything: Any = coordinator
    anything._opener = Opener(fleet)
    return coordinator
