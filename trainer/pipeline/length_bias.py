"""Whether asynchronous training prefers short answers: Kolmogorov-Smirnov distances between samples of lengths.

Two questions, two figures:

- `length_bias/ks`: are trained answers distributed like generated ones? Filters, answers without loss (masked because
  they were cut off, say) and unfinished work pull them apart.
- `length_bias/early_ks`: within one *cohort*, the groups that were admitted under the same policy version, were those
  that were trained first shorter than all of them? Nothing finished is ever thrown away, so in the end a cohort is
  trained whole; what asynchrony can do is to train its short answers first, and its long ones when they are older. A
  cohort is complete S steps after its version, when its last group must have been trained, so no answer that is still
  being generated is missing from the comparison. (Comparing with whatever finished by now would miss exactly those:
  long answers are censored.) A cohort that one step trained whole says 0.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.types import Group

WINDOW_COHORTS = 16
"""The latest complete cohorts that are compared together."""


def ks_distance(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> float:
    """Kolmogorov-Smirnov distance between two samples of lengths, in [0, 1]; 0 if either is empty."""
    a, b = np.sort(np.asarray(a, np.int64)), np.sort(np.asarray(b, np.int64))
    if not a.size or not b.size:
        return 0.0
    points = np.union1d(a, b)
    cdf_a, cdf_b = (np.searchsorted(side, points, side="right") / side.size for side in (a, b))
    return float(np.max(np.abs(cdf_a - cdf_b)))


class EarlyLengths:
    """Lengths of what was trained first of each cohort, and of the whole cohort."""

    def __init__(self) -> None:
        self._open: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)  # start version -> step -> lengths
        self._complete: deque[dict[int, list[int]]] = deque(maxlen=WINDOW_COHORTS)

    def trained(self, groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
        """`step` trained these groups; cohorts that no later step can train are complete."""
        for group in groups:
            lengths = self._open[group.start_version].setdefault(step, [])
            lengths += [t.num_generated_tokens for t in group.trajectories]
        for version in sorted(v for v in self._open if v + max_staleness <= step):
            self._complete.append(self._open.pop(version))

    def record(self) -> dict[str, float]:
        """Metrics over the latest complete cohorts; nothing before the first."""
        early = [n for cohort in self._complete for n in cohort[min(cohort)]]
        everything = [n for cohort in self._complete for lengths in cohort.values() for n in lengths]
        if not everything or sum(everything) == 0:
            return {}
        ratio = (sum(early) / len(early)) / (sum(everything) / len(everything))
        return {"length_bias/early_ks": ks_distance(early, everything), "length_bias/early_length_ratio": ratio}
