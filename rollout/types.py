"""The contract between rollout and trainer: what a prompt is, what was generated, and under which weights.

Every type is frozen, slotted and keyword-only. Arrays are ragged numpy arrays (one per sequence, never padded).
Shape legend: `T` tokens of one turn or sequence.

This module imports without torch, Ray or vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence  # noqa: TC003 - dataclasses are introspected at runtime
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""Why generation ended: an end token, the token budget, or the engine gave the request back."""

TrajectoryStatus = Literal["completed", "truncated", "failed"]
"""`truncated` ran into a token budget; `failed` has no usable reward. Neither is ever trained as if complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy.

    `prompt_id` names the row of the data set and is the same in every epoch; it also seeds sampling.

    Example:
        Prompt(prompt_id="train/17", token_ids=np.array([3, 1, 4], np.int32), text="12+7=", answer="19")
    """

    prompt_id: str
    token_ids: np.ndarray
    """int32[T]: what the engine receives, special tokens included."""
    text: str
    """The prompt as a person reads it (after the chat template, if any)."""
    answer: str
    """Ground truth for the reward; empty if the reward needs none."""
    reward: str = ""
    """Name of the reward function for this prompt; empty means the one of the task."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Further columns of the data set, untouched."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """What `text` was made of by the chat template; kept for agents alone, and empty without a template."""


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
    """Rollout workers that were lost while they generated it, for which it was not blamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one completion. `temperature=0` is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    seed: int | None = None
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """The answer ends with the token that completes one of these texts, special tokens spelled out. That token is part
    of it. Never empty texts."""
    num_prefix_tokens: int = 0
    """So many tokens at the end of the prompt belong to the answer, which goes on here: a stop string may begin in
    them."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"SamplingParams.stop must be a tuple of texts that are not empty, got {self.stop!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`num_tokens` consecutive generated tokens, all sampled under policy `version`."""

    version: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine generated for one request (or one chunk of it).

    `logprobs[t]` is the log-probability of `token_ids[t]` under the distribution it was sampled from
    (after temperature), at the moment it was sampled. `segments` sum up to `len(token_ids)`.
    """

    token_ids: np.ndarray
    """int32[T]"""
    logprobs: np.ndarray
    """float32[T]"""
    segments: tuple[Segment, ...]
    finish_reason: FinishReason | None
    """None on a chunk that is not the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A stretch of a trajectory: context tokens, generated tokens, or both in order.

    A turn continues the tokens of the turns before it, unless it `begins_anew`: a trajectory is one token sequence or
    several. `logprobs` is NaN wherever `is_generated` is False. `segments` cover the generated tokens, in order.
    """

    token_ids: np.ndarray
    """int32[T]"""
    is_generated: np.ndarray
    """bool[T]"""
    logprobs: np.ndarray
    """float32[T]"""
    segments: tuple[Segment, ...]
    reward: float = 0.0
    """Given by the environment for this turn, on top of the reward of the outcome. Finite."""
    begins_anew: bool = False
    """The first turn of a sequence of its own: nothing of the turns before it is in its context."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"Turn has reward {self.reward}; it must be finite, 0 if the environment gives none")
        if self.reward != 0 and not np.any(self.is_generated):
            raise ValueError(f"Turn has reward {self.reward} and no generated token that could have earned it")
        num_tokens = len(self.token_ids)
        if len(self.is_generated) != num_tokens or len(self.logprobs) != num_tokens:
            raise ValueError(
                f"Turn arrays differ in length: token_ids {num_tokens}, is_generated {len(self.is_generated)}, "
                f"logprobs {len(self.logprobs)}; give one entry per token"
            )
        labelled, generated = sum(s.num_tokens for s in self.segments), int(np.sum(self.is_generated))
        if labelled != generated:
            raise ValueError(f"Turn has {generated} generated tokens but its segments label {labelled}")


def split_sequences(turns: Sequence[Turn]) -> tuple[tuple[Turn, ...], ...]:
    """The turns of each token sequence. `[a, b, c (begins anew), d] -> ((a, b), (c, d))`; of no turns one empty
    sequence."""
    starts = [number for number, turn in enumerate(turns) if turn.begins_anew and number]
    return tuple(tuple(turns[start:stop]) for start, stop in pairwise([0, *starts, len(turns)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Calls of tools in one trajectory, as its agent loop counts them."""

    num_calls: int = 0
    """That the policy made, whatever came of them."""
    num_errors: int = 0
    """Calls that gave no result, so that the policy was told of an error instead."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_errors <= self.num_calls:
            raise ValueError(
                f"ToolUse needs 0 <= num_errors <= num_calls, got {self.num_errors} and {self.num_calls}; a call that "
                "fails counts as both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled answer to a prompt, with its reward."""

    prompt_id: str
    sample_index: int
    turns: tuple[Turn, ...]
    reward: float
    """Of the outcome, without the rewards of the turns. NaN only when status is "failed"."""
    reward_parts: Mapping[str, float]
    status: TrajectoryStatus
    timings: Mapping[str, float]
    """Seconds: "generate_s", an agent's tools included; "engine_wait_s", the part of it that was a wait for room at an
    engine; "reward_s", the wait for a free reward process included."""
    text: str = ""
    """The generated text, decoded once for rewards and for people."""
    error: str = ""
    """Why status is "failed"; empty otherwise."""
    num_lost_tokens: int = 0
    """Generated for it, and in none of its turns: its agent loop failed, gave a generation up, or did not use it."""
    tool_use: ToolUse | None = None
    """None if its agent loop counts no calls, or failed."""

    @property
    def total_reward(self) -> float:
        """Outcome and turns together; NaN if there is no outcome."""
        return self.reward + math.fsum(turn.reward for turn in self.turns)

    @property
    def num_generated_tokens(self) -> int:
        return sum(s.num_tokens for turn in self.turns for s in turn.segments)

    @property
    def num_generated_turns(self) -> int:
        """Turns in which the policy said something."""
        return sum(any(s.num_tokens for s in turn.segments) for turn in self.turns)

    @property
    def sequences(self) -> tuple[tuple[Turn, ...], ...]:
        """The turns of each token sequence, in order; at least one sequence."""
        return split_sequences(self.turns)

    @property
    def versions(self) -> tuple[int, ...]:
        """The policy versions that sampled any token, ascending."""
        return tuple(sorted({s.version for turn in self.turns for s in turn.segments if s.num_tokens}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All samples of one prompt; the unit of admission, filtering and advantage estimation."""

    group_id: int
    """Counts admissions from 0; unique within a run, resumes included."""
    prompt: Prompt
    trajectories: Sequence[Trajectory]
    start_version: int
    """The policy version that was live when the group was admitted."""
    baseline: Trajectory | None = None
    """The greedy answer whose reward the others are compared with (ReMax); judged, and never trained."""

    @property
    def rewards(self) -> np.ndarray:
        """float64[len(trajectories)]: outcome and turns together."""
        return np.array([t.total_reward for t in self.trajectories], np.float64)

    @property
    def generated(self) -> tuple[Trajectory, ...]:
        """Everything that engines generated for it: the trajectories, and the baseline if there is one."""
        return tuple(self.trajectories) if self.baseline is None else (*self.trajectories, self.baseline)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all judged answers, and the baseline if there is one, have the same reward: nothing to compare."""
        return len({t.total_reward for t in self.generated if t.status != "failed"}) <= 1

    @property
    def num_generated_tokens(self) -> int:
        """Of everything that was generated."""
        return sum(t.num_generated_tokens + t.num_lost_tokens for t in self.generated)
