"""Evaluations in a rollout worker: responses go through a window, and time runs for each from its submission."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Prompt, SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.local_actor import view_of
from tests.fakes.rollout_worker import ANSWER, generated, item, worker
from tests.fakes.trajectories import make_chunk
from tests.fakes.virtual_time import in_virtual_time, run_virtual

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def prompts(num_prompts: int) -> list[Prompt]:
    return [item(prompt_id=f"test/{index}").prompt for index in range(num_prompts)]


class OneByOne(FakeEngine):
    """Takes `answer_s` for each request but the `endless`."""

    def __init__(self, *, answer_s: float, endless: int = -1) -> None:
        super().__init__("e0")
        self.answer_s, self.endless = answer_s, f"/{endless}/"

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        self.now += len(request_ids)
        self.most = max(self.most, self.now)
        try:
            for index in range(len(request_ids)):
                await asyncio.sleep(1e6 if self.endless in request_ids[index] else self.answer_s * (index == 0))
                yield index, make_chunk([5])
        finally:
            self.now -= len(request_ids)


@in_virtual_time
async def test_an_evaluation_runs_on_the_given_engine_in_one_call_and_in_order() -> None:
    engines = [FakeEngine("e0"), FakeEngine("e1", version=6)]
    trajectories = await worker(*engines).evaluate(prompts(10), replace(GREEDY, max_tokens=8), engine="e1")
    assert [trajectory.prompt_id for trajectory in trajectories] == [prompt.prompt_id for prompt in prompts(10)]
    for trajectory in trajectories:
        assert (generated(trajectory), trajectory.policy_versions, trajectory.reward) == (ANSWER[:8], (6,), 8.0)
    assert (len(engines[0].calls), len(engines[1].calls)) == (0, 1)
    assert {(one.temperature, one.seed) for one in engines[1].calls[0].params} == {(0.0, None)}


@in_virtual_time
async def test_an_evaluation_does_not_move_to_another_engine() -> None:
    busy = worker(FakeEngine("e0", die_after_chunks=1), FakeEngine("e1"))
    with pytest.raises(NoReplica, match="e0 was killed"):
        await busy.evaluate(prompts(1), GREEDY, engine="e0")


@in_virtual_time
async def test_the_time_of_a_response_runs_from_its_submission_however_many_there_are() -> None:
    engine = OneByOne(answer_s=4.0)
    busy = worker(engine, evaluation_window=2, request_timeout_s=10.0)
    trajectories = await busy.evaluate(prompts(20), GREEDY, engine="e0")
    assert [trajectory.status for trajectory in trajectories] == ["completed"] * 20
    assert engine.most == 2
    assert asyncio.get_running_loop().time() == pytest.approx(40.0), "the engine always has as many as it takes"


@in_virtual_time
async def test_a_response_that_takes_too_long_is_failed_and_the_others_are_not() -> None:
    busy = worker(OneByOne(answer_s=7.0, endless=1), evaluation_window=1, request_timeout_s=10.0)
    responses = await busy.evaluate(prompts(3), GREEDY, engine="e0")
    assert [one.error for one in responses] == ["", "generation took longer than request_timeout_s=10", ""]


async def one_of_each(prompt: Prompt) -> tuple[str, int]:
    return ("async", 3) if prompt.prompt_id in ("test/1", "test/3", "test/4") else ("", 1)


@pytest.mark.parametrize(
    ("reward_slots", "expected"), [(None, [1, 2, 101, 102, 201]), (one_of_each, [1, 2, 4, 5, 101])]
)
def test_rewards_keep_no_place_at_the_engine_and_do_not_fill_the_queue_of_training(
    reward_slots: Any, expected: list[int]
) -> None:
    asked_at: list[float] = []

    async def slowly(_prompt: Any, _text: Any) -> RewardResult:
        asked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(100.0)
        return RewardResult(reward=1.0)

    async def main() -> None:
        settings: Any = {"evaluation_window": 1, "reward_processes": 2, "reward_slots": reward_slots}
        await worker(OneByOne(answer_s=1.0), score=slowly, **settings).evaluate(prompts(5), GREEDY, engine="e0")

    run_virtual(main())
    assert asked_at == pytest.approx(expected), "so many at a time; the engine was through after five seconds"


def test_a_share_of_an_evaluation_has_the_seeds_that_it_has_in_the_whole() -> None:
    async def seeds(numbers: list[int] | None) -> dict[str, int | None]:
        engine, params = FakeEngine("e0"), SamplingParams(max_tokens=4, temperature=0.8)
        mine = prompts(6) if numbers is None else [prompts(6)[number] for number in numbers]
        trajectories = await worker(engine).evaluate(mine, params, engine="e0", numbers=numbers)
        assert [one.prompt_id for one in trajectories] == [one.prompt_id for one in mine]
        return {one.prompt_id: drawn.seed for one, drawn in zip(mine, engine.calls[0].params, strict=True)}

    whole = run_virtual(seeds(None))
    assert len(set(whole.values())) == 6
    assert run_virtual(seeds([1, 3, 5])) | run_virtual(seeds([4, 0, 2])) == whole


@in_virtual_time
async def test_an_evaluation_that_is_cancelled_leaves_nothing_at_the_engine() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, evaluation_window=2)
    running = asyncio.create_task(busy.evaluate(prompts(6), GREEDY, engine="e0"))
    await asyncio.sleep(0.1)  # the second pair
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert 2 <= len(engine.calls) <= 3
    assert all(call.is_closed for call in engine.calls)
    group = await busy.run_group(item())
    assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4


@in_virtual_time
async def test_training_and_an_evaluation_share_the_limit_of_the_only_engine() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, concurrency=LimitRange(lowest=8, highest=8), evaluation_window=8, request_timeout_s=0.6)
    training = [asyncio.create_task(busy.run_group(item(group_id=i))) for i in range(3)]
    await asyncio.sleep(0.005)
    evaluated = await busy.evaluate(prompts(40), GREEDY, engine="e0")
    assert engine.most == 8
    assert training[0].done() and training[1].done(), "it has the other half"
    assert [one.error for one in evaluated] == [""] * 40, "their time runs from their submission"
    await asyncio.gather(*training, return_exceptions=True)
    assert busy.report().in_flight == {"e0": 0}


@in_virtual_time
async def test_an_evaluation_has_what_other_workers_leave_of_an_engine_and_at_least_this_ones_share() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, concurrency=LimitRange(lowest=2, highest=2), evaluation_window=8)
    view = view_of(e0="pinned")
    for num_elsewhere, most in ((3, 5), (8, 2), (0, 8)):
        engines = {"e0": replace(view.engines["e0"], num_elsewhere=num_elsewhere)}
        busy.update(replace(view, engines=engines), {})
        engine.most = 0
        await busy.evaluate(prompts(20), GREEDY, engine="e0")
        assert engine.most == most
