"""OpenAI's chat completions: requests decoded, responses and events encoded.

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
"""Fields that would change how the policy samples, or that need what it cannot do, with their harmless values."""


class ApiError(Exception):
    """Refuses a request, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Stop = Annotated[str, msgspec.Meta(min_length=1)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The fields that are read. `parse_request` fills in those of the run."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    """In the form of `normalize`."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tokens: _Positive | None = None
    max_completion_tokens: _Positive | None = None
    stop: list[_Stop] | str | None = None
    """None leaves it to the run."""
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    model: Any = None
    """Any name: there is one model."""

    @property
    def options(self) -> RenderOptions:
        return RenderOptions(tools=tuple(self.tools or ()), variables=self.chat_template_kwargs or {})


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


def parse_request(body: object, variables: Mapping[str, Any]) -> ChatRequest:
    """`variables` of the chat template are those of the run; `chat_template_kwargs` of the request add to them.

    Raises:
        ApiError: it is no request, or needs something that a policy in training cannot do.
    """
    try:
        request = msgspec.convert(body, ChatRequest)
    except msgspec.ValidationError as error:
        raise ApiError(f"the request cannot be read: {error}") from error
    assert isinstance(body, dict)
    for name, allowed in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            only = json.dumps(allowed[0])
            raise ApiError(f"{name} must be {only} where a policy is trained, got {_shown(value)}; leave it out")
    request.messages = [normalize(message) for message in request.messages]
    request.chat_template_kwargs = {**variables, **(request.chat_template_kwargs or {})}
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    if request.stop is not None:
        request.stop = ([request.stop] if isinstance(request.stop, str) else request.stop) if request.stop else None
    return request


def ignored_fields(body: Mapping[str, object]) -> dict[str, object]:
    """Fields that change nothing. Sampling is among them: a policy is trained on what it samples as the run samples."""
    known = {*ChatRequest.__struct_fields__, *_NEUTRAL}
    return {name: value for name, value in body.items() if value is not None and name not in known}


def normalize(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates read it: text as one string, arguments of calls as objects, no nulls.

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


def assistant_message(text: str, *, call_prefix: str, reads_calls: bool, stop: Sequence[str] = ()) -> dict[str, Any]:
    """The policy's text as a message. With `reads_calls`, whole calls in the format of Hermes and Qwen models become
    `tool_calls`; everything else stays text.

    Args:
        call_prefix: of the ids of calls, unique in the conversation.
        stop: texts that may have ended it; OpenAI's API does not return them.
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
    """Whether a client repeats what the policy said: the same text, except for surrounding white space, and the same
    calls, except for their ids. Both in the form of `normalize`."""
    return echoed["role"] == "assistant" and _essence(message) == _essence(echoed)


def _essence(message: Mapping[str, Any]) -> tuple[str, list[Any]]:
    return message["content"].strip(), [call["function"] for call in message.get("tool_calls", ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponse:
    """One response of the policy, for the client."""

    message: Mapping[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None
    """Text and log-probability of every token."""

    def body(self, *, response_id: str, created: int) -> dict[str, Any]:
        """For a request without `stream`."""
        message = {"refusal": None, **self.message}
        choice = {
            "index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": self._logprobs(),
        }  # fmt: skip
        head = {"id": response_id, "object": "chat.completion", "created": created, "model": MODEL}
        return {**head, "choices": [choice], "usage": self._usage()}

    def events(self, *, response_id: str, created: int, include_usage: bool) -> str:
        """An event stream: the whole response in one piece, then why it ended."""
        head = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": MODEL}
        delta = dict(self.message)
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": self._logprobs()}
        last = {"index": 0, "delta": {}, "finish_reason": self.finish_reason}
        chunks: list[dict[str, Any]] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
        if include_usage:
            chunks.append({**head, "choices": [], "usage": self._usage()})
        return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def _usage(self) -> dict[str, int]:
        num_prompt, num_completion = self.num_prompt_tokens, self.num_completion_tokens
        total = num_prompt + num_completion
        return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}

    def _logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        tokens = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in self.logprobs
        ]
        return {"content": tokens, "refusal": None}
