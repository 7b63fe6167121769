"""What every advantage estimator promises. Shape legend: `G` answers of a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trainer.algorithms.advantages import GroupRewards
from trainer.algorithms.group_baselines import FloatArray
from trainer.plugins.contract import Broken, Check

if TYPE_CHECKING:
    from trainer.config.estimators import EstimatorTraits

EstimatorFn = Callable[[Sequence[GroupRewards]], Sequence[FloatArray]]

_PARTS = ("correct", "format")
_SIZES = (4, 2, 7, 3)


def advantage_checks(estimator: EstimatorFn, *, traits: EstimatorTraits) -> list[Check]:
    """The contract of an estimator; its numbers are bound already, e.g. with `functools.partial`.

    Args:
        traits: what it declares, see `trainer.config.estimators`; `OWN_TRAITS` if it declares nothing.
    """
    trial = _Trial(estimator=estimator, traits=traits)
    return [
        Check(promise="gives one float per answer, in a list of one array per group", run=trial.form),
        Check(promise="advantages are finite, also where all rewards are equal", run=trial.finite),
        Check(promise="two calls give the same bits and leave the groups alone", run=trial.repeatable),
        Check(promise="the order of answers in a group does not matter", run=trial.order_of_answers),
        Check(promise="the order of groups does not matter", run=trial.order_of_groups),
        Check(promise="other groups do not matter, unless it declares spans_step", run=trial.independence),
        Check(promise="a better answer of a group never gets less than a worse one", run=trial.direction),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    estimator: EstimatorFn
    traits: EstimatorTraits

    def form(self) -> None:
        self._call(self._groups(0))

    def finite(self) -> None:
        sizes = _SIZES if self.traits.needs_peers else (1, *_SIZES)
        equal = [[np.full(n, value) for n in sizes] for value in (0.0, 1.0)]
        for rewards in [*equal, *(self._rewards(seed, sizes) for seed in range(3))]:
            for values_G, rewards_G in zip(self._call(self._of(rewards)), rewards, strict=True):
                if not np.isfinite(values_G).all():
                    raise Broken(f"{values_G.tolist()} for the rewards {rewards_G.tolist()}; guard the division")

    def repeatable(self) -> None:
        groups = self._groups(1)
        before = [group.rewards_G.copy() for group in groups]
        first, second = self._call(groups), self._call(groups)
        if any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
            raise Broken("the second call gave other numbers; use no randomness and keep no state between calls")
        if any(not np.array_equal(old, group.rewards_G) for old, group in zip(before, groups, strict=True)):
            raise Broken("rewards_G was changed in place; work on a copy")

    def order_of_answers(self) -> None:
        groups, rng = self._groups(2), np.random.default_rng(2)
        orders = [rng.permutation(group.rewards_G.size) for group in groups]
        shuffled = [_reordered(group, order) for group, order in zip(groups, orders, strict=True)]
        expected = [values_G[order] for values_G, order in zip(self._call(groups), orders, strict=True)]
        _expect_equal(self._call(shuffled), expected, "after reordering its answers")

    def order_of_groups(self) -> None:
        groups = self._groups(3)
        _expect_equal(self._call(groups[::-1])[::-1], self._call(groups), "after reordering the groups")

    def independence(self) -> None:
        groups = self._groups(4)
        if not self.traits.spans_step:
            alone = [self._call([group])[0] for group in groups]
            _expect_equal(alone, self._call(groups), "without the other groups (declare spans_step if that is meant)")

    def direction(self) -> None:
        """Answers of equal length, graded: a better one may not get less, and somewhere gets more."""
        rewards = [np.array([1.0, 0.4, 0.0]), np.array([0.0, 1.0, 0.7, 0.7]), np.array([1.0, 0.0])]
        gaps: list[float] = []
        for values_G, rewards_G in zip(self._call(self._of(rewards)), rewards, strict=True):
            sorted_G = values_G[np.argsort(rewards_G, kind="stable")]
            if (np.diff(sorted_G)[np.diff(np.sort(rewards_G)) > 0] < -1e-9).any():
                raise Broken(f"{values_G.round(4).tolist()} for the rewards {rewards_G.tolist()}; check the sign")
            gaps.append(sorted_G[-1] - sorted_G[0])
        if max(gaps) <= 1e-9:
            raise Broken("the best answer never gets more than the worst one, so nothing is learned")

    def _groups(self, seed: int) -> list[GroupRewards]:
        return self._of(self._rewards(seed, _SIZES))

    def _rewards(self, seed: int, sizes: Sequence[int]) -> list[FloatArray]:
        rng = np.random.default_rng(seed)
        return [rng.normal(size=n) if i % 2 else rng.integers(0, 2, n).astype(np.float64) for i, n in enumerate(sizes)]

    def _of(self, rewards: Sequence[FloatArray]) -> list[GroupRewards]:
        """Groups with these rewards: equal lengths, and parts that rank the answers as their total does."""
        return [
            GroupRewards(
                rewards_G=rewards_G.copy(),
                lengths_G=np.full(rewards_G.size, 5 + i),
                parts_G={name: rewards_G / len(_PARTS) for name in _PARTS} if self.traits.uses_parts else {},
                baseline=0.25 if self.traits.greedy_baseline else None,
            )
            for i, rewards_G in enumerate(rewards)
        ]

    def _call(self, groups: Sequence[GroupRewards]) -> list[FloatArray]:
        """The advantages, after their form was checked."""
        given = self.estimator(groups)
        if not isinstance(given, Sequence) or len(given) != len(groups):
            what = f"{len(given)} of them" if isinstance(given, Sequence) else f"a {type(given).__name__}"
            raise Broken(f"expected a list of one array for each of {len(groups)} groups, got {what}")
        found = [np.asarray(values_G, np.float64) for values_G in given]
        for values_G, group in zip(found, groups, strict=True):
            if values_G.shape != group.rewards_G.shape:
                raise Broken(f"expected shape {group.rewards_G.shape}, one advantage per answer, got {values_G.shape}")
        return found


def _reordered(group: GroupRewards, order: np.ndarray) -> GroupRewards:
    return replace(
        group,
        rewards_G=group.rewards_G[order],
        lengths_G=group.lengths_G[order],
        parts_G={name: values_G[order] for name, values_G in group.parts_G.items()},
    )


def _expect_equal(got: Sequence[FloatArray], expected: Sequence[FloatArray], when: str) -> None:
    for i, (values_G, expected_G) in enumerate(zip(got, expected, strict=True)):
        if not np.allclose(values_G, expected_G, rtol=1e-9, atol=1e-9):
            raise Broken(
                f"group {i} gets {values_G.round(4).tolist()} {when}, and {expected_G.round(4).tolist()} before"
            )
