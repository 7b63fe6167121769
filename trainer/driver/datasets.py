"""The data of a run, checked: training prompts in their order, the sets it is evaluated on, and the rewards of both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from rollout.errors import DataError
from rollout.prompts.datasets import DatasetSpec, check_overlap, numbers
from rollout.prompts.pass_rate_filter import PassRateBounds, PassRateFilter
from rollout.prompts.prompt_source import Curriculum, PromptSet, PromptSource, eval_subset, load_prompts
from rollout.rendering import why_refused
from rollout.reward.pool import check_reward
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from trainer.config.algorithm import traits_of
from trainer.config.schema import EvalSetConfig, problem
from trainer.errors import ConfigurationError, Problem
from trainer.telemetry.run_dir import changed_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig, TaskConfig
    from trainer.driver.checkpointing import ResumePoint


P = ParamSpec("P")
T = TypeVar("T")


class Findings:
    """What checks before a run find, collected so that all of it is reported at once.

    Example:
        found = Findings()
        found.add(file_problems(cfg))
        tokenizer = found.attempt(policy_tokenizer, cfg)  # None if it cannot be loaded
        found.raise_if_any()
    """

    def __init__(self) -> None:
        self._errors: list[ConfigurationError | DataError] = []

    def add(self, problems: Iterable[Problem]) -> None:
        if problems := list(problems):
            self._errors.append(ConfigurationError(problems))

    def attempt(self, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` returns; None if it raises."""
        try:
            return make(*args, **kwargs)
        except (ConfigurationError, DataError) as error:
            self._errors.append(error)
            return None

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Without repetitions; those of the data are under the key `task`."""
        found: dict[str, Problem] = {}
        for error in self._errors:
            of_data = isinstance(error, DataError)
            for one in (Problem(key="task", value="", message=str(error)),) if of_data else error.problems:
                found[str(one)] = one
        return tuple(found.values())

    def raise_if_any(self) -> None:
        """A single error is raised as it is."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise ConfigurationError(self.problems) from self._errors[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """The prompts of `task.eval_path` (with an empty name) or of one of `task.eval_sets`."""

    name: str = ""
    prompts: Sequence[Prompt]
    """At least one."""
    num_samples: int
    """Responses to each."""

    @property
    def key(self) -> str:
        """The configuration key of its path."""
        return _key(self.name, "path")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSets:
    train: PromptSet
    evaluation: tuple[EvalSet, ...]
    """That of `task.eval_path` first; empty if the run has no evaluation."""
    notes: tuple[str, ...] = ()
    """How many rows a data set lost and why, and warnings of `preflight`."""

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """Held-out ones last."""
        return (*self.train.prompts, *(prompt for one in self.evaluation for prompt in one.prompts))

    @property
    def prompt_tokens(self) -> float:
        """Of a training prompt, on average."""
        return float(np.mean([len(prompt.token_ids) for prompt in self.train.prompts]))

    def num_evaluated(self, cfg: RunConfig) -> int:
        """Responses of an evaluation."""
        return sum(len(one.prompts) * one.num_samples for one in self.evaluation) if cfg.evaluates else 0


# --- loading ---


def check_data(
    cfg: RunConfig, found: Findings, tokenizer: Any | None, *, tools: Sequence[Mapping[str, Any]] = ()
) -> DataSets | None:
    """The data sets, after a trial of their rewards; None if one cannot be used. Blocks for seconds.

    Args:
        tokenizer: None if it cannot be loaded; then the tokens of the prompts are meaningless.
        tools: JSON schemas of functions, for the chat template.
    """
    data = found.attempt(load_data, cfg, _NoTokenizer() if tokenizer is None else tokenizer, tools=tools)
    if data is not None:
        samples: dict[str, Prompt] = {}
        for prompt in data.prompts:
            samples.setdefault(prompt.reward, prompt)
        for sample in samples.values():
            found.attempt(_check_reward, cfg, sample)
    return data


def data_problems(cfg: RunConfig) -> tuple[Problem, ...]:
    """Of data and rewards, for a configuration that is refused anyway. Without torch and network, so no hub data."""
    paths = [cfg.task.train_path, *cfg.task.held_out_paths.values()]
    if not all(path.startswith("builtin:") or Path(path).exists() for path in paths if path):
        return ()
    found = Findings()
    check_data(cfg, found, None)
    return found.problems


class _NoTokenizer:
    """For a tokenizer that cannot be loaded."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        return {"input_ids": [[0]] * len(text)}

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> str:
        return "\n".join(str(message["content"]) for message in conversation)


def load_data(cfg: RunConfig, tokenizer: Any, *, tools: Sequence[Mapping[str, Any]] = ()) -> DataSets:
    """
    Raises:
        DataError: a data set, column or prompt cannot be used, or one set is read for another.
        ConfigurationError: the chat template does not take `task.chat_template_kwargs`.
    """
    task, kwargs = cfg.task, cfg.task.chat_template_kwargs
    checked = kwargs if not isinstance(tokenizer, _NoTokenizer) else {}
    if checked and (message := why_refused(tokenizer, checked, with_tools=bool(tools))) is not None:
        hint = "leave them out, or check their names in the tokenizer's chat template"
        raise ConfigurationError([problem(cfg, "task.chat_template_kwargs", message, hint)])
    main = EvalSetConfig(path=task.eval_path, split=task.eval_split, size=task.eval_size)
    sets = {"": main, **task.eval_sets} if task.eval_path else {}
    train_spec = _train_spec(cfg, tools)
    specs = {
        name: replace(
            train_spec,
            path=one.path,
            split=one.split,
            prompt_column=one.prompt_column if one.prompt_column else task.prompt_column,
            answer_column=one.answer_column if one.answer_column else task.answer_column,
            reward_column_required=False,  # a benchmark of one kind has none
        )
        for name, one in sets.items()
    }
    for name, spec in specs.items():
        check_overlap(train_spec, spec, key=_key(name, "path"), split_key=_key(name, "split"))
    train = load_prompts(train_spec, tokenizer)
    notes, evaluation = [*_left_out(cfg, "task.train_path", train)], list[EvalSet]()
    for name, one in sets.items():
        try:
            held_out = load_prompts(specs[name], tokenizer)
        except DataError as error:
            raise DataError(f"task.eval_sets.{name}: {error}" if name else str(error)) from error
        num_samples = cfg.trainer.eval_samples if one.samples is None else one.samples
        evaluation.append(EvalSet(name=name, prompts=eval_subset(held_out, size=one.size), num_samples=num_samples))
        notes += _left_out(cfg, _key(name, "path"), held_out)
    return DataSets(train=train, evaluation=tuple(evaluation), notes=tuple(notes))


def _key(name: str, leaf: str) -> str:
    return f"task.eval_sets.{name}.{leaf}" if name else f"task.eval_{leaf}"


def _left_out(cfg: RunConfig, key: str, loaded: PromptSet) -> Iterator[str]:
    if loaded.num_duplicates or loaded.num_overlong:
        repeated = f"{loaded.num_duplicates} that repeat an earlier one (task.dedup)"
        overlong = f"{loaded.num_overlong} over task.max_prompt_tokens={cfg.task.max_prompt_tokens}"
        yield f"rows of {key} that were skipped: {repeated}, {overlong}"


def _train_spec(cfg: RunConfig, tools: Sequence[Mapping[str, Any]]) -> DatasetSpec:
    task = cfg.task
    return DatasetSpec(
        path=task.train_path,
        reader=task.reader,
        split=task.train_split,
        prompt_column=task.prompt_column,
        answer_column=task.answer_column,
        answer_required=lookup(task.reward.name).needs_answer,
        reward_column=task.reward.column,
        reward_column_required=True,
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


def data_warnings(cfg: RunConfig, data: DataSets) -> Iterator[str]:
    """Warns of evaluation prompts that are trained on (whatever their white space and case), and of fewer training
    prompts than one step takes."""
    trained = {_normalized(prompt) for prompt in data.train.prompts} if data.evaluation else set[int]()
    for one in data.evaluation:
        if number := sum(_normalized(prompt) in trained for prompt in one.prompts):
            yield (
                f"{number} of {len(one.prompts)} prompts of {one.key} are among those of task.train_path: their "
                "accuracy says nothing about unseen problems; remove them from the training set"
            )
    num_prompts, num_groups = len(data.train.prompts), cfg.trainer.groups_per_step
    if num_prompts < num_groups:
        yield (
            f"task.train_path has {num_prompts} prompts, fewer than trainer.groups_per_step={num_groups}: every step "
            "trains on some of them more than once"
        )


def _normalized(prompt: Prompt) -> int:
    return hash(" ".join(prompt.text.casefold().split()))


# --- rewards ---


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
    """Parts of a reward that the estimator reads and the trial call did not return."""
    algorithm, related = cfg.algorithm, "task.reward.name"
    if not traits_of(algorithm).uses_parts:
        return
    if not parts:
        message = f"reads the named parts of a reward, and {reward} returns none"
        hint = 'let it return a dict such as {"reward": total, "correct": .., "format": ..}, or use another estimator'
        yield problem(cfg, "algorithm.advantage_estimator", message, hint, related)
        return
    for name in algorithm.gdpo_weights:
        if name not in parts:
            message = f"must name parts that {reward} returns: {', '.join(sorted(parts))}"
            yield Problem(key="algorithm.gdpo_weights", value=name, message=message, related=(related,))


# --- the order of training prompts ---


def make_source(cfg: RunConfig, train: PromptSet, resumed: ResumePoint | None) -> PromptSource:
    """The training prompts in order, continued from a checkpoint. Raises DataError if a column does not fit, no prompt
    is left, or the data is not that of the checkpoint."""
    task = cfg.task
    curriculum, pass_rates = curriculum_of(task, train.prompts), pass_rates_of(task, train.prompts)
    source = PromptSource(train, seed=cfg.seed, shuffle=task.shuffle, curriculum=curriculum, pass_rates=pass_rates)
    if resumed is not None:
        try:
            source.load_state_dict(resumed.state["source"])
        except DataError as error:
            raise DataError(f"{error}{_configured_otherwise(cfg, resumed)}") from error
    source.require_prompt()
    return source


def _configured_otherwise(cfg: RunConfig, resumed: ResumePoint) -> str:
    """Keys of data and tokenizer that differ from the configuration of the checkpoint's run."""
    changes = changed_keys(resumed.path.parents[1] / "config.yaml", cfg) or ()
    of_data = [one for one in changes if one.startswith(("task.", "model.path:", "model.tokenizer_path:", "seed:"))]
    return f"; configured otherwise since: {', '.join(of_data)}" if of_data else ""


def curriculum_of(task: TaskConfig, prompts: Sequence[Prompt]) -> Curriculum | None:
    """None without a curriculum. By pass rates, a rare pass is hard. Raises DataError if a prompt has no difficulty."""
    if task.curriculum == "none":
        return None
    by_pass_rate = not task.difficulty_column
    name = task.pass_rate_column if by_pass_rate else task.difficulty_column
    setting = "task.pass_rate_column" if by_pass_rate else "task.difficulty_column"
    column = numbers(prompts, name, setting=setting)
    if (empty := next((p for p, value in zip(prompts, column, strict=True) if value is None), None)) is not None:
        raise DataError(
            f"prompt {empty.prompt_id}: column {name!r} ({setting}) is null; task.curriculum needs a number for every "
            "prompt"
        )
    difficulties = np.array(column, np.float64)
    return Curriculum(difficulties=-difficulties if by_pass_rate else difficulties, num_epochs=task.curriculum_epochs)


def pass_rates_of(task: TaskConfig, prompts: Sequence[Prompt]) -> PassRateFilter | None:
    """None if the bounds include every pass rate. Raises DataError if one in the column is not in 0..1."""
    if not task.filters_pass_rate:
        return None
    name, setting = task.pass_rate_column, "task.pass_rate_column"
    column = numbers(prompts, name, setting=setting) if name else [None] * len(prompts)
    rates = {p.prompt_id: rate for p, rate in zip(prompts, column, strict=True) if rate is not None}
    for prompt_id, rate in rates.items():
        if not 0 <= rate <= 1:
            raise DataError(
                f"prompt {prompt_id}: column {name!r} holds {rate:g}; {setting} names a column of shares, 0 to 1"
            )
    bounds = PassRateBounds(
        lowest=task.pass_rate_min,
        highest=task.pass_rate_max,
        retry_epochs=task.pass_rate_cooldown_epochs,
        pass_threshold=task.pass_threshold,
    )
    return PassRateFilter(len(prompts), bounds, start=rates)
