"""Leaves out prompts that the policy solves always or never."""

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
    """Which pass rates are worth a response."""

    lowest: float
    highest: float
    retry_epochs: int
    """How often a prompt outside is skipped before it is tried again."""
    pass_threshold: float
    """Reward from which a response passes."""

    def side(self, rate: float) -> str:
        """`too_hard` or `too_easy`; empty within the bounds, which count as inside."""
        if rate < self.lowest:
            return "too_hard"
        return "too_easy" if rate > self.highest else ""

    def __str__(self) -> str:
        return f"task.pass_rate_min={self.lowest:g} to task.pass_rate_max={self.highest:g}"


class PassRateFilter:
    """The newest pass rate of every prompt, and the cooldown of those outside the bounds.

    The newest group of a prompt is its estimate, from the next version on. Groups of a version end in any order, but
    without staleness all have ended before the next version, so that such a run repeats itself.

    Args:
        num_prompts: of the data set.
        start: prompt id -> pass rate in 0..1, measured before the run.
    """

    def __init__(self, num_prompts: int, bounds: PassRateBounds, *, start: Mapping[str, float]) -> None:
        self._num_prompts, self._bounds, self._start = num_prompts, bounds, dict(start)
        self._rates = dict(start)
        self._cooldown = self._cooldowns(start)
        self._outside = set(self._cooldown)  # prompts found outside since the last group inside, by order of group id
        self._pending: dict[int, tuple[int, str, float]] = {}  # group id -> start version, prompt id, rate
        self._applied: int | None = None  # newest version whose earlier groups count
        self._skipped = Counter(too_hard=0, too_easy=0)

    def require_prompt(self) -> None:
        """Call it before the first draw, after `load_state_dict`. Raises DataError if every prompt is outside the
        bounds."""
        if len(self._outside) == self._num_prompts:
            raise DataError(self._nothing_left("from the start (in task.pass_rate_column, or in the checkpoint)"))

    def observe(self, group: Group) -> None:
        """A group ended. One without a scored response does not count."""
        rewards = [t.total_reward for t in group.trajectories if t.status != "failed"]
        if not rewards:
            return
        rate = sum(reward >= self._bounds.pass_threshold for reward in rewards) / len(rewards)
        self._pending[group.group_id] = (group.start_version, group.prompt_id, rate)

    def apply_results(self, version: int | None) -> None:
        """Call it before a draw under `version`: groups of earlier versions count from now on; None for all groups.

        Raises:
            NoProgress: every prompt was found outside the bounds, and no group inside in between.
        """
        if version is None or version != self._applied:
            self._applied = version
            for group_id in sorted(self._pending):
                start_version, name, rate = self._pending[group_id]
                if version is None or start_version < version:
                    del self._pending[group_id]
                    self._count(name, rate)
        if len(self._outside) == self._num_prompts:
            raise NoProgress(self._nothing_left("since the last group inside"))

    def _count(self, name: str, rate: float) -> None:
        self._rates[name] = rate
        if self._bounds.side(rate):
            self._cooldown[name] = self._bounds.retry_epochs
            self._outside.add(name)
        else:
            self._cooldown.pop(name, None)
            self._outside.clear()

    def skip_epochs(self) -> int:
        """Call it before the first turn of an epoch: skips the epochs that would skip every prompt and end no cooldown,
        and returns their number."""
        if len(self._cooldown) < self._num_prompts:
            return 0
        num_epochs = min(self._cooldown.values()) - 1
        if num_epochs:
            for name in self._cooldown:
                self._cooldown[name] -= num_epochs
                self._skipped[self._bounds.side(self._rates[name])] += num_epochs
        return num_epochs

    def skips(self, prompt_id: str) -> bool:
        """Whether the prompt, whose turn it is, is skipped. Counts, so call it once per turn."""
        left = self._cooldown.pop(prompt_id, 0)
        if left == 0:
            return False
        if left > 1:
            self._cooldown[prompt_id] = left - 1
        self._skipped[self._bounds.side(self._rates[prompt_id])] += 1
        return True

    def record(self) -> dict[str, float]:
        """Metrics; counts since the run began."""
        counts = {f"skipped/{side}": float(count) for side, count in self._skipped.items()}
        rates = {"pass_rate_mean": float(np.mean(list(self._rates.values())))} if self._rates else {}
        return {**counts, **rates, "prompts_excluded": len(self._cooldown)}

    def state_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "rates": dict(self._rates),
            "resting": dict(self._cooldown),
            "outside": sorted(self._outside),
            "pending": [[group_id, *entry] for group_id, entry in sorted(self._pending.items())],
            "skipped": dict(self._skipped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bounds may differ: prompts that are inside now lose their cooldown. `start` counts for prompts without a
        rate."""
        new = {name: rate for name, rate in self._start.items() if name not in state["rates"]}
        self._rates = state["rates"] | new
        self._pending = {group_id: (version, name, rate) for group_id, version, name, rate in state["pending"]}
        self._skipped = Counter(state["skipped"])
        kept = {name: left for name, left in state["resting"].items() if self._bounds.side(self._rates[name])}
        self._cooldown = kept | self._cooldowns(new)
        # Older checkpoints have prompts here whose group does not count yet.
        known = {name: rate for _, name, rate in self._pending.values()} | self._rates
        self._outside = {name for name in state["outside"] if self._bounds.side(known[name])} | {*self._cooldowns(new)}

    def _cooldowns(self, rates: Mapping[str, float]) -> dict[str, int]:
        return {name: self._bounds.retry_epochs for name, rate in rates.items() if self._bounds.side(rate)}

    def _newest(self) -> dict[str, float]:
        return self._rates | {name: rate for _, (_, name, rate) in sorted(self._pending.items())}

    def _nothing_left(self, since: str) -> str:
        return (
            f"all {self._num_prompts} prompts have pass rates outside {self._bounds} {since}, so none is worth a "
            f"response; by pass rate (rewards of at least task.pass_threshold={self._bounds.pass_threshold:g}): "
            f"{_distribution(list(self._newest().values()))}. Widen the bounds, use prompts that are less "
            "hard or less easy, or check that responses can reach task.pass_threshold"
        )


def _distribution(rates: list[float]) -> str:
    """How many are 0, within each quarter, and 1; for a message."""
    counts = Counter("0" if r == 0 else "1" if r == 1 else _QUARTERS[min(int(np.ceil(r * 4)) - 1, 3)] for r in rates)
    return ", ".join(f"{name}: {counts[name]}" for name in ("0", *_QUARTERS, "1") if counts[name])
