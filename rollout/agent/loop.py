"""How one trajectory comes about: who speaks when, and when it is over.

A loop knows nothing of replicas, seeds, deadlines or rewards. It gets a `Generate` that continues a token sequence, and
returns the turns. Token-in, token-out: nothing is re-tokenised between turns. The reward of the outcome comes later,
from the reward function; a loop may add rewards of single turns.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, get_args

import numpy as np

from rollout.agent.trajectory_builder import TokenLedger
from rollout.errors import AgentError
from rollout.types import ToolUse, TrajectoryStatus, split_sequences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rollout.types import Completion, FinishReason, Prompt, Turn


log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""For the `close` of an environment."""


class Generate(Protocol):
    """Continues a sequence with the policy."""

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int, *, stop: str | Sequence[str] | None = None
    ) -> Completion:
        """Samples up to `max_tokens` tokens after `token_ids` (int32[T]). "abort" means that time ran out.

        Args:
            stop: texts that end the answer, their tokens included ("stop"); they take the place of `rollout.stop`.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What an environment answers to a turn.

    Example:
        Reply(token_ids=tokenizer.encode("wrong, try again"), reward=-0.1)
        Reply(token_ids=None, reward=1.0)  # the end, with a last reward
    """

    token_ids: np.ndarray | Sequence[int] | None
    """int32[T]: context tokens, template tokens included; None ends the episode."""
    reward: float = 0.0
    """For the turn that has just ended; finite."""


class Environment(Protocol):
    """What the policy talks to in a trajectory of several turns: tools, a game, a user. One instance per trajectory.

    One that holds something, such as a sandbox, has a `close(self)` too, plain or `async`: it is called at the end,
    however the trajectory ends, cancelled or not, and has `CLOSE_S`. One that calls tools for the policy may have an
    attribute `tool_use`, a `ToolUse` of the trajectory so far, which metrics are made of.
    """

    async def step(self, turns: tuple[Turn, ...]) -> Reply:
        """The reply to the last turn. `turns` is everything so far, the prompt included."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a loop made of a prompt: one token sequence, or several where turns begin anew.

    `status` is "failed" if generation ran out of time.
    """

    turns: tuple[Turn, ...]
    status: TrajectoryStatus
    tool_use: ToolUse | None = None
    """None if the loop counts no calls of tools."""


class AgentLoop(Protocol):
    """Makes one trajectory out of a prompt. One with an attribute `tools`, JSON schemas of functions, has them shown by
    the chat template of the prompts. One with an attribute `tool_names` has the run warn at its start where prompts do
    not name them."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        """`max_tokens` bounds everything after the prompt; of a sequence that begins anew, its tokens less the length
        of the prompt."""
        ...


class SingleTurnLoop:
    """Prompt, one answer, done."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        ledger = TokenLedger(prompt.token_ids)
        completion = await generate(prompt.token_ids, max_tokens)
        ledger.add_generated(completion)
        return Episode(turns=ledger.turns(), status=_status(completion.finish_reason))


class MultiTurnLoop:
    """Answer and reply in turn, until the environment is done or a budget is spent.

    Args:
        make_environment: builds the environment of one trajectory.
        max_turns: generated turns at most; more is truncation.
        stop: texts that end a turn; None leaves it to `rollout.stop`.
        tools: JSON schemas of functions, for the chat template of the prompts.
        tool_names: of tools that the prompts should name.
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
        self._make_environment = make_environment
        self._max_turns = max_turns
        self._stop = stop
        self.tools, self.tool_names = tools, tool_names

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        environment = self._make_environment(prompt)
        try:
            episode = await self._talk(environment, prompt, max_tokens, generate)
            return replace(episode, tool_use=getattr(environment, "tool_use", None))
        finally:
            await _close(environment, prompt)

    async def _talk(self, environment: Environment, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        ledger = TokenLedger(prompt.token_ids)
        for number in range(1, self._max_turns + 1):
            left = max_tokens - ledger.num_response_tokens
            completion = await generate(ledger.token_ids(), left, stop=self._stop)
            ledger.add_generated(completion)
            if completion.finish_reason != "stop":
                return Episode(turns=ledger.turns(), status=_status(completion.finish_reason))
            reply = await environment.step(ledger.turns())
            ledger.add_reward(reply.reward)
            if reply.token_ids is None:
                return Episode(turns=ledger.turns(), status="completed")
            tokens = np.asarray(reply.token_ids)
            if number == self._max_turns or ledger.num_response_tokens + len(tokens) >= max_tokens:
                break  # nobody is to read the reply, or there is no room for it and a token after it
            ledger.add_context(tokens)
        return Episode(turns=ledger.turns(), status="truncated")


async def _close(environment: Environment, prompt: Prompt) -> None:
    """What an environment raises, or does not get done in time, costs no trajectory."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        async with asyncio.timeout(CLOSE_S):
            if inspect.isawaitable(closing := close()):
                await closing
    except Exception as error:  # noqa: BLE001 - it is a user's, and is told
        log.warning("the environment of prompt %s did not close: %s: %s", prompt.prompt_id, type(error).__name__, error)


def check_episode(episode: object, prompt: Prompt, max_tokens: int, *, max_sequences: int = 1) -> Episode:
    """The episode, if a loop kept its contract; without context that nothing was generated after in its sequence, which
    no engine has seen and nothing is trained on.

    Args:
        max_tokens: of every sequence, after as many tokens as the prompt has.
        max_sequences: that have generated tokens.

    Raises:
        AgentError: what is wrong, and what to do.
    """
    if not isinstance(episode, Episode):
        raise AgentError(f"run() returned a {type(episode).__name__}; return an Episode")
    if episode.status not in get_args(TrajectoryStatus):
        allowed = ", ".join(get_args(TrajectoryStatus))
        raise AgentError(f"the status of an episode must be one of {allowed}, got {episode.status!r}")
    if not isinstance(episode.tool_use, ToolUse | None):
        raise AgentError(f"tool_use must be a ToolUse or None, got {episode.tool_use!r}")
    sequences = split_sequences(episode.turns)
    for turns in sequences:
        _check_sequence(turns, prompt, max_tokens)
    if not all(np.isfinite(turn.logprobs[turn.is_generated]).all() for turn in episode.turns):
        raise AgentError("a generated token has no finite log-probability; add what generate() returned as it is")
    used = [cut for turns in sequences if (cut := _up_to_the_last_token(turns))]
    if len(used) > max_sequences:
        raise AgentError(
            f"the trajectory consists of {len(used)} token sequences, task.agent_max_sequences={max_sequences} allows "
            "no more; raise it, or rewrite less of what was said"
        )
    return replace(episode, turns=tuple(chain.from_iterable(used)) or sequences[0])


def _check_sequence(turns: tuple[Turn, ...], prompt: Prompt, max_tokens: int) -> None:
    tokens = np.concatenate([np.empty(0, np.int32), *(turn.token_ids for turn in turns)])
    num_prompt = len(prompt.token_ids)
    if turns and turns[0].begins_anew:
        if not len(tokens) or np.concatenate([turn.is_generated for turn in turns])[0]:
            raise AgentError("a sequence that begins anew must begin with context; give begin_anew() its tokens")
    elif not np.array_equal(tokens[:num_prompt], prompt.token_ids) or any(
        turn.is_generated[: max(num_prompt - start, 0)].any() for start, turn in _starts(turns)
    ):
        raise AgentError("the turns must begin with the prompt's tokens as context; begin a TokenLedger with them")
    if len(tokens) - num_prompt > max_tokens:
        raise AgentError(
            f"the turns hold {len(tokens) - num_prompt} tokens after the prompt, at most max_tokens={max_tokens} are "
            "allowed; end the episode as truncated before"
        )


def _up_to_the_last_token(turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns up to the last one that has a generated token; none if no turn has one."""
    return turns[: max((n for n, turn in enumerate(turns, start=1) if turn.is_generated.any()), default=0)]


def _starts(turns: tuple[Turn, ...]) -> Iterator[tuple[int, Turn]]:
    """Every turn with the index of its first token."""
    start = 0
    for turn in turns:
        yield start, turn
        start += len(turn.token_ids)


def _status(finish_reason: FinishReason | None) -> TrajectoryStatus:
    match finish_reason:
        case "stop":
            return "completed"
        case "length":
            return "truncated"
        case "abort":
            return "failed"
        case None:
            raise ValueError("generate returned a completion without a finish reason; it must return the whole answer")
