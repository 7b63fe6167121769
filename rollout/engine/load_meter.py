"""What an engine says of its load: the figures of vLLM's scheduler after every step, and how long it stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.engine.base import EngineLoad

if TYPE_CHECKING:
    from collections.abc import Callable

_KV_FIGURES = ("kv_cache_usage", "gpu_cache_usage")
"""vLLM calls its statistics unstable; a figure that is not there under any known name is unknown, not 0."""


class LoadMeter:
    """Keeps the last figures."""

    def __init__(self) -> None:
        self._running = self._waiting = 0
        self._kv_usage_frac: float | None = None
        self._num_preemptions: int | None = None

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Figures of one step; either may be None."""
        if scheduler_stats is not None:
            self._running = scheduler_stats.num_running_reqs
            # Requests that wait for something else than room are counted apart by newer versions.
            self._waiting = scheduler_stats.num_waiting_reqs
            found = (getattr(scheduler_stats, name, None) for name in _KV_FIGURES)
            self._kv_usage_frac = next((float(value) for value in found if value is not None), None)
        preempted = getattr(iteration_stats, "num_preempted_reqs", None)
        if preempted is not None:
            before = 0 if self._num_preemptions is None else self._num_preemptions
            self._num_preemptions = before + preempted

    def load(self, num_inside: int) -> EngineLoad:
        """`num_inside`: requests in the engine. Without any it makes no step, and the last one's figures are stale."""
        is_idle = num_inside == 0
        return EngineLoad(
            running=0 if is_idle else self._running,
            waiting=0 if is_idle else self._waiting,
            kv_usage_frac=0.0 if is_idle and self._kv_usage_frac is not None else self._kv_usage_frac,
            num_preemptions=self._num_preemptions,
        )


class Stillness:
    """For how long an engine that should generate gave nothing. Its process may be well while its device hangs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()

    def moved(self) -> None:
        """A token came, or there is work where there was none."""
        self._since = self._clock()

    def seconds(self, *, should_generate: bool) -> float:
        """As of now. Time in which it need not generate does not count."""
        if not should_generate:
            self.moved()
            return 0.0
        return self._clock() - self._since
