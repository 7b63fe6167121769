"""How many requests one engine takes at a time.

    grow   +step      it has room: no preemption, no queue, KV cache below `KV_ROOM`, and requests are queued for it
    hold              everything else: nothing is known, or what was taken back has not drained yet
    trim   x TRIM     it preempts, or requests waited for room in its KV cache at two polls in a row
    cut    x CUT      its KV cache is critically full

A trim or a cut only queues new requests; what runs continues, because stopping it would lose the same cache that the
engine's own preemption loses. While more runs than the limit allows, no further step down follows: the signs still
come from before the last one. (Additive increase, multiplicative decrease, after Chiu and Jain 1989.)

Under a capacity of C requests (pressure above C, room below, everything drained between two polls) the limit settles
in [floor(TRIM * (C + 1)), C + step], C within the bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollout.engine.interface import EngineStatus


KV_ROOM = 0.85
"""Below this share of the KV cache in use an engine has room for more: running responses still grow."""
KV_CRITICAL = 0.97
TRIM, CUT = 0.9, 0.5
STEPS_TO_MAX = 32
"""Polls that growth from nothing to the upper bound takes."""
QUEUED_POLLS = 2
"""A queue at one poll may be a burst of prompts on their way into the batch. With room in the cache it always is, for
as many polls as their prefill takes: an engine that wakes up gets all of a step's prompts at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRange:
    """Of the number of requests that one engine has at once; `LimitRange(lowest=64, highest=64)` is fixed."""

    lowest: int
    highest: int

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest:
            raise ValueError(f"bounds must be 1 <= lowest <= highest, got {self.lowest} and {self.highest}")

    @property
    def step(self) -> int:
        """Requests that one poll may add."""
        return max(1, self.highest // STEPS_TO_MAX)

    def share(self, num_sharers: int) -> LimitRange:
        """Of one of `num_sharers` that send to the same engine; at least 1 each."""
        return LimitRange(lowest=max(1, self.lowest // num_sharers), highest=max(1, self.highest // num_sharers))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveLimit:
    """The state of the machine for one engine. It begins at the upper bound: an engine with room is never held back."""

    bounds: LimitRange
    limit: int
    num_preemptions: int | None = None
    """The engine's counter at the last poll; None before the first."""
    queued_polls: int = 0
    """Polls in a row that saw requests wait inside the engine for room in its KV cache."""

    @classmethod
    def start(cls, bounds: LimitRange) -> AdaptiveLimit:
        return cls(bounds=bounds, limit=bounds.highest)

    def next(self, load: EngineStatus, *, in_flight: int, num_queued: int) -> AdaptiveLimit:
        """After one poll, with `in_flight` of the sender's requests there, and `num_queued` that wait for room on any
        engine."""
        has_no_room = load.kv_usage_frac is None or load.kv_usage_frac >= KV_ROOM
        queued_polls = self.queued_polls + 1 if load.waiting and has_no_room else 0
        limit = self._next_limit(load, in_flight, num_queued, queued_polls)
        limit = min(self.bounds.highest, max(self.bounds.lowest, limit))
        return replace(self, limit=limit, num_preemptions=load.num_preemptions, queued_polls=queued_polls)

    def _next_limit(self, load: EngineStatus, in_flight: int, num_queued: int, queued_polls: int) -> int:
        before = self.num_preemptions
        # A counter that went back belongs to a new engine; its first value is not about now.
        preempts = before is not None and load.num_preemptions is not None and load.num_preemptions > before
        kv_frac = 0.0 if load.kv_usage_frac is None else load.kv_usage_frac
        if in_flight > self.limit:  # it still drains
            return self.limit
        running = min(self.limit, max(in_flight, 1))  # steps down start here: a limit above it would queue nothing
        if kv_frac >= KV_CRITICAL:
            return math.floor(CUT * running)
        if preempts or queued_polls >= QUEUED_POLLS:
            return math.floor(TRIM * running)
        has_room = kv_frac < KV_ROOM and not load.waiting
        return self.limit + self.bounds.step if has_room and num_queued else self.limit
