"""Requests that keep an engine busy, and what its token times say about the weights that arrived meanwhile."""

from __future__ import annotations

import asyncio
import statistics
import time
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

Window = tuple[float, float]
"""(start, stop) on the host's monotonic clock."""


class Windows(NamedTuple):
    """What happened when."""

    undisturbed: Sequence[Window]
    pulls: Sequence[Window]
    """While bytes come in."""
    attests: Sequence[Window]
    """While their digests are taken."""
    until_commits: Sequence[Window]
    """From the publication to the first pause: the pull, the comparison of digests, and the messages around them."""
    commits: Sequence[Window]


class TokenLog:
    """When which request got tokens. Pure."""

    def __init__(self) -> None:
        self._arrivals: list[tuple[float, float, int]] = []
        """(time, time of the request's arrival before, tokens), in order of time."""

    def note(self, when: float, before: float, num_tokens: int) -> None:
        """`before` is when the same request got its tokens before these."""
        self._arrivals.append((when, before, num_tokens))

    def rate(self, windows: Iterable[Window]) -> float:
        """Tokens per second inside the windows; 0 without any."""
        tokens, seconds = 0, 0.0
        for start, stop in windows:
            tokens += sum(arrival[2] for arrival in self._between(start, stop))
            seconds += stop - start
        return tokens / seconds if seconds > 0 else 0.0

    def median_step(self, windows: Iterable[Window]) -> float:
        """Median seconds between two arrivals of one request, of those that end inside the windows; 0 without any."""
        gaps = [when - before for start, stop in windows for when, before, _ in self._between(start, stop)]
        return statistics.median(gaps) if gaps else 0.0

    def longest_gap(self, window: Window) -> float:
        """Longest wait of any request for its next tokens, of those waits that touch the window; 0 without any."""
        start, stop = window
        first = bisect_left(self._arrivals, start, key=lambda arrival: arrival[0])
        return max((when - before for when, before, _ in self._arrivals[first:] if before <= stop), default=0.0)

    def _between(self, start: float, stop: float) -> list[tuple[float, float, int]]:
        """Arrivals in (start, stop]."""
        first = bisect_right(self._arrivals, start, key=lambda arrival: arrival[0])
        last = bisect_right(self._arrivals, stop, key=lambda arrival: arrival[0])
        return self._arrivals[first:last]

    def summary(self, windows: Windows) -> dict[str, float]:
        gaps = [self.longest_gap(window) for window in windows.commits]
        return {
            "undisturbed_tokens_s": self.rate(windows.undisturbed),
            "pull_tokens_s": self.rate(windows.pulls),
            "attest_tokens_s": self.rate(windows.attests),
            "until_commit_tokens_s": self.rate(windows.until_commits),
            "median_step_s": self.median_step(windows.undisturbed),
            "commit_gap_p50_s": statistics.median(gaps) if gaps else 0.0,
            "commit_gap_max_s": max(gaps, default=0.0),
        }


class Traffic:
    """Keeps a number of requests in flight: one that is complete is followed by another.

    `generate(number)` streams the sizes of the pieces of one request; a complete one has `max_tokens` in all.
    """

    def __init__(self, generate: Callable[[int], AsyncIterator[int]], *, max_tokens: int) -> None:
        self.log = TokenLog()
        self.num_done = 0
        self.num_lost = 0
        self._generate = generate
        self._max_tokens = max_tokens
        self._is_ending = False
        self._numbers = iter(range(1 << 40))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, num_requests: int) -> None:
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(num_requests)]

    async def end(self, timeout_s: float) -> None:
        """Start no more and wait for those in flight; what does not end in time is lost."""
        self._is_ending = True
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        self.num_lost += len(late)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _keep_one(self) -> None:
        """Consumes: nothing. Waits for: the tokens of one request at a time. Unblocked by: `end`."""
        while not self._is_ending:
            if await self._one_request(next(self._numbers)):
                self.num_done += 1
            else:
                self.num_lost += 1
                await asyncio.sleep(0.1)  # an engine that refuses must not be asked in a tight loop

    async def _one_request(self, number: int) -> bool:
        """Whether every token came."""
        total, before = 0, None
        try:
            async for size in self._generate(number):
                now = time.monotonic()
                if before is not None:
                    self.log.note(now, before, size)
                total, before = total + size, now
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - whatever an engine raises, the request is lost; it is counted
            return False
        return total == self._max_tokens


def merged(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row for all replicas: rates add up, times are those of the slowest."""
    return {
        name: sum(each[name] for each in summaries) if _adds_up(name) else max(each[name] for each in summaries)
        for name in summaries[0]
    }


def _adds_up(name: str) -> bool:
    return name.endswith("_tokens_s") or name.startswith("requests_")
