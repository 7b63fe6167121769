"""What each advantage estimator looks at: one table for validation, the data side and the dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

AdvantageName = Literal[
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo"
]

GpgScale = Literal["nonzero_rewards", "valid_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorTraits:
    """Properties of one estimator; the rewards of the group are always read, except with `uses_parts`."""

    needs_peers: bool
    """Compares the answers of one prompt: needs at least 2, and learns nothing from a group of equal rewards."""
    spans_step: bool = False
    """An advantage also depends on the other groups of the step."""
    reads_normalize_by_std: bool = False
    """`algorithm.normalize_by_std` switches the division by the group's standard deviation."""
    uses_parts: bool = False
    """Reads the named parts of the reward, and not their total."""


ESTIMATORS: Mapping[AdvantageName, EstimatorTraits] = {
    "grpo": EstimatorTraits(needs_peers=True, reads_normalize_by_std=True),
    "rloo": EstimatorTraits(needs_peers=True),
    "reinforce": EstimatorTraits(needs_peers=False),
    "reinforce_pp": EstimatorTraits(needs_peers=False, spans_step=True),
    "reinforce_pp_baseline": EstimatorTraits(needs_peers=True, spans_step=True),
    "opo": EstimatorTraits(needs_peers=True),
    "gpg": EstimatorTraits(needs_peers=True, spans_step=True),
    "pass_at_k": EstimatorTraits(needs_peers=True, reads_normalize_by_std=True),
    "gdpo": EstimatorTraits(needs_peers=True, spans_step=True, uses_parts=True),
}
