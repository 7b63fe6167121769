"""Engines and rollout workers that are lost when all steps are trained: the result is there, so the run ends in order.

What is lost before that, or a learner that is lost at any time, ends it with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rollout.fleet.scheduler import NoReplica
from tests.fakes.scripted_run import REPLICA, InlineExecutor, Script, ScriptedDriver, ScriptedRun, forever
from tests.fakes.virtual_time import run_virtual
from tests.unit.trainer.driver.test_loops_evaluation import all_evaluations, lines
from trainer.driver import actors as compose
from trainer.driver import run as run_module
from trainer.driver.engine_restarts import NoEngine
from trainer.driver.fleet import NoWorker
from trainer.errors import LearnerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    Make = Callable[..., ScriptedRun]

OTHER = "replica_1"
LAST = 6
A_WHILE_S = 30.0
"""Several looks of those who watch engines and workers."""
SECTIONS: dict[str, Any] = {"checkpoint": {"save_at_end": True, "export_hf": True}}
SAVES = pytest.mark.parametrize("every_steps", [0, LAST])
"""The last save is that of the end of a run, or a periodic one."""


class Driver(ScriptedDriver):
    """With the keeper of a real run, over the replicas in `members`."""

    def _keeper(self, _actors: Any, coordinator: Any, parts: Any) -> Any:
        actors: Any = SimpleNamespace(engines={})
        return run_module.Driver._keeper(self, actors, coordinator, parts)

    def _parts(self, *args: Any, **keys: Any) -> Any:
        parts = super()._parts(*args, **keys)
        parts.evaluator._members = lambda: self.members
        return parts


@pytest.fixture(autouse=True)
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were started again; here that takes longer than what is left of a run."""
    begun: list[str] = []

    async def replace_engine(name: str, *_: object, **_keys: object) -> None:
        begun.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            begun.append(f"{name} given up")

    monkeypatch.setattr(compose, "replace_engine", replace_engine)
    return begun


def drive(
    run: ScriptedRun, *, prepare: Callable[[Driver], None] = lambda _: None, watch_loads: Any = forever
) -> BaseException | None:
    """The run as its driver drives it; what it failed with."""

    async def main() -> BaseException | None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        driver = Driver(run, watch_loads)
        prepare(driver)
        (error,) = await asyncio.gather(driver.run(), return_exceptions=True)
        return error

    return run_virtual(main())


def during(run: ScriptedRun, what: str, happens: Callable[[], Awaitable[None]], *, version: int | None = None) -> None:
    """`happens` while the run does `what`, of this version or any."""
    does = getattr(run.world, what)

    async def meddled(*args: Any, **keys: Any) -> Any:
        if version is None or version in (run.world.live, *args):
            await happens()
        return await does(*args, **keys)

    setattr(run.world, what, meddled)


def has_two(driver: Driver, run: ScriptedRun) -> None:
    """A second replica, which evaluates as well."""

    @contextlib.asynccontextmanager
    async def freeze(replicas: Sequence[str]) -> AsyncIterator[dict[str, int]]:
        async with run.world.frozen:
            yield dict.fromkeys(replicas, run.world.live)

    driver.members[OTHER] = "live"
    run.world.freeze = freeze  # type: ignore[method-assign]


def loses(driver: Driver, *, raises: bool = False) -> Callable[[], Awaitable[None]]:
    """The first replica dies, and the keeper looks at it several times."""

    async def lose() -> None:
        driver.members[REPLICA] = "dead"
        await asyncio.sleep(A_WHILE_S)
        if raises:
            raise NoReplica(f"{REPLICA} died")

    return lose


def ended_in_order(run: ScriptedRun) -> bool:
    """With everything that a run leaves behind."""
    assert run.world.numbers("saved") == [LAST]
    assert [line["step"] for line in lines(run)] == list(range(1, LAST + 1))
    return run.state.stop_reason == "completed" and (run.telemetry.run_dir.export / "model").exists()


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_the_only_engine_lost_in_the_last_evaluation_costs_that_evaluation_and_no_more(
    scripted: Make, caplog: pytest.LogCaptureFixture, restarts: list[str], max_restarts: int
) -> None:
    run = scripted(rollout={"max_engine_restarts": max_restarts}, **SECTIONS)

    def prepare(driver: Driver) -> None:
        during(run, "evaluate", loses(driver, raises=True), version=LAST)

    assert drive(run, prepare=prepare) is None
    assert ended_in_order(run)
    assert restarts == [], "it would be of no use"
    failed = all_evaluations(run)[-1]
    assert (failed["version"], run.state.num_failed_evaluations) == (LAST, 1)
    assert "replica_0 died" in failed["failed"]
    assert lines(run)[-1]["eval/failed_runs"] == 1
    told = "replica_0 is dead; training is over, so it is not started again"
    assert [record.message for record in caplog.records].count(told) == 1


@pytest.mark.parametrize("max_restarts", [0, 3])
def test_the_last_evaluation_is_made_by_the_engines_that_are_left(
    scripted: Make, restarts: list[str], max_restarts: int
) -> None:
    run = scripted(rollout={"max_engine_restarts": max_restarts}, **SECTIONS)
    asked: list[str] = []

    def prepare(driver: Driver) -> None:
        has_two(driver, run)
        generate, lose = run.world.evaluate, loses(driver, raises=True)

        async def evaluate(prompts: Any, params: Any, engine: str, numbers: Any) -> Any:
            if run.world.live == LAST:
                asked.append(engine)
                if engine == REPLICA:
                    await lose()
            return await generate(prompts, params, engine, numbers)

        run.world.evaluate = evaluate  # type: ignore[method-assign]

    assert drive(run, prepare=prepare) is None
    assert ended_in_order(run)
    assert asked[-1] == OTHER and REPLICA in asked
    assert lines(run)[-1]["eval/version"] == LAST
    assert (run.state.num_failed_evaluations, restarts) == (0, [])


def saving(every_steps: int) -> dict[str, Any]:
    return {"checkpoint": SECTIONS["checkpoint"] | {"every_steps": every_steps}}


@SAVES
@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("what", ["save", "export_hf"])
def test_an_engine_lost_while_the_result_is_written_is_told_and_ends_nothing(
    scripted: Make,
    caplog: pytest.LogCaptureFixture,
    restarts: list[str],
    what: str,
    max_restarts: int,
    every_steps: int,
) -> None:
    """The last version is live before it is saved."""
    run = scripted(rollout={"max_engine_restarts": max_restarts}, **saving(every_steps))

    def prepare(driver: Driver) -> None:
        async def lose() -> None:
            while run.world.live < LAST:
                await asyncio.sleep(0.1)
            await asyncio.sleep(3.0)  # somebody has seen it alive
            await loses(driver)()

        during(run, what, lose)

    assert drive(run, prepare=prepare) is None
    assert ended_in_order(run)
    assert "replica_0 is dead; training is over" in caplog.text
    assert restarts == []


@SAVES
@pytest.mark.parametrize("what", ["train_step", "save", "evaluate", "export_hf"])
def test_the_last_rollout_worker_lost_when_no_group_is_needed_any_more_ends_nothing(
    scripted: Make, caplog: pytest.LogCaptureFixture, what: str, every_steps: int
) -> None:
    """From the last step on, whose groups are in their batch."""
    run, is_lost, is_closed = scripted(Script(pull_s=20.0), **saving(every_steps)), asyncio.Event(), list[bool]()
    run.world.close = lambda: is_closed.append(True)  # type: ignore[method-assign]

    async def watch_loads() -> None:
        await is_lost.wait()
        raise NoWorker("no rollout worker is left (rollout worker 0 died)")

    async def lose() -> None:
        if run.state.step == LAST - (what == "train_step"):
            is_lost.set()
            await asyncio.sleep(A_WHILE_S)
            assert is_closed, "an evaluation would wait for a worker"

    during(run, what, lose)
    assert drive(run, watch_loads=watch_loads) is None
    assert ended_in_order(run)
    assert "no rollout worker is left (rollout worker 0 died)" in caplog.text


@pytest.mark.parametrize("step", [2, LAST])
def test_the_last_engine_lost_before_the_last_version_is_live_ends_the_run(
    scripted: Make, restarts: list[str], step: int
) -> None:
    run = scripted(rollout={"max_engine_restarts": 0}, **SECTIONS)

    def prepare(driver: Driver) -> None:
        during(run, "sync", loses(driver), version=step)

    assert isinstance(drive(run, prepare=prepare), NoEngine)
    assert (run.state.stop_reason, restarts) == ("failed", [])


def test_a_restart_from_before_the_last_version_is_live_is_given_up_then(scripted: Make, restarts: list[str]) -> None:
    run = scripted(rollout={"max_engine_restarts": 3}, **SECTIONS)

    def prepare(driver: Driver) -> None:
        has_two(driver, run)
        during(run, "sync", loses(driver), version=LAST)

    async def waits() -> None:
        await asyncio.sleep(A_WHILE_S)
        given_up.append("given up" in restarts[-1])

    given_up: list[bool] = []
    during(run, "export_hf", waits)
    assert drive(run, prepare=prepare) is None
    assert restarts == [REPLICA, f"{REPLICA} given up"]
    assert given_up == [True], "an export on shared devices would wait for it"


def test_the_last_rollout_worker_lost_in_mid_training_ends_the_run(scripted: Make) -> None:
    run = scripted(Script(train_s=20.0), **SECTIONS)

    async def watch_loads() -> None:
        await asyncio.sleep(50.0)
        raise NoWorker("no rollout worker is left")

    assert isinstance(drive(run, watch_loads=watch_loads), NoWorker)
    assert 0 < run.state.step < LAST


def test_the_last_rollout_worker_lost_when_the_accuracy_is_reached_ends_nothing(scripted: Make) -> None:
    run = scripted(Script(train_s=5.0, hangs=lambda item: item.start_version >= 2), **SECTIONS)

    async def watch_loads() -> None:
        while run.state.step < 2:
            await asyncio.sleep(1.0)
        run.state.stop_reason = "reached the accuracy"
        await asyncio.sleep(1.0)
        raise NoWorker("no rollout worker is left")

    assert drive(run, watch_loads=watch_loads) is None
    assert run.state.step < LAST
    assert run.world.numbers("saved") == [run.state.step]


def test_a_learner_lost_before_the_export_ends_the_run(scripted: Make) -> None:
    run = scripted(**SECTIONS)

    async def lost() -> None:
        raise LearnerError("rank 1 died")

    during(run, "export_hf", lost)
    assert isinstance(drive(run), LearnerError)
    assert run.state.stop_reason == "failed"
