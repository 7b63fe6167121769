"""Engines and rollout workers that are lost when all steps are trained: the result is there, so the run ends in order.

What is lost before that, or a learner that is lost at any time, ends it with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineStatus
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView, WorkerReport
from tests.fakes.local_actor import LocalActor
from tests.fakes.scripted_run import REPLICA, Script, ScriptedDriver, ScriptedRun, all_evaluations, drive, lines
from trainer.driver import fleet as fleet_module
from trainer.driver.fleet import AllEnginesLost, AllWorkersLost, Fleet
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


class Engine:
    async def load(self) -> EngineStatus:
        return EngineStatus(running=0, waiting=0, kv_usage_frac=None, num_preemptions=None)


class Worker:
    async def update(self, _view: FleetView) -> WorkerReport:
        return WorkerReport(limits={}, in_flight={}, num_queued=0, lost_engines={})


class Driver(ScriptedDriver):
    """With a real fleet: the replicas in `members`, whose restarts take longer than what is left of a run, and one
    rollout worker."""

    def __init__(self, run: ScriptedRun, restarts: list[str], prepare: Callable[[Driver], None]) -> None:
        super().__init__(run)
        self.restarts, self.prepare = restarts, prepare

    def _training_run(self, *_: Any) -> Any:
        training = super()._training_run()
        self.fleet = Fleet(
            {name: LocalActor(Engine()) for name in self.members},
            [LocalActor(Worker())],
            group_timeout_s=1e6,
            max_engine_restarts=self._cfg.rollout.max_engine_restarts,
            restart_engine=self.restart,
            sync_states=lambda: self.members,
        )
        self._scripted.world.watch = self.fleet.watch  # type: ignore[attr-defined]
        training.evaluator._members = self.fleet.engine_states
        return training

    async def _work(self) -> None:
        self.prepare(self)
        await super()._work()

    async def restart(self, name: str, _number: int) -> None:
        self.restarts.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            self.restarts.append(f"{name} given up")

    def lose_worker(self) -> None:
        self.fleet._workers[0].actor.die()


@pytest.fixture
def restarts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines that were started again."""
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())
    return []


def outcome(
    run: ScriptedRun, restarts: list[str], *, prepare: Callable[[Driver], None] = lambda _: None
) -> BaseException | None:
    """What the run failed with."""
    return drive(Driver(run, restarts, prepare))


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
    """The first replica dies, and the fleet looks at it several times."""

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

    assert outcome(run, restarts, prepare=prepare) is None
    assert ended_in_order(run)
    assert restarts == [], "it would be of no use"
    failed = all_evaluations(run)[-1]
    assert (failed["version"], run.state.num_failed_evaluations) == (LAST, 1)
    assert "replica_0 died" in failed["failed"]
    assert lines(run)[-1]["eval/failed_runs"] == 1
    told = "replica_0 is lost (weight sync: dead); training is over, so it is not started again"
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

    assert outcome(run, restarts, prepare=prepare) is None
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

    assert outcome(run, restarts, prepare=prepare) is None
    assert ended_in_order(run)
    assert "replica_0 is lost (weight sync: dead); training is over" in caplog.text
    assert restarts == []


@SAVES
@pytest.mark.parametrize("what", ["train_step", "save", "evaluate", "export_hf"])
def test_the_last_rollout_worker_lost_when_no_group_is_needed_any_more_ends_nothing(
    scripted: Make, caplog: pytest.LogCaptureFixture, restarts: list[str], what: str, every_steps: int
) -> None:
    """From the last step on, whose groups are in their batch."""
    run = scripted(Script(pull_s=20.0), **saving(every_steps))

    def prepare(driver: Driver) -> None:
        async def lose() -> None:
            if run.state.step == LAST - (what == "train_step"):
                driver.lose_worker()
                await asyncio.sleep(A_WHILE_S)
                assert driver.fleet._is_closed, "an evaluation would wait for a worker"

        during(run, what, lose)

    assert outcome(run, restarts, prepare=prepare) is None
    assert ended_in_order(run)
    assert "no rollout worker is left" in caplog.text


@pytest.mark.parametrize("step", [2, LAST])
def test_the_last_engine_lost_before_the_last_version_is_live_ends_the_run(
    scripted: Make, restarts: list[str], step: int
) -> None:
    run = scripted(rollout={"max_engine_restarts": 0}, **SECTIONS)

    def prepare(driver: Driver) -> None:
        during(run, "sync", loses(driver), version=step)

    assert isinstance(outcome(run, restarts, prepare=prepare), AllEnginesLost)
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
    assert outcome(run, restarts, prepare=prepare) is None
    assert restarts == [REPLICA, f"{REPLICA} given up"]
    assert given_up == [True], "an export on shared devices would wait for it"


def test_the_last_rollout_worker_lost_in_mid_training_ends_the_run(scripted: Make, restarts: list[str]) -> None:
    run = scripted(Script(train_s=20.0), **SECTIONS)

    def prepare(driver: Driver) -> None:
        asyncio.get_running_loop().call_later(50.0, driver.lose_worker)

    assert isinstance(outcome(run, restarts, prepare=prepare), AllWorkersLost)
    assert 0 < run.state.step < LAST


def test_the_last_rollout_worker_lost_when_the_accuracy_is_reached_ends_nothing(
    scripted: Make, restarts: list[str]
) -> None:
    run = scripted(Script(train_s=5.0, hangs=lambda item: item.start_version >= 2), **SECTIONS)

    def prepare(driver: Driver) -> None:
        async def lose() -> None:
            run.state.stop_reason = "reached the accuracy"
            driver.lose_worker()

        during(run, "publish", lose, version=2)

    assert outcome(run, restarts, prepare=prepare) is None
    assert run.state.step < LAST
    assert run.world.numbers("saved") == [run.state.step]


def test_a_learner_lost_before_the_export_ends_the_run(scripted: Make, restarts: list[str]) -> None:
    run = scripted(**SECTIONS)

    async def lost() -> None:
        raise LearnerError("rank 1 died")

    during(run, "export_hf", lost)
    assert isinstance(outcome(run, restarts), LearnerError)
    assert run.state.stop_reason == "failed"
