"""From groups of trajectories to one training batch: rewards, advantages, loss weights, packing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from typing import TYPE_CHECKING

import numpy as np

from rollout.reward.builtin import overlong_penalty
from trainer.algorithms.advantages import AdvantageFn, GroupRewards, reward_to_go, step_advantages, token_rewards
from trainer.algorithms.token_weights import loss_weights, lottery, select_tokens, token_covariances
from trainer.config.algorithm import SELECTING_LOSSES, traits_of
from trainer.data.batch import MicroBatch, StepRewards, TokenRewards, TrainBatch, TrainSample, plan_micro_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollout.types import Group, Trajectory
    from trainer.config.algorithm import AlgorithmConfig


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
    num_generated = trajectory.num_generated_tokens
    if not to_go or num_generated == 0:
        total = outcome + sum(trajectory.turn_rewards.tolist())
        return _Stretches(rewards_K=np.array([total]), lengths_K=np.array([num_generated]))
    loss_mask_T, rewards_T = trajectory.loss_mask, _token_rewards(trajectory, outcome)
    lengths = [int(np.sum(turn.is_generated)) for turn in trajectory.turns()]
    lengths_K = np.array([n for n in lengths if n], np.int64)
    # Nothing is rewarded between the tokens of a turn, so its first token stands for all of them.
    firsts_K = np.cumsum(lengths_K) - lengths_K
    return _Stretches(rewards_K=reward_to_go(rewards_T, loss_mask_T)[loss_mask_T][firsts_K], lengths_K=lengths_K)


def _token_rewards(trajectory: Trajectory, outcome: float) -> np.ndarray:
    """float64[T]"""
    return token_rewards(
        trajectory.loss_mask,
        turn_rewards_K=trajectory.turn_rewards.tolist(),
        turn_lengths_K=np.diff(trajectory.turn_ends, prepend=0).tolist(),
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
        baseline = shape(group.baseline) + sum(group.baseline.turn_rewards.tolist())
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
    loss_mask, logprobs = trajectory.loss_mask, trajectory.logprobs
    if not np.isfinite(logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(
            f"{_name(trajectory)}: generated token {bad} has log-probability {logprobs[bad]}; it must be finite"
        )
    return TrainSample(
        token_ids=trajectory.token_ids,
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        advantages=np.zeros(len(loss_mask), np.float32),
        versions=trajectory.versions,
        rewards=_token_rewards(trajectory, outcome).astype(np.float32),
        answer=answer,
        group_id=group_id,
        sample_index=trajectory.sample_index,
        reward=trajectory.total_reward,
    )


def _cut(sample: TrainSample, trajectory: Trajectory) -> list[TrainSample]:
    """One sample per token sequence."""
    sequences = trajectory.sequences()
    if any(sample.loss_mask[sequence][0] for sequence in sequences):
        raise ValueError(
            f"{_name(trajectory)} begins with a generated token; the first turn must begin with the prompt's tokens"
        )
    if len(sequences) == 1:
        return [sample]
    names = ("token_ids", "loss_mask", "behaviour_logprobs", "advantages", "versions", "rewards")
    return [replace(sample, **{name: getattr(sample, name)[sequence] for name in names}) for sequence in sequences]


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample_index} of prompt {trajectory.prompt_id!r}"


_FILLER_TOKENS = 2
"""A filler's only sequence: the shortest that still has a next token to predict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The sizes a batch is cut to."""

    num_ranks: int
    max_tokens_per_micro_batch: int
    max_response_tokens: int
    """Response limit of the rollouts; overlong shaping counts back from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltBatch:
    """A batch, and how many trajectories are not in it, by reason."""

    batch: TrainBatch
    excluded: Mapping[str, int]
    num_sequences: int
    """Of tokens, at least one per answer."""
    num_fillers: int
    """Micro-batches without a sample, over all ranks."""
    packing_frac: float
    """Tokens of an average rank over those of the fullest: 1 is perfect balance."""


def build_train_batch(
    groups: Sequence[Group], *, step: int, algorithm: AlgorithmConfig, limits: BatchLimits
) -> BuiltBatch:
    """Advantages, loss weights and micro-batches for one optimizer step.

    Loss weights come from the counts of the whole step, before anything is split, so the loss does not depend on the
    number of ranks or micro-batches. A step whose every trajectory is left out has one filler per rank and no loss.
    """
    built = build_samples(
        groups,
        algorithm=algorithm,
        max_response_tokens=limits.max_response_tokens,
        advantage_fn=step_advantages,
    )
    samples = built.samples
    lengths = [s.num_tokens for s in samples]
    num_loss_tokens = [s.num_loss_tokens for s in samples]
    weights = _weights(samples, algorithm, limits.max_response_tokens)
    selected = _selections(samples, step, algorithm)
    plan = plan_micro_batches(lengths, num_ranks=limits.num_ranks, max_tokens=limits.max_tokens_per_micro_batch)
    rank_tokens = [sum(lengths[i] for members in rank for i in members) for rank in plan]

    def packed(members: Sequence[int]) -> MicroBatch:
        held_back = None if selected is None else [selected[i] for i in members]
        own = [samples[i] for i in members]
        unfinished = _pending_rewards(own) if algorithm.finishes_on_ranks else None
        return replace(_pack(own, [weights[i] for i in members], held_back), unfinished=unfinished)

    rewards = StepRewards(groups=built.groups, num_loss_tokens=sum(num_loss_tokens))
    batch = TrainBatch(
        step=step,
        micro_batches=tuple(tuple(packed(members) for members in rank) for rank in plan),
        num_samples=len({s.answer for s in samples}),
        num_tokens=sum(lengths),
        num_loss_tokens=sum(num_loss_tokens),
        rewards=rewards if algorithm.finishes_on_ranks else None,
    )
    return BuiltBatch(
        batch=batch,
        excluded=built.excluded,
        num_sequences=len(samples),
        num_fillers=sum(not members for rank in plan for members in rank),
        packing_frac=sum(lengths) / (len(plan) * max(rank_tokens)) if samples else 1.0,
    )


def _weights(samples: Sequence[TrainSample], algorithm: AlgorithmConfig, max_response_tokens: int) -> list[float]:
    """Of every sample; an answer counts once, by its tokens, however many sequences it consists of."""
    norm = algorithm.aggregation_norm_tokens
    answers, of_answer = np.unique(np.array([s.answer for s in samples], np.int64), return_inverse=True)
    num_loss_tokens = np.bincount(of_answer, [s.num_loss_tokens for s in samples], minlength=len(answers))
    weights = loss_weights(
        num_loss_tokens, algorithm.aggregation, norm_tokens=max_response_tokens if norm is None else norm
    )
    return weights[of_answer].tolist()


def _selections(samples: Sequence[TrainSample], step: int, algorithm: AlgorithmConfig) -> list[np.ndarray] | None:
    """bool[T] per sample: its tokens that the loss holds back; None with a loss that holds none back."""
    if algorithm.loss not in SELECTING_LOSSES:
        return None
    masks = [s.loss_mask for s in samples]
    if not masks:
        return []
    tickets = [
        lottery(sum(s.num_loss_tokens for s in parts), step=step, group_id=group_id, sample_index=sample_index)
        for (group_id, sample_index), parts in groupby(samples, key=lambda s: (s.group_id, s.sample_index))
    ]
    covariances = token_covariances(
        np.concatenate([s.behaviour_logprobs[s.loss_mask] for s in samples]),
        np.concatenate([s.advantages[s.loss_mask] for s in samples]),
    )
    selected = np.zeros(sum(map(len, masks)), np.bool_)
    selected[np.concatenate(masks)] = select_tokens(covariances, np.concatenate(tickets), config=algorithm)
    return np.split(selected, np.cumsum([len(m) for m in masks])[:-1])


def _pack(
    samples: Sequence[TrainSample], weights: Sequence[float], selected: Sequence[np.ndarray] | None
) -> MicroBatch:
    """Samples end to end; a filler if there are none."""
    if not samples:
        return _filler(selects=selected is not None)
    lengths = [s.num_tokens for s in samples]
    loss_mask = np.concatenate([s.loss_mask for s in samples])
    return MicroBatch(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        token_ids=np.concatenate([s.token_ids for s in samples]),
        loss_mask=loss_mask,
        behaviour_logprobs=np.concatenate([s.behaviour_logprobs for s in samples]),
        versions=np.concatenate([s.versions for s in samples]),
        advantages=np.concatenate([s.advantages for s in samples]),
        loss_weights=np.where(loss_mask, np.repeat(weights, lengths), 0.0).astype(np.float32),
        cov_selected=None if selected is None else np.concatenate(selected),
    )


def _pending_rewards(samples: Sequence[TrainSample]) -> TokenRewards:
    """Of the same samples as `_pack`; of a filler if there are none."""
    if not samples:
        return TokenRewards(rewards=np.zeros(_FILLER_TOKENS, np.float32), answers=np.array([-1], np.int32))
    return TokenRewards(
        rewards=np.concatenate([s.rewards for s in samples]), answers=np.array([s.answer for s in samples], np.int32)
    )


def _filler(*, selects: bool) -> MicroBatch:
    return MicroBatch(
        cu_seqlens=np.array([0, _FILLER_TOKENS], np.int32),
        token_ids=np.zeros(_FILLER_TOKENS, np.int32),
        loss_mask=np.zeros(_FILLER_TOKENS, np.bool_),
        behaviour_logprobs=np.zeros(_FILLER_TOKENS, np.float32),
        versions=np.full(_FILLER_TOKENS, -1, np.int32),
        advantages=np.zeros(_FILLER_TOKENS, np.float32),
        loss_weights=np.zeros(_FILLER_TOKENS, np.float32),
        cov_selected=np.zeros(_FILLER_TOKENS, np.bool_) if selects else None,
    )


def batch_stats(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Metrics of the groups of one step, before anything is left out of training.

    Rewards are the raw ones (before overlong shaping) of the trajectories that have one, outcome and turns together.
    Greedy baselines count in `reward/greedy_mean` alone. The staleness of a group is `step` minus its start version,
    in policy versions. Keys whose value would be undefined (no judged trajectory) are absent.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    if not trajectories:
        return {}
    judged = [t for t in trajectories if t.status != "failed"]
    lengths = np.array([t.num_generated_tokens for t in trajectories], np.float64)
    group_ages = np.array([step - g.start_version for g in groups], np.float64)
    stats = {
        "response/tokens_mean": float(lengths.mean()),
        "response/tokens_max": float(lengths.max()),
        "response/truncated_frac": sum(t.status == "truncated" for t in trajectories) / len(trajectories),
        "staleness/group_mean": float(group_ages.mean()),
        "staleness/group_max": float(group_ages.max()),
        "reward/zero_variance_frac": sum(g.has_equal_rewards for g in groups) / len(groups),
    }
    stats |= _agent_stats(trajectories)
    if judged:
        rewards = np.array([t.total_reward for t in judged], np.float64)
        stats |= {"reward/mean": float(rewards.mean()), "reward/std": float(rewards.std())}
        for name in sorted({name for t in judged for name in t.reward_parts}):
            parts = [t.reward_parts[name] for t in judged if name in t.reward_parts]
            stats[f"reward/part/{name}"] = float(np.mean(parts))
        stats |= _turn_rewards(judged)
    if baselines := [g.baseline.total_reward for g in groups if g.baseline is not None]:
        stats["reward/greedy_mean"] = float(np.mean(baselines))
    return stats


def _turn_rewards(judged: Sequence[Trajectory]) -> dict[str, float]:
    """Absent where no environment rewarded a turn."""
    rewards = [sum(t.turn_rewards.tolist()) for t in judged]
    return {"reward/turns_mean": float(np.mean(rewards))} if any(rewards) else {}


def _agent_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and calls of tools. Absent where every answer is one turn and nobody counts calls. An answer whose agent
    failed has neither, and does not count."""
    turns = [t.num_generated_turns for t in trajectories if t.num_generated_turns]
    used = [t.tool_use for t in trajectories if t.tool_use is not None]
    stats: dict[str, float] = {}
    if turns and (used or max(turns) > 1):
        stats["agent/turns_mean"] = float(np.mean(turns))
    if used:
        stats["agent/tool_calls_mean"] = float(np.mean([one.num_calls for one in used]))
        stats["agent/tool_errors"] = float(sum(one.num_errors for one in used))
    return stats
