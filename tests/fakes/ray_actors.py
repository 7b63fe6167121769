"""Engines and rollout workers as real Ray actors, in processes that a test can find and kill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from rollout.types import Prompt, RolloutRequest
from rollout.worker.actor import RolloutWorkerActor
from rollout.worker.worker import WorkerSpec
from tests.fakes.scripted_engine import ScriptedEngine
from weight_sync.device.select import build

if TYPE_CHECKING:
    from rollout.types import Group, SamplingParams, Trajectory

CONTEXT = [7, 8, 9]


def position_script(prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
    """The token is its place in the sequence, so a resubmission that loses or repeats one is seen."""
    return len(prompt) + position, -0.25


class KillableEngine(EngineActor):
    """A scripted engine behind the real shell. A token takes `token_s` seconds."""

    def __init__(self, version: int, token_s: float) -> None:
        env = {variable.name: variable.value for variable in build("cpu").process_env("engine")}
        spec = EngineSpec(model="", stream_interval=4, initial_version=version, env=env)
        super().__init__(spec, build=lambda one: ScriptedEngine(one, script=position_script, token_s=token_s))

    async def pid(self) -> int:
        return os.getpid()

    async def set_token_s(self, token_s: float) -> None:
        self._engine._token_s = token_s  # type: ignore[attr-defined]


class CountingWorker(RolloutWorkerActor):
    """Reports how many groups it is busy with."""

    _num_groups = 0

    async def run_group(self, item: RolloutRequest) -> Group:
        self._num_groups += 1
        try:
            return await super().run_group(item)
        finally:
            self._num_groups -= 1

    async def pid(self) -> int:
        return os.getpid()

    async def num_groups(self) -> int:
        return self._num_groups


async def start_actor(kind: type, *args: object, **options: Any) -> Any:
    actor_class: Any = ray.remote(max_concurrency=1000)(kind)
    actor = actor_class.options(**options).remote(*args)
    await actor.start.remote()
    return actor


def worker_spec(tokenizer_path: str, sampling: SamplingParams, **changes: Any) -> WorkerSpec:
    values = {"group_size": 2, "request_timeout_s": 600.0, "seed": 0, "reward": "arithmetic", **changes}
    return WorkerSpec(tokenizer_path=tokenizer_path, sampling=sampling, **values)


def prompt(number: int = 0) -> Prompt:
    return Prompt(prompt_id=f"p{number}", token_ids=np.array(CONTEXT, np.int32), text="1+2=", answer="3")


def check_positions(trajectory: Trajectory, num_tokens: int) -> None:
    """Every token once, in whichever engines."""
    (turn,) = trajectory.turns()
    assert turn.token_ids.tolist() == [*CONTEXT, *range(3, 3 + num_tokens)]
    assert trajectory.error == ""
