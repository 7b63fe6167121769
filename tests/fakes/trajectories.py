"""Turns and trajectories of given tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.types import TokenChunk, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import FinishReason


def versions_of(spans: Sequence[Sequence[int]]) -> np.ndarray:
    """`spans` are (policy version, number of tokens)."""
    return np.repeat(np.array([v for v, _ in spans], np.int32), [n for _, n in spans])


def make_chunk(
    token_ids: Sequence[int] | np.ndarray,
    spans: Sequence[Sequence[int]] | None = None,
    *,
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason | None = "stop",
) -> TokenChunk:
    """Of version 0 and log-probabilities of -1 unless given."""
    return TokenChunk(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.full(len(token_ids), -1.0, np.float32) if logprobs is None else np.array(logprobs, np.float32),
        versions=versions_of([(0, len(token_ids))] if spans is None else spans),
        finish_reason=finish_reason,
    )


def make_turn(
    context: Sequence[int] | np.ndarray,
    generated: Sequence[int] | np.ndarray,
    spans: Sequence[Sequence[int]] | None = None,
    *,
    logprobs: Sequence[float] | None = None,
    reward: float = 0.0,
    begins_anew: bool = False,
) -> Turn:
    chunk, num_context = make_chunk(generated, spans, logprobs=logprobs), len(context)
    return Turn(
        token_ids=np.concatenate([np.array(context, np.int32), chunk.token_ids]),
        is_generated=np.arange(num_context + len(generated)) >= num_context,
        logprobs=np.concatenate([np.zeros(num_context, np.float32), chunk.logprobs]),
        versions=np.concatenate([np.full(num_context, -1, np.int32), chunk.versions]),
        reward=reward,
        begins_anew=begins_anew,
    )
