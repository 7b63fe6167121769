"""What becomes of a trajectory that goes wrong, by `algorithm.on_failure`; and the text that rewards read."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.agent.loop import MultiTurnLoop, SingleTurnLoop
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import RewardError, RewardTimeout
from rollout.worker.worker import RolloutWorker
from tests.fakes.engine_client import FakeEngine
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker import ANSWER, Numbers, item, length_score, spec
from tests.unit.rollout.test_worker_agent import Countdown, Played, raises

if TYPE_CHECKING:
    from rollout.agent.loop import Generate
    from rollout.reward.call import RewardResult
    from rollout.types import Prompt, Trajectory


def run_one(
    *loops: Any, score: Any = length_score, step_s: float = 0.01, stop_one_in: int = 10_000, **changes: Any
) -> Trajectory:
    """The first sample of a group that has one for each loop."""
    left = list(loops)

    async def run(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        return await left.pop(0).run(prompt, max_tokens, generate)

    async def main() -> Trajectory:
        settings = spec(**({"group_size": len(loops), "agent": "mine.make", "agent_timeout_s": 100.0} | changes))
        engine, clock = FakeEngine("e0", step_s=step_s, stop_one_in=stop_one_in), asyncio.get_running_loop().time
        worker = RolloutWorker(settings, [engine], tokenizer=Numbers(), score=score, loop=Played(run), clock=clock)
        return (await worker.run_group(item())).trajectories[0]

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


SLOW = {"step_s": 1.0, "request_timeout_s": 4.5}
FAILURES: dict[str, tuple[str, Any, dict[str, Any], str, int]] = {
    "generation": ("timeout", SingleTurnLoop(), SLOW, "request_timeout_s=4.5", 12),
    "agent-hangs": ("timeout", Played(hangs_after_a_turn), {}, "task.agent_timeout_s=100", 4),
    "agent-raises": ("agent_error", Played(fails_after_two_turns), {}, "raised KeyError: 'tool'", 5),
    "reward-hangs": ("reward_timeout", SingleTurnLoop(), {"score": hanging_reward}, "longer than 10 s", 20),
}


@pytest.mark.parametrize("rule", ["score", "zero"])
@pytest.mark.parametrize("failure", FAILURES)
def test_what_went_wrong_is_kept_with_its_tokens_and_the_reward_of_the_rule(failure: str, rule: str) -> None:
    kind, loop, changes, reason, num_tokens = FAILURES[failure]
    if kind == "reward_timeout" and rule == "score":
        return  # there is no reward to ask
    kept = run_one(loop, on_failure={kind: rule}, **changes)
    assert (kept.status, kept.failure, kept.num_generated_tokens) == ("truncated", kind, num_tokens)
    assert reason in kept.error
    assert kept.reward == (0.0 if rule == "zero" else float(len(kept.text.split())))
    assert kept.num_lost_tokens == 0 and "reward_s" in kept.timings


def test_the_turns_of_an_agent_that_raised_are_those_that_it_asked_for() -> None:
    _, loop, _, _, _ = FAILURES["agent-raises"]
    kept = run_one(loop, on_failure={"agent_error": "score"})
    assert kept.token_ids[:7].tolist() == [7, 8, 9, *ANSWER[:3], 60]
    assert kept.loss_mask.tolist() == [False] * 3 + [True] * 3 + [False] + [True] * 2


@pytest.mark.parametrize("failure", ["agent-hangs", "agent-raises", "reward-hangs"])
def test_what_is_not_kept_is_failed_with_its_kind(failure: str) -> None:
    kind, loop, changes, reason, _ = FAILURES[failure]
    dropped = run_one(loop, SingleTurnLoop(), **changes)
    assert (dropped.status, dropped.failure, math.isnan(dropped.reward)) == ("failed", kind, True)
    assert reason in dropped.error


@pytest.mark.parametrize("rule", ["score", "zero"])
def test_an_error_of_the_reward_and_a_failure_without_a_token_are_dropped_whatever_the_rules(rule: Any) -> None:
    async def broken(prompt: Prompt, text: str) -> RewardResult:
        raise RewardError("returned None")

    rules: Any = dict.fromkeys(("timeout", "agent_error", "reward_timeout"), rule)
    failed = run_one(SingleTurnLoop(), score=broken, on_failure=rules)
    assert (failed.status, failed.failure) == ("failed", "reward_error")
    silent = run_one(Played(raises), SingleTurnLoop(), on_failure=rules)
    assert (silent.status, silent.failure) == ("failed", "agent_error")


def test_the_text_of_several_turns_has_what_was_between_them_and_sequences_are_lines() -> None:
    trajectory = run_one(MultiTurnLoop(lambda _: Countdown(2), max_turns=3), stop_one_in=4)
    first, second = (turn.token_ids[turn.is_generated].tolist() for turn in trajectory.turns())
    assert trajectory.text == " ".join(str(token) for token in [*first, 60, *second] if token)

    async def starts_again(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(await generate(builder.token_ids(), 2))
        builder.start_sequence(prompt.token_ids)
        builder.add_generated(await generate(builder.token_ids(), 2))
        return builder.finish("completed")

    again = " ".join(map(str, ANSWER[:2]))
    assert run_one(Played(starts_again), agent_max_sequences=2).text == f"{again}\n{again}"
