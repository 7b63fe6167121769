"""A rollout worker and two engine replicas as Ray actors; one replica's process is killed in mid-answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from rollout.actor import rollout_worker_actor
from rollout.buffer.items import WorkItem
from rollout.engine.actor import EngineActor
from rollout.engine.base import EngineSpec
from rollout.engine.router import NoReplica
from rollout.engine.scripted_engine import ScriptedEngine
from rollout.types import Group, Prompt, SamplingParams
from rollout.worker import WorkerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_TOKENS = 60


def position_script(prompt: np.ndarray, position: int, version: int) -> tuple[int, float]:
    """The token tells its place in the sequence, so a resubmission that loses or repeats one is seen."""
    return len(prompt) + position, -0.25


class KillableEngine(EngineActor):
    """The real shell around a scripted engine, in a process whose id it tells."""

    def __init__(self, version: int) -> None:
        spec = EngineSpec(model="", stream_tokens=4, initial_version=version)
        super().__init__(spec, build=lambda one: ScriptedEngine(one, script=position_script, token_s=0.03))

    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A private cluster that ends with this module."""
    ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


def save_tokenizer(path: Path) -> str:
    vocabulary = {str(number): number for number in range(200)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="0"))).save_pretrained(
        path
    )
    return str(path)


def item(group_id: int) -> WorkItem:
    prompt = Prompt(prompt_id=f"p{group_id}", token_ids=np.array([7, 8, 9], np.int32), text="1+2=", answer="3")
    return WorkItem(group_id=group_id, prompt=prompt, start_version=1)


def check(group: Group, versions: set[tuple[int, ...]]) -> None:
    for trajectory in group.trajectories:
        (turn,) = trajectory.turns
        assert turn.token_ids.tolist() == [7, 8, 9, *range(3, 3 + MAX_TOKENS)]
        assert trajectory.text.split() == [str(number) for number in range(3, 3 + MAX_TOKENS)]
        assert trajectory.versions in versions
        assert trajectory.error == ""
        assert np.isfinite(trajectory.reward)


async def test_groups_survive_the_death_of_a_replica_and_evaluation_names_the_dead_one(
    cluster: None, tmp_path: Path
) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engines = {f"e{index}": engine_class.options(num_cpus=0).remote(index + 1) for index in range(2)}
    await asyncio.gather(*(engine.start.remote() for engine in engines.values()))
    spec = WorkerSpec(
        group_size=4,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        request_timeout_s=60.0,
        seed=0,
        tokenizer_path=save_tokenizer(tmp_path / "tokenizer"),
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, engines)
    await worker.start.remote()
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)

    prompts = [item(index).prompt for index in range(8)]
    trajectories = await worker.evaluate.remote(prompts, greedy, "e1")
    assert [trajectory.prompt_id for trajectory in trajectories] == [prompt.prompt_id for prompt in prompts]
    assert all(trajectory.versions == (2,) for trajectory in trajectories)

    async with asyncio.timeout(20.0):  # the worker asks the engines how busy they are
        while any(one.load is None for one in (await worker.loads.remote()).replicas.values()):
            await asyncio.sleep(0.1)

    pid = await engines["e0"].pid.remote()
    running = [asyncio.ensure_future(worker.run_group.remote(item(index))) for index in range(4)]
    await asyncio.sleep(0.3)  # of the 1.8 s that an answer takes
    os.kill(pid, signal.SIGKILL)
    for group in await asyncio.gather(*running):
        check(group, {(1, 2), (2,)})
    assert list(await worker.quarantined.remote()) == ["e0"]

    with pytest.raises(ray.exceptions.RayTaskError, match="NoReplica"):
        await worker.evaluate.remote(prompts, greedy, "e0")
    with pytest.raises(NoReplica):  # as the driver asks: an evaluation begins again elsewhere then
        await asyncio.wrap_future(worker.evaluate.remote(prompts, greedy, "e0").future())
    await worker.close.remote()


async def test_a_cancelled_group_is_aborted_in_the_engine(cluster: None, tmp_path: Path) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engine = engine_class.options(num_cpus=0).remote(1)
    await engine.start.remote()
    spec = WorkerSpec(
        group_size=2,
        sampling=SamplingParams(max_tokens=4000),
        request_timeout_s=1.0,
        seed=0,
        tokenizer_path=save_tokenizer(tmp_path / "tokenizer"),
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, {"e0": engine})
    await worker.start.remote()
    with pytest.raises(ray.exceptions.RayTaskError, match="TimeoutError"):
        await worker.run_group.remote(item(0))
    deadline = time.monotonic() + 30
    while (stats := await engine.stats.remote()).running + stats.waiting:
        assert time.monotonic() < deadline, f"{stats.running} requests of the cancelled group still run"
        await asyncio.sleep(0.1)
    assert 0 < stats.generated_tokens < 2 * 4000
