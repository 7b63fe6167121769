"""Agents with the client of OpenAI: which tokens the policy sees, and which of them are trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai import AsyncOpenAI

from rollout.agent.openai_agent import OpenAiLoop, Task
from rollout.agent.openai_protocol import ApiError, assistant_message, normalize, parse_request, same_message
from rollout.agent.openai_session import Session
from rollout.agent.runner import run_episode
from rollout.rendering import ChatTemplateRenderer, RenderOptions, TooLong
from tests.fakes.chat_policy import BEGIN, END, ChatPolicy, by_turn
from tests.fakes.trajectories import make_chunk

if TYPE_CHECKING:
    import numpy as np

    from rollout.types import TokenChunk, Trajectory

USER: dict[str, Any] = {"role": "user", "content": "2+3?"}
OTHER: dict[str, Any] = {"role": "user", "content": "sure?"}
ASKED = f"<|im_start|>user\n2+3?{END}\n{BEGIN}"
ASKED_AGAIN = f"\n<|im_start|>user\nsure?{END}\n{BEGIN}"
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

Chat = Callable[..., Awaitable[Any]]


async def played(
    policy: ChatPolicy, talk: Callable[[Chat], Awaitable[float | None]], *, max_sequences: int = 9, **changes: Any
) -> Trajectory:
    """An agent that does `talk` with a function that asks the policy."""

    async def solve(task: Task) -> float | None:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:

            async def chat(*messages: Any, **arguments: Any) -> Any:
                return await client.chat.completions.create(model=task.model, messages=list(messages), **arguments)

            return await talk(chat)

    await policy.start()
    loop = OpenAiLoop(solve, template=ChatTemplateRenderer(policy.tokenizer), variables=changes.pop("variables", {}))
    try:
        limits: dict[str, Any] = {"max_tokens": 500, "timeout_s": 20.0} | changes
        return await run_episode(
            loop,
            policy.prompt(),
            limits["max_tokens"],
            generate=policy.generate,
            timeout_s=limits["timeout_s"],
            max_sequences=max_sequences,
        )
    finally:
        await loop.close()


def said(response: Any) -> dict[str, Any]:
    """The answer as clients send it back."""
    return response.choices[0].message.model_dump(exclude_none=True)


async def test_turns_of_one_conversation_are_one_sequence_of_what_was_sampled() -> None:
    policy = ChatPolicy(by_turn(f"<think>add</think>\n 5 {END}", f"yes{END}"))

    async def talk(chat: Chat) -> None:
        first = await chat(USER)
        assert (first.choices[0].message.content, first.choices[0].finish_reason) == (
            "<think>add</think>\n 5 ",
            "stop",
        )
        assert (first.model, first.usage.prompt_tokens) == ("policy", len(policy.ids(ASKED)))
        second = await chat(USER, said(first), OTHER)
        assert second.choices[0].message.content == "yes"
        total = len(policy.ids(ASKED)) + first.usage.completion_tokens + len(policy.ids(ASKED_AGAIN)) - 1
        assert second.usage.total_tokens == total + 1 + len(policy.ids(f"yes{END}"))

    episode = await played(policy, talk, max_sequences=1)
    # The template would have left the thoughts out: what was sampled stays.
    expected = ASKED + "{<think>add</think>\n 5 " + END + "}" + ASKED_AGAIN + "{yes" + END + "}"
    assert (policy.spoken(episode.turns()), episode.status) == (expected, "completed")
    assert policy.asked == [ASKED, ASKED + f"<think>add</think>\n 5 {END}" + ASKED_AGAIN]
    for turn in episode.turns():
        assert (turn.logprobs[turn.is_generated] == -0.5).all()
        assert (turn.logprobs[~turn.is_generated] == 0).all()


THOUGHT, FIVE = "<think>add</think>5", {"role": "assistant", "content": "5"}
THOUGHT_OF_IT = {"role": "assistant", "content": THOUGHT}
PARTS = {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}
FIRST, SECOND = f"{ASKED}{{{THOUGHT}{END}}}", f"{{yes{END}}}"


@pytest.mark.parametrize(
    ("requests", "spoken"),
    [
        ([([USER], {}), ([USER, FIVE, OTHER], {})], f"{FIRST}---\n{ASKED}5{END}{ASKED_AGAIN}{SECOND}"),
        ([([USER], {}), ([USER], {})], f"{FIRST}---\n{FIRST}"),
        (
            [([USER], {}), ([{"role": "developer", "content": "new"}, USER, THOUGHT_OF_IT, OTHER], {})],
            f"{FIRST}---\n<|im_start|>system\nnew{END}\n{ASKED}5{END}{ASKED_AGAIN}{SECOND}",
        ),
        (
            [([USER], {}), ([USER, THOUGHT_OF_IT, OTHER], {"tools": [ADD]})],
            f"{FIRST}---\n<|im_start|>system\nadd{END}\n{ASKED}5{END}{ASKED_AGAIN}{SECOND}",
        ),
        (
            [([USER], {}), ([USER, THOUGHT_OF_IT, OTHER], {"extra_body": {"chat_template_kwargs": {"quiet": True}}})],
            f"{FIRST}---\n{ASKED}5{END}{ASKED_AGAIN}hush {SECOND}",
        ),
        ([([OTHER], {})], f"---\n{ASKED_AGAIN[1:]}{{{THOUGHT}{END}}}"),
        ([([PARTS], {})], FIRST),
        (
            [([USER], {}), ([OTHER], {}), ([USER, THOUGHT_OF_IT, OTHER], {})],
            f"{FIRST}{ASKED_AGAIN}{SECOND}---\n{ASKED_AGAIN[1:]}{{{THOUGHT}{END}}}",
        ),
    ],
    ids=[
        "thoughts-left-out", "same-again", "other-system", "other-tools", "other-template", "not-the-prompt",
        "in-parts", "on-the-side",
    ],
)  # fmt: skip
async def test_a_request_continues_what_it_repeats_and_anything_else_is_a_sequence_of_its_own(
    requests: list[tuple[list[Any], dict[str, Any]]], spoken: str
) -> None:
    policy = ChatPolicy(by_turn(THOUGHT + END, f"yes{END}"))

    async def talk(chat: Chat) -> None:
        for messages, arguments in requests:
            await chat(*messages, **arguments)

    assert policy.spoken((await played(policy, talk)).turns()) == spoken


async def test_requests_at_once_do_not_share_a_sequence() -> None:
    def says(asked: str) -> str:
        return f"three{END}" if "third" in asked else f"two{END}" if "sure" in asked else f"one{END}"

    policy = ChatPolicy(says)

    async def talk(chat: Chat) -> None:
        first = said(await chat(USER))
        policy.engine.faults.hang_generation = True
        new = (OTHER, {"role": "user", "content": "third"})
        both = asyncio.gather(*(chat(USER, first, one) for one in new))
        while len(policy.asked) < 3:
            await asyncio.sleep(0)
        policy.engine.faults.hang_generation = False
        await policy.engine.wake()
        await both

    episode = await played(policy, talk)
    one, two = policy.spoken(episode.turns()).split("---\n")
    third = ASKED_AGAIN.replace("sure?", "third")
    begin = f"{ASKED}{{one{END}}}"
    assert {one, two} in (
        {f"{begin}{ASKED_AGAIN}{{two{END}}}", f"{ASKED}one{END}{third}{{three{END}}}"},
        {f"{begin}{third}{{three{END}}}", f"{ASKED}one{END}{ASKED_AGAIN}{{two{END}}}"},
    )


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'


@pytest.mark.parametrize("text", ["so", ""])
async def test_calls_of_tools_are_read_and_what_tools_return_follows_in_the_same_sequence(text: str) -> None:
    policy = ChatPolicy(by_turn(f"{text}{CALL % 1}{CALL % 2}{END}", f"5{END}"))

    async def talk(chat: Chat) -> None:
        first = await chat(USER, tools=[ADD])
        choice = first.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", text or None)
        calls = choice.message.tool_calls
        assert [(one.function.name, one.function.arguments) for one in calls] == [
            ("add", '{"a": 1}'),
            ("add", '{"a": 2}'),
        ]
        assert len({one.id for one in calls}) == 2
        results = [{"role": "tool", "tool_call_id": one.id, "content": f"r{n}"} for n, one in enumerate(calls)]
        await chat(USER, said(first), *results, tools=[ADD])

    episode = await played(policy, talk, max_sequences=1)
    opening = f"---\n<|im_start|>system\nadd{END}\n{ASKED}"
    results = "".join(f"<|im_start|>user\n<tool_response>r{n}</tool_response>{END}\n" for n in range(2))
    first = f"{{{text}{CALL % 1}{CALL % 2}{END}}}"
    assert policy.spoken(episode.turns()) == f"{opening}{first}\n{results}{BEGIN}{{5{END}}}"


async def test_stop_texts_and_limits_of_a_request_end_the_answer() -> None:
    policy = ChatPolicy(lambda asked: f"yes</a> and more{END}" if "sure" in asked else f"123456789{END}")

    async def talk(chat: Chat) -> None:
        cut = await chat(USER, max_tokens=3)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("123", "length")
        stopped = await chat(USER, said(cut), OTHER, stop=["</b>", "</a>"], max_completion_tokens=50)
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("yes", "stop")

    episode = await played(policy, talk, max_sequences=1)
    # The end of a turn that was cut is context, and what a stop text ended is trained with it.
    assert policy.spoken(episode.turns()) == f"{ASKED}{{123}}{END}{ASKED_AGAIN}{{yes</a>}}"
    assert (policy.max_tokens, episode.status) == ([3, 50], "completed")


async def test_the_stop_texts_of_the_run_are_trained_and_no_agent_reads_them() -> None:
    policy = ChatPolicy(by_turn(f"yes</a> and{END}", f"{CALL % 1}</a>{END}"))

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        return await policy.generate(token_ids, max_tokens, stop=("</a>",) if stop is None else stop)

    session = session_of(await policy.start(), generate=generate, stop=("</a>",))
    first = await session.respond(parse_request({"messages": [USER]}, {}))
    assert (first.message["content"], first.finish_reason) == ("yes", "stop")
    again = await session.respond(parse_request({"messages": [USER, first.message, OTHER], "stop": ["and"]}, {}))
    assert again.message["content"] == f"{CALL % 1}</a>"
    assert policy.spoken(session.turns()).startswith(f"{ASKED}{{yes</a>}}")


async def test_log_probabilities_and_streams_are_those_of_the_api() -> None:
    policy = ChatPolicy(by_turn(f"a{CALL % 1}{CALL % 2}{END}"))

    async def talk(chat: Chat) -> None:
        whole = await chat(USER, logprobs=True)
        tokens = whole.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == f"a{CALL % 1}{CALL % 2}{END}"
        assert {token.logprob for token in tokens} == {-0.5}
        stream = await chat(USER, stream=True, stream_options={"include_usage": True}, tools=[ADD])
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "a"
        calls = [one for delta in deltas for one in delta.tool_calls or ()]
        assert [(one.index, one.function.arguments) for one in calls] == [(0, '{"a": 1}'), (1, '{"a": 2}')]
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
        assert chunks[-1].usage.completion_tokens == len(tokens)

    await played(policy, talk)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_client_that_goes_away_ends_its_generation_and_leaves_the_conversation_as_it_was(
    has_begun: bool,
) -> None:
    policy = ChatPolicy(by_turn(f"one{END}", f"two{END}"))

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

    episode = await played(policy, talk, max_sequences=1)
    again = f"{ASKED_AGAIN}{{two{END}}}" if has_begun else ""
    assert policy.spoken(episode.turns()) == f"{ASKED}{{one{END}}}{again}"


def session_of(policy: ChatPolicy, *, generate: Any = None, stop: Sequence[str] = ()) -> Session:
    template = ChatTemplateRenderer(policy.tokenizer)
    return Session(policy.prompt(), 500, generate=generate or policy.generate, template=template, stop=stop)


async def test_a_session_that_has_ended_asks_the_policy_nothing_more() -> None:
    """A request may be read while its trajectory ends."""
    policy = await ChatPolicy(by_turn(f"one{END}")).start()
    session = session_of(policy)
    await session.close()
    with pytest.raises(ApiError, match="this trajectory has ended"):
        await session.respond(parse_request({"messages": [USER]}, {}))
    assert policy.asked == []


async def test_an_answer_without_tokens_leaves_the_conversation_as_it_was() -> None:
    policy = await ChatPolicy(by_turn(f"one{END}", f"two{END}")).start()
    is_silent = [False]

    async def generate(token_ids: np.ndarray, max_tokens: int, *, stop: Any = None) -> TokenChunk:
        if is_silent[0]:
            return make_chunk([])
        return await policy.generate(token_ids, max_tokens, stop=stop)

    session = session_of(policy, generate=generate)
    first = await session.respond(parse_request({"messages": [USER]}, {}))
    is_silent[0] = True
    silent = await session.respond(parse_request({"messages": [USER, first.message, USER]}, {}))
    assert (silent.message["content"], silent.num_completion_tokens) == ("", 0)
    is_silent[0] = False
    await session.respond(parse_request({"messages": [USER, first.message, OTHER]}, {}))
    assert policy.spoken(session.turns()) == f"{ASKED}{{one{END}}}{ASKED_AGAIN}{{two{END}}}"


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
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "images and sound can"),
        ([{"role": "refused", "content": ""}], {}, "refused the messages: TemplateError: there is no such role"),
        ([], {}, r"\$\.messages"),
    ],
)  # fmt: skip
async def test_what_a_policy_in_training_cannot_do_is_refused_and_what_changes_nothing_is_logged_once(
    messages: list[Any], arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = ChatPolicy(by_turn(f"one{END}"))

    async def talk(chat: Chat) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await chat(*messages, **arguments)
        for _ in range(2):
            neutral = {"parallel_tool_calls": True, "response_format": {"type": "text"}}
            await chat(USER, temperature=0.1, seed=3, user="me", **neutral)

    episode = await played(policy, talk, max_sequences=2)
    assert policy.spoken(episode.turns()) == "---\n".join([f"{ASKED}{{one{END}}}"] * 2)
    assert len(policy.asked) == 2
    assert caplog.text.count("asks for temperature=0.1, which changes nothing") == 1


async def test_messages_that_are_far_too_long_are_refused_by_their_beginning() -> None:
    """All of them would take seconds, in which no other trajectory gets an answer, and gigabytes."""
    policy = await ChatPolicy(by_turn(*[f"one{END}"] * 2)).start()
    template, session = ChatTemplateRenderer(policy.tokenizer), session_of(policy)
    most = len(policy.prompt().token_ids) + 500
    with pytest.raises(TooLong) as refused:
        template.render([{"role": "user", "content": "x" * 2_000_000}], RenderOptions(), max_tokens=most)
    assert refused.value.num_tokens == 2 * most + 1024
    long = {"role": "user", "content": "x" * 2_000_000}
    with pytest.raises(ApiError, match=f"length is {most} tokens, .* have more than {2 * most + 1024}") as told:
        await session.respond(parse_request({"messages": [long]}, {}))
    assert (told.value.status, told.value.code, session.ran_out_of_room) == (400, "context_length_exceeded", True)
    first = await session.respond(parse_request({"messages": [USER]}, {}))
    used = policy.ids(f"{ASKED}one{END}")
    with pytest.raises(ApiError, match=f"have more than {2 * most - len(used) + 1024}"):
        await session.respond(parse_request({"messages": [USER, dict(first.message), long]}, {}))
    await session.respond(parse_request({"messages": [USER, dict(first.message), OTHER]}, {}))
    assert not session.ran_out_of_room
    assert [turn.begins_anew for turn in session.turns()] == [False, False]


# Calls of tools in what the policy says, and what counts as its own words when a client sends them back

REPLIED = assistant_message(
    ' so\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n', call_prefix="call_1_", reads_calls=True
)


def call_with(arguments: str) -> dict[str, Any]:
    return {"id": "other", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("echoed", "is_the_same"),
    [
        (REPLIED, True),
        (REPLIED | {"content": "\n so ", "refusal": None, "annotations": []}, True),
        (REPLIED | {"tool_calls": [call_with('{"a":1}')]}, True),
        (REPLIED | {"tool_calls": [call_with('{"a": 2}')]}, False),
        (REPLIED | {"tool_calls": [call_with("no JSON")]}, False),
        (REPLIED | {"tool_calls": None}, False),
        (REPLIED | {"content": "so!"}, False),
        (REPLIED | {"content": None}, False),
        (REPLIED | {"role": "user"}, False),
    ],
)
def test_white_space_and_ids_may_differ_and_nothing_else(echoed: dict[str, Any], is_the_same: bool) -> None:
    assert same_message(normalize(REPLIED), normalize(echoed)) is is_the_same


def written(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("5", "5", []),
        (f"{written('a', '{}')} and\n{written('b', '{}')}", "and", ["a", "b"]),
        (f"calls begin with <tool_call> so {written('a', '{}')}", "calls begin with <tool_call> so", ["a"]),
        (f'<tool_call>{{"name": }}</tool_call>{written("a", "{}")}', '<tool_call>{"name": }</tool_call>', ["a"]),
        (
            written("a", '{"x": "</tool_call><tool_call>{\\"name\\": \\"b\\", \\"arguments\\": {}}</tool_call>"}'),
            None,
            ["a"],
        ),
        (written("a", "{}").removesuffix("</tool_call>"), '<tool_call>{"name": "a", "arguments": {}}', []),
        (written("a", '"x"'), written("a", '"x"'), []),
        ("<tool_call>" + '{"x":' * 100_000, "<tool_call>" + '{"x":' * 100_000, []),
    ],
    ids=["none", "two", "thought", "no-json", "in-arguments", "cut-off", "no-object", "deep"],
)
def test_calls_are_those_that_can_be_read(text: str, content: str | None, calls: list[str]) -> None:
    message = assistant_message(text, call_prefix="c", reads_calls=True)
    assert message["content"] == content
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == calls
    assert len({call["id"] for call in message.get("tool_calls", [])}) == len(calls)
    assert assistant_message(text, call_prefix="c", reads_calls=False) == {"role": "assistant", "content": text}
