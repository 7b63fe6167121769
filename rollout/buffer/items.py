"""What the work buffer hands out, and how a checkpoint writes a prompt down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.types import Prompt

if TYPE_CHECKING:
    from collections.abc import Mapping


MAX_LOSSES = 2
"""Rollout workers that may be lost with one group in hand before that is taken for the group's doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """A prompt that was admitted: generate its group."""

    group_id: int
    prompt: Prompt
    start_version: int
    """The policy version that was live at admission; no token of the group may come from an older one."""
    attempt: int = 0
    """0, or which retry this is."""
    num_losses: int = 0
    """Rollout workers that were lost with it in hand, and that it was not blamed for."""


def dump_prompt(prompt: Prompt) -> dict[str, Any]:
    """A prompt as plain JSON values. `metadata` is kept as it is and must be plain itself."""
    return {
        "prompt_id": prompt.prompt_id,
        "token_ids": [int(token) for token in prompt.token_ids],
        "text": prompt.text,
        "answer": prompt.answer,
        "reward": prompt.reward,
        "metadata": dict(prompt.metadata),
    }


def load_prompt(state: Mapping[str, Any]) -> Prompt:
    """The inverse of `dump_prompt`."""
    return Prompt(
        prompt_id=state["prompt_id"],
        token_ids=np.array(state["token_ids"], np.int32),
        text=state["text"],
        answer=state["answer"],
        reward=state["reward"],
        metadata=state["metadata"],
    )
