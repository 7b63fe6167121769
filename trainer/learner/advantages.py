"""Advantages that need the learner: of a critic's values, of rewards less the KL to the reference, or less it at once.

Everything is taken over the whole step, by sums over ranks, before the first backward: the numbers do not depend on how
the step is split over ranks and micro-batches. Shape legend: `T` packed tokens, `N` judged answers of the step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from trainer.algorithms.advantages import step_advantages
from trainer.algorithms.losses.kl import kl_penalty
from trainer.algorithms.returns import reward_to_go
from trainer.algorithms.step_baselines import MIN_VARIANCE
from trainer.config.estimators import traits_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.config.schema.algorithm import AlgorithmConfig
    from trainer.config.schema.kl import KlConfig
    from trainer.data.batch import MicroBatch, StepRewards


def penalized_rewards(batch: MicroBatch, reference_T: np.ndarray | None, *, config: KlConfig) -> np.ndarray:
    """r_t - coef x KL_t, the KL of the policy that sampled to the reference (Ziegler et al. 2019, section 2; Ouyang et
    al. 2022, section 3.5).

    Args:
        reference_T: float32[T]; None without a KL in the reward.

    Returns:
        float64[T], 0 outside `loss_mask`.

    Raises:
        ValueError: the batch carries no rewards.
    """
    if batch.unfinished is None:
        raise ValueError("a micro-batch has no token rewards, but its advantages are not final; build it with them")
    rewards_T = batch.unfinished.rewards.astype(np.float64)
    if reference_T is None or not config.in_reward:
        return rewards_T
    return np.where(batch.loss_mask, rewards_T - config.coef * _sampled_kl(batch, reference_T, config=config), 0.0)


def penalized_advantages(batch: MicroBatch, reference_T: np.ndarray, *, config: KlConfig) -> np.ndarray:
    """A_t - coef x KL_t: what the estimator gives a token less its own KL, of the policy that sampled to the reference.
    No later token counts.

    With A of 0 and a ratio in the loss it is on-policy distillation (Lu et al. 2025, thinkingmachines.ai/blog/
    on-policy-distillation): d = log policy - log teacher as cost has the gradient of KL(policy || teacher) in the mean.

    Args:
        reference_T: float32[T].

    Returns:
        float32[T], 0 outside `loss_mask`.

    Example:
        A 0, coef 1, log policy -2 and log teacher -0.5 give 1.5: the teacher likes the token better.
    """
    less_T = batch.advantages - config.coef * _sampled_kl(batch, reference_T, config=config)
    return np.where(batch.loss_mask, less_T, 0.0).astype(np.float32)


def _sampled_kl(batch: MicroBatch, reference_T: np.ndarray, *, config: KlConfig) -> np.ndarray:
    """float64[T], of no meaning outside `loss_mask`."""
    sampled_T, ours_T = (torch.from_numpy(x.astype(np.float64)) for x in (batch.behaviour_logprobs, reference_T))
    return kl_penalty(sampled_T, ours_T, config.estimator).numpy()


def reward_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[np.ndarray],
    *,
    step_rewards: StepRewards,
    config: AlgorithmConfig,
    device: torch.device,
) -> list[np.ndarray]:
    """Without a critic: what the estimator makes of penalized rewards. Collective.

    An estimator of the reward-to-go sees the reward of every token; every other one the sum over the answer, as it
    sees the reward of the outcome otherwise.

    Args:
        rewards: float64[T] of every micro-batch, from `penalized_rewards`.

    Returns:
        float64[T] of every micro-batch, 0 outside `loss_mask`.
    """
    traits = traits_of(config)
    if not traits.reward_to_go:
        return _answer_advantages(batches, rewards, step_rewards=step_rewards, config=config, device=device)
    returns: list[np.ndarray] = []
    for batch, rewards_T in zip(batches, rewards, strict=True):
        returns_T = np.zeros(len(rewards_T))
        for start, stop in pairwise(batch.cu_seqlens.tolist()):
            returns_T[start:stop] = reward_to_go(rewards_T[start:stop], batch.loss_mask[start:stop])
        returns.append(returns_T)
    return normalized_over_ranks(returns, batches, device=device) if traits.spans_step else returns


def normalized_over_ranks(
    values: Sequence[np.ndarray], batches: Sequence[MicroBatch], *, device: torch.device
) -> list[np.ndarray]:
    """(a - mean) / sqrt(max(variance, 1e-8)) over all loss tokens of the step, with the biased variance. Collective.

    `step_baselines.normalized_over_tokens` for values that lie on different ranks.

    Args:
        values: float64[T] of every micro-batch.

    Returns:
        float64[T] of every micro-batch, 0 outside `loss_mask`.
    """
    own = np.concatenate([v[batch.loss_mask] for v, batch in zip(values, batches, strict=True)])
    count, total, square = _summed(np.array([own.size, own.sum(), (own**2).sum()]), device)
    mean = total / max(1.0, count)
    # Two sums in one pass: advantages lie near 0 and hold 16 digits, so the difference loses none that matter.
    scale = np.sqrt(max(square / max(1.0, count) - mean**2, MIN_VARIANCE))
    return [np.where(batch.loss_mask, (v - mean) / scale, 0.0) for v, batch in zip(values, batches, strict=True)]


def _answer_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[np.ndarray],
    *,
    step_rewards: StepRewards,
    config: AlgorithmConfig,
    device: torch.device,
) -> list[np.ndarray]:
    """Every rank knows the rewards of all answers and the penalties of its own; then all compute the same."""
    sizes = [group.rewards_G.size for group in step_rewards.groups]
    penalties_N = np.zeros(sum(sizes))
    for batch, rewards_T in zip(batches, rewards, strict=True):
        assert batch.unfinished is not None
        penalties_T = batch.unfinished.rewards - rewards_T
        for answer, (start, stop) in zip(batch.unfinished.answers, pairwise(batch.cu_seqlens.tolist()), strict=True):
            if answer >= 0:
                penalties_N[answer] += penalties_T[start:stop].sum()
    # An answer of one sequence is on one rank alone, the others add 0: the sum has the same bits on every split.
    split = np.split(_summed(penalties_N, device), np.cumsum(sizes)[:-1])
    groups = [
        replace(group, rewards_G=group.rewards_G - of_group)
        for group, of_group in zip(step_rewards.groups, split, strict=bool(sizes))
    ]
    advantages_N = np.concatenate([*step_advantages(groups, config=config), [0.0]])  # [-1]: of a filler
    found: list[np.ndarray] = []
    for batch in batches:
        assert batch.unfinished is not None
        per_token_T = np.repeat(advantages_N[batch.unfinished.answers], np.diff(batch.cu_seqlens))
        found.append(np.where(batch.loss_mask, per_token_T, 0.0))
    return found


def _summed(values: np.ndarray, device: torch.device) -> np.ndarray:
    """Over ranks."""
    packed = torch.from_numpy(values).to(device)
    dist.all_reduce(packed, op=dist.ReduceOp.SUM)
    return packed.cpu().numpy()
