"""Combinations of values that cannot work, or would silently do nothing. Pure: looks at the configuration alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainer.config.describe import all_keys, value_text
from trainer.config.errors import Problem
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


def _algorithm(config: RunConfig) -> Iterator[Problem]:
    algorithm, group_size = config.algorithm, config.rollout.group_size
    if group_size == 1 and algorithm.advantage in {"grpo", "rloo"}:
        allowed = f"must be >= 2: algorithm.advantage={algorithm.advantage} compares the answers of a group"
        do = "use rollout.group_size=8, or algorithm.advantage=reinforce"
        yield _conflict(config, "rollout.group_size", allowed, do, "algorithm.advantage")
    if algorithm.filter_zero_variance and group_size == 1:
        allowed = "drops every group: one answer never differs from itself"
        yield _conflict(config, "algorithm.filter_zero_variance", allowed, "use false", "rollout.group_size")
    if algorithm.advantage != "grpo":
        why = f"algorithm.advantage={algorithm.advantage} does not normalise"
        yield from _ineffective(config, "algorithm.normalize_by_std", why, "algorithm.advantage")
    if algorithm.loss != "ppo_clip":
        for key in ("clip_low", "clip_high", "clip_dual"):
            why = f"algorithm.loss={algorithm.loss} does not clip"
            yield from _ineffective(config, f"algorithm.{key}", why, "algorithm.loss")
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
    _run, _model, _device, _task, _algorithm, _mode, _rollout, _learner, _trainer, _telemetry, _ray,
)  # fmt: skip
