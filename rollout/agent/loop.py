"""How one trajectory comes about: who speaks when, and when it is over.

A loop knows nothing of replicas, seeds, deadlines or rewards. It gets a `Generate` that continues a token sequence, and
returns the turns. Token-in, token-out: nothing is re-tokenised between turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rollout.agent.ledger import TokenLedger

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from rollout.types import Completion, FinishReason, Prompt, TrajectoryStatus, Turn


class Generate(Protocol):
    """Continues a sequence with the policy."""

    async def __call__(self, token_ids: np.ndarray, max_tokens: int) -> Completion:
        """Samples up to `max_tokens` tokens after `token_ids` (int32[T]). "abort" means that time ran out."""
        ...


class Environment(Protocol):
    """What the policy talks to in a trajectory of several turns: tools, a game, a user. One instance per trajectory."""

    async def step(self, turns: tuple[Turn, ...]) -> np.ndarray | None:
        """The reply to the last turn as context tokens (int32[T], template tokens included); None ends the episode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What a loop made of a prompt. `status` is "failed" if generation ran out of time."""

    turns: tuple[Turn, ...]
    status: TrajectoryStatus


class AgentLoop(Protocol):
    """Makes one trajectory out of a prompt."""

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        """`max_tokens` bounds everything after the prompt."""
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
    """

    def __init__(self, make_environment: Callable[[Prompt], Environment], *, max_turns: int) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be >= 1, got {max_turns}")
        self._make_environment = make_environment
        self._max_turns = max_turns

    async def run(self, prompt: Prompt, max_tokens: int, generate: Generate) -> Episode:
        environment = self._make_environment(prompt)
        ledger = TokenLedger(prompt.token_ids)
        for _ in range(self._max_turns):
            completion = await generate(ledger.token_ids(), max_tokens - ledger.num_response_tokens)
            ledger.add_generated(completion)
            if completion.finish_reason != "stop":
                return Episode(turns=ledger.turns(), status=_status(completion.finish_reason))
            reply = await environment.step(ledger.turns())
            if reply is None:
                return Episode(turns=ledger.turns(), status="completed")
            if ledger.num_response_tokens + len(reply) >= max_tokens:
                break  # no room for the reply and a token after it
            ledger.add_context(reply)
        return Episode(turns=ledger.turns(), status="truncated")


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
