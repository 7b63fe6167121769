"""What each advantage estimator looks at: one table for validation, the data side and the dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from trainer.config.own_function import OwnFunction, is_own, load_own

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainer.config.schema.algorithm import AlgorithmConfig

AdvantageName = Literal[
    "grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "opo", "gpg", "pass_at_k", "gdpo", "remax",
    "gae", "zero",
]  # fmt: skip

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
    reward_to_go: bool = False
    """A token's advantage comes from the rewards of its own turn and later ones, not from the sum of all turns."""
    greedy_baseline: bool = False
    """Every group needs one more answer, sampled greedily, whose reward is the baseline."""


ESTIMATORS: Mapping[AdvantageName, EstimatorTraits] = {
    "grpo": EstimatorTraits(needs_peers=True, reads_normalize_by_std=True),
    "rloo": EstimatorTraits(needs_peers=True),
    "reinforce": EstimatorTraits(needs_peers=False, reward_to_go=True),
    "reinforce_pp": EstimatorTraits(needs_peers=False, spans_step=True, reward_to_go=True),
    "reinforce_pp_baseline": EstimatorTraits(needs_peers=True, spans_step=True),
    "opo": EstimatorTraits(needs_peers=True),
    "gpg": EstimatorTraits(needs_peers=True, spans_step=True),
    "pass_at_k": EstimatorTraits(needs_peers=True, reads_normalize_by_std=True),
    "gdpo": EstimatorTraits(needs_peers=True, spans_step=True, uses_parts=True),
    "remax": EstimatorTraits(needs_peers=False, greedy_baseline=True),
    "gae": EstimatorTraits(needs_peers=False),
    "zero": EstimatorTraits(needs_peers=False),
}

OWN_TRAITS = EstimatorTraits(needs_peers=True, spans_step=True)
"""Of a user's estimator that declares none. They promise least: it never sees a lone answer, and nothing relies on the
advantages of a group to depend on that group alone."""

_DECLARED = "estimator_traits"
_Estimator = TypeVar("_Estimator", bound=OwnFunction)


def with_traits(traits: EstimatorTraits) -> Callable[[_Estimator], _Estimator]:
    """A decorator that declares what a user's estimator looks at, in place of `OWN_TRAITS`.

    Example:
        @with_traits(EstimatorTraits(needs_peers=False))
        def my_estimator(groups, *, scale=1.0): ...
    """

    def declare(estimator: _Estimator) -> _Estimator:
        setattr(estimator, _DECLARED, traits)
        return estimator

    return declare


def declared_traits(estimator: OwnFunction) -> EstimatorTraits:
    """What `with_traits` declared, else `OWN_TRAITS`."""
    return cast(EstimatorTraits, getattr(estimator, _DECLARED, OWN_TRAITS))


def traits_of(algorithm: AlgorithmConfig) -> EstimatorTraits:
    """Of the estimator that `algorithm.advantage` names; a user's own, by dotted path, is imported for it.

    Raises:
        ConfigurationError: the path does not lead to an estimator.
        ValueError: no such name.
    """
    advantage = algorithm.advantage
    if is_own(advantage):
        return declared_traits(load_own(advantage, key="algorithm.advantage", args=algorithm.advantage_args))
    for name, traits in ESTIMATORS.items():
        if name == advantage:
            return traits
    raise ValueError(f"algorithm.advantage must be one of {', '.join(ESTIMATORS)}, or a dotted path, got {advantage!r}")
