"""Combinations of values that cannot work. Pure: reads the configuration alone. Keys without effect: `inactive.py`."""

from __future__ import annotations

import json
import math
import re
from operator import attrgetter
from typing import TYPE_CHECKING

from trainer.config.algorithm import EstimatorTraits, is_own, loss_traits, traits_of
from trainer.config.field import is_dotted_path, value_text
from trainer.config.inactive import BUILTIN_TASK
from trainer.config.schema import problem
from weight_sync.vllm.compat import LORA_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from trainer.config.schema import RunConfig
    from trainer.errors import Problem

MIN_TEMPERATURE = 0.01
"""vLLM raises what is below, and not 0, to it; the learner would compute with the lower one."""
RESERVED_NAMES = ("accuracy", "num_prompts", "pass_at", "reward")
"""Not for evaluation sets: their metrics would have the names of others, as `eval/accuracy/...` is of a reward."""

_ADVANTAGE, _LOSS, _PLACEMENT = "algorithm.advantage_estimator", "algorithm.loss", "algorithm.kl.apply_to"
_BUFFER, _FILTER, _SEQUENCES = (
    "algorithm.overlong_buffer_tokens",
    "algorithm.dynamic_sampling",
    "task.agent_max_sequences",
)
_CORRECTION = "algorithm.correction"
_OBJECTIVE = f"{_CORRECTION}.objective"
_UPDATES = ("learner.updates_per_batch", "learner.num_mini_batches")
_LIMITS = ("task.max_prompt_tokens", "rollout.max_response_tokens")
_COLOCATED: Mapping[str, tuple[object, str]] = {
    "mode.in_flight": ("abort", "a sleeping engine has no cache, so its requests are returned and continue afterwards"),
    "weight_sync.commit": ("inplace", "nothing is generated while a version moves, so a staging buffer gains nothing"),
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
SIZES_OF_CACHE = ("kv_cache_memory_bytes", "num_gpu_blocks_override")
"""Engine arguments with which an engine takes another share of its device than `rollout.gpu_memory_utilization`."""
_RELIED_ON = {
    "logprobs_mode": "off-policy correction needs the log-probs of the distribution that tokens are sampled from",
    "worker_extension_cls": "weight sync runs in it",
    "scheduler_cls": "it sends the log-probs of a step together",
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


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest response."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


def longest_slice(config: RunConfig) -> int:
    """Tokens of the longest sequence on one of the learner ranks that share it."""
    return -(-longest_sequence(config) // config.learner.context_parallel_size)


def check_combinations(config: RunConfig) -> list[Problem]:
    """Every problem. Each value is known to have the right type and range."""
    found = [problem for check in _CHECKS for problem in check(config)]
    # What a user's own estimator needs is known once it is imported, which preflight does.
    if not is_own(config.algorithm.advantage_estimator):
        found += estimator_problems(config, traits_of(config.algorithm))
    return found


def pairing_problems(c: RunConfig) -> Iterator[Problem]:
    """On shared accelerators: every device has one rank, and the same number of engine workers. A CPU has no devices to
    pair on."""
    rollout, replicas = c.rollout, c.rollout.num_replicas
    workers = replicas * rollout.tensor_parallel_size
    if not c.mode.shares_devices or c.learner.num_ranks * rollout.engines_per_device == workers:
        return
    key, sign, number, what = "rollout.tensor_parallel_size", "*", rollout.tensor_parallel_size, "one engine worker"
    if (per_device := rollout.engines_per_device) > 1 and number == 1:
        key, sign, number, what = "rollout.engines_per_device", "/", per_device, f"{per_device} engines"
        workers /= per_device
    message = (
        f"must be rollout.num_replicas {sign} {key} = {replicas} {sign} {number} = {workers:g} with "
        f"mode.name={c.mode.name}: every device has one learner rank and {what}"
    )
    yield problem(c, "learner.num_ranks", message, "change one of them", "rollout.num_replicas", key, "mode.name")


def _policy_steps(c: RunConfig) -> int:
    return c.trainer.total_steps - (c.critic.warmup_steps if c.algorithm.uses_critic else 0)


def _samples(c: RunConfig) -> int:
    return c.trainer.groups_per_step * c.rollout.group_size


def _has_kl_in_advantages(c: RunConfig) -> bool:
    return c.algorithm.kl.in_reward or c.algorithm.kl.in_advantage


def _general(c: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[\w.\-+]+", c.name) or c.name in {".", ".."}:
        yield problem(c, "name", "may only contain letters, digits and . - + _", "it names a directory")
    for name in c.device.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield problem(c, "device.env", "is not the name of an environment variable", value=name)
    if not c.ray.address:
        yield problem(c, "ray.address", "must be local, auto or HOST:PORT", "use local for a private cluster")
    if c.model.lora.rank not in (0, *LORA_RANKS):
        ranks = ", ".join(map(str, LORA_RANKS))
        hint = "use the next larger one, it costs the engines the same"
        yield problem(c, "model.lora.rank", f"must be 0 or one of {ranks}: engines would pad any other rank", hint)
    if c.model.lora.rank > 0 and not re.fullmatch(r"\w+(\+\w+)*", c.model.lora.target_modules):
        message = "must be names of layers joined by +"
        yield problem(c, "model.lora.target_modules", message, "for example q_proj+v_proj")


def _prompts(c: RunConfig) -> Iterator[Problem]:
    task = c.task
    if not task.train_path:
        yield problem(c, "task.train_path", "must name the training prompts", f"use {BUILTIN_TASK} or a file")
    for key, path in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        if path and task.reader == "arithmetic" and path != BUILTIN_TASK:
            hint = "use task.reader=auto, or jsonl, parquet or hf"
            yield problem(c, "task.reader", f"reads {BUILTIN_TASK} only, not {key}={path}", hint, key)
        elif task.reader not in {"auto", "arithmetic"} and path == BUILTIN_TASK:
            yield problem(c, "task.reader", f"cannot read {key}={path}", f"use task.reader=auto, or set {key} too", key)
    try:
        json.dumps(task.chat_template_kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        hint = "use texts, finite numbers, true, false, null, and lists and maps of these"
        yield problem(c, "task.chat_template_kwargs", f"must be JSON values: {error}", hint)
    if task.curriculum != "none" and not task.difficulty_column and not task.pass_rate_column:
        hint = "set task.difficulty_column or task.pass_rate_column to a column of the data set"
        columns = ("task.difficulty_column", "task.pass_rate_column")
        yield problem(c, "task.curriculum", "needs a measure of difficulty", hint, *columns)
    lowest, highest, size = task.pass_rate_min, task.pass_rate_max, c.rollout.group_size
    message = hint = ""
    if lowest > highest:
        message, hint = f"must be at most task.pass_rate_max={highest:g}", "for example 0.1 and 0.9"
    elif not any(lowest <= n / size <= highest for n in range(size + 1)):
        message = (
            f"accepts no group: with rollout.group_size={size} a pass rate is a multiple of 1/{size}, and none is in "
            f"{lowest:g}..{highest:g}"
        )
        hint = "widen the bounds, or raise rollout.group_size"
    if message:
        yield problem(c, "task.pass_rate_min", message, hint, "task.pass_rate_max")
    if not task.agent and task.reward.name == "zero" and c.algorithm.advantage_estimator != "zero":
        message = "rewards nothing, and without task.agent no environment rewards the turns"
        yield problem(c, "task.reward.name", message, "set task.agent, or use another reward", "task.agent")


def _objective(c: RunConfig) -> Iterator[Problem]:
    algorithm, kl = c.algorithm, c.algorithm.kl
    chosen = f"{_ADVANTAGE}={algorithm.advantage_estimator}"
    if c.task.agent and c.task.agent_max_sequences > 1:
        if algorithm.uses_critic:
            message = "must be 1: a critic's returns end with their sequence, and the outcome comes after the last one"
            yield problem(c, _SEQUENCES, message, "use 1, or another estimator", _ADVANTAGE)
        # The learner takes later rewards from the tokens that follow in the same sequence.
        elif kl.in_reward and not is_own(algorithm.advantage_estimator) and traits_of(algorithm).reward_to_go:
            message = f"must be 1: with the KL in the reward, {chosen} sums rewards only within a sequence"
            yield problem(c, _SEQUENCES, message, "use 1, or another estimator, or the KL in the loss", _ADVANTAGE)
    if algorithm.advantage_estimator == "zero":  # all teaching is left to the KL to a teacher
        if kl.coef == 0 or kl.reference_model is None:
            message = "gives every token an advantage of 0, so only a teacher can train the policy, and there is none"
            hint = "set algorithm.kl.reference_model (and algorithm.kl.coef above 0), or use another estimator"
            yield problem(c, _ADVANTAGE, message, hint, "algorithm.kl.reference_model", "algorithm.kl.coef")
        elif kl.in_reward:
            message = f"cannot be reward: {_ADVANTAGE}=zero reads no reward, so nothing would be learned"
            yield problem(c, _PLACEMENT, message, "use advantage or loss", _ADVANTAGE)
    if algorithm.overlong_buffer_tokens > 0 and algorithm.overlong_penalty == 0:
        message, hint = "must be above 0, or the buffer costs nothing", f"raise it, or set {_BUFFER}=0"
        yield problem(c, "algorithm.overlong_penalty", message, hint, _BUFFER)
    if algorithm.overlong_buffer_tokens > c.rollout.max_response_tokens:
        message = f"must be at most rollout.max_response_tokens={c.rollout.max_response_tokens}"
        hint = "it is the last part of a response: lower it, or use 0 for no penalty"
        yield problem(c, _BUFFER, message, hint, "rollout.max_response_tokens")
    if algorithm.group_filter and not is_dotted_path(algorithm.group_filter):
        hint = f"or leave it empty; dynamic sampling is {_FILTER}"
        yield problem(c, "algorithm.group_filter", "must be a dotted path, package.module.function", hint)
    if algorithm.cov_min >= algorithm.cov_max:
        message = f"must be below algorithm.cov_max={algorithm.cov_max:g}"
        yield problem(c, "algorithm.cov_min", message, "no token is between them", "algorithm.cov_max")
    if algorithm.uses_critic and _policy_steps(c) <= 0:
        message = f"must be below trainer.total_steps={c.trainer.total_steps}"
        yield problem(c, "critic.warmup_steps", message, "the policy is never trained", "trainer.total_steps")
    if loss_traits(algorithm.loss).selects and (algorithm.uses_critic or _has_kl_in_advantages(c)):
        message = "selects tokens by their advantages before the step is split, and these are completed on the learner"
        yield problem(c, _LOSS, message, "use ppo_clip", _ADVANTAGE if algorithm.uses_critic else _PLACEMENT)
    message = hint = ""
    if kl.in_loss and kl.estimator == "k1":
        message = f"has a meaningless gradient with {_PLACEMENT}=loss: its expectation is 0 everywhere"
        hint = "use k1_straight_through or k2, whose gradient is that of the KL"
    elif kl.in_reward and kl.estimator.endswith("straight_through"):
        message = f"differs only in its gradient, and with {_PLACEMENT}=reward only the value is read"
        hint = "use the one without _straight_through"
    elif kl.in_advantage and kl.estimator != "k1":
        message = f"must be k1 with {_PLACEMENT}=advantage: only its expected gradient is that of the KL there"
        hint = "use algorithm.kl.estimator=k1"
    if message:
        yield problem(c, "algorithm.kl.estimator", message, hint, _PLACEMENT)


def _correction(c: RunConfig) -> Iterator[Problem]:
    loss, correction, staleness = loss_traits(c.algorithm.loss), c.algorithm.correction, c.mode.max_staleness
    clamp, mask, is_bypass = correction.clamp, correction.mask, correction.objective == "bypass"
    named = f"{_LOSS}={c.algorithm.loss}"
    if correction.objective == "loglinear" and staleness == 0:
        message = "interpolates over the age of tokens, which is always 0 with mode.max_staleness=0"
        yield problem(c, _OBJECTIVE, message, "use bypass or decoupled", "mode.max_staleness")
    if not loss.is_weighted and not is_bypass:
        message, hint = f"must be bypass: {named} contains no ratio", "use algorithm.loss=importance_sampling"
        yield problem(c, _OBJECTIVE, message, hint, _LOSS)
    if loss.is_on_policy and is_bypass and not mask.is_active and not correction.reject.is_active:
        if staleness > 0:
            message = f"treats samples of mode.max_staleness={staleness} as on-policy because {named} contains no ratio"
            hint = "use mode=sync, algorithm.loss=importance_sampling, or a correction that masks or rejects"
            yield problem(c, _LOSS, message, hint, "mode.max_staleness", _CORRECTION)
        elif c.learner.num_updates > 1:
            message = f"treats the later updates of a batch as on-policy because {named} contains no ratio"
            hint = "use one update per batch, algorithm.loss=ppo_clip, or a correction that masks or rejects"
            yield problem(c, _LOSS, message, hint, *_UPDATES, _CORRECTION)
    if loss.is_weighted and loss.is_bounded and correction.objective == "decoupled" and c.learner.num_updates == 1:
        message = (
            "has one update per batch, so the ratio to the policy at the start of the step is always 1, and "
            f"{named} cannot bound it"
        )
        hint = (
            "use algorithm.loss=importance_sampling with this correction, objective bypass or loglinear, or several "
            "updates (learner.updates_per_batch, learner.num_mini_batches)"
        )
        yield problem(c, _OBJECTIVE, message, hint, _LOSS)
    if loss.is_weighted and is_bypass and clamp.is_active:
        # The clamped ratio replaces the one that the loss contains: it must be the same one.
        for bound in ("lower", "upper") if loss.ratio is None else ():
            if getattr(clamp, bound) is not None:
                message = f"must be null with {_OBJECTIVE}=bypass: {named} {loss.own_bound[0]}"
                yield problem(c, f"{_CORRECTION}.clamp.{bound}", message, loss.own_bound[1], _LOSS, _OBJECTIVE)
        if loss.ratio not in (None, correction.level):
            message = (
                f"must be {loss.ratio} with a clamp and {_OBJECTIVE}=bypass: that is the ratio that {named} contains"
            )
            keys = (f"{_CORRECTION}.clamp", _LOSS, _OBJECTIVE)
            yield problem(c, f"{_CORRECTION}.level", message, f"use {loss.ratio}, or no clamp", *keys)
    for bound, sign, move in (("upper", 1, "lower"), ("lower", -1, "raise")):
        clamped, masked = getattr(clamp, bound), getattr(mask, bound)
        if mask.metric == "ratio" and None not in (clamped, masked) and sign * (clamped - masked) >= 0:
            key = f"{_CORRECTION}.mask.{bound}"
            message = f"has no effect because {key}={masked:g} masks these"
            yield problem(c, f"{_CORRECTION}.clamp.{bound}", message, f"{move} it, or use null", key)


def _correction_bounds(c: RunConfig) -> Iterator[Problem]:
    """Bounds that cut nothing, or also the tokens on which both policies agree."""
    correction = c.algorithm.correction
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
            yield problem(c, f"{_CORRECTION}.{action}.{bound}", message, hint, *related)


def _truncated_sampling(c: RunConfig) -> Iterator[Problem]:
    """Sampling from a part of the vocabulary together with something that acts on the ratio of learner and engine.

    Engines report the log-prob of a token among those that `top_p` and `top_k` left, the learner that among all. Equal
    weights then have a ratio below 1: the right weight of the token, and not one that a bound may cut.
    """
    algorithm, correction, loss = c.algorithm, c.algorithm.correction, loss_traits(c.algorithm.loss)
    conditions = {
        f"{_LOSS}={algorithm.loss}": loss.is_bounded,
        f"{_PLACEMENT}={algorithm.kl.apply_to}": _has_kl_in_advantages(c),
        f"{_OBJECTIVE}=loglinear": correction.objective == "loglinear",
        f"{_CORRECTION}.clamp.lower": correction.clamp.lower is not None,
        f"{_CORRECTION}.mask.lower": correction.mask.lower is not None,
        f"{_CORRECTION}.mask.metric": correction.mask.is_active and correction.mask.metric != "ratio",
        f"{_CORRECTION}.reject": correction.reject.is_active,
    }
    acts = next((key for key, is_set in conditions.items() if is_set), None)
    if acts is None:
        return
    does = "acts on that" if loss.is_weighted else "has none"
    why = f"among fewer tokens equal weights have a ratio of learner to engine below 1, and {acts} {does}"
    free = "or algorithm.loss=importance_sampling with no bounds on the ratio but upper ones"
    for name, neutral, is_set in (("top_p", 1, c.rollout.top_p < 1), ("top_k", 0, c.rollout.top_k > 0)):
        if is_set:
            key, message = acts.partition("=")[0], f"must be {neutral}: {why}"
            yield problem(c, f"rollout.{name}", message, f"use {neutral}, {free}", key)


def estimator_problems(c: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Keys that do not go together with an estimator of these traits."""
    name, kl, size = c.algorithm.advantage_estimator, c.algorithm.kl, c.rollout.group_size
    chosen, needs_peers, uses_parts = f"{_ADVANTAGE}={name}", traits.needs_peers, traits.uses_parts
    if needs_peers and size == 1:
        message = f"must be >= 2: {chosen} compares the responses of a group"
        hint = "use rollout.group_size=8, or algorithm.advantage_estimator=reinforce"
        yield problem(c, "rollout.group_size", message, hint, _ADVANTAGE)
    if not needs_peers and traits.spans_step and _samples(c) == 1:
        message = f"must be >= 2 with one response per group: {chosen} normalises over the responses of a step"
        hint = "every advantage would be 0; raise it"
        yield problem(c, "trainer.groups_per_step", message, hint, "rollout.group_size", _ADVANTAGE)
    # With gpg the count of responses with a reward other than 0 must be one of right responses.
    for key, why in {
        _BUFFER: "which the overlong penalty makes of wrong ones",
        "task.agent": "and turns may be rewarded regardless of the value of the response",
    }.items():
        if name == "gpg" and c.algorithm.gpg_scale == "nonzero_rewards" and attrgetter(key)(c):
            message = f"counts responses with a reward other than 0, {why}"
            yield problem(c, "algorithm.gpg_scale", message, "use valid_groups", key)
    if uses_parts:
        for part, weight in c.algorithm.gdpo_weights.items():
            if weight == 0 or not math.isfinite(weight):
                hint, value = "to leave out the part, leave out the entry", f"{part}: {weight:g}"
                yield problem(c, "algorithm.gdpo_weights", "must be finite and not 0", hint, value=value)
        if is_own(name) and c.algorithm.overlong_buffer_tokens > 0:
            message = f"has no effect because {chosen} reads the parts of the reward, and shaping changes their total"
            yield problem(c, _BUFFER, message, "leave it at 0", _ADVANTAGE)
        if c.task.agent:
            message = f"may reward turns, which {chosen} ignores: it reads the named parts of a reward"
            yield problem(c, "task.agent", message, "use an estimator of the total reward", _ADVANTAGE)
        for failure in ("timeout", "reward_timeout"):
            if getattr(c.algorithm.on_failure, failure) == "zero":
                message = f"gives no named parts of a reward, which {chosen} reads"
                yield problem(c, f"algorithm.on_failure.{failure}", message, "use drop", _ADVANTAGE)
    if c.rollout.top_k == 1 and (needs_peers or traits.greedy_baseline):
        others = "the greedy response" if traits.greedy_baseline else "the responses of a group"
        message = f"samples greedily: {chosen} compares with {others}, which would be the same"
        yield problem(c, "rollout.top_k", message, "use 0, or 2 and more", _ADVANTAGE)
    if c.algorithm.dynamic_sampling:
        yield from _dynamic_sampling(c, traits)
    if kl.in_reward:  # estimators that have no meaning on rewards less the KL
        message, hint = "", "use loss, or another estimator"
        if uses_parts:
            message = f"{chosen} reads the parts of the reward, and the KL changes their total"
        elif is_own(name) and traits.reward_to_go:
            message = f"{chosen} declares reward_to_go, and on the learner nothing would call it"
        elif name == "gpg":
            message = "gpg counts responses that teach nothing, and with the KL every response differs"
        if message:
            yield problem(c, _PLACEMENT, f"cannot be reward: {message}", hint, _ADVANTAGE)
        if c.algorithm.mask_truncated and (needs_peers or traits.spans_step):
            message = f"excludes truncated responses before their KL is known, and {chosen} compares with them"
            hint = "use false, or the KL in the loss"
            yield problem(c, "algorithm.mask_truncated", message, hint, _PLACEMENT, _ADVANTAGE)


def _dynamic_sampling(c: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """It drops groups of equal rewards: wrong where those would teach something. With a greedy baseline it drops the
    groups whose every response has the reward of that one, whatever their size."""
    chosen = f"{_ADVANTAGE}={c.algorithm.advantage_estimator}"
    found: dict[str, str] = {}
    if not traits.greedy_baseline:
        if c.rollout.group_size == 1:
            found["rollout.group_size"] = "drops every group: one response never differs from itself"
        elif not traits.needs_peers:
            found[_ADVANTAGE] = f"drops groups that teach: {chosen} does not compare the responses of a group"
        elif traits.uses_parts:
            found[_ADVANTAGE] = (
                f"looks at the total reward: {chosen} also learns from responses that differ in their parts alone"
            )
    if _has_kl_in_advantages(c):
        found[_PLACEMENT] = "ignores the KL: groups of equal rewards still differ in it"
    for key, message in found.items():
        yield problem(c, _FILTER, message, "use false", key)


def _modes(c: RunConfig) -> Iterator[Problem]:
    name, staleness = c.mode.name, c.mode.max_staleness
    wanted = {"sync": 0, "one_step_off": 1}.get(name, staleness)
    if staleness != wanted:
        message = (
            f"must be {wanted} with mode.name={name}; the file of --config-name and the command line win over the group"
        )
        hint = f"add mode.max_staleness={wanted}, or use mode=async, which accepts any"
        yield problem(c, "mode.max_staleness", message, hint, "mode.name")
    if not c.mode.shares_devices:
        return
    for key, (value, why) in _COLOCATED.items():
        if attrgetter(key)(c) != value:
            message = f"must be {value_text(value)} with mode.name={name}: {why}"
            yield problem(c, key, message, "the group mode=colocated sets it", "mode.name")
    if c.evaluates_while_training and not c.trainer.eval_blocking:
        message = f"must be true with mode.name={name}: engines cannot evaluate while they sleep"
        yield problem(c, "trainer.eval_blocking", message, "the group mode=colocated sets it", "mode.name")
    if c.weight_sync.transport not in {"auto", "ipc", "shm", "gloo"}:
        message = f"connects two devices, but with mode.name={name} learner and engine share one"
        yield problem(c, "weight_sync.transport", message, "use auto or ipc", "mode.name")


def _engines(c: RunConfig) -> Iterator[Problem]:
    """Whether the tokenizer has the tokens is known when it is loaded."""
    rollout, longest = c.rollout, longest_sequence(c)
    if rollout.engines_per_device > 1 and rollout.tensor_parallel_size > 1:
        message = "must be 1 if an engine spans several devices"
        yield problem(c, "rollout.engines_per_device", message, "lower one of them", "rollout.tensor_parallel_size")
    elif rollout.engines_per_device > rollout.num_replicas:
        message = f"must be at most rollout.num_replicas = {rollout.num_replicas}, the number of engines"
        yield problem(c, "rollout.engines_per_device", message, "change one of them", "rollout.num_replicas")
    limits = f"must be at least {' + '.join(_LIMITS)} = {longest}"
    if 0 < rollout.max_model_len < longest:
        yield problem(c, "rollout.max_model_len", f"{limits}, or 0 to follow them", "raise it or lower those", *_LIMITS)
    tokens, size = c.learner.max_tokens_per_micro_batch, c.learner.context_parallel_size
    if tokens != "auto" and tokens < longest_slice(c):
        shared = f" / learner.context_parallel_size = {longest_slice(c)}" if size > 1 else ""
        message = f"{limits}{shared}: the longest sequence must fit into one micro-batch"
        hint = "raise it or lower those, or raise learner.context_parallel_size"
        yield problem(c, "learner.max_tokens_per_micro_batch", message, hint, *_LIMITS)
    if not all(rollout.stop):
        yield problem(c, "rollout.stop", "must not contain an empty text: it would end every response", "leave it out")
    if any(token_id < 0 for token_id in rollout.stop_token_ids):
        yield problem(c, "rollout.stop_token_ids", "must be ids of tokens, from 0", "use [] for none")
    if rollout.concurrency == "adaptive":
        name, highest = "max_concurrency", rollout.max_concurrency
        if highest is None:
            name, highest = "max_num_seqs", rollout.max_num_seqs
        if highest != "auto" and rollout.min_concurrency >= highest:
            message, hint = f"must be below rollout.{name}={highest}", "lower it, or use rollout.concurrency=fixed"
            keys = ("rollout.max_num_seqs", "rollout.max_concurrency", "rollout.concurrency")
            yield problem(c, "rollout.min_concurrency", message, hint, *keys)
        if highest != "auto" and rollout.max_num_seqs != "auto" and highest > rollout.max_num_seqs:
            message = f"must be at most rollout.max_num_seqs={rollout.max_num_seqs}: more would wait inside the engine"
            keys = ("rollout.max_num_seqs", "rollout.concurrency")
            yield problem(c, "rollout.max_concurrency", message, "lower it, or use null", *keys)
    if rollout.max_concurrency is not None and rollout.max_concurrency < rollout.num_workers:
        message = f"must be at least rollout.num_workers={rollout.num_workers}: each of them needs its share"
        yield problem(c, "rollout.max_concurrency", message, "raise it", "rollout.num_workers")
    is_seeded = c.mode.max_staleness == 0 if rollout.per_request_seed is None else rollout.per_request_seed
    if rollout.repack_below is not None and is_seeded and not c.mode.shares_devices:
        message = (
            "must be null with seeded requests: a moved request continues with another seed, and timing decides what "
            "moves"
        )
        hint = "leave it at null, or use rollout.per_request_seed=false"
        yield problem(c, "rollout.repack_below", message, hint, "mode.max_staleness", "rollout.per_request_seed")


def _engine_args(c: RunConfig) -> Iterator[Problem]:
    """Arguments that are ours to set, or that break what a run relies on."""
    limit = c.rollout.max_num_seqs
    for name, value in c.rollout.engine_args.items():
        hint, related = "leave it out", ()
        if name == "max_num_batched_tokens" and isinstance(value, int) and limit != "auto" and value < limit:
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
        yield problem(c, "rollout.engine_args", message, hint, *related, value=f"{name}: {value}")


def _training(c: RunConfig) -> Iterator[Problem]:
    learner, every = c.learner, c.checkpoint.every_steps
    for key in ("fsdp_size", "context_parallel_size"):
        if learner.num_ranks % (getattr(learner, key) or 1):
            message = f"must divide learner.num_ranks={learner.num_ranks}"
            yield problem(c, f"learner.{key}", message, "change one of them", "learner.num_ranks")
    yield from _tensor_parallel(c)
    groups, mini_batches = c.trainer.groups_per_step, learner.num_mini_batches
    if groups % mini_batches > 0:
        message = f"must divide trainer.groups_per_step={groups}: all mini-batches have the same number of whole groups"
        divisors = ", ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        yield problem(c, "learner.num_mini_batches", message, f"use one of {divisors}", "trainer.groups_per_step")
    elif learner.num_batches > (samples := _samples(c) // mini_batches):
        of = "one step (trainer.groups_per_step x rollout.group_size)"
        if mini_batches > 1:
            of = "one mini-batch (trainer.groups_per_step x rollout.group_size / learner.num_mini_batches)"
        key = "tensor_parallel_size" if learner.tensor_parallel_size > 1 else "context_parallel_size"
        size = learner.ranks_per_batch
        shared = f", times learner.{key}={size}" if size > 1 else ""
        message = f"must be at most {samples * size}, the samples of {of}{shared}"
        hint = "a rank without samples does nothing"
        yield problem(c, "learner.num_ranks", message, hint, "trainer.groups_per_step", "rollout.group_size")
    if learner.lr_schedule != "constant" and learner.warmup_steps >= _policy_steps(c):
        message = (
            f"leaves no step for the {learner.lr_schedule} schedule; must be below {_policy_steps(c)}, the steps that "
            "train the policy"
        )
        keys = ("trainer.total_steps", "learner.lr_schedule", "critic.warmup_steps")
        yield problem(c, "learner.warmup_steps", message, "lower it or raise trainer.total_steps", *keys)
    last = learner.decay_steps
    if last is not None and learner.warmup_steps + last > _policy_steps(c):
        message = f"must be at most {_policy_steps(c) - learner.warmup_steps}, the steps after the warm-up"
        keys = ("trainer.total_steps", "learner.warmup_steps", "critic.warmup_steps")
        yield problem(c, "learner.decay_steps", message, "lower it or raise trainer.total_steps", *keys)
    for name, group in learner.param_groups.items():
        if not group.pattern:
            hint = "name parameters of the model, such as *embed_tokens*, or leave the group out"
            yield problem(c, f"learner.param_groups.{name}.pattern", "must not be empty", hint, value="")
    yield from _optimizer(c)
    if every > 0 and c.checkpoint.keep_every % every > 0:
        message = f"must be a multiple of checkpoint.every_steps={every}: no other step is saved"
        hint = f"for example {max(1, c.checkpoint.keep_every // every) * every}"
        yield problem(c, "checkpoint.keep_every", message, hint, "checkpoint.every_steps")


def _tensor_parallel(c: RunConfig) -> Iterator[Problem]:
    """Whether the models can be divided is known when they are read."""
    learner, key = c.learner, "learner.tensor_parallel_size"
    if learner.tensor_parallel_size == 1:
        return
    whole = "num_ranks" if learner.fsdp_size is None else "fsdp_size"
    if (size := getattr(learner, whole)) % learner.tensor_parallel_size:
        message = f"must divide learner.{whole}={size}, the ranks that hold the weights once"
        yield problem(c, key, message, "change one of them", f"learner.{whole}")
    for other, needed in {
        "learner.context_parallel_size": 1, "model.lora.rank": 0, "learner.optimizer": "adamw",
        "learner.master_dtype": "float32", "learner.cpu_offload": False, "learner.reference_cpu_offload": False,
        "critic.cpu_offload": False,
    }.items():  # fmt: skip
        if attrgetter(other)(c) != needed:
            hint = f"use {other}={str(needed).lower()}, or divide nothing: {key}=1 (FSDP2 alone)"
            yield problem(c, other, f"must be {str(needed).lower()} with {key} above 1", hint, key)


def _optimizer(c: RunConfig) -> Iterator[Problem]:
    learner = c.learner
    if learner.master_dtype == "bfloat16":
        if c.model.compute_dtype != "bfloat16":
            hint = "use model.compute_dtype=bfloat16, or learner.master_dtype=float32"
            message = f"must be float32 with model.compute_dtype={c.model.compute_dtype}"
            yield problem(c, "learner.master_dtype", message, hint, "model.compute_dtype")
        if c.model.lora.rank:
            message = "must be float32 with model.lora: the weights are frozen in model.compute_dtype already"
            yield problem(c, "learner.master_dtype", message, "leave it at float32", "model.lora.rank")
    if learner.optimizer == "muon" and c.model.lora.rank:
        message = "must not be muon with model.lora: it orthogonalises updates of whole weight matrices"
        yield problem(c, "learner.optimizer", message, "use adamw", "model.lora.rank")
    for key in ("learner.cpu_offload", "critic.cpu_offload"):
        if attrgetter(key)(c) and (learner.optimizer, learner.master_dtype) != ("adamw", "float32"):
            message = (
                f"must be false with learner.optimizer={learner.optimizer} and learner.master_dtype="
                f"{learner.master_dtype}: it would run on the CPU, where only adamw in float32 is fast"
            )
            hint = "set it to false, or use learner.optimizer=adamw with learner.master_dtype=float32"
            yield problem(c, key, message, hint, "learner.optimizer", "learner.master_dtype")


def _evaluation(c: RunConfig) -> Iterator[Problem]:
    trainer, task = c.trainer, c.task
    if not c.evaluates and trainer.stop_at_accuracy is not None:
        keys = ("task.eval_path", "trainer.eval_every", "trainer.eval_at_start", "trainer.eval_at_end")
        hint = "set task.eval_path and eval_every"
        yield problem(c, "trainer.stop_at_accuracy", "is never reached because evaluation is off", hint, *keys)
    if task.eval_sets and not task.eval_path:
        hint = "set it to one of them (trainer.stop_at_accuracy uses it), or remove them: ~task.eval_sets"
        message = "need task.eval_path, which is empty"
        yield problem(c, "task.eval_sets", message, hint, "task.eval_path", "trainer.eval_every")
    if not c.evaluates:
        return
    if 0 < trainer.eval_temperature < MIN_TEMPERATURE:
        message = f"must be 0 or at least {MIN_TEMPERATURE}: vLLM would sample at {MIN_TEMPERATURE}"
        yield problem(c, "trainer.eval_temperature", message, "use 0 for greedy responses")
    # Key -> its number of responses per prompt; 0: not set there.
    samples = {"trainer.eval_samples": trainer.eval_samples} | {
        f"task.eval_sets.{name}.samples": one.samples or 0 for name, one in task.eval_sets.items()
    }
    for key, count in samples.items():
        if count > 1 and trainer.eval_temperature == 0:
            message = "must be 1 with trainer.eval_temperature=0: greedy responses to one prompt are all the same"
            hint = "use trainer.eval_temperature=1.0, or one sample"
            yield problem(c, key, message, hint, "trainer.eval_temperature", value=str(count))
    if trainer.eval_pass_k is not None and trainer.eval_pass_k > trainer.eval_samples:
        message = f"must be at most trainer.eval_samples={trainer.eval_samples}: there is no estimate beyond it"
        yield problem(c, "trainer.eval_pass_k", message, "raise trainer.eval_samples", "trainer.eval_samples")
    deadline = "task.agent_timeout_s" if task.agent else "rollout.request_timeout_s"
    if trainer.eval_timeout_s < attrgetter(deadline)(c):
        message = f"must be at least {deadline}={attrgetter(deadline)(c):g}: a single response may take that long"
        keys = ("task.agent_timeout_s", "rollout.request_timeout_s")
        yield problem(c, "trainer.eval_timeout_s", message, "raise it, or lower that", *keys)
    for name, one in task.eval_sets.items():
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or name in RESERVED_NAMES:
            message = f"a name may only contain letters, digits and . _ -, and not be {', '.join(RESERVED_NAMES)}"
            yield problem(c, "task.eval_sets", message, "it is part of eval/NAME/accuracy", value=name)
        if not one.path:
            key, hint = f"task.eval_sets.{name}.path", "set it, or leave the set out"
            yield problem(c, key, "must name held-out prompts", hint, value="")
        if one.samples and trainer.eval_pass_k is not None and one.samples < trainer.eval_pass_k:
            message = f"must be at least trainer.eval_pass_k={trainer.eval_pass_k}: there is no estimate beyond it"
            key, hint = (
                f"task.eval_sets.{name}.samples",
                "raise it, or use trainer.eval_pass_k=null: each set's own number",
            )
            yield problem(c, key, message, hint, "trainer.eval_pass_k", value=str(one.samples))


_CHECKS = (
    _general, _prompts, _objective, _correction, _correction_bounds, _truncated_sampling, _modes, _engines,
    _engine_args, _training, _evaluation,
)  # fmt: skip
