"""How many requests one engine takes at a time.

    grow   +step      it has room: no preemption, no queue, KV cache below `KV_ROOM`, and requests are held back for it
    hold              everything else: nothing is known, or what was taken back has not drained yet
    trim   x TRIM     it preempts, or requests waited for room in its KV cache at two looks in a row
    cut    x CUT      its KV cache is critically full

A trim or a cut only holds new requests back; what runs goes on, because taking it away would lose the same cache that
the engine's own preemption loses. While more runs than the limit allows, no further step down follows: the signs still
come from before the last one. (Additive increase, multiplicative decrease, after Chiu and Jain 1989.)

Under a capacity of C requests (pressure above C, room below, everything drained between two looks) the limit settles
in [floor(TRIM * (C + 1)), C + step], C within the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollout.engine.interface import EngineLoad


KV_ROOM = 0.85
"""Below this share of the KV cache in use an engine has room for more: running answers still grow."""
KV_CRITICAL = 0.97
TRIM, CUT = 0.9, 0.5
STEPS_TO_MAX = 32
"""Growth from nothing to the upper bound takes so many looks."""
QUEUED_LOOKS = 2
"""A queue at one look may be a burst of prompts on their way into the batch. Beside a cache with room it always is, for
as many looks as their prefill takes: an engine that wakes up gets all of a step's prompts at once."""

Move = Literal["grow", "hold", "trim", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Of the number of requests that one replica has at once.

    Example: `Bounds(lowest=8, highest=256)`; `Bounds(lowest=64, highest=64)` is fixed.
    """

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest:
            raise ValueError(f"bounds must be 1 <= lowest <= highest, got {self.lowest} and {self.highest}")

    @property
    def is_fixed(self) -> bool:
        return self.lowest == self.highest

    def share(self, num_sharers: int) -> Bounds:
        """Of one of `num_sharers` that send to the same replica; at least 1 each."""
        return Bounds(lowest=max(1, self.lowest // num_sharers), highest=max(1, self.highest // num_sharers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the sender knows about one replica."""

    in_flight: int
    """Requests that are there now."""
    held: int
    """Requests that wait for room, on this or another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """The state of the machine for one replica. It begins at the upper bound: an engine with room is never held back.

    Example:
        state = Concurrency.start(Bounds(lowest=8, highest=256))
        state = state.next(engine_load, Demand(in_flight=200, held=16))
        state.limit
    """

    bounds: Bounds
    limit: int
    last_move: Move = "hold"
    num_preemptions: int | None = None
    """The engine's counter at the last look; None before the first."""
    queued_looks: int = 0
    """Looks in a row that saw requests wait inside the engine for room in its KV cache."""

    @classmethod
    def start(cls, bounds: Bounds) -> Concurrency:
        return cls(bounds=bounds, limit=bounds.highest)

    def next(self, load: EngineLoad, demand: Demand) -> Concurrency:
        """The state after one look at the engine."""
        has_no_room = load.kv_usage_frac is None or load.kv_usage_frac >= KV_ROOM
        queued_looks = self.queued_looks + 1 if load.waiting and has_no_room else 0
        move = self._move(load, demand, queued_looks)
        # Below what runs: a limit above it would hold nothing back.
        base = min(self.limit, max(demand.in_flight, 1))
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
            self, limit=limit, last_move=move, num_preemptions=load.num_preemptions, queued_looks=queued_looks
        )

    def _move(self, load: EngineLoad, demand: Demand, queued_looks: int) -> Move:
        before = self.num_preemptions
        # A counter that went back belongs to a new engine; its first figure says nothing about now.
        preempts = before is not None and load.num_preemptions is not None and load.num_preemptions > before
        kv_frac = 0.0 if load.kv_usage_frac is None else load.kv_usage_frac
        is_draining = demand.in_flight > self.limit
        if self.bounds.is_fixed or is_draining:
            return "hold"
        if kv_frac >= KV_CRITICAL:
            return "cut"
        if preempts or queued_looks >= QUEUED_LOOKS:
            return "trim"
        has_room = kv_frac < KV_ROOM and not load.waiting
        return "grow" if has_room and demand.held else "hold"


def growth_step(bounds: Bounds) -> int:
    """Requests that one look may add."""
    return max(1, bounds.highest // STEPS_TO_MAX)
