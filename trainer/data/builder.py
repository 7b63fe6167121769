"""From groups of trajectories to samples with advantages: what is trained, and what is left out and why.

Shape legend: `T` tokens of one trajectory, its sequences end to end, `G` trajectories of a group, `K` stretches of one
trajectory: consecutive generated tokens with one advantage. With the reward-to-go every turn is a stretch, else the
whole trajectory is one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import TYPE_CHECKING

import numpy as np

from rollout.reward.length import overlong_penalty
from trainer.algorithms.advantages import AdvantageFn, GroupRewards
from trainer.algorithms.returns import reward_to_go, token_rewards
from trainer.config.estimators import traits_of
from trainer.data.batch import TrainSample

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.types import Group, Trajectory, Turn
    from trainer.config.schema.algorithm import AlgorithmConfig

FAILED, TRUNCATED, EMPTY, LONELY = "failed", "truncated", "no_generated_tokens", "no_peer_in_group"
"""Reasons for leaving a trajectory out. `truncated` only with `algorithm.mask_truncated`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltSamples:
    """The samples of some groups. Every trajectory is in `samples` or counted in `excluded`."""

    samples: tuple[TrainSample, ...]
    """One for each token sequence of a trajectory, next to each other."""
    excluded: Mapping[str, int]
    """Reason -> number of trajectories."""
    groups: tuple[GroupRewards, ...]
    """What the estimator saw. If the learner finishes the advantages, one entry per judged answer."""


def build_samples(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, max_response_tokens: int, advantage_fn: AdvantageFn
) -> BuiltSamples:
    """Flattens every trajectory that may be trained and gives each of its tokens the advantage of its stretch; then it
    is cut into its token sequences. Where it is cut changes no advantage.

    Failed trajectories (no usable reward) take no part at all. Truncated ones are peers in the advantage of their
    group and step, and with `mask_truncated` carry no loss themselves (DAPO, overlong filtering). Overlong shaping is
    added to the reward of the outcome before advantages are taken, that of a greedy baseline included. A baseline is
    never trained.

    Args:
        groups: all of one optimizer step; some estimators normalise over them.

    Raises:
        ValueError: a trajectory breaks the contract: no prompt tokens, or a sampled token without a log-probability; or
            the estimator takes parts of the reward, and answers have none or different ones.
    """
    excluded: Counter[str] = Counter()
    judged = _judged_groups(groups, algorithm, excluded)
    shape = partial(_shaped_reward, algorithm=algorithm, max_response_tokens=max_response_tokens)
    to_go = traits_of(algorithm).reward_to_go and not algorithm.finishes_on_ranks
    stretches = [[_stretches(t, shape(t), to_go=to_go) for t in trajectories] for _, trajectories in judged]
    rewards = [
        _group_rewards(group, trajectories, of_group, algorithm=algorithm, shape=shape)
        for (group, trajectories), of_group in zip(judged, stretches, strict=True)
    ]
    if algorithm.finishes_on_ranks:
        advantages = [np.zeros_like(group.rewards_G) for group in rewards]
    else:
        advantages = advantage_fn(rewards, config=algorithm)
    samples: list[TrainSample] = []
    answers = count()
    for (group, trajectories), of_group, advantages_G in zip(judged, stretches, advantages, strict=True):
        starts = np.cumsum([len(one.lengths_K) for one in of_group])[:-1]
        for trajectory, one, advantages_K in zip(trajectories, of_group, np.split(advantages_G, starts), strict=True):
            reason, answer = _reason_to_exclude(trajectory, algorithm), next(answers)
            if reason:
                excluded[reason] += 1
            else:
                sample = _sample(trajectory, group.group_id, answer=answer, outcome=shape(trajectory))
                sample.advantages[sample.loss_mask] = np.repeat(advantages_K, one.lengths_K)
                samples += _cut(sample, trajectory)
    return BuiltSamples(
        samples=tuple(samples),
        excluded={k: n for k, n in sorted(excluded.items()) if n},
        groups=tuple(rewards),
    )


def _judged_groups(
    groups: Sequence[Group], algorithm: AlgorithmConfig, excluded: Counter[str]
) -> list[tuple[Group, list[Trajectory]]]:
    """The groups that have an advantage, with their judged trajectories; counts the others in `excluded`."""
    needs_peers = traits_of(algorithm).needs_peers
    found: list[tuple[Group, list[Trajectory]]] = []
    for group in groups:
        judged = [t for t in group.trajectories if t.status != "failed"]
        excluded[FAILED] += len(group.trajectories) - len(judged)
        if len(judged) == 1 and needs_peers:
            excluded[LONELY] += 1
        elif judged:
            found.append((group, judged))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretches:
    rewards_K: np.ndarray
    """float64[K]: the reward that the stretch is judged by."""
    lengths_K: np.ndarray
    """int64[K]: generated tokens."""


def _stretches(trajectory: Trajectory, outcome: float, *, to_go: bool) -> _Stretches:
    """The stretches of a trajectory whose outcome is worth `outcome`: its turns with what is still to come (`to_go`),
    else one with the sum of all; at least one, of no token if there is none."""
    turns, num_generated = trajectory.turns, trajectory.num_generated_tokens
    if not to_go or num_generated == 0:
        total = outcome + sum(turn.reward for turn in turns)
        return _Stretches(rewards_K=np.array([total]), lengths_K=np.array([num_generated]))
    loss_mask_T, rewards_T = _joined(turns, "is_generated"), _token_rewards(turns, outcome)
    lengths = [int(np.sum(turn.is_generated)) for turn in turns]
    lengths_K = np.array([n for n in lengths if n], np.int64)
    # Nothing is rewarded between the tokens of a turn, so its first token stands for all of them.
    firsts_K = np.cumsum(lengths_K) - lengths_K
    return _Stretches(rewards_K=reward_to_go(rewards_T, loss_mask_T)[loss_mask_T][firsts_K], lengths_K=lengths_K)


def _token_rewards(turns: Sequence[Turn], outcome: float) -> np.ndarray:
    """float64[T]"""
    return token_rewards(
        _joined(turns, "is_generated"),
        turn_rewards_K=[turn.reward for turn in turns],
        turn_lengths_K=[len(turn.token_ids) for turn in turns],
        outcome=outcome,
    )


def _group_rewards(
    group: Group,
    trajectories: Sequence[Trajectory],
    stretches: Sequence[_Stretches],
    *,
    algorithm: AlgorithmConfig,
    shape: Callable[[Trajectory], float],
) -> GroupRewards:
    traits, baseline = traits_of(algorithm), None
    if traits.greedy_baseline and group.baseline is not None:
        baseline = shape(group.baseline) + sum(turn.reward for turn in group.baseline.turns)
    return GroupRewards(
        rewards_G=np.concatenate([one.rewards_K for one in stretches]),
        lengths_G=np.concatenate([one.lengths_K for one in stretches]),
        parts_G=_parts(trajectories) if traits.uses_parts else {},
        baseline=baseline,
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


def _sample(trajectory: Trajectory, group_id: int, *, answer: int, outcome: float) -> TrainSample:
    """All its sequences end to end, with advantages of 0, to be filled in."""
    turns = trajectory.turns
    loss_mask = _joined(turns, "is_generated")
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
        advantages=np.zeros(len(loss_mask), np.float32),
        versions=versions,
        rewards=_token_rewards(turns, outcome).astype(np.float32),
        answer=answer,
        group_id=group_id,
        sample_index=trajectory.sample_index,
        reward=trajectory.total_reward,
    )


def _cut(sample: TrainSample, trajectory: Trajectory) -> list[TrainSample]:
    """One sample per token sequence."""
    lengths = [sum(len(turn.token_ids) for turn in turns) for turns in trajectory.sequences]
    starts = np.cumsum([0, *lengths])
    if sample.loss_mask[starts[:-1]].any():
        raise ValueError(
            f"{_name(trajectory)} begins with a generated token; the first turn must begin with the prompt's tokens"
        )
    if len(lengths) == 1:
        return [sample]
    names = ("token_ids", "loss_mask", "behaviour_logprobs", "advantages", "versions", "rewards")
    return [
        replace(sample, **{name: getattr(sample, name)[start:stop] for name in names})
        for start, stop in pairwise(starts.tolist())
    ]


def _joined(turns: Sequence[Turn], name: str) -> np.ndarray:
    if len(turns) == 1:
        return getattr(turns[0], name)
    return np.concatenate([getattr(turn, name) for turn in turns])


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample_index} of prompt {trajectory.prompt_id!r}"
