"""The real vLLM engine as a Ray actor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rollout.engine.actor import engine_actor
from rollout.errors import EngineDead
from rollout.types import SamplingParams
from tests.fakes.tiny_vllm import make_spec, random_prompt
from weight_sync.device.select import get_backend

pytestmark = [pytest.mark.timing, pytest.mark.full]


async def test_a_group_streams_and_a_killed_engine_process_is_reported(cluster: None, vllm_model: Path) -> None:
    env = {variable.name: variable.value for variable in get_backend("cpu").process_env("engine")}
    env["PYTHONPATH"] = str(Path.cwd())
    actor = engine_actor().options(num_cpus=1).remote(make_spec(vllm_model, env=env))
    await actor.start.remote()
    params = [SamplingParams(max_tokens=20 + i, seed=i, ignore_eos=True) for i in range(4)]
    received = [0] * 4
    async for ref in actor.generate_group.remote([f"r{i}" for i in range(4)], [random_prompt(0)] * 4, params):
        for index, chunk in await ref:
            received[index] += len(chunk.token_ids)
    assert received == [20, 21, 22, 23]

    (pid,) = await actor.call_workers.remote("te_pid", [], 10.0)
    endless = [SamplingParams(max_tokens=4000, seed=i, ignore_eos=True) for i in range(4)]
    received = [0] * 4
    with pytest.raises(EngineDead):
        async for ref in actor.generate_group.remote([f"k{i}" for i in range(4)], [random_prompt(0)] * 4, endless):
            for index, chunk in await ref:
                received[index] += len(chunk.token_ids)
            if pid and sum(received) > 200:
                os.kill(pid, signal.SIGKILL)
                pid = 0
    assert sum(received) > 200
    with pytest.raises(EngineDead):
        await actor.load.remote()
    await actor.close.remote()
