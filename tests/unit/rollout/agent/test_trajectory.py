"""Agent loops and environments: the trajectories that come of them, and which are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agent.ledger import TokenLedger
from rollout.agent.loop import Episode, MultiTurnLoop, Reply, SingleTurnLoop
from rollout.agent.runner import check_trajectory, make_loop
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError, PluginError
from rollout.types import Prompt, TokenChunk, ToolUse, Trajectory, join_chunks
from tests.fakes.trajectories import make_chunk, make_turn

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.types import FinishReason, Turn

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1, 2], np.int32), text="", answer="")


def plain(trajectory: Trajectory) -> list[Any]:
    """[context, generated tokens, reward, whether a sequence begins] of each turn."""
    return [
        [t.token_ids[~t.is_generated].tolist(), t.token_ids[t.is_generated].tolist(), t.reward, t.begins_anew]
        for t in trajectory.turns()
    ]


# The builder

stretches = st.lists(st.tuples(st.booleans(), st.lists(st.integers(1, 99), max_size=5)), max_size=8)


@given(st.lists(st.integers(1, 99), min_size=1, max_size=4), stretches)
def test_every_token_is_there_once_in_order_with_its_version(
    prompt: list[int], script: list[tuple[bool, list[int]]]
) -> None:
    builder = TrajectoryBuilder(np.array(prompt, np.int32))
    flat = [(token, False, -1) for token in prompt]
    for version, (is_generated, tokens) in enumerate(script):
        if is_generated:
            builder.add_generated(make_chunk(tokens, [(version, len(tokens))], logprobs=[-t / 100 for t in tokens]))
        else:
            builder.add_context(np.array(tokens, np.int32))
        flat += [(token, is_generated, version if is_generated else -1) for token in tokens]
    made = builder.finish("completed")
    arrays = (made.token_ids.tolist(), made.loss_mask.tolist(), made.versions.tolist())
    assert list(zip(*arrays, strict=True)) == flat
    assert builder.token_ids().tolist() == arrays[0]
    np.testing.assert_allclose(made.logprobs, np.where(made.loss_mask, made.token_ids / -100, 0.0))
    assert builder.num_response_tokens == len(flat) - len(prompt)
    assert [a.dtype.name for a in (made.token_ids, made.logprobs, made.versions)] == ["int32", "float32", "int32"]
    again = Trajectory.of_turns(made.turns(), status="completed")
    assert plain(again) == plain(made)


def test_turns_rewards_and_sequences_are_kept_apart() -> None:
    builder = TrajectoryBuilder(np.array([1, 2]))
    builder.start_sequence(np.array([7, 8]))  # nothing was generated before it: no turn
    builder.start_sequence(np.array([9]))
    builder.add_generated(make_chunk([3], [(7, 1)]))
    builder.add_generated(make_chunk([4], [(7, 1)]))
    builder.add_context(np.array([5]))
    builder.add_reward(0.5)  # of the turn before its reply
    builder.add_generated(make_chunk([6, 7], [(8, 1), (9, 1)]))
    builder.add_reward(-1.0)
    builder.add_reward(0.25)
    builder.add_context(np.array([99]))  # nothing is generated after it
    builder.start_sequence(np.array([1, 6]))
    builder.add_reward(2.0)
    assert builder.token_ids().tolist() == [1, 6] and builder.num_response_tokens == 0
    builder.add_generated(make_chunk([8]))
    made = builder.finish("completed")
    expected = [[[9], [3, 4], 0.5, True], [[5], [6, 7], 1.25, False], [[1, 6], [8], 0.0, True]]
    assert (plain(made), made.sequences()) == (expected, (slice(0, 6), slice(6, 9)))
    assert [turn.segments for turn in made.turns()] == [((7, 2),), ((8, 1), (9, 1)), ((0, 1),)]


def test_what_a_builder_refuses_changes_nothing() -> None:
    builder = TrajectoryBuilder(np.array([1, 2]))
    with pytest.raises(ValueError, match="none was generated yet"):
        builder.add_reward(1.0)
    with pytest.raises(ValueError, match="needs at least one token"):
        builder.start_sequence(np.array([], np.int32))
    with pytest.raises(ValueError, match="a list of token ids"):
        builder.start_sequence(np.array([[1]]))
    assert builder.token_ids().tolist() == [1, 2]


def test_chunks_are_joined_and_one_whose_arrays_differ_is_refused() -> None:
    joined = join_chunks([make_chunk([1, 2], [(3, 2)]), make_chunk([4]), make_chunk([5], [(4, 1)])], "stop")
    assert (joined.token_ids.tolist(), joined.versions.tolist()) == ([1, 2, 4, 5], [3, 3, 0, 4])
    with pytest.raises(ValueError, match="3 tokens with 3 logprobs and version labels for 2"):
        make_chunk([1, 2, 3], [(0, 2)])


def test_a_trajectory_refuses_arrays_that_disagree_and_rewards_that_no_token_earned() -> None:
    made = Trajectory.of_turns([make_turn([1], [2])], status="completed")
    for changes, message in (
        ({"loss_mask": made.loss_mask[1:]}, "differ in length: token_ids 2, loss_mask 1"),
        ({"turn_ends": np.array([1])}, r"end at \[1\] and 1 rewards"),
        ({"turn_rewards": np.zeros(2)}, r"end at \[2\] and 2 rewards"),
        ({"turn_rewards": np.array([np.nan])}, "must be finite"),
        ({"turn_rewards": np.ones(1), "loss_mask": np.zeros(2, bool)}, "no generated token that could have earned it"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(made, **changes)


# Loops


class Scripted:
    """A `Generate` that responds from a list and keeps its requests."""

    def __init__(self, *responses: tuple[list[int], FinishReason]) -> None:
        self.responses = list(responses)
        self.asked: list[tuple[list[int], int]] = []
        self.stops: list[object] = []

    async def __call__(self, token_ids: np.ndarray, max_tokens: int, *, stop: object = None) -> TokenChunk:
        self.stops.append(stop)
        self.asked.append((token_ids.tolist(), max_tokens))
        tokens, finish_reason = self.responses.pop(0)
        return make_chunk(tokens, finish_reason=finish_reason)


class Replies:
    """An environment that gives its replies in order, each with a reward of 1, then ends with `last_reward`."""

    def __init__(self, *replies: list[int], last_reward: float = 0.0) -> None:
        self.replies, self.last_reward = list(replies), last_reward
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
    made = await SingleTurnLoop().run(PROMPT, 8, generate)
    assert (made.status, generate.asked) == (status, [([1, 2], 8)])
    assert plain(made) == [[[1, 2], [3, 4], 0.0, False]]


async def test_replies_are_appended_as_context_and_come_out_of_the_budget() -> None:
    generate, replies = Scripted(([3], "stop"), ([4, 5], "stop")), Replies([90, 91], last_reward=-0.5)
    made = await MultiTurnLoop(lambda _: replies, max_turns=5, stop=("</search>",)).run(PROMPT, 10, generate)
    assert generate.asked == [([1, 2], 10), ([1, 2, 3, 90, 91], 7)]
    assert generate.stops == [("</search>",)] * 2
    assert made.status == "completed"
    assert plain(made) == [[[1, 2], [3], 1.0, False], [[90, 91], [4, 5], -0.5, False]]
    assert replies.seen == [1, 2]


@pytest.mark.parametrize(
    ("finish", "max_turns", "max_tokens", "num_asked", "status"),
    [
        (("length",), 5, 10, 1, "truncated"),
        (("stop", "length"), 5, 10, 2, "truncated"),
        (("stop", "abort"), 5, 10, 2, "failed"),
        (("stop", "stop"), 2, 10, 2, "truncated"),  # nobody would read the last reply
        (("stop", "stop"), 5, 4, 2, "completed"),
        (("stop",), 5, 3, 1, "truncated"),  # its reply leaves no room for a token
    ],
)
async def test_a_conversation_ends_with_a_response_that_is_cut_the_last_turn_or_the_budget(
    finish: tuple[FinishReason, ...], max_turns: int, max_tokens: int, num_asked: int, status: str
) -> None:
    generate = Scripted(*(([3], reason) for reason in finish))
    replies = Replies(*[[90, 91]] * (1 if status == "completed" else 3))
    made = await MultiTurnLoop(lambda _: replies, max_turns=max_turns).run(PROMPT, max_tokens, generate)
    assert (len(generate.asked), made.status) == (num_asked, status)
    assert made.token_ids.tolist() == [1, 2, 3, 90, 91, 3][: 3 * num_asked]


async def test_the_calls_of_tools_are_those_that_the_environment_counted() -> None:
    environment: Any = Replies()
    loop = MultiTurnLoop(lambda _: environment, max_turns=5)
    assert (await loop.run(PROMPT, 10, Scripted(([3], "stop")))).tool_use is None
    environment.tool_use = ToolUse(num_calls=2, num_errors=1)
    assert (await loop.run(PROMPT, 10, Scripted(([3], "stop")))).tool_use == ToolUse(num_calls=2, num_errors=1)
    for calls, errors in ((-1, 0), (1, 2), (1, -1)):
        with pytest.raises(ValueError, match=f"num_errors <= num_calls, got {errors} and {calls}"):
            ToolUse(num_calls=calls, num_errors=errors)


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
    made = asyncio.create_task(loop.run(PROMPT, 10, Scripted(([3], reason))))
    if how == "hangs":
        await box.is_waiting.wait()
        made.cancel()
    await asyncio.wait([made])
    assert box.num_closed == 1
    assert made.cancelled() == (how == "hangs")
    assert error is None or isinstance(made.exception(), error)


def raises() -> None:
    raise OSError("the service is gone")


@pytest.mark.parametrize(
    ("close", "word"), [(asyncio.Event().wait, "TimeoutError"), (raises, "the service is gone"), (list, None)]
)
async def test_a_close_that_fails_is_logged_and_costs_no_trajectory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, close: Any, word: str | None
) -> None:
    monkeypatch.setattr("rollout.agent.loop.CLOSE_S", 0.05)
    box = Sandbox("ends")
    box.close = close
    made = await MultiTurnLoop(lambda _: box, max_turns=5).run(PROMPT, 10, Scripted(([3], "stop")))
    assert made.status == "completed"
    assert [word in record.getMessage() for record in caplog.records if word] == [True] * (word is not None)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
async def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    loop = MultiTurnLoop(lambda _: Replies(last_reward=reward), max_turns=5)
    with pytest.raises(ValueError, match="reward of a turn must be a finite number"):
        await loop.run(PROMPT, 10, Scripted(([3], "stop")))


async def test_a_loop_under_the_older_names_still_works() -> None:
    async def run(prompt: Prompt, max_tokens: int, generate: Any) -> Trajectory:
        ledger = TokenLedger(prompt.token_ids)
        ledger.add_generated(await generate(ledger.token_ids(), max_tokens))
        ledger.begin_anew(np.array([7]))
        ledger.add_generated(await generate(ledger.token_ids(), max_tokens))
        return Episode(turns=ledger.turns(), status="completed", tool_use=ToolUse(num_calls=1))

    made = await run(PROMPT, 8, Scripted(([3], "stop"), ([4], "stop")))
    assert plain(check_trajectory(made, PROMPT, 8, max_sequences=2)) == [
        [[1, 2], [3], 0.0, False],
        [[7], [4], 0.0, True],
    ]
    assert made.tool_use == ToolUse(num_calls=1)


# The contract of a loop


def of_turns(*turns: Turn, status: Any = "completed") -> Trajectory:
    return Trajectory.of_turns(turns, status=status)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"returned a NoneType; return what TrajectoryBuilder.finish\(\) gives"),
        (of_turns(make_turn([1, 2], [3]), status="done"), "must be one of completed, truncated, failed, got 'done'"),
        (of_turns(), "begin with the prompt's tokens as context"),
        (of_turns(make_turn([1, 3], [4])), "begin with the prompt's tokens as context"),
        (of_turns(make_turn([1], [2, 3])), "begin with the prompt's tokens as context"),
        (of_turns(make_turn([1, 2], [3, 4, 5, 6])), "have 4 tokens after the prompt, at most max_tokens=3"),
        (of_turns(make_turn([1, 2], [3], logprobs=[np.nan])), "no finite log-probability"),
        (replace(of_turns(make_turn([1, 2], [3])), tool_use=3), "tool_use must be a ToolUse or None, got 3"),  # type: ignore[arg-type]
        (of_turns(make_turn([1, 2], [3]), make_turn([], [7], begins_anew=True)), "must begin with context"),
    ],
)
def test_a_trajectory_that_breaks_the_contract_is_refused(result: object, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        check_trajectory(result, PROMPT, 3, max_sequences=2)


def test_a_prompt_may_span_two_turns() -> None:
    made = of_turns(make_turn([1], []), make_turn([2], [3]))
    assert check_trajectory(made, PROMPT, 3) is made


SAID = make_turn([1, 2], [3]), make_turn([4], [5])
ANEW, UNREAD = make_turn([5], [6], begins_anew=True), make_turn([9], [], begins_anew=True)


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ((*SAID, make_turn([1_000_000], [])), SAID),
        ((make_turn([1, 2], []),), (make_turn([1, 2], []),)),
        (
            (SAID[0], make_turn([4, 4], []), make_turn([9], [], begins_anew=True), ANEW, make_turn([4], [])),
            (SAID[0], ANEW),
        ),
        ((make_turn([1, 2], []), ANEW), (ANEW,)),
        ((make_turn([1, 2], []), UNREAD), (make_turn([1, 2], []),)),
    ],
)
def test_context_that_nothing_was_generated_after_is_left_out_of_every_sequence(
    turns: tuple[Turn, ...], kept: tuple[Turn, ...]
) -> None:
    made = check_trajectory(of_turns(*turns, status="truncated"), PROMPT, 9, max_sequences=2)
    assert plain(made) == plain(of_turns(*kept)) and made.status == "truncated"


def test_sequences_are_counted_and_bounded_one_by_one() -> None:
    turns = (make_turn([1, 2], [3, 4, 5]), make_turn([7, 8, 9, 9], [9], begins_anew=True), make_turn([6], [6]))
    made = of_turns(*turns[:2])
    assert check_trajectory(made, PROMPT, 3, max_sequences=2) is made
    with pytest.raises(AgentError, match=r"2 token sequences, task\.agent_max_sequences=1 allows .*removes thoughts"):
        check_trajectory(made, PROMPT, 3)
    with pytest.raises(AgentError, match="have 5 tokens after the prompt, at most max_tokens=3"):
        check_trajectory(of_turns(*turns), PROMPT, 3, max_sequences=2)


# From a dotted path to a loop

SOURCE = """
class Loop:
    def __init__(self, max_turns=2, rollout_stop=None):
        self.max_turns, self.stop = max_turns, rollout_stop
    async def run(self, prompt, max_tokens, generate):
        return None

class NoRun: ...

class SyncRun:
    def run(self, prompt, max_tokens, generate): ...

class ShortRun:
    async def run(self, prompt): ...

def raises():
    raise OSError("no tool server")

NUMBER = 3
"""


@pytest.fixture
def agents_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("agents_of_mine")
def test_the_factory_gets_its_arguments_by_name_and_an_empty_path_is_the_single_turn() -> None:
    for args, expected in (({}, (2, ())), ({"max_turns": 7}, (7, ())), ({"rollout_stop": "x"}, (2, "x"))):
        loop: Any = make_loop("agents_of_mine.Loop", args)
        assert (loop.max_turns, loop.stop) == expected
    informed: Any = make_loop("agents_of_mine.Loop", {}, rollout_stop=("</a>",), chat_template_kwargs={"quiet": True})
    assert informed.stop == ("</a>",)
    assert isinstance(make_loop("", {}), SingleTurnLoop)


@pytest.mark.usefixtures("agents_of_mine")
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Lop", {}, "has no 'Lop'; did you mean 'Loop'"),
        ("NUMBER", {}, "3 is not a callable object; give package.module.factory"),
        ("Loop", {"turns": 3}, r"cannot be called with task.agent_args={'turns': 3}: got an unexpected keyword"),
        ("raises", {}, "raised OSError: no tool server"),
        ("NoRun", {}, "returned a NoRun, which has no method run"),
        ("SyncRun", {}, "returned a SyncRun, which has a run that is not an async method"),
        ("ShortRun", {}, "its run cannot be called as a loop: too many positional arguments"),
    ],
)
def test_what_is_no_loop_is_refused(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_loop(f"agents_of_mine.{name}", args)
