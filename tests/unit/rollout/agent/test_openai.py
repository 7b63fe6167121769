"""Agents with OpenAI's client: the tokens that the policy sees, those that are trained, and how trajectories end."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from rollout.agent.openai_agent import MAX_BYTES, OpenAiLoop, Task
from rollout.agent.openai_protocol import ApiError, parse_request
from rollout.agent.openai_session import Session
from rollout.agent.runner import make_loop, run_episode
from rollout.errors import AgentError, PluginError
from rollout.fleet.scheduler import NoReplica
from rollout.rendering import ChatTemplateRenderer
from tests.fakes.chat_policy import BEGIN, END, TEMPLATE, ChatPolicy, by_turn
from tests.fakes.chat_tokenizer import chat_tokenizer
from tests.fakes.trajectories import make_chunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from rollout.types import TokenChunk, Trajectory

Message = dict[str, Any]
USER: Message = {"role": "user", "content": "2+3?"}
OTHER: Message = {"role": "user", "content": "sure?"}
ADD: Message = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKED = f"<|im_start|>user\n2+3?{END}\n{BEGIN}"
ASKED_AGAIN = f"\n<|im_start|>user\nsure?{END}\n{BEGIN}"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
Chat = Any
"""`await chat(*messages, **arguments)` is a response of the policy."""


@pytest.fixture
async def policy() -> ChatPolicy:
    """Says "one" in every turn."""
    return await ChatPolicy(by_turn(*[f"one{END}"] * 9)).start()


async def saying(*responses: str) -> ChatPolicy:
    return await ChatPolicy(by_turn(*responses)).start()


@asynccontextmanager
async def chat_with(task: Task) -> AsyncIterator[Chat]:
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:

        async def chat(*messages: Any, **arguments: Any) -> Any:
            return await client.chat.completions.create(model=task.model, messages=list(messages), **arguments)

        yield chat


@asynccontextmanager
async def loop_of(solve: Any, policy: ChatPolicy, **how: Any) -> AsyncIterator[OpenAiLoop]:
    loop = OpenAiLoop(solve, template=ChatTemplateRenderer(policy.tokenizer), **how)
    yield loop
    await loop.close()


async def played(
    solve: Any, policy: ChatPolicy, *, max_tokens: int = 500, host: str = "127.0.0.1", **limits: Any
) -> Trajectory:
    async with loop_of(solve, policy, host=host) as loop:
        limits = {"generate": policy.generate, "timeout_s": 20.0, "max_sequences": 9, **limits}
        return await run_episode(loop, policy.prompt(), max_tokens, **limits)


async def talked(policy: ChatPolicy, talk: Callable[[Chat], Awaitable[Any]], **how: Any) -> Trajectory:
    """An agent that does `talk` with the policy."""

    async def solve(task: Task) -> Any:
        async with chat_with(task) as chat:
            return await talk(chat)

    return await played(solve, policy, **how)


async def asks_once(task: Task) -> None:
    async with chat_with(task) as chat:
        await chat(USER)


def asks_once_and_notes(tasks: list[Task]) -> Any:
    async def solve(task: Task) -> None:
        tasks.append(task)
        await asks_once(task)

    return solve


def said(response: Any) -> Message:
    """The response as clients send it back."""
    return response.choices[0].message.model_dump(exclude_none=True)


# What continues a conversation


async def test_turns_of_one_conversation_are_one_sequence_of_what_was_sampled() -> None:
    policy = await saying(f"<think>add</think>\n 5 {END}", f"yes{END}")

    async def talk(chat: Chat) -> None:
        first = await chat(USER)
        choice = first.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("<think>add</think>\n 5 ", "stop")
        assert (first.model, first.usage.prompt_tokens) == ("policy", len(policy.ids(ASKED)))
        second = await chat(USER, said(first), OTHER)
        assert second.choices[0].message.content == "yes"
        assert second.usage.total_tokens == len(policy.ids(policy.asked[1] + f"yes{END}"))

    episode = await talked(policy, talk, max_sequences=1)
    # The template would have left the thoughts out; what was sampled stays.
    expected = ASKED + "{<think>add</think>\n 5 " + END + "}" + ASKED_AGAIN + "{yes" + END + "}"
    assert (policy.spoken(episode.turns()), episode.status) == (expected, "completed")
    assert policy.asked == [ASKED, ASKED + f"<think>add</think>\n 5 {END}" + ASKED_AGAIN]
    for turn in episode.turns():
        assert (turn.logprobs == np.where(turn.is_generated, -0.5, 0.0)).all()


THOUGHT, FIVE = "<think>add</think>5", {"role": "assistant", "content": "5"}
ECHO = {"role": "assistant", "content": THOUGHT}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}
QUIET = {"extra_body": {"chat_template_kwargs": {"quiet": True}}}
NEW_SYSTEM = [{"role": "developer", "content": "new"}, USER, ECHO, OTHER]
FIRST, SECOND = f"{ASKED}{{{THOUGHT}{END}}}", f"{{yes{END}}}"
ALONE, REPEATED = f"---\n{ASKED_AGAIN[1:]}{{{THOUGHT}{END}}}", f"5{END}{ASKED_AGAIN}"


@pytest.mark.parametrize(
    ("second", "arguments", "spoken"),
    [
        pytest.param([USER, FIVE, OTHER], {}, f"---\n{ASKED}{REPEATED}{SECOND}", id="thoughts-left-out"),
        pytest.param([USER], {}, f"---\n{FIRST}", id="same-again"),
        pytest.param(
            NEW_SYSTEM, {}, f"---\n<|im_start|>system\nnew{END}\n{ASKED}{REPEATED}{SECOND}", id="other-system"
        ),
        pytest.param(
            [USER, ECHO, OTHER], {"tools": [ADD]},
            f"---\n<|im_start|>system\nadd{END}\n{ASKED}{REPEATED}{SECOND}", id="other-tools",
        ),
        pytest.param([USER, ECHO, OTHER], QUIET, f"---\n{ASKED}{REPEATED}hush {SECOND}", id="other-template"),
        pytest.param([OTHER], {}, ALONE, id="not-the-prompt"),
        pytest.param([PARTS, ECHO, OTHER], {}, f"{ASKED_AGAIN}{SECOND}", id="in-parts"),
    ],
)  # fmt: skip
async def test_a_request_continues_what_it_repeats_and_anything_else_is_a_sequence_of_its_own(
    second: list[Message], arguments: dict[str, Any], spoken: str
) -> None:
    policy = await saying(THOUGHT + END, f"yes{END}")

    async def talk(chat: Chat) -> None:
        await chat(USER)
        await chat(*second, **arguments)

    assert policy.spoken((await talked(policy, talk)).turns()) == FIRST + spoken


async def test_a_question_on_the_side_does_not_end_a_conversation() -> None:
    policy = await saying(THOUGHT + END, f"yes{END}")

    async def talk(chat: Chat) -> None:
        for messages in ([USER], [OTHER], [USER, ECHO, OTHER]):
            await chat(*messages)

    assert policy.spoken((await talked(policy, talk)).turns()) == f"{FIRST}{ASKED_AGAIN}{SECOND}{ALONE}"


async def test_concurrent_requests_do_not_share_a_sequence() -> None:
    def says(asked: str) -> str:
        return f"three{END}" if "third" in asked else f"two{END}" if "sure" in asked else f"one{END}"

    policy = await ChatPolicy(says).start()

    async def talk(chat: Chat) -> None:
        first = said(await chat(USER))
        policy.engine.faults.hang_generation = True
        both = asyncio.gather(*(chat(USER, first, one) for one in (OTHER, {"role": "user", "content": "third"})))
        while len(policy.asked) < 3:
            await asyncio.sleep(0)
        policy.engine.faults.hang_generation = False
        await policy.engine.wake()
        await both

    sequences = set(policy.spoken((await talked(policy, talk)).turns()).split("---\n"))
    two, three = f"{ASKED_AGAIN}{{two{END}}}", ASKED_AGAIN.replace("sure?", "third") + f"{{three{END}}}"
    one, repeated = f"{ASKED}{{one{END}}}", f"{ASKED}one{END}"
    assert sequences in ({one + two, repeated + three}, {one + three, repeated + two})


@pytest.mark.parametrize("text", ["so", "", '<tool_call>{"name": }</tool_call>'])
async def test_what_tools_return_follows_the_calls_in_the_same_sequence(text: str) -> None:
    policy = await saying(f"{text}{CALL % 1}{CALL % 2}{END}", f"5{END}")

    async def talk(chat: Chat) -> None:
        first = await chat(USER, tools=[ADD])
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", text or None)
        calls = choice.message.tool_calls
        assert [(one.function.name, one.function.arguments) for one in calls] == [
            ("add", f'{{"a": {n}}}') for n in (1, 2)
        ]
        assert len({one.id for one in calls}) == 2
        results = [{"role": "tool", "tool_call_id": one.id, "content": f"r{n}"} for n, one in enumerate(calls)]
        await chat(USER, said(first), *results, tools=[ADD])

    episode = await talked(policy, talk, max_sequences=1)
    results = "".join(f"<|im_start|>user\n<tool_response>r{n}</tool_response>{END}\n" for n in range(2))
    first = f"---\n<|im_start|>system\nadd{END}\n{ASKED}{{{text}{CALL % 1}{CALL % 2}{END}}}"
    assert policy.spoken(episode.turns()) == f"{first}\n{results}{BEGIN}{{5{END}}}"


def call_with(arguments: str) -> Message:
    return {"id": "other", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("changes", "continues"),
    [
        ({"content": "\n so ", "refusal": None, "annotations": [], "tool_calls": [call_with('{"a":1}')]}, True),
        ({"tool_calls": [call_with('{"a": 2}')]}, False),
        ({"tool_calls": [call_with("no JSON")]}, False),
        ({"tool_calls": None}, False),
        ({"content": "so!"}, False),
        ({"content": None}, False),
    ],
)
async def test_a_client_may_change_white_space_and_ids_of_what_the_policy_said(
    changes: Message, continues: bool
) -> None:
    policy = await saying(f" so\n{CALL % 1}\n{END}", f"5{END}")

    async def talk(chat: Chat) -> None:
        await chat(USER, {**said(await chat(USER, tools=[ADD])), **changes}, OTHER, tools=[ADD])

    assert [turn.begins_anew for turn in (await talked(policy, talk)).turns()] == [True, not continues]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_goes_away_ends_its_generation_and_leaves_the_conversation_as_it_was(
    has_begun: bool,
) -> None:
    policy = await saying(f"one{END}", f"two{END}")

    async def talk(chat: Chat) -> None:
        history = [USER, said(await chat(USER))] if has_begun else []
        policy.engine.faults.hang_generation = True
        policy.has_begun.clear()
        asking = asyncio.ensure_future(chat(*history, {"role": "user", "content": "never answered"}))
        await policy.has_begun.wait()
        asking.cancel()
        while policy.engine._live:
            await asyncio.sleep(0)
        policy.engine.faults.hang_generation = False
        await chat(*history, OTHER if has_begun else USER)

    episode = await talked(policy, talk, max_sequences=1)
    again = f"{ASKED_AGAIN}{{two{END}}}" if has_begun else ""
    assert policy.spoken(episode.turns()) == f"{ASKED}{{one{END}}}{again}"


# What a request may ask for


async def test_stop_texts_and_limits_of_a_request_end_the_response() -> None:
    policy = await ChatPolicy(lambda asked: f"yes</a> and more{END}" if "sure" in asked else f"123456789{END}").start()

    async def talk(chat: Chat) -> None:
        cut = await chat(USER, max_tokens=3)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("123", "length")
        stopped = await chat(USER, said(cut), OTHER, stop=["</b>", "</a>"], max_completion_tokens=50)
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("yes", "stop")

    episode = await talked(policy, talk, max_sequences=1)
    # The end of a turn that was cut is context; a stop text is trained.
    assert policy.spoken(episode.turns()) == f"{ASKED}{{123}}{END}{ASKED_AGAIN}{{yes</a>}}"
    assert (policy.max_tokens, episode.status) == ([3, 50], "completed")


async def test_log_probabilities_and_streams_are_those_of_the_api() -> None:
    policy = await saying(f"a{CALL % 1}{CALL % 2}{END}")

    async def talk(chat: Chat) -> None:
        choice = (await chat(USER, logprobs=True)).choices[0]
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == f"a{CALL % 1}{CALL % 2}{END}"
        assert choice.message.content == f"a{CALL % 1}{CALL % 2}", "without tools a call is text"
        assert {token.logprob for token in tokens} == {-0.5}
        stream = await chat(USER, stream=True, stream_options={"include_usage": True}, tools=[ADD])
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "a"
        calls = [one for delta in deltas for one in delta.tool_calls or ()]
        assert [(one.index, one.function.arguments) for one in calls] == [(0, '{"a": 1}'), (1, '{"a": 2}')]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(tokens)

    await talked(policy, talk)


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([USER], {"n": 2}, "n must be 1"),
        ([USER], {"response_format": {"type": "json_object"}}, "response_format must be"),
        ([USER], {"tool_choice": "required"}, "tool_choice must be"),
        ([USER], {"logprobs": True, "top_logprobs": 5}, "top_logprobs must be 0"),
        ([USER], {"presence_penalty": 0.5}, "presence_penalty must be 0"),
        ([USER], {"max_tokens": 0}, r"`int` >= 1 - at `\$\.max_tokens`"),
        ([USER], {"stop": [""]}, r"\$\.stop"),
        ([USER], {"tools": ["add"]}, r"\$\.tools"),
        ([USER], {"extra_body": {"chat_template_kwargs": [1]}}, r"Expected `object.*\$\.chat_template_kwargs"),
        ([IMAGE], {}, "images and sound can"),
        ([{"role": "refused", "content": ""}], {}, "refused the messages: TemplateError: there is no such role"),
        ([], {}, r"\$\.messages"),
    ],
)
async def test_what_a_policy_in_training_cannot_do_is_refused(
    policy: ChatPolicy, messages: list[Message], arguments: dict[str, Any], message: str
) -> None:
    async def talk(chat: Chat) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await chat(*messages, **arguments)
        await chat(USER)

    episode = await talked(policy, talk, max_sequences=1)
    assert policy.spoken(episode.turns()) == f"{ASKED}{{one{END}}}"


async def test_what_changes_nothing_is_logged_once(policy: ChatPolicy, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(chat: Chat) -> None:
        for _ in range(2):
            await chat(USER, temperature=0.1, seed=3, parallel_tool_calls=True, response_format={"type": "text"})

    await talked(policy, talk)
    logged = [record.getMessage().partition(" in a request")[0] for record in caplog.records]
    assert sorted(logged) == ["ignored seed=3", "ignored temperature=0.1"]


async def test_the_server_reports_its_model_and_what_it_does_not_have(policy: ChatPolicy) -> None:
    async def solve(task: Task) -> None:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            assert [model.id async for model in client.models.list()] == [task.model]
            with pytest.raises(openai.NotFoundError, match=r"POST /embeddings.*there are POST /chat/completions"):
                await client.embeddings.create(model=task.model, input="x")
        await asks_once(task)

    await played(solve, policy)


# A session without a server


def session_of(policy: ChatPolicy, *, generate: Any = None, stop: Sequence[str] = ()) -> Session:
    template = ChatTemplateRenderer(policy.tokenizer)
    return Session(policy.prompt(), 500, generate=generate or policy.generate, template=template, stop=stop)


async def respond(session: Session, *messages: Any, **fields: Any) -> Any:
    return await session.respond(parse_request({"messages": list(messages), **fields}, {}))


async def test_the_stop_texts_of_the_run_are_trained_and_no_agent_reads_them() -> None:
    policy = await saying(f"yes</a> and{END}", f"{CALL % 1}</a>{END}")

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        return await policy.generate(token_ids, max_tokens, stop=("</a>",) if stop is None else stop)

    session = session_of(policy, generate=generate, stop=("</a>",))
    first = await respond(session, USER)
    assert (first.message["content"], first.finish_reason) == ("yes", "stop")
    again = await respond(session, USER, first.message, OTHER, stop=["and"])
    assert again.message["content"] == f"{CALL % 1}</a>"
    assert policy.spoken(session.turns()).startswith(f"{ASKED}{{yes</a>}}")


async def test_a_session_that_has_ended_asks_the_policy_nothing_more(policy: ChatPolicy) -> None:
    """A request may be read while its trajectory ends."""
    session = session_of(policy)
    await session.close()
    with pytest.raises(ApiError, match="this trajectory has ended"):
        await respond(session, USER)
    assert policy.asked == []


async def test_a_response_without_tokens_leaves_the_conversation_as_it_was() -> None:
    policy, is_silent = await saying(f"one{END}", f"two{END}"), [False]

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        return make_chunk([]) if is_silent[0] else await policy.generate(token_ids, max_tokens, stop=stop)

    session = session_of(policy, generate=generate)
    first = await respond(session, USER)
    is_silent[0] = True
    silent = await respond(session, USER, first.message, USER)
    assert (silent.message["content"], silent.num_completion_tokens) == ("", 0)
    is_silent[0] = False
    await respond(session, USER, first.message, OTHER)
    assert policy.spoken(session.turns()) == f"{ASKED}{{one{END}}}{ASKED_AGAIN}{{two{END}}}"


async def test_messages_that_are_far_too_long_are_refused_by_their_beginning(policy: ChatPolicy) -> None:
    """Counting all of their tokens would take seconds and gigabytes."""
    session, most = session_of(policy), len(policy.prompt().token_ids) + 500
    long = {"role": "user", "content": "x" * 2_000_000}
    with pytest.raises(ApiError, match=f"length is {most} tokens, .* have more than {2 * most + 1024}") as refused:
        await respond(session, long)
    assert (refused.value.status, refused.value.code, session.status) == (400, "context_length_exceeded", "truncated")
    first = await respond(session, USER)
    with pytest.raises(ApiError, match=f"have more than {2 * most - len(policy.ids(f'{ASKED}one{END}')) + 1024}"):
        await respond(session, USER, first.message, long)
    await respond(session, USER, first.message, OTHER)
    assert session.status == "completed"
    assert [turn.begins_anew for turn in session.turns()] == [False, False]


# How a trajectory ends


async def asks_until_there_is_no_room(chat: Chat) -> None:
    messages = [USER]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        while True:
            messages += [said(await chat(*messages)), USER]
    assert refused.value.code == "context_length_exceeded" and len(messages) > 3
    raise KeyError("no response")


async def continues_with_less_history(chat: Chat) -> None:
    with pytest.raises(openai.BadRequestError):
        await chat({"role": "user", "content": "x" * 1000})
    await chat(USER)


@pytest.mark.parametrize(
    ("talk", "max_tokens", "status"),
    [
        (asks_until_there_is_no_room, 100, "truncated"),
        (lambda chat: chat(USER), 2, "truncated"),
        (lambda chat: chat(USER, max_tokens=2), 300, "completed"),
        (continues_with_less_history, 300, "completed"),
    ],
    ids=["refused", "cut-off", "own-limit", "room-again"],
)
async def test_a_trajectory_is_truncated_if_its_last_response_lacked_room(
    policy: ChatPolicy, talk: Any, max_tokens: int, status: str
) -> None:
    async def solve_without_reward(chat: Chat) -> None:
        await talk(chat)

    assert (await talked(policy, solve_without_reward, max_tokens=max_tokens)).status == status


async def two_turns(chat: Chat) -> None:
    await chat(USER, said(await chat(USER)), OTHER)


async def no_turn(chat: Chat) -> None: ...


@pytest.mark.parametrize(
    ("talk", "result", "expected"),
    [
        (two_turns, None, [0.0, 0.0]),
        (two_turns, 2, [0.0, 2.0]),
        (two_turns, np.float32(-0.5), [0.0, -0.5]),
        (two_turns, float("nan"), "must return a finite number or None, got nan"),
        (two_turns, True, "must return a finite number or None, got True"),
        (two_turns, "1", "must return a finite number or None, got '1'"),
        (two_turns, KeyError("my tool"), r"raised KeyError: 'my tool' \(test_openai.py:\d+\)"),
        (no_turn, KeyError("my tool"), r"raised KeyError: 'my tool'"),
        (no_turn, 1.0, "without a response of the policy"),
    ],
)
async def test_the_reward_goes_to_the_last_turn_and_what_an_agent_did_wrong_is_the_reason(
    policy: ChatPolicy, talk: Any, result: Any, expected: list[float] | str
) -> None:
    async def talk_then_return(chat: Chat) -> Any:
        await talk(chat)
        if isinstance(result, Exception):
            raise result
        return result

    if isinstance(expected, str):
        with pytest.raises(AgentError, match=expected):
            await talked(policy, talk_then_return)
    else:
        assert [turn.reward for turn in (await talked(policy, talk_then_return)).turns()] == expected


async def test_a_generation_that_runs_out_of_time_fails_the_trajectory_and_ends_an_agent_that_hangs(
    policy: ChatPolicy,
) -> None:
    ended: list[bool] = []

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        return replace(await policy.generate(token_ids, 2, stop=stop), finish_reason="abort")

    async def solve(task: Task) -> None:
        try:
            with pytest.raises(openai.NotFoundError, match="took too long; this trajectory has ended"):
                await asks_once(task)
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    episode = await played(solve, policy, generate=generate, timeout_s=60.0)
    assert (episode.status, ended) == ("failed", [True])


async def test_an_agent_that_hangs_ends_at_the_deadline_with_its_generation_and_its_address(
    policy: ChatPolicy,
) -> None:
    policy.engine.faults.hang_generation = True
    tasks: list[Task] = []
    before = asyncio.all_tasks()
    async with loop_of(asks_once_and_notes(tasks), policy) as loop:
        with pytest.raises(AgentError, match=r"longer than task\.agent_timeout_s=3"):
            await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=3.0)
        assert (len(policy.asked), policy.engine._live) == (1, {})
        with pytest.raises(openai.NotFoundError, match="no such trajectory, or it has ended"):
            await asks_once(tasks[0])
    await asyncio.sleep(0)
    assert {task for task in asyncio.all_tasks() - before if not task.done()} == set()


async def test_a_request_that_runs_when_the_trajectory_ends_is_refused(policy: ChatPolicy) -> None:
    policy.engine.faults.hang_generation = True
    asking: list[asyncio.Task[None]] = []

    async def solve(task: Task) -> None:
        asking.append(asyncio.create_task(asks_once(task)))
        await policy.has_begun.wait()

    with pytest.raises(AgentError, match="without a response of the policy"):
        await played(solve, policy)
    with pytest.raises(openai.NotFoundError, match="this trajectory has ended"):
        await asking[0]
    assert (len(policy.asked), policy.engine._live) == (1, {})


@pytest.mark.parametrize("then", ["raise", "hang", "ask"])
async def test_an_engine_that_fails_ends_the_agent_and_is_no_failure_of_it(policy: ChatPolicy, then: str) -> None:
    num_asked = 0

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        nonlocal num_asked
        num_asked += 1
        raise NoReplica("all are dead")

    async def talk(chat: Chat) -> None:
        while True:
            try:
                await chat(USER)
            except openai.BadRequestError as error:
                assert (error.code, "NoReplica: all are dead" in error.message) == ("engine_error", True)
                if then == "raise":
                    raise
                if then == "hang":
                    await asyncio.sleep(3600)

    with pytest.raises(NoReplica, match="all are dead"):
        await talked(policy, talk, generate=generate, timeout_s=60.0)
    assert num_asked == 1, "its client does not try again"


async def test_a_plain_function_may_block(policy: ChatPolicy) -> None:
    def solve(task: Task) -> float:
        with OpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            message: Any = USER
            response = client.chat.completions.create(model=task.model, messages=[message])
            return float(response.choices[0].message.content == "one")

    assert [turn.reward for turn in (await played(solve, policy)).turns()] == [1.0]


# The address of a trajectory


async def test_many_trajectories_share_a_server_and_nothing_else(policy: ChatPolicy) -> None:
    everybody = asyncio.Barrier(200)

    async def solve(task: Task) -> float:
        await everybody.wait()
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, http_client=shared) as client:
            message: Any = {"role": "user", "content": task.prompt}
            await client.chat.completions.create(model=task.model, messages=[message])
            return float(task.answer)

    prompts = [replace(policy.prompt(), text=f"number {n}", answer=str(n)) for n in range(200)]
    async with openai.DefaultAsyncHttpxClient() as shared, loop_of(solve, policy) as loop:
        episodes = await asyncio.gather(
            *(run_episode(loop, prompt, 300, generate=policy.generate, timeout_s=60.0) for prompt in prompts)
        )
    for n, episode in enumerate(episodes):
        assert f"user\nnumber {n}{END}" in policy.spoken(episode.turns())
        assert episode.turns()[0].reward == n


@pytest.mark.parametrize("messages", [(), ({"role": "system", "content": "Be brief."}, USER)])
async def test_an_agent_gets_the_prompt_as_messages(policy: ChatPolicy, messages: tuple[Message, ...]) -> None:
    seen: list[Task] = []
    prompt = replace(policy.prompt(), messages=messages)
    async with loop_of(asks_once_and_notes(seen), policy) as loop:
        await run_episode(loop, prompt, 300, generate=policy.generate, timeout_s=20.0)
    assert list(seen[0].messages) == (list(messages) or [{"role": "user", "content": prompt.text}])


async def test_an_address_of_another_host_is_reported_and_the_next_trajectory_tries_again(
    policy: ChatPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.EADDRINUSE, "address already in use")

    with pytest.raises(AgentError, match=r"cannot be reached at 192.0.2.1: .* set host in task.agent_args"):
        await played(asks_once, policy, host="192.0.2.1")
    async with loop_of(asks_once, policy) as loop:
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "bind", refuses)
            with pytest.raises(AgentError, match="cannot be reached"):
                await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=20.0)
        episode = await run_episode(loop, policy.prompt(), 300, generate=policy.generate, timeout_s=20.0)
        assert episode.status == "completed"


@pytest.mark.skipif(not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_the_address_may_be_ipv6(policy: ChatPolicy) -> None:
    assert (await played(asks_once, policy, host="::1")).status == "completed"


@pytest.mark.parametrize(
    ("length", "most_read"),
    [("Transfer-Encoding: chunked", MAX_BYTES), (f"Content-Length: {4 * MAX_BYTES}", 0)],
    ids=["chunked", "declared"],
)
async def test_a_request_without_a_trajectory_is_refused_before_its_body_is_read(
    policy: ChatPolicy, length: str, most_read: int
) -> None:
    async def solve(task: Task) -> None:
        address = urlsplit(task.base_url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(f"POST /nobody/v1/chat/completions HTTP/1.1\r\nHost: x\r\n{length}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 ") and b"Connection: close" in head
        num_sent, piece = 0, b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with pytest.raises(ConnectionError):
            while num_sent < 3 * MAX_BYTES:
                writer.write(piece)
                await writer.drain()
                num_sent += len(piece)
        assert num_sent < most_read + (32 << 20)  # what the system holds of a connection
        writer.close()
        await asks_once(task)

    await played(solve, policy)


async def test_a_request_of_an_allowed_size_learns_that_its_trajectory_has_ended(policy: ChatPolicy) -> None:
    """If its connection broke, its client would try again."""

    async def solve(task: Task) -> None:
        async with chat_with(replace(task, base_url=task.base_url.replace(task.api_key, "nobody"))) as chat:
            for size in (1, 1 << 19, 20 << 20):
                with pytest.raises(openai.NotFoundError, match="no such trajectory, or it has ended"):
                    await chat({"role": "user", "content": "x" * size})
        await asks_once(task)

    await played(solve, policy)


def solve_of_the_test(task: Task) -> None: ...


NUMBER = 1
OPENAI_AGENT = "rollout.agent.openai_agent.openai_agent"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"solve": f"{__name__}.solve_of_the_tests"}, "did you mean 'solve_of_the_test'"),
        ({"solve": f"{__name__}.NUMBER"}, "solve must be the path of a function"),
        ({"host": "localhost"}, 'host must be "auto" or an IPv4 or IPv6 address'),
        ({"host": "0.0.0.0"}, "which means any"),
        ({"chat_template": None}, "the tokenizer has no chat template"),
        ({"chat_template": "{{ messages[0].content }}"}, "does not show the text of an assistant"),
    ],
)
def test_what_cannot_work_is_refused_before_the_run(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tokenizer = chat_tokenizer(TEMPLATE)
    tokenizer.chat_template = changes.get("chat_template", tokenizer.chat_template)
    tokenizer.save_pretrained(tmp_path)
    args = {"solve": f"{__name__}.solve_of_the_test", "tokenizer": str(tmp_path), **changes}
    args.pop("chat_template", None)
    with pytest.raises(PluginError, match=message):
        make_loop(OPENAI_AGENT, args)


def test_an_agent_for_other_hosts_listens_where_they_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOST", "127.0.0.2")
    chat_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    args = {"solve": f"{__name__}.solve_of_the_test", "tokenizer": str(tmp_path), "host": "auto"}
    assert make_loop(OPENAI_AGENT, args)._host == "127.0.0.2"  # type: ignore[attr-defined]
