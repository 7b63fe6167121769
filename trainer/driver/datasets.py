"""The data of a run: training prompts in their order, the sets it is evaluated on, and the rewards of both."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import DataError
from rollout.prompts.datasets import DatasetSpec, check_overlap, numbers
from rollout.prompts.pass_rate_filter import PassRateBounds, PassRateFilter
from rollout.prompts.prompt_source import Curriculum, PromptSet, PromptSource, eval_subset, load_prompts
from rollout.rendering import why_refused
from rollout.reward.pool import check_reward
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from trainer.config.algorithm import traits_of
from trainer.config.field import value_text
from trainer.config.schema import EvalSetConfig
from trainer.driver.findings import Findings
from trainer.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig, TaskConfig


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """The prompts of `task.eval_path`, or those of one of `task.eval_sets`.

    Example:
        EvalSet(name="aime24", prompts=prompts, num_samples=32)
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
    evaluation: tuple[EvalSet, ...]
    """That of `task.eval_path` first; empty if the run has no evaluation."""
    left_out: tuple[str, ...] = ()
    """Of every data set that lost rows: how many, and why. Tools that prompts do not name. What of a teacher was not
    checked."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All of them, held-out ones last."""
        return (*self.train.prompts, *(prompt for one in self.evaluation for prompt in one.prompts))


def check_data(
    cfg: RunConfig, found: Findings, tokenizer: Any | None, *, tools: Sequence[Mapping[str, Any]] = ()
) -> DataSets | None:
    """The data sets, their rewards tried; None if one cannot be used. Blocks for seconds; call it in the main thread,
    outside an event loop.

    Args:
        tokenizer: None if it cannot be loaded: columns and rewards are checked nevertheless, and their prompts are
            worth nothing.
        tools: JSON schemas of functions, for the chat template.
    """
    stand_in = _NoTokenizer() if tokenizer is None else tokenizer
    data = found.attempt(load_data, cfg, stand_in, tools=tools)
    if data is not None:
        samples: dict[str, Prompt] = {}
        for prompt in data.prompts:
            samples.setdefault(prompt.reward, prompt)
        for sample in samples.values():
            found.attempt(_check_reward, cfg, sample)
    return data


def data_problems(cfg: RunConfig) -> tuple[Problem, ...]:
    """What is wrong with data and rewards, for a configuration that is refused anyway. Without torch and network: data
    of a hub is not looked at."""
    paths = [cfg.task.train_path, *cfg.task.held_out_paths.values()]
    if not all(path.startswith("builtin:") or Path(path).exists() for path in paths if path):
        return ()
    found = Findings()
    check_data(cfg, found, None)
    return found.problems


class _NoTokenizer:
    """Stands in for a tokenizer that cannot be loaded."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [[0]] * len(text)}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        return "\n".join(str(message["content"]) for message in conversation)


def load_data(cfg: RunConfig, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> DataSets:
    """
    Args:
        tools: JSON schemas of functions, for the chat template.

    Raises:
        DataError: a data set, column or prompt cannot be used, or one set is read for another.
        ConfigurationError: the chat template does not take the arguments that it is to have.
    """
    if not isinstance(tokenizer, _NoTokenizer):
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
        check_overlap(train_spec, spec, key=_key(name, "path"), split_key=_key(name, "split"))
    train = load_prompts(train_spec, tokenizer)
    loaded = {name: _load(name, spec, tokenizer) for name, spec in specs.items()}
    left_out = _left_out(cfg, "task.train_path", train)
    for name, found in loaded.items():
        left_out += _left_out(cfg, _key(name, "path"), found)
        left_out += _trained_on(_key(name, "path"), specs[name], found, train_spec, train)
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


def _load(name: str, spec: DatasetSpec, tokenizer: Any) -> PromptSet:
    try:
        return load_prompts(spec, tokenizer)
    except DataError as error:
        if not name:
            raise
        raise DataError(f"task.eval_sets.{name}: {error}") from error


def _choose(cfg: RunConfig, name: str, one: EvalSetConfig, loaded: PromptSet) -> EvalSet:
    num_samples = cfg.trainer.eval_samples if one.samples is None else one.samples
    return EvalSet(name=name, prompts=eval_subset(loaded, size=one.size), num_samples=num_samples)


def _check_template(cfg: RunConfig, tokenizer: Any, *, with_tools: bool) -> None:
    kwargs = cfg.task.chat_template_kwargs
    if kwargs and (message := why_refused(tokenizer, kwargs, with_tools=with_tools)) is not None:
        key, hint = "task.chat_template_kwargs", "leave them out, or check their names in the tokenizer's chat template"
        raise ConfigurationError([Problem(key=key, value=value_text(kwargs), message=message, hint=hint)])


def _left_out(cfg: RunConfig, key: str, loaded: PromptSet) -> tuple[str, ...]:
    if not loaded.num_duplicates and not loaded.num_overlong:
        return ()
    repeated = f"{loaded.num_duplicates} that repeat an earlier one (task.dedup)"
    overlong = f"{loaded.num_overlong} over task.max_prompt_tokens={cfg.task.max_prompt_tokens}"
    return (f"rows of {key} that were left out: {repeated}, {overlong}",)


def _trained_on(
    key: str, spec: DatasetSpec, held_out: PromptSet, train_spec: DatasetSpec, train: PromptSet
) -> tuple[str, ...]:
    """A warning of evaluation prompts that are training prompts too, in whatever file; of one set for both it is meant
    so. White space and case do not count."""
    if (spec.path, spec.split) == (train_spec.path, train_spec.split):
        return ()
    trained = {_normalized(prompt) for prompt in train.prompts}
    number = sum(_normalized(prompt) in trained for prompt in held_out.prompts)
    if not number:
        return ()
    text = (
        f"{number} of {len(held_out.prompts)} prompts of {key} are among those of task.train_path: their accuracy says "
        "nothing of unseen problems; remove them from the training set"
    )
    log.warning(text)
    return (text,)


def _normalized(prompt: Prompt) -> int:
    return hash(" ".join(prompt.text.casefold().split()))


def _spec(cfg: RunConfig, tools: Sequence[Mapping[str, Any]]) -> DatasetSpec:
    """Of the training prompts, with what held-out ones have in common with them."""
    task = cfg.task
    return DatasetSpec(
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


def pass_rates_of(task: TaskConfig, prompts: Sequence[Prompt]) -> PassRateFilter | None:
    """None if the bounds let every pass rate in.

    Raises:
        DataError: a pass rate of the column is not in 0..1.
    """
    if not task.filters_pass_rate:
        return None
    bounds = PassRateBounds(
        lowest=task.pass_rate_min,
        highest=task.pass_rate_max,
        retry_epochs=task.pass_rate_cooldown_epochs,
        pass_threshold=task.pass_threshold,
    )
    return PassRateFilter(len(prompts), bounds, start=_known_rates(task, prompts))


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


def _check_reward(cfg: RunConfig, sample: Prompt) -> None:
    name = sample.reward if sample.reward else cfg.task.reward.name
    try:
        result = check_reward(name, sample=sample, timeout_s=cfg.task.reward.timeout_s)
    except DataError as error:
        if not sample.reward:
            raise
        raise DataError(f"column {cfg.task.reward.column!r} of prompt {sample.prompt_id}: {error}") from error
    if problems := list(_part_problems(cfg, name, result.parts)):
        raise ConfigurationError(problems)


def _part_problems(cfg: RunConfig, reward: str, parts: Mapping[str, float]) -> Iterator[Problem]:
    """What the estimator wants of the parts of a reward, against those of the trial call."""
    algorithm, related = cfg.algorithm, ("task.reward.name",)
    if not traits_of(algorithm).uses_parts:
        return
    if not parts:
        message = f"reads the named parts of a reward, and {reward} returns none"
        hint = 'let it return a dict such as {"reward": total, "correct": .., "format": ..}, or use another estimator'
        yield Problem(
            key="algorithm.advantage_estimator",
            value=algorithm.advantage_estimator,
            message=message,
            hint=hint,
            related=related,
        )
        return
    for name in algorithm.gdpo_weights:
        if name not in parts:
            message = f"must name parts that {reward} returns: {', '.join(sorted(parts))}"
            yield Problem(key="algorithm.gdpo_weights", value=name, message=message, related=related)
