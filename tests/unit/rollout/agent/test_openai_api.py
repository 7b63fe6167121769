"""Calls of tools in what the policy says, and what counts as its own words when a client sends them back."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.agent.openai_protocol import assistant_message, normal, says_the_same

SAID = assistant_message(
    ' so\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n', call_prefix="call_1_", reads_calls=True
)


def call(arguments: str) -> dict[str, Any]:
    return {"id": "other", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize(
    ("echoed", "is_the_same"),
    [
        (SAID, True),
        (SAID | {"content": "\n so ", "refusal": None, "annotations": []}, True),
        (SAID | {"tool_calls": [call('{"a":1}')]}, True),
        (SAID | {"tool_calls": [call('{"a": 2}')]}, False),
        (SAID | {"tool_calls": [call("no JSON")]}, False),
        (SAID | {"tool_calls": None}, False),
        (SAID | {"content": "so!"}, False),
        (SAID | {"content": None}, False),
        (SAID | {"role": "user"}, False),
    ],
)
def test_white_space_and_ids_may_differ_and_nothing_else(echoed: dict[str, Any], is_the_same: bool) -> None:
    assert says_the_same(normal(SAID), normal(echoed)) is is_the_same


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
