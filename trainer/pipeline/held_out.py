"""Sets of held-out prompts. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Prompt


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
