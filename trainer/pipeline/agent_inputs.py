"""What the agent of a run asks of its prompts, and whether they give it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rollout.agent.loading import make_loop
from rollout.errors import PluginError
from trainer.config.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agent.loop import AgentLoop
    from rollout.types import Prompt
    from trainer.config.schema import RunConfig


def check_agent(cfg: RunConfig) -> AgentLoop:
    """Make the agent loop once.

    Raises:
        ConfigurationError: its path does not lead to a factory, or the factory does not make a loop of its arguments.
    """
    try:
        return make_loop(cfg.task.agent, cfg.task.agent_args, chat_template_kwargs=cfg.task.chat_template_kwargs)
    except PluginError as error:
        raise ConfigurationError([Problem(key="task.agent", got=cfg.task.agent, allowed=str(error))]) from error


def shown_tools(agent: AgentLoop | None) -> Sequence[Mapping[str, Any]]:
    """JSON schemas of the functions that the chat template shows to the policy."""
    return getattr(agent, "tools", ())


def unnamed_tools(agent: AgentLoop | None, prompts: Sequence[Prompt]) -> str:
    """A warning of the tools that the policy should know and most of the training prompts do not name; empty if there
    are none.

    A few prompts may have a tool's name in their text by chance, as a problem about a calculator does.
    """
    unnamed: list[str] = []
    for name in getattr(agent, "tool_names", ()):
        whole_word = re.compile(rf"\b{re.escape(name)}\b")
        number = sum(whole_word.search(prompt.text) is not None for prompt in prompts)
        if 2 * number < len(prompts):
            unnamed.append(f"{name} (in {number} of {len(prompts)})")
    if not unnamed:
        return ""
    why = "is given the tools and does not show them" if shown_tools(agent) else "shows no tools"
    return (
        f"the chat template {why}, and the training prompts do not name {', '.join(unnamed)}: the policy cannot know "
        "what it may call. Use a model whose chat template reads `tools`, or describe the tools, and how they are "
        "called, in task.system_prompt; if the policy knows them already, set tools_in_prompt=false among "
        "task.agent_args"
    )
