"""The actors of a measured run: the real rollout worker on scripted replicas, and a learner rank that only looks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollout.processes import rare_collections
from rollout.reward.call import RewardResult
from rollout.worker.actor import RolloutWorkerActor
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.scripted_replica import Counting, ScriptedReplica, Workload
from trainer.learner.step_stats import Metric, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Group, Prompt, RolloutRequest
    from trainer.algorithms.advantages import GroupRewards
    from trainer.data.batch import MicroBatch


class ScriptedWorker(RolloutWorkerActor):
    """Replicas, tokenizer and rewards are arithmetic; the shell, the worker and what travels are real."""

    def __init__(self, spec: WorkerSpec, workload: Workload, *, num_replicas: int) -> None:
        super().__init__(spec, {})
        self._replicas = [
            ScriptedReplica(f"replica_{index}", workload=workload, version=0, seed=spec.seed + index)
            for index in range(num_replicas)
        ]
        self._num_tokens = 0

    async def start(self) -> None:
        self._for_life.enter_context(rare_collections())
        self._started = RolloutWorker(self._spec, self._replicas, tokenizer=Counting(), score=_score)

    async def commit(self, version: int) -> None:
        """All replicas of this worker sample with `version` from now on."""
        for replica in self._replicas:
            replica.commit(version, pause_s=0.0)

    async def run_group(self, item: RolloutRequest) -> Group:
        group = await super().run_group(item)
        self._num_tokens += group.num_generated_tokens
        return group

    async def account(self) -> tuple[float, int]:
        """Processor time of this process in seconds, and generated tokens, so far."""
        return time.process_time(), self._num_tokens


async def _score(_prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float(int(text) % 2))


class ScriptedRank:
    """A learner rank as `LearnerGroup` calls it. Its optimizer step counts the loss tokens that reached it."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        step: int,
        updates: Sequence[tuple[int, int]],
        version: int,
        group_rewards: Sequence[GroupRewards] | None = None,
    ) -> StepResult:
        assert group_rewards is None, "the estimator of the benchmark is finished by the driver"
        self._num_tokens += sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        return StepResult(
            step=step,
            metrics={"loss": Metric(sum=0.5), "grad_norm": Metric(sum=1.0)},
            seconds={"forward": 0.0, "backward": 0.0, "optimizer": 0.0, "step": 0.0},
        )

    def num_tokens(self) -> int:
        """Of all steps so far."""
        return self._num_tokens

    def close(self) -> None:
        """Nothing to leave in order."""
