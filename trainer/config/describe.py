"""The effective objective of a run in a few words: what is really in force, and nothing that is not."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from trainer.config.algorithm import DEFAULT_LR_RATIO, OBJECTIVES, loss_traits, traits_of
from trainer.config.field import value_text
from trainer.config.own_function import is_own

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from trainer.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig, EstimatorTraits, KlConfig
    from trainer.config.schema import RolloutConfig, RunConfig


def describe_objective(algorithm: AlgorithmConfig) -> str:
    """One line: estimator, loss with its numbers, aggregation, correction, and what happens to samples.

    Example: `grpo / std -> ppo_clip(clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=null) -> token_mean;
    engine's log-probs as
    old policy`.
    """
    traits = traits_of(algorithm)
    estimator = _estimator(algorithm, traits)
    loss = f"{algorithm.loss}({_values(algorithm, loss_traits(algorithm.loss).keys)})"
    if is_own(algorithm.loss):
        loss = f"own {algorithm.loss}({_numbers(algorithm.loss_args)})"
    penalty = _kl(algorithm.kl)
    if algorithm.kl.in_reward:
        estimator += f" of reward - {penalty}"
    if algorithm.kl.in_advantage:
        estimator += f" - {penalty} of the token"
    if algorithm.kl.in_loss:
        loss += f" + {penalty}"
    if algorithm.entropy_coef > 0:
        loss += f" - {value_text(algorithm.entropy_coef)} x entropy"
    parts = [f"{estimator} -> {loss} -> {_aggregation(algorithm)}", _correction(algorithm.correction)]
    if algorithm.dynamic_sampling:
        equal = "rewards equal to the greedy one" if traits.greedy_baseline else "equal rewards"
        parts.append(f"groups of {equal} are filtered and refilled")
    if algorithm.group_filter:
        parts.append(f"own {algorithm.group_filter}({_numbers(algorithm.group_filter_args)}) filters groups")
    if algorithm.overlong_buffer_tokens:
        penalty = f"overlong penalty of up to {value_text(algorithm.overlong_penalty)}"
        parts.append(f"{penalty} over the last {algorithm.overlong_buffer_tokens} tokens")
    if algorithm.mask_truncated:
        parts.append("truncated answers carry no loss")
    return "; ".join(parts)


def _estimator(algorithm: AlgorithmConfig, traits: EstimatorTraits) -> str:
    """Its name and the keys that it reads; of the user's own also what it declares, since other code goes by that."""
    name = algorithm.advantage_estimator
    if is_own(name):
        declared = [trait.name for trait in fields(traits) if getattr(traits, trait.name) is True]
        return f"own {name}({_numbers(algorithm.advantage_args)}) [{', '.join(declared) if declared else 'no trait'}]"
    if traits.keys == ("normalize_by_std",):
        return f"{name} / std" if algorithm.normalize_by_std else f"{name} without std"
    match name:
        case "gdpo":
            weights = algorithm.gdpo_weights
            return f"{name}({_numbers(weights) if weights else 'every part once'})"
        case "gae":
            whitened = ", whitened" if algorithm.whiten_advantages else ""
            return f"{name}({_values(algorithm, ['gae_gamma', 'gae_lambda'])}){whitened}"
        case _ if traits.keys:
            return f"{name}({_values(algorithm, traits.keys)})"
        case _:
            return f"{name} (one more, greedy answer per group)" if traits.greedy_baseline else name


def _kl(kl: KlConfig) -> str:
    other = "the first policy" if kl.reference_model is None else kl.reference_model
    return f"{value_text(kl.coef)} x KL to {other} ({kl.estimator})"


def _aggregation(algorithm: AlgorithmConfig) -> str:
    if algorithm.loss_aggregation != "seq_mean_token_sum_norm":
        return algorithm.loss_aggregation
    tokens = algorithm.loss_norm_tokens
    return f"{algorithm.loss_aggregation}({'rollout.max_response_tokens' if tokens is None else tokens})"


def describe_critic(critic: CriticConfig, *, policy_lr: float) -> str:
    """What gives the values, and how it learns: after `describe_objective`, with GAE only.

    Example: `critic: own backbone, lr 1e-05, 1 update per step`.
    """
    if critic.shared_backbone:
        return f"critic: value head on the policy's backbone, + {value_text(critic.value_coef)} x value loss"
    lr = DEFAULT_LR_RATIO * policy_lr if critic.lr is None else critic.lr
    told = f"critic: own backbone, lr {value_text(lr)}, {critic.updates_per_step} update(s) per step"
    if critic.value_clip is not None:
        told += f", values clipped at {value_text(critic.value_clip)}"
    return told + (f", alone for {critic.warmup_steps} steps" if critic.warmup_steps else "")


def describe_rollout(config: RunConfig) -> str:
    """Whether answers span steps on shared devices, how many requests the engines get, and what an evaluation is.

    Example: `adaptive, 8 to 256 requests per engine; evaluation on test.jsonl: 4 answers per prompt at
    temperature 1, pass@4`.
    """
    parts = [_requests(config.rollout), _evaluation(config)]
    if config.mode.shares_devices and config.mode.max_staleness > 0:
        spans = f"colocated, S = {config.mode.max_staleness}: answers may span steps"
        parts.insert(0, f"{spans} (mode.max_staleness=0 is on policy)")
    return "; ".join(parts)


def _requests(rollout: RolloutConfig) -> str:
    highest = rollout.max_concurrency
    match rollout.concurrency:
        case "adaptive":
            highest = rollout.max_num_seqs if highest is None else highest
            return f"adaptive, {rollout.min_concurrency} to {highest} requests per engine"
        case "fixed":
            return "all requests at once" if highest is None else f"at most {highest} requests per engine"


def _evaluation(config: RunConfig) -> str:
    trainer = config.trainer
    if not config.task.eval_path or not (trainer.eval_every or trainer.eval_at_start or trainer.eval_at_end):
        return "no evaluation"
    answers = f"{trainer.eval_samples} answers per prompt at temperature {value_text(trainer.eval_temperature)}"
    if trainer.eval_top_p < 1:
        answers += f" and top_p {value_text(trainer.eval_top_p)}"
    if trainer.eval_temperature == 0:
        answers = "one greedy answer per prompt"
    k = trainer.eval_samples if trainer.eval_pass_k is None else trainer.eval_pass_k
    waits = ", the learner waits for it" if trainer.eval_blocking else ""
    return f"evaluation on {config.task.eval_path}: {answers}, pass@{k}{_sets(config)}{waits}"


def _sets(config: RunConfig) -> str:
    """The sets beside that of `task.eval_path`."""
    found = [
        name if one.samples in {None, config.trainer.eval_samples} else f"{name} ({one.samples} answers)"
        for name, one in config.task.eval_sets.items()
    ]
    return f", also on {', '.join(found)}" if found else ""


def _correction(correction: CorrectionConfig) -> str:
    actions = {
        "clamp": correction.clamp,
        f"mask by {correction.mask.metric}": correction.mask,
        f"reject answers by {correction.reject.metric} ({correction.reject.level})": correction.reject,
    }
    parts = [OBJECTIVES[correction.objective]]
    parts += [f"{name} [{_bounds(one.lower, one.upper)}]" for name, one in actions.items() if one.is_active]
    if len(parts) > 1 or correction.objective != "bypass":
        parts.append(f"ratio of the {correction.level}")
    return ", ".join(parts)


def _bounds(lower: float | None, upper: float | None) -> str:
    return f"{'' if lower is None else value_text(lower)}..{'' if upper is None else value_text(upper)}"


def _numbers(args: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value_text(value)}" for name, value in args.items())


def _values(algorithm: AlgorithmConfig, keys: Iterable[str]) -> str:
    return ", ".join(f"{key}={value_text(getattr(algorithm, key))}" for key in keys)
