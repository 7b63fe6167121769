"""The Ray actor of one rollout worker."""

from __future__ import annotations

import asyncio
import os
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.agent.runner import make_loop
from rollout.fleet.engine_client import RayEngineClient
from rollout.fork_server import take_num_threads
from rollout.processes import rare_collections
from rollout.rendering import load_tokenizer
from rollout.reward.pool import RewardPool
from rollout.reward.process import DRIVER_ONLY
from rollout.worker.group_server import GroupServer
from rollout.worker.worker import RolloutWorker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.fleet.states import FleetView, WorkerReport
    from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, Trajectory
    from rollout.worker.worker import WorkerSpec


class RolloutWorkerActor:
    """Builds one rollout worker with its tokenizer and reward processes, and forwards calls to it. `start` it first."""

    def __init__(self, spec: WorkerSpec, engines: Mapping[str, Any]) -> None:
        self._spec, self._engines = spec, engines
        self._sender = uuid.uuid4().hex[:8]
        self._rewards = RewardPool(
            spec.reward,
            timeout_s=spec.reward_timeout_s,
            num_processes=spec.reward_processes,
            queue_timeout_s=spec.reward_queue_timeout_s,
            max_concurrency=spec.reward_concurrency,
            directory=None if spec.reward_directory is None else Path(spec.reward_directory),
        )
        self._started: RolloutWorker | None = None
        self._groups = GroupServer(self.run_group)
        self._for_life = ExitStack()

    async def start(self) -> None:
        """Raises DataError if the reward does not import, and PluginError if the agent loop does not load."""
        take_num_threads()
        await self._rewards.start()
        self._for_life.enter_context(rare_collections())
        path = self._spec.tokenizer_path
        tokenizer = await asyncio.to_thread(load_tokenizer, path, trust_remote_code=self._spec.trust_remote_code)
        for name in DRIVER_ONLY:  # the tokenizer may have needed one; the agent loop that is imported next does not
            os.environ.pop(name, None)
        self._started = RolloutWorker(
            self._spec,
            [RayEngineClient(name, handle, sender=self._sender) for name, handle in self._engines.items()],
            tokenizer=tokenizer,
            score=self._rewards.score,
            loop=make_loop(
                self._spec.agent,
                self._spec.agent_args,
                chat_template_kwargs=self._spec.chat_template_kwargs,
                rollout_stop=self._spec.sampling.stop,
            ),
            reward_slots=self._rewards.num_at_once,
        )

    @property
    def _worker(self) -> RolloutWorker:
        if self._started is None:
            raise RuntimeError("the rollout worker is not started; await start() first")
        return self._started

    async def run_group(self, item: RolloutRequest) -> Group:
        return await self._worker.run_group(item)

    async def submit(self, items: Mapping[int, RolloutRequest], cancelled: Sequence[int]) -> None:
        """See `GroupServer`."""
        self._groups.submit(items, cancelled)

    async def ended(self) -> dict[int, Group | Exception]:
        """See `GroupServer`."""
        return await self._groups.ended()

    async def evaluate(
        self, prompts: Sequence[Prompt], params: SamplingParams, engine: str, numbers: Sequence[int] | None = None
    ) -> list[Trajectory]:
        return await self._worker.evaluate(prompts, params, engine=engine, numbers=numbers)

    async def update(self, view: FleetView) -> WorkerReport:
        """See `RolloutWorker.update`."""
        new = {name: RayEngineClient(name, handle, sender=self._sender) for name, handle in view.handles.items()}
        return self._worker.update(view, new)

    async def close(self) -> None:
        """Ends groups, the agent loop, and the reward processes; also of a worker that did not start."""
        self._groups.close()
        try:
            if self._started is not None:
                await self._started.close()
        finally:
            await self._rewards.close()
            self._for_life.close()


def rollout_worker_actor() -> Any:
    """`RolloutWorkerActor` as a Ray actor class, for the caller to give resources to.

    Example:
        worker = rollout_worker_actor().options(num_cpus=1).remote(spec, {"engine-0": handle})
    """
    import ray

    # Calls wait most of the time: for a group to end, for an evaluation. None may wait for another's slot.
    return ray.remote(max_concurrency=10_000)(RolloutWorkerActor)  # pyright: ignore[reportCallIssue]
