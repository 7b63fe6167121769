"""Combinations of values that cannot work, or would silently do nothing. Pure: looks at the configuration alone."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING

from trainer.config.algorithm import EstimatorTraits, traits_of, unread_keys
from trainer.config.conflicts import conflict as _conflict
from trainer.config.conflicts import ineffective as _ineffective
from trainer.config.conflicts import moot, problems_of
from trainer.config.keys import value_text
from trainer.config.own_function import is_dotted_path, is_own
from trainer.config.validate_correction import correction_problems
from trainer.config.validate_critic import critic_problems, kl_problems, kl_reward_problems, zero_problems
from trainer.config.validate_data import BUILTIN_TASK, selection_problems
from trainer.config.validate_engine_args import engine_args_problems
from trainer.config.validate_evaluation import evaluation_problems
from trainer.config.validate_mode import mode_problems
from trainer.config.validate_rollout import concurrency_problems, stop_problems, truncation_problems
from trainer.errors import Problem
from weight_sync.vllm_compat import LORA_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from trainer.config.schema import RunConfig


def check_combinations(config: RunConfig, *, written: Collection[str] = ()) -> list[Problem]:
    """Every problem, in the order of the schema's sections. Each value is known to have the right type and range.

    Args:
        written: keys that someone asked for by name. If nothing reads one of them, it is refused at its default too,
            and so is one that a YAML file may hold for other runs.
    """
    return problems_of((problem for check in _CHECKS for problem in check(config)), written=written)


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
    builtin = BUILTIN_TASK in {task.train_path, *task.held_out_paths.values()}
    if not task.train_path:
        yield _conflict(config, "task.train_path", "must name the training prompts", f"use {BUILTIN_TASK} or a file")
    for key, path in {"task.train_path": task.train_path, **task.held_out_paths}.items():
        if path and task.reader == "arithmetic" and path != BUILTIN_TASK:
            do = "use task.reader=auto, or jsonl, parquet or hf"
            yield _conflict(config, "task.reader", f"reads {BUILTIN_TASK} only, not {key}={path}", do, key)
        if task.reader not in {"auto", "arithmetic"} and path == BUILTIN_TASK:
            do = f"use task.reader=auto, or set {key} too"
            yield _conflict(config, "task.reader", f"cannot read {key}={path}", do, key)
    try:
        json.dumps(task.chat_template_kwargs, allow_nan=False)
    except (TypeError, ValueError) as error:
        do = "use texts, finite numbers, true, false, null, and lists and maps of these"
        yield _conflict(config, "task.chat_template_kwargs", f"must be values of JSON: {error}", do)
    if not builtin:
        why = f"no prompts come from {BUILTIN_TASK}"
        yield from _ineffective(config, "task.max_operand", why, "task.train_path", "task.eval_path")


def _agent(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    if task.agent:
        yield from _sequences(config)
        return
    why = "task.agent is empty: every answer is a single turn"
    for key in ("task.agent_args", "task.agent_timeout_s", "task.agent_max_sequences"):
        yield from _ineffective(config, key, why, "task.agent")
    if task.reward.name == "zero" and config.algorithm.advantage != "zero":
        allowed = "rewards nothing, and without task.agent no environment rewards the turns"
        do = "set task.agent, or use another reward"
        yield _conflict(config, "task.reward.name", allowed, do, "task.agent")


def _sequences(config: RunConfig) -> Iterator[Problem]:
    """The learner takes what is still to come from the tokens that follow in the same sequence."""
    algorithm, key, do = config.algorithm, "task.agent_max_sequences", "use 1, or another estimator"
    if config.task.agent_max_sequences == 1:
        return
    if algorithm.uses_critic:
        allowed = "must be 1: a critic's returns end with their sequence, and the outcome comes after the last one"
        yield _conflict(config, key, allowed, do, "algorithm.advantage")
    elif algorithm.kl.in_reward and not is_own(algorithm.advantage) and traits_of(algorithm).reward_to_go:
        chosen = f"algorithm.advantage={algorithm.advantage}"
        allowed = f"must be 1: with the KL in the reward, {chosen} adds up rewards within a sequence alone"
        yield _conflict(config, key, allowed, f"{do}, or the KL in the loss", "algorithm.advantage")


def _advantage(config: RunConfig) -> Iterator[Problem]:
    yield from _unread_by_estimator(config)
    # What a user's own estimator needs is known once it is imported, which is not done here: preflight checks it.
    if not is_own(config.algorithm.advantage):
        yield from _estimator(config, traits_of(config.algorithm))


def _unread_by_estimator(config: RunConfig) -> Iterator[Problem]:
    """Keys of other estimators. A user's own reads none of them, whatever its traits."""
    algorithm, key = config.algorithm, "algorithm.advantage"
    chosen, traits = f"{key}={algorithm.advantage}", None if is_own(algorithm.advantage) else traits_of(algorithm)
    if traits is None or not traits.reads_normalize_by_std:
        why = f"{chosen} does not switch its normalisation"
        yield from _ineffective(config, "algorithm.normalize_by_std", why, key)
    if algorithm.advantage != "gpg":
        why = f"{chosen} has no factor for answers that teach nothing"
        yield from _ineffective(config, "algorithm.gpg_scale", why, key)
    if traits is None or not traits.uses_parts:
        does = "reads algorithm.advantage_args" if traits is None else "takes the total reward, not its parts"
        yield from _ineffective(config, "algorithm.gdpo_weights", f"{chosen} {does}", key)


def estimator_problems(config: RunConfig, traits: EstimatorTraits) -> list[Problem]:
    """Keys that do not go together with an estimator of these traits."""
    return problems_of(_estimator(config, traits))


def _estimator(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    algorithm, group_size = config.algorithm, config.rollout.group_size
    chosen = f"algorithm.advantage={algorithm.advantage}"
    if traits.needs_peers and group_size == 1:
        allowed = f"must be >= 2: {chosen} compares the answers of a group"
        do = "use rollout.group_size=8, or algorithm.advantage=reinforce"
        yield _conflict(config, "rollout.group_size", allowed, do, "algorithm.advantage")
    elif traits.spans_step and group_size * config.trainer.groups_per_step == 1:
        allowed = f"must be >= 2 with one answer per group: {chosen} normalises over the answers of a step"
        also = "rollout.group_size", "algorithm.advantage"
        yield _conflict(config, "trainer.groups_per_step", allowed, "every advantage would be 0; raise it", *also)
    if algorithm.advantage == "gpg" and algorithm.gpg_scale == "nonzero_rewards":
        yield from _counted_rewards(config)
    if traits.uses_parts:
        yield from _reward_parts(config)
    if config.rollout.top_k == 1 and (traits.needs_peers or traits.greedy_baseline):
        other = "the greedy answer" if traits.greedy_baseline else "the answers of a group"
        allowed = f"samples greedily: {chosen} compares with {other}, which would be the same one"
        yield _conflict(config, "rollout.top_k", allowed, "use 0, or 2 and more", "algorithm.advantage")
    yield from _zero_variance(config, traits)
    yield from kl_reward_problems(config, traits)


def _reward_parts(config: RunConfig) -> Iterator[Problem]:
    for name, weight in config.algorithm.gdpo_weights.items():
        if weight == 0 or not math.isfinite(weight):
            got, do = f"{name}: {weight:g}", "leave out the entry, to leave out the part"
            yield Problem(key="algorithm.gdpo_weights", got=got, allowed="must be finite and not 0", do=do)
    why = f"algorithm.advantage={config.algorithm.advantage} takes the parts of the reward, shaping moves their total"
    yield from _ineffective(config, "algorithm.overlong_buffer_tokens", why, "algorithm.advantage")
    if config.task.agent:
        chosen = f"algorithm.advantage={config.algorithm.advantage}"
        allowed = f"may reward turns, which are no named part of a reward: {chosen} would not see them"
        yield _conflict(config, "task.agent", allowed, "use an estimator of the total reward", "algorithm.advantage")


def _counted_rewards(config: RunConfig) -> Iterator[Problem]:
    """The count of answers with a reward other than 0 is only one of right answers if nothing else moves rewards."""
    key, do = "algorithm.gpg_scale", "use valid_groups"
    if config.algorithm.overlong_buffer_tokens > 0:
        allowed = "counts answers with a reward other than 0, which the overlong penalty makes of wrong ones"
        yield _conflict(config, key, allowed, do, "algorithm.overlong_buffer_tokens")
    if config.task.agent:
        allowed = "counts answers with a reward other than 0, and turns may be rewarded whatever the answer is worth"
        yield _conflict(config, key, allowed, do, "task.agent")


def _zero_variance(config: RunConfig, traits: EstimatorTraits) -> Iterator[Problem]:
    """Dynamic sampling drops groups of equal rewards: wrong where those would teach something."""
    algorithm = config.algorithm
    if not algorithm.filter_zero_variance:
        return
    key, chosen = "algorithm.filter_zero_variance", f"algorithm.advantage={algorithm.advantage}"
    if traits.greedy_baseline:
        return  # it drops the groups whose every answer is worth what the greedy one is, whatever their size
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
    if algorithm.overlong_buffer_tokens == 0:
        why = "algorithm.overlong_buffer_tokens=0 turns the penalty off"
        yield from _ineffective(config, "algorithm.overlong_penalty", why, "algorithm.overlong_buffer_tokens")
    elif algorithm.overlong_penalty == 0:
        key, allowed = "algorithm.overlong_penalty", "must be above 0: nothing is taken off over the buffer"
        do = "raise it, or set algorithm.overlong_buffer_tokens=0"
        yield _conflict(config, key, allowed, do, "algorithm.overlong_buffer_tokens")
    if algorithm.overlong_buffer_tokens > config.rollout.max_response_tokens:
        allowed = f"must be at most rollout.max_response_tokens={config.rollout.max_response_tokens}"
        yield _conflict(
            config, "algorithm.overlong_buffer_tokens", allowed,
            "it is the last part of an answer: lower it, or use 0 for no penalty", "rollout.max_response_tokens",
        )  # fmt: skip


def _own_functions(config: RunConfig) -> Iterator[Problem]:
    """The numbers of own functions, which built-in ones do not take."""
    for key, name in (("advantage", config.algorithm.advantage), ("loss", config.algorithm.loss)):
        if not is_own(name):
            why = f"algorithm.{key}={name} is built in and has keys of its own"
            yield from _ineffective(config, f"algorithm.{key}_args", why, f"algorithm.{key}")
    key, name = "algorithm.group_filter", config.algorithm.group_filter
    if not name:
        yield from _ineffective(config, f"{key}_args", f"{key} is empty", key)
    elif not is_dotted_path(name):
        do = "or leave it empty; dynamic sampling is algorithm.filter_zero_variance"
        yield _conflict(config, key, "must be a dotted path, package.module.function", do)


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
        return
    alone = config.critic.warmup_steps if config.algorithm.uses_critic else 0
    if learner.warmup_steps >= trainer.total_steps - alone:
        left = "trainer.total_steps" if alone == 0 else "trainer.total_steps - critic.warmup_steps"
        allowed = f"leaves no step for the {learner.lr_schedule} schedule; must be < {left}"
        also = "trainer.total_steps", "learner.lr_schedule", *(["critic.warmup_steps"] if alone else [])
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


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    every, kept = config.checkpoint.every_steps, config.checkpoint.keep_every
    if every == 0:
        why = "checkpoint.every_steps=0 saves at the end only"
        yield from _ineffective(config, "checkpoint.keep_every", why, "checkpoint.every_steps")
    elif kept % every:
        allowed = f"must be a multiple of checkpoint.every_steps={every}: no other step is saved"
        do = f"for example {max(1, kept // every) * every}"
        yield _conflict(config, "checkpoint.keep_every", allowed, do, "checkpoint.every_steps")


def _ray(config: RunConfig) -> Iterator[Problem]:
    if not config.ray.address:
        yield _conflict(config, "ray.address", "must be local, auto or HOST:PORT", "use local for a private cluster")
    elif config.ray.address == "local":
        why = "ray.address=local starts a cluster that nobody else uses"
        yield from _ineffective(config, "ray.placement_timeout_s", why, "ray.address")
    else:
        for key in ("ray.num_cpus", "ray.object_store_gib"):
            why = f"ray.address={config.ray.address} joins a cluster that is already set up"
            yield moot(config, key, why, "ray.address")


def _telemetry(config: RunConfig) -> Iterator[Problem]:
    if not config.telemetry.wandb:
        for name in ("wandb_project", "wandb_entity", "wandb_group", "wandb_tags"):
            yield from _ineffective(config, f"telemetry.{name}", "telemetry.wandb is false", "telemetry.wandb")


def longest_sequence(config: RunConfig) -> int:
    """Tokens of the longest prompt with the longest answer."""
    return config.task.max_prompt_tokens + config.rollout.max_response_tokens


_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _run, _model, _device, _task, selection_problems, _agent, _advantage, _algorithm, _own_functions, _loss,
    critic_problems, kl_problems, zero_problems, correction_problems, mode_problems, _rollout, stop_problems,
    truncation_problems, concurrency_problems, engine_args_problems, _learner, _trainer,
    evaluation_problems, _checkpoint, _telemetry, _ray,
)  # fmt: skip
