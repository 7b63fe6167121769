"""Admission, commits, sleep and pauses: the rules that every engine shares."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.weight_commit import EngineGate, Outcome
from tests.fakes.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Coroutine

LIMIT_S = 10.0


class World:
    """A gate in virtual time, and what happened in which order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = EngineGate(
            resume=self._resume, give_up=self._give_up, pause_limit_s=LIMIT_S, clock=asyncio.get_running_loop().time
        )

    async def _resume(self) -> None:
        self.log.append("resumes")

    def _give_up(self, reason: str) -> None:
        self.log.append(f"dies: {reason}")

    async def commit(self, outcome: Outcome | None = "ok", *, takes_s: float = 1.0, wakes: bool = True) -> None:
        async with self.gate.closed(), self.gate.pause():
            self.log.append("commit begins")
            await asyncio.sleep(takes_s)
            if outcome is not None:
                self.gate.outcome = outcome
            if wakes and outcome == "ok":
                self.gate.is_asleep = False
            self.log.append("commit ends")

    async def sleep(self, *, fails: bool = False) -> None:
        async with self.gate.closed():
            self.log.append("sleep begins")
            if fails:
                raise RuntimeError("no")
            self.gate.is_asleep = True

    async def enter(self, *, takes_s: float = 0.0) -> None:
        async with self.gate.admission():
            self.log.append("enters")
            await asyncio.sleep(takes_s)
            self.log.append("is inside")


async def begin(*coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    return tasks


@in_virtual_time
async def test_a_commit_waits_for_requests_that_are_half_way_in_and_no_request_enters_during_it() -> None:
    world = World()
    await begin(world.enter(takes_s=1.0), world.commit())
    late = await begin(*(world.enter() for _ in range(5)))
    await asyncio.sleep(1.5)
    assert world.log == ["enters", "is inside", "commit begins"] and world.gate.num_waiting == 5
    await asyncio.gather(*late)
    assert world.log[3:5] == ["commit ends", "resumes"]
    assert world.log.count("is inside") == 6 and world.gate.num_waiting == 0


@pytest.mark.parametrize("turns", range(4))
@in_virtual_time
async def test_a_request_that_is_cancelled_on_its_way_is_not_inside(turns: int) -> None:
    """Ten enter one behind the other once the gate opens, and are cancelled wherever they are by then."""
    world = World()
    (committing,) = await begin(world.commit())
    entering = await begin(*(world.enter() for _ in range(10)))
    await committing
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in entering:
        task.cancel()
    await asyncio.gather(*entering, return_exceptions=True)
    await world.commit()
    assert world.gate.num_waiting == 0


@in_virtual_time
async def test_a_commit_or_a_sleep_that_raises_opens_the_gate_and_resumes_what_is_whole() -> None:
    world = World()
    with pytest.raises(RuntimeError, match="failed"):
        async with world.gate.closed(), world.gate.pause():
            raise RuntimeError("the commit failed")
    await world.enter()
    with pytest.raises(RuntimeError, match="no"):
        await world.sleep(fails=True)
    assert not world.gate.is_asleep
    await world.enter()
    await world.commit()
    assert world.log[:4] == ["resumes", "enters", "is inside", "sleep begins"]


@pytest.mark.parametrize(
    ("outcome", "is_asleep", "ends"),
    [
        ("ok", False, ["resumes"]),
        ("failed", False, ["resumes"]),
        ("dirty", False, []),
        ("failed", True, []),  # sleep threw the weights away
        ("ok", True, ["resumes"]),
    ],
)
@in_virtual_time
async def test_a_pause_ends_with_its_commit_unless_the_weights_are_a_mixture(
    outcome: Outcome, is_asleep: bool, ends: list[str]
) -> None:
    world = World()
    if is_asleep:
        await world.sleep()
    world.log.clear()
    await world.commit(outcome, takes_s=3.0)
    assert world.gate.is_paused == (not ends)
    assert world.gate.paused_s == (0.0 if ends else 3.0)
    assert world.log[2:] == ends


DIES = "dies: its weights are a mixture of versions and no commit repaired them: paused for"


@pytest.mark.parametrize(
    ("then", "ends"),
    [
        ((LIMIT_S - 1.5,), ["commit ends"]),
        ((LIMIT_S - 0.5,), ["commit ends", f"{DIES} 10.0 s, at most 10.0 s are allowed"]),
        # A commit under way is left alone however long it takes; then its outcome decides.
        (("ok", 5 * LIMIT_S), ["commit ends", "resumes"]),
        ((None, 0.5), ["commit ends", f"{DIES} 51.0 s, at most 10.0 s are allowed"]),
        (("close", 5 * LIMIT_S), ["commit ends"]),  # an engine that has ended does not die again
    ],
)
@in_virtual_time
async def test_a_mixture_that_no_commit_repairs_is_the_death_of_the_engine_at_the_limit_and_not_before(
    then: tuple[Any, ...], ends: list[str]
) -> None:
    world = World()
    await world.commit("dirty", takes_s=1.0)
    for step in then:
        if step == "close":
            world.gate.end_limit()
        elif isinstance(step, float):
            await asyncio.sleep(step)
        else:
            await world.commit(step, takes_s=5 * LIMIT_S)
    assert world.log[-len(ends) :] == ends
