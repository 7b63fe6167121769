"""Decides which prompts are too long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rollout.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Prompt

_NUM_SHOWN = 3


def drop_overlong(
    prompts: Sequence[Prompt], *, max_prompt_tokens: int, policy: Literal["error", "filter"]
) -> tuple[tuple[Prompt, ...], int]:
    """The prompts of at most `max_prompt_tokens` tokens, and how many were dropped.

    Raises:
        DataError: under the policy "error" if any is too long; under "filter" if all are.
    """
    overlong = [p for p in prompts if len(p.token_ids) > max_prompt_tokens]
    if overlong and policy == "error":
        shown = ", ".join(f"{p.prompt_id} ({len(p.token_ids)} tokens)" for p in overlong[:_NUM_SHOWN])
        raise DataError(
            f"{len(overlong)} of {len(prompts)} prompts are longer than task.max_prompt_tokens={max_prompt_tokens}: "
            f"{shown}{', ...' if len(overlong) > _NUM_SHOWN else ''}; raise the limit, or set "
            "task.overlong_prompts=filter to drop them"
        )
    kept = tuple(p for p in prompts if len(p.token_ids) <= max_prompt_tokens)
    if not kept:
        shortest = min(len(p.token_ids) for p in prompts)
        raise DataError(
            f"all {len(prompts)} prompts are longer than task.max_prompt_tokens={max_prompt_tokens} (the shortest has "
            f"{shortest} tokens); raise the limit"
        )
    return kept, len(overlong)
