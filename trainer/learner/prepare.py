"""What a step needs before its first gradient: log-probs of the reference, and final advantages over all ranks.

Shape legend: `T` packed tokens, `N` responses of the step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.algorithms.advantages import MIN_VARIANCE, reward_to_go, step_advantages
from trainer.algorithms.losses import kl_penalty
from trainer.config.algorithm import traits_of
from trainer.learner.critic import PreparedBatch, refuse_non_finite
from trainer.learner.lora import without_adapters
from trainer.learner.model import (
    BuiltPolicy,
    PolicyModel,
    meta_model,
    require_tokens,
    shard_and_load,
    vocab_size,
)
from trainer.learner.packed_inputs import scatter_to_tokens
from trainer.learner.step_stats import sum_over_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.algorithms.advantages import GroupRewards
    from trainer.config.algorithm import AlgorithmConfig, KlConfig
    from trainer.config.schema import RunConfig
    from trainer.data.batch import MicroBatch
    from trainer.learner.critic import Critic, ValueSums, ValueTargets
    from trainer.learner.parallel import ParallelContext
    from trainer.learner.step_stats import PhaseTimer


class Reference:
    """What the policy is held near. Never read from a checkpoint, so a resumed run has the one that it began with."""

    def __init__(self, built: BuiltPolicy, *, key: str) -> None:
        """`built` may be the policy itself if it has adapters: they are switched off for every call. `key` names the
        model in the configuration, for messages."""
        self._built, self._key = built, key

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self._built.policy.parameters())

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[np.ndarray]:
        """Log-probabilities of the loss tokens after temperature, among the policy's tokens: of every micro-batch
        float32[T], 0 outside `loss_mask`. Collective. Raises TrainingDiverged on all ranks if one is not finite."""
        with without_adapters(self._built.policy.hf):
            found = [scatter_to_tokens(self._built.no_grad_forward(batch).logprobs_L, batch) for batch in batches]
        what = (
            "log-probs of the reference (algorithm.kl) are not finite; its weights do not change in a run, so look at "
            f"those of {self._key}, and try model.compute_dtype=float32"
        )
        refuse_non_finite(found, what)
        return found


def build_reference(cfg: RunConfig, built: BuiltPolicy, context: ParallelContext) -> Reference | None:
    """The reference that `algorithm.kl` asks for; None while its coefficient is 0.

    With LoRA the first policy is the policy without its adapters. Otherwise it is a second model in the compute dtype,
    sharded likewise. Raises ModelError if its weights cannot be loaded, or it knows fewer tokens than the policy.
    """
    kl = cfg.algorithm.kl
    if kl.coef == 0:
        return None
    key = "model.path" if kl.reference_model is None else "algorithm.kl.reference_model"
    if cfg.model.lora.rank and kl.reference_model is None:
        return Reference(built, key=key)
    path = cfg.model.path if kl.reference_model is None else kl.reference_model
    meta = meta_model(path, cfg, dtype=cfg.model.compute_dtype)
    why = "it has to score whatever the policy may sample"
    require_tokens(f"algorithm.kl.reference_model {kl.reference_model!r}", meta.hf, built.policy.hf, why)
    for param in meta.hf.parameters():
        param.requires_grad_(False)
    # A teacher may be padded to more rows, which the policy does not have: both distributions are over the same tokens.
    model = PolicyModel(meta.hf, cfg, device=context.device, num_tokens=vocab_size(built.policy.hf))
    layout = shard_and_load(model, meta, cfg, context=context, cpu_offload=cfg.learner.reference_cpu_offload)
    return Reference(
        BuiltPolicy(
            policy=model, layout=layout, source_dir=meta.source_dir, device=context.device, group=context.group
        ),
        key=key,
    )


def prepare_step(
    micro_batches: Sequence[MicroBatch],
    group_rewards: Sequence[GroupRewards] | None,
    *,
    config: AlgorithmConfig,
    reference: Reference | None,
    critic: Critic | None,
    values: ValueSums,
    token_weight: float | None,
    trains_policy: bool,
    timer: PhaseTimer,
) -> list[PreparedBatch]:
    """Finish the advantages of a step, if they are not final; with a `token_weight` a separate critic keeps the
    gradients of its first update, over all of the step. Collective.

    Raises:
        TrainingDiverged: a log-prob of the reference or a value is not finite, on any rank; raised on all of them. A
            separate critic holds gradients then.
        ValueError: the advantages are not final, and the rewards of the groups or of the tokens are missing.
    """
    batches = list(micro_batches)
    references: list[np.ndarray | None] = [None] * len(batches)
    targets: list[ValueTargets] = []
    if reference is not None and (trains_policy or config.kl.in_reward):
        references = [*reference.logprobs(batches)]
        timer.mark("reference")
    if config.finishes_on_ranks:
        if group_rewards is None:
            raise ValueError("the advantages of this step are not final, and it came without rewards; pass them")
        rewards = [_rewards(b, r, config=config.kl) for b, r in zip(batches, references, strict=True)]
        if critic is None:
            advantages = reward_advantages(batches, rewards, group_rewards, config=config)
        else:
            targets = critic.targets(batches, rewards, values, token_weight=token_weight)
            advantages = [one.advantages_T for one in targets]
            if config.whiten_advantages:
                advantages = normalized_over_ranks(advantages, batches)
        batches = [
            replace(batch, advantages=advantages_T.astype(np.float32))
            for batch, advantages_T in zip(batches, advantages, strict=True)
        ]
        timer.mark("advantages" if critic is None else "critic")
    if config.kl.in_advantage:  # without references the critic alone is trained
        batches = [
            b if r is None else replace(b, advantages=less_kl(b.advantages, b, r, config=config.kl).astype(np.float32))
            for b, r in zip(batches, references, strict=True)
        ]
    known = targets or [None] * len(batches)
    return [PreparedBatch(*one) for one in zip(batches, references, known, strict=True)]


def _rewards(batch: MicroBatch, reference_T: np.ndarray | None, *, config: KlConfig) -> np.ndarray:
    if batch.token_rewards is None:
        raise ValueError("a micro-batch has no token rewards, but its advantages are not final; build it with them")
    rewards_T = batch.token_rewards.astype(np.float64)
    if reference_T is None or not config.in_reward:
        return rewards_T
    return less_kl(rewards_T, batch, reference_T, config=config)


def less_kl(values_T: np.ndarray, batch: MicroBatch, reference_T: np.ndarray, *, config: KlConfig) -> np.ndarray:
    """x_t - coef x KL_t, the KL of the policy that sampled to the reference, whose log-probs are float32[T].

    Of rewards, so that the advantages see it (Ziegler et al. 2019, section 2; Ouyang et al. 2022, section 3.5). Or of
    advantages, so that no later token counts: with A of 0 and a ratio in the loss that is on-policy distillation (Lu et
    al. 2025, thinkingmachines.ai/blog/on-policy-distillation), since d = log policy - log teacher as cost has the
    gradient of KL(policy || teacher) in the mean. Returns float64[T], 0 outside `loss_mask`.

    Example:
        x 0, coef 1, log policy -2 and log teacher -0.5 give 1.5: the teacher likes the token better.
    """
    sampled_T, ours_T = (torch.from_numpy(x.astype(np.float64)) for x in (batch.behavior_logprobs, reference_T))
    kl_T = kl_penalty(sampled_T, ours_T, config.estimator).numpy()
    return np.where(batch.loss_mask, values_T - config.coef * kl_T, 0.0)


def reward_advantages(
    batches: Sequence[MicroBatch],
    rewards: Sequence[np.ndarray],
    group_rewards: Sequence[GroupRewards],
    *,
    config: AlgorithmConfig,
) -> list[np.ndarray]:
    """Without a critic: what the estimator makes of penalized rewards. Collective.

    An estimator of the reward-to-go sees the reward of every token, every other one the sum over the response. Rewards
    and advantages are float64[T] of every micro-batch, 0 outside `loss_mask`.
    """
    traits = traits_of(config)
    if traits.reward_to_go:
        returns: list[np.ndarray] = []
        for batch, rewards_T in zip(batches, rewards, strict=True):
            returns_T = np.zeros(len(rewards_T))
            for start, stop in pairwise(batch.cu_seqlens.tolist()):
                returns_T[start:stop] = reward_to_go(rewards_T[start:stop], batch.loss_mask[start:stop])
            returns.append(returns_T)
        return normalized_over_ranks(returns, batches) if traits.spans_step else returns
    # Every rank knows the rewards of all responses, and the penalties of those it has; then all compute the same.
    sizes = [group.rewards_G.size for group in group_rewards]
    penalties_N = np.zeros(sum(sizes))
    for batch, rewards_T in zip(batches, rewards, strict=True):
        assert batch.token_rewards is not None and batch.response_index is not None
        if batch.is_copy:
            continue
        penalties_T = batch.token_rewards - rewards_T
        for response, (start, stop) in zip(batch.response_index, pairwise(batch.cu_seqlens.tolist()), strict=True):
            if response >= 0:
                penalties_N[response] += penalties_T[start:stop].sum()
    # A response of one sequence is on one rank alone, the others add 0: the sum has the same bits on every split.
    split = np.split(sum_over_ranks(penalties_N), np.cumsum(sizes)[:-1])
    groups = [
        replace(group, rewards_G=group.rewards_G - of_group)
        for group, of_group in zip(group_rewards, split, strict=bool(sizes))
    ]
    advantages_N = np.concatenate([*step_advantages(groups, config=config), [0.0]])  # [-1]: of an empty micro-batch
    return [
        np.where(batch.loss_mask, np.repeat(advantages_N[batch.response_index], np.diff(batch.cu_seqlens)), 0.0)
        for batch in batches
    ]


def normalized_over_ranks(values: Sequence[np.ndarray], batches: Sequence[MicroBatch]) -> list[np.ndarray]:
    """(a - mean) / sqrt(max(variance, 1e-8)) over all loss tokens of the step, with the biased variance. Collective.

    As `advantages.reinforce_pp`, for values on different ranks: float64[T] of every micro-batch in and out, 0 outside
    `loss_mask`.
    """
    counted = [v[batch.loss_mask] for v, batch in zip(values, batches, strict=True) if not batch.is_copy]
    own = np.concatenate([np.zeros(0), *counted])
    count, total, square = sum_over_ranks([own.size, own.sum(), (own**2).sum()])
    mean = total / max(1.0, count)
    # Two sums in one pass: advantages are near 0 and have 16 digits, so the difference loses none that matter.
    scale = np.sqrt(max(square / max(1.0, count) - mean**2, MIN_VARIANCE))
    return [np.where(batch.loss_mask, (v - mean) / scale, 0.0) for v, batch in zip(values, batches, strict=True)]
