"""From groups of trajectories to one training batch: rewards, advantages, loss weights, packing.

Shape legend: `T` tokens of a trajectory or sample, `K` credit spans of a trajectory, `G` responses or spans of a group.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from rollout.reward.builtin import overlong_penalty
from trainer.algorithms.advantages import GroupRewards, reward_to_go, step_advantages
from trainer.algorithms.token_weights import loss_weights, select_tokens, tie_break_draws, token_covariances
from trainer.config.algorithm import loss_traits, traits_of
from trainer.data.batch import MicroBatch, Sample, SharedPrompts, TrainBatch, balance_frac, plan_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.types import Group, Trajectory
    from trainer.config.algorithm import AlgorithmConfig


FAILED, TRUNCATED, EMPTY, SINGLE_SAMPLE = "failed", "truncated", "no_generated_tokens", "no_peer_in_group"
"""Reasons for leaving a trajectory out. `truncated` only with `algorithm.mask_truncated`."""

_NO_SAMPLE = Sample(
    token_ids=np.zeros(2, np.int32),
    loss_mask=np.zeros(2, np.bool_),
    behavior_logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
    versions=np.full(2, -1, np.int32),
    rewards=np.zeros(2, np.float32),
    num_loss_tokens=0,
    response_index=-1,
    group_id=-1,
    sample_index=-1,
)
"""What an empty micro-batch holds: the shortest sequence that still has a next token to predict."""


def build_train_batch(
    groups: Sequence[Group],
    *,
    step: int,
    algorithm: AlgorithmConfig,
    num_ranks: int,
    max_tokens_per_micro_batch: int,
    max_response_tokens: int,
    cost: Callable[[int, int], float] | None = None,
    share_prefix: bool | Literal["auto"] = False,
    num_mini_batches: int = 1,
    updates_per_batch: int = 1,
    seed: int = 0,
) -> TrainBatch:
    """Advantages, loss weights and micro-batches for one step, of all its groups. Raises as `build_samples`.

    Advantages, and the tokens that a loss selects, are those of the whole step. Loss weights come from the counts of
    the mini-batch, before that is split, so the loss does not depend on the number of ranks or micro-batches. A step
    whose every trajectory is left out has one empty micro-batch per rank.

    Args:
        max_response_tokens: limit of the rollouts; overlong shaping counts back from it.
        cost: what ranks and micro-batches are balanced by: (tokens, loss tokens) of a sample -> operations; None: its
            tokens.
        num_mini_batches: each has as many whole groups as the others, one more at most, drawn by `seed` and `step`;
            groups without a sample do not count, so there are fewer mini-batches where too few groups are left.
        updates_per_batch: how often every mini-batch is visited: in passes over all of them, each in an order of its
            own.
        share_prefix: whether prompts of a group are computed once for all of its samples in a micro-batch; "auto"
            decides by the first mini-batch.
    """
    samples, group_rewards, excluded = build_samples(
        groups, algorithm=algorithm, max_response_tokens=max_response_tokens
    )
    lengths = [s.num_tokens for s in samples]
    costs = [float(s.num_tokens) if cost is None else cost(s.num_tokens, s.num_loss_tokens) for s in samples]
    prompts, is_shared = _prompts(samples, cost), share_prefix
    norm = max_response_tokens if algorithm.loss_norm_tokens is None else algorithm.loss_norm_tokens
    selected = _selected(samples, step, algorithm)
    rng = np.random.default_rng((seed, step))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    weights: dict[int, float] = {}
    ranges: list[tuple[int, int]] = []
    for members in _mini_batches(samples, num_mini_batches, rng):
        chosen, start = [samples[i] for i in members], len(plan[0])
        weights |= zip(members, _weights(chosen, algorithm, norm), strict=True)
        of_ranks, is_shared = plan_shared(
            [s.num_tokens for s in chosen],
            costs=[costs[i] for i in members],
            prompts=prompts._replace(of_sample=[prompts.of_sample[i] for i in members]),
            share=is_shared,
            num_ranks=num_ranks,
            max_tokens=max_tokens_per_micro_batch,
        )
        for rank, micro_batches in zip(plan, of_ranks, strict=True):
            rank += [[members[i] for i in micro_batch] for micro_batch in micro_batches]
        ranges.append((start, len(plan[0])))
    updates = [ranges[i] for _ in range(updates_per_batch) for i in rng.permutation(len(ranges))]

    def prefix_lens(members: Sequence[int]) -> np.ndarray:
        used = [prompts.of_sample[i] for i in members]
        lens = [prompts.lengths[now] * (now == before) for before, now in pairwise([-1, *used])]
        return np.array(lens or [0], np.int32)

    def packed(members: Sequence[int]) -> MicroBatch:
        """Samples end to end."""
        parts = [samples[i] for i in members] or [_NO_SAMPLE]
        sizes, loss_mask = [s.num_tokens for s in parts], np.concatenate([s.loss_mask for s in parts])
        per_token = np.repeat([weights[i] for i in members] or [0.0], sizes)
        pending = algorithm.finishes_on_ranks
        rewards = [s.rewards for s in parts if s.rewards is not None] if pending else []
        return MicroBatch(
            cu_seqlens=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
            token_ids=np.concatenate([s.token_ids for s in parts]),
            loss_mask=loss_mask,
            behavior_logprobs=np.concatenate([s.behavior_logprobs for s in parts]),
            versions=np.concatenate([s.versions for s in parts]),
            advantages=np.concatenate([s.advantages for s in parts]),
            loss_weights=np.where(loss_mask, per_token, 0.0).astype(np.float32),
            cov_selected=None if selected is None else np.concatenate([selected[i] for i in members] or [loss_mask]),
            token_rewards=np.concatenate(rewards) if rewards else None,
            response_index=np.array([s.response_index for s in parts], np.int32) if pending else None,
            prefix_lens=prefix_lens(members) if is_shared else None,
        )

    micro_batches = tuple(tuple(packed(members) for members in rank) for rank in plan)
    shared = [one.prefix_lens for rank in micro_batches for one in rank if one.prefix_lens is not None]
    return TrainBatch(
        step=step,
        micro_batches=micro_batches,
        updates=tuple(updates),
        num_samples=len({s.response_index for s in samples}),
        num_sequences=len(samples),
        num_tokens=sum(lengths),
        num_loss_tokens=sum(s.num_loss_tokens for s in samples),
        group_rewards=group_rewards if algorithm.finishes_on_ranks else None,
        excluded=excluded,
        balance_frac=balance_frac(plan, costs, prompts if is_shared else None),
        num_shared_tokens=sum(int(lens.sum()) for lens in shared),
    )


def build_samples(
    groups: Sequence[Group], *, algorithm: AlgorithmConfig, max_response_tokens: int
) -> tuple[list[Sample], tuple[GroupRewards, ...], dict[str, int]]:
    """Flattens every trajectory that may be trained and gives each of its tokens the advantage of its credit span; then
    cuts it into its token sequences. Where it is cut changes no advantage.

    Failed trajectories (no usable reward) take no part at all. Truncated ones are peers in the advantage of their
    group and step, and with `mask_truncated` carry no loss themselves (DAPO, overlong filtering). Overlong shaping is
    added to the reward of the outcome before advantages are taken, that of a greedy baseline included. A baseline is
    never trained.

    Returns:
        (samples, those of one trajectory next to each other; what the estimator saw, with one entry per scored response
        if the learner finishes the advantages; reason -> number of trajectories that are in no sample).

    Raises:
        ValueError: a trajectory breaks the contract: no prompt tokens, or a sampled token without a log-probability; or
            the estimator takes parts of the reward, and no response of the step has any.
    """

    def outcome(trajectory: Trajectory, num_generated: int) -> float:
        return trajectory.reward + overlong_penalty(
            num_generated,
            max_tokens=max_response_tokens,
            buffer_tokens=algorithm.overlong_buffer_tokens,
            penalty=algorithm.overlong_penalty,
        )

    excluded: Counter[str] = Counter()
    traits = traits_of(algorithm)
    to_go = traits.reward_to_go and not algorithm.finishes_on_ranks
    scored: list[list[_Spans]] = []
    rewards: list[GroupRewards] = []
    group_ids: list[int] = []
    for group in groups:
        trajectories = [t for t in group.trajectories if t.status != "failed"]
        excluded[FAILED] += len(group.trajectories) - len(trajectories)
        if len(trajectories) == 1 and traits.needs_peers:
            excluded[SINGLE_SAMPLE] += 1
        elif trajectories:
            nums = [t.num_generated_tokens for t in trajectories]
            spans = [
                _credit_spans(t, outcome(t, num), num, to_go=to_go) for t, num in zip(trajectories, nums, strict=True)
            ]
            baseline = None
            if traits.greedy_baseline and (greedy := group.baseline) is not None:
                baseline = outcome(greedy, greedy.num_generated_tokens) + _turn_reward(greedy)
            rewards.append(
                GroupRewards(
                    rewards_G=np.concatenate([one.rewards_K for one in spans]),
                    lengths_G=np.concatenate([one.lengths_K for one in spans]),
                    parts_G=_parts(trajectories) if traits.uses_parts else {},
                    baseline=baseline,
                )
            )
            scored.append(spans)
            group_ids.append(group.group_id)
    if algorithm.finishes_on_ranks:
        advantages = [np.zeros_like(one.rewards_G) for one in rewards]
    else:
        advantages = step_advantages(rewards, config=algorithm)
    samples: list[Sample] = []
    indices = count()
    for group_id, spans, advantages_G in zip(group_ids, scored, advantages, strict=True):
        cuts = np.cumsum([len(one.lengths_K) for one in spans])[:-1]
        for one, advantages_K in zip(spans, np.split(advantages_G, cuts), strict=True):
            index = next(indices)
            if one.num_generated == 0:
                excluded[EMPTY] += 1
            elif one.trajectory.status == "truncated" and algorithm.mask_truncated:
                excluded[TRUNCATED] += 1
            else:
                samples += _samples(
                    one, advantages_K, group_id=group_id, response_index=index, is_final=not algorithm.finishes_on_ranks
                )
    return samples, tuple(rewards), {reason: n for reason, n in sorted(excluded.items()) if n}


class _Spans(NamedTuple):
    """Parts of a trajectory whose tokens share an advantage."""

    trajectory: Trajectory
    outcome: float
    num_generated: int
    rewards_K: np.ndarray
    """float64[K]"""
    lengths_K: np.ndarray
    """int64[K]: generated tokens."""


def _credit_spans(trajectory: Trajectory, outcome: float, num_generated: int, *, to_go: bool) -> _Spans:
    """Its turns, each with what is still to come (`to_go`), else one span with the sum of all; at least one, of no
    token if there is none."""
    if not to_go or num_generated == 0:
        rewards_K = np.array([outcome + _turn_reward(trajectory)])
        return _Spans(trajectory, outcome, num_generated, rewards_K, np.array([num_generated]))
    mask_T = trajectory.loss_mask
    lengths_K = np.array([n for turn in trajectory.turns() if (n := int(turn.is_generated.sum()))], np.int64)
    # Nothing is rewarded between the tokens of a turn, so its first token represents all of them.
    firsts_K = np.cumsum(lengths_K) - lengths_K
    rewards_K = reward_to_go(_token_rewards(trajectory, outcome), mask_T)[mask_T][firsts_K]
    return _Spans(trajectory, outcome, num_generated, rewards_K, lengths_K)


def _turn_reward(trajectory: Trajectory) -> float:
    return sum(trajectory.turn_rewards.tolist())


def _token_rewards(trajectory: Trajectory, outcome: float) -> np.ndarray:
    """Each turn's reward at its last generated token, and the outcome's at the last one of all: float64[T]."""
    rewards_T = np.zeros(len(trajectory.loss_mask))
    bounds = [*pairwise([0, *trajectory.turn_ends.tolist()]), (0, len(rewards_T))]
    for (start, stop), reward in zip(bounds, [*trajectory.turn_rewards.tolist(), outcome], strict=True):
        generated = np.flatnonzero(trajectory.loss_mask[start:stop])
        if generated.size:
            rewards_T[start + generated[-1]] += reward
    return rewards_T


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Of every response; 0 where it lacks one that another has: it did not earn that part."""
    names = sorted({name for trajectory in trajectories for name in trajectory.reward_parts})
    return {n: np.array([t.reward_parts.get(n, 0.0) for t in trajectories], np.float64) for n in names}


def _samples(
    spans: _Spans, advantages_K: np.ndarray, *, group_id: int, response_index: int, is_final: bool
) -> list[Sample]:
    """One per token sequence, with rewards unless the advantages are final."""
    trajectory, sequences = spans.trajectory, spans.trajectory.sequences()
    loss_mask, logprobs = trajectory.loss_mask, trajectory.logprobs
    if not np.isfinite(logprobs).all():
        bad = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        raise ValueError(
            f"{_name(trajectory)}: generated token {bad} has log-probability {logprobs[bad]}; it must be finite"
        )
    if any(loss_mask[sequence.start] for sequence in sequences):
        raise ValueError(
            f"{_name(trajectory)} begins with a generated token; the first turn must begin with the prompt's tokens"
        )
    per_token = np.zeros(len(loss_mask), np.float32)
    per_token[loss_mask] = np.repeat(advantages_K, spans.lengths_K)
    rewards_T = None if is_final else _token_rewards(trajectory, spans.outcome).astype(np.float32)
    return [
        Sample(
            token_ids=trajectory.token_ids[sequence],
            loss_mask=loss_mask[sequence],
            behavior_logprobs=logprobs[sequence],
            advantages=per_token[sequence],
            versions=trajectory.versions[sequence],
            rewards=None if rewards_T is None else rewards_T[sequence],
            num_loss_tokens=spans.num_generated if len(sequences) == 1 else int(np.count_nonzero(loss_mask[sequence])),
            response_index=response_index,
            group_id=group_id,
            sample_index=trajectory.sample_index,
        )
        for sequence in sequences
    ]


def _name(trajectory: Trajectory) -> str:
    return f"trajectory {trajectory.sample_index} of prompt {trajectory.prompt_id!r}"


def _prompts(samples: Sequence[Sample], cost: Callable[[int, int], float] | None) -> SharedPrompts:
    """What samples of one group have before their first generated token."""
    found: dict[tuple[int, bytes], int] = {}
    of_sample, lengths = [], []
    for sample in samples:
        length = int(np.argmax(sample.loss_mask))  # 0 without a loss token
        key = sample.group_id, sample.token_ids[:length].tobytes()
        if key not in found:
            found[key] = len(lengths)
            lengths.append(length)
        of_sample.append(found[key])
    return SharedPrompts(of_sample, lengths, [float(n) if cost is None else cost(n, 0) for n in lengths])


def _mini_batches(samples: Sequence[Sample], number: int, rng: np.random.Generator) -> list[list[int]]:
    """Indices of the samples of each mini-batch, ascending; one without any if there are none."""
    groups = [list(indices) for _, indices in groupby(range(len(samples)), key=lambda i: samples[i].group_id)]
    parts = np.array_split(rng.permutation(len(groups)), max(1, min(number, len(groups))))
    return [sorted(i for group in part.tolist() for i in groups[group]) for part in parts]


def _weights(samples: Sequence[Sample], algorithm: AlgorithmConfig, norm_tokens: int) -> list[float]:
    """Of every sample; a response counts once, by its tokens, however many sequences it consists of."""
    responses, of_response = np.unique(np.array([s.response_index for s in samples], np.int64), return_inverse=True)
    num_loss_tokens = np.bincount(of_response, [s.num_loss_tokens for s in samples], minlength=len(responses))
    return loss_weights(num_loss_tokens, algorithm.loss_aggregation, norm_tokens=norm_tokens)[of_response].tolist()


def _selected(samples: Sequence[Sample], step: int, algorithm: AlgorithmConfig) -> list[np.ndarray] | None:
    """bool[T] per sample: the tokens that a loss with a covariance treats differently; None with another loss."""
    keys = loss_traits(algorithm.loss).selects
    if not keys:
        return None
    if not samples:
        return []
    masks = [s.loss_mask for s in samples]
    draws = [
        tie_break_draws(sum(s.num_loss_tokens for s in parts), step=step, group_id=group_id, sample_index=sample_index)
        for (group_id, sample_index), parts in groupby(samples, key=lambda s: (s.group_id, s.sample_index))
    ]
    covariances = token_covariances(
        np.concatenate([s.behavior_logprobs[s.loss_mask] for s in samples]),
        np.concatenate([s.advantages[s.loss_mask] for s in samples]),
    )
    selected = np.zeros(sum(map(len, masks)), np.bool_)
    selected[np.concatenate(masks)] = select_tokens(
        covariances, np.concatenate(draws), **{key: getattr(algorithm, key) for key in keys}
    )
    return np.split(selected, np.cumsum([len(m) for m in masks])[:-1])
