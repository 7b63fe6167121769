"""Combinations of values that cannot work, by section. Pure: looks at the configuration alone.

Keys that merely do nothing are in `inactive.py`.
"""

from __future__ import annotations

import json
import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING

from trainer.config.algorithm import EstimatorTraits, loss_traits, traits_of
from trainer.config.field import value_text
from trainer.config.inactive import BUILTIN_TASK
from trainer.config.own_function import is_dotted_path, is_own
from trainer.errors import Problem
from weight_sync.vllm_compat import LORA_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainer.config.schema import EvalSetConfig, RunConfig

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below, and not 0, to it; the learner would go on with the other."""
RESERVED_NAMES = ("accuracy", "num_prompts", "pass_at", "reward")
"""Of evaluation sets: their metrics would have the names of others, as `eval/accuracy/...` is of a reward."""

_ADVANTAGE, _PLACEMENT, _CORRECTION = "algorithm.advantage_estimator", "algorithm.kl.apply_to", "algorithm.correction"
_STALENESS = {"sync": 0, "one_step_off": 1}
_IN_TURNS: Mapping[str, tuple[object, str]] = {
    "mode.in_flight": ("abort", "a sleeping engine has no cache, so its requests are given back and go on afterwards"),
    "weight_sync.commit": ("inplace", "nothing is generated while a version moves, so a shadow copy gains nothing"),
    "weight_sync.num_slots": (1, "the next version is packed when the last one is live, so a second slot stays empty"),
}
"""Keys that have one useful value where devices are shared."""
_WITHIN_A_DEVICE = {"auto", "ipc", "shm", "gloo"}
_OWN_KEYS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer_path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.rollout_dtype",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",  # an engine is given so many devices and no more
    "prefill_context_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.num_replicas",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "stream_interval": "rollout.stream_interval",
    "seed": "seed",
    "enable_sleep_mode": "mode.name",
    **dict.fromkeys(("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"), "model.lora.rank"),
    "lora_target_modules": "model.lora.target_modules",
}
"""What has a key of its own: setting it twice would leave the rest of a run with the other value."""
_RELIED_ON = {
    "logprobs_mode": "off-policy correction needs the log-probs of the distribution that tokens are sampled from",
    "worker_extension_cls": "weight sync lives in it",
    "skip_tokenizer_init": "engines take and give tokens; text is made of them elsewhere",
    "load_format": "the first weights come by weight sync, or from files where that does not bring them",
    "disable_log_stats": "the load of engines is measured in its place",
    "enable_eplb": "weight sync writes every expert where it lay at the start, and it would move them",
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path"),
        "the learner would not hear of it, and both must compute the same model; change the model's config.json",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        "off-policy correction needs tokens that are sampled from the distribution that the learner computes",
    ),
}
REFUSED_ENGINE_ARGS = {**{name: f"is set by {key}" for name, key in _OWN_KEYS.items()}, **_RELIED_ON}
"""Engine argument -> why it is not for `rollout.engine_args`."""
_EXECUTORS = ("mp", "uni")


def check_combinations(config: RunConfig) -> list[Problem]:
    """Every problem, in the order of the schema's sections. Each value is known to have the right type and range."""
    return [problem for check in _CHECKS for problem in check(config)]


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest answer."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


def _conflict(config: RunConfig, key: str, message: str, hint: str, *related: str) -> Problem:
    """`key` cannot have its value; `also` are the keys that it does not go together with."""
    return Problem(key=key, value=value_text(attrgetter(key)(config)), message=message, hint=hint, related=related)


def _run(config: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[\w.\-+]+", config.name) or config.name in {".", ".."}:
        message = "must be letters, digits, dot, minus, plus or underscore"
        yield _conflict(config, "name", message, "it names a directory")
    for name in config.device.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield Problem(key="device.env", value=name, message="is not the name of an environment variable")
    if not config.ray.address:
        yield _conflict(config, "ray.address", "must be local, auto or HOST:PORT", "use local for a private cluster")


def _lora(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if lora.rank == 0:
        return
    if lora.rank not in LORA_RANKS:
        message = f"must be 0 or one of {', '.join(map(str, LORA_RANKS))}: engines would pad any other rank"
        yield _conflict(config, "model.lora.rank", message, "use the next larger one, it costs the engines the same")
    if not re.fullmatch(r"\w+(\+\w+)*", lora.target_modules):
        hint = "for example q_proj+v_proj"
        yield _conflict(config, "model.lora.target_modules", "must be names of layers joined by +", hint)


# Prompts and agents


def _task(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    if not task.train_path:
        yield _conflict(config, "task.train_path", "must name the training prompts", f"use {BUILTIN_TASK} or a file")
    for key, path in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        if path and task.reader == "arithmetic" and path != BUILTIN_TASK:
            hint = "use task.reader=auto, or jsonl, parquet or hf"
            yield _conflict(config, "task.reader", f"reads {BUILTIN_TASK} only, not {key}={path}", hint, key)
        if task.reader not in {"auto", "arithmetic"} and path == BUILTIN_TASK:
            hint = f"use task.reader=auto, or set {key} too"
            yield _conflict(config, "task.reader", f"cannot read {key}={path}", hint, key)
    try:
        json.dumps(task.chat_template_kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        hint = "use texts, finite numbers, true, false, null, and lists and maps of these"
        yield _conflict(config, "task.chat_template_kwargs", f"must be values of JSON: {error}", hint)
    if task.curriculum != "none" and not task.difficulty_column and not task.pass_rate_column:
        message, related = "needs to know what is hard", ("task.difficulty_column", "task.pass_rate_column")
        hint = "set task.difficulty_column or task.pass_rate_column to a column of the data set"
        yield _conflict(config, "task.curriculum", message, hint, *related)


def _pass_rates(config: RunConfig) -> Iterator[Problem]:
    task, group_size, keys = config.task, config.rollout.group_size, ("task.pass_rate_min", "task.pass_rate_max")
    lowest, highest = task.pass_rate_min, task.pass_rate_max
    if not task.filters_pass_rate:
        return
    if lowest > highest:
        message = f"must be at most task.pass_rate_max={highest:g}"
        yield _conflict(config, keys[0], message, "for example 0.1 and 0.9", keys[1])
    elif not any(lowest <= n / group_size <= highest for n in range(group_size + 1)):
        message = (
            f"lets no group in: with rollout.group_size={group_size} a pass rate is a multiple of 1/{group_size}, and "
            f"none lies in {lowest:g}..{highest:g}"
        )
        yield _conflict(config, keys[0], message, "widen the bounds, or raise rollout.group_size", keys[1])


def _agent(config: RunConfig) -> Iterator[Problem]:
    algorithm, task, key = config.algorithm, config.task, "task.agent_max_sequences"
    if not task.agent and task.reward.name == "zero" and algorithm.advantage_estimator != "zero":
        message = "rewards nothing, and without task.agent no environment rewards the turns"
        hint = "set task.agent, or use another reward"
        yield _conflict(config, "task.reward.name", message, hint, "task.agent")
    if not task.agent or task.agent_max_sequences == 1:
        return
    # The learner takes what is still to come from the tokens that follow in the same sequence.
    hint = "use 1, or another estimator"
    if algorithm.uses_critic:
        message = "must be 1: a critic's returns end with their sequence, and the outcome comes after the last one"
        yield _conflict(config, key, message, hint, _ADVANTAGE)
    elif algorithm.kl.in_reward and not is_own(algorithm.advantage_estimator) and traits_of(algorithm).reward_to_go:
        message = f"must be 1: with the KL in the reward, {_chosen(config)} adds up rewards within a sequence alone"
        yield _conflict(config, key, message, f"{hint}, or the KL in the loss", _ADVANTAGE)


# Advantages


def _chosen(config: RunConfig) -> str:
    return f"algorithm.advantage_estimator={config.algorithm.advantage_estimator}"


def _advantage(config: RunConfig) -> Iterator[Problem]:
    # What a user's own estimator needs is known once it is imported, which is not done here: preflight checks it.
    if not is_own(config.algorithm.advantage_estimator):
        yield from estimator_problems(config, traits_of(config.algorithm))


def estimator_problems(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Keys that do not go together with an estimator of these traits."""
    algorithm, group_size, chosen = config.algorithm, config.rollout.group_size, _chosen(config)
    if traits.needs_peers and group_size == 1:
        message = f"must be >= 2: {chosen} compares the answers of a group"
        hint = "use rollout.group_size=8, or algorithm.advantage_estimator=reinforce"
        yield _conflict(config, "rollout.group_size", message, hint, _ADVANTAGE)
    elif traits.spans_step and group_size * config.trainer.groups_per_step == 1:
        message = f"must be >= 2 with one answer per group: {chosen} normalises over the answers of a step"
        related = "rollout.group_size", _ADVANTAGE
        yield _conflict(config, "trainer.groups_per_step", message, "every advantage would be 0; raise it", *related)
    if algorithm.advantage_estimator == "gpg" and algorithm.gpg_scale == "nonzero_rewards":
        yield from _counted_rewards(config)
    if traits.uses_parts:
        yield from _reward_parts(config)
    if config.rollout.top_k == 1 and (traits.needs_peers or traits.greedy_baseline):
        other = "the greedy answer" if traits.greedy_baseline else "the answers of a group"
        message = f"samples greedily: {chosen} compares with {other}, which would be the same one"
        yield _conflict(config, "rollout.top_k", message, "use 0, or 2 and more", _ADVANTAGE)
    yield from _zero_variance(config, traits)
    yield from _kl_in_rewards(config, traits)


def _reward_parts(config: RunConfig) -> Iterator[Problem]:
    for name, weight in config.algorithm.gdpo_weights.items():
        if weight == 0 or not math.isfinite(weight):
            got, hint = f"{name}: {weight:g}", "leave out the entry, to leave out the part"
            yield Problem(key="algorithm.gdpo_weights", value=got, message="must be finite and not 0", hint=hint)
    if is_own(config.algorithm.advantage_estimator) and config.algorithm.overlong_buffer_tokens > 0:
        why = f"{_chosen(config)} takes the parts of the reward, shaping moves their total"
        key = "algorithm.overlong_buffer_tokens"
        yield _conflict(config, key, f"has no effect: {why}", "leave it at 0", _ADVANTAGE)
    if config.task.agent:
        message = f"may reward turns, which are no named part of a reward: {_chosen(config)} would not see them"
        yield _conflict(config, "task.agent", message, "use an estimator of the total reward", _ADVANTAGE)
    for name in ("timeout", "reward_timeout"):
        if getattr(config.algorithm.on_failure, name) == "zero":
            message = f"gives no parts of a reward, which {_chosen(config)} reads"
            yield _conflict(config, f"algorithm.on_failure.{name}", message, "use drop", _ADVANTAGE)


def _counted_rewards(config: RunConfig) -> Iterator[Problem]:
    """The count of answers with a reward other than 0 is only one of right answers if nothing else moves rewards."""
    key, hint = "algorithm.gpg_scale", "use valid_groups"
    if config.algorithm.overlong_buffer_tokens > 0:
        message = "counts answers with a reward other than 0, which the overlong penalty makes of wrong ones"
        yield _conflict(config, key, message, hint, "algorithm.overlong_buffer_tokens")
    if config.task.agent:
        message = "counts answers with a reward other than 0, and turns may be rewarded whatever the answer is worth"
        yield _conflict(config, key, message, hint, "task.agent")


def _zero_variance(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Dynamic sampling drops groups of equal rewards: wrong where those would teach something."""
    # With a greedy baseline it drops the groups whose every answer is worth what that one is, whatever their size.
    if not config.algorithm.dynamic_sampling or traits.greedy_baseline:
        return
    key, chosen = "algorithm.dynamic_sampling", _chosen(config)
    if config.rollout.group_size == 1:
        message = "drops every group: one answer never differs from itself"
        yield _conflict(config, key, message, "use false", "rollout.group_size")
    elif not traits.needs_peers:
        message = f"drops groups that teach: {chosen} does not compare the answers of a group"
        yield _conflict(config, key, message, "use false", _ADVANTAGE)
    elif traits.uses_parts:
        message = f"looks at the total reward: {chosen} also learns from answers that differ in their parts alone"
        yield _conflict(config, key, message, "use false", _ADVANTAGE)


def _kl_in_rewards(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Estimators of these traits that have no meaning on rewards less the KL."""
    algorithm, chosen, hint = config.algorithm, _chosen(config), "use loss, or another estimator"
    if algorithm.dynamic_sampling and (algorithm.kl.in_reward or algorithm.kl.in_advantage):
        message = "looks at rewards without their KL: groups of equal rewards still differ in it"
        yield _conflict(config, "algorithm.dynamic_sampling", message, "use false", _PLACEMENT)
    if not algorithm.kl.in_reward:
        return
    if traits.uses_parts:
        message = f"cannot be reward: {chosen} takes the parts of the reward, the KL moves their total"
        yield _conflict(config, _PLACEMENT, message, hint, _ADVANTAGE)
    if is_own(algorithm.advantage_estimator) and traits.reward_to_go:
        message = f"cannot be reward: {chosen} declares reward_to_go, and on the learner nothing would call it"
        yield _conflict(config, _PLACEMENT, message, hint, _ADVANTAGE)
    if algorithm.advantage_estimator == "gpg":
        message = "cannot be reward: gpg counts answers that teach nothing, and with the KL every answer differs"
        yield _conflict(config, _PLACEMENT, message, hint, _ADVANTAGE)
    if algorithm.mask_truncated and (traits.needs_peers or traits.spans_step):
        message = f"takes truncated answers out before their KL is known, and {chosen} compares with them"
        hint = "use false, or the KL in the loss"
        yield _conflict(config, "algorithm.mask_truncated", message, hint, _PLACEMENT, _ADVANTAGE)


def _zero(config: RunConfig) -> Iterator[Problem]:
    """The estimator that gives 0 leaves all teaching to the KL to a teacher."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    if algorithm.advantage_estimator != "zero":
        return
    if kl.coef == 0 or kl.reference_model is None:
        message = "gives every token 0, so that only a teacher teaches, and there is none"
        hint = "set algorithm.kl.reference_model (and algorithm.kl.coef above 0), or use another estimator"
        yield _conflict(config, _ADVANTAGE, message, hint, "algorithm.kl.reference_model", "algorithm.kl.coef")
    elif kl.in_reward:
        message = f"cannot be reward: {_ADVANTAGE}=zero reads no reward, so nothing would be learned"
        yield _conflict(config, _PLACEMENT, message, "use advantage or loss", _ADVANTAGE)


# The loss, the critic and the KL


def _loss(config: RunConfig) -> Iterator[Problem]:
    algorithm, most = config.algorithm, config.rollout.max_response_tokens
    buffer = "algorithm.overlong_buffer_tokens"
    if algorithm.overlong_buffer_tokens > 0 and algorithm.overlong_penalty == 0:
        message, hint = "must be above 0: nothing is taken off over the buffer", f"raise it, or set {buffer}=0"
        yield _conflict(config, "algorithm.overlong_penalty", message, hint, buffer)
    if algorithm.overlong_buffer_tokens > most:
        hint = "it is the last part of an answer: lower it, or use 0 for no penalty"
        message = f"must be at most rollout.max_response_tokens={most}"
        yield _conflict(config, buffer, message, hint, "rollout.max_response_tokens")
    if algorithm.group_filter and not is_dotted_path(algorithm.group_filter):
        hint = "or leave it empty; dynamic sampling is algorithm.dynamic_sampling"
        yield _conflict(config, "algorithm.group_filter", "must be a dotted path, package.module.function", hint)
    if algorithm.cov_min >= algorithm.cov_max:
        message = f"must be below algorithm.cov_max={value_text(algorithm.cov_max)}"
        yield _conflict(config, "algorithm.cov_min", message, "no token lies between them", "algorithm.cov_max")


def _critic(config: RunConfig) -> Iterator[Problem]:
    if not config.algorithm.uses_critic:
        return
    if config.critic.warmup_steps >= config.trainer.total_steps:
        message = f"must be below trainer.total_steps={config.trainer.total_steps}"
        yield _conflict(config, "critic.warmup_steps", message, "the policy is never trained", "trainer.total_steps")
    yield from _selecting_loss(config, _ADVANTAGE)


def _kl(config: RunConfig) -> Iterator[Problem]:
    kl, key = config.algorithm.kl, "algorithm.kl.estimator"
    if kl.in_loss and kl.estimator == "k1":
        message = f"has a gradient without meaning with {_PLACEMENT}=loss: its expectation is 0 everywhere"
        hint = "use k1_straight_through or k2, whose gradient is that of the KL"
        yield _conflict(config, key, message, hint, _PLACEMENT)
    if kl.in_reward and kl.estimator.endswith("straight_through"):
        message = f"differs in its gradient alone, and with {_PLACEMENT}=reward only the value is read"
        hint = f"use {kl.estimator.removesuffix('_straight_through')}"
        yield _conflict(config, key, message, hint, _PLACEMENT)
    if kl.in_advantage and kl.estimator != "k1":
        message = f"must be k1 with {_PLACEMENT}=advantage: only its mean gradient is that of the KL there"
        yield _conflict(config, key, message, f"use {key}=k1", _PLACEMENT)
    if (kl.in_reward or kl.in_advantage) and not config.algorithm.uses_critic:
        yield from _selecting_loss(config, _PLACEMENT)


def _selecting_loss(config: RunConfig, related: str) -> Iterator[Problem]:
    if loss_traits(config.algorithm.loss).selects:
        message = "chooses tokens by their advantages before the step is split, and these are finished on the learner"
        yield _conflict(config, "algorithm.loss", message, "use ppo_clip", related)


# The off-policy correction


def _correction(config: RunConfig) -> Iterator[Problem]:
    correction, key = config.algorithm.correction, f"{_CORRECTION}.objective"
    if correction.objective == "loglinear" and config.mode.max_staleness == 0:
        message = "interpolates over the age of tokens, which is always 0 with mode.max_staleness=0"
        yield _conflict(config, key, message, "use bypass or decoupled", "mode.max_staleness")
    yield from _corrected_loss(config)
    yield from _clamped_loss(config)
    yield from _bounds(config, "clamp", "ratio")
    yield from _bounds(config, "mask", correction.mask.metric)
    yield from _bounds(config, "reject", correction.reject.metric)
    yield from _clamped_beyond_mask(config)


def _corrected_loss(config: RunConfig) -> Iterator[Problem]:
    """Losses to which the chosen objective gives nothing to act on."""
    loss, correction, key = config.algorithm.loss, config.algorithm.correction, f"{_CORRECTION}.objective"
    if not loss_traits(loss).is_weighted:
        why, hint = f"algorithm.loss={loss} holds no ratio", "use algorithm.loss=importance_sampling"
        leaves_out = correction.mask.is_active or correction.reject.is_active
        if correction.objective != "bypass":
            yield _conflict(config, key, f"must be bypass: {why}", hint, "algorithm.loss")
        elif loss_traits(loss).is_on_policy and config.mode.max_staleness > 0 and not leaves_out:
            message = f"takes samples of mode.max_staleness={config.mode.max_staleness} for its own: {why}"
            hint = f"use mode=sync, {hint.removeprefix('use ')}, or a correction that masks or rejects"
            yield _conflict(config, "algorithm.loss", message, hint, "mode.max_staleness", _CORRECTION)
    elif correction.objective == "decoupled" and loss_traits(loss).is_bounded:
        message = (
            "has one update per batch, so the ratio to the policy at the start of the step is always 1, and "
            f"algorithm.loss={loss} cannot bound it"
        )
        hint = "use algorithm.loss=importance_sampling with this correction, or objective bypass or loglinear"
        yield _conflict(config, key, message, hint, "algorithm.loss")


def _clamped_loss(config: RunConfig) -> Iterator[Problem]:
    """`clamp` puts another ratio in the place of the one that the loss holds: it must be the same one."""
    loss, correction = config.algorithm.loss, config.algorithm.correction
    if not loss_traits(loss).is_weighted or correction.objective != "bypass" or not correction.clamp.is_active:
        return
    held, objective = loss_traits(loss).ratio, f"{_CORRECTION}.objective"
    if held is None:
        why, hint = loss_traits(loss).own_bound
        for bound in ("lower", "upper"):
            message = f"must be null with {objective}=bypass: algorithm.loss={loss} {why}"
            if getattr(correction.clamp, bound) is not None:
                yield _conflict(config, f"{_CORRECTION}.clamp.{bound}", message, hint, "algorithm.loss", objective)
    elif correction.level != held:
        message = (
            f"must be {held} with a clamp and {objective}=bypass: that is the ratio that algorithm.loss={loss} holds"
        )
        related = f"{_CORRECTION}.clamp", "algorithm.loss", objective
        yield _conflict(config, f"{_CORRECTION}.level", message, f"use {held}, or no clamp", *related)


def _bounds(config: RunConfig, action: str, metric: str) -> Iterator[Problem]:
    """Bounds that cut nothing, or also the tokens on which both policies agree."""
    prefix = f"{_CORRECTION}.{action}"
    bounds = getattr(config.algorithm.correction, action)
    agreed = 1.0 if metric == "ratio" else 0.0
    others = () if action == "clamp" else (f"{prefix}.metric",)
    if bounds.lower is not None and metric != "k1" and bounds.lower <= 0:
        yield _conflict(config, f"{prefix}.lower", f"has no effect: {metric} is never below 0", "use null", *others)
    elif bounds.lower is not None and bounds.lower >= agreed:
        message = f"must be below {agreed:g}, the {metric} where both policies agree"
        yield _conflict(config, f"{prefix}.lower", message, "lower it, or use null", *others)
    if bounds.upper is not None and bounds.upper <= agreed:
        message = f"must be above {agreed:g}, the {metric} where both policies agree"
        yield _conflict(config, f"{prefix}.upper", message, "raise it, or use null", *others)


def _clamped_beyond_mask(config: RunConfig) -> Iterator[Problem]:
    clamp, mask = config.algorithm.correction.clamp, config.algorithm.correction.mask
    if mask.metric != "ratio":
        return
    if clamp.upper is not None and mask.upper is not None and clamp.upper >= mask.upper:
        key, other = f"{_CORRECTION}.clamp.upper", f"{_CORRECTION}.mask.upper"
        message = f"has no effect: {other}={mask.upper:g} takes those tokens out"
        yield _conflict(config, key, message, "lower it, or use null", other)
    if clamp.lower is not None and mask.lower is not None and clamp.lower <= mask.lower:
        key, other = f"{_CORRECTION}.clamp.lower", f"{_CORRECTION}.mask.lower"
        message = f"has no effect: {other}={mask.lower:g} takes those tokens out"
        yield _conflict(config, key, message, "raise it, or use null", other)


# Staleness and shared devices


def _mode(config: RunConfig) -> Iterator[Problem]:
    wanted = _STALENESS.get(config.mode.name)
    if wanted is not None and config.mode.max_staleness != wanted:
        message = (
            f"must be {wanted} with mode.name={config.mode.name}; what the file of --config-name or the command line "
            "says wins over the group"
        )
        hint = f"say mode.max_staleness={wanted} beside it, or mode=async, which takes any"
        yield _conflict(config, "mode.max_staleness", message, hint, "mode.name")
    if not config.mode.shares_devices:
        return
    chosen, hint, trainer = f"mode.name={config.mode.name}", "the group mode=colocated sets it", config.trainer
    for key, (value, why) in _IN_TURNS.items():
        if attrgetter(key)(config) != value:
            yield _conflict(config, key, f"must be {value_text(value)} with {chosen}: {why}", hint, "mode.name")
    if config.task.eval_path and (trainer.eval_every or trainer.eval_at_start) and not trainer.eval_blocking:
        message = f"must be true with {chosen}: engines cannot evaluate while they sleep"
        yield _conflict(config, "trainer.eval_blocking", message, hint, "mode.name")
    if config.weight_sync.transport not in _WITHIN_A_DEVICE:
        message = f"connects two devices, and with {chosen} learner and engine are on one"
        yield _conflict(config, "weight_sync.transport", message, "use auto or ipc", "mode.name")


def pairing_problems(config: RunConfig) -> Iterator[Problem]:
    """On shared accelerators: every device has one rank and one engine worker. A CPU has no devices to pair on."""
    rollout = config.rollout
    num_workers = rollout.num_replicas * rollout.tensor_parallel_size
    if config.mode.shares_devices and config.learner.num_ranks != num_workers:
        message = (
            f"must be rollout.num_replicas * rollout.tensor_parallel_size = {rollout.num_replicas} * "
            f"{rollout.tensor_parallel_size} = {num_workers} with mode.name={config.mode.name}: every device has one "
            "learner rank and one engine worker"
        )
        related = "rollout.num_replicas", "rollout.tensor_parallel_size", "mode.name"
        yield _conflict(config, "learner.num_ranks", message, "change one of them", *related)


# Engines and sampling


def _lengths(config: RunConfig) -> Iterator[Problem]:
    rollout, longest = config.rollout, longest_sequence(config)
    limits = "task.max_prompt_tokens", "rollout.max_response_tokens"
    sum_text = f"task.max_prompt_tokens + rollout.max_response_tokens = {longest}"
    if 0 < rollout.max_model_len < longest:
        message = f"must be at least {sum_text}, or 0 to follow them"
        yield _conflict(config, "rollout.max_model_len", message, "raise it or lower those", *limits)
    if config.learner.max_tokens_per_micro_batch < longest:
        message = f"must be at least {sum_text}: the longest sequence has to fit into one micro-batch"
        yield _conflict(config, "learner.max_tokens_per_micro_batch", message, "raise it or lower those", *limits)
    # Whether the tokenizer has the tokens is known when it is loaded.
    if not all(rollout.stop):
        yield _conflict(config, "rollout.stop", "must hold no empty text: it would end every answer", "leave it out")
    if any(token_id < 0 for token_id in rollout.stop_token_ids):
        yield _conflict(config, "rollout.stop_token_ids", "must be ids of tokens, from 0", "use [] for none")


def _truncated_sampling(config: RunConfig) -> Iterator[Problem]:
    """Sampling from a part of the vocabulary, beside something that acts on the ratio of learner and engine.

    Engines give the log-prob of a token among those that `top_p` and `top_k` left, the learner that among all. Equal
    weights then have a ratio below 1: the right weight of the token, and not one that a bound may cut.
    """
    rollout, acts = config.rollout, _acts_on_ratio(config)
    if acts is None:
        return
    does = "acts on that" if loss_traits(config.algorithm.loss).is_weighted else "has none"
    why = f"among fewer tokens equal weights have a ratio of learner to engine below 1, and {acts} {does}"
    other = "or algorithm.loss=importance_sampling with no bounds on the ratio but upper ones"
    if rollout.top_p < 1:
        yield _conflict(config, "rollout.top_p", f"must be 1: {why}", f"use 1, {other}", acts.partition("=")[0])
    if rollout.top_k > 0:
        yield _conflict(config, "rollout.top_k", f"must be 0: {why}", f"use 0, {other}", acts.partition("=")[0])


def _acts_on_ratio(config: RunConfig) -> str | None:
    """The first key under which a ratio below 1 for equal weights is taken for a policy that has moved."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    if loss_traits(algorithm.loss).is_bounded:
        return f"algorithm.loss={algorithm.loss}"
    if algorithm.kl.in_reward or algorithm.kl.in_advantage:
        return f"{_PLACEMENT}={algorithm.kl.apply_to}"
    if correction.objective == "loglinear":
        return f"{_CORRECTION}.objective=loglinear"
    cuts = {
        "clamp.lower": correction.clamp.lower is not None,
        "mask.lower": correction.mask.lower is not None,
        "mask.metric": correction.mask.is_active and correction.mask.metric != "ratio",
        "reject": correction.reject.is_active,
    }
    return next((f"{_CORRECTION}.{key}" for key, is_set in cuts.items() if is_set), None)


def _concurrency(config: RunConfig) -> Iterator[Problem]:
    """Bounds that are empty, or too tight to be shared out; moves between engines that break another promise."""
    rollout = config.rollout
    highest = rollout.max_num_seqs if rollout.max_concurrency is None else rollout.max_concurrency
    key = "max_num_seqs" if rollout.max_concurrency is None else "max_concurrency"
    if rollout.concurrency == "adaptive" and rollout.min_concurrency >= highest:
        message = f"must be below rollout.{key}={highest}"
        hint = "lower it, or use rollout.concurrency=fixed"
        yield _conflict(config, "rollout.min_concurrency", message, hint, f"rollout.{key}", "rollout.concurrency")
    if rollout.concurrency == "adaptive" and highest > rollout.max_num_seqs:
        message = f"must be at most rollout.max_num_seqs={rollout.max_num_seqs}: more would wait inside the engine"
        related = "rollout.max_num_seqs", "rollout.concurrency"
        yield _conflict(config, "rollout.max_concurrency", message, "lower it, or use null", *related)
    if rollout.max_concurrency is not None and rollout.max_concurrency < rollout.num_workers:
        message = f"must be at least rollout.num_workers={rollout.num_workers}: each of them needs its share"
        yield _conflict(config, "rollout.max_concurrency", message, "raise it", "rollout.num_workers")
    by_staleness = rollout.per_request_seed is None
    is_seeded = config.mode.max_staleness == 0 if by_staleness else rollout.per_request_seed
    if rollout.repack_below is not None and is_seeded and not config.mode.shares_devices:
        message = "must be null with seeded requests: what moves goes on with another seed, and timing says what moves"
        hint = "leave it at null, or use rollout.per_request_seed=false"
        related = "mode.max_staleness" if by_staleness else "rollout.per_request_seed"
        yield _conflict(config, "rollout.repack_below", message, hint, related)


def _engine_args(config: RunConfig) -> Iterator[Problem]:
    """One for each argument that is ours to set, or that breaks what a run stands on."""
    most = config.rollout.max_num_seqs
    for name, value in config.rollout.engine_args.items():
        hint, related = "leave it out", ()
        if name == "max_num_batched_tokens" and isinstance(value, int) and value < most:
            message = f"{name} must be at least rollout.max_num_seqs={most}: a step has a token of each"
            hint, related = "raise it, or leave it out", ("rollout.max_num_seqs",)
        elif name == "distributed_executor_backend" and value not in _EXECUTORS:
            message = f"{name} must be one of {', '.join(_EXECUTORS)}: an engine's workers are processes of its host"
        elif name in _OWN_KEYS:
            message, hint, related = f"{name} is set by {_OWN_KEYS[name]}", f"use {_OWN_KEYS[name]}", (_OWN_KEYS[name],)
        elif name in _RELIED_ON:
            message = f"must not hold {name}: {_RELIED_ON[name]}"
        else:
            continue
        yield Problem(key="rollout.engine_args", value=f"{name}: {value}", message=message, hint=hint, related=related)


# Training, evaluation, checkpoints


def _learner(config: RunConfig) -> Iterator[Problem]:
    learner, trainer = config.learner, config.trainer
    samples = trainer.groups_per_step * config.rollout.group_size
    if learner.num_ranks > samples:
        message = f"must be at most {samples}, the samples of one step (trainer.groups_per_step x rollout.group_size)"
        related = "trainer.groups_per_step", "rollout.group_size"
        yield _conflict(config, "learner.num_ranks", message, "a rank without samples does nothing", *related)
    alone = config.critic.warmup_steps if config.algorithm.uses_critic else 0
    if learner.lr_schedule != "constant" and learner.warmup_steps >= trainer.total_steps - alone:
        left = "trainer.total_steps" if alone == 0 else "trainer.total_steps - critic.warmup_steps"
        message = f"leaves no step for the {learner.lr_schedule} schedule; must be < {left}"
        related = "trainer.total_steps", "learner.lr_schedule", *(["critic.warmup_steps"] if alone else [])
        yield _conflict(config, "learner.warmup_steps", message, "lower it or raise trainer.total_steps", *related)
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    if every > 0 and kept % every:
        message = f"must be a multiple of checkpoint.every_steps={every}: no other step is saved"
        hint = f"for example {max(1, kept // every) * every}"
        yield _conflict(config, "checkpoint.keep_every", message, hint, "checkpoint.every_steps")


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    """Samples and k that do not go together; a deadline below that of one answer; a goal that nothing can reach."""
    trainer, task = config.trainer, config.task
    if not task.eval_path or not (trainer.eval_every > 0 or trainer.eval_at_start or trainer.eval_at_end):
        if trainer.stop_at_accuracy is not None:
            key, hint = "trainer.stop_at_accuracy", "set task.eval_path and eval_every"
            related = "task.eval_path", "trainer.eval_every", "trainer.eval_at_start", "trainer.eval_at_end"
            yield _conflict(config, key, "is never reached: evaluation is off", hint, *related)
        if task.eval_sets and not task.eval_path:
            message, related = "stand beside task.eval_path, which is empty", ("task.eval_path", "trainer.eval_every")
            hint = (
                "name one of them there (eval/accuracy and trainer.stop_at_accuracy are about it), or ~task.eval_sets"
            )
            yield Problem(
                key="task.eval_sets", value=", ".join(task.eval_sets), message=message, hint=hint, related=related
            )
        return
    if 0 < trainer.eval_temperature < MIN_TEMPERATURE:
        message = f"must be 0 or at least {MIN_TEMPERATURE}: vLLM would sample at {MIN_TEMPERATURE}"
        yield _conflict(config, "trainer.eval_temperature", message, "use 0 for greedy answers")
    if trainer.eval_samples > 1 and trainer.eval_temperature == 0:
        yield _repeated_greedy("trainer.eval_samples", trainer.eval_samples)
    if trainer.eval_pass_k is not None and trainer.eval_pass_k > trainer.eval_samples:
        message = f"must be at most trainer.eval_samples={trainer.eval_samples}: there is no estimate beyond it"
        yield _conflict(config, "trainer.eval_pass_k", message, "raise trainer.eval_samples", "trainer.eval_samples")
    longest = "task.agent_timeout_s" if task.agent else "rollout.request_timeout_s"
    limit_s = task.agent_timeout_s if task.agent else config.rollout.request_timeout_s
    if trainer.eval_timeout_s < limit_s:
        message = f"must be at least {longest}={limit_s:g}: a single answer may take that long"
        yield _conflict(config, "trainer.eval_timeout_s", message, "raise it, or lower that", longest)
    for name, one in task.eval_sets.items():
        yield from _eval_set(config, name, one)


def _eval_set(config: RunConfig, name: str, one: EvalSetConfig) -> Iterator[Problem]:
    trainer, key = config.trainer, f"task.eval_sets.{name}"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name in RESERVED_NAMES:
        message = f"a name is of letters, digits and . _ -, and none of {', '.join(RESERVED_NAMES)}"
        yield Problem(key="task.eval_sets", value=name, message=message, hint="it is part of eval/NAME/accuracy")
    if not one.path:
        hint = "set it, or leave the set out"
        yield Problem(key=f"{key}.path", value="", message="must name held-out prompts", hint=hint)
    if one.samples is None:
        return
    if one.samples > 1 and trainer.eval_temperature == 0:
        yield _repeated_greedy(f"{key}.samples", one.samples)
    if trainer.eval_pass_k is not None and one.samples < trainer.eval_pass_k:
        message = f"must be at least trainer.eval_pass_k={trainer.eval_pass_k}: there is no estimate beyond it"
        hint, related = "raise it, or use trainer.eval_pass_k=null: each set's own number", ("trainer.eval_pass_k",)
        yield Problem(key=f"{key}.samples", value=str(one.samples), message=message, hint=hint, related=related)


def _repeated_greedy(key: str, samples: int) -> Problem:
    message = "must be 1 with trainer.eval_temperature=0: greedy answers to one prompt are all the same"
    hint = "use trainer.eval_temperature=1.0, or one sample"
    return Problem(key=key, value=str(samples), message=message, hint=hint, related=("trainer.eval_temperature",))


_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _run, _lora, _task, _pass_rates, _agent, _advantage, _loss, _critic, _kl, _zero, _correction, _mode, _lengths,
    _truncated_sampling, _concurrency, _engine_args, _learner, _evaluation,
)  # fmt: skip
