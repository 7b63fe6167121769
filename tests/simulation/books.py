"""Books of a simulation, kept from outside: what became of every group, and whether each promise was kept."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.types import Group, RolloutRequest, Trajectory
    from tests.simulation.fleet import Plan


@dataclass
class Books:
    """What became of every group, written down by its id as it happens; one byte each, so that 10^5 are nothing."""

    plan: Plan
    fates: dict[int, str] = field(default_factory=dict)
    most_attempts: int = 0
    """That were a group's own: what its worker or the engines lost does not count."""
    ages: Counter[int] = field(default_factory=Counter)
    """Of trained tokens."""
    trained_steps: int = 0
    num_resumed: int = 0
    """Answers that more than one version or call sampled."""

    def on_attempt(self, item: RolloutRequest) -> None:
        self.most_attempts = max(self.most_attempts, item.attempt + 1)

    def on_end(self, group_id: int, fate: str) -> None:
        assert group_id not in self.fates, f"group {group_id} was {self.fates[group_id]}, then {fate}"
        self.fates[group_id] = fate

    def on_taken(self, step: int, groups: Sequence[Group]) -> None:
        assert len(groups) == self.plan.groups_per_step
        for group in groups:
            assert step - group.start_version <= self.plan.max_staleness
            for trajectory in group.trajectories:
                self._check(step, trajectory)

    def _check(self, step: int, trajectory: Trajectory) -> None:
        (turn,) = trajectory.turns()
        tokens = turn.token_ids[turn.is_generated]
        first = len(turn.token_ids) - len(tokens)
        assert np.array_equal(tokens, np.arange(first, first + len(tokens))), "a token was lost or came twice"
        self.num_resumed += len(turn.segments) > 1
        for version, num_tokens in turn.segments:
            assert 0 <= step - version <= self.plan.max_staleness
            self.ages[step - version] += num_tokens

    def watch(self, buffer: RolloutBuffer, total_steps: int) -> None:
        """Writes down what leaves the buffer, from outside."""
        watched: Any = buffer
        take, drop, fail = buffer.take, buffer.filter, buffer.fail

        async def watching_take(step: int) -> list[Group]:
            groups = await take(step)
            self.on_taken(step, groups)
            if step < total_steps:
                self.trained_steps += 1
                for group in groups:
                    self.on_end(group.group_id, "trained")
            return groups

        def watching_filter(group_id: int, reason: str, **why: Any) -> None:
            self.on_end(group_id, "filtered")
            drop(group_id, reason, **why)

        def watching_fail(group_id: int, error: Exception) -> str:
            outcome = fail(group_id, error)
            if outcome == "dropped":
                self.on_end(group_id, "dropped")
            return outcome

        watched.take, watched.filter, watched.fail = watching_take, watching_filter, watching_fail
