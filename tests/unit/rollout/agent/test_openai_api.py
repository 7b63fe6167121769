"""What counts as the policy's own words when a client sends them back."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.agent.openai_api import assistant_message, normal, says_the_same

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
