"""What a simulation is played with: the plan of a run, and the replicas and losses that follow from it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fakes.local_actor import LocalActor
from tests.fakes.scripted_replica import ScriptedReplica, Workload
from tests.simulation.weight_sync import Host, Learner, make_coordinator
from trainer.learner.actor import OffloadReport
from trainer.learner.step_stats import Metric, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.world import LocalWorker
    from trainer.data.batch import TrainBatch


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
    pack_s: float = 0.01
    num_arena_slots: int = 2
    sync_s: float = 1.0
    """Mean of the Pareto time, with shape 1.5, of a replica's pull: now and then one is very slow."""
    failed_pull_frac: float = 0.0
    """Of the pulls: nothing arrives, and the replica has one more try."""
    pause_s: float = 0.05
    aborts_at_commit: bool = False
    shares_devices: bool = False
    """Learner and replicas take turns (`mode=colocated`)."""
    move_s: float = 0.5
    """To bring the learner's memory to shared devices, and to take it away."""
    death_every_s: float = 0.0
    """Mean time between two losses of a replica, by death, silence or a missed commit; 0 for none."""
    all_die_frac: float = 0.0
    """Of the losses: all replicas die at once. Without it the last one is spared."""
    worker_death_every_s: float = 0.0
    """Mean time between two deaths of a rollout worker; 0 for none."""
    restart_s: float = 30.0
    """Of a replica, and of a rollout worker."""
    max_restarts: int = 1_000_000
    reward_error_frac: float = 0.0
    """Of the rewards: the trajectory fails."""
    group_error_frac: float = 0.0
    """Of the rewards: something raises that fails the whole group."""
    dynamic_sampling: bool = False
    max_retries: int = 2
    most_requests: int = 0
    """Per replica and worker, adapted to the load; 0 for no limit."""
    eval_every: int = 0
    """Steps between two evaluations during training; with it, the first and the last version are evaluated too."""
    repack_below: int = 0
    """Replicas with fewer requests hand them over; 0 for never."""
    seed: int = 0

    @property
    def num_slots(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


class Fleet:
    """Replicas, the weights they hold and how they are lost; stands in for the learner."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.live = 0
        """The version that all live replicas have."""
        self.num_lost: Counter[str] = Counter()
        self.replicas = {f"replica_{i}": self._new(f"replica_{i}") for i in range(plan.num_replicas)}
        self.engines = {name: LocalActor(replica) for name, replica in self.replicas.items()}
        self.num_restarts: Counter[str] = Counter()
        self.missing: set[str] = set()
        """Replicas that will miss their next commit."""
        self.hanging: set[str] = set()
        self.is_learner_here = False
        """On devices that it shares."""
        self.learner = Learner(self)
        self.coordinator = make_coordinator(self)

    @property
    def states(self) -> dict[str, str]:
        return dict(self.coordinator.members)

    def _new(self, name: str) -> ScriptedReplica:
        return ScriptedReplica(name, workload=self.plan.workload, version=self.live, seed=self.rng.getrandbits(32))

    # as LearnerGroup
    flops = None
    shares_prefix = False

    @property
    def max_tokens_per_micro_batch(self) -> int:
        return 64 * self.plan.max_response_tokens

    async def onload(self) -> list[OffloadReport]:
        assert not self.awake, f"{self.awake} and the learner are on one device"
        return await self._move(is_here=True)

    async def offload(self) -> list[OffloadReport]:
        return await self._move(is_here=False)

    async def _move(self, *, is_here: bool) -> list[OffloadReport]:
        await asyncio.sleep(self.plan.move_s)
        self.is_learner_here = is_here
        return [OffloadReport(nbytes=1, seconds=self.plan.move_s, free_bytes=1, total_bytes=1)]

    @property
    def awake(self) -> list[str]:
        """Replicas that have their memory."""
        return [name for name, replica in self.replicas.items() if not (replica.is_dead or replica.is_asleep)]

    async def train_step(self, batch: TrainBatch, *, version: int) -> StepResult:
        assert self.is_learner_here == self.plan.shares_devices
        assert not (self.plan.shares_devices and self.awake), f"{self.awake} and the learner are on one device"
        await asyncio.sleep(self.rng.expovariate(1 / self.plan.train_s) if self.plan.train_s else 0.0)
        return StepResult(
            step=batch.step,
            metrics={"loss": Metric(sum=0.5), "grad_norm": Metric(sum=1.0)},
            seconds={"forward": 0.3, "backward": 0.5, "optimizer": 0.2, "step": 1.0},
        )

    async def restart(self, name: str) -> int | None:
        """The old engine ends, a new one joins with the newest weights."""
        self.replicas[name].die("it is being replaced")
        await asyncio.sleep(self.plan.restart_s)
        assert not self.is_learner_here, f"{name} starts where the learner is"
        self.hanging.discard(name)
        self.missing.discard(name)
        replica = self._new(name)
        version = await self.coordinator.join(Host(replica, self))
        assert version == replica.version
        self.replicas[name], self.engines[name] = replica, LocalActor(replica)
        self.num_restarts[name] += 1
        return version

    async def lose_replicas(self) -> None:
        """Now and then one is lost, or all of them."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.death_every_s))
            sound = [n for n, r in self.replicas.items() if self._is_sound(n, r)]
            if self.rng.random() < self.plan.all_die_frac:
                self.num_lost["all"] += 1
                for replica in self.replicas.values():
                    replica.die("the plan takes all of them")
            elif len(sound) > 1:
                self._lose(self.rng.choice(sound), self.rng.choice(("death", "silence", "missed commit")))

    def _lose(self, name: str, how: str) -> None:
        self.num_lost[how] += 1
        replica = self.replicas[name]
        match how:
            case "death":
                replica.die("the plan says so")
            case "silence":
                replica.hang()
                self.hanging.add(name)
                asyncio.get_running_loop().call_later(60.0, replica.die, "it was silent for a minute")
            case _:
                self.missing.add(name)

    async def lose_workers(self, workers: Sequence[LocalWorker]) -> None:
        """Now and then one dies, also the last."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / self.plan.worker_death_every_s))
            worker = self.rng.choice(workers)
            if not worker.is_dead:
                self.num_lost["worker"] += 1
                worker.die()

    def _is_sound(self, name: str, replica: ScriptedReplica) -> bool:
        is_well = not replica.is_dead and name not in self.missing | self.hanging
        return self.states[name] == "live" and is_well
