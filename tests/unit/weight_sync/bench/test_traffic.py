"""Token rates and gaps from arrivals with known times, and requests that are kept in flight."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.fakes.virtual_time import run_virtual
from weight_sync.bench.traffic import TokenLog, Traffic, Windows, merged

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def steady(*, stall: tuple[float, float] = (0.0, 0.0)) -> TokenLog:
    """Two requests, a token each every 0.1 s from 0 to 10; none inside `stall`."""
    log = TokenLog()
    before = 0.0
    for tick in range(1, 101):
        now = tick / 10
        if stall[0] < now < stall[1]:
            continue
        log.note(now, before, 1)
        log.note(now, before, 1)
        before = now
    return log


def test_a_rate_counts_the_tokens_inside_its_windows() -> None:
    assert steady().rate([(1.0, 3.0), (5.0, 6.0)]) == pytest.approx(20.0)
    assert steady(stall=(1.0, 2.0)).rate([(1.0, 2.0)]) == pytest.approx(2.0)
    assert steady().rate([]) == 0.0


def test_the_longest_gap_is_of_waits_that_touch_the_window() -> None:
    log = steady(stall=(4.0, 4.8))
    assert log.median_step([(0.0, 10.0)]) == pytest.approx(0.1)
    assert log.longest_gap((4.3, 4.4)) == pytest.approx(0.8)
    assert log.longest_gap((7.0, 7.05)) == pytest.approx(0.1)
    assert log.longest_gap((20.0, 21.0)) == 0.0


def test_a_summary_names_the_worst_commit() -> None:
    windows = Windows([(0.0, 3.0)], [(6.0, 8.0)], [(9.0, 9.5)], [(3.0, 4.0), (4.0, 5.0)], [(4.2, 4.3), (8.0, 8.05)])
    found = steady(stall=(4.0, 4.8)).summary(windows)
    assert found["commit_gap_max_s"] == pytest.approx(0.8)
    assert found["undisturbed_tokens_s"] == pytest.approx(found["pull_tokens_s"])
    assert found["until_commit_tokens_s"] == pytest.approx(found["pull_tokens_s"] * 1.2 / 2, rel=0.1)


def test_requests_stay_in_flight_until_the_end_and_short_ones_are_lost() -> None:
    running, most = 0, 0

    async def generate(number: int) -> AsyncIterator[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            for _ in range(3 if number == 5 else 4):
                await asyncio.sleep(0.001)
                yield 2
        finally:
            running -= 1

    traffic = Traffic(generate, max_tokens=8)

    async def main() -> None:
        traffic.start(3)
        await asyncio.sleep(0.15)
        await traffic.end(5.0)

    run_virtual(main())
    assert (most, running) == (3, 0)
    assert traffic.num_done > 6
    assert traffic.num_lost == 1


def test_a_request_that_raises_or_never_ends_is_lost() -> None:
    async def generate(number: int) -> AsyncIterator[int]:
        yield 1
        if number == 0:
            raise RuntimeError("engine is gone")
        await asyncio.sleep(60)

    traffic = Traffic(generate, max_tokens=2)

    async def main() -> None:
        traffic.start(2)
        await asyncio.sleep(0.02)
        await traffic.end(0.3)

    run_virtual(main())
    assert (traffic.num_done, traffic.num_lost) == (0, 2)


def test_replicas_add_up_their_rates_and_show_their_slowest_time() -> None:
    one = {"undisturbed_tokens_s": 10.0, "commit_gap_max_s": 0.2, "requests_lost": 1}
    two = {"undisturbed_tokens_s": 30.0, "commit_gap_max_s": 0.1, "requests_lost": 0}
    assert merged([one, two]) == {"undisturbed_tokens_s": 40.0, "commit_gap_max_s": 0.2, "requests_lost": 1}
