"""The data sets of a run: what they are, and what is in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout.chat_template import why_refused
from rollout.prompts.overlap import refuse_overlap
from rollout.prompts.readers import SourceSpec
from rollout.prompts.source import PromptSet, eval_subset, load_prompts
from rollout.reward.registry import BUILTIN_REWARDS, lookup
from trainer.config.describe import value_text
from trainer.config.errors import ConfigurationError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.types import Prompt
    from trainer.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSets:
    train: PromptSet
    evaluation: tuple[Prompt, ...]
    """Empty if the run has no evaluation."""
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
    train_spec = _spec(cfg, cfg.task.train_path, cfg.task.train_split, tools=tools, is_held_out=False)
    spec = _spec(cfg, cfg.task.eval_path, cfg.task.eval_split, tools=tools, is_held_out=True)
    if cfg.task.eval_path:
        refuse_overlap(train_spec, spec)
    train = load_prompts(train_spec, tokenizer)
    evaluation: tuple[Prompt, ...] = ()
    left_out = _left_out(cfg, "task.train_path", train)
    if cfg.task.eval_path:
        held_out = load_prompts(spec, tokenizer)
        evaluation = eval_subset(held_out, size=cfg.task.eval_size)
        left_out += _left_out(cfg, "task.eval_path", held_out)
    return DataSets(train=train, evaluation=evaluation, left_out=left_out)


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


def _spec(
    cfg: RunConfig, path: str, split: str, *, tools: Sequence[Mapping[str, Any]], is_held_out: bool
) -> SourceSpec:
    task = cfg.task
    return SourceSpec(
        path=path,
        reader=task.reader,
        split=split,
        prompt_column=task.prompt_column,
        answer_column=task.answer_column,
        answer_required=lookup(task.reward.name).needs_answer,
        reward_column=task.reward.column,
        reward_column_required=not is_held_out,  # benchmarks of one kind have none
        rewards_with_answer=frozenset(name for name, entry in BUILTIN_REWARDS.items() if entry.needs_answer),
        apply_chat_template=task.apply_chat_template,
        chat_template_kwargs=task.chat_template_kwargs,
        tools=tools,
        system_prompt=task.system_prompt,
        dedup=task.dedup,
        max_prompt_tokens=task.max_prompt_tokens,
        overlong_prompts=task.overlong_prompts,
        max_operand=task.max_operand,
    )
