from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rollout.agent.loop import MultiTurnLoop, SingleTurnLoop
from rollout.types import Completion, Prompt, Segment

if TYPE_CHECKING:
    from rollout.types import FinishReason, Turn

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1, 2], np.int32), text="", answer="")


class Scripted:
    """A `Generate` that answers from a list and keeps what it was asked."""

    def __init__(self, *answers: tuple[list[int], FinishReason]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], int]] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int) -> Completion:
        self.asked.append((token_ids.tolist(), max_tokens))
        tokens, finish_reason = self.answers.pop(0)
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            segments=(Segment(version=0, num_tokens=len(tokens)),),
            finish_reason=finish_reason,
        )


class Replies:
    """An environment that gives its replies in order, then ends."""

    def __init__(self, *replies: list[int]) -> None:
        self.replies = list(replies)
        self.seen: list[int] = []

    async def step(self, turns: tuple[Turn, ...]) -> np.ndarray | None:
        self.seen.append(len(turns))
        return np.array(self.replies.pop(0), np.int32) if self.replies else None


@pytest.mark.parametrize(
    ("finish_reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "failed")]
)
async def test_a_single_turn_ends_as_its_generation_did(finish_reason: FinishReason, status: str) -> None:
    generate = Scripted(([3, 4], finish_reason))
    episode = await SingleTurnLoop().run(PROMPT, 8, generate)
    assert episode.status == status
    assert generate.asked == [([1, 2], 8)]
    assert episode.turns[0].token_ids.tolist() == [1, 2, 3, 4]


async def test_replies_are_appended_as_context_and_come_out_of_the_budget() -> None:
    generate, replies = Scripted(([3], "stop"), ([4, 5], "stop")), Replies([90, 91])
    episode = await MultiTurnLoop(lambda _: replies, max_turns=5).run(PROMPT, 10, generate)
    assert generate.asked == [([1, 2], 10), ([1, 2, 3, 90, 91], 7)]
    assert episode.status == "completed"
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[1, 2, 3], [90, 91, 4, 5]]
    assert episode.turns[1].is_generated.tolist() == [False, False, True, True]
    assert replies.seen == [1, 2]


async def test_a_reply_that_leaves_no_room_for_an_answer_truncates() -> None:
    generate = Scripted(([3], "stop"))
    episode = await MultiTurnLoop(lambda _: Replies([90, 91]), max_turns=5).run(PROMPT, 3, generate)
    assert episode.status == "truncated"
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[1, 2, 3]]


async def test_too_many_turns_truncate() -> None:
    generate = Scripted(([3], "stop"), ([4], "stop"))
    episode = await MultiTurnLoop(lambda _: Replies([90], [91], [92]), max_turns=2).run(PROMPT, 99, generate)
    assert episode.status == "truncated"


async def test_a_turn_cut_by_the_budget_ends_the_episode_without_asking_the_environment() -> None:
    generate, replies = Scripted(([3], "length")), Replies([90])
    episode = await MultiTurnLoop(lambda _: replies, max_turns=5).run(PROMPT, 1, generate)
    assert episode.status == "truncated"
    assert replies.seen == []
