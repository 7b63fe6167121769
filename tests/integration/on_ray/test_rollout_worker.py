"""Rollout workers and two scripted engines as Ray actors: what moves, what is given up, what an engine's death costs.

The tests share the engines; the last one kills one of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import ray

from rollout.engine.actor import EngineActor
from rollout.engine.interface import EngineSpec
from rollout.fleet.consolidation import ConsolidationRule
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView
from rollout.types import Prompt, RolloutRequest, SamplingParams
from rollout.worker.actor import RolloutWorkerActor
from rollout.worker.worker import WorkerSpec
from tests.fakes.scripted_engine import ScriptedEngine
from trainer.driver.fleet import GROUP_GRACE_S, Fleet
from weight_sync.device.select import build

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from rollout.types import Group, Trajectory


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


pytestmark = pytest.mark.timing

NO_CHANGE = FleetView(epoch=0, engines={}, handles={})

MAX_TOKENS, TOKEN_S = 60, 0.03
LONG = SamplingParams(max_tokens=4000)
NOTICED_S = 40.0
"""Much less than what is cancelled would take."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(cluster: None) -> dict[str, Any]:
    """Engine e0 samples under version 1, e1 under version 2."""
    started = (start_actor(KillableEngine, index + 1, TOKEN_S, num_cpus=0) for index in range(2))
    return dict(zip(("e0", "e1"), await asyncio.gather(*started), strict=True))


@pytest.fixture
async def start(tokenizer_path: str) -> AsyncIterator[Any]:
    """`await start(engines, **spec)` starts a rollout worker."""
    workers: list[Any] = []

    async def begin(engines: dict[str, Any], **changes: Any) -> Any:
        sampling = changes.pop("sampling", SamplingParams(max_tokens=MAX_TOKENS))
        spec = worker_spec(tokenizer_path, sampling, **changes)
        workers.append(await start_actor(CountingWorker, spec, engines, num_cpus=1))
        return workers[-1]

    yield begin
    for worker in workers:
        await worker.close.remote()
        ray.kill(worker)


def item(group_id: int) -> RolloutRequest:
    return RolloutRequest(group_id=group_id, prompt=prompt(group_id), start_version=1)


def check(group: Group, versions: set[tuple[int, ...]]) -> None:
    for trajectory in group.trajectories:
        check_positions(trajectory, MAX_TOKENS)
        assert trajectory.text.split() == [str(number) for number in range(3, 3 + MAX_TOKENS)]
        assert trajectory.policy_versions in versions
        assert np.isfinite(trajectory.reward)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(NOTICED_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def is_idle(engine: Any) -> bool:
    status = await engine.load.remote()
    return not status.running + status.waiting


async def test_requests_that_an_engine_returns_continue_in_another_one(engines: dict[str, Any], start: Any) -> None:
    worker = await start(engines, group_size=4, repacking=ConsolidationRule(below=8, most=64))
    fleet = Fleet(engines, [worker], group_timeout_s=60.0, heartbeat_timeout_s=120.0)
    watch = asyncio.create_task(fleet.watch(needs_groups=lambda: True, needs_engines=lambda: True))
    groups = await asyncio.gather(*(fleet.run_group(item(index)) for index in range(2)))
    for group in groups:
        check(group, {(1, 2), (2,)})
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    report = await worker.update.remote(NO_CHANGE)
    assert report.migrated_requests == 4
    assert 4 * 6 <= report.migrated_tokens <= 4 * (3 + MAX_TOKENS)


async def test_a_cancelled_group_and_a_cancelled_evaluation_are_aborted_in_the_engine(
    engines: dict[str, Any], start: Any
) -> None:
    engine = engines["e0"]
    worker = await start({"e0": engine}, sampling=LONG, request_timeout_s=4.0, evaluation_window=4)
    before = (await engine.load.remote()).generated_tokens
    with pytest.raises(ray.exceptions.RayTaskError, match="TimeoutError"):
        await worker.run_group.remote(item(0))
    await until(lambda: is_idle(engine))
    assert 0 < (await engine.load.remote()).generated_tokens - before < 2 * 4000

    fleet = Fleet({}, [worker], group_timeout_s=600.0, heartbeat_timeout_s=120.0)
    prompts = [prompt(index) for index in range(6)]
    short = SamplingParams(max_tokens=2, temperature=0.0)
    assert len(await fleet.evaluate(prompts, short, "e0", range(6))) == 6
    await engine.set_token_s.remote(0.5)  # or its own timeout would come first
    try:
        evaluating = asyncio.create_task(fleet.evaluate(prompts, LONG, "e0", range(6)))

        async def is_under_way() -> bool:
            return (await engine.load.remote()).running == 4

        await until(is_under_way)
        evaluating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluating
        await asyncio.wait_for(until(lambda: is_idle(engine)), 2.5)
    finally:
        await engine.set_token_s.remote(TOKEN_S)


async def test_a_group_that_the_driver_gives_up_ends_in_the_worker_and_the_engine_too(
    engines: dict[str, Any], start: Any, tmp_path: Path
) -> None:
    """The rewards of the first group are being computed, and those of the second wait for the only reward process."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\ndef reward(**_):\n    time.sleep(600)\n")
    engine, reward = engines["e0"], f"{slow}:reward"
    worker = await start({"e0": engine}, reward=reward, reward_timeout_s=600.0, reward_processes=1)
    fleet = Fleet({}, [worker], group_timeout_s=5.0 - GROUP_GRACE_S, heartbeat_timeout_s=120.0)
    await engine.set_token_s.remote(TOKEN_S / 10)
    first = asyncio.create_task(fleet.run_group(item(0)))
    await asyncio.sleep(2.5)  # more than the 0.2 s that a response takes
    second = asyncio.create_task(fleet.run_group(item(1)))
    with pytest.raises(TimeoutError, match="group 0 timed out after 5 s on rollout worker 0"):
        await first

    async def has_at_most(num_groups: int) -> bool:
        return await worker.num_groups.remote() <= num_groups

    await until(lambda: has_at_most(1))
    assert not second.done(), "the second one is not touched"
    with pytest.raises(TimeoutError, match="group 1 timed out"):
        await second
    await until(lambda: has_at_most(0))
    await until(lambda: is_idle(engine))
    assert (await worker.update.remote(NO_CHANGE)).lost_engines == {}, "the engine is not blamed"


async def test_groups_survive_the_death_of_an_engine_and_an_evaluation_names_the_dead_one(
    engines: dict[str, Any], start: Any
) -> None:
    worker = await start(engines, group_size=4)
    for engine in engines.values():
        await engine.set_token_s.remote(0.1)  # a response takes 6 s
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    prompts = [prompt(index) for index in range(8)]
    trajectories = await worker.evaluate.remote(prompts, greedy, "e1")
    assert [trajectory.prompt_id for trajectory in trajectories] == [prompt.prompt_id for prompt in prompts]
    assert all(trajectory.policy_versions == (2,) for trajectory in trajectories)

    pid = await engines["e0"].pid.remote()
    before = (await engines["e0"].load.remote()).generated_tokens
    running = [asyncio.ensure_future(worker.run_group.remote(item(index))) for index in range(4)]

    async def has_sent_two_chunks_of_each() -> bool:
        status = await engines["e0"].load.remote()
        return status.running and status.generated_tokens - before >= 8 * (status.running + status.waiting)

    await until(has_sent_two_chunks_of_each)
    os.kill(pid, signal.SIGKILL)
    groups = await asyncio.gather(*running)
    for group in groups:
        check(group, {(1, 2), (2,)})
    begun = [t for group in groups for t in group.trajectories if t.policy_versions == (1, 2)]
    assert begun, "responses of the dead engine continued in the other one"
    report = await worker.update.remote(NO_CHANGE)
    assert report.recovered_requests >= len(begun)
    assert list(report.lost_engines) == ["e0"]

    with pytest.raises(ray.exceptions.RayTaskError, match="NoReplica"):
        await worker.evaluate.remote(prompts, greedy, "e0")
    with pytest.raises(NoReplica):  # as the driver asks: an evaluation begins again elsewhere then
        await asyncio.wrap_future(worker.evaluate.remote(prompts, greedy, "e0").future())
