"""An agent that calls tools: the policy writes a call, a Python function runs it, and the policy continues.

A turn ends with its first call (`rendering.ToolCall`); a turn without one ends the trajectory. Of what follows a
generated turn only the text that the chat template adds is rendered and tokenized.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rollout.agent.loop import MultiTurnLoop, Reply
from rollout.agent.threads import AllThreadsHang, UserThreads
from rollout.plugins import load
from rollout.rendering import (
    CALL_END,
    ChatTemplateRenderer,
    RenderOptions,
    ToolCall,
    ToolCallError,
    arguments_of,
    last_tool_call,
    load_tokenizer,
    schema_of,
    variables_of,
)
from rollout.types import ToolUse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.agent.loop import AgentLoop
    from rollout.types import Turn


class ToolError(Exception):
    """A call without a result; the policy reads why."""


def tool_agent(
    *,
    tokenizer: str,
    tools: Sequence[str],
    max_turns: int = 8,
    tool_timeout_s: float = 30.0,
    max_result_chars: int = 4000,
    tools_in_prompt: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> AgentLoop:
    """The factory for `task.agent`.

    Args:
        tokenizer: directory or hub name, with a chat template that knows the role `tool`.
        tools: dotted paths of functions. The policy calls them by their last name, with keyword arguments; their
            results are shown as text. A plain function runs in a thread, so it may block.
        max_turns: of the policy.
        tool_timeout_s: of one call. A thread cannot be killed: a function that may hang should bound its own time.
        max_result_chars: of one result; a longer one is cut, with a note to the policy.
        tools_in_prompt: have the chat template show the tools in the prompts, if it reads `tools`; each needs
            annotations and a docstring that describes it and its arguments. The run warns at its start if the prompts
            do not name them.
        chat_template_kwargs: further arguments of the chat template; `task.chat_template_kwargs` unless given.
        trust_remote_code: run Python code that comes with the tokenizer.

    Raises:
        PluginError: a tool does not import.
        ValueError: a tool is no function, two have the same name, or the chat template cannot show a result, or shows
            tools and one cannot be described.
    """
    functions: dict[str, Any] = {path.rpartition(".")[2]: load(path, what="tool") for path in tools}
    if len(functions) < len(tools) or not all(map(callable, functions.values())):
        raise ValueError(f"tools must be paths of functions with distinct names, got {list(tools)}")
    box = Toolbox(functions, timeout_s=tool_timeout_s, max_result_chars=max_result_chars)
    loaded = load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    shown = _shown(loaded, functions) if tools_in_prompt else []
    options = RenderOptions(variables=arguments_of(shown, chat_template_kwargs or {}))
    template = ChatTemplateRenderer(loaded)
    if "a result" not in template.suffix(_message("a result"), options):
        raise ValueError("the chat template does not show what a tool returned; use one that knows the role `tool`")
    return MultiTurnLoop(
        lambda _: _ToolUser(box, template, options),
        max_turns=max_turns,
        stop=CALL_END,
        tools=shown,
        tool_names=tuple(functions) if tools_in_prompt else (),
    )


def _shown(tokenizer: Any, functions: Mapping[str, Callable[..., object]]) -> list[dict[str, Any]]:
    """Schemas for a chat template that shows tools; none for one that does not, or is not known to."""
    if "tools" not in (variables_of(tokenizer, with_tools=True) or ()):
        return []
    try:
        return [schema_of(name, function) for name, function in functions.items()]
    except ValueError as error:
        raise ValueError(
            f"the chat template shows tools, and one cannot be described to it: {error}; give it annotations and a "
            "docstring with a line per argument under `Args:`, or describe the tools yourself and set "
            "tools_in_prompt=false"
        ) from error


def _message(result: str) -> list[Mapping[str, Any]]:
    return [{"role": "tool", "content": result}]


class Toolbox:
    """Functions by name, each with a time limit."""

    def __init__(
        self, functions: Mapping[str, Callable[..., object]], *, timeout_s: float, max_result_chars: int
    ) -> None:
        self._functions, self._timeout_s, self._max_result_chars = functions, timeout_s, max_result_chars
        self._threads = UserThreads("tool")

    async def reply(self, text: str) -> tuple[str, bool] | None:
        """The policy's input after a turn, and whether that is an error; None if the turn has no call."""
        try:
            call = last_tool_call(text)
            return None if call is None else (self._cut(await self._run(call)), False)
        except (ToolError, ToolCallError) as error:
            return self._cut(f"error: {error}"), True

    async def _run(self, call: ToolCall) -> str:
        function = self._functions.get(call.name)
        if function is None:
            raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(self._functions)}")
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return str(await self._threads.call(function, **call.arguments))
        except AllThreadsHang as error:
            raise ToolError(str(error)) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever it raises is for the policy to read
            if limit.expired():
                raise ToolError(f"{call.name} took longer than {self._timeout_s:g} s") from error
            raise ToolError(f"{call.name} raised {type(error).__name__}: {error}") from error

    def _cut(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair is no text
        limit = self._max_result_chars
        return text if len(text) <= limit else f"{text[:limit]}... ({len(text) - limit} more characters)"


class _ToolUser:
    """The environment of one trajectory."""

    def __init__(self, box: Toolbox, template: ChatTemplateRenderer, options: RenderOptions) -> None:
        self._box, self._template, self._options = box, template, options
        self.tool_use = ToolUse()

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        generated = turns[-1].token_ids[turns[-1].is_generated].tolist()
        reply = await self._box.reply(self._template.text(generated))
        if reply is None:
            return Reply(token_ids=None)
        text, is_error = reply
        used = self.tool_use
        self.tool_use = ToolUse(num_calls=used.num_calls + 1, num_errors=used.num_errors + is_error)
        return Reply(token_ids=self._template.render_next_turn(generated, _message(text), self._options))
