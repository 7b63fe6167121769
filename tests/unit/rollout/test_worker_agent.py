"""Agent loops in a real worker: what they may do, and what happens when they fail."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from rollout.agent.loop import MultiTurnLoop, Reply
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.scheduler import NoReplica
from rollout.types import SamplingParams, ToolUse, Trajectory, Turn
from rollout.worker.worker import RolloutWorker
from tests.fakes.engine_client import FakeEngine, decode
from tests.fakes.virtual_time import in_virtual_time
from tests.unit.rollout.test_worker import ANSWER, Numbers, generated, item, length_score, spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.agent.loop import AgentLoop, Generate
    from rollout.types import Prompt


class Countdown:
    """Says 60 and gives half a point after every turn but the last, which gets 2."""

    def __init__(self, num_turns: int) -> None:
        self.num_left = num_turns

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        self.num_left -= 1
        return Reply(token_ids=[60], reward=0.5) if self.num_left else Reply(token_ids=None, reward=2.0)


class Played:
    """A loop out of a function."""

    def __init__(self, run: Any) -> None:
        self.run = run


def agent_worker(loop: AgentLoop, *engines: FakeEngine, **changes: Any) -> RolloutWorker:
    clock = asyncio.get_running_loop().time
    settings = spec(**({"agent": "mine.make", "agent_timeout_s": 100.0} | changes))
    return RolloutWorker(settings, engines, tokenizer=Numbers(), score=length_score, loop=loop, clock=clock)


@in_virtual_time
async def test_turns_carry_their_rewards_and_the_outcome_comes_on_top() -> None:
    loop = MultiTurnLoop(lambda _: Countdown(2), max_turns=3)
    group = await agent_worker(loop, FakeEngine("e0", stop_one_in=4)).run_group(item())
    ended = [t for t in group.trajectories if t.status == "completed"]
    assert ended
    for trajectory in ended:
        assert [turn.reward for turn in trajectory.turns()] == [0.5, 2.0]
        assert trajectory.total_reward == trajectory.reward + 2.5 == len(trajectory.text.split()) + 2.5


@in_virtual_time
async def test_trajectories_carry_what_their_environment_counted() -> None:
    class Counting(Countdown):
        tool_use = ToolUse(num_calls=3, num_errors=1)

    for environment, expected in ((Countdown, None), (Counting, ToolUse(num_calls=3, num_errors=1))):
        loop = MultiTurnLoop(lambda _, kind=environment: kind(2), max_turns=3)
        group = await agent_worker(loop, FakeEngine("e0", stop_one_in=4)).run_group(item())
        assert {trajectory.tool_use for trajectory in group.trajectories} == {expected}


@in_virtual_time
async def test_evaluation_and_the_greedy_baseline_use_the_loop_too() -> None:
    loop = MultiTurnLoop(lambda _: Countdown(2), max_turns=3)
    busy = agent_worker(loop, FakeEngine("e0", stop_one_in=4), greedy_baseline=True, group_size=1)
    group = await busy.run_group(item())
    assert group.baseline is not None
    assert len(group.baseline.turns()) == 2
    (trajectory,) = await busy.evaluate([item().prompt], SamplingParams(max_tokens=20), engine="e0")
    assert [turn.reward for turn in trajectory.turns()] == [0.5, 2.0]


@pytest.mark.parametrize(("stop", "num_tokens"), [(None, 14), ("second", 8), (("second", "never"), 8), ((), 20)])
@in_virtual_time
async def test_the_stop_strings_of_a_call_take_the_place_of_those_of_the_run(stop: Any, num_tokens: int) -> None:
    stop = decode(ANSWER[5:8]) if stop == "second" else (decode(ANSWER[5:8]), "never") if stop else stop

    async def asks(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        builder = TrajectoryBuilder(prompt.token_ids)
        completion = await generate(prompt.token_ids, max_tokens, stop=stop)
        builder.add_generated(completion)
        return builder.finish("completed" if completion.finish_reason == "stop" else "truncated")

    sampling = SamplingParams(max_tokens=20, stop=(decode(ANSWER[10:14]),))
    # The first engine dies with six tokens of the only response.
    engines = FakeEngine("e0", die_after_chunks=2), FakeEngine("e1")
    group = await agent_worker(Played(asks), *engines, sampling=sampling, group_size=1).run_group(item())
    (trajectory,) = group.trajectories
    assert generated(trajectory) == ANSWER[:num_tokens]
    assert trajectory.status == ("truncated" if num_tokens == 20 else "completed")


async def says_it_twice(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
    """A response, and another one to the prompt and the last token of the first."""
    builder = TrajectoryBuilder(prompt.token_ids)
    for _ in range(2):
        builder.add_generated(await generate(builder.token_ids(), max_tokens - 1))
        builder.start_sequence(np.array([*prompt.token_ids, builder.token_ids()[-1]], np.int32))
    return builder.finish("completed")


@in_virtual_time
async def test_a_trajectory_may_consist_of_several_sequences_if_it_is_allowed() -> None:
    allowed = agent_worker(Played(says_it_twice), FakeEngine("e0"), agent_max_sequences=2)
    group = await allowed.run_group(item())
    for trajectory in group.trajectories:
        assert trajectory.status == "completed" and trajectory.num_lost_tokens == 0
        first, second = trajectory.turns()
        asked = item().prompt.token_ids.tolist()
        assert second.token_ids[: len(asked) + 1].tolist() == [*asked, first.token_ids[-1]]
        assert len(trajectory.text.split()) == trajectory.num_generated_tokens
    with pytest.raises(AgentError, match="consists of 2 token sequences"):
        await agent_worker(Played(says_it_twice), FakeEngine("e0")).run_group(item())


async def test_a_worker_that_closes_closes_what_its_loop_holds() -> None:
    loop: Any = Played(says_it_twice)
    await agent_worker(loop, FakeEngine("e0")).close()
    loop.close = AsyncMock()
    await agent_worker(loop, FakeEngine("e0")).close()
    loop.close.assert_awaited_once_with()


def failing_on_odd_calls(fail: Any) -> AgentLoop:
    """Every second trajectory goes wrong in its own way, the others respond in one turn."""
    calls = 0

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            return await fail(prompt, max_tokens, generate)
        return await MultiTurnLoop(lambda _: Countdown(1), max_turns=1).run(prompt, max_tokens, generate)

    return Played(run)


def raises(error: BaseException) -> Any:
    async def run(*_: Any) -> Any:
        raise error

    return run


def asks(of: Callable[[np.ndarray], np.ndarray] = lambda prompt: prompt, max_tokens: Any = 1, **how: Any) -> Any:
    async def run(prompt: Prompt, _: int, generate: Generate) -> Any:
        await generate(of(prompt.token_ids), max_tokens, **how)

    return run


async def hangs(*_: Any) -> Any:
    await asyncio.sleep(10_000)


async def waits_for_what_others_cancelled(*_: Any) -> Any:
    shared = asyncio.get_running_loop().create_future()
    shared.cancel()
    await shared


async def returns_lists(prompt: Prompt, *_: Any) -> Any:
    finished = TrajectoryBuilder(prompt.token_ids).finish("completed")
    return replace(finished, turn_ends=finished.turn_ends.tolist())


async def replies_with_text(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
    class Talking:
        async def step(self, turns: tuple[Turn, ...]) -> Reply:
            return Reply(token_ids=[1.9, 2.5])  # type: ignore[list-item]

    return await MultiTurnLoop(lambda _: Talking(), max_turns=2).run(prompt, max_tokens, generate)


async def returns_nothing(*_: Any) -> Any:
    return None


async def rewards_with_nan(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
    class Broken:
        async def step(self, turns: tuple[Turn, ...]) -> Reply:
            return Reply(token_ids=None, reward=float("nan"))

    return await MultiTurnLoop(lambda _: Broken(), max_turns=2).run(prompt, max_tokens, generate)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (raises(KeyError("tool")), r"agent loop 'mine.make': raised KeyError: 'tool' \(test_worker_agent.py:\d+\)"),
        (raises(SystemExit("3 + 4")), r"raised SystemExit: 3 \+ 4"),
        (waits_for_what_others_cancelled, "raised CancelledError"),
        (returns_lists, "raised AttributeError: 'list' object has no attribute 'tolist'"),
        (replies_with_text, r"raised ValueError: context must be token ids in one row, got float64 of shape \(2,\)"),
        (hangs, r"the trajectory took longer than task.agent_timeout_s=100"),
        (returns_nothing, "returned a NoneType; return what TrajectoryBuilder.finish"),
        (asks(max_tokens=0), "needs max_tokens >= 1 and whole, got 0"),
        (asks(max_tokens=10.0), "needs max_tokens >= 1 and whole, got 10.0"),
        (asks(lambda prompt: prompt / 2), r"needs whole numbers in one row, got float64 of shape \(\d+,\)"),
        (
            asks(lambda prompt: np.stack([prompt, prompt])),
            r"needs whole numbers in one row, got int32 of shape \(2, \d+\)",
        ),
        (asks(stop=["a", ""]), r"needs stop strings that are not empty, got \['a', ''\]"),
        (rewards_with_nan, "raised ValueError: reward of a turn must be a finite number, got nan"),
    ],
)
@in_virtual_time
async def test_a_loop_that_fails_costs_its_trajectory_and_not_the_others(fail: Any, message: str) -> None:
    group = await agent_worker(failing_on_odd_calls(fail), FakeEngine("e0", stop_one_in=4)).run_group(item())
    good, bad = group.trajectories[::2], group.trajectories[1::2]
    assert {t.status for t in bad} == {"failed"}
    assert all(np.isnan(t.reward) and len(t.turns()) == 1 and not t.turns()[0].is_generated.any() for t in bad)
    assert all(t.status == "completed" and t.error == "" for t in good)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(bad[0].error)


@in_virtual_time
async def test_tokens_of_a_loop_that_fails_after_a_turn_are_counted_as_those_of_a_failed_response() -> None:
    async def fails_after_a_turn(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
        await generate(prompt.token_ids, 7)
        raise KeyError("tool")

    group = await agent_worker(failing_on_odd_calls(fails_after_a_turn), FakeEngine("e0")).run_group(item())
    assert [t.num_generated_tokens for t in group.trajectories] == [20, 0] * 2
    assert [t.num_lost_tokens for t in group.trajectories] == [0, 7] * 2
    assert group.num_generated_tokens == 54


@in_virtual_time
async def test_a_loop_may_ask_for_several_responses_at_once() -> None:
    async def asks_twice(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        both = await asyncio.gather(generate(prompt.token_ids, 5), generate(prompt.token_ids, 5))
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(both[1])
        return builder.finish("completed")

    engine = FakeEngine("e0")
    group = await agent_worker(Played(asks_twice), engine, group_size=2).run_group(item())
    (call,) = engine.calls
    assert len(set(call.request_ids)) == len(call.request_ids) == 4
    assert [t.num_lost_tokens for t in group.trajectories] == [5, 5]


class NumberlessEngine(FakeEngine):
    """Its model computes NaN from the second token on."""

    async def stream_group(self, *args: Any) -> Any:
        async for index, chunk in super().stream_group(*args):
            logprobs = chunk.logprobs.copy()
            logprobs[1:] = np.nan
            yield index, replace(chunk, logprobs=logprobs)


@in_virtual_time
async def test_an_engine_that_computes_no_numbers_is_reported_and_is_no_fault_of_the_loop() -> None:
    busy = agent_worker(MultiTurnLoop(lambda _: Countdown(1), max_turns=1), NumberlessEngine("e0"))
    with pytest.raises(ValueError, match=r"no finite log-probability for 2 of 3 tokens; .* model.rollout_dtype"):
        await busy.run_group(item())


@in_virtual_time
async def test_a_generation_that_its_loop_cancels_ends_in_the_engine_and_its_tokens_count_as_lost() -> None:
    async def thinks_for_a_moment(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generate(prompt.token_ids, 15), 0.025)
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(await generate(prompt.token_ids, 9))
        return builder.finish("completed")

    engine = FakeEngine("e0", step_s=0.01)
    busy = agent_worker(Played(thinks_for_a_moment), engine, group_size=2)
    group = await busy.run_group(item())
    first, second = engine.calls
    assert engine.aborted == set(first.request_ids)
    assert not engine.aborted & set(second.request_ids)
    assert [(t.num_generated_tokens, t.num_lost_tokens) for t in group.trajectories] == [(9, 6), (9, 6)]
    assert group.num_generated_tokens == 3 * engine.num_chunks
    assert (busy.report().lost_tokens, sum(busy.report().in_flight.values())) == (0, 0)


@in_virtual_time
async def test_tokens_that_a_loop_cancelled_are_lost_once_when_the_group_fails_later() -> None:
    async def gives_up_and_fails(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(generate(prompt.token_ids, 15), 0.025)
        raise KeyError("tool")

    engine = FakeEngine("e0", step_s=0.01)
    busy = agent_worker(Played(gives_up_and_fails), engine, group_size=2)
    with pytest.raises(AgentError, match="tool"):
        await busy.run_group(item())
    assert busy.report().lost_tokens == 3 * engine.num_chunks == 12


@in_virtual_time
async def test_a_generation_that_is_cancelled_before_there_was_room_never_gets_to_an_engine() -> None:
    num_late = 0

    async def gives_the_first_late_one_up(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        nonlocal num_late
        num_late += prompt.prompt_id == "late"
        builder = TrajectoryBuilder(prompt.token_ids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.015 if num_late == 1 else None):
                builder.add_generated(await generate(prompt.token_ids, max_tokens))
        return builder.finish("completed")

    engine = FakeEngine("e0", step_s=0.01)
    bounds = LimitRange(lowest=2, highest=2)
    busy = agent_worker(Played(gives_the_first_late_one_up), engine, group_size=2, concurrency=bounds)
    early = asyncio.create_task(busy.run_group(item()))
    await asyncio.sleep(0.001)
    await asyncio.gather(early, busy.run_group(item(group_id=6, prompt_id="late")))
    assert [len(call.request_ids) for call in engine.calls] == [2, 1]
    assert (sum(busy.report().in_flight.values()), engine.aborted) == (0, set())


@in_virtual_time
async def test_a_loop_that_always_fails_fails_the_group_with_its_reason() -> None:
    with pytest.raises(AgentError, match=r"no sample of prompt train/1 ended: agent loop .* raised KeyError"):
        await agent_worker(Played(raises(KeyError("tool"))), FakeEngine("e0")).run_group(item())


@in_virtual_time
async def test_a_failure_of_the_engines_is_none_of_the_loop_whatever_the_loop_makes_of_it() -> None:
    async def swallow(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        try:
            await generate(prompt.token_ids, max_tokens)
        except NoReplica as error:
            raise KeyError("hidden") from error
        raise AssertionError

    with pytest.raises(NoReplica, match="e0 was killed"):
        await agent_worker(Played(swallow), FakeEngine("e0", die_after_chunks=0)).run_group(item())


@in_virtual_time
async def test_a_trajectory_that_is_cancelled_in_mid_generation_does_not_disturb_the_others() -> None:
    async def impatient(prompt: Prompt, max_tokens: int, generate: Generate) -> Any:
        async with asyncio.timeout(0.02):
            await generate(prompt.token_ids, max_tokens)

    loop = failing_on_odd_calls(impatient)
    group = await agent_worker(loop, FakeEngine("e0", step_s=0.01)).run_group(item())
    assert [t.status for t in group.trajectories] == ["truncated", "failed"] * 2
    assert "raised TimeoutError" in group.trajectories[1].error
