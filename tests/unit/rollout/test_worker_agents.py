"""Agent loops in a real worker: what they may do, and what a loop that fails costs."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from rollout.agent.loop import MultiTurnLoop, Reply, SingleTurnLoop
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError, RewardError, RewardTimeout
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.scheduler import NoReplica
from rollout.types import SamplingParams, ToolUse, Trajectory
from tests.fakes.engine_client import FakeEngine, decode
from tests.fakes.rollout_worker import ANSWER, Countdown, Played, counting_down, generated, item, worker
from tests.fakes.virtual_time import in_virtual_time, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agent.loop import Generate
    from rollout.reward.call import RewardResult
    from rollout.types import Prompt, Turn


@in_virtual_time
async def test_turns_carry_their_rewards_and_the_outcome_comes_on_top() -> None:
    busy = worker(FakeEngine("e0", stop_one_in=4), loop=counting_down(2), greedy_baseline=True)
    group = await busy.run_group(item())
    for trajectory in group.generated:
        assert trajectory.status == "completed"
        assert [turn.reward for turn in trajectory.turns()] == [0.5, 2.0]
        assert trajectory.total_reward == trajectory.reward + 2.5 == len(trajectory.text.split()) + 2.5
    (evaluated,) = await busy.evaluate([item().prompt], SamplingParams(max_tokens=20), engine="e0")
    assert [turn.reward for turn in evaluated.turns()] == [0.5, 2.0], "an evaluation uses the loop, too"


@in_virtual_time
async def test_trajectories_carry_what_their_environment_counted() -> None:
    class Counting(Countdown):
        tool_use = ToolUse(num_calls=3, num_errors=1)

    for environment, expected in ((Countdown, None), (Counting, ToolUse(num_calls=3, num_errors=1))):
        loop = MultiTurnLoop(lambda _, kind=environment: kind(2), max_turns=3)
        group = await worker(FakeEngine("e0", stop_one_in=4), loop=loop).run_group(item())
        assert {trajectory.tool_use for trajectory in group.trajectories} == {expected}


@pytest.mark.parametrize(("stop", "num_tokens"), [(None, 14), ("second", 8), (("second", "never"), 8), ((), 20)])
@in_virtual_time
async def test_the_stop_strings_of_a_call_take_the_place_of_those_of_the_run(stop: Any, num_tokens: int) -> None:
    stop = decode(ANSWER[5:8]) if stop == "second" else (decode(ANSWER[5:8]), "never") if stop else stop

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        builder = TrajectoryBuilder(prompt.token_ids)
        completion = await generate(prompt.token_ids, max_tokens, stop=stop)
        builder.add_generated(completion)
        return builder.finish("completed" if completion.finish_reason == "stop" else "truncated")

    sampling = SamplingParams(max_tokens=20, stop=(decode(ANSWER[10:14]),))
    engines = FakeEngine("e0", die_after_chunks=2), FakeEngine("e1")  # with six tokens of the only response
    group = await worker(*engines, loop=Played(run), sampling=sampling, group_size=1).run_group(item())
    (trajectory,) = group.trajectories
    assert generated(trajectory) == ANSWER[:num_tokens]
    assert trajectory.status == ("truncated" if num_tokens == 20 else "completed")


async def responds_twice(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
    """A response, and another one to the prompt and the last token of the first."""
    builder = TrajectoryBuilder(prompt.token_ids)
    for _ in range(2):
        builder.add_generated(await generate(builder.token_ids(), max_tokens - 1))
        builder.start_sequence(np.array([*prompt.token_ids, builder.token_ids()[-1]], np.int32))
    return builder.finish("completed")


@in_virtual_time
async def test_a_trajectory_may_consist_of_several_sequences_if_it_is_allowed() -> None:
    group = await worker(FakeEngine("e0"), loop=Played(responds_twice), agent_max_sequences=2).run_group(item())
    for trajectory in group.trajectories:
        assert trajectory.status == "completed" and trajectory.num_lost_tokens == 0
        first, second = trajectory.turns()
        assert second.token_ids[:4].tolist() == [7, 8, 9, first.token_ids[-1]]
        lines = [line.split() for line in trajectory.text.split("\n")]
        assert [len(line) for line in lines] == [19, 19] and lines[0] == [str(token) for token in ANSWER[:19]]
    with pytest.raises(AgentError, match="consists of 2 token sequences"):
        await worker(FakeEngine("e0"), loop=Played(responds_twice)).run_group(item())


@in_virtual_time
async def test_the_text_of_several_turns_has_what_was_between_them() -> None:
    group = await worker(FakeEngine("e0", stop_one_in=4), loop=counting_down(2), group_size=1).run_group(item())
    (trajectory,) = group.trajectories
    first, second = (turn.token_ids[turn.is_generated].tolist() for turn in trajectory.turns())
    assert trajectory.text == " ".join(str(token) for token in [*first, 60, *second] if token)


@in_virtual_time
async def test_a_worker_that_closes_closes_what_its_loop_holds() -> None:
    loop: Any = Played(responds_twice)
    await worker(FakeEngine("e0"), loop=loop).close()
    loop.close = AsyncMock()
    await worker(FakeEngine("e0"), loop=loop).close()
    loop.close.assert_awaited_once_with()


@in_virtual_time
async def test_a_loop_may_ask_for_several_responses_at_once() -> None:
    async def asks_twice(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        both = await asyncio.gather(generate(prompt.token_ids, 5), generate(prompt.token_ids, 5))
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(both[1])
        return builder.finish("completed")

    engine = FakeEngine("e0")
    group = await worker(engine, loop=Played(asks_twice), group_size=2).run_group(item())
    (call,) = engine.calls
    assert len(set(call.request_ids)) == len(call.request_ids) == 4
    assert [t.num_lost_tokens for t in group.trajectories] == [5, 5]


# Loops that fail


def failing_on_odd_calls(fail: Any) -> Played:
    """Every second trajectory goes wrong in its own way, the others respond in one turn."""
    num_calls = 0

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        nonlocal num_calls
        num_calls += 1
        run_one = counting_down(1).run if num_calls % 2 else fail
        return await run_one(prompt, max_tokens, generate)

    return Played(run)


def raises(error: BaseException) -> Any:
    async def run(*_: Any) -> Any:
        raise error

    return run


def asks(of: Callable[[np.ndarray], np.ndarray] = lambda prompt: prompt, max_tokens: Any = 1, **how: Any) -> Any:
    async def run(prompt: Prompt, _: int, generate: Generate) -> Any:
        await generate(of(prompt.token_ids), max_tokens, **how)

    return run


def steps_with(reply: Callable[[], Reply]) -> Any:
    class Environment:
        async def step(self, turns: tuple[Turn, ...]) -> Reply:
            return reply()

    return MultiTurnLoop(lambda _: Environment(), max_turns=2).run


async def hangs(*_: Any) -> Any:
    await asyncio.sleep(10_000)


async def waits_for_what_others_cancelled(*_: Any) -> Any:
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    await shared


async def returns_lists(prompt: Prompt, *_: Any) -> Any:
    finished = TrajectoryBuilder(prompt.token_ids).finish("completed")
    return replace(finished, turn_ends=finished.turn_ends.tolist())


async def returns_nothing(*_: Any) -> Any:
    return None


async def is_impatient(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
    async with asyncio.timeout(0.005):
        await generate(prompt.token_ids, max_tokens)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (raises(KeyError("tool")), r"agent loop 'mine.make': raised KeyError: 'tool' \(test_worker_agents.py:\d+\)"),
        (raises(SystemExit("3 + 4")), r"raised SystemExit: 3 \+ 4"),
        (waits_for_what_others_cancelled, "raised CancelledError"),
        (is_impatient, "raised TimeoutError"),
        (returns_lists, "raised AttributeError: 'list' object has no attribute 'tolist'"),
        (returns_nothing, "returned a NoneType; return what TrajectoryBuilder.finish"),
        (
            steps_with(lambda: Reply(token_ids=[1.9, 2.5])),  # type: ignore[list-item]
            r"raised ValueError: context must be a list of token ids, got float64 of shape \(2,\)",
        ),
        (
            steps_with(lambda: Reply(token_ids=None, reward=math.nan)),
            "raised ValueError: reward of a turn must be a finite number, got nan",
        ),
        (hangs, r"the trajectory took longer than task.agent_timeout_s=100"),
        (asks(max_tokens=0), "needs max_tokens >= 1 and whole, got 0"),
        (asks(max_tokens=10.0), "needs max_tokens >= 1 and whole, got 10.0"),
        (asks(lambda prompt: prompt / 2), r"needs a list of token ids, got float64 of shape \(\d+,\)"),
        (asks(lambda prompt: np.stack([prompt] * 2)), r"needs a list of token ids, got int32 of shape \(2, \d+\)"),
        (asks(stop=["a", ""]), r"needs stop strings that are not empty, got \['a', ''\]"),
    ],
)
@in_virtual_time
async def test_a_loop_that_fails_costs_its_trajectory_and_not_the_others(fail: Any, message: str) -> None:
    group = await worker(FakeEngine("e0", stop_one_in=4), loop=failing_on_odd_calls(fail)).run_group(item())
    good, bad = group.trajectories[::2], group.trajectories[1::2]
    assert all(t.status == "completed" and t.error == "" for t in good)
    for trajectory in bad:
        assert trajectory.status == "failed" and math.isnan(trajectory.reward)
        assert len(trajectory.turns()) == 1 and not trajectory.loss_mask.any()
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad[0].error)


@in_virtual_time
async def test_a_loop_that_always_fails_fails_the_group_with_its_reason() -> None:
    with pytest.raises(AgentError, match=r"no sample of prompt train/1 ended: agent loop .* raised KeyError"):
        await worker(FakeEngine("e0"), loop=Played(raises(KeyError("tool")))).run_group(item())


@in_virtual_time
async def test_a_failure_of_the_engines_is_none_of_the_loop_whatever_the_loop_makes_of_it() -> None:
    async def swallow(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        try:
            await generate(prompt.token_ids, max_tokens)
        except NoReplica as error:
            raise KeyError("hidden") from error
        raise AssertionError

    with pytest.raises(NoReplica, match="e0 was killed"):
        await worker(FakeEngine("e0", die_after_chunks=0), loop=Played(swallow)).run_group(item())


# Tokens that come to nothing


@in_virtual_time
async def test_tokens_of_a_loop_that_fails_after_a_turn_are_counted_as_those_of_a_failed_response() -> None:
    async def fails_after_a_turn(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
        await generate(prompt.token_ids, 7)
        raise KeyError("tool")

    group = await worker(FakeEngine("e0"), loop=failing_on_odd_calls(fails_after_a_turn)).run_group(item())
    assert [(t.num_generated_tokens, t.num_lost_tokens) for t in group.trajectories] == [(20, 0), (0, 7)] * 2
    assert group.num_generated_tokens == 54


@pytest.mark.parametrize("fails", [False, True])
@in_virtual_time
async def test_a_generation_that_its_loop_cancels_ends_in_the_engine_and_its_tokens_are_lost_once(fails: bool) -> None:
    async def thinks_for_a_moment(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generate(prompt.token_ids, 15), 0.025)
        if fails:
            raise KeyError("tool")
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(await generate(prompt.token_ids, 9))
        return builder.finish("completed")

    engine = FakeEngine("e0", step_s=0.01)
    busy = worker(engine, loop=Played(thinks_for_a_moment), group_size=2)
    if fails:
        with pytest.raises(AgentError, match="tool"):
            await busy.run_group(item())
        assert busy.report().lost_tokens == 3 * engine.num_chunks == 12
        return
    group = await busy.run_group(item())
    first, second = engine.calls
    assert engine.aborted == set(first.request_ids) and not engine.aborted & set(second.request_ids)
    assert [(t.num_generated_tokens, t.num_lost_tokens) for t in group.trajectories] == [(9, 6), (9, 6)]
    assert group.num_generated_tokens == 3 * engine.num_chunks
    assert (busy.report().lost_tokens, busy.report().in_flight) == (0, {"e0": 0})


@in_virtual_time
async def test_a_generation_that_is_cancelled_before_there_was_room_never_gets_to_an_engine() -> None:
    num_late = 0

    async def cancels_the_first_late_one(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        nonlocal num_late
        num_late += prompt.prompt_id == "late"
        builder = TrajectoryBuilder(prompt.token_ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.015 if num_late == 1 else None):
                builder.add_generated(await generate(prompt.token_ids, max_tokens))
        return builder.finish("completed")

    engine, bounds = FakeEngine("e0", step_s=0.01), LimitRange(lowest=2, highest=2)
    busy = worker(engine, loop=Played(cancels_the_first_late_one), group_size=2, concurrency=bounds)
    early = asyncio.create_task(busy.run_group(item()))
    await asyncio.sleep(0.001)
    await asyncio.gather(early, busy.run_group(item(group_id=6, prompt_id="late")))
    assert [len(call.request_ids) for call in engine.calls] == [2, 1]
    assert (busy.report().in_flight, engine.aborted) == ({"e0": 0}, set())


# What becomes of a trajectory that goes wrong, by algorithm.on_failure


def run_one(*loops: Any, step_s: float = 0.01, **changes: Any) -> Trajectory:
    """The first sample of a group that has one for each loop."""
    left = list(loops)

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        return await left.pop(0).run(prompt, max_tokens, generate)

    async def main() -> Trajectory:
        busy = worker(FakeEngine("e0", step_s=step_s), loop=Played(run), group_size=len(loops), **changes)
        return (await busy.run_group(item())).trajectories[0]

    return run_virtual(main())


async def fails_after_two_turns(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
    builder = TrajectoryBuilder(prompt.token_ids)
    builder.add_generated(await generate(builder.token_ids(), 3))
    builder.add_context(np.array([60]))
    await generate(builder.token_ids(), 2)
    raise KeyError("tool")


async def hangs_after_a_turn(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
    await generate(prompt.token_ids, 4)
    await asyncio.Event().wait()


async def hanging_reward(prompt: Prompt, text: str) -> RewardResult:
    raise RewardTimeout("the call took longer than 10 s")


async def broken_reward(prompt: Prompt, text: str) -> RewardResult:
    raise RewardError("returned None")


SLOW = {"step_s": 1.0, "request_timeout_s": 4.5}
FAILURES: dict[str, tuple[str, Any, dict[str, Any], str, int]] = {
    "generation": ("timeout", SingleTurnLoop(), SLOW, "request_timeout_s=4.5", 12),
    "agent-hangs": ("timeout", Played(hangs_after_a_turn), {}, "task.agent_timeout_s=100", 4),
    "agent-raises": ("agent_error", Played(fails_after_two_turns), {}, "raised KeyError: 'tool'", 5),
    "reward-hangs": ("reward_timeout", SingleTurnLoop(), {"score": hanging_reward}, "longer than 10 s", 20),
}


@pytest.mark.parametrize(
    ("failure", "rule"),
    [*((failure, "zero") for failure in FAILURES), *((failure, "score") for failure in list(FAILURES)[:3])],
)
def test_what_went_wrong_is_kept_with_its_tokens_and_the_reward_of_the_rule(failure: str, rule: str) -> None:
    kind, loop, changes, reason, num_tokens = FAILURES[failure]
    kept = run_one(loop, on_failure={kind: rule}, **changes)
    assert (kept.status, kept.failure, kept.num_generated_tokens) == ("truncated", kind, num_tokens)
    assert reason in kept.error
    assert kept.reward == (0.0 if rule == "zero" else float(len(kept.text.split())))
    assert kept.num_lost_tokens == 0 and "reward_s" in kept.timings
    if failure == "agent-raises":  # its turns are those that it asked for
        assert kept.token_ids[:7].tolist() == [7, 8, 9, *ANSWER[:3], 60]
        assert kept.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] + [True] * 2


@pytest.mark.parametrize("failure", ["agent-hangs", "agent-raises", "reward-hangs"])
def test_what_is_not_kept_is_failed_with_its_kind(failure: str) -> None:
    kind, loop, changes, reason, _ = FAILURES[failure]
    dropped = run_one(loop, SingleTurnLoop(), **changes)
    assert (dropped.status, dropped.failure, math.isnan(dropped.reward)) == ("failed", kind, True)
    assert reason in dropped.error


@pytest.mark.parametrize("rule", ["score", "zero"])
def test_an_error_of_the_reward_and_a_failure_without_a_token_are_dropped_whatever_the_rules(rule: str) -> None:
    rules = dict.fromkeys(("timeout", "agent_error", "reward_timeout"), rule)
    failed = run_one(SingleTurnLoop(), score=broken_reward, on_failure=rules)
    assert (failed.status, failed.failure) == ("failed", "reward_error")
    silent = run_one(Played(raises(KeyError("tool"))), SingleTurnLoop(), on_failure=rules)
    assert (silent.status, silent.failure) == ("failed", "agent_error")
