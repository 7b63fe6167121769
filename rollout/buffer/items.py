"""What the work buffer hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.types import Prompt


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
