"""Rows of a data set to prompts: messages, chat template, token ids, answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollout.prompts.datasets import MISSING
from rollout.rendering import RenderOptions, TemplateError
from rollout.rendering import render as render_messages
from rollout.types import Prompt

if TYPE_CHECKING:
    from rollout.prompts.datasets import DatasetSpec, Row


ROWS_AT_ONCE = 1024
"""Tokenized together; until then a tokenizer keeps 100 bytes and more per token."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str: ...


def render(rows: Sequence[Row], *, spec: DatasetSpec, tokenizer: Tokenizer) -> list[Prompt]:
    """Rows as prompts.

    A list of chat messages always goes through the chat template, which adds the special tokens; a string does if
    `spec.apply_chat_template`, else the tokenizer adds them (such as a BOS).

    Raises:
        DataError: a column is missing or has the wrong type, a prompt is empty or no text, or there is no chat
            template.
    """
    prompts: list[Prompt] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[start : start + ROWS_AT_ONCE]
        texts = [_checked_text(row, spec, tokenizer) for row in some]
        tokens = _tokenized(texts, tokenizer)
        prompts += [_prompt(row, text, ids, spec) for row, text, ids in zip(some, texts, tokens, strict=True)]
    return prompts


_Text = tuple[str, Sequence[Mapping[str, Any]] | None]
"""A prompt as text, and the messages that it was rendered from; None for a plain string."""


def _tokenized(texts: Sequence[_Text], tokenizer: Tokenizer) -> list[Sequence[int]]:
    tokens: dict[int, Sequence[int]] = {}
    for is_templated in (False, True):
        chosen = [index for index, (_, messages) in enumerate(texts) if (messages is not None) == is_templated]
        if chosen:
            found = tokenizer([texts[index][0] for index in chosen], add_special_tokens=not is_templated)
            tokens.update(zip(chosen, found["input_ids"], strict=True))
    return [tokens[index] for index in range(len(texts))]


def _prompt(row: Row, rendered: _Text, token_ids: Sequence[int], spec: DatasetSpec) -> Prompt:
    text, messages = rendered
    if len(token_ids) == 0:
        raise row.error(f"the prompt has no tokens; remove the row or fill column {spec.prompt_column!r}")
    used = {spec.prompt_column, spec.answer_column}
    reward = _reward(row, spec)
    is_required = reward in spec.rewards_with_answer if reward else spec.answer_required
    return Prompt(
        prompt_id=row.row_id,
        token_ids=np.asarray(token_ids, np.int32),
        text=text,
        answer=_answer(row, spec, is_required=is_required),
        reward=reward,
        metadata={name: value for name, value in row.columns.items() if name not in used},
        messages=tuple(messages or ()) if spec.keep_messages else (),
    )


def _checked_text(row: Row, spec: DatasetSpec, tokenizer: Tokenizer) -> _Text:
    """JSON can spell half a surrogate pair (`"\\ud83d"`), which no tokenizer takes."""
    messages = _messages(row, spec)
    text = str(row.get(spec.prompt_column)) if messages is None else _apply_template(messages, row, spec, tokenizer)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise row.error(
            f"column {spec.prompt_column!r} holds {text[error.start]!r}, half a surrogate pair and no character; write "
            "the character whole, or remove the row"
        ) from error
    return text, messages


def _messages(row: Row, spec: DatasetSpec) -> list[dict[str, Any]] | None:
    """For the chat template; None if the prompt is a plain string without it."""
    value = row.get(spec.prompt_column)
    match value:
        case str() if not spec.apply_chat_template:
            _check_plain(row, spec)
            return None
        case str():
            messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
        case list():
            messages = _checked_messages(value, row, spec)
        case _ if value is MISSING:
            raise row.lacks(spec.prompt_column, "task.prompt_column")
        case _:
            raise row.holds(spec.prompt_column, "a prompt is a string or a list of {'role', 'content'} messages")
    if spec.system_prompt:
        if messages[0]["role"] == "system":
            raise row.error("the messages have a system message, and task.system_prompt is set too; clear one of them")
        messages = [{"role": "system", "content": spec.system_prompt}, *messages]
    return messages


def _check_plain(row: Row, spec: DatasetSpec) -> None:
    """Raises DataError if a setting needs a chat template."""
    wanted = {
        "task.system_prompt is set": (spec.system_prompt, "clear task.system_prompt"),
        "task.chat_template_kwargs is set": (spec.chat_template_kwargs, "clear task.chat_template_kwargs"),
        "task.agent shows its tools in the prompt": (spec.tools, "tools_in_prompt=false among task.agent_args"),
    }
    for what, (value, instead) in wanted.items():
        if value:
            raise row.error(
                f"{what}, but this prompt is a plain string without chat template; set task.apply_chat_template=true, "
                f"or {instead}"
            )


def _checked_messages(value: Sequence[Any], row: Row, spec: DatasetSpec) -> list[dict[str, Any]]:
    if not value:
        raise row.error(f"column {spec.prompt_column!r} holds no message; give at least one")
    for position, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            where = f"message {position} of column {spec.prompt_column!r}"
            raise row.error(f"{where} is {message!r}; each message is {{'role': ..., 'content': ...}}")
    return [dict(message) for message in value]


def _apply_template(messages: list[dict[str, Any]], row: Row, spec: DatasetSpec, tokenizer: Tokenizer) -> str:
    if getattr(tokenizer, "chat_template", MISSING) is None:
        raise row.error(
            "the prompt needs a chat template, but the model's tokenizer has none; use an instruction-tuned model's "
            "tokenizer, or plain string prompts with task.apply_chat_template=false"
        )
    options = RenderOptions(tools=spec.tools, variables=spec.chat_template_kwargs)
    try:
        return render_messages(tokenizer, messages, options)
    except TemplateError as error:
        roles = ", ".join(str(m["role"]) for m in messages)
        raise row.error(f"the chat template refused the messages (roles: {roles}): {error.reason}") from error


def _reward(row: Row, spec: DatasetSpec) -> str:
    """Its name; empty if the row names none."""
    value = row.get(spec.reward_column) if spec.reward_column else None
    if value is None or value is MISSING:
        return ""
    if not isinstance(value, str):
        wanted = "it names the reward of the row, and null leaves it to task.reward.name; set task.reward.column"
        raise row.holds(spec.reward_column, wanted)
    return value


def _answer(row: Row, spec: DatasetSpec, *, is_required: bool) -> str:
    value = row.get(spec.answer_column)
    match value:
        case str():
            return value
        case bool():
            pass
        case int() | float() if isinstance(value, int) or math.isfinite(value):
            return str(value)
        case _ if value is MISSING and is_required:
            raise row.lacks(spec.answer_column, "task.answer_column")
        case _ if (value is MISSING or value is None) and not is_required:
            return ""
    raise row.holds(
        spec.answer_column,
        "an answer is a string or a finite number; convert the column, or point task.answer_column at another (`a.b` "
        "reaches into a struct)",
    )
