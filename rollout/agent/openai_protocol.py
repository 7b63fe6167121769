"""OpenAI's chat completions: requests read, responses and events written.

Source: the OpenAI API reference, "Create chat completion", with what vLLM adds (`chat_template_kwargs`).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from rollout.rendering import RenderOptions, find_tool_calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODEL = "policy"
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "top_logprobs": (0,),
}
"""What would change how the policy samples, or ask for what it does not do, with the values that do not."""


class ApiError(Exception):
    """A request that is answered with an error, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Stop = Annotated[str, msgspec.Meta(min_length=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """What a request may contain. Its model may have any name, as there is one."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    stop: list[_Stop] | str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    model: Any = None


class _Text(msgspec.Struct, tag_field="type", tag="text"):
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: list[_Text] | str | None = None
    tool_calls: list[_ToolCall] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: tuple[Mapping[str, Any], ...]
    """In the form of `normalize`."""
    options: RenderOptions
    max_tokens: int | None
    stop: tuple[str, ...] | None
    """None leaves it to the run."""
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: Mapping[str, object]
    """Its other fields. Sampling is among them: a policy is trained on what it samples as the run samples."""


def parse_request(body: object, variables: Mapping[str, Any]) -> ChatRequest:
    """
    Args:
        variables: of the chat template, which `chat_template_kwargs` of the request adds to.

    Raises:
        ApiError: it is none, or asks for what a policy in training cannot do.
    """
    try:
        given = msgspec.convert(body, _Body)
    except msgspec.ValidationError as error:
        raise ApiError(f"the request cannot be read: {error}") from error
    assert isinstance(body, dict)
    for name, allowed in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            only = json.dumps(allowed[0])
            raise ApiError(f"{name} must be {only} where a policy is trained, got {_shown(value)}; leave it out")
    known = {*_Body.__struct_fields__, *_NEUTRAL}
    options = given.stream_options
    return ChatRequest(
        messages=tuple(map(normalize, given.messages)),
        options=RenderOptions(
            tools=tuple(given.tools or ()), variables={**variables, **(given.chat_template_kwargs or {})}
        ),
        max_tokens=given.max_tokens if given.max_completion_tokens is None else given.max_completion_tokens,
        stop=((given.stop,) if isinstance(given.stop, str) else tuple(given.stop)) if given.stop else None,
        stream=bool(given.stream),
        include_usage=options is not None and bool(options.include_usage),
        logprobs=bool(given.logprobs),
        ignored={name: value for name, value in body.items() if value is not None and name not in known},
    )


def normalize(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: text as one string, arguments of calls as objects, nothing that is null.

    Raises:
        ApiError: it is no message, or contains something other than text.
    """
    try:
        given = msgspec.convert(message, _Message)
    except msgspec.ValidationError as error:
        raise ApiError(
            f"a message must have a role and text, and each of its tool_calls a function with a name, got "
            f"{_shown(message)}: {error}; images and sound cannot be sent"
        ) from error
    found = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    content = given.content or ""
    found["content"] = content if isinstance(content, str) else "".join(part.text for part in content)
    if given.role == "developer":  # OpenAI's later name
        found["role"] = "system"
    if given.tool_calls:
        found["tool_calls"] = [_normalize_call(call) for call in given.tool_calls]
    return found


def _normalize_call(call: _ToolCall) -> dict[str, Any]:
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template shows what is no JSON as it is
            arguments = json.loads(arguments)
    return {"id": call.id or "", "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _shown(value: object) -> str:
    return json.dumps(value)[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """What the policy said, for the client."""

    message: Mapping[str, Any]
    """Of the role `assistant`, with `content` and perhaps `tool_calls`."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None
    """Text and log-probability of every token."""


def assistant_message(text: str, *, call_prefix: str, reads_calls: bool, stop: Sequence[str] = ()) -> dict[str, Any]:
    """The policy's text as a message. With `reads_calls`, calls as Hermes and Qwen models write them become
    `tool_calls`; one that is no JSON, or was cut off, stays text.

    Args:
        call_prefix: of the ids of calls, unique in the conversation.
        stop: texts that may have ended it; they are part of the turn, and not of what OpenAI's API returns.
    """
    calls: list[dict[str, Any]] = []
    content, position = "", 0
    for call in find_tool_calls(text) if reads_calls else ():
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": f"{call_prefix}{len(calls)}", "type": "function", "function": function})
        content, position = content + text[position : call.start], call.end
    content += text[position:]
    for one in stop:
        content = content.partition(one)[0]
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content.strip() or None, "tool_calls": calls}


def same_message(message: Mapping[str, Any], echoed: Mapping[str, Any]) -> bool:
    """Whether a client repeats what the policy said: the same text, but for white space around it, and the same
    calls. Both in the form of `normalize`."""
    return (
        echoed["role"] == "assistant"
        and message["content"].strip() == echoed["content"].strip()
        and _calls(message) == _calls(echoed)
    )


def _calls(message: Mapping[str, Any]) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]


def response_body(response: ChatResponse, *, response_id: str, created: int) -> dict[str, Any]:
    """For a request without `stream`."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **response.message},
        "finish_reason": response.finish_reason,
        "logprobs": _logprobs(response),
    }
    head = {"id": response_id, "object": "chat.completion", "created": created, "model": MODEL}
    return {**head, "choices": [choice], "usage": _usage(response)}


def events(response: ChatResponse, *, response_id: str, created: int, include_usage: bool) -> list[str]:
    """The lines of an event stream: the whole response in one piece, then why it ended."""
    head = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": MODEL}
    delta = dict(response.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _logprobs(response)}
    last = {"index": 0, "delta": {}, "finish_reason": response.finish_reason}
    chunks: list[dict[str, Any]] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(response)})
    return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def _usage(response: ChatResponse) -> dict[str, int]:
    asked, said = response.num_prompt_tokens, response.num_completion_tokens
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _logprobs(response: ChatResponse) -> dict[str, Any] | None:
    if response.logprobs is None:
        return None
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in response.logprobs
    ]
    return {"content": tokens, "refusal": None}
