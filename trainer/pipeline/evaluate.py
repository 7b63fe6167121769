"""Held-out evaluation: on one replica, of exactly one policy version, beside training.

While it lasts, the replica is leased. With other replicas that are live, commits pass it by and no new training request
goes to it: it would sample with weights that are older than its group may have. What it has it finishes, and when the
evaluation ends it takes the newest weights and is back. The only replica does both: training goes on there, with the
commits waiting, and so with the staleness bound as the limit of how long.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.engine.router import NoReplica
from rollout.types import Prompt, SamplingParams, Trajectory
from trainer.pipeline.state import Evaluation

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

    from trainer.config.schema import RunConfig
    from trainer.config.schema.trainer import TrainerConfig
    from trainer.pipeline.workers import WorkerPool
    from weight_sync.coordinator import SyncCoordinator

log = logging.getLogger(__name__)

Freeze = Callable[[str], AbstractAsyncContextManager[Any]]
"""Keeps a replica at its version while the block runs, and yields that version."""
Generate = Callable[[Sequence[Prompt], SamplingParams, str], Any]
"""(prompts, sampling, replica) -> awaitable of one trajectory per prompt, in order."""


class Evaluator:
    """Decides when an evaluation is due, and evaluates on a live replica that no other evaluation has."""

    def __init__(
        self,
        cfg: RunConfig,
        prompts: Sequence[Prompt],
        *,
        freeze: Freeze,
        generate: Generate,
        replicas: Callable[[], Sequence[str]],
    ) -> None:
        self._cfg = cfg.trainer
        self._prompts = [prompt for prompt in prompts for _ in range(cfg.trainer.eval_samples)]
        self._params = SamplingParams(
            max_tokens=cfg.rollout.max_response_tokens, temperature=cfg.trainer.eval_temperature
        )
        self._freeze, self._generate, self._replicas = freeze, generate, replicas
        self._last_version = -1
        self._in_use: set[str] = set()

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one.

        Not while one is running: the next live version after it has its turn.
        """
        every = self._cfg.eval_every
        if not self._prompts or not every or version <= self._last_version or self._in_use:
            return False
        return version // every > max(self._last_version, 0) // every

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    @property
    def last_version(self) -> int:
        """-1 before the first evaluation."""
        return self._last_version

    async def run(self, entered: asyncio.Event) -> Evaluation:
        """Evaluate the version that the replica has. Sets `entered` once no commit can change it any more.

        One whose replica dies begins again on another, with the version that is live there.

        Consumes: the held-out prompts. Waits for: the replica's commit lock and its answers. Unblocked by: the
        request deadline of the rollout worker.

        Raises:
            NoReplica: no live replica is left to evaluate on.
        """
        started = time.monotonic()
        lost: set[str] = set()
        try:
            while True:
                replica = self._choose(lost)
                try:
                    trajectories, version = await self._on(replica, entered)
                    break
                except NoReplica as error:
                    lost.add(replica)
                    if lost.issuperset(self._replicas()):
                        raise
                    log.warning("the evaluation begins again on another replica: %s", error)
        finally:
            entered.set()  # whoever waits for it must not outlive a failure
        check_one_version(trajectories, version)
        return summarise(trajectories, self._cfg, version=version, time_s=time.monotonic() - started)

    def _choose(self, lost: set[str]) -> str:
        """A live replica that is not lost; of these, if possible, one that no other evaluation has."""
        live = [name for name in self._replicas() if name not in lost]
        return next((name for name in live if name not in self._in_use), live[0])

    async def _on(self, replica: str, entered: asyncio.Event) -> tuple[list[Trajectory], int]:
        """All answers of one replica, and the version that gave them."""
        self._in_use.add(replica)
        try:
            async with self._freeze(replica) as version:
                self._last_version = version
                entered.set()
                return await self._generate(self._prompts, self._params, replica), version
        finally:
            self._in_use.discard(replica)


@contextlib.asynccontextmanager
async def leased(name: str, *, coordinator: SyncCoordinator, workers: WorkerPool) -> AsyncIterator[int | None]:
    """Keep a replica at its version for an evaluation, as the module says. Yields that version."""
    if sum(state == "live" for state in coordinator.members.values()) == 1:
        async with coordinator.freeze(name) as version:
            yield version
        return
    await workers.rest(name)
    try:
        async with coordinator.lease(name) as version:
            yield version
    finally:
        # One that did not catch up stays out; whoever restarts it lets it in again.
        if coordinator.members.get(name) == "live":
            await workers.resume(name)


def check_one_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raises RuntimeError if any token came from another version: the result would belong to no policy."""
    seen = {v for trajectory in trajectories for v in trajectory.versions}
    if seen - {version}:
        raise RuntimeError(f"evaluation of version {version} holds tokens of versions {sorted(seen)}; freeze is broken")


def summarise(trajectories: Sequence[Trajectory], cfg: TrainerConfig, *, version: int, time_s: float) -> Evaluation:
    """Means over all answers; those to one prompt are `cfg.eval_samples` in a row. A failed answer counts as reward 0;
    a truncated one as it was rewarded."""
    samples = cfg.eval_samples
    rewards = np.array([0.0 if t.status == "failed" else t.total_reward for t in trajectories], np.float64)
    passed_PS = (rewards >= cfg.eval_pass_reward).reshape(-1, samples)  # P prompts, S samples
    passed_PS &= np.array([t.status != "failed" for t in trajectories]).reshape(-1, samples)
    k = samples if cfg.eval_pass_k is None else cfg.eval_pass_k
    num_passed_P = passed_PS.sum(axis=1)
    return Evaluation(
        version=version,
        accuracy=float(np.mean(rewards)),
        num_prompts=len(num_passed_P),
        num_samples=samples,
        pass_at={k: float(np.mean([pass_at_k(samples, int(c), k) for c in num_passed_P])) for k in sorted({1, k})},
        tokens_mean=float(np.mean([t.num_generated_tokens for t in trajectories])),
        truncated_frac=float(np.mean([t.status == "truncated" for t in trajectories])),
        failed_frac=float(np.mean([t.status == "failed" for t in trajectories])),
        time_s=time_s,
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate, from `num_samples` answers of which `num_passed` pass, that one of `k` answers passes:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    Raises:
        ValueError: k is not in [1, num_samples], or num_passed not in [0, num_samples].
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= passed <= samples, got k={k}, samples={num_samples}, "
            f"passed={num_passed}"
        )
    # Exact in integers, where a product of fractions rounds.
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
