"""The contract between rollout and trainer: prompts, what was generated, and under which weights.

Arrays are numpy arrays, one per sequence, never padded. Shape legend: `T` tokens of one turn or sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""An end token or stop text, the token budget, or the request was returned unfinished."""

TrajectoryStatus = Literal["completed", "truncated", "failed"]
"""`truncated` exceeded a budget of tokens or time; `failed` has no usable reward. Neither is trained as if complete."""

FailureKind = Literal["timeout", "agent_error", "reward_timeout", "reward_error"]
OnFailure = Mapping[FailureKind, Literal["score", "zero", "drop"]]
"""Of a trajectory that went wrong: the reward function scores what there is, it gets a reward of 0, or (the default) it
is `failed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy.

    Example:
        Prompt(prompt_id="train/17", token_ids=np.array([3, 1, 4], np.int32), text="12+7=", answer="19")
    """

    prompt_id: str
    """Of the row of the data set, the same in every epoch; it also seeds sampling."""
    token_ids: np.ndarray
    """int32[T], special tokens included."""
    text: str
    """After the chat template, if any."""
    answer: str
    """Ground truth for the reward; empty if it needs none."""
    reward: str = ""
    """Name of the reward function for this prompt; empty for that of the task."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Further columns of the data set, untouched."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The source of `text`, kept for agents alone; empty without a chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """An admitted prompt whose group is to be generated."""

    group_id: int
    prompt: Prompt
    start_version: int
    """The live policy version at admission; no token of the group may be from an older one."""
    attempt: int = 0
    """0, or the number of this retry."""
    num_worker_losses: int = 0
    """Rollout workers that were lost while they generated it; these do not count as retries."""


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
    """The response ends with (and includes) the token that completes one of these texts, special tokens spelled out."""
    num_prefix_tokens: int = 0
    """Tokens at the end of the prompt that belong to the response, which continues: a stop text may start there."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"SamplingParams.stop must be a tuple of texts that are not empty, got {self.stop!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Consecutive sampled tokens of one request: a piece of a response, or all of it."""

    token_ids: np.ndarray
    """int32[T]"""
    logprobs: np.ndarray
    """float32[T]: under the distribution that each token was sampled from (after temperature)."""
    versions: np.ndarray
    """int32[T]: the policy version that sampled each token."""
    finish_reason: FinishReason | None
    """None unless it is the last chunk."""

    def __post_init__(self) -> None:
        num_tokens, num_logprobs, num_versions = len(self.token_ids), len(self.logprobs), len(self.versions)
        if not num_tokens == num_logprobs == num_versions:
            raise ValueError(
                f"an engine returned {num_tokens} tokens with {num_logprobs} logprobs and version labels for "
                f"{num_versions}; every sampled token needs one of each"
            )


def join_chunks(chunks: Sequence[TokenChunk], finish_reason: FinishReason | None) -> TokenChunk:
    """Consecutive chunks of one response as one."""
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
    """From the environment, on top of the reward of the outcome."""
    begins_anew: bool = False
    """Starts a sequence that does not begin with the prompt: earlier turns are not in its context."""

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """(policy version, number of tokens) of each run of sampled tokens of one version, in order."""
        return tuple((version, len(list(run))) for version, run in groupby(self.versions[self.is_generated].tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Calls of tools in one trajectory, as its agent loop counts them."""

    num_calls: int = 0
    num_errors: int = 0
    """Calls for which the policy got an error message."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_errors <= self.num_calls:
            raise ValueError(
                f"ToolUse needs 0 <= num_errors <= num_calls, got {self.num_errors} and {self.num_calls}; a failed "
                "call counts as both"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sampled response to a prompt: its tokens, and its reward.

    An agent loop returns the tokens, `status` and `tool_use` (`TrajectoryBuilder.finish`); the rollout worker adds the
    others. Sequences and turns are concatenated: `T` tokens, `K` turns, `Q` sequences. Raises ValueError if arrays
    disagree, or a turn without sampled tokens has a reward.
    """

    token_ids: np.ndarray
    """int32[T]: the prompt, sampled tokens, and the context between."""
    loss_mask: np.ndarray
    """bool[T]: sampled tokens."""
    logprobs: np.ndarray
    """float32[T]: see `TokenChunk`; 0 outside the mask."""
    versions: np.ndarray
    """int32[T]: see `TokenChunk`; -1 outside the mask."""
    turn_ends: np.ndarray
    """int32[K]: index after the last token of each turn; the last one is T."""
    turn_rewards: np.ndarray
    """float64[K]: from the environment, on top of the reward of the outcome. Finite."""
    sequence_starts: np.ndarray
    """int32[Q]: first token of each sequence that does not begin with the prompt; mostly empty."""
    status: TrajectoryStatus
    prompt_id: str = ""
    sample_index: int = 0
    reward: float = math.nan
    """Of the outcome, without those of the turns. NaN until it is scored, and if status is "failed"."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds: "generate_s", an agent's tools included; "engine_wait_s", its wait for room at an engine; "reward_s",
    the wait for a free reward process included."""
    text: str = ""
    """Of each sequence one line: from the first generated token to the last, context between included, without special
    tokens."""
    failure: FailureKind | None = None
    """Also set if the trajectory has a reward all the same."""
    error: str = ""
    """The reason for `failure`."""
    num_lost_tokens: int = 0
    """Generated for it, but not part of it: its loop failed, cancelled a generation, or did not use it."""
    tool_use: ToolUse | None = None
    """None if its loop counts no calls, or failed."""

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
        """The inverse of `turns`."""
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
        """Of the arrays, one per token sequence, in order; at least one."""
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
        """Turns with a sampled token."""
        return sum(bool(np.any(self.loss_mask[start:end])) for start, end in self._turn_bounds())

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """The versions that sampled any token, ascending."""
        versions = self.versions[self.loss_mask]
        if len(versions) and (versions == versions[0]).all():  # nearly always, and much cheaper to check
            return (int(versions[0]),)
        return tuple(np.unique(versions).tolist())

    @property
    def nbytes(self) -> int:
        """Approximate size on the wire: arrays, texts, and what pickle adds."""
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
    """The live policy version at admission."""
    baseline: Trajectory | None = None
    """The greedy response whose reward the others are compared with (ReMax); scored, never trained."""

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
        """Whether all scored responses, the baseline included, have the same reward."""
        return len({t.total_reward for t in self.generated if t.status != "failed"}) <= 1

    @property
    def num_generated_tokens(self) -> int:
        """Of `generated`, lost tokens included."""
        return sum(t.num_generated_tokens + t.num_lost_tokens for t in self.generated)

    @property
    def nbytes(self) -> int:
        """Approximate size on the wire."""
        return sum(t.nbytes for t in self.generated)


def _concatenate(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")
