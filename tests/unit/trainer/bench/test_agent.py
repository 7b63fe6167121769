from __future__ import annotations

import numpy as np
import pytest

from rollout.agent.loop import Episode, check_episode
from rollout.agent.runner import make_loop
from rollout.errors import AgentError
from rollout.types import Completion, FinishReason, Prompt, Segment

FACTORY = "trainer.tools.bench_agent.forced_lengths"


def prompt(length: object) -> Prompt:
    metadata = {"response_tokens": length}
    return Prompt(prompt_id="p", token_ids=np.array([1, 2], np.int32), text="", answer="", metadata=metadata)


class Engine:
    """A `Generate` that ends every stretch after at most `most` tokens, for the reason given."""

    def __init__(self, most: int, reason: FinishReason = "stop", *, token: int = 7) -> None:
        self.most, self.token = most, token
        self.reason: FinishReason = reason
        self.asked: list[tuple[int, int]] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> Completion:
        self.asked.append((len(token_ids), max_tokens))
        number = min(self.most, max_tokens)
        reason = "length" if number == max_tokens and self.reason == "stop" else self.reason
        return Completion(
            token_ids=np.full(number, self.token, np.int32),
            logprobs=np.zeros(number, np.float32),
            segments=(Segment(version=0, num_tokens=number),),
            finish_reason=reason,
        )


async def play(engine: Engine, length: object, *, max_tokens: int = 16) -> Episode:
    asked = prompt(length)
    episode = await make_loop(FACTORY, {}).run(asked, max_tokens, engine)
    return check_episode(episode, asked, max_tokens)


async def test_an_answer_has_the_length_that_its_prompt_says_in_one_request() -> None:
    engine = Engine(100)
    episode = await play(engine, 9)
    assert engine.asked == [(2, 9)]
    assert (episode.status, len(episode.turns), len(episode.turns[0].token_ids)) == ("completed", 1, 11)


async def test_each_answer_of_a_group_has_its_own_length_and_the_next_attempt_the_same() -> None:
    loop, asked = make_loop(FACTORY, {}), prompt([3, 9, 5])
    episodes = [await loop.run(asked, 16, Engine(100)) for _ in range(6)]
    assert [int(episode.turns[0].is_generated.sum()) for episode in episodes] == [3, 9, 5, 3, 9, 5]


async def test_an_end_token_does_not_end_an_answer() -> None:
    engine = Engine(4)
    episode = await play(engine, 9)
    assert engine.asked == [(2, 9), (6, 5), (10, 1)]
    assert (episode.status, episode.turns[0].is_generated.sum()) == ("completed", 9)


async def test_rewards_differ_with_the_tokens_and_stay_within_bounds() -> None:
    rewards = {(await play(Engine(9, token=token), 9)).turns[0].reward for token in range(20)}
    assert len(rewards) >= 15
    assert all(0 <= reward <= 1 for reward in rewards)


async def test_an_answer_that_ran_out_of_time_is_failed() -> None:
    episode = await play(Engine(4, "abort"), 9)
    assert episode.status == "failed"


@pytest.mark.parametrize("length", [0, 17, None, "9", [], [17]])
async def test_a_length_that_cannot_be_is_refused(length: object) -> None:
    with pytest.raises(AgentError, match="must hold 1 to 16 tokens"):
        await play(Engine(4), length)
