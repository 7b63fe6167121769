from __future__ import annotations

import asyncio
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.errors import BaselineError, RewardError
from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Prompt, RolloutRequest, SamplingParams, Trajectory
from rollout.worker.worker import RolloutWorker, WorkerSpec, derive_seed
from tests.fakes.engine_client import FakeEngine, decode, expected_answer
from tests.fakes.virtual_time import in_virtual_time, run_virtual

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKENS = 20


class Numbers:
    """A tokenizer whose text is the token numbers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return " ".join(str(token) for token in token_ids if token or not skip_special_tokens)


async def length_score(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float(len(text.split())), parts={"length": 1.0})


def spec(**changes: Any) -> WorkerSpec:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7)
    settings = {"group_size": 4, "sampling": sampling, "request_timeout_s": 60.0, "seed": 3}
    return WorkerSpec(**(settings | changes))


def item(*, group_id: int = 5, start_version: int = 0, prompt_id: str = "train/1") -> RolloutRequest:
    prompt = Prompt(prompt_id=prompt_id, token_ids=np.array([7, 8, 9], np.int32), text="", answer="")
    return RolloutRequest(group_id=group_id, prompt=prompt, start_version=start_version)


def worker(*engines: FakeEngine, score: Any = length_score, **changes: Any) -> RolloutWorker:
    clock = asyncio.get_running_loop().time
    return RolloutWorker(spec(**changes), engines, tokenizer=Numbers(), score=score, clock=clock)


def generated(trajectory: Trajectory) -> list[int]:
    (turn,) = trajectory.turns()
    return turn.token_ids[turn.is_generated].tolist()


def segments(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [segment for turn in trajectory.turns() for segment in turn.segments]


ANSWER = expected_answer(item().prompt.token_ids, MAX_TOKENS)


@in_virtual_time
async def test_a_group_has_every_sample_in_order_with_exact_tokens_and_rewards() -> None:
    engine = FakeEngine("e0", version=2)
    group = await worker(engine).run_group(item(start_version=2))
    assert (group.group_id, group.start_version) == (5, 2)
    assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3]
    for trajectory in group.trajectories:
        assert generated(trajectory) == ANSWER
        (turn,) = trajectory.turns()
        assert turn.token_ids[:3].tolist() == [7, 8, 9]
        np.testing.assert_array_equal(turn.logprobs[3:], -np.array(ANSWER, np.float32))
        assert segments(trajectory) == [(2, MAX_TOKENS)]
        assert trajectory.status == "truncated"
        assert trajectory.text == " ".join(map(str, ANSWER))
        assert (trajectory.reward, trajectory.reward_parts) == (20.0, {"length": 1.0})
        assert trajectory.timings["generate_s"] == pytest.approx(0.07)
    assert len(engine.calls) == 1, "one streaming call per group"


@in_virtual_time
async def test_a_response_that_ends_is_completed_and_its_end_token_is_trained_but_not_in_the_text() -> None:
    group = await worker(FakeEngine("e0", stop_one_in=5)).run_group(item())
    answer = expected_answer(item().prompt.token_ids, MAX_TOKENS, stop_one_in=5)
    assert answer[-1] == 0
    assert len(answer) < MAX_TOKENS
    assert group.trajectories[0].status == "completed"
    assert generated(group.trajectories[0]) == answer
    assert group.trajectories[0].text == " ".join(map(str, answer[:-1]))


@pytest.mark.parametrize("chunks_before_death", range(24))
@in_virtual_time
async def test_a_stop_string_ends_a_response_at_the_same_token_wherever_its_engine_died(
    chunks_before_death: int,
) -> None:
    engines = FakeEngine("e0", die_after_chunks=chunks_before_death), FakeEngine("e1")
    stop = decode(ANSWER[10:14])  # a chunk ends in its middle
    assert stop not in decode(ANSWER[:13])
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, stop=(stop,))
    group = await worker(*engines, sampling=sampling, greedy_baseline=True).run_group(item())
    for trajectory in group.generated:
        assert (generated(trajectory), trajectory.status) == (ANSWER[:14], "completed")


@pytest.mark.parametrize("chunks_before_death", range(0, 28, 3))
@in_virtual_time
async def test_an_engine_that_dies_loses_at_most_what_it_had_not_yet_streamed(chunks_before_death: int) -> None:
    dying = FakeEngine("e0", version=1, die_after_chunks=chunks_before_death)
    other = FakeEngine("e1", version=2)
    busy = worker(dying, other)
    group = await busy.run_group(item(start_version=1))
    rescued: list[int] = []
    for index, trajectory in enumerate(group.trajectories):
        assert generated(trajectory) == ANSWER
        # Round-robin over 4 samples, 3 tokens per chunk: this many were streamed before the end.
        kept = min(3 * ((chunks_before_death - index + 3) // 4), MAX_TOKENS)
        rescued += [kept] * (kept < MAX_TOKENS)
        assert segments(trajectory) == [(v, n) for v, n in ((1, kept), (2, MAX_TOKENS - kept)) if n]
    assert busy.report().lost_engines == {"e0": (0, "e0 was killed")}
    report = busy.report()
    assert (report.recovered_requests, report.recovered_tokens) == (len(rescued), sum(rescued))
    assert all(
        budget + len(tokens) == 3 + MAX_TOKENS
        for call in other.calls
        for budget, tokens in zip([one.max_tokens for one in call.params], call.token_ids, strict=True)
    )


@in_virtual_time
async def test_requests_returned_continue_until_done_and_cost_no_engine() -> None:
    engine = FakeEngine("e0", give_back_after_chunks=2)
    busy = worker(engine)
    group = await busy.run_group(item())
    assert all(generated(trajectory) == ANSWER for trajectory in group.trajectories)
    assert len(engine.calls) == 4  # 6 + 6 + 6 + 2 tokens
    assert busy.report().lost_engines == {}


@pytest.mark.parametrize(("timeout_s", "ends_at_s"), [(600.0, None), (30.0, 30.0)])
@in_virtual_time
async def test_an_engine_that_returns_everything_is_tried_ever_more_rarely_and_not_forever(
    timeout_s: float, ends_at_s: float | None
) -> None:
    engine, now = FakeEngine("e0", give_back_after_chunks=0), asyncio.get_running_loop().time
    error, words = (TimeoutError, "request_timeout_s=30") if ends_at_s else (RuntimeError, "100 times in a row without")
    with pytest.raises(error, match=words):
        await worker(engine, request_timeout_s=timeout_s).run_group(item())
    assert len(engine.calls) <= 100
    assert now() == ends_at_s if ends_at_s else now() > 60.0


@in_virtual_time
async def test_all_engines_dead_fails_the_group_with_every_reason() -> None:
    busy = worker(FakeEngine("e0", die_after_chunks=4), FakeEngine("e1", die_after_chunks=0))
    with pytest.raises(NoReplica, match="e0: e0 was killed; e1: e1 was killed"):
        await busy.run_group(item())
    assert (busy.report().recovered_requests, busy.report().recovered_tokens) == (4, 12), "once, to the second one"
    assert busy.report().lost_tokens == 12
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@in_virtual_time
async def test_an_engine_with_older_weights_than_the_group_may_have_is_excluded() -> None:
    busy = worker(FakeEngine("e0", version=3), FakeEngine("e1", version=4))
    group = await busy.run_group(item(start_version=4))
    assert all(trajectory.policy_versions == (4,) for trajectory in group.trajectories)
    assert "policy version 3 although 4 is live" in busy.report().lost_engines["e0"][1]


@in_virtual_time
async def test_versions_that_change_in_mid_response_are_labelled_exactly() -> None:
    engine = FakeEngine("e0")

    async def commit() -> None:
        await asyncio.sleep(0.035)  # after three chunks
        engine.version = 1

    group, _ = await asyncio.gather(worker(engine).run_group(item()), commit())
    assert [segments(trajectory) for trajectory in group.trajectories] == [[(0, 9), (1, 11)]] * 4
    assert group.trajectories[0].turns()[0].segments[0] == (0, 9)


@pytest.mark.parametrize("hangs", [False, True])
@in_virtual_time
async def test_a_group_that_runs_out_of_time_fails_and_is_aborted_at_no_cost_to_the_engine(hangs: bool) -> None:
    engine = FakeEngine("e0", step_s=1.0, hangs=hangs)
    busy = worker(engine, request_timeout_s=4.5)
    with pytest.raises(TimeoutError, match=r"no sample of prompt train/1 ended: .*request_timeout_s=4\.5"):
        await busy.run_group(item())
    assert engine.calls[0].is_closed
    assert busy.report().lost_engines == {}
    assert asyncio.get_running_loop().time() == pytest.approx(4.5)


@in_virtual_time
async def test_a_deadline_of_the_engines_own_is_not_the_requests() -> None:
    """As an abort that an engine does not end in time: it is dead then, and the response continues elsewhere."""

    class Late(FakeEngine):
        async def stream_group(self, *asked: Any) -> Any:
            async for index, chunk in super().stream_group(*asked):
                if self.num_chunks > 6:
                    raise TimeoutError("abort did not end within 5.0 s; the engine is declared dead")
                yield index, chunk

    late, other = Late("e0"), FakeEngine("e1")
    busy = worker(late, other)
    group = await busy.run_group(item())
    assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
    assert busy.report().lost_engines == {"e0": (0, "abort did not end within 5.0 s; the engine is declared dead")}
    assert other.calls[0].token_ids[0] != item().prompt.token_ids.tolist(), "from what it had"


def fails_at(call: int) -> Any:
    """A reward that fails at this call."""
    num_calls = 0

    async def score(prompt: Prompt, text: str) -> RewardResult:
        nonlocal num_calls
        num_calls += 1
        if num_calls == call:
            raise RewardError("took longer than 10 s")
        return RewardResult(reward=1.0)

    return score


@in_virtual_time
async def test_a_failed_reward_marks_its_trajectory_and_nothing_else() -> None:
    group = await worker(FakeEngine("e0"), score=fails_at(2), greedy_baseline=True).run_group(item())
    assert [trajectory.status for trajectory in group.generated] == ["truncated", "failed"] + ["truncated"] * 3
    failed = group.trajectories[1]
    assert math.isnan(failed.reward)
    assert (failed.error, failed.text) == ("took longer than 10 s", group.trajectories[0].text)


@in_virtual_time
async def test_a_cancelled_group_aborts_its_requests_and_returns_the_load() -> None:
    engine = FakeEngine("e0", step_s=1.0)
    busy = worker(engine)
    task = asyncio.create_task(busy.run_group(item()))
    await asyncio.sleep(2.5)
    assert busy.report().in_flight == {"e0": 4}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert engine.calls[0].is_closed
    assert engine.num_abort_calls <= 1, "all in one call"
    assert busy.report().in_flight == {"e0": 0}
    lost = busy.report().lost_tokens
    assert 0 < lost < 4 * MAX_TOKENS
    await busy.run_group(item(group_id=6))
    assert busy.report().lost_tokens == lost, "a group that comes to its end loses nothing"


@in_virtual_time
async def test_groups_spread_over_engines_by_load() -> None:
    engines = [FakeEngine("e0"), FakeEngine("e1")]
    busy = worker(*engines)
    await asyncio.gather(*(busy.run_group(item(group_id=index)) for index in range(6)))
    assert [len(engine.calls) for engine in engines] == [3, 3]
    assert busy.report().in_flight == {"e0": 0, "e1": 0}


def test_every_submission_of_every_sample_has_its_own_seed_and_it_repeats() -> None:
    async def seeds() -> list[int | None]:
        engine = FakeEngine("e0", give_back_after_chunks=3)
        busy = worker(engine)
        await busy.run_group(item(group_id=1))
        await busy.run_group(item(group_id=2))
        return [one.seed for call in engine.calls for one in call.params]

    first, second = run_virtual(seeds()), run_virtual(seeds())
    assert first == second
    assert len(set(first)) == len(first) == 2 * 4 * 3


@in_virtual_time
async def test_seeds_can_be_left_to_the_engine() -> None:
    engine = FakeEngine("e0")
    await worker(engine, per_request_seed=False).run_group(item())
    assert {one.seed for one in engine.calls[0].params} == {None}
    assert {one.temperature for one in engine.calls[0].params} == {0.7}
    sampled = SamplingParams(max_tokens=8, temperature=0.7)
    await worker(engine, per_request_seed=False).evaluate([item().prompt, item().prompt], sampled, engine="e0")
    assert None not in (seeds := {one.seed for one in engine.calls[-1].params}), "evaluations repeat themselves"
    assert len(seeds) == 2


def test_a_seed_is_the_same_in_another_process() -> None:
    """Python's own hash of a string changes from process to process."""
    code = "from rollout.worker.worker import derive_seed; print(derive_seed(1, 'train/17', 3, 0))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_seed(1, "train/17", 3, 0)
    assert derive_seed(1, "a", 12) != derive_seed(1, "a1", 2)


@in_virtual_time
async def test_evaluation_runs_on_the_given_engine_in_one_call_and_in_order() -> None:
    engines = [FakeEngine("e0"), FakeEngine("e1", version=6)]
    prompts = [item(prompt_id=f"test/{index}").prompt for index in range(10)]
    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    trajectories = await worker(*engines).evaluate(prompts, greedy, engine="e1")
    assert [trajectory.prompt_id for trajectory in trajectories] == [prompt.prompt_id for prompt in prompts]
    assert all(generated(trajectory) == ANSWER[:8] for trajectory in trajectories)
    assert all(trajectory.policy_versions == (6,) and trajectory.reward == 8.0 for trajectory in trajectories)
    assert (len(engines[0].calls), len(engines[1].calls)) == (0, 1)
    assert {(one.temperature, one.seed) for one in engines[1].calls[0].params} == {(0.0, None)}


@in_virtual_time
async def test_an_evaluation_does_not_move_to_another_engine() -> None:
    busy = worker(FakeEngine("e0", die_after_chunks=1), FakeEngine("e1"))
    with pytest.raises(NoReplica, match="e0 was killed"):
        await busy.evaluate([item().prompt], SamplingParams(max_tokens=8), engine="e0")


def test_the_spec_pickles() -> None:
    assert pickle.loads(pickle.dumps(spec())) == spec()


# The greedy response of a group: generated and scored like the others, and the group fails without it


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


@in_virtual_time
async def test_a_baseline_without_a_reward_fails_the_group_and_the_buffer_retries_it_with_the_live_version() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, score=fails_at(3), group_size=2, greedy_baseline=True)
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
async def test_equal_rewards_are_those_that_teach_nothing() -> None:
    group = await worker(FakeEngine("e0"), greedy_baseline=True).run_group(item())
    assert group.has_equal_rewards
    assert group.baseline is not None
    other = replace(group, baseline=replace(group.baseline, reward=0.0))
    assert not other.has_equal_rewards
    assert replace(other, baseline=None).has_equal_rewards
