"""How many requests one engine takes at a time.

    grow   +step      it has room: no preemption, no queue, KV cache below `KV_ROOM`, and requests are held back for it
    hold              everything else: nothing is known, or what was taken back has not drained yet
    trim   x TRIM     it preempts, or requests waited for room in its KV cache at two polls in a row
    cut    x CUT      its KV cache is critically full

A trim or a cut only holds new requests back; what runs goes on, because taking it away would lose the same cache that
the engine's own preemption loses. While more runs than the limit allows, no further step down follows: the signs still
come from before the last one. (Additive increase, multiplicative decrease, after Chiu and Jain 1989.)

Under a capacity of C requests (pressure above C, room below, everything drained between two polls) the limit settles
in [floor(TRIM * (C + 1)), C + step], C within the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollout.engine.interface import EngineStatus


KV_ROOM = 0.85
"""Below this share of the KV cache in use an engine has room for more: running answers still grow."""
KV_CRITICAL = 0.97
TRIM, CUT = 0.9, 0.5
STEPS_TO_MAX = 32
"""Growth from nothing to the upper bound takes so many polls."""
QUEUED_POLLS = 2
"""A queue at one poll may be a burst of prompts on their way into the batch. Beside a cache with room it always is, for
as many polls as their prefill takes: an engine that wakes up gets all of a step's prompts at once."""

Move = Literal["grow", "hold", "trim", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRange:
    """Of the number of requests that one engine has at once.

    Example: `LimitRange(lowest=8, highest=256)`; `LimitRange(lowest=64, highest=64)` is fixed.
    """

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest:
            raise ValueError(f"bounds must be 1 <= lowest <= highest, got {self.lowest} and {self.highest}")

    @property
    def is_fixed(self) -> bool:
        return self.lowest == self.highest

    def share(self, num_sharers: int) -> LimitRange:
        """Of one of `num_sharers` that send to the same engine; at least 1 each."""
        return LimitRange(lowest=max(1, self.lowest // num_sharers), highest=max(1, self.highest // num_sharers))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """What the sender knows about one engine."""

    in_flight: int
    """Requests that are there now."""
    num_queued: int
    """Requests that wait for room, on this or another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveLimit:
    """The state of the machine for one engine. It begins at the upper bound: an engine with room is never held back.

    Example:
        state = AdaptiveLimit.start(LimitRange(lowest=8, highest=256))
        state = state.next(engine_load, QueueState(in_flight=200, num_queued=16))
        state.limit
    """

    bounds: LimitRange
    limit: int
    last_move: Move = "hold"
    num_preemptions: int | None = None
    """The engine's counter at the last poll; None before the first."""
    queued_polls: int = 0
    """Looks in a row that saw requests wait inside the engine for room in its KV cache."""

    @classmethod
    def start(cls, bounds: LimitRange) -> AdaptiveLimit:
        return cls(bounds=bounds, limit=bounds.highest)

    def next(self, load: EngineStatus, queue: QueueState) -> AdaptiveLimit:
        """The state after one poll at the engine."""
        has_no_room = load.kv_usage_frac is None or load.kv_usage_frac >= KV_ROOM
        queued_polls = self.queued_polls + 1 if load.waiting and has_no_room else 0
        move = self._move(load, queue, queued_polls)
        # Below what runs: a limit above it would hold nothing back.
        base = min(self.limit, max(queue.in_flight, 1))
        match move:
            case "grow":
                limit = self.limit + growth_step(self.bounds)
            case "hold":
                limit = self.limit
            case "trim":
                limit = math.floor(TRIM * base)
            case "cut":
                limit = math.floor(CUT * base)
        limit = min(self.bounds.highest, max(self.bounds.lowest, limit))
        return replace(
            self, limit=limit, last_move=move, num_preemptions=load.num_preemptions, queued_polls=queued_polls
        )

    def _move(self, load: EngineStatus, queue: QueueState, queued_polls: int) -> Move:
        before = self.num_preemptions
        # A counter that went back belongs to a new engine; its first figure says nothing about now.
        preempts = before is not None and load.num_preemptions is not None and load.num_preemptions > before
        kv_frac = 0.0 if load.kv_usage_frac is None else load.kv_usage_frac
        is_draining = queue.in_flight > self.limit
        if self.bounds.is_fixed or is_draining:
            return "hold"
        if kv_frac >= KV_CRITICAL:
            return "cut"
        if preempts or queued_polls >= QUEUED_POLLS:
            return "trim"
        has_room = kv_frac < KV_ROOM and not load.waiting
        return "grow" if has_room and queue.num_queued else "hold"


def growth_step(bounds: LimitRange) -> int:
    """Requests that one poll may add."""
    return max(1, bounds.highest // STEPS_TO_MAX)
