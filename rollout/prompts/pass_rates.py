"""The pass-rate filter: prompts that the policy solves too often or too rarely rest for some epochs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import DataError, NoProgress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.types import Group

_QUARTERS = ("up to 0.25", "up to 0.5", "up to 0.75", "below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRateBounds:
    """Which pass rates are worth an answer."""

    lowest: float
    highest: float
    retry_epochs: int
    """How often a prompt outside is passed over before it is tried again."""
    pass_reward: float
    """Reward from which an answer passes."""

    def side(self, rate: float) -> str:
        """`too_hard` or `too_easy`; empty within the bounds, which count as inside."""
        if rate < self.lowest:
            return "too_hard"
        return "too_easy" if rate > self.highest else ""

    def __str__(self) -> str:
        return f"task.pass_rate_min={self.lowest:g} to task.pass_rate_max={self.highest:g}"


class PassRates:
    """The newest pass rate of every prompt, and how long those outside the bounds rest.

    The newest group of a prompt is its estimate: older ones are of a policy that is no more. It counts from the next
    version on. Within a version groups end in any order, between two of a run without staleness all of them have ended:
    so there the same prompts are drawn in every repetition.

    Args:
        num_prompts: prompts of the data set.
        start: prompt id -> pass rate, measured before the run; in 0..1.

    Raises:
        DataError: by `start`, every prompt is outside.
    """

    def __init__(self, num_prompts: int, bounds: PassRateBounds, *, start: Mapping[str, float]) -> None:
        self._num_prompts, self._bounds = num_prompts, bounds
        self._rates = dict(start)
        self._resting = {name: bounds.retry_epochs for name, rate in start.items() if bounds.side(rate)}
        self._outside = set(self._resting)  # prompts found outside since the last group inside
        self._pending: dict[int, tuple[int, str, float]] = {}  # group id -> start version, prompt id, rate
        self._settled: int | None = None  # newest version whose earlier groups count
        self._skipped = Counter(too_hard=0, too_easy=0)
        if len(self._outside) == num_prompts:
            raise DataError(self._nothing_left("in task.pass_rate_column"))

    def observe(self, group: Group) -> None:
        """A group came back, whatever becomes of it. One without a judged answer says nothing."""
        rewards = [t.total_reward for t in group.trajectories if t.status != "failed"]
        if not rewards:
            return
        rate = sum(reward >= self._bounds.pass_reward for reward in rewards) / len(rewards)
        self._pending[group.group_id] = (group.start_version, group.prompt.prompt_id, rate)
        if self._bounds.side(rate):
            self._outside.add(group.prompt.prompt_id)
        else:
            self._outside.clear()

    def settle(self, version: int | None) -> None:
        """Before a draw under `version`: groups of earlier versions count from now on; None for all groups.

        Raises:
            NoProgress: every prompt was found outside the bounds, without one group inside between.
        """
        if len(self._outside) == self._num_prompts:
            raise NoProgress(self._nothing_left("since the last group inside"))
        if version is not None and version == self._settled:
            return
        self._settled = version
        for group_id in sorted(self._pending):
            start_version, name, rate = self._pending[group_id]
            if version is not None and start_version >= version:
                continue
            del self._pending[group_id]
            self._rates[name] = rate
            self._resting.pop(name, None)
            if self._bounds.side(rate):
                self._resting[name] = self._bounds.retry_epochs

    def skips(self, prompt_id: str) -> bool:
        """Whether the prompt, whose turn it is, is passed over. Counts, so ask once per turn."""
        left = self._resting.pop(prompt_id, 0)
        if left == 0:
            return False
        if left > 1:
            self._resting[prompt_id] = left - 1
        self._skipped[self._bounds.side(self._rates[prompt_id])] += 1
        return True

    def record(self) -> dict[str, float]:
        """Metrics; counts since the run began."""
        counts = {f"skipped/{side}": float(count) for side, count in self._skipped.items()}
        rates = {"pass_rate_mean": float(np.mean(list(self._rates.values())))} if self._rates else {}
        return {**counts, **rates, "resting": len(self._resting)}

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "rates": dict(self._rates),
            "resting": dict(self._resting),
            "outside": sorted(self._outside),
            "pending": [[group_id, *entry] for group_id, entry in sorted(self._pending.items())],
            "skipped": dict(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there. The bounds may be others: what is inside them now does not rest any longer."""
        self._rates = dict(state["rates"])
        self._pending = {group_id: (version, name, rate) for group_id, version, name, rate in state["pending"]}
        self._skipped = Counter(state["skipped"])
        self._resting = {name: left for name, left in state["resting"].items() if self._bounds.side(self._rates[name])}
        newest = self._newest()
        self._outside = {name for name in state["outside"] if self._bounds.side(newest[name])}

    def _newest(self) -> dict[str, float]:
        return self._rates | {name: rate for _, (_, name, rate) in sorted(self._pending.items())}

    def _nothing_left(self, since: str) -> str:
        return (
            f"all {self._num_prompts} prompts have pass rates outside {self._bounds} {since}, so none is worth an "
            f"answer; prompts by pass rate (rewards of at least task.pass_reward={self._bounds.pass_reward:g}): "
            f"{_distribution(list(self._newest().values()))}. Widen the bounds, use prompts that are less "
            "hard or less easy, or see whether task.pass_reward is one that answers can reach"
        )


def _distribution(rates: list[float]) -> str:
    """How many are 0, within each quarter, and 1; for a message."""
    counts = Counter("0" if r == 0 else "1" if r == 1 else _QUARTERS[min(int(np.ceil(r * 4)) - 1, 3)] for r in rates)
    return ", ".join(f"{name}: {counts[name]}" for name in ("0", *_QUARTERS, "1") if counts[name])
