"""What becomes of a trajectory that goes wrong, by `algorithm.on_failure`."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.agent.loop import SingleTurnLoop
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import RewardError, RewardTimeout
from tests.fakes.engine_client import FakeEngine
from tests.fakes.rollout_worker import ANSWER, Played, item, worker
from tests.fakes.virtual_time import run_virtual
from tests.unit.rollout.test_worker_agents import raises

if TYPE_CHECKING:
    from rollout.agent.loop import Generate
    from rollout.reward.call import RewardResult
    from rollout.types import Prompt, Trajectory


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
