"""The greedy response of a group: generated and scored like the others, and the group fails without it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.errors import BaselineError, RewardError
from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Prompt, SamplingParams
from tests.fakes.engine_client import FakeEngine
from tests.fakes.virtual_time import in_virtual_time, run_virtual
from tests.unit.rollout.test_worker import ANSWER, MAX_TOKENS, generated, item, segments, worker


@pytest.mark.parametrize("group_size", [1, 4])
@in_virtual_time
async def test_a_group_has_one_more_response_that_is_greedy_and_scored(group_size: int) -> None:
    engine = FakeEngine("e0", version=2)
    group = await worker(engine, group_size=group_size, greedy_baseline=True).run_group(item(start_version=2))
    assert [t.sample_index for t in group.trajectories] == list(range(group_size))
    assert group.baseline is not None
    assert (group.baseline.sample_index, group.baseline.reward) == (group_size, 20.0)
    assert generated(group.baseline) == ANSWER
    (call,) = engine.calls
    *sampled, greedy = call.params
    assert {(p.temperature, p.seed is None) for p in sampled} == {(0.7, False)}
    assert greedy == SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    assert group.num_generated_tokens == (group_size + 1) * MAX_TOKENS


def test_sampled_responses_do_not_depend_on_whether_there_is_a_baseline() -> None:
    async def seeds(**changes: Any) -> list[int | None]:
        engine = FakeEngine("e0")
        await worker(engine, **changes).run_group(item())
        return [one.seed for one in engine.calls[0].params]

    assert run_virtual(seeds()) == run_virtual(seeds(greedy_baseline=True))[:4]


@in_virtual_time
async def test_a_baseline_survives_the_death_of_its_engine_and_its_tokens_obey_the_bound() -> None:
    engines = FakeEngine("e0", version=3, die_after_chunks=7), FakeEngine("e1", version=4)
    busy = worker(*engines, greedy_baseline=True, group_size=2)
    group = await busy.run_group(item(start_version=3))
    assert group.baseline is not None
    assert generated(group.baseline) == ANSWER
    assert segments(group.baseline) == [(3, 6), (4, 14)]
    assert [one.temperature for one in engines[1].calls[0].params] == [0.7, 0.7, 0.0]
    with pytest.raises(NoReplica, match="policy version 4 although 5 is live"):
        await busy.run_group(replace(item(start_version=5), group_id=6))


async def fails_for(text_of_call: int) -> Any:
    calls = 0

    async def score(prompt: Prompt, text: str) -> RewardResult:
        nonlocal calls
        calls += 1
        if calls == text_of_call:
            raise RewardError("took longer than 10 s")
        return RewardResult(reward=1.0)

    return score


@in_virtual_time
async def test_a_baseline_without_a_reward_fails_the_group_and_the_buffer_retries_it_with_the_live_version() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, score=await fails_for(3), group_size=2, greedy_baseline=True)
    buffer = RolloutBuffer(groups_per_step=1, max_staleness=0, max_retries=1, max_filtered_batches_per_step=4)
    buffer.admit(item().prompt)
    first = await buffer.claim()
    with pytest.raises(BaselineError, match="the greedy response to prompt train/1 failed: took longer than 10 s"):
        await busy.run_group(first)
    assert buffer.fail(first.group_id, BaselineError("x")) == "retried"
    group = await busy.run_group(await buffer.claim())
    assert group.baseline is not None
    buffer.finish(group)
    assert await buffer.take(0) == [group]
    assert buffer.stats().discarded_tokens == 0


@in_virtual_time
async def test_a_sample_without_a_reward_does_not_fail_the_group() -> None:
    busy = worker(FakeEngine("e0"), score=await fails_for(1), group_size=2, greedy_baseline=True)
    group = await busy.run_group(item())
    assert [t.status for t in group.trajectories] == ["failed", "truncated"]
    assert group.baseline is not None


@in_virtual_time
async def test_a_baseline_that_runs_out_of_time_fails_the_group() -> None:
    """The samples stop early; the greedy response, which has other tokens to come, is cut by the deadline."""

    class SlowWhenGreedy(FakeEngine):
        async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
            sampled = [i for i, one in enumerate(params) if one.temperature > 0]
            if sampled:
                async for index, chunk in super().stream_group(
                    [request_ids[i] for i in sampled], [token_ids[i] for i in sampled], [params[i] for i in sampled]
                ):
                    yield sampled[index], chunk
            await asyncio.sleep(3600)

    busy = worker(SlowWhenGreedy("e0"), greedy_baseline=True, request_timeout_s=5.0)
    with pytest.raises(BaselineError, match=r"longer than request_timeout_s=5"):
        await busy.run_group(item())
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


@in_virtual_time
async def test_equal_rewards_are_those_that_teach_nothing() -> None:
    group = await worker(FakeEngine("e0"), greedy_baseline=True).run_group(item())
    assert group.has_equal_rewards
    assert group.baseline is not None
    other = replace(group, baseline=replace(group.baseline, reward=0.0))
    assert not other.has_equal_rewards
    assert replace(other, baseline=None).has_equal_rewards
