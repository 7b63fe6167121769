"""Combinations of the critic, GAE and the KL to the reference that cannot work, or would silently do nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.config.algorithm import SELECTING_LOSSES
from trainer.config.conflicts import conflict, ineffective
from trainer.config.keys import all_keys
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.algorithm import EstimatorTraits
    from trainer.config.schema import RunConfig
    from trainer.errors import Problem

GAE_KEYS = ("algorithm.gae_gamma", "algorithm.gae_lambda", "algorithm.whiten_advantages")
OWN_BACKBONE_KEYS = ("path", "lr", "weight_decay", "max_grad_norm", "warmup_steps", "updates_per_step", "cpu_offload")


def critic_problems(config: RunConfig) -> Iterator[Problem]:
    """Of the section `critic`, and of the keys of GAE."""
    critic = config.critic
    if not config.algorithm.uses_critic:
        why = f"algorithm.advantage={config.algorithm.advantage} has no critic"
        keys = [key for key in all_keys() if key.startswith("critic.")]
        for key in (*GAE_KEYS, *keys):
            yield from ineffective(config, key, why, "algorithm.advantage")
        return
    if critic.shared_backbone:
        why = "critic.shared_backbone=true trains the value head with the policy's optimizer, one update per step"
        for name in OWN_BACKBONE_KEYS:
            yield from ineffective(config, f"critic.{name}", why, "critic.shared_backbone")
    else:
        why = "a critic with its own backbone has its own optimizer"
        yield from ineffective(config, "critic.value_coef", why, "critic.shared_backbone")
    if critic.updates_per_step == 1:
        why = "the first update of a step starts from the values that it is clipped around"
        yield from ineffective(config, "critic.value_clip", why, "critic.updates_per_step")
    if critic.warmup_steps >= config.trainer.total_steps:
        allowed = f"must be below trainer.total_steps={config.trainer.total_steps}"
        yield conflict(config, "critic.warmup_steps", allowed, "the policy is never trained", "trainer.total_steps")
    yield from _selecting_loss(config, "algorithm.advantage")


def kl_problems(config: RunConfig) -> Iterator[Problem]:
    """Of the section `algorithm.kl`, but for what depends on the estimator's traits."""
    kl, prefix = config.algorithm.kl, "algorithm.kl"
    if kl.coef == 0:
        keys = *(f"{prefix}.{name}" for name in ("path", "placement", "estimator")), "learner.reference_cpu_offload"
        for key in keys:
            yield from ineffective(config, key, f"{prefix}.coef=0 keeps no reference", f"{prefix}.coef")
        return
    if config.model.lora.rank and kl.path is None:
        why = "with LoRA the reference is the policy without its adapters"
        yield from ineffective(config, "learner.reference_cpu_offload", why, "model.lora.rank")
    if kl.in_loss and kl.estimator == "k1":
        allowed = f"has a gradient without meaning with {prefix}.placement=loss: its expectation is 0 everywhere"
        do = "use k1_straight_through or k2, whose gradient is that of the KL"
        yield conflict(config, f"{prefix}.estimator", allowed, do, f"{prefix}.placement")
    if kl.in_reward and kl.estimator.endswith("straight_through"):
        allowed = f"differs in its gradient alone, and with {prefix}.placement=reward only the value is read"
        do = f"use {kl.estimator.removesuffix('_straight_through')}"
        yield conflict(config, f"{prefix}.estimator", allowed, do, f"{prefix}.placement")
    if kl.in_advantage and kl.estimator != "k1":
        allowed = f"must be k1 with {prefix}.placement=advantage: only its mean gradient is that of the KL there"
        yield conflict(config, f"{prefix}.estimator", allowed, f"use {prefix}.estimator=k1", f"{prefix}.placement")
    if (kl.in_reward or kl.in_advantage) and not config.algorithm.uses_critic:
        yield from _selecting_loss(config, f"{prefix}.placement")


def zero_problems(config: RunConfig) -> Iterator[Problem]:
    """The estimator that gives 0 leaves all teaching to the KL to a teacher."""
    algorithm, kl, chosen = config.algorithm, config.algorithm.kl, "algorithm.advantage"
    if algorithm.advantage != "zero":
        return
    if kl.coef == 0 or kl.path is None:
        allowed = "gives every token 0, so that only a teacher teaches, and there is none"
        do = "set algorithm.kl.path (and algorithm.kl.coef above 0), or use another estimator"
        yield conflict(config, chosen, allowed, do, "algorithm.kl.path", "algorithm.kl.coef")
    elif kl.in_reward:
        allowed = f"cannot be reward: {chosen}=zero reads no reward, so nothing would be learned"
        yield conflict(config, "algorithm.kl.placement", allowed, "use advantage or loss", chosen)
    why = f"{chosen}=zero reads no reward"
    yield from ineffective(config, "algorithm.overlong_buffer_tokens", why, chosen)


def kl_reward_problems(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Estimators of these traits that have no meaning on rewards less the KL."""
    algorithm, key = config.algorithm, "algorithm.kl.placement"
    if algorithm.filter_zero_variance and (algorithm.kl.in_reward or algorithm.kl.in_advantage):
        allowed = "looks at rewards without their KL: groups of equal rewards still differ in it"
        yield conflict(config, "algorithm.filter_zero_variance", allowed, "use false", key)
    if not algorithm.kl.in_reward:
        return
    chosen, do = f"algorithm.advantage={algorithm.advantage}", "use loss, or another estimator"
    if traits.uses_parts:
        allowed = f"cannot be reward: {chosen} takes the parts of the reward, the KL moves their total"
        yield conflict(config, key, allowed, do, "algorithm.advantage")
    if is_own(algorithm.advantage) and traits.reward_to_go:
        allowed = f"cannot be reward: {chosen} declares reward_to_go, and on the learner nothing would call it"
        yield conflict(config, key, allowed, do, "algorithm.advantage")
    if algorithm.advantage == "gpg":
        allowed = "cannot be reward: gpg counts answers that teach nothing, and with the KL every answer differs"
        yield conflict(config, key, allowed, do, "algorithm.advantage")
    if algorithm.mask_truncated and (traits.needs_peers or traits.spans_step):
        allowed = f"takes truncated answers out before their KL is known, and {chosen} compares with them"
        also = key, "algorithm.advantage"
        yield conflict(config, "algorithm.mask_truncated", allowed, "use false, or the KL in the loss", *also)


def _selecting_loss(config: RunConfig, also: str) -> Iterator[Problem]:
    if config.algorithm.loss in SELECTING_LOSSES:
        allowed = "chooses tokens by their advantages before the step is split, and these are finished on the learner"
        yield conflict(config, "algorithm.loss", allowed, "use ppo_clip", also)
