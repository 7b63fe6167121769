"""Restarts of lost engines, without engines."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from trainer.pipeline.keeper import EngineKeeper

if TYPE_CHECKING:
    from collections.abc import Mapping


class World:
    """Replicas by state, and restarts that work or fail as `outcomes` say."""

    def __init__(self, members: Mapping[str, str], *, outcomes: list[bool], max_restarts: int = 3) -> None:
        self.members = dict(members)
        self.outcomes = outcomes
        self.tried: list[str] = []
        self.looks = 0
        self.keeper = EngineKeeper(lambda: self.members, self.restart, max_restarts=max_restarts, sleep=self.sleep)

    async def restart(self, name: str) -> int:
        self.tried.append(name)
        if not self.outcomes.pop(0):
            raise TimeoutError(f"{name} did not start")
        self.members[name] = "live"
        return 7

    async def sleep(self, seconds: float) -> None:
        self.looks += 1
        if self.looks > 10:
            raise asyncio.CancelledError

    async def run(self) -> World:
        with pytest.raises(asyncio.CancelledError):
            await self.keeper.run()
        return self


async def test_live_replicas_are_left_alone() -> None:
    world = await World({"a": "live", "b": "live"}, outcomes=[]).run()
    assert (world.tried, world.keeper.num_restarts) == ([], 0)


async def test_dead_and_dirty_replicas_are_started_again() -> None:
    world = await World({"a": "dead", "b": "live", "c": "dirty"}, outcomes=[True, True]).run()
    assert world.tried == ["a", "c"]
    assert world.members == {"a": "live", "b": "live", "c": "live"}
    assert world.keeper.num_restarts == 2


async def test_restart_that_fails_is_tried_again_until_the_limit_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = await World({"a": "dead"}, outcomes=[False] * 3).run()
    assert world.tried == ["a"] * 3
    assert world.keeper.num_restarts == 0
    assert world.looks == 11, "the keeper went on looking"
    assert "restart 3 of 3 failed (a): TimeoutError: a did not start; it stays out of this run" in caplog.text


async def test_replica_that_is_lost_again_and_again_is_given_up() -> None:
    world = World({"a": "dead"}, outcomes=[True, True], max_restarts=2)
    restart = world.restart

    async def lose_again(name: str) -> int:
        version = await restart(name)
        world.members[name] = "dead"
        return version

    world.keeper._restart = lose_again
    await world.run()
    assert world.tried == ["a", "a"]


async def test_no_restart_is_made_where_none_is_allowed() -> None:
    world = await World({"a": "dead"}, outcomes=[], max_restarts=0).run()
    assert world.tried == []
