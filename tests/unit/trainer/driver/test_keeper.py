"""When engines are started again, and when a run ends for want of them; without engines, in virtual time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.virtual_time import run_virtual
from trainer.driver.engine_restarts import HEALTHY_S, LOOK_S, PATIENCE_S, EngineKeeper, NoEngine, leave_out

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

RESTART_S = 90.0


class World:
    """Replicas by state, and restarts that work or fail as `outcomes` say."""

    def __init__(self, members: Mapping[str, str], *, outcomes: list[bool], max_restarts: int = 3) -> None:
        self.members = dict(members)
        self.outcomes = outcomes
        self.max_restarts = max_restarts
        self.tried: list[str] = []
        self.ended_at: list[float] = []
        self.num_cancelled = 0

    async def restart(self, name: str) -> int:
        self.tried.append(name)
        try:
            await asyncio.sleep(RESTART_S)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.ended_at.append(asyncio.get_running_loop().time())
        if not self.outcomes.pop(0):
            raise TimeoutError(f"{name} did not start")
        self.members[name] = "live"
        return 7

    def play(self, body: Callable[[EngineKeeper], Awaitable[None]]) -> EngineKeeper:
        """`body` beside the keeper, whose failure is raised."""

        async def run() -> EngineKeeper:
            keeper = EngineKeeper(
                lambda: self.members,
                self.restart,
                max_restarts=self.max_restarts,
                clock=asyncio.get_running_loop().time,
            )
            keeping, playing = asyncio.create_task(keeper.run()), asyncio.ensure_future(body(keeper))
            done, _ = await asyncio.wait({keeping, playing}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, playing):
                task.cancel()
            await asyncio.gather(keeping, playing, return_exceptions=True)
            for task in done:
                task.result()
            return keeper

        return run_virtual(run())

    def run(self, seconds: float = 1000.0) -> EngineKeeper:
        async def wait(_: EngineKeeper) -> None:
            await asyncio.sleep(seconds)

        return self.play(wait)


def test_live_replicas_are_left_alone() -> None:
    world = World({"a": "live", "b": "live"}, outcomes=[])
    assert world.run().num_restarts == 0
    assert world.tried == []


def test_dead_and_dirty_replicas_are_started_again_side_by_side() -> None:
    world = World({"a": "dead", "b": "live", "c": "dirty"}, outcomes=[True, True])
    assert world.run().num_restarts == 2
    assert world.tried == ["a", "c"]
    assert world.members == {"a": "live", "b": "live", "c": "live"}
    assert world.ended_at == [pytest.approx(LOOK_S + RESTART_S)] * 2


def test_restart_that_fails_is_tried_again_until_the_limit_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World({"a": "dead", "b": "live"}, outcomes=[False] * 3)
    assert world.run().num_restarts == 0
    assert world.tried == ["a"] * 3
    assert "restart 3 of 3 failed (a): TimeoutError: a did not start; it stays out of this run" in caplog.text


def test_replica_that_is_lost_again_and_again_is_given_up() -> None:
    world = World({"a": "dead", "b": "live"}, outcomes=[True, True], max_restarts=2)

    async def lose_again(_keeper: EngineKeeper) -> None:
        for _ in range(20):
            await asyncio.sleep(RESTART_S + 10.0)
            world.members["a"] = "dead"

    world.play(lose_again)
    assert world.tried == ["a", "a"]


def test_a_long_time_of_health_forgives_earlier_losses() -> None:
    world = World({"a": "dead", "b": "live"}, outcomes=[True] * 9, max_restarts=1)

    async def lose_now_and_then(_keeper: EngineKeeper) -> None:
        for _ in range(4):
            await asyncio.sleep(RESTART_S + HEALTHY_S + 10.0)
            assert world.members["a"] == "live"
            world.members["a"] = "dead"
        await asyncio.sleep(RESTART_S + HEALTHY_S / 2)
        assert world.members["a"] == "live"
        world.members["a"] = "dead"
        await asyncio.sleep(RESTART_S + HEALTHY_S)

    world.play(lose_now_and_then)
    assert len(world.tried) == 5
    assert world.members["a"] == "dead", "the last two losses were too close to each other"


def test_no_restart_is_made_where_none_is_allowed() -> None:
    world = World({"a": "dead", "b": "live"}, outcomes=[], max_restarts=0)
    world.run()
    assert world.tried == []


def test_the_run_ends_at_once_when_no_engine_is_left_and_none_may_be_started(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World({"a": "dead", "b": "dirty"}, outcomes=[False] * 6)
    with pytest.raises(NoEngine, match=r"no engine is left, and each had its 3 restarts .*: a is dead; b is dirty"):
        world.run()
    assert sorted(world.tried) == ["a"] * 3 + ["b"] * 3
    assert "no engine is left; waiting for a (dead) to start again (attempt 1 of 3)" in caplog.text
    with pytest.raises(NoEngine):
        World({"a": "dead"}, outcomes=[], max_restarts=0).run(LOOK_S + 0.1)


def test_who_waits_for_an_engine_goes_on_when_one_is_back() -> None:
    world, waits = World({"a": "dead"}, outcomes=[False, True]), list[float]()

    async def wait(keeper: EngineKeeper) -> None:
        await asyncio.sleep(LOOK_S / 2)
        while world.members["a"] != "live":
            began = asyncio.get_running_loop().time()
            await keeper.wait(OSError("no engine"))
            waits.append(asyncio.get_running_loop().time() - began)
        assert asyncio.get_running_loop().time() == pytest.approx(world.ended_at[-1])

    world.play(wait)
    assert max(waits) <= PATIENCE_S, "nobody waits without looking again"


def test_who_waits_in_vain_is_told_what_the_matter_was() -> None:
    async def wait(keeper: EngineKeeper) -> None:
        while True:
            await keeper.wait(OSError("no engine"))

    async def alone() -> None:
        keeper = EngineKeeper(lambda: {"a": "dead"}, World({}, outcomes=[]).restart, max_restarts=0)
        await wait(keeper)

    with pytest.raises(OSError, match="no engine"):
        run_virtual(alone())
    with pytest.raises(NoEngine):  # the keeper has the reasons, and comes first
        World({"a": "dead"}, outcomes=[], max_restarts=0).play(wait)


def test_the_end_of_the_run_ends_restarts_under_way() -> None:
    world = World({"a": "dead", "b": "dead"}, outcomes=[True, True])
    world.run(RESTART_S / 2)
    assert world.num_cancelled == 2


def test_what_weight_sync_has_lost_gets_no_requests() -> None:
    told: list[tuple[str, str]] = []

    class Workers:
        async def quarantine(self, name: str, reason: str) -> None:
            told.append((name, reason))

    coordinator: Any = SimpleNamespace(members={"a": "live", "b": "dead", "c": "dirty"})
    workers: Any = Workers()
    run_virtual(leave_out(coordinator, workers))
    assert told == [("b", "weight sync: dead"), ("c", "weight sync: dirty")]
