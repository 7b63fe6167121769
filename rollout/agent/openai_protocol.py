"""OpenAI's chat completions: requests read, responses and events written.

Source: the OpenAI API reference, "Create chat completion", with what vLLM adds (`chat_template_kwargs`).
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollout.rendering import RenderOptions, find_tool_calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


MODEL = "policy"
_READ = (
    "messages", "tools", "chat_template_kwargs", "max_tokens", "max_completion_tokens", "stop", "stream",
    "stream_options", "logprobs", "model",
)  # fmt: skip
"""What a request may say. Its model may have any name, as there is one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    messages: tuple[Mapping[str, Any], ...]
    """In the form of `normal`."""
    options: RenderOptions
    max_tokens: int | None
    stop: tuple[str, ...] | None
    """None is what the run says."""
    stream: bool
    include_usage: bool
    logprobs: bool
    ignored: Mapping[str, object]
    """What it says beside that. Sampling is among it: a policy is trained on what it samples as the run samples."""


def parse_request(body: object, variables: Mapping[str, Any]) -> ChatRequest:
    """
    Args:
        variables: of the chat template, which `chat_template_kwargs` of the request adds to.

    Raises:
        ApiError: it is none, or asks for what a policy in training cannot do.
    """
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message")
    for name, allowed in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            said = " or ".join(json.dumps(one) for one in allowed)
            raise ApiError(f"{name} must be {said} where a policy is trained, got {_shown(value)}; leave it out")
    stream_options = body.get("stream_options") or {}
    return ChatRequest(
        messages=tuple(normal(message) for message in messages),
        options=RenderOptions(tools=_tools(body.get("tools")), variables={**variables, **_own_variables(body)}),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        stream=body.get("stream") is True,
        include_usage=isinstance(stream_options, dict) and stream_options.get("include_usage") is True,
        logprobs=body.get("logprobs") is True,
        ignored={
            name: value
            for name, value in body.items()
            if value is not None and name not in _READ and name not in _NEUTRAL
        },
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    found = body.get("max_tokens") if body.get("max_completion_tokens") is None else body["max_completion_tokens"]
    if found is not None and (isinstance(found, bool) or not isinstance(found, int) or found < 1):
        raise ApiError(f"max_tokens must be a whole number >= 1, got {_shown(found)}")
    return found


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ApiError(f"tools must be a list of objects, got {_shown(value)}")
    return tuple(value)


def normal(message: object) -> dict[str, Any]:
    """A message as chat templates read it: text as one string, arguments of calls as objects, nothing that is null.

    Raises:
        ApiError: it is no message, or holds something else than text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ApiError(f"a message must be an object with a role, got {_shown(message)}")
    found = {name: value for name, value in message.items() if value is not None and name != "content"}
    found["content"] = _text(message.get("content"))
    if found["role"] == "developer":  # OpenAI's later name
        found["role"] = "system"
    if calls := found.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise ApiError(f"tool_calls must be a list, got {_shown(calls)}")
        found["tool_calls"] = [_normal_call(call) for call in calls]
    return found


def _normal_call(call: object) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **function}, **rest}:
            arguments = function.get("arguments") or {}
        case _:
            raise ApiError(f"a tool call must name a function, got {_shown(call)}")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # the template shows what is no JSON as it is
            arguments = json.loads(arguments)
    return {"id": rest.get("id", ""), "type": "function", "function": {"name": name, "arguments": arguments}}


def _text(content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case [*parts] if all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return "".join(str(part.get("text", "")) for part in parts)
    raise ApiError(f"content must be text, got {_shown(content)}; images and sound cannot be sent")


def _stop(value: object) -> tuple[str, ...] | None:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        return None
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise ApiError(f"stop must be a text or a list of texts, got {_shown(value)}")
    return tuple(texts)


def _own_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    found = body.get("chat_template_kwargs") or {}
    if not isinstance(found, dict):
        raise ApiError(f"chat_template_kwargs must be an object, got {_shown(found)}")
    return found


def _shown(value: object) -> str:
    return json.dumps(value)[:200]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the policy said, for the client."""

    message: Mapping[str, Any]
    """Of the role `assistant`, with `content` and perhaps `tool_calls`."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    num_prompt_tokens: int
    num_completion_tokens: int
    logprobs: Sequence[tuple[str, float]] | None
    """Text and log-probability of every token."""


def assistant_message(text: str, *, call_prefix: str, reads_calls: bool) -> dict[str, Any]:
    """The policy's text as a message. With `reads_calls`, calls as Hermes and Qwen models write them become
    `tool_calls`; one that is no JSON, or was cut off, stays text.

    Args:
        call_prefix: of the ids of calls, unique in the conversation.
    """
    calls: list[dict[str, Any]] = []
    content, position = "", 0
    for call in find_tool_calls(text) if reads_calls else ():
        function = {"name": call.name, "arguments": json.dumps(call.arguments)}
        calls.append({"id": f"{call_prefix}{len(calls)}", "type": "function", "function": function})
        content, position = content + text[position : call.start], call.end
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": (content + text[position:]).strip() or None, "tool_calls": calls}


def says_the_same(message: Mapping[str, Any], echoed: Mapping[str, Any]) -> bool:
    """Whether a client repeats what the policy said: the same text, but for white space around it, and the same
    calls. Both in the form of `normal`."""
    return (
        echoed["role"] == "assistant"
        and message["content"].strip() == echoed["content"].strip()
        and _calls(message) == _calls(echoed)
    )


def _calls(message: Mapping[str, Any]) -> list[Any]:
    return [call["function"] for call in message.get("tool_calls", ())]


def response(answer: Answer, *, response_id: str, created: int) -> dict[str, Any]:
    """The body of the answer to a request without `stream`."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **answer.message},
        "finish_reason": answer.finish_reason,
        "logprobs": _logprobs(answer),
    }
    head = {"id": response_id, "object": "chat.completion", "created": created, "model": MODEL}
    return {**head, "choices": [choice], "usage": _usage(answer)}


def events(answer: Answer, *, response_id: str, created: int, include_usage: bool) -> list[str]:
    """The lines of an event stream: the whole answer in one piece, then why it ended."""
    head = {"id": response_id, "object": "chat.completion.chunk", "created": created, "model": MODEL}
    delta = dict(answer.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _logprobs(answer)}
    last = {"index": 0, "delta": {}, "finish_reason": answer.finish_reason}
    chunks: list[dict[str, Any]] = [{**head, "choices": [first]}, {**head, "choices": [last]}]
    if include_usage:
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]


def _usage(answer: Answer) -> dict[str, int]:
    asked, said = answer.num_prompt_tokens, answer.num_completion_tokens
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    tokens = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in answer.logprobs
    ]
    return {"content": tokens, "refusal": None}
