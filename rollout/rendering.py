"""Messages to token ids: chat templates, their variables, and the tokenizer.

Text that the policy said is never tokenized again: of a conversation that goes on, only what follows its last turn is
rendered.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def arguments_of(tools: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments for `apply_chat_template`. Without tools there is no `tools`: a tokenizer need not take it."""
    return {**kwargs, "tools": [dict(tool) for tool in tools]} if tools else dict(kwargs)


def variables_of(tokenizer: Any, *, with_tools: bool) -> frozenset[str] | None:
    """Names that the chat template reads and does not make itself.

    None if nobody can know: there is no template, the tokenizer renders with code of its own, or its template does
    not parse.

    Args:
        with_tools: of the template that is taken where tools are given, which may be one of its own.
    """
    from jinja2 import Environment, TemplateError, meta
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    try:
        template = tokenizer.get_chat_template(tools=[] if with_tools else None)
        environment = Environment(extensions=["jinja2.ext.loopcontrols", _generation()])
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except (ValueError, TemplateError):
        return None


def why_refused(tokenizer: Any, kwargs: Mapping[str, Any], *, with_tools: bool) -> str | None:
    """Why these arguments cannot be given to the chat template: one is a parameter of `apply_chat_template` itself, or
    the template never reads it. None if nothing is known against them."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    if reserved := sorted(taken & kwargs.keys()):
        return f"{', '.join(reserved)} cannot be set: rendering a prompt sets it"
    known = variables_of(tokenizer, with_tools=with_tools)
    if known is None or not (unread := sorted(kwargs.keys() - known)):
        return None
    others = ", ".join(sorted(known - taken)) or "nothing but the messages"
    return f"the chat template never reads {', '.join(unread)}; it reads {others}"


def schema_of(name: str, function: Callable[..., object]) -> dict[str, Any]:
    """The JSON schema of a function under `name`, from its annotations and its docstring in Google's style.

    Raises:
        ValueError: it lacks one of these, or an annotation has no counterpart in JSON.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(str(error)) from error
    schema["function"]["name"] = name
    return schema


def _generation() -> Any:
    """`{% generation %}`, which transformers adds to the language: it marks what an assistant says."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation


_MARK = "what the policy said"
_SLACK = 1024
"""Tokens beside twice those that there is room for: the last ones of a text that is cut are others."""


class TemplateError(ValueError):
    """The chat template refused messages; says what it said."""


class TooLong(ValueError):
    """Messages have more than `num_tokens` tokens, which is far more than there is room for; nobody counted all."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the messages have more than {num_tokens} tokens")
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a conversation is rendered with, beside its messages. Another setting is another conversation."""

    tools: Sequence[Mapping[str, Any]] = ()
    """As JSON schemas, in the form of OpenAI's API."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Of the template, such as `enable_thinking`."""


class ChatTemplate:
    """
    Args:
        tokenizer: of Hugging Face, with a chat template.

    Raises:
        ValueError: it has no chat template, or the template does not show what an assistant said.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer has no chat template; use one of an instruction-tuned model")
        if _MARK not in self._rendered(_made_up([{"role": "user", "content": "ask again"}]), Setting()):
            raise ValueError("the chat template does not show what an assistant said; use another one")

    def opening(self, messages: Sequence[Mapping[str, Any]], setting: Setting, *, most: int | None = None) -> list[int]:
        """Tokens of a conversation up to where the policy begins to speak.

        Args:
            most: tokens that there is room for. A few more are returned all the same; far more are not counted.

        Raises:
            TemplateError: the template refuses the messages.
            TooLong: there are far more tokens than `most`.
        """
        return self._tokens(self._rendered(messages, setting), most)

    def continuation(
        self,
        generated_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        setting: Setting,
        *,
        most: int | None = None,
    ) -> list[int]:
        """Tokens between what the policy said (`generated_ids`, not empty) and where it speaks again after `messages`.
        The end of its turn is among them, unless it is the last of `generated_ids`.

        Args:
            most: as of `opening`.

        Raises:
            TemplateError: the template refuses the messages.
            TooLong: there are far more tokens than `most`.
        """
        text, last = self.between(messages, setting), generated_ids[-1]
        if last in self._tokenizer.all_special_ids:
            text = text.removeprefix(self.text([last]))
        return self._tokens(text, most)

    def between(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        """Text between what the policy said, whatever it is, and where it speaks again after `messages`.

        Raises:
            TemplateError: the template refuses the messages.
        """
        # Templates rewrite earlier turns, such as what was thought there. Of a made-up one nothing is kept but its end.
        return self._rendered(_made_up(messages), setting).partition(_MARK)[2]

    def text(self, token_ids: Sequence[int], *, spelled_out: bool = True) -> str:
        """`spelled_out`: with special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=not spelled_out)

    def _tokens(self, text: str, most: int | None) -> list[int]:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair, which JSON can spell, is no text
        if most is not None:
            self._refuse_far_more(text, 2 * most + _SLACK)
        return self._ids(text)

    def _refuse_far_more(self, text: str, limit: int) -> None:
        """Raises TooLong if a beginning of the text has more than `limit` tokens.

        Tokenizers decide from what is near: the tokens of a beginning are those of the whole text, but for the last
        few. So with a limit of twice the room, and more, no text that fits is refused, whatever the tokenizer drops,
        joins or does not know. What fits has rarely more than eight characters per token, and is not looked at here.
        """
        length = 4 * limit
        while length < len(text):
            if len(self._ids(text[:length])) > limit:
                raise TooLong(limit)
            length *= 2

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def _rendered(self, messages: Sequence[Mapping[str, Any]], setting: Setting) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **arguments_of(setting.tools, setting.variables),
            )
        except Exception as error:  # a template may raise anything
            raise TemplateError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error


def _made_up(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": "ask"}, {"role": "assistant", "content": _MARK}, *messages]


def load_tokenizer(path: str, *, trust_remote_code: bool) -> Any:
    """A Hugging Face tokenizer of a directory or hub name. Takes seconds, transformers included.

    With `trust_remote_code` its own class is imported where it has one; without, a class of transformers may read the
    same files in another way.

    Raises:
        OSError, ValueError: it cannot be had, or needs code that is not trusted.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
