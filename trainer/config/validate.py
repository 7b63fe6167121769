"""Combinations of values that cannot work, or would silently do nothing. Pure: looks at the configuration alone."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from trainer.config.describe import all_keys, value_text
from trainer.config.errors import Problem
from trainer.config.estimators import ESTIMATORS
from trainer.config.loss_keys import LOSSES_WITHOUT_RATIO, unread_keys
from weight_sync.vllm_compat import LORA_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainer.config.schema.run import RunConfig

BUILTIN_TASK = "builtin:arithmetic"


def check_combinations(config: RunConfig) -> list[Problem]:
    """Every problem, in the order of the schema's sections. Each value is known to have the right type and range."""
    return [problem for check in _CHECKS for problem in check(config)]


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _conflict(config: RunConfig, key: str, allowed: str, do: str, *also: str) -> Problem:
    return Problem(key=key, got=value_text(_value(config, key)), allowed=allowed, do=do, also=also)


def _ineffective(config: RunConfig, key: str, why: str, *also: str) -> Iterator[Problem]:
    """A problem if `key` was moved away from its default although nothing reads it."""
    default = all_keys()[key].default
    if _value(config, key) != default:
        yield _conflict(config, key, f"has no effect: {why}", f"leave it at {value_text(default)}", *also)


def _run(config: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[\w.\-+]+", config.name) or config.name in {".", ".."}:
        yield _conflict(
            config, "name", "must be letters, digits, dot, minus, plus or underscore", "it names a directory"
        )


def _model(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if lora.rank == 0:
        why = "model.lora.rank=0 trains all weights"
        for key in ("model.lora.alpha", "model.lora.target_modules"):
            yield from _ineffective(config, key, why, "model.lora.rank")
        return
    if lora.rank not in LORA_RANKS:
        allowed = f"must be 0 or one of {', '.join(map(str, LORA_RANKS))}: engines would pad any other rank"
        yield _conflict(config, "model.lora.rank", allowed, "use the next larger one, it costs the engines the same")
    if not re.fullmatch(r"\w+(\+\w+)*", lora.target_modules):
        do = "for example q_proj+v_proj"
        yield _conflict(config, "model.lora.target_modules", "must be names of layers joined by +", do)


def _device(config: RunConfig) -> Iterator[Problem]:
    for name in config.device.env:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            yield Problem(key="device.env", got=name, allowed="is not the name of an environment variable")


def _task(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    builtin = BUILTIN_TASK in {task.train_path, task.eval_path}
    if not task.train_path:
        yield _conflict(config, "task.train_path", "must name the training prompts", f"use {BUILTIN_TASK} or a file")
    for key, path in (("task.train_path", task.train_path), ("task.eval_path", task.eval_path)):
        if path and task.reader == "arithmetic" and path != BUILTIN_TASK:
            do = "use task.reader=auto, or jsonl, parquet or hf"
            yield _conflict(config, "task.reader", f"reads {BUILTIN_TASK} only, not {key}={path}", do, key)
        if task.reader not in {"auto", "arithmetic"} and path == BUILTIN_TASK:
            do = f"use task.reader=auto, or set {key} too"
            yield _conflict(config, "task.reader", f"cannot read {key}={path}", do, key)
    if not builtin:
        why = f"no prompts come from {BUILTIN_TASK}"
        yield from _ineffective(config, "task.max_operand", why, "task.train_path", "task.eval_path")


def _advantage(config: RunConfig) -> Iterator[Problem]:
    algorithm, group_size = config.algorithm, config.rollout.group_size
    traits, chosen = ESTIMATORS[algorithm.advantage], f"algorithm.advantage={algorithm.advantage}"
    if traits.needs_peers and group_size == 1:
        allowed = f"must be >= 2: {chosen} compares the answers of a group"
        do = "use rollout.group_size=8, or algorithm.advantage=reinforce"
        yield _conflict(config, "rollout.group_size", allowed, do, "algorithm.advantage")
    elif traits.spans_step and group_size * config.trainer.groups_per_step == 1:
        allowed = f"must be >= 2 with one answer per group: {chosen} normalises over the answers of a step"
        also = "rollout.group_size", "algorithm.advantage"
        yield _conflict(config, "trainer.groups_per_step", allowed, "every advantage would be 0; raise it", *also)
    if not traits.reads_normalize_by_std:
        why = f"{chosen} does not switch its normalisation"
        yield from _ineffective(config, "algorithm.normalize_by_std", why, "algorithm.advantage")
    if algorithm.advantage != "gpg":
        why = f"{chosen} has no factor for answers that teach nothing"
        yield from _ineffective(config, "algorithm.gpg_scale", why, "algorithm.advantage")
    if traits.uses_parts:
        yield from _reward_parts(config)
    else:
        why = f"{chosen} takes the total reward, not its parts"
        yield from _ineffective(config, "algorithm.gdpo_weights", why, "algorithm.advantage")
    yield from _zero_variance(config)


def _reward_parts(config: RunConfig) -> Iterator[Problem]:
    for name, weight in config.algorithm.gdpo_weights.items():
        if weight == 0 or not math.isfinite(weight):
            got, do = f"{name}: {weight:g}", "leave out the entry, to leave out the part"
            yield Problem(key="algorithm.gdpo_weights", got=got, allowed="must be finite and not 0", do=do)
    why = f"algorithm.advantage={config.algorithm.advantage} takes the parts of the reward, shaping moves their total"
    yield from _ineffective(config, "algorithm.overlong_buffer_tokens", why, "algorithm.advantage")


def _zero_variance(config: RunConfig) -> Iterator[Problem]:
    """Dynamic sampling drops groups of equal rewards: wrong where those would teach something."""
    algorithm, traits = config.algorithm, ESTIMATORS[config.algorithm.advantage]
    if not algorithm.filter_zero_variance:
        return
    key, chosen = "algorithm.filter_zero_variance", f"algorithm.advantage={algorithm.advantage}"
    if config.rollout.group_size == 1:
        allowed = "drops every group: one answer never differs from itself"
        yield _conflict(config, key, allowed, "use false", "rollout.group_size")
    elif not traits.needs_peers:
        allowed = f"drops groups that teach: {chosen} does not compare the answers of a group"
        yield _conflict(config, key, allowed, "use false", "algorithm.advantage")
    elif traits.uses_parts:
        allowed = f"looks at the total reward: {chosen} also learns from answers that differ in their parts alone"
        yield _conflict(config, key, allowed, "use false", "algorithm.advantage")


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if not algorithm.filter_zero_variance:
        why = "nothing is filtered while algorithm.filter_zero_variance=false"
        yield from _ineffective(config, "algorithm.max_refills_per_step", why, "algorithm.filter_zero_variance")
    if algorithm.overlong_buffer_tokens == 0:
        why = "algorithm.overlong_buffer_tokens=0 turns the penalty off"
        yield from _ineffective(config, "algorithm.overlong_penalty", why, "algorithm.overlong_buffer_tokens")
    if algorithm.overlong_buffer_tokens > config.rollout.max_response_tokens:
        allowed = f"must be at most rollout.max_response_tokens={config.rollout.max_response_tokens}"
        yield _conflict(
            config, "algorithm.overlong_buffer_tokens", allowed, "it is the last part of an answer",
            "rollout.max_response_tokens",
        )  # fmt: skip


def _loss(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    for key in unread_keys(algorithm.loss):
        why = f"algorithm.loss={algorithm.loss} does not read it"
        yield from _ineffective(config, f"algorithm.{key}", why, "algorithm.loss")
    if algorithm.cov_min >= algorithm.cov_max:
        allowed = f"must be below algorithm.cov_max={value_text(algorithm.cov_max)}"
        yield _conflict(config, "algorithm.cov_min", allowed, "no token lies between them", "algorithm.cov_max")
    if algorithm.aggregation != "seq_mean_token_sum_norm":
        why = f"algorithm.aggregation={algorithm.aggregation} has no constant divisor"
        yield from _ineffective(config, "algorithm.aggregation_norm_tokens", why, "algorithm.aggregation")


def _correction(config: RunConfig) -> Iterator[Problem]:
    algorithm, correction, prefix = config.algorithm, config.algorithm.correction, "algorithm.correction"
    objective = f"{prefix}.objective={correction.objective}"
    if algorithm.loss in LOSSES_WITHOUT_RATIO:
        why, do = f"algorithm.loss={algorithm.loss} holds no ratio", "use algorithm.loss=importance_sampling"
        if correction.objective != "bypass":
            yield _conflict(config, f"{prefix}.objective", f"must be bypass: {why}", do, "algorithm.loss")
        for bound in ("lower", "upper"):
            yield from _ineffective(config, f"{prefix}.clamp.{bound}", f"{why} to clamp", "algorithm.loss")
    if correction.objective == "loglinear" and config.mode.max_staleness == 0:
        allowed = "interpolates over the age of tokens, which is always 0 with mode.max_staleness=0"
        yield _conflict(config, f"{prefix}.objective", allowed, "use bypass or decoupled", "mode.max_staleness")
    if correction.objective == "bypass" and not correction.clamp.is_active and not correction.mask.is_active:
        why = f"with {objective} only clamp and mask read it, and neither has a bound"
        also = f"{prefix}.objective", f"{prefix}.clamp", f"{prefix}.mask"
        yield from _ineffective(config, f"{prefix}.level", why, *also)
    for action, key in (("mask", "metric"), ("reject", "metric"), ("reject", "level")):
        if not getattr(correction, action).is_active:
            bounds = f"{prefix}.{action}.lower", f"{prefix}.{action}.upper"
            yield from _ineffective(config, f"{prefix}.{action}.{key}", "no bound is set", *bounds)
    yield from _bounds(config, "clamp", "ratio")
    yield from _bounds(config, "mask", correction.mask.metric)
    yield from _bounds(config, "reject", correction.reject.metric)
    yield from _clamped_beyond_mask(config)


def _bounds(config: RunConfig, action: str, metric: str) -> Iterator[Problem]:
    """Bounds that cut nothing, or also the tokens on which both policies agree."""
    prefix, also = f"algorithm.correction.{action}", f"algorithm.correction.{action}.metric"
    bounds = getattr(config.algorithm.correction, action)
    lower, upper = bounds.lower, bounds.upper
    agreed = 1.0 if metric == "ratio" else 0.0
    others = () if action == "clamp" else (also,)
    if lower is not None and metric != "k1" and lower <= 0:
        yield _conflict(config, f"{prefix}.lower", f"has no effect: {metric} is never below 0", "use null", *others)
    elif lower is not None and lower >= agreed:
        allowed = f"must be below {agreed:g}, the {metric} where both policies agree"
        yield _conflict(config, f"{prefix}.lower", allowed, "lower it, or use null", *others)
    if upper is not None and upper <= agreed:
        allowed = f"must be above {agreed:g}, the {metric} where both policies agree"
        yield _conflict(config, f"{prefix}.upper", allowed, "raise it, or use null", *others)


def _clamped_beyond_mask(config: RunConfig) -> Iterator[Problem]:
    clamp, mask, prefix = config.algorithm.correction.clamp, config.algorithm.correction.mask, "algorithm.correction"
    if mask.metric != "ratio":
        return
    if clamp.upper is not None and mask.upper is not None and clamp.upper >= mask.upper:
        allowed = f"has no effect: {prefix}.mask.upper={mask.upper:g} takes those tokens out"
        yield _conflict(config, f"{prefix}.clamp.upper", allowed, "lower it, or use null", f"{prefix}.mask.upper")
    if clamp.lower is not None and mask.lower is not None and clamp.lower <= mask.lower:
        allowed = f"has no effect: {prefix}.mask.lower={mask.lower:g} takes those tokens out"
        yield _conflict(config, f"{prefix}.clamp.lower", allowed, "raise it, or use null", f"{prefix}.mask.lower")


def _mode(config: RunConfig) -> Iterator[Problem]:
    fixed = {"sync": 0, "one_step_off": 1}
    wanted = fixed.get(config.mode.name)
    if wanted is not None and config.mode.max_staleness != wanted:
        allowed = f"must be {wanted} with mode.name={config.mode.name}"
        do = "choose the group mode=async to set the staleness freely"
        yield _conflict(config, "mode.max_staleness", allowed, do, "mode.name")


def _rollout(config: RunConfig) -> Iterator[Problem]:
    rollout, longest = config.rollout, longest_sequence(config)
    limits = "task.max_prompt_tokens", "rollout.max_response_tokens"
    sum_text = f"task.max_prompt_tokens + rollout.max_response_tokens = {longest}"
    if 0 < rollout.max_model_len < longest:
        allowed = f"must be at least {sum_text}, or 0 to follow them"
        yield _conflict(config, "rollout.max_model_len", allowed, "raise it or lower those", *limits)
    fits = config.learner.max_tokens_per_micro_batch
    if fits < longest:
        allowed = f"must be at least {sum_text}: the longest sequence has to fit into one micro-batch"
        yield _conflict(config, "learner.max_tokens_per_micro_batch", allowed, "raise it or lower those", *limits)


def _learner(config: RunConfig) -> Iterator[Problem]:
    learner, trainer = config.learner, config.trainer
    samples = trainer.groups_per_step * config.rollout.group_size
    if learner.num_ranks > samples:
        allowed = f"must be at most {samples}, the samples of one step (trainer.groups_per_step x rollout.group_size)"
        also = "trainer.groups_per_step", "rollout.group_size"
        yield _conflict(config, "learner.num_ranks", allowed, "a rank without samples does nothing", *also)
    if learner.lr_schedule == "constant":
        why = "learner.lr_schedule=constant never lowers the learning rate"
        yield from _ineffective(config, "learner.min_lr_frac", why, "learner.lr_schedule")
    elif learner.warmup_steps >= trainer.total_steps:
        allowed = f"leaves no step for the {learner.lr_schedule} schedule; must be < trainer.total_steps"
        also = "trainer.total_steps", "learner.lr_schedule"
        yield _conflict(config, "learner.warmup_steps", allowed, "lower it or raise trainer.total_steps", *also)


def _trainer(config: RunConfig) -> Iterator[Problem]:
    trainer, task = config.trainer, config.task
    never = trainer.eval_every == 0 and not trainer.eval_at_start and not trainer.eval_at_end
    if trainer.stop_at_accuracy is not None and (never or not task.eval_path):
        key = "trainer.stop_at_accuracy"
        also = "task.eval_path", "trainer.eval_every", "trainer.eval_at_start", "trainer.eval_at_end"
        yield _conflict(config, key, "is never reached: evaluation is off", "set task.eval_path and eval_every", *also)
    if not task.eval_path:
        yield from _ineffective(
            config, "task.eval_size", "task.eval_path is empty: nothing is evaluated", *["task.eval_path"]
        )


def _ray(config: RunConfig) -> Iterator[Problem]:
    if not config.ray.address:
        yield _conflict(config, "ray.address", "must be local, auto or HOST:PORT", "use local for a private cluster")
    elif config.ray.address != "local":
        for key in ("ray.num_cpus", "ray.object_store_gib"):
            why = f"ray.address={config.ray.address} joins a cluster that is already set up"
            yield from _ineffective(config, key, why, "ray.address")


def _telemetry(config: RunConfig) -> Iterator[Problem]:
    if not config.telemetry.wandb:
        yield from _ineffective(config, "telemetry.wandb_project", "telemetry.wandb is false", "telemetry.wandb")


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest answer."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _run, _model, _device, _task, _advantage, _algorithm, _loss,
    _correction, _mode, _rollout, _learner, _trainer, _telemetry, _ray,
)  # fmt: skip
