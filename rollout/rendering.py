"""Between messages and token ids: the tokenizer, its chat template, and tool calls in a text.

Generated text is never tokenized again: of a conversation that continues, only what follows its last turn is rendered.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """A Hugging Face tokenizer by directory or hub name. Takes seconds. With `trust_remote_code` its own class is
    imported, if any; a class of transformers may read the same files in another way. Raises OSError or ValueError if it
    cannot be loaded, or needs code that is not trusted."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


# ---------------------------------------------------------------- what a template takes

_GENERATION = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""`{% generation %}`, which transformers adds to the language of templates."""


def arguments_of(tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `apply_chat_template`; without tools no `tools`, which a tokenizer need not accept."""
    return {**kwargs, "tools": [dict(tool) for tool in tools]} if tools else dict(kwargs)


def variables_of(tokenizer: Any, *, with_tools: bool) -> frozenset[str] | None:
    """Names that the chat template reads and does not define; with tools a tokenizer may have another template. None if
    they are unknown: there is no template, it does not parse, or the tokenizer renders with custom code."""
    from jinja2 import Environment, TemplateError, meta
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        template = tokenizer.get_chat_template(tools=[] if with_tools else None)
        template = _GENERATION.sub("", template)
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except (ValueError, TemplateError):
        return None


def why_refused(tokenizer: Any, kwargs: Mapping[str, Any], *, with_tools: bool) -> str | None:
    """Why the chat template cannot use these arguments: one is a parameter of `apply_chat_template`, or is never read.
    None if there is no known reason."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if reserved := sorted(taken & kwargs.keys()):
        return f"{', '.join(reserved)} cannot be set: rendering a prompt sets it"
    known = variables_of(tokenizer, with_tools=with_tools)
    if known is None or not (unread := sorted(kwargs.keys() - known)):
        return None
    others = ", ".join(sorted(known - taken)) or "nothing but the messages"
    return f"the chat template never reads {', '.join(unread)}; it reads {others}"


def schema_of(name: str, function: Callable[..., object]) -> dict[str, Any]:
    """The JSON schema of a function under `name`, from its annotations and its docstring in Google's style. Raises
    ValueError if it lacks one of these, or JSON has no type for an annotation."""
    from transformers.utils import chat_template_utils as utils

    try:
        schema = utils.get_json_schema(function)
    except (utils.DocstringParsingException, utils.TypeHintParsingException, NameError) as error:
        raise ValueError(str(error)) from error
    schema["function"]["name"] = name
    return schema


# ---------------------------------------------------------------- conversations


_PLACEHOLDER = "a response of the policy"
_SLACK = 1024
"""Tokens beyond twice the room: the last tokens of a cut text differ."""


class TemplateError(ValueError):
    """The chat template refused messages; `reason` is what it raised."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"the chat template refused the messages: {type(reason).__name__}: {reason}")
        self.reason = reason


class TooLong(ValueError):
    """Messages have more than `num_tokens` tokens, far beyond the room; not all were counted."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the messages have more than {num_tokens} tokens")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """What a conversation is rendered with. Other options make it another conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas, in the form of OpenAI's API."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the template, such as `enable_thinking`."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> str:
    """The text of a conversation up to where the policy begins. Raises TemplateError if the template refuses it."""
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=True,
            **arguments_of(options.tools, options.variables),
        )
    except Exception as error:  # a template may raise anything
        raise TemplateError(error) from error


class ChatTemplateRenderer:
    """Conversations of agents, turn by turn. Raises ValueError if the tokenizer (of Hugging Face) has no chat template,
    or one that does not show the text of an assistant."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer has no chat template; use one of an instruction-tuned model")
        messages = _with_turn([{"role": "user", "content": "ask again"}])
        if _PLACEHOLDER not in render(tokenizer, messages, RenderOptions()):
            raise ValueError("the chat template does not show the text of an assistant; use another one")

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: RenderOptions, *, max_tokens: int | None = None
    ) -> list[int]:
        """Tokens of a conversation up to where the policy begins. Raises TemplateError; TooLong if there are far more
        than `max_tokens`, which are not counted. A few more are returned."""
        return self._tokens(render(self._tokenizer, messages, options), max_tokens)

    def render_next_turn(
        self,
        generated_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        options: RenderOptions,
        *,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Tokens between `generated_ids` (not empty) and where the policy continues after `messages`. They include the
        end of its turn, unless that is the last of `generated_ids`. `max_tokens` and errors as of `render`."""
        text, last = self.suffix(messages, options), generated_ids[-1]
        if last in self._tokenizer.all_special_ids:
            text = text.removeprefix(self.text([last]))
        return self._tokens(text, max_tokens)

    def suffix(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions) -> str:
        """Text between any generated turn and where the policy continues after `messages`. Raises TemplateError."""
        # Templates rewrite earlier turns, such as thoughts in them. Of a placeholder turn only the end is kept.
        return render(self._tokenizer, _with_turn(messages), options).partition(_PLACEHOLDER)[2]

    def text(self, token_ids: Sequence[int], *, spelled_out: bool = True) -> str:
        """`spelled_out`: with special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not spelled_out)

    def _tokens(self, text: str, max_tokens: int | None) -> list[int]:
        """Raises TooLong if a prefix of the text has far more than `max_tokens` tokens.

        Tokenizers decide locally: the tokens of a prefix are those of the whole text, except for the last few. So with
        a limit of more than twice the room, no text that fits is refused. Text that fits rarely has more than eight
        characters per token, and is not checked.
        """
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can spell, is no text
        if max_tokens is not None:
            limit = 2 * max_tokens + _SLACK
            length = 4 * limit
            while length < len(text):
                if len(self._ids(text[:length])) > limit:
                    raise TooLong(limit)
                length *= 2
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _with_turn(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _PLACEHOLDER}, *messages]


# ---------------------------------------------------------------- tool calls


CALL_START, CALL_END = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(CALL_START) + r"\s*(?=\{)")
_DECODER = json.JSONDecoder()


class ToolCallError(ValueError):
    """A text begins a tool call with the wrong syntax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as Hermes and Qwen models write it:

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "3 * 14"}}
    </tool_call>
    """

    name: str
    arguments: Mapping[str, Any]
    start: int
    end: int
    """`text[start:end]` is the call."""


def find_tool_calls(text: str) -> list[ToolCall]:
    """All whole calls. One that is cut off or no JSON is text: a thought may describe the syntax of calls."""
    found = (_read_call(text, match.start(), match.end()) for match in _CALL.finditer(text))
    return [call for call in found if call is not None]


def _read_call(text: str, start: int, body: int) -> ToolCall | None:
    try:
        call, stop = _DECODER.raw_decode(text, body)
    except (ValueError, RecursionError):  # endless numbers and lists in lists in lists are no call either
        return None
    rest = text[stop:].lstrip()
    match call:
        case {"name": str(name), "arguments": dict(arguments)} if rest.startswith(CALL_END):
            end = len(text) - len(rest) + len(CALL_END)
            return ToolCall(name=name, arguments=arguments, start=start, end=end)
        case _:
            return None


def last_tool_call(text: str) -> ToolCall | None:
    """The call at the first `CALL_END`, which ends a turn; None without one. Raises ToolCallError for wrong syntax."""
    before, closed, _ = text.partition(CALL_END)
    if calls := find_tool_calls(before + closed):
        return calls[-1]
    if CALL_START not in before and not closed:
        return None
    if CALL_START not in before:
        raise ToolCallError(f"the call does not begin with {CALL_START}")
    if not closed:
        raise ToolCallError(f"the call does not end with {CALL_END}")
    # The last one that an object follows: a thought before the call may describe how one is written.
    starts = [match.end() for match in _CALL.finditer(before)]
    try:
        json.loads(before[starts[-1] :] if starts else before.rpartition(CALL_START)[2])
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"the call is not valid JSON: {error}") from error
    raise ToolCallError('a call is {"name": "...", "arguments": {...}}')
