"""The effective objective and rollout of a run in a few words: only what is in force."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from trainer.config.algorithm import DEFAULT_LR_RATIO, OBJECTIVES, is_own, loss_traits, traits_of
from trainer.config.field import value_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainer.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, EstimatorTraits
    from trainer.config.schema import LearnerConfig, RolloutConfig, RunConfig


def describe_run(config: RunConfig) -> list[str]:
    """What is in force, a line each."""
    learner, algorithm = config.learner, config.algorithm
    lines = [f"objective: {describe_objective(algorithm)}"]
    if learner.num_updates > 1:
        passes, mini_batches = learner.updates_per_batch, learner.num_mini_batches
        how = f"{passes} pass(es) over {mini_batches} mini-batch(es)"
        lines.append(f"updates: {learner.num_updates} per batch, {how}")
    if algorithm.uses_critic:
        lines.append(f"critic: {_critic(config.critic, policy_lr=learner.lr)}")
    lines.append(f"rollout: {describe_rollout(config)}")
    if layout := _layout(learner):
        lines.append(f"learner: {layout}")
    return lines


def describe_objective(algorithm: AlgorithmConfig) -> str:
    """One line: estimator, loss with its numbers, aggregation, correction, and what happens to samples.

    Example: `grpo / std -> gspo(clip_ratio_low=0.2, clip_ratio_high=0.28) -> token_mean; engine's log-probs as old
    policy`.
    """
    traits, kl = traits_of(algorithm), algorithm.kl
    estimator = _estimator(algorithm, traits)
    loss = f"{algorithm.loss}({_values(algorithm, loss_traits(algorithm.loss).keys)})"
    if is_own(algorithm.loss):
        loss = f"own {algorithm.loss}({_numbers(algorithm.loss_args)})"
    reference = "the initial policy" if kl.reference_model is None else kl.reference_model
    penalty = f"{value_text(kl.coef)} x KL to {reference} ({kl.estimator})"
    if kl.in_reward:
        estimator += f" of reward - {penalty}"
    if kl.in_advantage:
        estimator += f" - {penalty} of the token"
    if kl.in_loss:
        loss += f" + {penalty}"
    if algorithm.entropy_coef > 0:
        loss += f" - {value_text(algorithm.entropy_coef)} x entropy"
    aggregation = algorithm.loss_aggregation
    if aggregation == "seq_mean_token_sum_norm":
        tokens = algorithm.loss_norm_tokens
        aggregation += f"({'rollout.max_response_tokens' if tokens is None else tokens})"
    parts = [f"{estimator} -> {loss} -> {aggregation}", _correction(algorithm.correction)]
    if algorithm.dynamic_sampling:
        equal = "rewards equal to the greedy one" if traits.greedy_baseline else "equal rewards"
        parts.append(f"groups of {equal} are filtered and replaced")
    if algorithm.group_filter:
        parts.append(f"own {algorithm.group_filter}({_numbers(algorithm.group_filter_args)}) filters groups")
    if algorithm.overlong_buffer_tokens:
        penalty = f"overlong penalty of up to {value_text(algorithm.overlong_penalty)}"
        parts.append(f"{penalty} over the last {algorithm.overlong_buffer_tokens} tokens")
    if algorithm.mask_truncated:
        parts.append("truncated responses carry no loss")
    return "; ".join(parts)


def _estimator(algorithm: AlgorithmConfig, traits: EstimatorTraits) -> str:
    """Its name and the keys that it reads; of the user's own also its declared traits, since other code uses them."""
    name = algorithm.advantage_estimator
    if is_own(name):
        declared = [trait.name for trait in fields(traits) if getattr(traits, trait.name) is True]
        return f"own {name}({_numbers(algorithm.advantage_args)}) [{', '.join(declared) if declared else 'no trait'}]"
    if traits.keys == ("normalize_by_std",):
        return f"{name} / std" if algorithm.normalize_by_std else f"{name} without std"
    if traits.greedy_baseline:
        return f"{name} (an extra greedy response per group)"
    whitened = ", whitened" if algorithm.whiten_advantages else ""
    details = {
        "gdpo": f"({_numbers(algorithm.gdpo_weights) or 'every part once'})",
        "gae": f"({_values(algorithm, ['gae_gamma', 'gae_lambda'])}){whitened}",
    }
    return name + details.get(name, f"({_values(algorithm, traits.keys)})" if traits.keys else "")


def _critic(critic: CriticConfig, *, policy_lr: float) -> str:
    """What computes the values, and how it learns. Example: `own backbone, lr 1e-05, 1 update(s) per step`"""
    if critic.shared_backbone:
        return f"value head on the policy's backbone, + {value_text(critic.value_coef)} x value loss"
    lr = DEFAULT_LR_RATIO * policy_lr if critic.lr is None else critic.lr
    text = f"own backbone, lr {value_text(lr)}, {critic.updates_per_step} update(s) per step"
    if critic.value_clip is not None:
        text += f", values clipped at {value_text(critic.value_clip)}"
    return text + (f", alone for {critic.warmup_steps} steps" if critic.warmup_steps else "")


def _layout(learner: LearnerConfig) -> str:
    """How ranks divide model and micro-batches; empty where each has a shard of the one and micro-batches of its own.

    Example: `8 ranks: 2 replicas of 4 shards, 2 ranks per micro-batch`.
    """
    parts: list[str] = []
    if learner.num_shards < learner.num_ranks:
        parts.append(f"{learner.num_ranks // learner.num_shards} replicas of {learner.num_shards} shard(s)")
    if learner.context_parallel_size > 1:
        parts.append(f"{learner.context_parallel_size} ranks per micro-batch")
    if learner.tensor_parallel_size > 1:
        parts.append(f"{learner.tensor_parallel_size} ranks per micro-batch and block (tensor parallel)")
    return f"{learner.num_ranks} ranks: {', '.join(parts)}" if parts else ""


def describe_rollout(config: RunConfig) -> str:
    """Whether responses span steps on shared devices, how many requests the engines get, and what an evaluation is.

    Example: `adaptive, 8 to 256 requests per engine; evaluation on test.jsonl: 4 responses per prompt at
    temperature 1, pass@4`.
    """
    parts = [_requests(config.rollout), _evaluation(config)]
    if config.mode.shares_devices and config.mode.max_staleness > 0:
        spans = f"colocated, S = {config.mode.max_staleness}: responses may span steps"
        parts.insert(0, f"{spans} (mode.max_staleness=0 is on policy)")
    return "; ".join(parts)


def _requests(rollout: RolloutConfig) -> str:
    highest = rollout.max_concurrency
    if rollout.concurrency == "adaptive":
        highest = rollout.max_num_seqs if highest is None else highest
        bound = "as many as it runs at once" if highest == "auto" else f"{highest} requests per engine"
        return f"adaptive, {rollout.min_concurrency} to {bound}"
    return "all requests at once" if highest is None else f"at most {highest} requests per engine"


def _evaluation(config: RunConfig) -> str:
    trainer = config.trainer
    if not config.evaluates:
        return "no evaluation"
    responses = f"{trainer.eval_samples} responses per prompt at temperature {value_text(trainer.eval_temperature)}"
    if trainer.eval_top_p < 1:
        responses += f" and top_p {value_text(trainer.eval_top_p)}"
    if trainer.eval_temperature == 0:
        responses = "one greedy response per prompt"
    sets = [
        name if one.samples in {None, trainer.eval_samples} else f"{name} ({one.samples} responses)"
        for name, one in config.task.eval_sets.items()
    ]
    further = f", also on {', '.join(sets)}" if sets else ""
    waits = ", the learner waits for it" if trainer.eval_blocking else ""
    k = trainer.eval_samples if trainer.eval_pass_k is None else trainer.eval_pass_k
    return f"evaluation on {config.task.eval_path}: {responses}, pass@{k}{further}{waits}"


def _correction(correction: CorrectionConfig) -> str:
    actions = {
        "clamp": correction.clamp,
        f"mask by {correction.mask.metric}": correction.mask,
        f"reject responses by {correction.reject.metric} ({correction.reject.level})": correction.reject,
    }
    parts = [OBJECTIVES[correction.objective]]
    for name, one in actions.items():
        if one.is_active:
            lower, upper = ("" if bound is None else value_text(bound) for bound in (one.lower, one.upper))
            parts.append(f"{name} [{lower}..{upper}]")
    if len(parts) > 1 or correction.objective != "bypass":
        parts.append(f"ratio of the {correction.level}")
    return ", ".join(parts)


def _numbers(args: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value_text(value)}" for name, value in args.items())


def _values(algorithm: AlgorithmConfig, keys: Iterable[str]) -> str:
    return ", ".join(f"{key}={value_text(getattr(algorithm, key))}" for key in keys)
