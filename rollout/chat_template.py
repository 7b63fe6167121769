"""What a chat template takes beside the messages, and JSON schemas of the functions that it may show."""

from __future__ import annotations

import inspect
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
