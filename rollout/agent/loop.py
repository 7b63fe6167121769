"""How one trajectory comes about: whose turn it is, and when it ends.

A loop knows nothing of engines, seeds, deadlines or reward functions. It gets a `Generate` that continues a token
sequence, and returns a trajectory. Nothing is re-tokenized between turns. A loop may add rewards of single turns.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.types import Trajectory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.types import FinishReason, Prompt, TokenChunk, ToolUse, TrajectoryStatus, Turn

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""For the `close` of an environment."""
_STATUSES: dict[FinishReason, TrajectoryStatus] = {"stop": "completed", "length": "truncated", "abort": "failed"}


class Generate(Protocol):
    """Continues a sequence with the policy."""

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> TokenChunk:
        """Samples up to `max_tokens` tokens after `token_ids` (int32[T]). "abort" means that time ran out. `stop` texts
        end the response ("stop"), their tokens included; they replace `rollout.stop`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment replies to a turn.

    Example:
        Reply(token_ids=tokenizer.encode("wrong, try again"), reward=-0.1)
        Reply(token_ids=None, reward=1.0)  # the end, with a last reward
    """

    token_ids: np.ndarray | Sequence[int] | None
    """int32[T]: context tokens, template tokens included; None ends the trajectory."""
    reward: float = 0.0
    """For the turn that has just ended; finite."""


class Environment(Protocol):
    """The policy's counterpart in a trajectory of several turns: tools, a game, a user. One instance per trajectory.

    Optional: `close(self)`, plain or `async`, to free what it holds, such as a sandbox. It is called however the
    trajectory ends, cancelled or not, and has `CLOSE_S`. And an attribute `tool_use`, a `ToolUse` of the trajectory so
    far, for the metrics.
    """

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        """The reply to the last turn. `turns` is everything so far, the prompt included."""
        ...


class AgentLoop(Protocol):
    """Makes one trajectory out of a prompt. Optional attributes: `tools`, JSON schemas of functions, for the chat
    template of the prompts; `tool_names`, which make the run warn at its start if the prompts do not contain them."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        """One token sequence, or several; status "failed" if generation ran out of time. `max_tokens` bounds everything
        after the prompt; in a further sequence, its tokens minus the length of the prompt."""
        ...


def Episode(  # noqa: N802 - the name of the class that older loops return
    *, turns: Sequence[Turn], status: TrajectoryStatus, tool_use: ToolUse | None = None
) -> Trajectory:
    """For older loops; `TrajectoryBuilder.finish` needs no turns."""
    return Trajectory.of_turns(turns, status=status, tool_use=tool_use)


class SingleTurnLoop:
    """Prompt, one response, done."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        builder = TrajectoryBuilder(prompt.token_ids)
        response = await generate(prompt.token_ids, max_tokens)
        builder.add_generated(response)
        return builder.finish(_status(response.finish_reason))


class MultiTurnLoop:
    """Alternates responses and replies, until the environment is done or a budget is spent.

    Args:
        make_environment: builds the environment of one trajectory.
        max_turns: generated turns at most; more is truncation.
        stop: texts that end a turn; None leaves it to `rollout.stop`.
        tools, tool_names: see `AgentLoop`.
    """

    def __init__(
        self,
        make_environment: Callable[[Prompt], Environment],
        *,
        max_turns: int,
        stop: str | Sequence[str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_names: Sequence[str] = (),
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {max_turns}")
        self._make_environment, self._max_turns, self._stop = make_environment, max_turns, stop
        self.tools, self.tool_names = tools, tool_names

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        environment = self._make_environment(prompt)
        try:
            trajectory = await self._talk(environment, prompt, max_tokens, generate)
            return replace(trajectory, tool_use=getattr(environment, "tool_use", None))
        finally:
            await _close(environment, prompt)

    async def _talk(self, environment: Environment, prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        builder = TrajectoryBuilder(prompt.token_ids)
        for number in range(1, self._max_turns + 1):
            left = max_tokens - builder.num_response_tokens
            response = await generate(builder.token_ids(), left, stop=self._stop)
            builder.add_generated(response)
            if response.finish_reason != "stop":
                return builder.finish(_status(response.finish_reason))
            reply = await environment.step(builder.turns())
            builder.add_reward(reply.reward)
            if reply.token_ids is None:
                return builder.finish("completed")
            tokens = np.asarray(reply.token_ids)
            if number == self._max_turns or builder.num_response_tokens + len(tokens) >= max_tokens:
                break  # the policy will not read the reply, or there is no room for it and a token after it
            builder.add_context(tokens)
        return builder.finish("truncated")


async def _close(environment: Environment, prompt: Prompt) -> None:
    """An environment that fails to close costs no trajectory."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(CLOSE_S):
            if inspect.isawaitable(closing := close()):
                await closing
    except Exception as error:  # noqa: BLE001 - user code; logged
        log.warning("the environment of prompt %s did not close: %s: %s", prompt.prompt_id, type(error).__name__, error)


def _status(finish_reason: FinishReason | None) -> TrajectoryStatus:
    if finish_reason is None:
        raise ValueError("generate returned a chunk without a finish reason; it must return the whole response")
    return _STATUSES[finish_reason]
