"""The tokens of one trajectory, as an agent's turns add them.

Tokens are only appended, never decoded and encoded again: what the policy saw is what is trained.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from rollout.types import TokenChunk, Trajectory, join_chunks

if TYPE_CHECKING:
    from rollout.types import ToolUse, TrajectoryStatus, Turn


class TrajectoryBuilder:
    """The tokens of one trajectory so far.

    A turn is context followed by generated tokens; a new one begins where context follows generated tokens. The first
    turn begins with the prompt. A conversation whose history is rewritten continues in a new sequence
    (`start_sequence`).

    Example:
        builder = TrajectoryBuilder(prompt.token_ids)
        builder.add_generated(await generate(builder.token_ids(), 100))
        builder.add_reward(0.5)
        builder.add_context(tool_result_ids)
        builder.turns()  # (Turn(prompt and response, reward 0.5), Turn(tool result))
        return builder.finish("completed")
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self._num_prompt_tokens = len(prompt_token_ids)
        self._chunks: list[TokenChunk] = []
        """Context as chunks of version -1."""
        self._num_tokens = 0
        self._turn_starts, self._turn_rewards = [0], [0.0]
        self._sequence_starts: list[int] = []
        self._first_of_turn = self._first_of_sequence = 0
        """Indices of chunks."""
        self._has_generated = False
        """In the last turn."""
        self._add_context(np.asarray(prompt_token_ids, np.int32))

    def add_context(self, token_ids: np.ndarray) -> None:
        """Appends tokens that the policy did not sample, such as the result of a tool. Raises ValueError if they are no
        whole numbers in one row."""
        tokens = _row(token_ids)
        self._start_turn()
        self._add_context(tokens)

    def start_sequence(self, token_ids: np.ndarray) -> None:
        """Starts another sequence with these tokens as its context, for history that was rewritten, shortened or left
        out. Earlier sequences keep what was generated; trailing context of the last one is dropped. Raises ValueError
        as `add_context`, and if there are no tokens."""
        tokens = _row(token_ids)
        if not len(tokens):
            raise ValueError("another sequence needs at least one token of context, got none")
        self._start_turn()
        start = self._turn_starts[-1]
        del self._chunks[self._first_of_turn :]
        self._num_tokens, self._first_of_sequence = start, len(self._chunks)
        self._sequence_starts = [*(one for one in self._sequence_starts if one < start), start]
        self._add_context(tokens)

    begin_anew = start_sequence  # its older name

    def add_generated(self, chunk: TokenChunk) -> None:
        """Appends sampled tokens with their log-probabilities and versions."""
        if len(chunk.token_ids):
            self._has_generated = True
            self._add(chunk)

    def add_reward(self, reward: float) -> None:
        """Adds to the reward of the turn that was generated last, also if context has followed it. Raises ValueError if
        the reward is not finite, or is not 0 and nothing was generated yet."""
        if not math.isfinite(reward):
            raise ValueError(f"reward of a turn must be a finite number, got {reward}; give 0 for none")
        if self._has_generated:
            self._turn_rewards[-1] += float(reward)
        elif len(self._turn_rewards) > 1:  # every turn but the last has generated tokens
            self._turn_rewards[-2] += float(reward)
        elif reward != 0:
            raise ValueError(f"a reward of {reward} for a turn, but none was generated yet; call add_generated() first")

    def token_ids(self) -> np.ndarray:
        """int32[T]: the last sequence so far, for an engine to continue."""
        return join_chunks(self._chunks[self._first_of_sequence :], None).token_ids

    @property
    def num_response_tokens(self) -> int:
        """Tokens of the last sequence minus the length of the prompt; `max_tokens` of a loop bounds it."""
        return self._num_tokens - (self._sequence_starts or [0])[-1] - self._num_prompt_tokens

    def turns(self) -> tuple[Turn, ...]:
        """Of all sequences so far, in order."""
        return self.finish("completed").turns()

    def finish(self, status: TrajectoryStatus, *, tool_use: ToolUse | None = None) -> Trajectory:
        """What an agent loop returns."""
        tokens = join_chunks(self._chunks, None)
        return Trajectory(
            token_ids=tokens.token_ids,
            loss_mask=tokens.versions >= 0,
            logprobs=tokens.logprobs,
            versions=tokens.versions,
            turn_ends=np.array([*self._turn_starts[1:], self._num_tokens], np.int32),
            turn_rewards=np.array(self._turn_rewards, np.float64),
            sequence_starts=np.array(self._sequence_starts, np.int32),
            status=status,
            tool_use=tool_use,
        )

    def _start_turn(self) -> None:
        if self._has_generated:
            self._turn_starts.append(self._num_tokens)
            self._turn_rewards.append(0.0)
            self._first_of_turn, self._has_generated = len(self._chunks), False

    def _add_context(self, tokens: np.ndarray) -> None:
        num_tokens = len(tokens)
        logprobs, versions = np.zeros(num_tokens, np.float32), np.full(num_tokens, -1, np.int32)
        self._add(TokenChunk(token_ids=tokens, logprobs=logprobs, versions=versions, finish_reason=None))

    def _add(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._num_tokens += len(chunk.token_ids)


def _row(token_ids: np.ndarray) -> np.ndarray:
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise ValueError(f"context must be a list of token ids, got {tokens.dtype} of shape {tokens.shape}")
    return tokens.astype(np.int32)
