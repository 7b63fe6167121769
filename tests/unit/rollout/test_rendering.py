"""Chat templates: what they read, what stays within a limit of tokens, and the calls of tools in a text."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rollout import rendering as module
from rollout.rendering import (
    ChatTemplateRenderer,
    RenderOptions,
    ToolCallError,
    TooLong,
    arguments_of,
    find_tool_calls,
    last_tool_call,
    schema_of,
    variables_of,
    why_refused,
)
from tests.fakes.chat_tokenizer import END, PLAIN, THINKING, chat_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable


# What templates read


def test_a_template_reads_what_it_does_not_define_itself() -> None:
    own = "{% set mine = 1 %}{% for m in messages %}{{ m.role ~ mine ~ loop.index }}{% break %}{% endfor %}"
    default = "{% if not date is defined %}{% set date = 'today' %}{% endif %}{{ date }}"
    said = "{%- generation -%}{{ inside }}{% endgeneration %}"
    assert variables_of(chat_tokenizer(own + default + said), with_tools=False) == {"messages", "date", "inside"}


def test_with_tools_the_template_for_tools_is_read() -> None:
    named: Any = {"default": "{{ messages }}{{ plain }}", "tool_use": "{{ messages }}{{ tools }}"}
    tokenizer = chat_tokenizer(named)
    assert variables_of(tokenizer, with_tools=False) == {"messages", "plain"}
    assert variables_of(tokenizer, with_tools=True) == {"messages", "tools"}


class Own:
    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> str:
        return f"{conversation}{kwargs}"


@pytest.mark.parametrize("tokenizer", [chat_tokenizer("{% unheard_of %}"), chat_tokenizer(None), Own()])  # type: ignore[arg-type]
def test_arguments_of_an_unknown_template_are_not_refused(tokenizer: Any) -> None:
    assert variables_of(tokenizer, with_tools=False) is None
    assert why_refused(tokenizer, {"anything": 1}, with_tools=False) is None


@pytest.mark.parametrize(
    ("template", "names", "reason"),
    [
        (THINKING, ["enable_thinking"], "None"),
        (THINKING, ["enable_thinking", "thinking"], "the chat template never reads thinking; it reads enable_thinking"),
        (PLAIN, ["thinking"], "the chat template never reads thinking; it reads nothing but the messages"),
        *((THINKING, [name], f"{name} cannot be set") for name in ("tools", "messages", "chat_template", "tokenize")),
    ],
)
def test_an_argument_that_is_never_read_or_that_rendering_sets_is_refused(
    template: str, names: list[str], reason: str
) -> None:
    found = why_refused(chat_tokenizer(template), dict.fromkeys(names, 1), with_tools=False)
    assert str(found).startswith(reason)


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


def test_a_function_is_described_by_its_docstring_and_annotations_under_the_name_that_calls_use() -> None:
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


# Conversations


def test_the_end_of_a_turn_is_neither_left_out_nor_repeated() -> None:
    tokenizer = chat_tokenizer(PLAIN)
    template, said = ChatTemplateRenderer(tokenizer), tokenizer("x", add_special_tokens=False)["input_ids"]
    reply = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    for last, expected in (
        ([], END + reply),
        ([tokenizer.eos_token_id], reply),
        ([tokenizer.unk_token_id], END + reply),
    ):
        messages = [{"role": "tool", "content": "42"}]
        tokens = template.render_next_turn([*said, *last], messages, RenderOptions())
        assert tokenizer.decode(tokens) == expected


CORPUS = ["to be or not to be " * 40, "=" * 600, " " * 600, "a1b2" * 200, "e\u0301e\u0301" * 200]


def whole_text_at_once() -> Tokenizer:
    """Merges across words, as there are none: the longest tokens that there can be."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    return tokenizer


def bytes_of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def most_likely_pieces() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(vocab_size=60, show_progress=False, unk_token="<unk>")
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def known_words_without_spaces() -> Tokenizer:
    """Drops white space, and makes one token of all that is unknown in a word."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "to": 1, "be": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return tokenizer


def renderer(make: Callable[[], Tokenizer]) -> ChatTemplateRenderer:
    fast = PreTrainedTokenizerFast(tokenizer_object=make())
    fast.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return ChatTemplateRenderer(fast)


@pytest.mark.parametrize("make", [whole_text_at_once, bytes_of_words, most_likely_pieces, known_words_without_spaces])
def test_no_message_that_fits_is_taken_for_too_long(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLACK", 64)
    template, num_checked, draw = renderer(make), 0, random.Random(0)
    pieces = ["to be or not to be ", "=" * 64, " " * 300, "a1b2" * 20, "e\u0301" * 30, "x", "\u00fc", "\n"]
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 60))) for _ in range(150)]
    for text in [*texts, " " * 100_000, "x" * 100_000]:
        tokens = template.render([{"role": "user", "content": text}], RenderOptions())
        again = template.render([{"role": "user", "content": text}], RenderOptions(), max_tokens=len(tokens))
        assert again == tokens
        num_checked += len(text) > 4 * (2 * len(tokens) + 64)
    assert num_checked > 0


def test_a_message_that_is_dense_behind_its_beginning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    template, lengths = renderer(known_words_without_spaces), list[int]()
    ids_of = template._ids
    monkeypatch.setattr(template, "_ids", lambda text: lengths.append(len(text)) or ids_of(text))
    with pytest.raises(TooLong, match="more than 1050 tokens"):
        template.render([{"role": "user", "content": " " * 10_000 + "to " * 100_000}], RenderOptions(), max_tokens=13)
    assert lengths == [4200, 8400, 16800]


# Calls of tools

GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
INSIDE = GOOD.replace('"a": 1', '"a": "</tool_call><tool_call>{\\"name\\": \\"b\\", \\"arguments\\": {}}"')


@pytest.mark.parametrize(
    ("text", "whole", "last"),
    [
        ("the answer is 4", [], None),
        (f"so {GOOD}", ["add"], "add"),
        (f"a call is <tool_call> {{...}}; {GOOD}", ["add"], "add"),
        (f"{GOOD} and {GOOD.replace('add', 'sub')}", ["add", "sub"], "add"),
        (GOOD.replace('"a": 1', '"a": "<tool_call> {"'), ["add"], "add"),
        (INSIDE, ["add"], "is not valid JSON"),
        (GOOD.replace("</tool_call>", ""), [], "does not end with </tool_call>"),
        ('{"name": "add", "arguments": {}}</tool_call>', [], "does not begin with <tool_call>"),
        ("<tool_call>{add}</tool_call>", [], "is not valid JSON"),
        (f"<tool_call>{'7' * 5000}</tool_call>", [], "is not valid JSON: Exceeds"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", [], "is not valid JSON: "),
        ("<tool_call>[]</tool_call>", [], 'a call is {"name"'),
        ('<tool_call>{"name": "add"}</tool_call>', [], 'a call is {"name"'),
        (GOOD.replace('{"a": 1}', '"x"'), [], 'a call is {"name"'),
        ("<tool_call>" + '{"x":' * 100_000, [], "does not end with </tool_call>"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_one_grammar_of_tool_calls_for_all_agents(text: str, whole: list[str], last: str | None) -> None:
    """`whole`: the calls of the text; `last`: the call that ends its first turn, or what is wrong with it."""
    calls = find_tool_calls(text)
    assert [call.name for call in calls] == whole
    assert all(text[call.start : call.end].startswith("<tool_call>") for call in calls)
    try:
        call = last_tool_call(text)
    except ToolCallError as error:
        assert last is not None and re.search(re.escape(last), str(error))
    else:
        assert (None if call is None else call.name) == last
