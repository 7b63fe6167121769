"""What an engine reports of its load: the figures of vLLM's scheduler after every step, and how long it is stalled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.engine.interface import EngineStatus, EngineTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from weight_sync.vllm.compat import InFlight

_KV_FIGURES = ("kv_cache_usage", "gpu_cache_usage")
"""vLLM calls its statistics unstable; a figure that is missing under all known names is unknown, not 0."""


class LoadMeter:
    def __init__(self) -> None:
        self._running = self._waiting = 0
        self._kv_usage_frac: float | None = None
        self._num_preemptions: int | None = None
        self._num_in_batch = self._num_taken_out = 0

    def before_commit(self, in_flight: InFlight) -> None:
        """`recompute` preempts all that run now, which is no sign of a lack of room."""
        if in_flight == "recompute":
            self._num_taken_out += self._num_in_batch
            self._num_in_batch = 0  # until the next step

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Of one step; either may be None."""
        if scheduler_stats is not None:
            self._running = self._num_in_batch = scheduler_stats.num_running_reqs
            # Newer versions count requests that wait for something other than room separately.
            self._waiting = scheduler_stats.num_waiting_reqs
            found = (getattr(scheduler_stats, name, None) for name in _KV_FIGURES)
            self._kv_usage_frac = next((float(value) for value in found if value is not None), None)
        preempted = getattr(iteration_stats, "num_preempted_reqs", None)
        if preempted is not None:  # counted for each request when its next token comes
            ours = min(preempted, self._num_taken_out)
            self._num_taken_out -= ours
            self._num_preemptions = (self._num_preemptions or 0) + preempted - ours

    def load(self, num_inside: int) -> EngineStatus:
        """With `num_inside` requests in the engine; without any it makes no step, and its last figures are stale."""
        is_idle = num_inside == 0
        self._num_taken_out = min(self._num_taken_out, num_inside)  # some may have ended since
        return EngineStatus(
            running=0 if is_idle else self._running,
            waiting=0 if is_idle else self._waiting,
            kv_usage_frac=0.0 if is_idle and self._kv_usage_frac is not None else self._kv_usage_frac,
            num_preemptions=self._num_preemptions,
        )


class Activity:
    """When an engine has work, and for how long it produced nothing. Its process may be well while its device hangs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = self._moved_at = clock()
        self._busy_before_s = 0.0
        self._busy_since: float | None = None

    def begin(self) -> None:
        """Of work, where there was none."""
        self._busy_since = self._moved_at = self._clock()

    def moved(self) -> None:
        self._moved_at = self._clock()

    def end(self) -> None:
        self._busy_before_s, self._busy_since = self.times().busy_s, None

    def still_s(self, *, should_generate: bool) -> float:
        """Time in which it need not generate does not count."""
        if not should_generate:
            self.moved()
            return 0.0
        return self._clock() - self._moved_at

    def times(self) -> EngineTimes:
        now = self._clock()
        busy_s = self._busy_before_s + (0.0 if self._busy_since is None else now - self._busy_since)
        return EngineTimes(began_at=self._began, up_s=now - self._began, busy_s=busy_s)
