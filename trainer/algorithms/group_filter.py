"""A user's own filter of finished groups: what it sees, and what it may return. Shape legend: `G` scored responses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rollout.types import Group, Prompt
from trainer.config.algorithm import load_own

if TYPE_CHECKING:
    from trainer.config.algorithm import AlgorithmConfig

OwnFilter = Callable[[Group, Prompt], str]
"""Why a group is replaced; empty if it is to be trained."""

BUILTIN_REASONS = ("rewards_failed", "zero_variance")
_REASON = re.compile(r"[a-z][a-z0-9_]{0,39}")


class GroupFilterError(RuntimeError):
    """The filter raised, or returned something that is no reason. Ends the run: what it would let in is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """What a filter sees of the responses to one prompt. Failed ones are left out; at least one was scored.

    Example:
        FinishedGroup(prompt=prompt, rewards_G=np.array([1.0, 0.0]), lengths_G=np.array([12, 30]),
                      is_truncated_G=np.array([False, True]), num_failed=0)
    """

    prompt: Prompt
    """Its text, answer, and the other columns of the data set as `metadata`."""
    rewards_G: npt.NDArray[np.float64]
    """Outcome and turns together, before shaping."""
    lengths_G: npt.NDArray[np.int64]
    """Generated tokens."""
    is_truncated_G: npt.NDArray[np.bool_]
    num_failed: int
    """Responses without a usable reward."""

    @classmethod
    def of(cls, group: Group, prompt: Prompt) -> FinishedGroup:
        scored = [t for t in group.trajectories if t.status != "failed"]
        return cls(
            prompt=prompt,
            rewards_G=np.array([t.total_reward for t in scored], np.float64),
            lengths_G=np.array([t.num_generated_tokens for t in scored], np.int64),
            is_truncated_G=np.array([t.status == "truncated" for t in scored], np.bool_),
            num_failed=len(group.trajectories) - len(scored),
        )


def own_group_filter(algorithm: AlgorithmConfig) -> OwnFilter | None:
    """The function that `algorithm.group_filter` names, bound to its numbers; None without one. Raises
    ConfigurationError if it cannot be imported or called."""
    path, numbers = algorithm.group_filter, algorithm.group_filter_args
    if not path:
        return None
    function = load_own(path, key="algorithm.group_filter", args=numbers)

    def reason(group: Group, prompt: Prompt) -> str:
        try:
            return checked_reason(function(FinishedGroup.of(group, prompt), **numbers))
        except Exception as error:
            what = str(error) if isinstance(error, GroupFilterError) else f"raised {type(error).__name__}: {error}"
            raise GroupFilterError(
                f"algorithm.group_filter {path} {what} (group {group.group_id}, prompt {group.prompt_id})"
            ) from error

    return reason


def checked_reason(given: object) -> str:
    """What a filter returned; empty for None. Raises GroupFilterError if it is neither None nor a word that can name a
    metric."""
    if given is None:
        return ""
    if not isinstance(given, str) or not _REASON.fullmatch(given) or given in BUILTIN_REASONS:
        raise GroupFilterError(
            f"gave {given!r:.80}; return None, to train the group, or a reason of at most 40 of a-z, 0-9 and _, "
            f"which becomes a metric, other than {' and '.join(BUILTIN_REASONS)}"
        )
    return given
