"""The data of a run: training prompts in their order, and the sets it is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import DataError
from rollout.prompts.datasets import SourceSpec, numbers, refuse_overlap
from rollout.prompts.pass_rate_filter import PassRateBounds, PassRates
from rollout.prompts.prompt_source import Curriculum, PromptSet, PromptSource, eval_subset, load_prompts
from rollout.rendering import why_refused
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from trainer.config.field import value_text
from trainer.config.schema import EvalSetConfig
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig, TaskConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The prompts of `task.eval_path`, or those of one of `task.eval_sets`.

    Example:
        HeldOut(name="aime24", prompts=prompts, num_samples=32)
    """

    name: str = ""
    """Empty for that of `task.eval_path`."""
    prompts: Sequence[Prompt]
    """At least one."""
    num_samples: int
    """Answers to each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSets:
    train: PromptSet
    evaluation: tuple[HeldOut, ...]
    """That of `task.eval_path` first; empty if the run has no evaluation."""
    left_out: tuple[str, ...]
    """Of every data set that lost rows: how many, and why."""


def load_data(cfg: RunConfig, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> DataSets:
    """
    Args:
        tools: JSON schemas of functions, for the chat template.

    Raises:
        DataError: a data set, column or prompt cannot be used, or one set is read for another.
        ConfigurationError: the chat template does not take the arguments that it is to have.
    """
    _check_template(cfg, tokenizer, with_tools=bool(tools))
    train_spec = replace(_spec(cfg, tools), reward_column_required=True)
    sets = _held_out(cfg)
    specs = {
        name: replace(
            _spec(cfg, tools),
            path=one.path,
            split=one.split,
            prompt_column=one.prompt_column if one.prompt_column else cfg.task.prompt_column,
            answer_column=one.answer_column if one.answer_column else cfg.task.answer_column,
        )
        for name, one in sets.items()
    }
    for name, spec in specs.items():
        refuse_overlap(train_spec, spec, key=_key(name, "path"), split_key=_key(name, "split"))
    train = load_prompts(train_spec, tokenizer)
    loaded = {name: _load(name, spec, tokenizer) for name, spec in specs.items()}
    left_out = _left_out(cfg, "task.train_path", train)
    for name, found in loaded.items():
        left_out += _left_out(cfg, _key(name, "path"), found)
    evaluation = tuple(_choose(cfg, name, one, loaded[name]) for name, one in sets.items())
    return DataSets(train=train, evaluation=evaluation, left_out=left_out)


def _held_out(cfg: RunConfig) -> dict[str, EvalSetConfig]:
    """Every held-out set by its name, which is empty for that of `task.eval_path`."""
    task = cfg.task
    if not task.eval_path:
        return {}
    return {"": EvalSetConfig(path=task.eval_path, split=task.eval_split, size=task.eval_size), **task.eval_sets}


def _key(name: str, leaf: str) -> str:
    return f"task.eval_sets.{name}.{leaf}" if name else f"task.eval_{leaf}"


def _load(name: str, spec: SourceSpec, tokenizer: Any) -> PromptSet:
    try:
        return load_prompts(spec, tokenizer)
    except DataError as error:
        if not name:
            raise
        raise DataError(f"task.eval_sets.{name}: {error}") from error


def _choose(cfg: RunConfig, name: str, one: EvalSetConfig, loaded: PromptSet) -> HeldOut:
    num_samples = cfg.trainer.eval_samples if one.samples is None else one.samples
    return HeldOut(name=name, prompts=eval_subset(loaded, size=one.size), num_samples=num_samples)


def _check_template(cfg: RunConfig, tokenizer: Any, *, with_tools: bool) -> None:
    kwargs = cfg.task.chat_template_kwargs
    if kwargs and (allowed := why_refused(tokenizer, kwargs, with_tools=with_tools)) is not None:
        key, do = "task.chat_template_kwargs", "leave them out, or check their names in the tokenizer's chat template"
        raise ConfigurationError([Problem(key=key, got=value_text(kwargs), allowed=allowed, do=do)])


def _left_out(cfg: RunConfig, key: str, loaded: PromptSet) -> tuple[str, ...]:
    if not loaded.num_duplicates and not loaded.num_overlong:
        return ()
    repeated = f"{loaded.num_duplicates} that repeat an earlier one (task.dedup)"
    overlong = f"{loaded.num_overlong} over task.max_prompt_tokens={cfg.task.max_prompt_tokens}"
    return (f"rows of {key} that were left out: {repeated}, {overlong}",)


def _spec(cfg: RunConfig, tools: Sequence[Mapping[str, Any]]) -> SourceSpec:
    """Of the training prompts, with what held-out ones have in common with them."""
    task = cfg.task
    return SourceSpec(
        path=task.train_path,
        reader=task.reader,
        split=task.train_split,
        prompt_column=task.prompt_column,
        answer_column=task.answer_column,
        answer_required=lookup(task.reward.name).needs_answer,
        reward_column=task.reward.column,
        reward_column_required=False,  # benchmarks of one kind have none
        rewards_with_answer=frozenset(name for name, entry in BUILTIN_REWARDS.items() if entry.needs_answer),
        apply_chat_template=task.apply_chat_template,
        chat_template_kwargs=task.chat_template_kwargs,
        tools=tools,
        system_prompt=task.system_prompt,
        dedup=task.dedup,
        max_prompt_tokens=task.max_prompt_tokens,
        overlong_prompts=task.overlong_prompts,
        max_operand=task.max_operand,
        keep_messages=bool(task.agent),
    )


def training_source(cfg: RunConfig, data: PromptSet) -> PromptSource:
    """From its beginning.

    Raises:
        DataError: a column does not fit.
    """
    task, prompts = cfg.task, data.prompts
    return PromptSource(
        data,
        seed=cfg.seed,
        shuffle=task.shuffle,
        curriculum=curriculum_of(task, prompts),
        pass_rates=pass_rates_of(task, prompts),
    )


def curriculum_of(task: TaskConfig, prompts: Sequence[Prompt]) -> Curriculum | None:
    """None without a curriculum. Where pass rates say how hard a prompt is, a rare pass is hard.

    Raises:
        DataError: a prompt has no difficulty.
    """
    if task.curriculum == "none":
        return None
    by_pass_rate = not task.difficulty_column
    name = task.pass_rate_column if by_pass_rate else task.difficulty_column
    setting = "task.pass_rate_column" if by_pass_rate else "task.difficulty_column"
    column = numbers(prompts, name, setting=setting)
    for prompt, value in zip(prompts, column, strict=True):
        if value is None:
            raise DataError(
                f"prompt {prompt.prompt_id}: column {name!r} ({setting}) is null; task.curriculum needs a number for "
                "every prompt"
            )
    difficulties = np.array(column, np.float64)
    return Curriculum(difficulties=-difficulties if by_pass_rate else difficulties, num_epochs=task.curriculum_epochs)


def pass_rates_of(task: TaskConfig, prompts: Sequence[Prompt]) -> PassRates | None:
    """None if the bounds let every pass rate in.

    Raises:
        DataError: a pass rate of the column is not in 0..1.
    """
    if not task.filters_pass_rate:
        return None
    bounds = PassRateBounds(
        lowest=task.pass_rate_min,
        highest=task.pass_rate_max,
        retry_epochs=task.pass_rate_retry_epochs,
        pass_reward=task.pass_reward,
    )
    return PassRates(len(prompts), bounds, start=_known_rates(task, prompts))


def _known_rates(task: TaskConfig, prompts: Sequence[Prompt]) -> dict[str, float]:
    name, setting = task.pass_rate_column, "task.pass_rate_column"
    if not name:
        return {}
    column = numbers(prompts, name, setting=setting)
    rates = {p.prompt_id: rate for p, rate in zip(prompts, column, strict=True) if rate is not None}
    for prompt_id, rate in rates.items():
        if not 0 <= rate <= 1:
            raise DataError(
                f"prompt {prompt_id}: column {name!r} holds {rate:g}; {setting} names a column of shares, 0 to 1"
            )
    return rates
