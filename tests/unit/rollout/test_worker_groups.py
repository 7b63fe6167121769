"""A group, or an evaluation, from a rollout worker: what it holds, whatever becomes of the engines that generate it."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout.errors import BaselineError, RewardError
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Prompt, SamplingParams
from rollout.worker.worker import derive_seed
from tests.fakes.engine_client import FakeEngine, decode, expected_answer
from tests.fakes.local_actor import view_of
from tests.fakes.rollout_worker import ANSWER, MAX_TOKENS, generated, item, segments, worker
from tests.fakes.trajectories import make_chunk
from tests.fakes.virtual_time import in_virtual_time, run_virtual


@in_virtual_time
async def test_a_group_has_every_sample_in_order_with_exact_tokens_and_rewards() -> None:
    engine = FakeEngine("e0", version=2)
    group = await worker(engine).run_group(item(start_version=2))
    assert (group.group_id, group.start_version) == (5, 2)
    assert [trajectory.sample_index for trajectory in group.trajectories] == [0, 1, 2, 3]
    for trajectory in group.trajectories:
        (turn,) = trajectory.turns()
        assert turn.token_ids.tolist() == [7, 8, 9, *ANSWER]
        np.testing.assert_array_equal(turn.logprobs[3:], -np.array(ANSWER, np.float32))
        assert segments(trajectory) == [(2, MAX_TOKENS)]
        assert (trajectory.status, trajectory.text) == ("truncated", " ".join(map(str, ANSWER)))
        assert (trajectory.reward, trajectory.reward_parts) == (20.0, {"length": 1.0})
        assert trajectory.timings["generate_s"] == pytest.approx(0.07)
    assert len(engine.calls) == 1, "one streaming call per group"


@in_virtual_time
async def test_a_response_that_ends_is_completed_and_its_end_token_is_trained_but_not_in_the_text() -> None:
    group = await worker(FakeEngine("e0", stop_one_in=5)).run_group(item())
    answer = expected_answer(item().prompt.token_ids, MAX_TOKENS, stop_one_in=5)
    assert answer[-1] == 0 and len(answer) < MAX_TOKENS
    ended = group.trajectories[0]
    assert (ended.status, generated(ended), ended.text) == ("completed", answer, " ".join(map(str, answer[:-1])))


@pytest.mark.parametrize("chunks_before_death", range(24))
@in_virtual_time
async def test_a_stop_string_ends_a_response_at_the_same_token_wherever_its_engine_died(
    chunks_before_death: int,
) -> None:
    engines = FakeEngine("e0", die_after_chunks=chunks_before_death), FakeEngine("e1")
    stop = decode(ANSWER[10:14])  # a chunk ends in its middle
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, stop=(stop,))
    group = await worker(*engines, sampling=sampling, greedy_baseline=True).run_group(item())
    for trajectory in group.generated:
        assert (generated(trajectory), trajectory.status) == (ANSWER[:14], "completed")


@pytest.mark.parametrize("chunks_before_death", range(0, 28, 3))
@in_virtual_time
async def test_an_engine_that_dies_loses_at_most_what_it_had_not_yet_streamed(chunks_before_death: int) -> None:
    dying, other = FakeEngine("e0", version=1, die_after_chunks=chunks_before_death), FakeEngine("e1", version=2)
    busy = worker(dying, other)
    group = await busy.run_group(item(start_version=1))
    recovered: list[int] = []
    for index, trajectory in enumerate(group.trajectories):
        assert generated(trajectory) == ANSWER
        # Round-robin over 4 samples, 3 tokens per chunk: this many were streamed before the end.
        kept = min(3 * ((chunks_before_death - index + 3) // 4), MAX_TOKENS)
        recovered += [kept] * (kept < MAX_TOKENS)
        assert segments(trajectory) == [(v, n) for v, n in ((1, kept), (2, MAX_TOKENS - kept)) if n]
    report = busy.report()
    assert report.lost_engines == {"e0": (0, "e0 was killed")}
    assert (report.recovered_requests, report.recovered_tokens) == (len(recovered), sum(recovered))
    for call in other.calls:
        assert {one.max_tokens + len(t) for one, t in zip(call.params, call.token_ids, strict=True)} == {3 + MAX_TOKENS}


@in_virtual_time
async def test_all_engines_dead_fails_the_group_with_every_reason() -> None:
    busy = worker(FakeEngine("e0", die_after_chunks=4), FakeEngine("e1", die_after_chunks=0))
    with pytest.raises(NoReplica, match="e0: e0 was killed; e1: e1 was killed"):
        await busy.run_group(item())
    report = busy.report()
    assert (report.recovered_requests, report.recovered_tokens) == (4, 12), "once, to the second one"
    assert report.lost_tokens == 12
    assert asyncio.all_tasks() == {asyncio.current_task()}


@in_virtual_time
async def test_requests_returned_continue_until_done_and_cost_no_engine() -> None:
    engine = FakeEngine("e0", give_back_after_chunks=2)
    busy = worker(engine)
    group = await busy.run_group(item())
    assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
    assert len(engine.calls) == 4  # 6 + 6 + 6 + 2 tokens
    assert busy.report().lost_engines == {}


@pytest.mark.parametrize(("timeout_s", "ends_at_s"), [(600.0, None), (30.0, 30.0)])
@in_virtual_time
async def test_an_engine_that_returns_everything_is_tried_ever_more_rarely_and_not_indefinitely(
    timeout_s: float, ends_at_s: float | None
) -> None:
    engine, now = FakeEngine("e0", give_back_after_chunks=0), asyncio.get_running_loop().time
    error, words = (TimeoutError, "request_timeout_s=30") if ends_at_s else (RuntimeError, "100 times in a row without")
    with pytest.raises(error, match=words):
        await worker(engine, request_timeout_s=timeout_s).run_group(item())
    assert len(engine.calls) <= 100
    assert now() == ends_at_s if ends_at_s else now() > 60.0


@in_virtual_time
async def test_an_engine_with_older_weights_than_the_group_may_have_is_excluded() -> None:
    busy = worker(FakeEngine("e0", version=3), FakeEngine("e1", version=4))
    group = await busy.run_group(item(start_version=4))
    assert {trajectory.policy_versions for trajectory in group.trajectories} == {(4,)}
    assert "policy version 3 although 4 is live" in busy.report().lost_engines["e0"][1]


@in_virtual_time
async def test_versions_that_change_in_mid_response_are_labelled_exactly() -> None:
    engine = FakeEngine("e0")
    running = asyncio.create_task(worker(engine).run_group(item()))
    await asyncio.sleep(0.035)  # after three chunks
    engine.version = 1
    assert [segments(trajectory) for trajectory in (await running).trajectories] == [[(0, 9), (1, 11)]] * 4


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
        async def stream_group(self, *args: Any) -> Any:
            async for index, chunk in super().stream_group(*args):
                if self.num_chunks > 6:
                    raise TimeoutError("abort did not end within 5.0 s; the engine is declared dead")
                yield index, chunk

    other = FakeEngine("e1")
    busy = worker(Late("e0"), other)
    group = await busy.run_group(item())
    assert [generated(trajectory) for trajectory in group.trajectories] == [ANSWER] * 4
    assert busy.report().lost_engines == {"e0": (0, "abort did not end within 5.0 s; the engine is declared dead")}
    assert len(other.calls[0].token_ids[0]) > 3, "from what it had"


@in_virtual_time
async def test_an_engine_that_computes_no_numbers_is_reported() -> None:
    class Numberless(FakeEngine):
        async def stream_group(self, *args: Any) -> Any:
            async for index, chunk in super().stream_group(*args):
                yield index, replace(chunk, logprobs=np.where(np.arange(len(chunk.logprobs)), np.nan, chunk.logprobs))

    with pytest.raises(ValueError, match=r"no finite log-probability for 2 of 3 tokens; .* model.rollout_dtype"):
        await worker(Numberless("e0")).run_group(item())


@in_virtual_time
async def test_a_cancelled_group_aborts_its_requests_and_returns_the_load() -> None:
    engine = FakeEngine("e0", step_s=1.0)
    busy = worker(engine)
    task = asyncio.create_task(busy.run_group(item()))
    await asyncio.sleep(2.5)
    assert busy.report().in_flight == {"e0": 4}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and engine.calls[0].is_closed
    assert engine.num_abort_calls <= 1, "all in one call"
    lost = busy.report().lost_tokens
    assert busy.report().in_flight == {"e0": 0} and 0 < lost < 4 * MAX_TOKENS
    await busy.run_group(item(group_id=6))
    assert busy.report().lost_tokens == lost, "a group that comes to its end loses nothing"


# An engine that the driver reports lost


@in_virtual_time
async def test_what_a_lost_engine_was_generating_continues_elsewhere_from_its_prefix() -> None:
    lost, other = FakeEngine("e0", version=1), FakeEngine("e1", version=2)
    busy = worker(lost, other)
    running = asyncio.create_task(busy.run_group(item(start_version=1)))
    await asyncio.sleep(0.035)  # three chunks of three tokens
    busy.update(view_of(e0="lost"), {})
    group = await running
    assert [generated(t) for t in group.trajectories] == [ANSWER] * 4
    assert {tuple(segments(t)) for t in group.trajectories} == {((1, 9), (2, MAX_TOKENS - 9))}
    assert lost.calls[0].is_closed
    assert [len(tokens) for tokens in other.calls[0].token_ids] == [3 + 9] * 4
    assert busy.report().in_flight == {"e0": 0, "e1": 0}


@in_virtual_time
async def test_an_engine_that_hangs_is_left_as_soon_as_it_is_lost() -> None:
    busy = worker(FakeEngine("e0", hangs=True), FakeEngine("e1", hangs=True))
    running = asyncio.create_task(busy.run_group(item()))
    await asyncio.sleep(1.0)
    busy.update(view_of(e0="lost"), {})
    await asyncio.sleep(0.1)
    assert busy.report().in_flight == {"e0": 0, "e1": 4}
    busy.update(view_of(e1="lost"), {})
    with pytest.raises(NoReplica, match="e0: weight sync: dead; e1: weight sync: dead"):
        await running


# Seeds


def test_every_submission_of_every_sample_has_its_own_seed_whatever_else_is_in_the_group() -> None:
    async def seeds(**changes: Any) -> list[int | None]:
        engine = FakeEngine("e0", give_back_after_chunks=3)
        busy = worker(engine, **changes)
        for group_id in (1, 2):
            await busy.run_group(item(group_id=group_id))
        return [one.seed for call in engine.calls for one in call.params if one.temperature]

    first, second = run_virtual(seeds()), run_virtual(seeds(greedy_baseline=True))
    assert first == second
    assert None not in first and len(set(first)) == len(first) == 2 * 4 * 3


@in_virtual_time
async def test_seeds_of_training_can_be_left_to_the_engine_and_those_of_an_evaluation_never() -> None:
    engine = FakeEngine("e0")
    busy = worker(engine, per_request_seed=False)
    await busy.run_group(item())
    assert {(one.seed, one.temperature) for one in engine.calls[0].params} == {(None, 0.7)}
    await busy.evaluate([item().prompt] * 2, SamplingParams(max_tokens=8, temperature=0.7), engine="e0")
    seeds = {one.seed for one in engine.calls[-1].params}
    assert len(seeds) == 2 and None not in seeds


def test_a_seed_is_the_same_in_another_process() -> None:
    """Python's own hash of a string changes from process to process."""
    code = "from rollout.worker.worker import derive_seed; print(derive_seed(1, 'train/17', 3, 0))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == derive_seed(1, "train/17", 3, 0)
    assert derive_seed(1, "a", 12) != derive_seed(1, "a1", 2)


# Rewards and the greedy response


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
    assert [one.temperature for one in call.params] == [0.7] * group_size + [0.0]
    assert call.params[-1] == SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    assert group.num_generated_tokens == (group_size + 1) * MAX_TOKENS
    assert group.has_equal_rewards
    other = replace(group, baseline=replace(group.baseline, reward=0.0))
    assert not other.has_equal_rewards and replace(other, baseline=None).has_equal_rewards


@in_virtual_time
async def test_a_baseline_without_a_reward_fails_the_group() -> None:
    busy = worker(FakeEngine("e0"), score=fails_at(3), group_size=2, greedy_baseline=True)
    with pytest.raises(BaselineError, match="the greedy response to prompt train/1 failed: took longer than 10 s"):
        await busy.run_group(item())


# Evaluations: responses go through a window, and time runs for each from its submission


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
