from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.agent.loop import Episode, MultiTurnLoop, Reply, SingleTurnLoop, check_episode
from rollout.errors import AgentError
from rollout.types import Completion, Prompt, Segment, ToolUse, Turn

if TYPE_CHECKING:
    from rollout.types import FinishReason

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1, 2], np.int32), text="", answer="")


class Scripted:
    """A `Generate` that answers from a list and keeps what it was asked."""

    def __init__(self, *answers: tuple[list[int], FinishReason]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[int], int]] = []
        self.stops: list[object] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> Completion:
        self.stops.append(stop)
        self.asked.append((token_ids.tolist(), max_tokens))
        tokens, finish_reason = self.answers.pop(0)
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            segments=(Segment(version=0, num_tokens=len(tokens)),),
            finish_reason=finish_reason,
        )


class Replies:
    """An environment that gives its replies in order, each with a reward of 1, then ends with `last_reward`."""

    def __init__(self, *replies: list[int], last_reward: float = 0.0) -> None:
        self.replies = list(replies)
        self.last_reward = last_reward
        self.seen: list[int] = []

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        self.seen.append(len(turns))
        if not self.replies:
            return Reply(token_ids=None, reward=self.last_reward)
        return Reply(token_ids=self.replies.pop(0), reward=1.0)


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


async def test_an_episode_has_the_calls_that_its_environment_counted() -> None:
    environment = Replies()
    loop = MultiTurnLoop(lambda _: environment, max_turns=5)
    assert (await loop.run(PROMPT, 10, Scripted(([3], "stop")))).tool_use is None
    environment.tool_use = ToolUse(num_calls=2, num_errors=1)  # type: ignore[attr-defined]
    assert (await loop.run(PROMPT, 10, Scripted(([3], "stop")))).tool_use == ToolUse(num_calls=2, num_errors=1)


async def test_what_a_loop_counts_must_be_counts() -> None:
    episode = await SingleTurnLoop().run(PROMPT, 8, Scripted(([3], "stop")))
    with pytest.raises(AgentError, match=r"tool_use must be a ToolUse or None, got 3"):
        check_episode(replace(episode, tool_use=3), PROMPT, 8)  # type: ignore[arg-type]
    for calls, errors in ((-1, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match=f"num_errors <= num_calls, got {errors} and {calls}"):
            ToolUse(num_calls=calls, num_errors=errors)


async def test_turns_end_at_the_stop_strings_of_the_loop() -> None:
    generate = Scripted(([3], "stop"), ([4], "stop"))
    await MultiTurnLoop(lambda _: Replies([90]), max_turns=5, stop=("</search>",)).run(PROMPT, 10, generate)
    assert generate.stops == [("</search>",)] * 2


async def test_a_reply_that_leaves_no_room_for_an_answer_truncates() -> None:
    generate = Scripted(([3], "stop"))
    episode = await MultiTurnLoop(lambda _: Replies([90, 91]), max_turns=5).run(PROMPT, 3, generate)
    assert episode.status == "truncated"
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[1, 2, 3]]


async def test_too_many_turns_truncate() -> None:
    generate = Scripted(([3], "stop"), ([4], "stop"))
    episode = await MultiTurnLoop(lambda _: Replies([90], [91], [92]), max_turns=2).run(PROMPT, 99, generate)
    assert episode.status == "truncated"
    assert [turn.token_ids.tolist() for turn in episode.turns] == [[1, 2, 3], [90, 4]], "nobody reads the last reply"
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0], "its reward counts"


async def test_a_turn_cut_by_the_budget_ends_the_episode_without_asking_the_environment() -> None:
    generate, replies = Scripted(([3], "length")), Replies([90])
    episode = await MultiTurnLoop(lambda _: replies, max_turns=5).run(PROMPT, 1, generate)
    assert episode.status == "truncated"
    assert replies.seen == []


async def test_each_turn_has_its_own_reward_and_the_last_one_too() -> None:
    generate = Scripted(([3], "stop"), ([4, 5], "stop"), ([6], "stop"))
    replies = Replies([90], [91], last_reward=-0.5)
    episode = await MultiTurnLoop(lambda _: replies, max_turns=5).run(PROMPT, 20, generate)
    assert episode.status == "completed"
    assert [turn.reward for turn in episode.turns] == [1.0, 1.0, -0.5]


async def test_a_reward_counts_although_its_reply_finds_no_room() -> None:
    episode = await MultiTurnLoop(lambda _: Replies([90, 91]), max_turns=5).run(PROMPT, 3, Scripted(([3], "stop")))
    assert (episode.status, [turn.reward for turn in episode.turns]) == ("truncated", [1.0])


class Sandbox(Replies):
    """Says when a step waits, and whether it was closed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_closed, self.is_waiting = how, 0, asyncio.Event()

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        match self.how:
            case "raises":
                raise KeyError("no such file")
            case "hangs":
                self.is_waiting.set()
                await asyncio.Event().wait()
        return await super().step(turns)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.num_closed += 1


@pytest.mark.parametrize(("how", "error"), [("ends", None), ("is cut", None), ("raises", KeyError), ("hangs", None)])
async def test_an_environment_is_closed_however_the_trajectory_ends(
    how: str, error: type[BaseException] | None
) -> None:
    box, reason = Sandbox(how), "length" if how == "is cut" else "stop"
    loop = MultiTurnLoop(lambda _: box, max_turns=5)
    episode = asyncio.create_task(loop.run(PROMPT, 10, Scripted(([3], reason))))
    if how == "hangs":
        await box.is_waiting.wait()
        episode.cancel()
    await asyncio.wait([episode])
    assert box.num_closed == 1
    assert episode.cancelled() == (how == "hangs")
    assert error is None or isinstance(episode.exception(), error)


def raises() -> None:
    raise OSError("the service is gone")


@pytest.mark.parametrize(
    ("close", "word"), [(asyncio.Event().wait, "TimeoutError"), (raises, "the service is gone"), (list, None)]
)
async def test_a_close_that_fails_is_told_and_costs_no_trajectory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, close: Any, word: str | None
) -> None:
    monkeypatch.setattr("rollout.agent.loop.CLOSE_S", 0.05)
    box = Sandbox("ends")
    box.close = close
    episode = await MultiTurnLoop(lambda _: box, max_turns=5).run(PROMPT, 10, Scripted(([3], "stop")))
    assert episode.status == "completed"
    assert [word in record.getMessage() for record in caplog.records if word] == [True] * (word is not None)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    loop = MultiTurnLoop(lambda _: Replies(last_reward=reward), max_turns=5)
    with pytest.raises(ValueError, match="reward of a turn must be a finite number"):
        await loop.run(PROMPT, 10, Scripted(([3], "stop")))


def a_turn(tokens: list[int], num_context: int, *, logprob: float = -1.0, reward: float = 0.0) -> Turn:
    num_generated = len(tokens) - num_context
    return Turn(
        token_ids=np.array(tokens, np.int32),
        is_generated=np.arange(len(tokens)) >= num_context,
        logprobs=np.array([np.nan] * num_context + [logprob] * num_generated, np.float32),
        segments=(Segment(version=0, num_tokens=num_generated),),
        reward=reward,
    )


def test_a_turn_refuses_a_reward_that_no_token_earned_or_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="no generated token that could have earned it"):
        a_turn([1, 2], 2, reward=1.0)
    with pytest.raises(ValueError, match="must be finite"):
        a_turn([1, 2], 1, reward=float("nan"))


@pytest.mark.parametrize(
    ("episode", "message"),
    [
        (None, "returned a NoneType; return an Episode"),
        (Episode(turns=(a_turn([1, 2, 3], 2),), status="done"), "must be one of completed, truncated, failed, got 'do"),
        (Episode(turns=(), status="completed"), "begin with the prompt's tokens as context"),
        (Episode(turns=(a_turn([1, 3, 4], 2),), status="completed"), "begin with the prompt's tokens as context"),
        (Episode(turns=(a_turn([1, 2, 3], 1),), status="completed"), "begin with the prompt's tokens as context"),
        (Episode(turns=(a_turn([1, 2, 3, 4, 5, 6], 2),), status="completed"), "hold 4 tokens after the prompt, at m"),
        (Episode(turns=(a_turn([1, 2, 3], 2, logprob=np.nan),), status="completed"), "no finite log-probability"),
    ],
)
def test_an_episode_that_breaks_the_contract_is_refused(episode: object, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        check_episode(episode, PROMPT, 3)


def test_an_episode_whose_prompt_spans_two_turns_is_fine() -> None:
    episode = Episode(turns=(a_turn([1], 1), a_turn([2, 3], 1)), status="completed")
    assert check_episode(episode, PROMPT, 3) == episode


def test_context_that_nothing_was_generated_after_is_left_out() -> None:
    turns = (a_turn([1, 2, 3], 2), a_turn([4, 5], 1))
    episode = Episode(turns=(*turns, a_turn([1_000_000], 1)), status="truncated")
    assert check_episode(episode, PROMPT, 9).turns == turns
    nothing = Episode(turns=(a_turn([1, 2], 2),), status="failed")
    assert check_episode(nothing, PROMPT, 9).turns == nothing.turns


def anew(tokens: list[int], num_context: int) -> Turn:
    return replace(a_turn(tokens, num_context), begins_anew=True)


def test_sequences_of_a_trajectory_are_counted_and_bounded_one_by_one() -> None:
    turns = (a_turn([1, 2, 3, 4, 5], 2), anew([7, 8, 9, 9, 9], 4), a_turn([6, 6], 1))
    episode = Episode(turns=turns[:2], status="completed")
    assert check_episode(episode, PROMPT, 3, max_sequences=2) == episode
    with pytest.raises(AgentError, match=r"consists of 2 token sequences, task\.agent_max_sequences=1 allows no more"):
        check_episode(episode, PROMPT, 3)
    with pytest.raises(AgentError, match="hold 5 tokens after the prompt, at most max_tokens=3"):
        check_episode(Episode(turns=turns, status="completed"), PROMPT, 3, max_sequences=2)


def test_what_nothing_was_generated_after_is_left_out_of_every_sequence() -> None:
    said = a_turn([1, 2, 3], 2), anew([5, 6], 1)
    turns = (said[0], a_turn([4, 4], 2), anew([9, 9, 9], 3), said[1], a_turn([4], 1))
    episode = check_episode(Episode(turns=turns, status="completed"), PROMPT, 9, max_sequences=2)
    assert episode.turns == said


def test_a_trajectory_need_not_say_anything_after_its_prompt() -> None:
    episode = Episode(turns=(a_turn([1, 2], 2), anew([7, 8], 1)), status="completed")
    assert check_episode(episode, PROMPT, 9).turns == episode.turns[1:]


def test_a_sequence_that_begins_with_a_generated_token_is_refused() -> None:
    for turn in (anew([7, 8], 0), anew([], 0)):
        with pytest.raises(AgentError, match="must begin with context"):
            check_episode(Episode(turns=(a_turn([1, 2, 3], 2), turn), status="completed"), PROMPT, 9, max_sequences=2)
