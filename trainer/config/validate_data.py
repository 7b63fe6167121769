"""Combinations of values around the choice of prompts: curriculum and pass-rate filter. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.prompts.datasets import reader_of_suffix
from trainer.config.conflicts import conflict, ineffective

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.config.schema import RunConfig
    from trainer.errors import Problem

BUILTIN_TASK = "builtin:arithmetic"


def selection_problems(config: RunConfig) -> Iterator[Problem]:
    """Bounds that no group can meet, columns that cannot be there, and keys that nothing reads."""
    yield from _pass_rates(config)
    yield from _curriculum(config)
    yield from _splits(config)
    task = config.task
    if task.train_path == BUILTIN_TASK:
        for key in ("task.difficulty_column", "task.pass_rate_column"):
            why = f"{BUILTIN_TASK} has no further columns"
            yield from ineffective(config, key, why, "task.train_path")


def _splits(config: RunConfig) -> Iterator[Problem]:
    """Directories are left out: there equal splits say that one directory is meant for both sets."""
    task = config.task
    for name, path in (("train", task.train_path), ("eval", task.eval_path)):
        if not path:
            yield from ineffective(config, f"task.{name}_split", f"task.{name}_path is empty", f"task.{name}_path")
        elif reader_of_suffix(path) is not None and task.reader != "hf":
            why = f"{path} is a file, which has no splits and is read whole"
            yield from ineffective(config, f"task.{name}_split", why, f"task.{name}_path")


def _pass_rates(config: RunConfig) -> Iterator[Problem]:
    task, group_size, keys = config.task, config.rollout.group_size, ("task.pass_rate_min", "task.pass_rate_max")
    if not task.filters_pass_rate:
        why = "task.pass_rate_min=0 and task.pass_rate_max=1 filter nothing"
        for key in ("task.pass_rate_retry_epochs", "task.pass_reward"):
            yield from ineffective(config, key, why, *keys)
        if task.curriculum == "none":
            yield from ineffective(config, "task.pass_rate_column", f"{why}, and task.curriculum=none", *keys)
        elif task.difficulty_column:
            why = f"{why}, and task.curriculum goes by task.difficulty_column"
            yield from ineffective(config, "task.pass_rate_column", why, *keys, "task.difficulty_column")
    elif task.pass_rate_min > task.pass_rate_max:
        allowed = f"must be at most task.pass_rate_max={task.pass_rate_max:g}"
        yield conflict(config, keys[0], allowed, "for example 0.1 and 0.9", keys[1])
    elif not any(task.pass_rate_min <= n / group_size <= task.pass_rate_max for n in range(group_size + 1)):
        allowed = (
            f"lets no group in: with rollout.group_size={group_size} a pass rate is a multiple of 1/{group_size}, and "
            f"none lies in {task.pass_rate_min:g}..{task.pass_rate_max:g}"
        )
        yield conflict(config, keys[0], allowed, "widen the bounds, or raise rollout.group_size", keys[1])


def _curriculum(config: RunConfig) -> Iterator[Problem]:
    task = config.task
    if task.curriculum == "none":
        for key in ("task.curriculum_epochs", "task.difficulty_column"):
            yield from ineffective(config, key, "task.curriculum=none", "task.curriculum")
    elif not task.difficulty_column and not task.pass_rate_column:
        allowed, also = "needs to know what is hard", ("task.difficulty_column", "task.pass_rate_column")
        do = "set task.difficulty_column or task.pass_rate_column to a column of the data set"
        yield conflict(config, "task.curriculum", allowed, do, *also)
