"""A real rollout worker on fake engines, with a tokenizer and a reward that need no model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.agent.loop import MultiTurnLoop, Reply
from rollout.reward.call import RewardResult
from rollout.types import Prompt, RolloutRequest, SamplingParams, Trajectory, Turn
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.engine_client import expected_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.fakes.engine_client import FakeEngine

MAX_TOKENS = 20


class Numbers:
    """A tokenizer whose text is the token numbers; 0 is special."""

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


ANSWER = expected_answer(item().prompt.token_ids, MAX_TOKENS)


def worker(
    *engines: FakeEngine, score: Any = length_score, loop: Any = None, reward_slots: Any = None, **changes: Any
) -> RolloutWorker:
    """In the time of the running event loop. With a `loop` it is an agent's, whose trajectories take at most 100 s."""
    if loop is not None:
        changes = {"agent": "mine.make", "agent_timeout_s": 100.0} | changes
    how: dict[str, Any] = {"clock": asyncio.get_running_loop().time, "loop": loop, "reward_slots": reward_slots}
    return RolloutWorker(spec(**changes), engines, tokenizer=Numbers(), score=score, **how)


def generated(trajectory: Trajectory) -> list[int]:
    """Of its only turn."""
    (turn,) = trajectory.turns()
    return turn.token_ids[turn.is_generated].tolist()


def segments(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [segment for turn in trajectory.turns() for segment in turn.segments]


class Played:
    """An agent loop out of a function."""

    def __init__(self, run: Any) -> None:
        self.run = run


class Countdown:
    """An environment that adds token 60 and half a point after every turn but the last, which earns 2."""

    def __init__(self, num_turns: int) -> None:
        self.num_left = num_turns

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        self.num_left -= 1
        return Reply(token_ids=[60], reward=0.5) if self.num_left else Reply(token_ids=None, reward=2.0)


def counting_down(num_turns: int) -> MultiTurnLoop:
    return MultiTurnLoop(lambda _: Countdown(num_turns), max_turns=num_turns)
