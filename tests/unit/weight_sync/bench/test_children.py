"""Children that die, dawdle and refuse: what the parent sees, and when."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.fakes.bench_hosts import MoodyHost
from weight_sync.bench.children import Child
from weight_sync.errors import LeaseExpired, WeightSyncError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def started_child(name: str) -> AsyncIterator[Child]:
    child = Child("moody", MoodyHost, name, method="spawn")
    try:
        yield child
    finally:
        child.end()
        child.join()
    assert not child.is_alive


async def test_errors_keep_their_type_late_answers_are_thrown_away_and_a_killed_child_is_an_error_at_once() -> None:
    async with started_child("m") as child:
        await child.ask("start", timeout_s=60.0)
        await check_errors(child)
        await check_death(child)


async def check_errors(child: Child) -> None:
    with pytest.raises(LeaseExpired, match="moody: the lease is gone"):
        await child.ask("expire", timeout_s=30.0)
    with pytest.raises(TimeoutError, match="moody did not answer dawdle in time"):
        await child.ask("dawdle", 0.6, timeout_s=0.1)
    found = await child.ask("echo", 1, timeout_s=30.0)
    assert found.value == ("m", 1)
    assert 0 <= found.seconds < 0.5


async def check_death(child: Child) -> None:
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"moody died \(exit code -9\) during die"):
        await child.ask("die", timeout_s=30.0)
    assert time.monotonic() - started < 20.0
    with pytest.raises(WeightSyncError, match="died"):
        await child.ask("echo", timeout_s=30.0)


async def test_a_host_that_cannot_be_built_says_why() -> None:
    async with started_child("unborn") as unborn:
        with pytest.raises(WeightSyncError, match="ValueError: moody: this one cannot be built"):
            await unborn.ask("start", timeout_s=60.0)
