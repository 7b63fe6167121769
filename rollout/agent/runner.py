"""Loads the agent of a run, runs one trajectory of it, and checks that it kept its contract."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from rollout.agent.loop import AgentLoop, SingleTurnLoop
from rollout.errors import AgentError, PluginError
from rollout.plugins import load
from rollout.types import ToolUse, Trajectory, TrajectoryStatus, Turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.agent.loop import Generate
    from rollout.types import Prompt, TokenChunk


async def run_episode(
    loop: AgentLoop,
    prompt: Prompt,
    max_tokens: int,
    *,
    generate: Generate,
    timeout_s: float | None,
    max_sequences: int = 1,
) -> Trajectory:
    """One trajectory of `loop`, checked. `timeout_s` bounds all of it; None leaves the limit to `generate`.

    Raises:
        AgentError: the loop or its environment raised, took too long, or broke the contract; concerns this trajectory.
        Exception: what `generate` raised, whatever the loop made of it; concerns all trajectories that are generated.
    """
    tracked = _TrackedGenerate(generate)
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            trajectory = await loop.run(prompt, max_tokens, tracked)
        checked = check_trajectory(trajectory, prompt, max_tokens, max_sequences=max_sequences)
    except BaseException as error:
        if _is_ours(error):
            raise
        if tracked.error is not None:
            raise tracked.error from error
        if limit.expired():
            raise AgentError(f"the trajectory took longer than task.agent_timeout_s={timeout_s:g}") from error
        if isinstance(error, AgentError):
            raise
        raise AgentError(f"raised {type(error).__name__}: {error}{_where(error)}") from error
    if tracked.error is not None:
        raise tracked.error
    return checked


def _is_ours(error: BaseException) -> bool:
    """Whether it is we who are cancelled or closed. What a loop awaits may be cancelled by others, and a program that a
    policy wrote may exit: out of an event loop that would stop the whole worker."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class _TrackedGenerate:
    """A `Generate` that remembers how it failed."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self.error: Exception | None = None

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        # An engine that gets anything but integers takes no more requests, whoever's they are.
        if not isinstance(max_tokens, Integral) or max_tokens < 1:
            allowed = f"generate() needs max_tokens >= 1 and whole, got {max_tokens}"
            raise AgentError(f"{allowed}; end the trajectory as truncated before")
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


def check_trajectory(result: object, prompt: Prompt, max_tokens: int, *, max_sequences: int = 1) -> Trajectory:
    """The trajectory, if a loop kept its contract; without context that nothing was generated after in its sequence,
    which no engine has seen and nothing is trained on.

    Args:
        max_tokens: of every sequence, after as many tokens as the prompt has.
        max_sequences: that have generated tokens.

    Raises:
        AgentError: what is wrong, and what to do.
    """
    if not isinstance(result, Trajectory):
        raise AgentError(f"run() returned a {type(result).__name__}; return what TrajectoryBuilder.finish() gives")
    if result.status not in get_args(TrajectoryStatus):
        allowed = ", ".join(get_args(TrajectoryStatus))
        raise AgentError(f"the status of a trajectory must be one of {allowed}, got {result.status!r}")
    if not isinstance(result.tool_use, ToolUse | None):
        raise AgentError(f"tool_use must be a ToolUse or None, got {result.tool_use!r}")
    for sequence in result.sequences():
        _check_sequence(result, sequence, prompt, max_tokens)
    if not np.isfinite(result.logprobs[result.loss_mask]).all():
        raise AgentError("a generated token has no finite log-probability; add what generate() returned as it is")
    num_used = sum(bool(result.loss_mask[sequence].any()) for sequence in result.sequences())
    if num_used > max_sequences:
        raise AgentError(
            f"the trajectory consists of {num_used} token sequences, task.agent_max_sequences={max_sequences} allows "
            "no more; raise it, or rewrite less of what was said"
        )
    return _without_unread_context(result)


def _check_sequence(result: Trajectory, sequence: slice, prompt: Prompt, max_tokens: int) -> None:
    tokens, loss_mask = result.token_ids[sequence], result.loss_mask[sequence]
    num_prompt = len(prompt.token_ids)
    if sequence.start in result.sequence_starts:
        if not len(tokens) or loss_mask[0]:
            raise AgentError("a sequence that begins anew must begin with context; give start_sequence() its tokens")
    elif not np.array_equal(tokens[:num_prompt], prompt.token_ids) or loss_mask[:num_prompt].any():
        raise AgentError(
            "the turns must begin with the prompt's tokens as context; begin a TrajectoryBuilder with them"
        )
    if len(tokens) - num_prompt > max_tokens:
        raise AgentError(
            f"the turns hold {len(tokens) - num_prompt} tokens after the prompt, at most max_tokens={max_tokens} are "
            "allowed; end the trajectory as truncated before"
        )


def _without_unread_context(trajectory: Trajectory) -> Trajectory:
    """Without turns that no generated token of their sequence follows; of no generated token at all, the first sequence
    stays."""
    turns, kept, is_read = trajectory.turns(), list[Turn](), False
    for turn in reversed(turns):
        is_read = is_read or bool(turn.is_generated.any())
        if is_read:
            kept.insert(0, turn)
        is_read = is_read and not turn.begins_anew
    if len(kept) == len(turns):
        return trajectory
    if not kept:
        first = trajectory.sequences()[0]
        kept = [turn for turn, end in zip(turns, trajectory.turn_ends, strict=True) if end <= first.stop]
    return Trajectory.of_turns(kept, status=trajectory.status, tool_use=trajectory.tool_use)


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
