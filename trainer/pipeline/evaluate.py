"""Held-out evaluation: greedy, on one replica, of exactly one policy version, beside training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Prompt, SamplingParams, Trajectory
from trainer.pipeline.state import Evaluation

if TYPE_CHECKING:
    import asyncio

    from trainer.config.schema import RunConfig

log = logging.getLogger(__name__)

Freeze = Callable[[str], AbstractAsyncContextManager[Any]]
"""Keeps a replica at its version while the block runs, and yields that version."""
Generate = Callable[[Sequence[Prompt], SamplingParams, str], Any]
"""(prompts, sampling, replica) -> awaitable of one trajectory per prompt, in order."""


class Evaluator:
    """Decides when an evaluation is due, and evaluates on the first replica that is live."""

    def __init__(
        self,
        cfg: RunConfig,
        prompts: Sequence[Prompt],
        *,
        freeze: Freeze,
        generate: Generate,
        replicas: Callable[[], Sequence[str]],
    ) -> None:
        self._prompts = prompts
        self._every = cfg.trainer.eval_every
        self._params = SamplingParams(max_tokens=cfg.rollout.max_response_tokens, temperature=0.0)
        self._freeze, self._generate, self._replicas = freeze, generate, replicas
        self._last_version = -1

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one."""
        if not self._prompts or not self._every or version <= self._last_version:
            return False
        return version // self._every > max(self._last_version, 0) // self._every

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    @property
    def last_version(self) -> int:
        """-1 before the first evaluation."""
        return self._last_version

    async def run(self, entered: asyncio.Event) -> Evaluation:
        """Evaluate the version that the replica has. Sets `entered` once no commit can change it any more.

        Consumes: the held-out prompts. Waits for: the replica's commit lock and its answers. Unblocked by: the
        request deadline of the rollout worker.
        """
        started = time.monotonic()
        try:
            replica = self._replicas()[0]
            async with self._freeze(replica) as version:
                self._last_version = version
                entered.set()
                trajectories = await self._generate(self._prompts, self._params, replica)
        finally:
            entered.set()  # whoever waits for it must not outlive a failure
        check_one_version(trajectories, version)
        return summarise(trajectories, version=version, time_s=time.monotonic() - started)


def check_one_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raises RuntimeError if any token came from another version: the result would belong to no policy."""
    seen = {v for trajectory in trajectories for v in trajectory.versions}
    if seen - {version}:
        raise RuntimeError(f"evaluation of version {version} holds tokens of versions {sorted(seen)}; freeze is broken")


def summarise(trajectories: Sequence[Trajectory], *, version: int, time_s: float) -> Evaluation:
    """Mean reward over all prompts; a failed or truncated answer counts as it was rewarded, or 0."""
    rewards = [0.0 if t.status == "failed" else t.reward for t in trajectories]
    truncated = [t.status == "truncated" for t in trajectories]
    return Evaluation(
        version=version,
        accuracy=float(np.mean(rewards)),
        num_prompts=len(trajectories),
        truncated_frac=float(np.mean(truncated)),
        time_s=time_s,
    )
