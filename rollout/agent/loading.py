"""From the dotted path of the configuration to the agent loop of a worker."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from rollout.agent.loop import AgentLoop, SingleTurnLoop
from rollout.errors import PluginError
from rollout.plugins import load

if TYPE_CHECKING:
    from collections.abc import Mapping

_DO = (
    "give package.module.factory, where factory(**task.agent_args) returns an object with "
    "async def run(self, prompt, max_tokens, generate)"
)


def make_loop(
    path: str, args: Mapping[str, object], *, chat_template_kwargs: Mapping[str, object] | None = None
) -> AgentLoop:
    """The loop that the factory at `path` makes of `args`; an empty path is the single turn.

    Args:
        chat_template_kwargs: given to a factory with a parameter of this name, unless `args` has it.

    Raises:
        PluginError: there is no such factory, it cannot be called with `args` or raises, or makes something else.
    """
    if not path:
        return SingleTurnLoop()
    factory = load(path, what="agent loop")
    if not callable(factory):
        raise PluginError(f"agent loop {path!r} is a {type(factory).__name__} and cannot be called; {_DO}")
    try:
        signature = inspect.signature(factory)
        if "chat_template_kwargs" in signature.parameters:
            args = {"chat_template_kwargs": chat_template_kwargs or {}, **args}
        signature.bind(**args)
    except TypeError as error:
        raise PluginError(f"agent loop {path!r} cannot be called with task.agent_args={dict(args)}: {error}") from error
    except ValueError:
        pass  # some compiled callables do not tell their signature; the call will
    try:
        loop = factory(**args)
    except Exception as error:
        raise PluginError(f"agent loop {path!r} raised {type(error).__name__}: {error}") from error
    _check_run(loop, path)
    return cast("AgentLoop", loop)


def _check_run(loop: object, path: str) -> None:
    run = getattr(loop, "run", None)
    if not inspect.iscoroutinefunction(run):
        kind = "no method run" if run is None else "a run that is no async method"
        raise PluginError(f"agent loop {path!r} returned a {type(loop).__name__}, which has {kind}; {_DO}")
    try:
        inspect.signature(run).bind(None, None, None)
    except TypeError as error:
        raise PluginError(f"agent loop {path!r}: its run cannot be called as a loop: {error}; {_DO}") from error
