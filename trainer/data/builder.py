"""From groups of trajectories to samples with advantages: what is trained, and what is left out and why.

Shape legend: `T` tokens of one sample, `G` trajectories of a group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollout.reward.length import overlong_penalty
from trainer.algorithms.advantages import AdvantageFn, GroupRewards
from trainer.config.estimators import ESTIMATORS
from trainer.data.batch import TrainSample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Group, Trajectory, Turn
    from trainer.config.schema.algorithm import AlgorithmConfig

FAILED, TRUNCATED, EMPTY, LONELY = "failed", "truncated", "no_generated_tokens", "no_peer_in_group"
"""Reasons for leaving a trajectory out. `truncated` only with `algorithm.mask_truncated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSamples:
    """The samples of some groups. Every trajectory is in `samples` or counted in `excluded`."""

    samples: tuple[TrainSample, ...]
    excluded: Mapping[str, int]
    """Reason -> number of trajectories."""


def build_samples(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, max_response_tokens: int, advantage_fn: AdvantageFn
) -> BuiltSamples:
    """Flattens every trajectory that may be trained and gives each of its tokens the advantage of its answer.

    Failed trajectories (no usable reward) take no part at all. Truncated ones are peers in the advantage of their
    group and step, and with `mask_truncated` carry no loss themselves (DAPO, overlong filtering). Overlong shaping is
    added to the reward before advantages are taken.

    Args:
        groups: all of one optimizer step; some estimators normalise over them.

    Raises:
        ValueError: a trajectory breaks the contract: no prompt tokens, or a sampled token without a log-probability; or
            the estimator takes parts of the reward, and answers have none or different ones.
    """
    excluded: Counter[str] = Counter()
    judged = _judged_groups(groups, algorithm, excluded)
    rewards = [_group_rewards(trajectories, algorithm, max_response_tokens) for _, trajectories in judged]
    advantages = advantage_fn(rewards, config=algorithm)
    samples: list[TrainSample] = []
    for (group, trajectories), advantages_G in zip(judged, advantages, strict=True):
        for trajectory, advantage in zip(trajectories, advantages_G.tolist(), strict=True):
            reason = _reason_to_exclude(trajectory, algorithm)
            if reason:
                excluded[reason] += 1
            else:
                samples.append(_sample(trajectory, group.group_id, advantage))
    return BuiltSamples(samples=tuple(samples), excluded={k: n for k, n in sorted(excluded.items()) if n})


def _judged_groups(
    groups: Sequence[Group], algorithm: AlgorithmConfig, excluded: Counter[str]
) -> list[tuple[Group, list[Trajectory]]]:
    """The groups that have an advantage, with their judged trajectories; counts the others in `excluded`."""
    needs_peers = ESTIMATORS[algorithm.advantage].needs_peers
    found: list[tuple[Group, list[Trajectory]]] = []
    for group in groups:
        judged = [t for t in group.trajectories if t.status != "failed"]
        excluded[FAILED] += len(group.trajectories) - len(judged)
        if len(judged) == 1 and needs_peers:
            excluded[LONELY] += 1
        elif judged:
            found.append((group, judged))
    return found


def _group_rewards(
    trajectories: Sequence[Trajectory], algorithm: AlgorithmConfig, max_response_tokens: int
) -> GroupRewards:
    return GroupRewards(
        rewards_G=np.array([_shaped_reward(t, algorithm, max_response_tokens) for t in trajectories], np.float64),
        lengths_G=np.array([t.num_generated_tokens for t in trajectories], np.int64),
        parts_G=_parts(trajectories) if ESTIMATORS[algorithm.advantage].uses_parts else {},
    )


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    names = sorted(trajectories[0].reward_parts)
    for trajectory in trajectories:
        if sorted(trajectory.reward_parts) != names:
            raise ValueError(
                f"{_name(trajectory)} has the reward parts {sorted(trajectory.reward_parts)} and trajectory "
                f"{trajectories[0].sample_index} {names}; the reward function must return every part for every answer"
            )
    return {n: np.array([t.reward_parts[n] for t in trajectories], np.float64) for n in names}


def _shaped_reward(trajectory: Trajectory, algorithm: AlgorithmConfig, max_response_tokens: int) -> float:
    if algorithm.overlong_buffer_tokens == 0:
        return trajectory.reward
    return trajectory.reward + overlong_penalty(
        trajectory.num_generated_tokens,
        max_tokens=max_response_tokens,
        buffer_tokens=algorithm.overlong_buffer_tokens,
        penalty=algorithm.overlong_penalty,
    )


def _reason_to_exclude(trajectory: Trajectory, algorithm: AlgorithmConfig) -> str:
    if trajectory.num_generated_tokens == 0:
        return EMPTY
    if trajectory.status == "truncated" and algorithm.mask_truncated:
        return TRUNCATED
    return ""


def _sample(trajectory: Trajectory, group_id: int, advantage: float) -> TrainSample:
    turns = trajectory.turns
    loss_mask = _joined(turns, "is_generated")
    if loss_mask[0]:
        raise ValueError(
            f"{_name(trajectory)} begins with a generated token; the first turn must begin with the prompt's tokens"
        )
    logprobs = np.where(loss_mask, _joined(turns, "logprobs"), np.float32(0)).astype(np.float32, copy=False)
    if not np.isfinite(logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(
            f"{_name(trajectory)}: generated token {bad} has log-probability {logprobs[bad]}; it must be finite"
        )
    segments = [s for turn in turns for s in turn.segments]
    versions = np.full(len(loss_mask), -1, np.int32)
    versions[loss_mask] = np.repeat([s.version for s in segments], [s.num_tokens for s in segments])
    return TrainSample(
        token_ids=_joined(turns, "token_ids").astype(np.int32, copy=False),
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        advantages=loss_mask * np.float32(advantage),
        versions=versions,
        group_id=group_id,
        sample_index=trajectory.sample_index,
        reward=trajectory.reward,
    )


def _joined(turns: Sequence[Turn], name: str) -> np.ndarray:
    if len(turns) == 1:
        return getattr(turns[0], name)
    return np.concatenate([getattr(turn, name) for turn in turns])


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample_index} of prompt {trajectory.prompt_id!r}"
