"""The stream of training prompts with its curriculum and pass-rate filter, as the `task` section asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollout.errors import DataError
from rollout.prompts.columns import numbers
from rollout.prompts.curriculum import Curriculum
from rollout.prompts.pass_rates import PassRateBounds, PassRates
from rollout.prompts.source import PromptSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.prompts.source import PromptSet
    from rollout.types import Prompt
    from trainer.config.schema import RunConfig
    from trainer.config.schema.task import TaskConfig


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
