"""A rollout worker and two engine replicas as Ray actors; one replica's process is killed in mid-answer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import ray

from rollout.fleet.consolidation import ConsolidationRule
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView
from rollout.types import Group, Prompt, RolloutRequest, SamplingParams
from rollout.worker.actor import rollout_worker_actor
from rollout.worker.worker import WorkerSpec
from tests.fakes.counting_worker import CountingWorker
from tests.fakes.killable_engine import KillableEngine
from trainer.driver.fleet import GROUP_GRACE_S, Fleet

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timing

MAX_TOKENS, TOKEN_S = 60, 0.03


EMPTY = FleetView(epoch=0, engines={}, handles={})


def item(group_id: int) -> RolloutRequest:
    prompt = Prompt(prompt_id=f"p{group_id}", token_ids=np.array([7, 8, 9], np.int32), text="1+2=", answer="3")
    return RolloutRequest(group_id=group_id, prompt=prompt, start_version=1)


def check(group: Group, versions: set[tuple[int, ...]]) -> None:
    for trajectory in group.trajectories:
        (turn,) = trajectory.turns()
        assert turn.token_ids.tolist() == [7, 8, 9, *range(3, 3 + MAX_TOKENS)]
        assert trajectory.text.split() == [str(number) for number in range(3, 3 + MAX_TOKENS)]
        assert trajectory.policy_versions in versions
        assert trajectory.error == ""
        assert np.isfinite(trajectory.reward)


async def test_groups_survive_the_death_of_a_replica_and_evaluation_names_the_dead_one(
    cluster: None, tokenizer_path: str
) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engines = {f"e{index}": engine_class.options(num_cpus=0).remote(index + 1, 0.1) for index in range(2)}
    await asyncio.gather(*(engine.start.remote() for engine in engines.values()))
    spec = WorkerSpec(
        group_size=4,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        request_timeout_s=60.0,
        seed=0,
        tokenizer_path=tokenizer_path,
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, engines)
    await worker.start.remote()
    greedy = SamplingParams(max_tokens=8, temperature=0.0)

    prompts = [item(index).prompt for index in range(8)]
    trajectories = await worker.evaluate.remote(prompts, greedy, "e1")
    assert [trajectory.prompt_id for trajectory in trajectories] == [prompt.prompt_id for prompt in prompts]
    assert all(trajectory.policy_versions == (2,) for trajectory in trajectories)

    pid = await engines["e0"].pid.remote()
    running = [asyncio.ensure_future(worker.run_group.remote(item(index))) for index in range(4)]
    async with asyncio.timeout(30.0):  # each has sent two chunks on its way; an answer takes 6 s
        while not (stats := await engines["e0"].load.remote()).running or (
            stats.generated_tokens < 8 * (stats.running + stats.waiting)
        ):
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    groups = await asyncio.gather(*running)
    for group in groups:
        check(group, {(1, 2), (2,)})
    begun = [t for group in groups for t in group.trajectories if t.policy_versions == (1, 2)]
    assert begun, "answers of the dead engine went on in the other one"
    report = await worker.update.remote(EMPTY)
    assert report.recovered_requests >= len(begun)
    assert list(report.lost_engines) == ["e0"]

    with pytest.raises(ray.exceptions.RayTaskError, match="NoReplica"):
        await worker.evaluate.remote(prompts, greedy, "e0")
    with pytest.raises(NoReplica):  # as the driver asks: an evaluation begins again elsewhere then
        await asyncio.wrap_future(worker.evaluate.remote(prompts, greedy, "e0").future())
    await worker.close.remote()


async def test_requests_that_an_engine_gives_up_go_on_in_another_one(cluster: None, tokenizer_path: str) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engines = {f"e{index}": engine_class.options(num_cpus=0).remote(index + 1, TOKEN_S) for index in range(2)}
    await asyncio.gather(*(engine.start.remote() for engine in engines.values()))
    spec = WorkerSpec(
        group_size=4,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        request_timeout_s=60.0,
        repacking=ConsolidationRule(below=8, most=64),
        seed=0,
        tokenizer_path=tokenizer_path,
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, engines)
    await worker.start.remote()
    fleet = Fleet(engines, [worker], group_timeout_s=60.0)
    watch = asyncio.create_task(fleet.watch())
    groups = await asyncio.gather(*(fleet.run_group(item(index)) for index in range(2)))
    for group in groups:
        check(group, {(1, 2), (2,)})
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    report = await worker.update.remote(EMPTY)
    assert report.migrated_requests == 4
    assert 4 * 6 <= report.migrated_tokens <= 4 * (3 + MAX_TOKENS)
    await worker.close.remote()


async def test_a_cancelled_group_is_aborted_in_the_engine(cluster: None, tokenizer_path: str) -> None:
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engine = engine_class.options(num_cpus=0).remote(1, TOKEN_S)
    await engine.start.remote()
    spec = WorkerSpec(
        group_size=2,
        sampling=SamplingParams(max_tokens=4000),
        request_timeout_s=5.0,
        seed=0,
        tokenizer_path=tokenizer_path,
        reward="arithmetic",
    )
    worker = rollout_worker_actor().options(num_cpus=1).remote(spec, {"e0": engine})
    await worker.start.remote()
    with pytest.raises(ray.exceptions.RayTaskError, match="TimeoutError"):
        await worker.run_group.remote(item(0))
    deadline = time.monotonic() + 30
    while (stats := await engine.load.remote()).running + stats.waiting:
        assert time.monotonic() < deadline, f"{stats.running} requests of the cancelled group still run"
        await asyncio.sleep(0.1)
    assert 0 < stats.generated_tokens < 2 * 4000


async def test_a_group_that_the_driver_gives_up_ends_in_the_worker_and_the_engine_too(
    cluster: None, tokenizer_path: str, tmp_path: Path
) -> None:
    """One group is being generated; the answers of another wait for the only reward process, which is busy."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef reward(**_):\n    time.sleep(600)\n")
    engine_class: Any = ray.remote(max_concurrency=1000)(KillableEngine)
    engine = engine_class.options(num_cpus=0).remote(1, TOKEN_S)
    await engine.start.remote()
    spec = WorkerSpec(
        group_size=2,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        request_timeout_s=600.0,
        seed=0,
        tokenizer_path=tokenizer_path,
        reward=f"{slow}:reward",
        reward_timeout_s=600.0,
        reward_processes=1,
    )
    worker = ray.remote(max_concurrency=1000)(CountingWorker).options(num_cpus=1).remote(spec, {"e0": engine})
    await worker.start.remote()
    fleet = Fleet({}, [worker], group_timeout_s=12.0 - GROUP_GRACE_S)
    first = asyncio.create_task(fleet.run_group(item(0)))
    await asyncio.sleep(6.0)  # more than the 1.8 s that an answer takes: its rewards are being computed
    second = asyncio.create_task(fleet.run_group(item(1)))
    with pytest.raises(TimeoutError, match="group 0 timed out after 12 s on rollout worker 0"):
        await first
    async with asyncio.timeout(20.0):
        while await worker.num_groups.remote() > 1:
            await asyncio.sleep(0.05)
    assert not second.done(), "the second one is not touched"
    with pytest.raises(TimeoutError, match="group 1 timed out"):
        await second
    async with asyncio.timeout(20.0):
        while await worker.num_groups.remote():
            await asyncio.sleep(0.1)
        while (stats := await engine.load.remote()).running + stats.waiting:
            await asyncio.sleep(0.1)
    assert (await worker.update.remote(EMPTY)).lost_engines == {}, "the engine is not blamed"
    await worker.close.remote()
