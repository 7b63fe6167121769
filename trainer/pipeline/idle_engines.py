"""How much of the time the engines had nothing to do, from what each says now and then of its own life."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rollout.engine.base import EngineTimes


@dataclass(slots=True, kw_only=True)
class _Account:
    """Of one replica, over all engines that take its place one after the other."""

    at: float
    """Up to when it is kept, by our clock."""
    said: EngineTimes | None = None
    """What its engine said last."""
    busy_s: float = 0.0
    up_s: float = 0.0
    told_busy_s: float = 0.0
    """Of `busy_s`, what was asked for already; so with `told_up_s`."""
    told_up_s: float = 0.0
    idle_frac: float | None = None

    def add(self, busy_s: float, up_s: float, now: float) -> None:
        self.busy_s, self.up_s, self.at = self.busy_s + min(busy_s, up_s), self.up_s + up_s, now

    def take(self) -> float | None:
        """The idle share since it was asked for last; nothing new: as it was before."""
        busy_s, up_s = self.busy_s - self.told_busy_s, self.up_s - self.told_up_s
        self.told_busy_s, self.told_up_s = self.busy_s, self.up_s
        if up_s > 0:
            self.idle_frac = 1.0 - busy_s / up_s
        return self.idle_frac


class IdleEngines:
    """An account per replica. The time from the loss of an engine to the first word of the next one is idle time.

    One event loop, no threads.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def hear(self, times: Mapping[str, EngineTimes], lost: Collection[str]) -> None:
        """
        Args:
            times: by replica, as its engine said last; may be what it said before.
            lost: replicas that have no engine now.
        """
        now = self._clock()
        for name in {*times, *lost}:
            account = self._accounts.setdefault(name, _Account(at=now))
            said, before = times.get(name), account.said
            account.said = said if said is not None else before
            if said is not None and before is not None and said.began_at == before.began_at and said.up_s > before.up_s:
                account.add(said.busy_s - before.busy_s, min(said.up_s - before.up_s, now - account.at), now)
            elif said is not None and (before is None or said.began_at != before.began_at):
                account.add(said.busy_s, now - account.at, now)  # nothing, where it is the first one we hear of
            elif name in lost:
                account.add(0.0, now - account.at, now)

    def take_frac(self, *, num_replicas: int) -> float | None:
        """Mean over all replicas since the call before; None before all were heard of twice."""
        fracs = [frac for account in self._accounts.values() if (frac := account.take()) is not None]
        return sum(fracs) / num_replicas if len(fracs) == num_replicas else None
