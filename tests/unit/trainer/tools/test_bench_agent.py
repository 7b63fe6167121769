from __future__ import annotations

import numpy as np
import pytest

from rollout.agent.runner import check_trajectory, make_loop
from rollout.errors import AgentError
from rollout.types import FinishReason, Prompt, TokenChunk, Trajectory

FACTORY = "trainer.bench.agent.forced_lengths"


def prompt(length: object) -> Prompt:
    metadata = {"response_tokens": length}
    return Prompt(prompt_id="p", token_ids=np.array([1, 2], np.int32), text="", answer="", metadata=metadata)


class Engine:
    """A `Generate` that ends every stretch after at most `most` tokens, for the reason given."""

    def __init__(self, most: int, reason: FinishReason = "stop", *, token: int = 7) -> None:
        self.most, self.token = most, token
        self.reason: FinishReason = reason
        self.asked: list[tuple[int, int]] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> TokenChunk:
        self.asked.append((len(token_ids), max_tokens))
        number = min(self.most, max_tokens)
        reason = "length" if number == max_tokens and self.reason == "stop" else self.reason
        return TokenChunk(
            token_ids=np.full(number, self.token, np.int32),
            logprobs=np.zeros(number, np.float32),
            versions=np.zeros(number, np.int32),
            finish_reason=reason,
        )


async def play(engine: Engine, length: object, *, max_tokens: int = 16) -> Trajectory:
    asked = prompt(length)
    trajectory = await make_loop(FACTORY, {}).run(asked, max_tokens, engine)
    return check_trajectory(trajectory, asked, max_tokens)


async def test_an_answer_has_the_length_that_its_prompt_says_in_one_request() -> None:
    engine = Engine(100)
    trajectory = await play(engine, 9)
    assert engine.asked == [(2, 9)]
    assert (trajectory.status, len(trajectory.turns()), len(trajectory.token_ids)) == ("completed", 1, 11)


async def test_each_answer_of_a_group_has_its_own_length_and_the_next_attempt_the_same() -> None:
    loop, asked = make_loop(FACTORY, {}), prompt([3, 9, 5])
    trajectories = [await loop.run(asked, 16, Engine(100)) for _ in range(6)]
    assert [trajectory.num_generated_tokens for trajectory in trajectories] == [3, 9, 5, 3, 9, 5]


async def test_an_end_token_does_not_end_an_answer() -> None:
    engine = Engine(4)
    trajectory = await play(engine, 9)
    assert engine.asked == [(2, 9), (6, 5), (10, 1)]
    assert (trajectory.status, trajectory.num_generated_tokens) == ("completed", 9)


async def test_rewards_differ_with_the_tokens_and_stay_within_bounds() -> None:
    rewards = {float((await play(Engine(9, token=token), 9)).turn_rewards[0]) for token in range(20)}
    assert len(rewards) >= 15
    assert all(0 <= reward <= 1 for reward in rewards)


async def test_an_answer_that_ran_out_of_time_is_failed() -> None:
    trajectory = await play(Engine(4, "abort"), 9)
    assert trajectory.status == "failed"


@pytest.mark.parametrize("length", [0, 17, None, "9", [], [17]])
async def test_a_length_that_cannot_be_is_refused(length: object) -> None:
    with pytest.raises(AgentError, match="must hold 1 to 16 tokens"):
        await play(Engine(4), length)
