"""An advantage estimator of the user, by dotted path. Numpy only. Shape legend: `G` answers of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from trainer.config.own_function import load_own

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.algorithms.advantages import GroupRewards
    from trainer.algorithms.group_baselines import FloatArray

KEY = "algorithm.advantage"


def own_advantages(groups: Sequence[GroupRewards], *, path: str, args: Mapping[str, float]) -> list[FloatArray]:
    """What the estimator at `path` makes of the groups of a step, checked.

    It is called as `estimator(groups, **args)` and gives one finite float[G] for each group, in the same order.

    Returns:
        float64[G] for each group.

    Raises:
        ConfigurationError: as `load_own`.
        ValueError: it gave something else; the message names it.
    """
    given = load_own(path, key=KEY, args=args)(groups, **args)
    expected = f"{KEY}={path} must give a list of one array for each of {len(groups)} groups"
    if not isinstance(given, Sequence):
        raise ValueError(f"{expected}, got an object of type {type(given).__name__}")
    arrays = cast("Sequence[object]", given)
    if len(arrays) != len(groups):
        raise ValueError(f"{expected}, got {len(arrays)} of them")
    return [_checked(one, group, path) for one, group in zip(arrays, groups, strict=True)]


def _checked(given: object, group: GroupRewards, path: str) -> FloatArray:
    try:
        advantages_G = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{KEY}={path} must give arrays of numbers, got a {type(given).__name__}: {error}") from error
    if advantages_G.shape != group.rewards_G.shape:
        raise ValueError(
            f"{KEY}={path} must give one advantage per answer, shape {group.rewards_G.shape}, got {advantages_G.shape}"
        )
    if not np.isfinite(advantages_G).all():
        raise ValueError(
            f"{KEY}={path} must give finite advantages, got {advantages_G.tolist()} for the rewards "
            f"{group.rewards_G.tolist()}; guard the division where all rewards are equal"
        )
    return advantages_G
