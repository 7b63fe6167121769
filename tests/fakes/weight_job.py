"""Learners and replicas of weight sync, each in a process of its own, with a coordinator here."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tests.fakes.publisher_process import PublisherProcess
from tests.fakes.replica_process import Patience, ReplicaProcess
from weight_sync.control.coordinator import SyncCoordinator, SyncOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.fakes.party_process import PartyProcess


class WeightJob:
    """`step(v)` trains to the weights of seed v, unless another seed is given. `options` are those of `SyncOptions`."""

    def __init__(
        self,
        *,
        num_learners: int = 2,
        names: Sequence[str] = ("r0", "r1"),
        num_workers: int = 1,
        patience: Patience | None = None,
        timeout_s: float = 20.0,
        **options: Any,
    ) -> None:
        self.learners = [PublisherProcess(rank, num_learners) for rank in range(num_learners)]
        self.replicas = [ReplicaProcess(name, num_workers, patience=patience) for name in names]
        self.options = SyncOptions(timeout_s=timeout_s, **options)
        self.others: list[PartyProcess] = []
        for party in self.parties:
            party.vitals()  # it runs: starting it is no part of any deadline
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
