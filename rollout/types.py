"""The contract between rollout and trainer: what a prompt is, what was generated, and under which weights.

Every type is frozen, slotted and keyword-only. Arrays are ragged numpy arrays (one per sequence, never padded).
Shape legend: `T` tokens of one turn or sequence.

This module imports without torch, Ray or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""Why generation ended: an end token, the token budget, or the engine returned the request unfinished."""

TrajectoryStatus = Literal["completed", "truncated", "failed"]
"""`truncated` was cut off by a budget of tokens, or of time; `failed` has no usable reward. Neither is ever trained as
if complete."""

FailureKind = Literal["timeout", "agent_error", "reward_timeout", "reward_error"]
OnFailure = Mapping[FailureKind, Literal["score", "zero", "drop"]]
"""What becomes of a trajectory that went wrong: the reward function scores what there is, it gets a reward of 0, or it
is `failed`. What is not named is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example:
        Prompt(prompt_id="train/17", token_ids=np.array([3, 1, 4], np.int32), text="12+7=", answer="19")
    """

    prompt_id: str
    """The row of the data set, the same in every epoch; it also seeds sampling."""
    token_ids: np.ndarray
    """int32[T]: what the engine receives, special tokens included."""
    text: str
    """The prompt as a person reads it (after the chat template, if any)."""
    answer: str
    """Ground truth for the reward; empty if it needs none."""
    reward: str = ""
    """Name of the reward function for this prompt; empty for that of the task."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Further columns of the data set, untouched."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """What the chat template made `text` of; kept for agents alone, and empty without a template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """An admitted prompt whose group is to be generated."""

    group_id: int
    prompt: Prompt
    start_version: int
    """The policy version that was live at admission; no token of the group may come from an older one."""
    attempt: int = 0
    """0, or which retry this is."""
    num_worker_losses: int = 0
    """Rollout workers that were lost while they generated it; these attempts count as no retries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one response. `temperature=0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """The response ends with the token that completes one of these texts, special tokens spelled out. That token is
    part of it. Never empty texts."""
    num_prefix_tokens: int = 0
    """How many tokens at the end of the prompt belong to the response, which continues here: a stop string may begin in
    them."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"SamplingParams.stop must be a tuple of texts that are not empty, got {self.stop!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Consecutive tokens that engines sampled for one request: a piece of a response, or all of it."""

    token_ids: np.ndarray
    """int32[T]"""
    logprobs: np.ndarray
    """float32[T]: of each token when it was sampled, under the distribution it was sampled from (after temperature)."""
    versions: np.ndarray
    """int32[T]: the policy version that sampled each token."""
    finish_reason: FinishReason | None
    """None on a chunk that is not the last."""

    def __post_init__(self) -> None:
        num_tokens, num_logprobs, num_versions = len(self.token_ids), len(self.logprobs), len(self.versions)
        if not num_tokens == num_logprobs == num_versions:
            raise ValueError(
                f"an engine returned {num_tokens} tokens with {num_logprobs} logprobs and version labels for "
                f"{num_versions}; every sampled token needs one of each"
            )


def join_chunks(chunks: Sequence[TokenChunk], finish_reason: FinishReason | None) -> TokenChunk:
    """Consecutive chunks of one response as one, from whichever engines."""
    return TokenChunk(
        token_ids=_concatenate([chunk.token_ids for chunk in chunks], np.int32),
        logprobs=_concatenate([chunk.logprobs for chunk in chunks], np.float32),
        versions=_concatenate([chunk.versions for chunk in chunks], np.int32),
        finish_reason=finish_reason,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A view of one turn of a trajectory: context tokens, then the tokens that the policy sampled."""

    token_ids: np.ndarray
    """int32[T]"""
    is_generated: np.ndarray
    """bool[T]"""
    logprobs: np.ndarray
    """float32[T]; 0 where nothing was sampled."""
    versions: np.ndarray
    """int32[T]; -1 where nothing was sampled."""
    reward: float = 0.0
    """From the environment for this turn, on top of the reward of the outcome."""
    begins_anew: bool = False
    """The first turn of a sequence that does not begin with the prompt: nothing before it is in its context."""

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(policy version, number of tokens) of each run of sampled tokens of one version, in order."""
        return tuple((version, len(list(run))) for version, run in groupby(self.versions[self.is_generated].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Calls of tools in one trajectory, as its agent loop counts them."""

    num_calls: int = 0
    """Made by the policy, failed ones included."""
    num_errors: int = 0
    """Calls without a result; the policy got an error message instead."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_errors <= self.num_calls:
            raise ValueError(
                f"ToolUse needs 0 <= num_errors <= num_calls, got {self.num_errors} and {self.num_calls}; a call that "
                "fails counts as both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled response to a prompt: its tokens, and its reward.

    An agent loop returns the tokens, `status` and `tool_use` (`TrajectoryBuilder.finish`); the rollout worker adds the
    others. All sequences and turns are end to end. `T` tokens, `K` turns, `Q` sequences. Raises ValueError if arrays
    disagree, or a turn has a reward in which nothing was sampled.
    """

    token_ids: np.ndarray
    """int32[T]: the prompt, what the policy sampled, and the context between."""
    loss_mask: np.ndarray
    """bool[T]: what the policy sampled."""
    logprobs: np.ndarray
    """float32[T]: see `TokenChunk`; 0 outside the mask."""
    versions: np.ndarray
    """int32[T]: the policy version that sampled each token; -1 outside the mask."""
    turn_ends: np.ndarray
    """int32[K]: index after the last token of each turn; the last one is T."""
    turn_rewards: np.ndarray
    """float64[K]: from the environment for each turn, on top of the reward of the outcome. Finite."""
    sequence_starts: np.ndarray
    """int32[Q]: first token of each sequence that does not begin with the prompt. Empty in most trajectories."""
    status: TrajectoryStatus
    prompt_id: str = ""
    sample_index: int = 0
    reward: float = math.nan
    """Of the outcome, without the rewards of the turns. NaN until it is scored, and if status is "failed"."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds: "generate_s", an agent's tools included; "engine_wait_s", the part of it that was a wait for room at an
    engine; "reward_s", the wait for a free reward process included."""
    text: str = ""
    """For rewards and for people: from the first generated token to the last, with what the policy read between,
    and without special tokens. Sequences are on lines of their own."""
    failure: FailureKind | None = None
    """What went wrong, also if the trajectory has a reward all the same."""
    error: str = ""
    """The reason for `failure`; empty without one."""
    num_lost_tokens: int = 0
    """Generated for it, and not part of it: its agent loop failed, cancelled a generation, or did not use it."""
    tool_use: ToolUse | None = None
    """None if its agent loop counts no calls, or failed."""

    def __post_init__(self) -> None:
        num_tokens, ends = len(self.token_ids), [int(end) for end in self.turn_ends]
        if not num_tokens == len(self.loss_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"arrays of a trajectory differ in length: token_ids {num_tokens}, loss_mask {len(self.loss_mask)}, "
                f"logprobs {len(self.logprobs)}, versions {len(self.versions)}; give one entry per token"
            )
        if ends != sorted(ends) or (ends or [0])[-1] != num_tokens or len(ends) != len(self.turn_rewards):
            raise ValueError(
                f"a trajectory of {num_tokens} tokens has turns that end at {ends} and {len(self.turn_rewards)} rewards"
                "; the last turn must end with the tokens, and each turn needs one reward"
            )
        for turn, (reward, (start, end)) in enumerate(zip(self.turn_rewards, self._turn_bounds(), strict=True)):
            if not math.isfinite(reward):
                raise ValueError(f"turn {turn} has reward {reward}; it must be finite, 0 if the environment gives none")
            if reward != 0 and not np.any(self.loss_mask[start:end]):
                raise ValueError(f"turn {turn} has reward {reward} and no generated token that could have earned it")

    @classmethod
    def of_turns(cls, turns: Sequence[Turn], *, status: TrajectoryStatus, **others: Any) -> Trajectory:
        """The trajectory that `turns` are the view of."""
        ends = np.cumsum([len(turn.token_ids) for turn in turns], dtype=np.int32)
        starts = [0, *ends.tolist()]
        sampled = [np.where(turn.is_generated, turn.logprobs, np.float32(0)) for turn in turns]
        return cls(
            token_ids=_concatenate([turn.token_ids for turn in turns], np.int32),
            loss_mask=_concatenate([np.asarray(turn.is_generated, np.bool_) for turn in turns], np.bool_),
            logprobs=_concatenate(sampled, np.float32),
            versions=_concatenate([turn.versions for turn in turns], np.int32),
            turn_ends=ends,
            turn_rewards=np.array([turn.reward for turn in turns], np.float64),
            sequence_starts=np.array([starts[i] for i, turn in enumerate(turns) if turn.begins_anew], np.int32),
            status=status,
            **others,
        )

    def turns(self) -> tuple[Turn, ...]:
        """Read-only views, in order."""
        begin_anew = set(self.sequence_starts.tolist())
        return tuple(
            Turn(
                token_ids=self.token_ids[start:end],
                is_generated=self.loss_mask[start:end],
                logprobs=self.logprobs[start:end],
                versions=self.versions[start:end],
                reward=float(reward),
                begins_anew=start in begin_anew,
            )
            for reward, (start, end) in zip(self.turn_rewards, self._turn_bounds(), strict=True)
        )

    def sequences(self) -> tuple[slice, ...]:
        """Where in the arrays each token sequence is, in order; at least one."""
        bounds = [0, *(start for start in self.sequence_starts.tolist() if start), len(self.token_ids)]
        return tuple(slice(start, end) for start, end in pairwise(bounds))

    @property
    def total_reward(self) -> float:
        """Of the outcome and the turns; NaN if there is no outcome."""
        return self.reward + math.fsum(self.turn_rewards)

    @property
    def num_generated_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def num_generated_turns(self) -> int:
        """Turns in which the policy sampled a token."""
        return sum(bool(np.any(self.loss_mask[start:end])) for start, end in self._turn_bounds())

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The versions that sampled any token, ascending."""
        return tuple(np.unique(self.versions[self.loss_mask]).tolist())

    @property
    def nbytes(self) -> int:
        """About its size on the wire: arrays, texts, and what pickle adds to them."""
        per_token = self.token_ids.nbytes + self.loss_mask.nbytes + self.logprobs.nbytes + self.versions.nbytes
        return per_token + self.turn_ends.nbytes + self.turn_rewards.nbytes + len(self.text) + len(self.error) + 384

    def _turn_bounds(self) -> Iterator[tuple[int, int]]:
        return pairwise([0, *self.turn_ends.tolist()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt; the unit of admission, filtering and advantage estimation."""

    group_id: int
    """Counts admissions from 0; unique within a run, resumes included."""
    prompt_id: str
    trajectories: Sequence[Trajectory]
    start_version: int
    """The policy version that was live when the group was admitted."""
    baseline: Trajectory | None = None
    """The greedy response whose reward the others are compared with (ReMax); scored, and never trained."""

    @property
    def rewards(self) -> np.ndarray:
        """float64[len(trajectories)]: outcome and turns together."""
        return np.array([t.total_reward for t in self.trajectories], np.float64)

    @property
    def generated(self) -> tuple[Trajectory, ...]:
        """The trajectories, and the baseline if there is one."""
        return tuple(self.trajectories) if self.baseline is None else (*self.trajectories, self.baseline)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all scored responses, the baseline included, have the same reward: nothing to compare."""
        return len({t.total_reward for t in self.generated if t.status != "failed"}) <= 1

    @property
    def num_generated_tokens(self) -> int:
        """Of all of `generated`, those outside the trajectories included."""
        return sum(t.num_generated_tokens + t.num_lost_tokens for t in self.generated)

    @property
    def nbytes(self) -> int:
        """About its size on the wire."""
        return sum(t.nbytes for t in self.generated)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
