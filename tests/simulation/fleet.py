"""What a simulation is played with: the plan of a run, and the replicas, commits and losses that follow from it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollout.engine.scripted_replica import ScriptedReplica, Workload
from tests.fakes.scripted_run import sync_report
from trainer.learner.result import Metric, StepResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainer.data.batch import TrainBatch
    from trainer.pipeline.workers import WorkerPool
    from weight_sync.types import SyncReport


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes and fates of one run; times are virtual seconds."""

    num_steps: int = 20
    groups_per_step: int = 4
    max_staleness: int = 1
    group_size: int = 2
    num_replicas: int = 3
    num_workers: int = 1
    max_response_tokens: int = 256
    workload: Workload = field(default_factory=Workload)
    train_s: float = 1.0
    sync_s: float = 1.0
    """Mean of a Pareto time with shape 1.5: now and then a sync is very slow."""
    pause_s: float = 0.05
    aborts_at_commit: bool = False
    death_every_s: float = 0.0
    """Mean time between two losses of a replica, by death, silence or a missed commit; 0 for none."""
    restart_s: float = 30.0
    max_restarts: int = 1_000_000
    reward_error_frac: float = 0.0
    """Of the rewards: the trajectory fails."""
    group_error_frac: float = 0.0
    """Of the rewards: something raises that fails the whole group."""
    filter_zero_variance: bool = False
    max_retries: int = 2
    most_requests: int = 0
    """Per replica and worker, adapted to the load; 0 for no limit."""
    seed: int = 0

    @property
    def num_slots(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


class Fleet:
    """Replicas, the weights they hold and how they are lost; stands in for the sync coordinator and the learner."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.live = 0
        self.num_lost: Counter[str] = Counter()
        self.replicas = {f"replica_{i}": self._new(f"replica_{i}") for i in range(plan.num_replicas)}
        self.states = dict.fromkeys(self.replicas, "live")
        self.num_restarts: Counter[str] = Counter()
        self.missing: set[str] = set()
        """Replicas that will miss their next commit."""
        self._commits = asyncio.Lock()

    def _new(self, name: str) -> ScriptedReplica:
        return ScriptedReplica(name, workload=self.plan.workload, version=self.live, seed=self.rng.getrandbits(32))

    # as LearnerGroup
    async def train_step(self, batch: TrainBatch) -> StepResult:
        await asyncio.sleep(self.rng.expovariate(1 / self.plan.train_s) if self.plan.train_s else 0.0)
        return StepResult(
            step=batch.step,
            metrics={"loss": Metric(sum=0.5), "grad_norm": Metric(sum=1.0)},
            seconds={"forward": 0.3, "backward": 0.5, "optimizer": 0.2, "step": 1.0},
        )

    # as SyncCoordinator
    async def publish(self, _version: int) -> float:
        await asyncio.sleep(0.01)
        return 0.01

    async def sync(self, version: int) -> SyncReport:
        await asyncio.sleep(self.plan.sync_s / 3 * self.rng.paretovariate(1.5))
        async with self._commits:
            for name, replica in self.replicas.items():
                if self.states[name] != "live":
                    continue
                if replica.is_dead or name in self.missing:
                    self.states[name] = "dead" if replica.is_dead else "behind"
                    self.missing.discard(name)
                    continue
                replica.commit(version, pause_s=self.plan.pause_s, gives_back=self.plan.aborts_at_commit)
            self.live = version
            await asyncio.sleep(self.plan.pause_s)
        return sync_report(version)

    async def restart(self, name: str, pool: WorkerPool) -> int:
        """As `compose.replace_engine`: the old engine ends, a new one joins with the newest weights."""
        self.replicas[name].die("it is being replaced")
        await asyncio.sleep(self.plan.restart_s)
        async with self._commits:
            self.replicas[name] = self._new(name)
            self.num_restarts[name] += 1
            self.states[name] = "live"
            await pool.replace(name, self.replicas[name])
        return self.live

    async def lose_replicas(self) -> None:
        """Now and then one is lost, but never the last."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.death_every_s))
            sound = [n for n, r in self.replicas.items() if self._is_sound(n, r)]
            if len(sound) < 2:
                continue
            name, how = self.rng.choice(sound), self.rng.choice(("death", "silence", "missed commit"))
            self.num_lost[how] += 1
            match how:
                case "death":
                    self.replicas[name].die("the plan says so")
                case "silence":
                    self.replicas[name].hang()
                    self.missing.add(name)
                    asyncio.get_running_loop().call_later(60.0, self.replicas[name].die, "it was silent for a minute")
                case _:
                    self.missing.add(name)

    def _is_sound(self, name: str, replica: ScriptedReplica) -> bool:
        return self.states[name] == "live" and not replica.is_dead and name not in self.missing

    @contextlib.asynccontextmanager
    async def freeze(self, _replica: str) -> AsyncIterator[int]:
        async with self._commits:
            yield self.live
