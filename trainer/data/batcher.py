"""Builds the batch of one optimizer step, and the numbers that describe the groups it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from trainer.algorithms.advantages import step_advantages
from trainer.algorithms.aggregate import loss_weights
from trainer.algorithms.selection import lottery, select_tokens, token_covariances
from trainer.config.loss_keys import SELECTING_LOSSES
from trainer.data.batch import MicroBatch, StepRewards, TokenRewards, TrainBatch, TrainSample
from trainer.data.builder import build_samples
from trainer.data.packing import plan_micro_batches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Group, Trajectory
    from trainer.config.schema.algorithm import AlgorithmConfig

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
        unfinished = _token_rewards(own) if algorithm.finishes_on_ranks else None
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


def _token_rewards(samples: Sequence[TrainSample]) -> TokenRewards:
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
    rewards = [sum(turn.reward for turn in t.turns) for t in judged]
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
