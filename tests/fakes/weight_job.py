"""A job of weight sync whose parties (learner ranks, engine replicas, a coordinator) are processes of `sync_world`.

A party's `lines[0]` is the test's, which looks at it while a call of a coordinator hangs on another line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from rollout.engine.weight_commit import EngineGate
from tests.fakes.process_life import wait_until
from tests.fakes.processes import Child, Line
from tests.fakes.protocol_traps import Trapped
from tests.fakes.sync_world import LocalPublisher, LocalReplica, expected_engine, full_weights
from weight_sync.control.coordinator import SyncCoordinator
from weight_sync.control.epoch import SyncOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
    from multiprocessing.connection import Connection

    from tests.fakes.protocol_traps import State
    from weight_sync.messages import CommitResult

POOL_SIZE = 8
"""As many calls of workers may be under way in a replica."""


class Condition(NamedTuple):
    """What a test sees of a replica."""

    weights: int | None
    """Seed of the weights that every worker holds; None if none of those asked for, or a mixture."""
    is_paused: bool
    is_dirty: bool
    live_versions: tuple[int | None, ...]
    is_given_up: bool
    """By the watchdog."""


# In their processes


class Party(Trapped):
    def settle(self, node: str, host: str) -> None:
        """From now on this process is on `node`, reached at `host`: a loopback address for every node."""
        os.environ |= {"TANDEM_NODE": node, "TANDEM_HOST": host}


class LearnerParty(LocalPublisher, Party):
    def __init__(self, rank: int, num_ranks: int) -> None:
        Party.__init__(self)
        LocalPublisher.__init__(self, rank, num_ranks, full_weights(0))

    def train(self, seed: int) -> None:
        """Stands for an optimizer step."""
        self.full = full_weights(seed)

    def see_sent(self) -> dict[str, int]:
        """Receiver -> orders to send that were carried out, once none is under way: one counts after its transfer."""
        epoch = self.publisher._epoch
        pairs = {} if epoch is None else dict(epoch.end._senders._pairs)
        for pair in pairs.values():
            wait_until(
                lambda pair=pair: pair.state().error or pair.state().num_sent >= pair._num_ordered,
                within_s=10.0,
                what="an order to send is still under way",
            )
        return {peer: pair.state().num_sent for peer, pair in pairs.items()}

    def see_slot(self) -> tuple[int | None, str]:
        """The version in slot 0, and the state of that."""
        epoch = self.publisher._epoch
        assert epoch is not None
        slot = epoch.table.slots[0]
        return slot.version, slot.state.value

    def ws_open(self, request: bytes) -> bytes:
        answer = super().ws_open(request)
        self.reach("opened")
        return answer

    def ws_publish(self, version: int, deadline_s: float) -> bytes:
        answer = super().ws_publish(version, deadline_s)
        self.reach("sealed")
        return answer

    def close(self) -> None:
        self.ws_close()


class Looped(Party):
    """Has an event loop in a thread, so that a hanging call blocks no look from outside."""

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="party-loop", daemon=True).start()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


class ReplicaParty(Looped):
    """A replica with all its workers, under a watchdog."""

    def __init__(self, name: str, num_workers: int, pause_limit_s: float) -> None:
        super().__init__()
        self._loop.set_default_executor(_whole_pool(POOL_SIZE))
        self.replica = LocalReplica(name, num_workers)
        self._is_ended = False
        self._gate = EngineGate(resume=self._resume, give_up=self._give_up, pause_limit_s=pause_limit_s)

    def call(self, method: str, args: tuple[Any, ...], timeout_s: float) -> list[bytes]:
        answer = self._run(self.replica.call(method, *args, timeout_s=timeout_s))
        if method == "ws_open":
            self.reach("opened")
        return answer

    def commit(self, version: int, method: str, args: tuple[Any, ...], timeout_s: float) -> CommitResult:
        self.is_committing = True
        try:
            return self._run(self._commit(version, method, args, timeout_s))
        finally:
            self.is_committing = False

    async def _commit(self, version: int, method: str, args: tuple[Any, ...], timeout_s: float) -> CommitResult:
        async with self._gate.closed(), self._gate.pause():
            try:
                return await self.replica.commit(version, method, *args, timeout_s=timeout_s)
            finally:
                self._gate.outcome = "dirty" if self.replica.is_paused else "ok"

    async def _resume(self) -> None: ...

    def _give_up(self, reason: str) -> None:
        """A mixture must not generate: an engine reports that it is dead instead."""
        self._is_ended = True

    def see_condition(self, seeds: Iterable[int]) -> Condition:
        receivers = self.replica.receivers
        return Condition(
            weights=next((seed for seed in seeds if self._holds(seed)), None),
            is_paused=self.replica.is_paused and not self._is_ended,
            is_dirty=any(receiver.is_dirty for receiver in receivers),
            live_versions=tuple(receiver.live_version for receiver in receivers),
            is_given_up=self._is_ended,
        )

    def _holds(self, seed: int) -> bool:
        full, models = full_weights(seed), self.replica.models
        return all(
            torch.equal(model.get_parameter(name), expected)
            for worker, model in enumerate(models)
            for name, expected in expected_engine(full, worker=worker, num_workers=len(models)).items()
        )

    def see_is_committing(self) -> bool:
        return self.is_committing

    def see_transports(self) -> list[dict[int, str]]:
        """Of each worker: learner rank -> how its slots are read when they are read directly."""
        return [receiver._epoch.transports for receiver in self.replica.receivers if receiver._epoch is not None]

    def see_counters(self) -> list[dict[str, int]]:
        return [receiver.counters() for receiver in self.replica.receivers]

    def close(self) -> None:
        for receiver in self.replica.receivers:
            receiver.close()


def _whole_pool(size: int) -> ThreadPoolExecutor:
    """A pool whose threads all run already: otherwise chance decides when one more is started."""
    pool, everybody = ThreadPoolExecutor(size, thread_name_prefix="engine-pool"), threading.Barrier(size)
    list(pool.map(lambda _: everybody.wait(20.0), range(size)))
    return pool


class CoordinatorParty(Looped):
    """Its parties do not need it to survive."""

    def __init__(
        self, learners: Sequence[Connection], replicas: Sequence[tuple[str, Connection]], options: SyncOptions
    ) -> None:
        super().__init__()
        self._coordinator = SyncCoordinator(
            [LearnerHandle(rank, Line(f"learner {rank}", connection)) for rank, connection in enumerate(learners)],
            [ReplicaHandle(name, Line(name, connection)) for name, connection in replicas],
            options=options,
        )

    def call(self, method: str, *args: object) -> Any:
        """One of the coordinator's coroutines."""
        return self._run(getattr(self._coordinator, method)(*args))

    def hurry(self, timeout_s: float) -> None:
        hurry(self._coordinator, timeout_s)

    def see_members(self) -> dict[str, str]:
        return dict(self._coordinator.members)

    def close(self) -> None:
        """The parties are the test's."""


def hurry(coordinator: SyncCoordinator, timeout_s: float) -> None:
    """From here on an open, a publish or a sync has so long."""
    coordinator._options = msgspec.structs.replace(coordinator._options, timeout_s=timeout_s)


# Seen from the test


class LearnerHandle:
    """A `PublisherHandle` over one line."""

    def __init__(self, rank: int, line: Line) -> None:
        self.rank, self._line = rank, line

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        return await self._line.ask_async(method, *args, timeout_s=timeout_s)


class ReplicaHandle:
    def __init__(self, name: str, line: Line) -> None:
        self.name, self._line = name, line

    async def call(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        return await self._line.ask_async("call", method, args, timeout_s, timeout_s=timeout_s)

    async def commit(self, version: int, method: str, *args: object, timeout_s: float) -> CommitResult:
        return await self._line.ask_async("commit", version, method, args, timeout_s, timeout_s=timeout_s)


class PartyProcess(Child):
    """`lines[1]` is for a coordinator of the test, `lines[2]` for one in a process."""

    def __init__(self, name: str, build: type[Party], *args: object) -> None:
        super().__init__(name, build, *args, num_lines=3)
        self._trappers: list[PartyProcess] = []

    def arm(self, state: State, number: int, *, target: PartyProcess | None = None) -> None:
        """When this process reaches `state`, signal `number` goes to `target` (default: itself)."""
        if target is not None:
            target._trappers.append(self)
        self.ask("see_trap", state, number, None if target is None else target.pid)

    def wake(self) -> None:
        """SIGCONT, once the process whose trap stopped this one knows that it did."""
        for trapper in self._trappers:
            trapper.ask("see_trap_closed")
        self.signal(signal.SIGCONT)


class LearnerProcess(PartyProcess):
    """A `PublisherHandle`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(f"learner {rank}", LearnerParty, rank, num_ranks)
        self.rank = rank
        self.call = LearnerHandle(rank, self.lines[1]).call


class ReplicaProcess(PartyProcess):
    def __init__(self, name: str, num_workers: int = 1, *, pause_limit_s: float = 60.0) -> None:
        super().__init__(name, ReplicaParty, name, num_workers, pause_limit_s)
        self.handle = ReplicaHandle(name, self.lines[1])

    def condition(self, *seeds: int) -> Condition:
        return self.ask("see_condition", seeds)


class CoordinatorProcess(PartyProcess):
    """Takes the last line of every party."""

    def __init__(
        self, learners: Sequence[LearnerProcess], replicas: Sequence[ReplicaProcess], options: SyncOptions
    ) -> None:
        super().__init__(
            "coordinator",
            CoordinatorParty,
            [learner.lines[-1].connection for learner in learners],
            [(replica.name, replica.lines[-1].connection) for replica in replicas],
            options,
        )
        # Wait until it has them, then let go of ours: a party then sees when its coordinator is gone.
        self.ask("see_members")
        for party in (*learners, *replicas):
            party.lines[-1].close()

    def call(self, method: str, *args: object) -> Any:
        return self.ask("call", method, *args, timeout_s=60.0)


class WeightJob:
    """`step(v)` trains to the weights of seed v, unless another seed is given. `options` are those of `SyncOptions`."""

    def __init__(
        self,
        *,
        num_learners: int = 2,
        names: Sequence[str] = ("r0", "r1"),
        num_workers: int = 1,
        pause_limit_s: float = 60.0,
        timeout_s: float = 20.0,
        **options: Any,
    ) -> None:
        self.learners = [LearnerProcess(rank, num_learners) for rank in range(num_learners)]
        self.replicas = [ReplicaProcess(name, num_workers, pause_limit_s=pause_limit_s) for name in names]
        self.options = SyncOptions(timeout_s=timeout_s, **options)
        self.others: list[PartyProcess] = []
        for party in self.parties:
            party.ask("see_vitals")  # it runs: starting it is no part of any deadline
        self.coordinator = self.new_coordinator(self.replicas)

    @property
    def parties(self) -> list[PartyProcess]:
        return [*self.learners, *self.replicas, *self.others]

    def new_coordinator(self, replicas: Sequence[ReplicaProcess]) -> SyncCoordinator:
        return SyncCoordinator(self.learners, [replica.handle for replica in replicas], options=self.options)

    def train(self, seed: int) -> None:
        for learner in self.learners:
            learner.ask("train", seed)

    async def publish(self, version: int, *, seed: int | None = None) -> None:
        self.train(version if seed is None else seed)
        await self.coordinator.publish(version)

    async def step(self, version: int, *, seed: int | None = None) -> None:
        await self.publish(version, seed=seed)
        await self.coordinator.sync(version)

    def weights(self, seed: int) -> list[int | None]:
        """Of each replica: `seed` if that is what it holds."""
        return [replica.condition(seed).weights for replica in self.replicas]

    async def close(self) -> None:
        for party in self.parties:
            if party.is_gone_or_stopped():
                party.kill()
        await self.coordinator.close()
        for party in self.parties:
            party.close()


@contextlib.asynccontextmanager
async def opened_job(*, steps: int = 0, **shape: Any) -> AsyncIterator[WeightJob]:
    """Open, after so many steps."""
    job = WeightJob(**shape)
    try:
        await job.coordinator.open()
        for version in range(1, steps + 1):
            await job.step(version)
        yield job
    finally:
        await job.close()
