"""Evaluations in a rollout worker: answers go through a window, and time runs for each from its submission."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout.reward.call import RewardResult
from rollout.types import Prompt, SamplingParams, TokenChunk
from rollout.worker.worker import NumJudges, RolloutWorker
from tests.fakes.engine_client import FakeEngine
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, Numbers, generated, item, spec, worker

GREEDY = SamplingParams(max_tokens=20, temperature=0.0)


def prompts(num_prompts: int) -> list[Prompt]:
    return [item(prompt_id=f"test/{index}").prompt for index in range(num_prompts)]


class OneByOne(FakeEngine):
    """Has `room` for requests, the others wait inside; takes `answer_s` for each but the `endless`."""

    def __init__(self, name: str, *, room: int, answer_s: float, endless: int = -1) -> None:
        super().__init__(name)
        self.answer_s, self.endless, self.now, self.most = answer_s, f"/{endless}/", 0, 0
        self.room = asyncio.Semaphore(room)

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        self.now += len(request_ids)
        self.most = max(self.most, self.now)
        left = len(request_ids)
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def one(index: int) -> None:
            async with self.room:
                await asyncio.sleep(1e6 if self.endless in request_ids[index] else self.answer_s)
            queue.put_nowait(index)

        tasks = [asyncio.create_task(one(index)) for index in range(len(request_ids))]
        try:
            while left:
                index = await queue.get()
                self.now, left = self.now - 1, left - 1
                yield (
                    index,
                    TokenChunk(
                        token_ids=np.array([5], np.int32),
                        logprobs=np.array([-1.0], np.float32),
                        versions=np.zeros(1, np.int32),
                        finish_reason="stop",
                    ),
                )
        finally:
            self.now -= left
            for task in tasks:
                task.cancel()


def test_the_time_of_an_answer_runs_from_its_submission_however_many_there_are() -> None:
    async def main() -> None:
        engine = OneByOne("e0", room=2, answer_s=4.0)
        busy = worker(engine, evaluation_window=2, request_timeout_s=10.0)
        trajectories = await busy.evaluate(prompts(20), GREEDY, engine="e0")
        assert [trajectory.status for trajectory in trajectories] == ["completed"] * 20
        assert [trajectory.prompt_id for trajectory in trajectories] == [f"test/{index}" for index in range(20)]
        assert engine.most == 2
        assert asyncio.get_running_loop().time() == pytest.approx(40.0), "the replica always has as many as it takes"

    run_virtual(main())


def test_an_answer_that_takes_too_long_is_failed_and_the_others_are_not() -> None:
    async def main() -> None:
        engine = OneByOne("e0", room=2, answer_s=7.0, endless=1)
        busy = worker(engine, evaluation_window=2, request_timeout_s=10.0)
        answers = await busy.evaluate(prompts(3), GREEDY, engine="e0")
        assert [one.error for one in answers] == ["", "generation took longer than request_timeout_s=10", ""]

    run_virtual(main())


async def one_of_each(prompt: Prompt) -> tuple[str, int]:
    return ("async", 3) if prompt.prompt_id in ("test/1", "test/3", "test/4") else ("", 1)


@pytest.mark.parametrize(("num_judges", "expected"), [(None, [1, 2, 101, 102, 201]), (one_of_each, [1, 2, 4, 5, 101])])
def test_rewards_keep_no_place_at_the_replica_and_do_not_fill_the_queue_of_training(
    num_judges: NumJudges | None, expected: list[int]
) -> None:
    asked_at: list[float] = []

    async def slowly(_prompt: Any, _text: Any) -> RewardResult:
        asked_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(100.0)
        return RewardResult(reward=1.0)

    async def main() -> None:
        settings, engine = spec(evaluation_window=1, reward_processes=2), OneByOne("e0", room=1, answer_s=1.0)
        busy = RolloutWorker(settings, [engine], tokenizer=Numbers(), score=slowly, num_judges=num_judges)
        await busy.evaluate(prompts(5), GREEDY, engine="e0")

    run_virtual(main())
    assert asked_at == pytest.approx(expected), "so many at a time; the replica was through after five seconds"


def test_a_share_of_an_evaluation_has_the_seeds_that_it_has_in_the_whole() -> None:
    async def seeds(numbers: list[int] | None) -> dict[str, int | None]:
        engine, asked = FakeEngine("e0"), prompts(6)
        params = SamplingParams(max_tokens=4, temperature=0.8)
        mine = asked if numbers is None else [asked[number] for number in numbers]
        trajectories = await worker(engine).evaluate(mine, params, engine="e0", numbers=numbers)
        assert [one.prompt_id for one in trajectories] == [one.prompt_id for one in mine]
        return {one.prompt_id: drawn.seed for one, drawn in zip(mine, engine.calls[0].params, strict=True)}

    whole = run_virtual(seeds(None))
    assert len(set(whole.values())) == 6
    assert run_virtual(seeds([1, 3, 5])) | run_virtual(seeds([4, 0, 2])) == whole


def test_an_evaluation_that_is_cancelled_leaves_nothing_at_the_replica() -> None:
    async def main() -> None:
        engine = FakeEngine("e0")
        busy = worker(engine, evaluation_window=2)
        running = asyncio.create_task(busy.evaluate(prompts(6), GREEDY, engine="e0"))
        await asyncio.sleep(0.1)  # the second pair
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert 2 <= len(engine.calls) <= 3
        assert all(call.is_closed for call in engine.calls)
        group = await busy.run_group(item())
        assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)

    run_virtual(main())
