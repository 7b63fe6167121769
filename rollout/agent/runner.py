"""Loads the agent loop of a run, runs one trajectory of it, and checks its contract."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np

from rollout.agent.loop import AgentLoop, SingleTurnLoop
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError, PluginError
from rollout.plugins import load_plugin, mismatch
from rollout.types import ToolUse, Trajectory, TrajectoryStatus, Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rollout.agent.loop import Generate
    from rollout.types import Prompt, TokenChunk


FailedAs = Literal["timeout", "agent_error"]


class EpisodeFailed(AgentError):
    """A loop finished no trajectory. `so_far`: what the policy had sampled; None if nothing, or no valid trajectory."""

    def __init__(self, kind: FailedAs, message: str, so_far: Trajectory | None) -> None:
        super().__init__(message)
        self.kind: FailedAs = kind
        self.so_far = so_far


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
        EpisodeFailed: the loop or its environment raised, took too long, or broke the contract: this trajectory alone.
        Exception: what `generate` raised, whatever the loop did with it: concerns all running trajectories.
    """
    tracked = _TrackedGenerate(generate, prompt)
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
        so_far = tracked.so_far(prompt, max_tokens, max_sequences=max_sequences)
        if limit.expired():
            text = f"the trajectory took longer than task.agent_timeout_s={timeout_s:g}"
            raise EpisodeFailed("timeout", text, so_far) from error
        text = str(error) if isinstance(error, AgentError) else f"raised {type(error).__name__}: {error}{_where(error)}"
        raise EpisodeFailed("agent_error", text, so_far) from error
    if tracked.error is not None:
        raise tracked.error
    return checked


def _is_ours(error: BaseException) -> bool:
    """Whether this task is cancelled or closed. Others may cancel what a loop awaits, and code of the policy may
    exit, which must not stop the whole worker."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit)


class _TrackedGenerate:
    """A `Generate` that remembers what it generated, and how it failed."""

    def __init__(self, generate: Generate, prompt: Prompt) -> None:
        self._generate = generate
        self._builder = TrajectoryBuilder(prompt.token_ids)
        self.error: Exception | None = None

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        # An engine that gets anything but integers takes no more requests, from any trajectory.
        tokens = np.asarray(token_ids)
        stops = (stop,) if isinstance(stop, str) else stop
        wrong = None
        if not isinstance(max_tokens, Integral) or max_tokens < 1:
            wrong = f"max_tokens >= 1 and whole, got {max_tokens}; end the trajectory as truncated before"
        elif tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            wrong = f"a list of token ids, got {tokens.dtype} of shape {tokens.shape}"
        elif stops is not None and not all(isinstance(text, str) and text for text in stops):
            wrong = f"stop strings that are not empty, got {stop!r}; give () for none"
        if wrong is not None:
            raise AgentError(f"generate() needs {wrong}")
        try:
            chunk = await self._generate(tokens, int(max_tokens), stop=stops)
        except Exception as error:
            self.error = error
            raise
        known = self._builder.token_ids()
        if np.array_equal(tokens[: len(known)], known):
            self._builder.add_context(tokens[len(known) :])
        else:
            self._builder.start_sequence(tokens)
        self._builder.add_generated(chunk)
        return chunk

    def so_far(self, prompt: Prompt, max_tokens: int, *, max_sequences: int) -> Trajectory | None:
        """Everything generated; None if that is nothing, or breaks the contract."""
        made = self._builder.finish("truncated")
        with contextlib.suppress(AgentError):
            if made.loss_mask.any():
                return check_trajectory(made, prompt, max_tokens, max_sequences=max_sequences)
        return None


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def check_trajectory(result: object, prompt: Prompt, max_tokens: int, *, max_sequences: int = 1) -> Trajectory:
    """The trajectory, without trailing context of a sequence, which no engine has seen.

    Args:
        max_tokens: of every sequence, on top of the number of tokens of the prompt.
        max_sequences: with generated tokens.

    Raises:
        AgentError: the loop broke its contract.
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
            "no more; raise it, or rewrite less history: a client that removes thoughts from earlier messages starts a "
            "sequence in every turn"
        )
    return _without_unread_context(result)


def _check_sequence(result: Trajectory, sequence: slice, prompt: Prompt, max_tokens: int) -> None:
    tokens, loss_mask = result.token_ids[sequence], result.loss_mask[sequence]
    num_prompt = len(prompt.token_ids)
    if sequence.start in result.sequence_starts:
        if not len(tokens) or loss_mask[0]:
            raise AgentError("another sequence must begin with context; give start_sequence() its tokens")
    elif not np.array_equal(tokens[:num_prompt], prompt.token_ids) or loss_mask[:num_prompt].any():
        raise AgentError("the turns must begin with the prompt's tokens as context; start TrajectoryBuilder with them")
    if len(tokens) - num_prompt > max_tokens:
        raise AgentError(
            f"the turns have {len(tokens) - num_prompt} tokens after the prompt, at most max_tokens={max_tokens} are "
            "allowed; end the trajectory as truncated before"
        )


def _without_unread_context(trajectory: Trajectory) -> Trajectory:
    """Without turns that no generated token of their sequence follows. If nothing was generated, the first sequence
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
    path: str,
    args: Mapping[str, object],
    *,
    chat_template_kwargs: Mapping[str, object] | None = None,
    rollout_stop: Sequence[str] = (),
) -> AgentLoop:
    """The loop that the factory at `path` (`package.module.name` or `path/to/file.py:name`) makes of `args`; an empty
    path is the single turn. A factory with a parameter `chat_template_kwargs` or `rollout_stop` gets that too, unless
    `args` has it.

    Raises:
        PluginError: there is no such factory, it cannot be called with `args` or raises, or makes something else.
    """
    if not path:
        return SingleTurnLoop()
    factory = load_plugin(path, what="agent loop")
    of_the_run = {"chat_template_kwargs": chat_template_kwargs or {}, "rollout_stop": rollout_stop}
    parameters: Iterable[str] = ()
    with contextlib.suppress(TypeError, ValueError):  # it has no signature
        parameters = inspect.signature(factory).parameters  # type: ignore[arg-type]
    full = {name: value for name, value in of_the_run.items() if name in parameters} | dict(args)
    if reason := mismatch(factory, **full):
        raise PluginError(f"agent loop {path!r} cannot be called with task.agent_args={dict(args)}: {reason}; {_DO}")
    try:
        loop = cast("Callable[..., object]", factory)(**full)
    except Exception as error:
        raise PluginError(f"agent loop {path!r} raised {type(error).__name__}: {error}") from error
    run = getattr(loop, "run", None)
    if not inspect.iscoroutinefunction(run):
        kind = "no method run" if run is None else "a run that is not an async method"
        raise PluginError(f"agent loop {path!r} returned a {type(loop).__name__}, which has {kind}; {_DO}")
    if reason := mismatch(run, None, None, None):
        raise PluginError(f"agent loop {path!r}: its run cannot be called as a loop: {reason}; {_DO}")
    return cast("AgentLoop", loop)
