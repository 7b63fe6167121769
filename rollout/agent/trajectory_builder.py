"""The tokens of one trajectory, as an agent's turns add them.

Tokens are only ever appended to a sequence, never decoded and encoded again: what the policy saw is what is trained.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollout.types import Completion, FinishReason, Segment, Turn

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def coalesce(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Joins neighbours of the same version and drops empty segments. `[3:2, 3:1, 4:5] -> [3:3, 4:5]`."""
    joined: list[Segment] = []
    for segment in segments:
        if segment.num_tokens == 0:
            continue
        if joined and joined[-1].version == segment.version:
            joined[-1] = Segment(version=segment.version, num_tokens=joined[-1].num_tokens + segment.num_tokens)
        else:
            joined.append(segment)
    return tuple(joined)


def join_chunks(chunks: Sequence[Completion], finish_reason: FinishReason | None) -> Completion:
    """One completion out of consecutive chunks of one generation, whichever replicas they came from."""
    return Completion(
        token_ids=_concatenate([chunk.token_ids for chunk in chunks], np.int32),
        logprobs=_concatenate([chunk.logprobs for chunk in chunks], np.float32),
        segments=coalesce(segment for chunk in chunks for segment in chunk.segments),
        finish_reason=finish_reason,
    )


def check_chunk(chunk: Completion) -> None:
    """Refuses a chunk whose arrays and segments disagree, before it spoils an account.

    Raises:
        ValueError: with all three counts.
    """
    num_tokens, labelled = len(chunk.token_ids), sum(segment.num_tokens for segment in chunk.segments)
    if not num_tokens == len(chunk.logprobs) == labelled:
        raise ValueError(
            f"an engine returned {num_tokens} tokens with {len(chunk.logprobs)} logprobs and version labels for "
            f"{labelled}; every sampled token needs one of each"
        )


def check_logprobs(chunk: Completion) -> None:
    """Refuses a chunk of an engine whose model computed no numbers.

    Raises:
        ValueError: a log-probability is not finite.
    """
    if not np.isfinite(chunk.logprobs).all():
        number = int(np.sum(~np.isfinite(chunk.logprobs)))
        raise ValueError(
            f"the engine computed no finite log-probability for {number} of {len(chunk.logprobs)} tokens; look for NaN "
            "or infinity in the weights (learner/grad_norm), and whether model.rollout_dtype holds them (float16 ends "
            "at 65504)"
        )


class TokenLedger:
    """The tokens of one trajectory so far: context and generated stretches, in order.

    A turn is a stretch of context followed by a stretch that was generated; a new turn begins where context follows
    generated tokens. The first turn begins with the prompt. A conversation whose history is rewritten goes on in a new
    sequence (`begin_anew`).

    Example:
        ledger = TokenLedger(prompt.token_ids)
        ledger.add_generated(completion)
        ledger.add_reward(0.5)
        ledger.add_context(tool_result_ids)
        ledger.turns()  # (Turn(prompt + completion, reward 0.5), Turn(tool result))
    """

    def __init__(self, prompt_token_ids: np.ndarray) -> None:
        self._closed_turns: list[Turn] = []
        self._context = [np.asarray(prompt_token_ids, np.int32)]
        self._generated: list[Completion] = []
        self._reward = 0.0
        self._num_prompt_tokens = len(prompt_token_ids)
        self._sequence_start = 0
        self._begins_anew = False

    def add_context(self, token_ids: np.ndarray) -> None:
        """Appends tokens that the policy did not sample, e.g. the result of a tool.

        Raises:
            ValueError: they are no whole numbers in one row.
        """
        tokens = _row(token_ids)
        if self._generated:
            self._close_turn()
        self._context.append(tokens)

    def begin_anew(self, token_ids: np.ndarray) -> None:
        """Begins another sequence with these tokens as its context: history that was rewritten, shortened or left
        behind. What was generated so far stays in the sequences that it belongs to; context that nothing was generated
        after is dropped.

        Raises:
            ValueError: they are no whole numbers in one row, or there are none.
        """
        tokens = _row(token_ids)
        if not len(tokens):
            raise ValueError("a sequence that begins anew needs at least one token of context, got none")
        if self._generated:
            self._close_turn()
        self._context, self._begins_anew = [tokens], True
        self._sequence_start = len(self._closed_turns)

    def add_generated(self, completion: Completion) -> None:
        """Appends sampled tokens with their log-probabilities and versions."""
        check_chunk(completion)
        if len(completion.token_ids):
            self._generated.append(completion)

    def add_reward(self, reward: float) -> None:
        """Rewards the turn that was generated last, on top of what it has, also if context has followed it.

        Raises:
            ValueError: the reward is not finite, or is not 0 and nothing was generated yet.
        """
        if not math.isfinite(reward):
            raise ValueError(f"reward of a turn must be a finite number, got {reward}; give 0 for none")
        if self._generated:
            self._reward += float(reward)
        elif self._closed_turns:
            last = self._closed_turns[-1]
            self._closed_turns[-1] = replace(last, reward=last.reward + float(reward))
        elif reward != 0:
            raise ValueError(f"a reward of {reward} for a turn, but none was generated yet; call add_generated() first")

    def token_ids(self) -> np.ndarray:
        """int32[T]: the whole of the last sequence so far, as an engine should continue it."""
        tokens = [turn.token_ids for turn in self._closed_turns[self._sequence_start :]] + self._context
        return _concatenate(tokens + [completion.token_ids for completion in self._generated], np.int32)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of the last sequence, generated and context, less those of the prompt: `max_tokens` of a loop bounds
        this in every sequence."""
        return len(self.token_ids()) - self._num_prompt_tokens

    def turns(self) -> tuple[Turn, ...]:
        """All turns of all sequences, in order."""
        return (*self._closed_turns, self._open_turn())

    def _close_turn(self) -> None:
        self._closed_turns.append(self._open_turn())
        self._context, self._generated, self._reward, self._begins_anew = [], [], 0.0, False

    def _open_turn(self) -> Turn:
        context = _concatenate(self._context, np.int32)
        generated = join_chunks(self._generated, None)
        return Turn(
            token_ids=np.concatenate([context, generated.token_ids]),
            is_generated=np.repeat([False, True], [len(context), len(generated.token_ids)]),
            logprobs=np.concatenate([np.full(len(context), np.nan, np.float32), generated.logprobs]),
            segments=generated.segments,
            reward=self._reward,
            begins_anew=self._begins_anew,
        )


def _row(token_ids: np.ndarray) -> np.ndarray:
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise ValueError(f"context must be token ids in one row, got {tokens.dtype} of shape {tokens.shape}")
    return tokens.astype(np.int32)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
