"""Loads the agent of a run, and runs one episode of it."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from rollout.agent.loop import AgentLoop, Episode, SingleTurnLoop, check_episode
from rollout.errors import AgentError, PluginError
from rollout.plugins import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agent.loop import Generate
    from rollout.types import Completion, Prompt


async def play(
    loop: AgentLoop,
    prompt: Prompt,
    max_tokens: int,
    *,
    generate: Generate,
    timeout_s: float | None,
    max_sequences: int = 1,
) -> Episode:
    """One episode of `loop`, checked. `timeout_s` bounds all of it; None leaves the limit to `generate`.

    Raises:
        AgentError: the loop or its environment raised, took too long, or broke the contract; concerns this trajectory.
        Exception: what `generate` raised, whatever the loop made of it; concerns all trajectories that are generated.
    """
    watched = _Watched(generate)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            episode = await loop.run(prompt, max_tokens, watched)
        checked = check_episode(episode, prompt, max_tokens, max_sequences=max_sequences)
    except BaseException as error:
        if _is_ours(error):
            raise
        if watched.error is not None:
            raise watched.error from error
        if limit.expired():
            raise AgentError(f"the trajectory took longer than task.agent_timeout_s={timeout_s:g}") from error
        if isinstance(error, AgentError):
            raise
        raise AgentError(f"raised {type(error).__name__}: {error}{_where(error)}") from error
    if watched.error is not None:
        raise watched.error
    return checked


def _is_ours(error: BaseException) -> bool:
    """Whether it is we who are cancelled or closed. What a loop awaits may be cancelled by others, and a program that a
    policy wrote may exit: out of an event loop that would stop the whole worker."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class _Watched:
    """A `Generate` that remembers how it failed."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self.error: Exception | None = None

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> Completion:
        # An engine that gets anything but integers takes no more requests, whoever's they are.
        if not isinstance(max_tokens, Integral) or max_tokens < 1:
            allowed = f"generate() needs max_tokens >= 1 and whole, got {max_tokens}"
            raise AgentError(f"{allowed}; end the episode as truncated before")
        tokens = np.asarray(token_ids)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            allowed = f"generate() needs whole numbers in one row, got {tokens.dtype} of shape {tokens.shape}"
            raise AgentError(f"{allowed}; give it token ids")
        stops = (stop,) if isinstance(stop, str) else stop
        if stops is not None and not all(isinstance(text, str) and text for text in stops):
            raise AgentError(f"generate() needs stop strings that are not empty, got {stop!r}; give () for none")
        try:
            return await self._generate(tokens, int(max_tokens), stop=stops)
        except Exception as error:
            self.error = error
            raise


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


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
