"""What chat templates read, and what is given to them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rollout.rendering import (
    ToolCallError,
    arguments_of,
    find_tool_calls,
    last_tool_call,
    schema_of,
    variables_of,
    why_refused,
)
from tests.fakes.chat_tokenizer import PLAIN, THINKING, chat_tokenizer


def test_a_template_is_asked_for_what_it_reads_and_does_not_make_itself() -> None:
    own = "{% set mine = 1 %}{% for m in messages %}{{ m.role ~ mine ~ loop.index }}{% break %}{% endfor %}"
    default = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}"
    said = "{% generation %}{{ inside }}{% endgeneration %}"
    assert variables_of(chat_tokenizer(own + default + said), with_tools=False) == {"messages", "date", "inside"}


def test_the_template_that_is_taken_where_there_are_tools_is_the_one_that_is_asked() -> None:
    named: Any = {"default": "{{ messages }}{{ plain }}", "tool_use": "{{ messages }}{{ tools }}"}
    tokenizer = chat_tokenizer(named)
    assert variables_of(tokenizer, with_tools=False) == {"messages", "plain"}
    assert variables_of(tokenizer, with_tools=True) == {"messages", "tools"}


class Own:
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        return f"{conversation}{kwargs}"


@pytest.mark.parametrize("tokenizer", [chat_tokenizer("{% unheard_of %}"), chat_tokenizer(None), Own()])  # type: ignore[arg-type]
def test_what_no_one_can_know_is_not_refused(tokenizer: Any) -> None:
    assert variables_of(tokenizer, with_tools=False) is None
    assert why_refused(tokenizer, {"anything": 1}, with_tools=False) is None


def test_an_argument_that_is_never_read_or_that_rendering_sets_is_refused() -> None:
    thinking = chat_tokenizer(THINKING)
    assert why_refused(thinking, {"enable_thinking": False}, with_tools=False) is None
    reason = why_refused(thinking, {"enable_thinking": False, "thinking": False}, with_tools=False)
    assert reason == "the chat template never reads thinking; it reads enable_thinking"
    reason = why_refused(chat_tokenizer(PLAIN), {"enable_thinking": False}, with_tools=False)
    assert reason == "the chat template never reads enable_thinking; it reads nothing but the messages"
    for name in ("tools", "add_generation_prompt", "messages", "chat_template", "tokenize"):
        assert str(why_refused(thinking, {name: 1}, with_tools=False)).startswith(f"{name} cannot be set")


def test_without_tools_the_template_gets_no_argument_of_that_name() -> None:
    assert arguments_of([], {"enable_thinking": False}) == {"enable_thinking": False}
    assert arguments_of([{"type": "function"}], {}) == {"tools": [{"type": "function"}]}


def search(query: str, most: int = 3) -> str:
    """Look something up.

    Args:
        query: what for
        most: how many results
    """
    return f"{query}{most}"


def test_a_function_is_described_by_its_docstring_and_annotations_under_the_name_that_it_is_called_by() -> None:
    function = schema_of("find", search)["function"]
    assert (function["name"], function["description"]) == ("find", "Look something up.")
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what for"},
            "most": {"type": "integer", "description": "how many results"},
        },
        "required": ["query"],
    }
    with pytest.raises(ValueError, match="no docstring"):
        schema_of("bare", lambda query: query)


GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "whole", "last"),
    [
        ("the answer is 4", [], None),
        (f"so {GOOD}", ["add"], "add"),
        (f"a call is <tool_call> {{...}}; {GOOD}", ["add"], "add"),
        (f"{GOOD} and {GOOD.replace('add', 'sub')}", ["add", "sub"], "add"),
        (GOOD.replace('"a": 1', '"a": "<tool_call> {"'), ["add"], "add"),
        (GOOD.replace("</tool_call>", ""), [], "does not end with </tool_call>"),
        ('{"name": "add", "arguments": {}}</tool_call>', [], "does not begin with <tool_call>"),
        ("<tool_call>{add}</tool_call>", [], "is not valid JSON"),
        ('<tool_call>{"name": "add"}</tool_call>', [], 'a call is {"name"'),
    ],
)
def test_one_grammar_of_tool_calls_for_all_agents(text: str, whole: list[str], last: str | None) -> None:
    """`whole`: the calls of the text; `last`: the call that its first turn ends with, or what is wrong with it."""
    calls = find_tool_calls(text)
    assert [call.name for call in calls] == whole
    assert all(text[call.start : call.end].startswith("<tool_call>") for call in calls)
    if last is None or whole:
        call = last_tool_call(text)
        assert (None if call is None else call.name) == last
    else:
        with pytest.raises(ToolCallError, match=re.escape(last)):
            last_tool_call(text)
