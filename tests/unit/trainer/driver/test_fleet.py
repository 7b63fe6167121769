"""Engines and rollout workers that are lost, pinned and come back, and what is sent to whom; in virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineStatus
from rollout.errors import WorkerLost
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView, WorkerReport
from rollout.types import Group, Prompt, RolloutRequest, SamplingParams
from tests.fakes.local_actor import LocalActor, Ref, ServesGroups
from tests.fakes.virtual_time import run_virtual
from trainer.driver import fleet as fleet_module
from trainer.driver.engine_monitor import POLL_S
from trainer.driver.fleet import (
    WAIT_SLICE_S,
    AllEnginesLost,
    AllWorkersLost,
    Fleet,
    RestartPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

ITEM = RolloutRequest(
    group_id=3, prompt=Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer=""), start_version=0
)
PARAMS = SamplingParams(max_tokens=1)
RESTART_S = 90.0
RESET_S = 400.0
"""Instead of an hour."""
SILENCE_S = 40.0
"""Of an engine; a worker has half of it."""


class Engine:
    """Answers polls."""

    async def load(self) -> EngineStatus:
        return EngineStatus(running=1, waiting=0, kv_usage_frac=None, num_preemptions=None)


class Worker(ServesGroups):
    """Takes views until it is told to be silent, and notes them. Has no engine for its first `num_failures` groups."""

    def __init__(self, num_failures: int = 0) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.is_silent = False
        self.gave_up: dict[str, tuple[int, str]] = {}
        self.views: list[FleetView] = []
        self.items: list[RolloutRequest] = []
        self.evaluations: list[str] = []
        self.evaluation_over = asyncio.Event()

    async def update(self, view: FleetView) -> WorkerReport:
        if self.is_silent:
            await asyncio.Event().wait()
        self.views.append(view)
        return WorkerReport(limits={}, in_flight={}, num_queued=0, lost_engines=dict(self.gave_up))

    @property
    def sees(self) -> dict[str, str]:
        """Engine -> its state in the newest view."""
        return {name: engine.state for name, engine in self.views[-1].engines.items()}

    async def run_group(self, item: RolloutRequest) -> Group:
        self.items.append(item)
        if len(self.items) <= self.num_failures:
            raise NoReplica("all 1 engines are excluded")
        return Group(group_id=item.group_id, prompt_id=item.prompt.prompt_id, trajectories=[], start_version=0)

    async def evaluate(self, _prompts: Any, _params: Any, engine: str, _numbers: Any) -> list[str]:
        self.evaluations.append(engine)
        await self.evaluation_over.wait()
        return ["answer"]


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())
    monkeypatch.setattr(fleet_module, "cancel_call", Ref.cancel)
    monkeypatch.setattr(fleet_module, "RESTART_RESET_S", RESET_S)


class World:
    """Engines "a", "b", ... and workers; restarts that work or fail as `outcomes` say, in order."""

    def __init__(
        self,
        names: str,
        *,
        outcomes: Sequence[bool] = (),
        max_restarts: int = 3,
        workers: Sequence[Worker] | None = None,
        restart_worker: Callable[[int, int], Awaitable[Any]] | None = None,
    ) -> None:
        self.engines: dict[str, Any] = {name: LocalActor(Engine()) for name in names}
        self.sync_states = dict.fromkeys(names, "live")
        self.outcomes = list(outcomes)
        self.tried: list[str] = []
        self.ended_at: list[float] = []
        self.num_cancelled = 0
        self.is_over = False
        self.workers = [LocalActor(worker) for worker in ([Worker()] if workers is None else workers)]
        self.fleet = Fleet(
            self.engines,
            self.workers,
            group_timeout_s=10.0,
            heartbeat_timeout_s=SILENCE_S,
            max_engine_restarts=max_restarts,
            max_worker_restarts=max_restarts,
            restart_engine=self.restart,
            restart_worker=restart_worker,
            sync_states=lambda: self.sync_states,
        )

    async def restart(self, name: str, _number: int) -> int:
        self.tried.append(name)
        try:
            await asyncio.sleep(RESTART_S)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.ended_at.append(asyncio.get_running_loop().time())
        if not self.outcomes.pop(0):
            raise TimeoutError(f"{name} did not start")
        self.engines[name] = LocalActor(Engine())
        self.sync_states[name] = "live"
        return 7

    def lose(self, *names: str) -> None:
        """As weight sync does."""
        self.sync_states |= dict.fromkeys(names, "dead")

    def lose_worker(self, index: int) -> None:
        self.fleet._workers[index].actor.die()

    @property
    def states(self) -> Mapping[str, str]:
        return {name: record.state for name, record in self.fleet._table.items()}


def play(make: Callable[[], World], body: Callable[[World], Awaitable[None]]) -> World:
    """`body` beside the fleet's watch, whose failure is raised."""

    async def run() -> World:
        world = make()
        watch = asyncio.create_task(
            world.fleet.watch(needs_engines=lambda: not world.is_over, needs_groups=lambda: not world.is_over)
        )
        playing = asyncio.ensure_future(body(world))
        done, _ = await asyncio.wait({watch, playing}, return_when=asyncio.FIRST_COMPLETED)
        for task in (watch, playing):
            task.cancel()
        await asyncio.gather(watch, playing, return_exceptions=True)
        for task in done:
            task.result()
        return world

    return run_virtual(run())


async def _wait(_: World) -> None:
    await asyncio.sleep(1000.0)


def losing(*names: str, seconds: float = 1000.0) -> Callable[[World], Awaitable[None]]:
    async def body(world: World) -> None:
        world.lose(*names)
        await asyncio.sleep(seconds)

    return body


# Engines


def test_live_engines_are_left_alone() -> None:
    world = play(lambda: World("ab"), _wait)
    assert (world.tried, world.states) == ([], {"a": "live", "b": "live"})


def test_lost_engines_are_restarted_side_by_side() -> None:
    world = play(lambda: World("abc", outcomes=[True, True]), losing("a", "c"))
    assert world.tried == ["a", "c"]
    assert world.states == {"a": "live", "b": "live", "c": "live"}
    assert world.ended_at == [pytest.approx(POLL_S + RESTART_S)] * 2


def test_a_restart_that_fails_is_tried_again_until_the_limit_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = play(lambda: World("ab", outcomes=[False] * 3), losing("a"))
    assert world.tried == ["a"] * 3
    assert world.states == {"a": "retired", "b": "live"}
    assert "restart 3 of 3 failed (a): TimeoutError: a did not start; it stays out of this run" in caplog.text


def test_an_engine_that_is_lost_again_and_again_is_retired() -> None:
    async def body(world: World) -> None:
        for _ in range(20):
            world.lose("a")
            await asyncio.sleep(RESTART_S + 10.0)

    assert play(lambda: World("ab", outcomes=[True] * 20, max_restarts=2), body).tried == ["a", "a"]


def test_a_long_time_of_health_gives_the_restarts_back() -> None:
    async def body(world: World) -> None:
        for _ in range(4):
            world.lose("a")
            await asyncio.sleep(RESTART_S + RESET_S + 10.0)
            assert world.states["a"] == "live"
        world.lose("a")
        await asyncio.sleep(RESTART_S + RESET_S / 2)
        world.lose("a")
        await asyncio.sleep(RESTART_S + RESET_S)

    world = play(lambda: World("ab", outcomes=[True] * 9, max_restarts=1), body)
    assert len(world.tried) == 5
    assert world.states["a"] == "retired", "the last two losses were too close to each other"


def test_no_engine_is_restarted_where_none_may_be() -> None:
    assert play(lambda: World("ab", max_restarts=0), losing("a")).tried == []


def test_the_run_ends_with_the_reasons_when_no_engine_is_left(caplog: pytest.LogCaptureFixture) -> None:
    worlds: list[World] = []

    def make() -> World:
        worlds.append(World("ab", outcomes=[False] * 6))
        return worlds[0]

    words = r"no engine is left, and each had its 3 restarts .*: a is lost: weight sync: dead; b is lost: weight"
    with pytest.raises(AllEnginesLost, match=words):
        play(make, losing("a", "b"))
    assert sorted(worlds[0].tried) == ["a"] * 3 + ["b"] * 3
    assert "all engines lost; waiting for a (weight sync: dead) to restart (attempt 1 of 3)" in caplog.text
    with pytest.raises(AllEnginesLost):
        play(lambda: World("a", max_restarts=0), losing("a", seconds=2 * POLL_S + 0.1))


def test_once_training_is_over_no_engine_is_restarted_and_the_loss_of_all_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(world: World) -> None:
        world.lose("a")
        await asyncio.sleep(RESTART_S / 2)
        world.is_over = True
        world.lose("b")
        await asyncio.sleep(1000.0)

    world = play(lambda: World("ab", outcomes=[True] * 9), body)
    assert (world.tried, world.num_cancelled) == (["a"], 1)
    assert world.states == {"a": "retired", "b": "retired"}
    assert "the restart of a is cancelled: training is over" in caplog.text
    assert "b is lost (weight sync: dead); training is over, so it is not started again" in caplog.text


def test_who_waits_for_an_engine_continues_when_one_is_back() -> None:
    waits = list[float]()

    async def body(world: World) -> None:
        world.lose("a")
        while world.fleet.lost_engines:
            began = asyncio.get_running_loop().time()
            await world.fleet.wait_for_engine(OSError("no engine"))
            waits.append(asyncio.get_running_loop().time() - began)
        assert asyncio.get_running_loop().time() == pytest.approx(world.ended_at[-1])

    play(lambda: World("a", outcomes=[False, True]), body)
    assert max(waits) <= WAIT_SLICE_S, "nobody waits without looking again"


def test_who_waits_in_vain_is_told_why() -> None:
    async def wait(world: World) -> None:
        world.lose("a")
        while True:
            await world.fleet.wait_for_engine(OSError("no engine"))

    async def alone() -> None:
        await wait(World("a", max_restarts=0))

    with pytest.raises(OSError, match="no engine"):
        run_virtual(alone())
    with pytest.raises(AllEnginesLost):  # the watch has the reasons, and comes first
        play(lambda: World("a", max_restarts=0), wait)


def test_the_end_of_the_run_ends_restarts_under_way() -> None:
    assert play(lambda: World("ab", outcomes=[True, True]), losing("a", "b", seconds=RESTART_S / 2)).num_cancelled == 2


# What workers are told, and what they report


def test_a_loss_reaches_every_worker_at_once_and_the_new_engine_with_its_handle() -> None:
    first, second = Worker(), Worker()

    async def body(world: World) -> None:
        world.lose("a")
        world.fleet.exclude_lost_engines()
        await asyncio.sleep(0.01)
        for worker in (first, second):
            assert worker.sees == {"a": "lost", "b": "live"}
            assert worker.views[-1].engines["a"].reason == "weight sync: dead"
        await asyncio.sleep(RESTART_S / 2)
        assert first.sees == {"a": "starting", "b": "live"}
        await asyncio.sleep(RESTART_S)
        for worker in (first, second):
            assert worker.sees == {"a": "live", "b": "live"}
            handles = [view.handles["a"] for view in worker.views if view.handles]
            assert handles == [world.engines["a"]], "sent once"

    play(lambda: World("ab", outcomes=[True], workers=[first, second]), body)


def test_what_one_worker_reports_lost_is_lost_for_all_unless_it_was_replaced_meanwhile() -> None:
    first, second = Worker(), Worker()

    async def body(world: World) -> None:
        first.gave_up = {"a": (0, "a samples with policy version 3 although 4 is live")}
        await asyncio.sleep(2 * POLL_S)
        assert second.views[-1].engines["a"].reason.startswith("a samples with policy version 3")
        await asyncio.sleep(RESTART_S + 10.0)  # the report is still that of incarnation 0
        assert (world.states["a"], world.tried) == ("live", ["a"])

    play(lambda: World("ab", outcomes=[True], workers=[first, second]), body)


def test_a_pin_holds_once_every_worker_knows_and_until_the_last_is_taken_back() -> None:
    worker, silent = Worker(), Worker()

    async def restart_worker(_place: int, _number: int) -> LocalActor:
        await asyncio.sleep(RESTART_S)
        return LocalActor(Worker())

    async def body(world: World) -> None:
        fleet = world.fleet
        await fleet.pin("a")
        assert worker.sees == silent.sees == {"a": "pinned", "b": "live"}
        assert fleet.engine_states() == {"a": "live", "b": "live"}
        assert not fleet.takes_training("a")
        await fleet.pin("a")
        fleet.unpin("a")
        assert not fleet.takes_training("a")
        fleet.unpin("a")
        assert fleet.takes_training("a")
        await asyncio.sleep(1.0)
        assert worker.sees["a"] == "live"
        silent.is_silent, began = True, asyncio.get_running_loop().time()
        await fleet.pin("b")
        assert asyncio.get_running_loop().time() - began <= SILENCE_S / 2 + 1.0, "it is lost by then"
        assert fleet._workers[1].lost

    play(lambda: World("ab", workers=[worker, silent], restart_worker=restart_worker), body)


def test_a_pin_that_a_live_worker_does_not_take_ends_with_its_deadline() -> None:
    class Deaf(Worker):
        async def update(self, view: FleetView) -> WorkerReport:
            raise RuntimeError("something else")

    async def body(world: World) -> None:
        with pytest.raises(TimeoutError, match="a pin of a timed out"):
            await world.fleet.pin("a")
        assert world.states == {"a": "live", "b": "live"}

    play(lambda: World("ab", workers=[Worker(), Deaf()]), body)


def test_an_engine_that_missed_a_version_while_it_was_pinned_stays_out() -> None:
    async def body(world: World) -> None:
        await world.fleet.pin("a")
        world.lose("a")
        world.fleet.unpin("a")
        assert world.states["a"] == "lost"

    play(lambda: World("ab"), body)


def test_a_silent_worker_delays_neither_the_views_of_others_nor_restarts() -> None:
    silent, other = Worker(), Worker()

    async def body(world: World) -> None:
        await asyncio.sleep(1.0)
        silent.is_silent = True
        world.lose("a")
        await asyncio.sleep(2.0)
        assert world.tried == ["a"]
        assert other.sees["a"] == "starting"

    play(lambda: World("ab", outcomes=[True], workers=[silent, other]), body)


# Workers


def test_a_slow_restart_delays_neither_the_watch_over_the_others_nor_their_restarts() -> None:
    first, second = Worker(), Worker()
    begun: list[tuple[int, float]] = []

    async def restart(place: int, _number: int) -> LocalActor:
        begun.append((place, asyncio.get_running_loop().time()))
        await asyncio.sleep(900.0 if place == 0 else 1.0)
        return LocalActor(Worker())

    async def body(world: World) -> None:
        first.is_silent = True
        await asyncio.sleep(SILENCE_S)
        second.is_silent = True
        await asyncio.sleep(SILENCE_S)
        assert [place for place, _ in begun] == [0, 1]
        assert begun[1][1] < 900.0
        world.lose("b")
        await asyncio.sleep(1000.0)
        assert [worker.lost for worker in world.fleet._workers] == ["", "", ""]
        new = world.fleet._workers[0].actor.target
        assert new.views[0].engines["b"].state != "live" or "b" in new.views[0].handles, "it knows what it missed"
        assert world.fleet.load_record["fleet/worker_restarts"] == 2
        assert world.fleet.load_record["fleet/engine_restarts"] == 1

    play(lambda: World("ab", outcomes=[True], workers=[first, second, Worker()], restart_worker=restart), body)


def test_a_worker_that_dies_is_lost_at_once_and_the_first_call_finds_out() -> None:
    async def body(world: World) -> None:
        world.lose_worker(0)
        await asyncio.sleep(2 * POLL_S)
        assert world.fleet._workers[0].lost.startswith("died")
        assert (await world.fleet.run_group(ITEM)).group_id == 3

    play(lambda: World("a", workers=[Worker(), Worker()]), body)


def test_a_worker_that_lived_for_long_has_all_its_restarts_again() -> None:
    numbers: list[int] = []

    async def restart(_place: int, number: int) -> LocalActor:
        numbers.append(number)
        return LocalActor(Worker())

    async def body(world: World) -> None:
        for _ in range(3):
            await asyncio.sleep(RESET_S + 10.0)
            world.lose_worker(0)
            await asyncio.sleep(10.0)
            assert not world.fleet._workers[0].lost
        assert numbers == [1, 2, 3], "each actor has a name of its own"
        world.lose_worker(0)
        await asyncio.sleep(10.0)

    with pytest.raises(AllWorkersLost, match="after 1 restarts of each"):
        play(lambda: World("a", max_restarts=1, workers=[Worker()], restart_worker=restart), body)


def test_without_a_worker_and_a_restart_the_run_ends_with_the_reasons_while_it_needs_groups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def restart(_place: int, _number: int) -> LocalActor:
        raise OSError("no memory")

    def make() -> World:
        return World("a", max_restarts=2, workers=[Worker()], restart_worker=restart)

    async def lose(world: World) -> None:
        world.lose_worker(0)
        await asyncio.sleep(100.0)

    with pytest.raises(AllWorkersLost, match=r"after 2 restarts of each \(rollout worker 0 .*no memory"):
        play(make, lose)

    async def lose_late(world: World) -> None:
        world.is_over = True
        world.lose_worker(0)
        await asyncio.sleep(100.0)
        with pytest.raises(WorkerLost, match="none is started any more"):
            await world.fleet.run_group(ITEM)

    play(make, lose_late)
    assert "no more evaluations, while the run ends anyway" in caplog.text


def test_the_budget_is_the_same_for_everything_that_is_restarted() -> None:
    policy = RestartPolicy(2)
    assert [policy.begin("a"), policy.begin("a")] == [(1, "1 of 2"), (2, "2 of 2")]
    assert policy.is_spent("a")
    assert not policy.is_spent("b")
    policy.on_healthy("a", 10.0)
    policy.on_lost("a")
    policy.on_healthy("a", RESET_S + 10.0)
    assert policy.is_spent("a"), "it was lost between"
    policy.on_healthy("a", 2 * RESET_S + 10.0)
    assert policy.begin("a") == (3, "1 of 2")


# Groups and evaluations


def test_a_group_waits_for_an_engine_and_begins_again_as_it_was() -> None:
    worker = Worker(num_failures=3)

    async def body(world: World) -> None:
        world.lose("a")
        assert (await world.fleet.run_group(ITEM)).group_id == ITEM.group_id
        assert world.fleet._workers[0].num_groups == 0

    play(lambda: World("a", outcomes=[True], workers=[worker]), body)
    assert worker.items == [ITEM] * 4


def test_a_group_fails_with_the_reasons_where_no_engine_comes_back() -> None:
    async def main() -> None:
        world = World("a", max_restarts=0, workers=[Worker(num_failures=9)])
        world.lose("a")
        await world.fleet.run_group(ITEM)

    with pytest.raises(NoReplica, match="all 1 engines are excluded"):
        run_virtual(main())


def test_shares_of_an_evaluation_go_to_different_workers_and_may_take_longer_than_any_group() -> None:
    workers = [Worker(), Worker()]

    async def body(world: World) -> None:
        running = [asyncio.create_task(world.fleet.evaluate([], PARAMS, f"r{i}", [])) for i in range(4)]
        await asyncio.sleep(500.0)
        assert [len(worker.evaluations) for worker in workers] == [2, 2]
        for worker in workers:
            worker.evaluation_over.set()
        assert await asyncio.gather(*running) == [["answer"]] * 4

    play(lambda: World("a", workers=workers), body)


def test_an_evaluation_begins_again_on_another_worker() -> None:
    workers = [Worker(), Worker()]

    async def body(world: World) -> None:
        running = asyncio.create_task(world.fleet.evaluate([], PARAMS, "a", []))
        await asyncio.sleep(5.0)
        world.lose_worker(0)
        workers[1].evaluation_over.set()
        assert await running == ["answer"]

    play(lambda: World("a", workers=workers), body)
    assert [worker.evaluations for worker in workers] == [["a"], ["a"]]


def test_an_evaluation_that_is_not_needed_any_more_ends_at_its_worker() -> None:
    worker = Worker()

    async def body(world: World) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await world.fleet.evaluate([], PARAMS, "a", [])
        await asyncio.sleep(0.1)
        assert not [task for task in world.workers[0].tasks if "evaluate" in repr(task)]

    play(lambda: World("a", workers=[worker]), body)


def test_nothing_waits_for_a_worker_after_the_end_of_the_run() -> None:
    async def restart(_place: int, _number: int) -> LocalActor:
        await asyncio.sleep(10_000.0)
        raise AssertionError

    async def body(world: World) -> None:
        world.lose_worker(0)
        running = asyncio.create_task(world.fleet.evaluate([], PARAMS, "a", []))
        await asyncio.sleep(5.0)
        assert not running.done(), "one may come back"
        world.fleet.close()
        for evaluation in (running, world.fleet.evaluate([], PARAMS, "a", [])):
            with pytest.raises(WorkerLost, match="no rollout worker is left"):
                await evaluation

    play(lambda: World("a", workers=[Worker()], restart_worker=restart), body)
