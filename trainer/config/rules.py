"""Combinations of values that cannot work: mostly one row each. Pure: reads the configuration alone.

Keys that merely have no effect are in `inactive.py`.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from trainer.config.algorithm import EstimatorTraits, loss_traits, traits_of
from trainer.config.field import is_dotted_path, value_text
from trainer.config.inactive import BUILTIN_TASK
from trainer.config.own_function import is_own
from trainer.config.schema import shown
from trainer.errors import Problem
from weight_sync.vllm.compat import LORA_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from trainer.config.schema import RunConfig

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below, and not 0, to it; the learner would compute with the lower one."""
RESERVED_NAMES = ("accuracy", "num_prompts", "pass_at", "reward")
"""Not for evaluation sets: their metrics would have the names of others, as `eval/accuracy/...` is of a reward."""

_ADVANTAGE, _LOSS, _PLACEMENT = "algorithm.advantage_estimator", "algorithm.loss", "algorithm.kl.apply_to"
_BUFFER, _FILTER = "algorithm.overlong_buffer_tokens", "algorithm.dynamic_sampling"
_CORRECTION = "algorithm.correction"
_OBJECTIVE = f"{_CORRECTION}.objective"
_COLOCATED: Mapping[str, tuple[object, str]] = {
    "mode.in_flight": ("abort", "a sleeping engine has no cache, so its requests are returned and continue afterwards"),
    "weight_sync.commit": ("inplace", "nothing is generated while a version moves, so a shadow copy gains nothing"),
    "weight_sync.num_slots": (1, "the next version is packed when the last one is live, so a second slot stays empty"),
}
"""Keys that have one useful value where devices are shared."""
_OWN_KEYS = {
    "model": "model.path", "tokenizer": "model.tokenizer_path", "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.rollout_dtype", "seed": "seed", "enable_sleep_mode": "mode.name",
    # An engine has that many devices and no more.
    "tensor_parallel_size": "rollout.tensor_parallel_size", "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "prefill_context_parallel_size": "rollout.tensor_parallel_size", "data_parallel_size": "rollout.num_replicas",
    **{
        name: f"rollout.{name}"
        for name in ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager", "stream_interval")
    },
    **dict.fromkeys(("enable_lora", "max_loras", "max_cpu_loras", "max_lora_rank"), "model.lora.rank"),
    "lora_target_modules": "model.lora.target_modules",
}  # fmt: skip
"""Arguments that have their own key: setting one twice would leave the rest of a run with the other value."""
_RELIED_ON = {
    "logprobs_mode": "off-policy correction needs the log-probs of the distribution that tokens are sampled from",
    "worker_extension_cls": "weight sync is in it",
    "skip_tokenizer_init": "engines take and return tokens; they are decoded elsewhere",
    "load_format": "the first weights come by weight sync, or from files where that does not provide them",
    "disable_log_stats": "the load of engines is measured instead",
    "enable_eplb": "weight sync writes every expert to its initial place, and it would move them",
    **dict.fromkeys(
        ("hf_overrides", "hf_config_path"),
        "it does not reach the learner, and both must compute the same model; change the model's config.json",
    ),
    **dict.fromkeys(
        ("logits_processors", "watermark_config"),
        "off-policy correction needs tokens that are sampled from the distribution that the learner computes",
    ),
}
REFUSED_ENGINE_ARGS = {**{name: f"is set by {key}" for name, key in _OWN_KEYS.items()}, **_RELIED_ON}
"""Engine argument -> why it is not for `rollout.engine_args`."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """`key` cannot have its value while `when` holds."""

    key: str
    when: Callable[[RunConfig], bool]
    message: str
    """Formatted with the configuration `c` and what `_facts` adds, as the hint is."""
    hint: str
    related: Sequence[str] = ()
    """The keys that it conflicts with."""


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


def _policy_steps(c: RunConfig) -> int:
    return c.trainer.total_steps - (c.critic.warmup_steps if c.algorithm.uses_critic else 0)


def _samples(c: RunConfig) -> int:
    return c.trainer.groups_per_step * c.rollout.group_size


def _max_requests(c: RunConfig) -> tuple[str, int]:
    key = "max_num_seqs" if c.rollout.max_concurrency is None else "max_concurrency"
    return f"rollout.{key}", getattr(c.rollout, key)


def _facts(c: RunConfig) -> Mapping[str, object]:
    """What messages may contain in addition to values of the configuration."""
    every, kept = max(c.checkpoint.every_steps, 1), c.checkpoint.keep_every
    return {
        "chosen": f"{_ADVANTAGE}={c.algorithm.advantage_estimator}",
        "loss": f"{_LOSS}={c.algorithm.loss}",
        "held": loss_traits(c.algorithm.loss).ratio,
        "own_bound": loss_traits(c.algorithm.loss).own_bound,
        "mode": f"mode.name={c.mode.name}",
        "limits": f"task.max_prompt_tokens + rollout.max_response_tokens = {longest_sequence(c)}",
        "samples": _samples(c),
        "policy_steps": _policy_steps(c),
        "max_requests": "{}={}".format(*_max_requests(c)),
        "multiple": max(1, kept // every) * every,
        "deadline": "{}={:g}".format(*_response_deadline(c)),
    }


def _found(conflicts: Iterable[Conflict], config: RunConfig) -> Iterator[Problem]:
    facts = _facts(config)
    for one in conflicts:
        if one.when(config):
            message, hint = (text.format(c=config, **facts) for text in (one.message, one.hint))
            value = shown(one.key, attrgetter(one.key)(config))
            yield Problem(key=one.key, value=value, message=message, hint=hint, related=tuple(one.related))


def check_combinations(config: RunConfig) -> list[Problem]:
    """Every problem. Each value is known to have the right type and range."""
    found = [*_found(_CONFLICTS, config)]
    # What a user's own estimator needs is known once it is imported, which preflight does.
    if not is_own(config.algorithm.advantage_estimator):
        found += estimator_problems(config, traits_of(config.algorithm))
    return [*found, *(problem for check in _CHECKS for problem in check(config))]


def estimator_problems(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Keys that do not go together with an estimator of these traits."""
    yield from _found(_estimator_conflicts(traits), config)
    for name, weight in config.algorithm.gdpo_weights.items() if traits.uses_parts else ():
        if weight == 0 or not math.isfinite(weight):
            message, hint = "must be finite and not 0", "to leave out the part, leave out the entry"
            yield Problem(key="algorithm.gdpo_weights", value=f"{name}: {weight:g}", message=message, hint=hint)


def pairing_problems(config: RunConfig) -> Iterator[Problem]:
    """On shared accelerators: every device has one rank and one engine worker. A CPU has no devices to pair on."""
    rollout = config.rollout
    num_workers = rollout.num_replicas * rollout.tensor_parallel_size
    pairing = Conflict(
        "learner.num_ranks",
        lambda c: c.mode.shares_devices and c.learner.num_ranks != num_workers,
        "must be rollout.num_replicas * rollout.tensor_parallel_size = {c.rollout.num_replicas} * "
        f"{{c.rollout.tensor_parallel_size}} = {num_workers} with {{mode}}: every device has one learner rank and one "
        "engine worker",
        "change one of them",
        ("rollout.num_replicas", "rollout.tensor_parallel_size", "mode.name"),
    )
    return _found([pairing], config)


# Conditions


def _lets_no_group_in(c: RunConfig) -> bool:
    size, lowest, highest = c.rollout.group_size, c.task.pass_rate_min, c.task.pass_rate_max
    return lowest <= highest and not any(lowest <= n / size <= highest for n in range(size + 1))


def _has_sequences(c: RunConfig) -> bool:
    return bool(c.task.agent) and c.task.agent_max_sequences > 1


def _adds_up_within_a_sequence(c: RunConfig) -> bool:
    # The learner takes later rewards from the tokens that follow in the same sequence.
    algorithm = c.algorithm
    return algorithm.kl.in_reward and not is_own(algorithm.advantage_estimator) and traits_of(algorithm).reward_to_go


def _has_teacher(c: RunConfig) -> bool:
    return c.algorithm.kl.coef > 0 and c.algorithm.kl.reference_model is not None


def _selects(c: RunConfig) -> bool:
    return bool(loss_traits(c.algorithm.loss).selects)


def _has_kl_in_advantages(c: RunConfig) -> bool:
    return c.algorithm.kl.in_reward or c.algorithm.kl.in_advantage


def _leaves_out(c: RunConfig) -> bool:
    return c.algorithm.correction.mask.is_active or c.algorithm.correction.reject.is_active


def _clamps_in_the_loss(c: RunConfig) -> bool:
    """`clamp` then replaces the ratio that the loss contains: it must be the same one."""
    correction = c.algorithm.correction
    is_weighted = loss_traits(c.algorithm.loss).is_weighted
    return is_weighted and correction.objective == "bypass" and correction.clamp.is_active


def _is_beyond(bound: float | None, other: float | None, sign: int) -> bool:
    return bound is not None and other is not None and sign * (bound - other) >= 0


def _is_seeded(c: RunConfig) -> bool:
    return c.mode.max_staleness == 0 if c.rollout.per_request_seed is None else c.rollout.per_request_seed


def _response_deadline(c: RunConfig) -> tuple[str, float]:
    key = "task.agent_timeout_s" if c.task.agent else "rollout.request_timeout_s"
    return key, attrgetter(key)(c)


_SELECTED = "selects tokens by their advantages before the step is split, and these are completed on the learner"
_FREE_OF_BOUNDS = "or algorithm.loss=importance_sampling with no bounds on the ratio but upper ones"
_DUPLICATE_GREEDY = "must be 1 with trainer.eval_temperature=0: greedy responses to one prompt are all the same"
_USE_TEMPERATURE = "use trainer.eval_temperature=1.0, or one sample"

_CONFLICTS: tuple[Conflict, ...] = (
    Conflict("name", lambda c: not re.fullmatch(r"[\w.\-+]+", c.name) or c.name in {".", ".."},
        "must be letters, digits, dot, minus, plus or underscore", "it names a directory"),
    Conflict("ray.address", lambda c: not c.ray.address, "must be local, auto or HOST:PORT",
        "use local for a private cluster"),
    Conflict("model.lora.rank", lambda c: c.model.lora.rank not in (0, *LORA_RANKS),
        f"must be 0 or one of {', '.join(map(str, LORA_RANKS))}: engines would pad any other rank",
        "use the next larger one, it costs the engines the same"),
    Conflict("model.lora.target_modules",
        lambda c: c.model.lora.rank > 0 and not re.fullmatch(r"\w+(\+\w+)*", c.model.lora.target_modules),
        "must be names of layers joined by +", "for example q_proj+v_proj"),
    # Prompts and agents.
    Conflict("task.train_path", lambda c: not c.task.train_path, "must name the training prompts",
        f"use {BUILTIN_TASK} or a file"),
    Conflict("task.curriculum",
        lambda c: c.task.curriculum != "none" and not c.task.difficulty_column and not c.task.pass_rate_column,
        "needs a measure of difficulty",
        "set task.difficulty_column or task.pass_rate_column to a column of the data set",
        ("task.difficulty_column", "task.pass_rate_column")),
    Conflict("task.pass_rate_min", lambda c: c.task.pass_rate_min > c.task.pass_rate_max,
        "must be at most task.pass_rate_max={c.task.pass_rate_max:g}", "for example 0.1 and 0.9",
        ("task.pass_rate_max",)),
    Conflict("task.pass_rate_min", _lets_no_group_in,
        "accepts no group: with rollout.group_size={c.rollout.group_size} a pass rate is a multiple of "
        "1/{c.rollout.group_size}, and none is in {c.task.pass_rate_min:g}..{c.task.pass_rate_max:g}",
        "widen the bounds, or raise rollout.group_size", ("task.pass_rate_max",)),
    Conflict("task.reward.name",
        lambda c: not c.task.agent and c.task.reward.name == "zero" and c.algorithm.advantage_estimator != "zero",
        "rewards nothing, and without task.agent no environment rewards the turns",
        "set task.agent, or use another reward", ("task.agent",)),
    Conflict("task.agent_max_sequences", lambda c: _has_sequences(c) and c.algorithm.uses_critic,
        "must be 1: a critic's returns end with their sequence, and the outcome comes after the last one",
        "use 1, or another estimator", (_ADVANTAGE,)),
    Conflict("task.agent_max_sequences", lambda c: _has_sequences(c) and _adds_up_within_a_sequence(c),
        "must be 1: with the KL in the reward, {chosen} adds up rewards within a sequence alone",
        "use 1, or another estimator, or the KL in the loss", (_ADVANTAGE,)),
    # The objective. The estimator that gives 0 leaves all teaching to the KL to a teacher.
    Conflict(_ADVANTAGE,
        lambda c: c.algorithm.advantage_estimator == "zero" and not _has_teacher(c),
        "gives every token 0, so that only a teacher teaches, and there is none",
        "set algorithm.kl.reference_model (and algorithm.kl.coef above 0), or use another estimator",
        ("algorithm.kl.reference_model", "algorithm.kl.coef")),
    Conflict(_PLACEMENT,
        lambda c: c.algorithm.advantage_estimator == "zero" and _has_teacher(c) and c.algorithm.kl.in_reward,
        f"cannot be reward: {_ADVANTAGE}=zero reads no reward, so nothing would be learned", "use advantage or loss",
        (_ADVANTAGE,)),
    Conflict("algorithm.overlong_penalty",
        lambda c: c.algorithm.overlong_buffer_tokens > 0 and c.algorithm.overlong_penalty == 0,
        "must be above 0: the buffer would cost nothing", f"raise it, or set {_BUFFER}=0", (_BUFFER,)),
    Conflict(_BUFFER, lambda c: c.algorithm.overlong_buffer_tokens > c.rollout.max_response_tokens,
        "must be at most rollout.max_response_tokens={c.rollout.max_response_tokens}",
        "it is the last part of a response: lower it, or use 0 for no penalty", ("rollout.max_response_tokens",)),
    Conflict("algorithm.group_filter",
        lambda c: bool(c.algorithm.group_filter) and not is_dotted_path(c.algorithm.group_filter),
        "must be a dotted path, package.module.function", f"or leave it empty; dynamic sampling is {_FILTER}"),
    Conflict("algorithm.cov_min", lambda c: c.algorithm.cov_min >= c.algorithm.cov_max,
        "must be below algorithm.cov_max={c.algorithm.cov_max:g}", "no token is between them", ("algorithm.cov_max",)),
    Conflict("critic.warmup_steps", lambda c: c.algorithm.uses_critic and _policy_steps(c) <= 0,
        "must be below trainer.total_steps={c.trainer.total_steps}", "the policy is never trained",
        ("trainer.total_steps",)),
    Conflict(_LOSS, lambda c: _selects(c) and c.algorithm.uses_critic, _SELECTED, "use ppo_clip", (_ADVANTAGE,)),
    Conflict(_LOSS, lambda c: _selects(c) and not c.algorithm.uses_critic and _has_kl_in_advantages(c), _SELECTED,
        "use ppo_clip", (_PLACEMENT,)),
    Conflict("algorithm.kl.estimator", lambda c: c.algorithm.kl.in_loss and c.algorithm.kl.estimator == "k1",
        f"has a meaningless gradient with {_PLACEMENT}=loss: its expectation is 0 everywhere",
        "use k1_straight_through or k2, whose gradient is that of the KL", (_PLACEMENT,)),
    Conflict("algorithm.kl.estimator",
        lambda c: c.algorithm.kl.in_reward and c.algorithm.kl.estimator.endswith("straight_through"),
        f"differs in its gradient alone, and with {_PLACEMENT}=reward only the value is read",
        "use the one without _straight_through", (_PLACEMENT,)),
    Conflict("algorithm.kl.estimator", lambda c: c.algorithm.kl.in_advantage and c.algorithm.kl.estimator != "k1",
        f"must be k1 with {_PLACEMENT}=advantage: only its mean gradient is that of the KL there",
        "use algorithm.kl.estimator=k1", (_PLACEMENT,)),
    # The off-policy correction.
    Conflict(_OBJECTIVE,
        lambda c: c.algorithm.correction.objective == "loglinear" and c.mode.max_staleness == 0,
        "interpolates over the age of tokens, which is always 0 with mode.max_staleness=0", "use bypass or decoupled",
        ("mode.max_staleness",)),
    Conflict(_OBJECTIVE,
        lambda c: not loss_traits(c.algorithm.loss).is_weighted and c.algorithm.correction.objective != "bypass",
        "must be bypass: {loss} contains no ratio", "use algorithm.loss=importance_sampling", (_LOSS,)),
    Conflict(_LOSS,
        lambda c: loss_traits(c.algorithm.loss).is_on_policy and c.algorithm.correction.objective == "bypass"
        and c.mode.max_staleness > 0 and not _leaves_out(c),
        "takes samples of mode.max_staleness={c.mode.max_staleness} for its own: {loss} contains no ratio",
        "use mode=sync, algorithm.loss=importance_sampling, or a correction that masks or rejects",
        ("mode.max_staleness", _CORRECTION)),
    Conflict(_OBJECTIVE,
        lambda c: loss_traits(c.algorithm.loss).is_weighted and loss_traits(c.algorithm.loss).is_bounded
        and c.algorithm.correction.objective == "decoupled",
        "has one update per batch, so the ratio to the policy at the start of the step is always 1, and {loss} cannot "
        "bound it",
        "use algorithm.loss=importance_sampling with this correction, or objective bypass or loglinear", (_LOSS,)),
    *(Conflict(f"{_CORRECTION}.clamp.{bound}",
        lambda c, bound=bound: _clamps_in_the_loss(c) and loss_traits(c.algorithm.loss).ratio is None
        and getattr(c.algorithm.correction.clamp, bound) is not None,
        f"must be null with {_OBJECTIVE}=bypass: {{loss}} {{own_bound[0]}}", "{own_bound[1]}", (_LOSS, _OBJECTIVE))
        for bound in ("lower", "upper")),
    Conflict(f"{_CORRECTION}.level",
        lambda c: _clamps_in_the_loss(c)
        and loss_traits(c.algorithm.loss).ratio not in (None, c.algorithm.correction.level),
        f"must be {{held}} with a clamp and {_OBJECTIVE}=bypass: that is the ratio that {{loss}} contains",
        "use {held}, or no clamp", (f"{_CORRECTION}.clamp", _LOSS, _OBJECTIVE)),
    *(Conflict(f"{_CORRECTION}.clamp.{bound}",
        lambda c, bound=bound, sign=sign: c.algorithm.correction.mask.metric == "ratio" and _is_beyond(
            getattr(c.algorithm.correction.clamp, bound), getattr(c.algorithm.correction.mask, bound), sign),
        f"has no effect because {_CORRECTION}.mask.{bound}={{c.algorithm.correction.mask.{bound}:g}} masks these",
        f"{move} it, or use null", (f"{_CORRECTION}.mask.{bound}",))
        for bound, sign, move in (("upper", 1, "lower"), ("lower", -1, "raise"))),
    # Staleness and shared devices.
    *(Conflict("mode.max_staleness",
        lambda c, name=name, wanted=wanted: c.mode.name == name and c.mode.max_staleness != wanted,
        f"must be {wanted} with mode.name={name}; the file of --config-name and the command line win over the group",
        f"add mode.max_staleness={wanted}, or use mode=async, which accepts any", ("mode.name",))
        for name, wanted in {"sync": 0, "one_step_off": 1}.items()),
    *(Conflict(key, lambda c, key=key, value=value: c.mode.shares_devices and attrgetter(key)(c) != value,
        f"must be {value_text(value)} with {{mode}}: {why}", "the group mode=colocated sets it", ("mode.name",))
        for key, (value, why) in _COLOCATED.items()),
    Conflict("trainer.eval_blocking",
        lambda c: c.mode.shares_devices and c.evaluates_while_training and not c.trainer.eval_blocking,
        "must be true with {mode}: engines cannot evaluate while they sleep", "the group mode=colocated sets it",
        ("mode.name",)),
    Conflict("weight_sync.transport",
        lambda c: c.mode.shares_devices and c.weight_sync.transport not in {"auto", "ipc", "shm", "gloo"},
        "connects two devices, and with {mode} learner and engine are on one", "use auto or ipc", ("mode.name",)),
    # Engines and sampling. Whether the tokenizer has the tokens is known when it is loaded.
    Conflict("rollout.max_model_len", lambda c: 0 < c.rollout.max_model_len < longest_sequence(c),
        "must be at least {limits}, or 0 to follow them", "raise it or lower those",
        ("task.max_prompt_tokens", "rollout.max_response_tokens")),
    Conflict("learner.max_tokens_per_micro_batch",
        lambda c: c.learner.max_tokens_per_micro_batch < longest_sequence(c),
        "must be at least {limits}: the longest sequence must fit into one micro-batch", "raise it or lower those",
        ("task.max_prompt_tokens", "rollout.max_response_tokens")),
    Conflict("rollout.stop", lambda c: not all(c.rollout.stop),
        "must not contain an empty text: it would end every response", "leave it out"),
    Conflict("rollout.stop_token_ids", lambda c: any(token_id < 0 for token_id in c.rollout.stop_token_ids),
        "must be ids of tokens, from 0", "use [] for none"),
    Conflict("rollout.min_concurrency",
        lambda c: c.rollout.concurrency == "adaptive" and c.rollout.min_concurrency >= _max_requests(c)[1],
        "must be below {max_requests}", "lower it, or use rollout.concurrency=fixed",
        ("rollout.max_num_seqs", "rollout.max_concurrency", "rollout.concurrency")),
    Conflict("rollout.max_concurrency",
        lambda c: c.rollout.concurrency == "adaptive" and _max_requests(c)[1] > c.rollout.max_num_seqs,
        "must be at most rollout.max_num_seqs={c.rollout.max_num_seqs}: more would wait inside the engine",
        "lower it, or use null", ("rollout.max_num_seqs", "rollout.concurrency")),
    Conflict("rollout.max_concurrency",
        lambda c: c.rollout.max_concurrency is not None and c.rollout.max_concurrency < c.rollout.num_workers,
        "must be at least rollout.num_workers={c.rollout.num_workers}: each of them needs its share", "raise it",
        ("rollout.num_workers",)),
    Conflict("rollout.repack_below",
        lambda c: c.rollout.repack_below is not None and _is_seeded(c) and not c.mode.shares_devices,
        "must be null with seeded requests: a moved request continues with another seed, and timing decides what moves",
        "leave it at null, or use rollout.per_request_seed=false", ("mode.max_staleness", "rollout.per_request_seed")),
    # Training, checkpoints, evaluation.
    Conflict("learner.num_ranks", lambda c: c.learner.num_ranks > _samples(c),
        "must be at most {samples}, the samples of one step (trainer.groups_per_step x rollout.group_size)",
        "a rank without samples does nothing", ("trainer.groups_per_step", "rollout.group_size")),
    Conflict("learner.warmup_steps",
        lambda c: c.learner.lr_schedule != "constant" and c.learner.warmup_steps >= _policy_steps(c),
        "leaves no step for the {c.learner.lr_schedule} schedule; must be below {policy_steps}, the steps that train "
        "the policy",
        "lower it or raise trainer.total_steps",
        ("trainer.total_steps", "learner.lr_schedule", "critic.warmup_steps")),
    Conflict("checkpoint.keep_every",
        lambda c: c.checkpoint.every_steps > 0 and c.checkpoint.keep_every % c.checkpoint.every_steps > 0,
        "must be a multiple of checkpoint.every_steps={c.checkpoint.every_steps}: no other step is saved",
        "for example {multiple}", ("checkpoint.every_steps",)),
    Conflict("trainer.stop_at_accuracy", lambda c: not c.evaluates and c.trainer.stop_at_accuracy is not None,
        "is never reached: evaluation is off", "set task.eval_path and eval_every",
        ("task.eval_path", "trainer.eval_every", "trainer.eval_at_start", "trainer.eval_at_end")),
    Conflict("task.eval_sets", lambda c: bool(c.task.eval_sets) and not c.task.eval_path,
        "are in addition to task.eval_path, which is empty",
        "name one of them there (eval/accuracy and trainer.stop_at_accuracy are about it), or ~task.eval_sets",
        ("task.eval_path", "trainer.eval_every")),
    Conflict("trainer.eval_temperature",
        lambda c: c.evaluates and 0 < c.trainer.eval_temperature < MIN_TEMPERATURE,
        f"must be 0 or at least {MIN_TEMPERATURE}: vLLM would sample at {MIN_TEMPERATURE}",
        "use 0 for greedy responses"),
    Conflict("trainer.eval_samples",
        lambda c: c.evaluates and c.trainer.eval_samples > 1 and c.trainer.eval_temperature == 0,
        _DUPLICATE_GREEDY, _USE_TEMPERATURE, ("trainer.eval_temperature",)),
    Conflict("trainer.eval_pass_k",
        lambda c: c.evaluates and c.trainer.eval_pass_k is not None and c.trainer.eval_pass_k > c.trainer.eval_samples,
        "must be at most trainer.eval_samples={c.trainer.eval_samples}: there is no estimate beyond it",
        "raise trainer.eval_samples", ("trainer.eval_samples",)),
    Conflict("trainer.eval_timeout_s", lambda c: c.evaluates and c.trainer.eval_timeout_s < _response_deadline(c)[1],
        "must be at least {deadline}: a single response may take that long", "raise it, or lower that",
        ("task.agent_timeout_s", "rollout.request_timeout_s")),
)  # fmt: skip


def _estimator_conflicts(t: EstimatorTraits) -> Sequence[Conflict]:
    def is_filtered(c: RunConfig) -> bool:
        return c.algorithm.dynamic_sampling and not t.greedy_baseline

    return (
        Conflict("rollout.group_size", lambda c: t.needs_peers and c.rollout.group_size == 1,
            "must be >= 2: {chosen} compares the responses of a group",
            "use rollout.group_size=8, or algorithm.advantage_estimator=reinforce", (_ADVANTAGE,)),
        Conflict("trainer.groups_per_step", lambda c: not t.needs_peers and t.spans_step and _samples(c) == 1,
            "must be >= 2 with one response per group: {chosen} normalises over the responses of a step",
            "every advantage would be 0; raise it", ("rollout.group_size", _ADVANTAGE)),
        # With gpg the count of responses with a reward other than 0 must be one of right responses.
        *(Conflict("algorithm.gpg_scale",
            lambda c, key=key: c.algorithm.advantage_estimator == "gpg" and c.algorithm.gpg_scale == "nonzero_rewards"
            and bool(attrgetter(key)(c)),
            f"counts responses with a reward other than 0, {why}", "use valid_groups", (key,))
            for key, why in {
                _BUFFER: "which the overlong penalty makes of wrong ones",
                "task.agent": "and turns may be rewarded regardless of the value of the response",
            }.items()),
        Conflict(_BUFFER,
            lambda c: t.uses_parts and is_own(c.algorithm.advantage_estimator)
            and c.algorithm.overlong_buffer_tokens > 0,
            "has no effect because {chosen} takes the parts of the reward, shaping changes their total",
            "leave it at 0", (_ADVANTAGE,)),
        Conflict("task.agent", lambda c: t.uses_parts and bool(c.task.agent),
            "may reward turns, which are no named part of a reward: {chosen} would not see them",
            "use an estimator of the total reward", (_ADVANTAGE,)),
        *(Conflict(f"algorithm.on_failure.{name}",
            lambda c, name=name: t.uses_parts and getattr(c.algorithm.on_failure, name) == "zero",
            "gives no parts of a reward, which {chosen} reads", "use drop", (_ADVANTAGE,))
            for name in ("timeout", "reward_timeout")),
        Conflict("rollout.top_k", lambda c: c.rollout.top_k == 1 and (t.needs_peers or t.greedy_baseline),
            "samples greedily: {chosen} compares with "
            f"{'the greedy response' if t.greedy_baseline else 'the responses of a group'}, which would be the same",
            "use 0, or 2 and more", (_ADVANTAGE,)),
        # Dynamic sampling drops groups of equal rewards: wrong where those would teach something. With a greedy
        # baseline it drops the groups whose every response has the reward of that one, whatever their size.
        Conflict(_FILTER, lambda c: is_filtered(c) and c.rollout.group_size == 1,
            "drops every group: one response never differs from itself", "use false", ("rollout.group_size",)),
        Conflict(_FILTER, lambda c: is_filtered(c) and c.rollout.group_size > 1 and not t.needs_peers,
            "drops groups that teach: {chosen} does not compare the responses of a group", "use false", (_ADVANTAGE,)),
        Conflict(_FILTER, lambda c: is_filtered(c) and c.rollout.group_size > 1 and t.needs_peers and t.uses_parts,
            "looks at the total reward: {chosen} also learns from responses that differ in their parts alone",
            "use false", (_ADVANTAGE,)),
        Conflict(_FILTER, lambda c: c.algorithm.dynamic_sampling and _has_kl_in_advantages(c),
            "ignores the KL: groups of equal rewards still differ in it", "use false", (_PLACEMENT,)),
        # Estimators that have no meaning on rewards less the KL.
        Conflict(_PLACEMENT, lambda c: c.algorithm.kl.in_reward and t.uses_parts,
            "cannot be reward: {chosen} takes the parts of the reward, the KL changes their total",
            "use loss, or another estimator", (_ADVANTAGE,)),
        Conflict(_PLACEMENT,
            lambda c: c.algorithm.kl.in_reward and is_own(c.algorithm.advantage_estimator) and t.reward_to_go,
            "cannot be reward: {chosen} declares reward_to_go, and on the learner nothing would call it",
            "use loss, or another estimator", (_ADVANTAGE,)),
        Conflict(_PLACEMENT, lambda c: c.algorithm.kl.in_reward and c.algorithm.advantage_estimator == "gpg",
            "cannot be reward: gpg counts responses that teach nothing, and with the KL every response differs",
            "use loss, or another estimator", (_ADVANTAGE,)),
        Conflict("algorithm.mask_truncated",
            lambda c: c.algorithm.kl.in_reward and c.algorithm.mask_truncated and (t.needs_peers or t.spans_step),
            "excludes truncated responses before their KL is known, and {chosen} compares with them",
            "use false, or the KL in the loss", (_PLACEMENT, _ADVANTAGE)),
    )  # fmt: skip


# What a row cannot say: entries of maps, and one message for several keys


def _values(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    for name in config.device.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield Problem(key="device.env", value=name, message="is not the name of an environment variable")
    for key, path in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        message = hint = ""
        if path and task.reader == "arithmetic" and path != BUILTIN_TASK:
            message, hint = (
                f"reads {BUILTIN_TASK} only, not {key}={path}",
                "use task.reader=auto, or jsonl, parquet or hf",
            )
        elif task.reader not in {"auto", "arithmetic"} and path == BUILTIN_TASK:
            message, hint = f"cannot read {key}={path}", f"use task.reader=auto, or set {key} too"
        if message:
            yield Problem(key="task.reader", value=task.reader, message=message, hint=hint, related=(key,))
    try:
        json.dumps(task.chat_template_kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        message = f"must be values of JSON: {error}"
        hint = "use texts, finite numbers, true, false, null, and lists and maps of these"
        value = str(task.chat_template_kwargs)
        yield Problem(key="task.chat_template_kwargs", value=value, message=message, hint=hint)


def _bounds(config: RunConfig) -> Iterator[Problem]:
    """Bounds that cut nothing, or also the tokens on which both policies agree."""
    correction = config.algorithm.correction
    metrics = {"clamp": "ratio", "mask": correction.mask.metric, "reject": correction.reject.metric}
    for action, metric in metrics.items():
        bounds, agreed = getattr(correction, action), 1.0 if metric == "ratio" else 0.0
        related = () if action == "clamp" else (f"{_CORRECTION}.{action}.metric",)
        where = f"{agreed:g}, the {metric} where both policies agree"
        found: dict[str, tuple[str, str]] = {}
        if bounds.lower is not None and metric != "k1" and bounds.lower <= 0:
            found["lower"] = f"has no effect because {metric} is never below 0", "use null"
        elif bounds.lower is not None and bounds.lower >= agreed:
            found["lower"] = f"must be below {where}", "lower it, or use null"
        if bounds.upper is not None and bounds.upper <= agreed:
            found["upper"] = f"must be above {where}", "raise it, or use null"
        for bound, (message, hint) in found.items():
            value = value_text(getattr(bounds, bound))
            yield Problem(
                key=f"{_CORRECTION}.{action}.{bound}", value=value, message=message, hint=hint, related=related
            )


def _truncated_sampling(config: RunConfig) -> Iterator[Problem]:
    """Sampling from a part of the vocabulary together with something that acts on the ratio of learner and engine.

    Engines report the log-prob of a token among those that `top_p` and `top_k` left, the learner that among all. Equal
    weights then have a ratio below 1: the right weight of the token, and not one that a bound may cut.
    """
    rollout, acts = config.rollout, _acts_on_ratio(config)
    if acts is None:
        return
    does = "acts on that" if loss_traits(config.algorithm.loss).is_weighted else "has none"
    why = f"among fewer tokens equal weights have a ratio of learner to engine below 1, and {acts} {does}"
    for name, neutral, is_set in (("top_p", 1, rollout.top_p < 1), ("top_k", 0, rollout.top_k > 0)):
        if is_set:
            yield Problem(
                key=f"rollout.{name}",
                value=value_text(getattr(rollout, name)),
                message=f"must be {neutral}: {why}",
                hint=f"use {neutral}, {_FREE_OF_BOUNDS}",
                related=(acts.partition("=")[0],),
            )


def _acts_on_ratio(config: RunConfig) -> str | None:
    """The first key under which a ratio below 1 for equal weights is taken for a policy that has moved."""
    algorithm, correction = config.algorithm, config.algorithm.correction
    acts = {
        f"{_LOSS}={algorithm.loss}": loss_traits(algorithm.loss).is_bounded,
        f"{_PLACEMENT}={algorithm.kl.apply_to}": algorithm.kl.in_reward or algorithm.kl.in_advantage,
        f"{_OBJECTIVE}=loglinear": correction.objective == "loglinear",
        f"{_CORRECTION}.clamp.lower": correction.clamp.lower is not None,
        f"{_CORRECTION}.mask.lower": correction.mask.lower is not None,
        f"{_CORRECTION}.mask.metric": correction.mask.is_active and correction.mask.metric != "ratio",
        f"{_CORRECTION}.reject": correction.reject.is_active,
    }
    return next((key for key, is_set in acts.items() if is_set), None)


def _engine_args(config: RunConfig) -> Iterator[Problem]:
    """Arguments that are ours to set, or that break what a run relies on."""
    limit = config.rollout.max_num_seqs
    for name, value in config.rollout.engine_args.items():
        hint, related = "leave it out", ()
        if name == "max_num_batched_tokens" and isinstance(value, int) and value < limit:
            message = f"{name} must be at least rollout.max_num_seqs={limit}: a step has a token of each"
            hint, related = "raise it, or leave it out", ("rollout.max_num_seqs",)
        elif name == "distributed_executor_backend" and value not in ("mp", "uni"):
            message = f"{name} must be one of mp, uni: an engine's workers are processes of its host"
        elif name in _OWN_KEYS:
            message, hint, related = f"{name} is set by {_OWN_KEYS[name]}", f"use {_OWN_KEYS[name]}", (_OWN_KEYS[name],)
        elif name in _RELIED_ON:
            message = f"must not contain {name}: {_RELIED_ON[name]}"
        else:
            continue
        yield Problem(key="rollout.engine_args", value=f"{name}: {value}", message=message, hint=hint, related=related)


def _eval_sets(config: RunConfig) -> Iterator[Problem]:
    trainer = config.trainer
    for name, one in config.task.eval_sets.items() if config.evaluates else ():
        key, samples = f"task.eval_sets.{name}", one.samples or 0
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name in RESERVED_NAMES:
            message = f"a name consists of letters, digits and . _ -, and is none of {', '.join(RESERVED_NAMES)}"
            yield Problem(key="task.eval_sets", value=name, message=message, hint="it is part of eval/NAME/accuracy")
        if not one.path:
            hint = "set it, or leave the set out"
            yield Problem(key=f"{key}.path", value="", message="must name held-out prompts", hint=hint)
        if samples > 1 and trainer.eval_temperature == 0:
            related = ("trainer.eval_temperature",)
            yield Problem(
                key=f"{key}.samples",
                value=str(samples),
                message=_DUPLICATE_GREEDY,
                hint=_USE_TEMPERATURE,
                related=related,
            )
        if samples and trainer.eval_pass_k is not None and samples < trainer.eval_pass_k:
            message = f"must be at least trainer.eval_pass_k={trainer.eval_pass_k}: there is no estimate beyond it"
            hint, related = "raise it, or use trainer.eval_pass_k=null: each set's own number", ("trainer.eval_pass_k",)
            yield Problem(key=f"{key}.samples", value=str(samples), message=message, hint=hint, related=related)


_CHECKS = (_values, _bounds, _truncated_sampling, _engine_args, _eval_sets)
