"""Engines and rollout workers that are lost, pinned, silent and back, and what is sent to whom; in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.engine.interface import EngineStatus, EngineTimes
from rollout.errors import WorkerLost
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import FleetView, WorkerReport
from rollout.types import Group, Prompt, RolloutRequest, SamplingParams, Trajectory
from rollout.worker.group_server import FLUSH_S, MAX_BYTES
from tests.fakes import rollout_worker
from tests.fakes.engine_client import FakeEngine
from tests.fakes.local_actor import LocalActor, Ref, ServesGroups, watched
from tests.fakes.trajectories import make_turn
from tests.fakes.virtual_time import in_virtual_time
from trainer.driver import fleet as fleet_module
from trainer.driver.engine_monitor import POLL_S, EngineIdleMeter, load_metrics
from trainer.driver.fleet import GROUP_GRACE_S, AllWorkersLost, Fleet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from rollout.worker.worker import RolloutWorker

GROUP_S, RESTART_S = 100.0, 90.0
RESET_S = 200.0
"""Instead of an hour."""
SILENCE_S = 40.0
"""Of an engine; a worker has half of it."""


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())
    monkeypatch.setattr(fleet_module, "cancel_call", Ref.cancel)
    monkeypatch.setattr(fleet_module, "RESTART_RESET_S", RESET_S)


def request(group_id: int) -> RolloutRequest:
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer="")
    return RolloutRequest(group_id=group_id, prompt=prompt, start_version=0)


def group_of(item: RolloutRequest, *, num_tokens: int = 4) -> Group:
    turn = make_turn([], np.full(num_tokens, item.group_id, np.int32), [(0, num_tokens)])
    response = Trajectory.of_turns(
        [turn], prompt_id="p", sample_index=0, reward=1.0, reward_parts={}, status="completed", timings={}
    )
    return Group(group_id=item.group_id, prompt_id="p", trajectories=[response], start_version=0)


def now() -> float:
    return asyncio.get_running_loop().time()


async def never(*_: object) -> None:
    await asyncio.Event().wait()


class Engine:
    """Replies to polls."""

    async def load(self) -> EngineStatus:
        return EngineStatus(running=1, waiting=0, kv_usage_frac=None, num_preemptions=None)


class Worker(ServesGroups):
    """Takes `seconds[group_id]` for a group, and notes what it is sent. It has no engine for its first `num_failures`
    groups."""

    def __init__(
        self, seconds: Mapping[int, float] | float = 0.0, *, num_failures: int = 0, num_tokens: int = 4
    ) -> None:
        super().__init__()
        self.seconds, self.num_failures, self.num_tokens = seconds, num_failures, num_tokens
        self.is_silent = self.refuses_views = False
        self.lost_engines: dict[str, tuple[int, str]] = {}
        self.views: list[FleetView] = []
        self.items: list[RolloutRequest] = []
        self.cancelled: list[int] = []
        self.submitted: list[list[int]] = []
        self.num_replies = 0
        self.fails: dict[str, list[Exception]] = {"submit": [], "ended": []}
        """What the next calls fail with."""
        self.evaluations: list[str] = []
        self.evaluation_over = asyncio.Event()

    async def update(self, view: FleetView) -> WorkerReport:
        if self.is_silent:
            await never()
        if self.refuses_views:
            raise RuntimeError("something else")
        self.views.append(view)
        return WorkerReport(limits={}, in_flight={}, num_queued=0, lost_engines=dict(self.lost_engines))

    @property
    def sees(self) -> dict[str, str]:
        """Engine -> its state in the newest view."""
        return {name: engine.state for name, engine in self.views[-1].engines.items()}

    async def run_group(self, item: RolloutRequest) -> Group:
        self.items.append(item)
        if len(self.items) <= self.num_failures:
            raise NoReplica("all 1 engines are excluded")
        try:
            await asyncio.sleep(self.seconds if isinstance(self.seconds, float) else self.seconds[item.group_id])
        except asyncio.CancelledError:
            self.cancelled.append(item.group_id)
            raise
        return group_of(item, num_tokens=self.num_tokens)

    async def submit(self, items: Any, given_up: Any) -> None:
        self.submitted.append([item.group_id for item in items.values()])
        if self.fails["submit"]:
            raise self.fails["submit"].pop()
        await super().submit(items, given_up)

    async def ended(self) -> Any:
        if self.fails["ended"]:
            raise self.fails["ended"].pop()
        ended = await super().ended()
        self.num_replies += 1
        return ended

    async def evaluate(self, _prompts: Any, _params: Any, engine: str, _numbers: Any) -> list[str]:
        self.evaluations.append(engine)
        await self.evaluation_over.wait()
        return ["response"]


class World:
    """Engines "a", "b", ... and workers; restarts of engines that work or fail as `outcomes` say, in order."""

    def __init__(
        self,
        names: str,
        *workers: Worker,
        outcomes: Sequence[bool] = (),
        max_restarts: int = 3,
        restart_worker: Callable[[int, int], Awaitable[Any]] | None = None,
    ) -> None:
        self.engines: dict[str, Any] = {name: LocalActor(Engine()) for name in names}
        self.sync_states = dict.fromkeys(names, "live")
        self.outcomes = list(outcomes)
        self.tried: list[str] = []
        self.ended_at: list[float] = []
        self.num_cancelled = 0
        self.is_over = False
        self.fleet = Fleet(
            self.engines,
            [LocalActor(worker) for worker in (workers or (Worker(),))],
            group_timeout_s=GROUP_S,
            heartbeat_timeout_s=SILENCE_S,
            max_engine_restarts=max_restarts,
            max_worker_restarts=max_restarts,
            restart_engine=self.restart,
            restart_worker=restart_worker,
            sync_states=lambda: self.sync_states,
        )
        self.clients = self.fleet._workers

    async def restart(self, name: str, _number: int) -> int:
        self.tried.append(name)
        try:
            await asyncio.sleep(RESTART_S)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        self.ended_at.append(now())
        if not self.outcomes.pop(0):
            raise TimeoutError(f"{name} did not start")
        self.engines[name] = LocalActor(Engine())
        self.sync_states[name] = "live"
        return 7

    def lose(self, *names: str) -> None:
        """As weight sync does."""
        self.sync_states |= dict.fromkeys(names, "dead")
        self.fleet.exclude_lost_engines()

    def begin(self, group_id: int) -> asyncio.Task[Group]:
        return asyncio.create_task(self.fleet.run_group(request(group_id)))

    async def evaluate(self, engine: str) -> Any:
        return await self.fleet.evaluate([], SamplingParams(max_tokens=1), engine, [])

    @property
    def states(self) -> Mapping[str, str]:
        return {name: record.state for name, record in self.fleet._table.items()}


@contextlib.asynccontextmanager
async def watched_world(names: str, *workers: Worker, **how: Any) -> AsyncIterator[World]:
    """A world under the fleet's watch, whose failure ends the block."""
    world = World(names, *workers, **how)
    async with asyncio.TaskGroup() as tasks:
        needs = {"needs_engines": lambda: not world.is_over, "needs_groups": lambda: not world.is_over}
        watch = tasks.create_task(world.fleet.watch(**needs))
        yield world
        watch.cancel()


def ends_with(error: type[Exception], words: str = "") -> Any:
    return pytest.RaisesGroup(pytest.RaisesExc(error, match=words))


# Engines


@pytest.mark.parametrize(
    ("lost", "outcomes", "max_restarts", "tried", "state"),
    [
        ("", (), 3, [], "live"),
        ("ac", (True, True), 3, ["a", "c"], "live"),
        ("a", (False, False, True), 3, ["a"] * 3, "live"),
        ("a", (False,) * 3, 3, ["a"] * 3, "retired"),
        ("a", (), 0, [], "retired"),
    ],
)
@in_virtual_time
async def test_lost_engines_are_restarted_concurrently_until_the_limit_and_the_run_continues(
    caplog: pytest.LogCaptureFixture,
    lost: str,
    outcomes: Sequence[bool],
    max_restarts: int,
    tried: list[str],
    state: str,
) -> None:
    async with watched_world("abc", outcomes=outcomes, max_restarts=max_restarts) as world:
        world.lose(*lost)
        await asyncio.sleep(5 * RESTART_S)
    assert (world.tried, world.states) == (tried, {"a": state, "b": "live", "c": "live"})
    if len(lost) == 2:
        assert world.ended_at == [pytest.approx(POLL_S + RESTART_S)] * 2
    if tried and state == "retired":
        for attempt, then in (("1 of 3", "it is tried again"), ("3 of 3", "it stays out of this run")):
            assert f"restart {attempt} failed (a): TimeoutError: a did not start; {then}" in caplog.text


@in_virtual_time
async def test_a_long_time_of_health_gives_the_restarts_back() -> None:
    async with watched_world("ab", outcomes=[True] * 9, max_restarts=1) as world:
        for _ in range(4):
            world.lose("a")
            await asyncio.sleep(RESTART_S + RESET_S + 10.0)
            assert world.states["a"] == "live"
        world.lose("a")
        await asyncio.sleep(RESTART_S + RESET_S / 2)
        world.lose("a")
        await asyncio.sleep(RESTART_S + RESET_S)
    assert len(world.tried) == 5
    assert world.states["a"] == "retired", "the last two losses were too close to each other"


@in_virtual_time
async def test_once_training_is_over_no_engine_is_restarted_and_the_loss_of_all_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched_world("ab", outcomes=[True] * 9) as world:
        world.lose("a")
        await asyncio.sleep(RESTART_S / 2)
        world.is_over = True
        world.lose("b")
        await asyncio.sleep(5 * RESTART_S)
    assert (world.tried, world.num_cancelled) == (["a"], 1)
    assert world.states == {"a": "retired", "b": "retired"}
    assert "the restart of a is cancelled: training is over" in caplog.text
    assert "b is lost (weight sync: dead); training is over, so it is not started again" in caplog.text
    async with watched_world("ab", outcomes=[True, True]) as world:
        world.lose("a", "b")
        await asyncio.sleep(RESTART_S / 2)
    assert world.num_cancelled == 2, "the end of the run ends restarts under way"


# Views and reports


@in_virtual_time
async def test_a_loss_reaches_every_worker_at_once_and_the_new_engine_with_its_handle() -> None:
    workers = Worker(), Worker()
    async with watched_world("ab", *workers, outcomes=[True]) as world:
        world.lose("a")
        await asyncio.sleep(0.01)
        for worker in workers:
            assert worker.sees == {"a": "lost", "b": "live"}
            assert worker.views[-1].engines["a"].reason == "weight sync: dead"
        await asyncio.sleep(RESTART_S / 2)
        assert workers[0].sees == {"a": "starting", "b": "live"}
        await asyncio.sleep(RESTART_S)
        for worker in workers:
            assert worker.sees == {"a": "live", "b": "live"}
            assert [view.handles["a"] for view in worker.views if view.handles] == [world.engines["a"]], "sent once"


@in_virtual_time
async def test_what_one_worker_reports_lost_is_lost_for_all_unless_it_was_replaced_meanwhile() -> None:
    first, second = Worker(), Worker()
    async with watched_world("ab", first, second, outcomes=[True]) as world:
        first.lost_engines = {"a": (0, "a samples with policy version 3 although 4 is live")}
        await asyncio.sleep(2 * POLL_S)
        assert second.views[-1].engines["a"].reason.startswith("a samples with policy version 3")
        await asyncio.sleep(RESTART_S + 10.0)  # the report is still about the engine before it
        assert (world.states["a"], world.tried) == ("live", ["a"])


@in_virtual_time
async def test_a_pin_holds_once_every_live_worker_has_it_and_until_the_last_is_taken_back() -> None:
    worker, silent = Worker(), Worker()
    async with watched_world("ab", worker, silent, restart_worker=never) as world:
        fleet = world.fleet
        await fleet.pin("a")
        assert worker.sees == silent.sees == {"a": "pinned", "b": "live"}
        assert fleet.engine_states() == {"a": "live", "b": "live"}
        await fleet.pin("a")
        fleet.unpin("a")
        assert world.states["a"] == "pinned"
        fleet.unpin("a")
        assert world.states["a"] == "live"
        await asyncio.sleep(1.0)
        assert worker.sees["a"] == "live"
        silent.is_silent, began = True, now()
        await fleet.pin("b")
        assert now() - began <= SILENCE_S / 2 + 1.0 and world.clients[1].lost, "it is lost by then"
        world.lose("b")
        fleet.unpin("b")
        assert world.states["b"] == "lost", "it missed a version while it was pinned"
    worker.refuses_views = True
    async with watched_world("ab", Worker(), worker) as world:
        with pytest.raises(TimeoutError, match="a pin of a timed out"):
            await world.fleet.pin("a")
        assert world.states == {"a": "live", "b": "live"}


# Workers


@in_virtual_time
async def test_silent_workers_and_slow_restarts_delay_nothing_else() -> None:
    silent, second, third, begun = Worker(), Worker(), Worker(), list[tuple[int, float]]()

    async def restart(place: int, _number: int) -> LocalActor:
        begun.append((place, now()))
        await asyncio.sleep(900.0 if place == 0 else 1.0)
        return LocalActor(Worker())

    async with watched_world("ab", silent, second, third, outcomes=[True, True], restart_worker=restart) as world:
        await asyncio.sleep(1.0)
        silent.is_silent = True
        world.lose("a")
        await asyncio.sleep(2.0)
        assert (world.tried, third.sees["a"]) == (["a"], "starting")
        await asyncio.sleep(SILENCE_S)
        second.is_silent = True
        await asyncio.sleep(SILENCE_S)
        assert [place for place, _ in begun] == [0, 1]
        assert begun[1][1] < 900.0
        world.lose("b")
        await asyncio.sleep(1000.0)
        assert [client.lost for client in world.clients] == ["", "", ""]
        new = world.clients[0].actor.target
        assert all(name in new.views[0].handles for name in "ab"), "it gets what it missed"
        record, again = world.fleet.take_record(), world.fleet.take_record()
        assert (record["fleet/worker_restarts"], record["fleet/engine_restarts"]) == (2, 2)
        assert (record["fleet/engines_lost"], again["fleet/engines_lost"]) == (2, 0), "both were away, and are back"


@in_virtual_time
async def test_without_a_worker_and_a_restart_the_run_ends_with_the_reasons_while_it_needs_groups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    numbers = list[int]()

    async def restart(_place: int, number: int) -> LocalActor:
        numbers.append(number)
        raise OSError("no memory")

    with ends_with(AllWorkersLost, r"after 2 restarts of each \(rollout worker 0 .*no memory"):
        async with watched_world("a", max_restarts=2, restart_worker=restart) as world:
            world.clients[0].actor.die()
            await asyncio.sleep(100.0)
    assert numbers == [1, 2], "each actor has a name of its own"
    async with watched_world("a", max_restarts=2, restart_worker=restart) as world:
        world.is_over = True
        world.clients[0].actor.die()
        await asyncio.sleep(100.0)
        with pytest.raises(WorkerLost, match="none will be restarted"):
            await world.begin(3)
    assert "no more evaluations; the run ends anyway" in caplog.text


# Groups and evaluations


@in_virtual_time
async def test_a_group_waits_for_an_engine_and_begins_again_as_it_was_or_fails_with_the_reasons() -> None:
    worker = Worker(num_failures=3)
    async with watched_world("a", worker, outcomes=[True]) as world:
        world.lose("a")
        assert (await world.begin(3)).group_id == 3
        assert (world.clients[0].num_groups, [item.attempt for item in worker.items]) == (0, [0] * 4)
    alone = World("a", Worker(num_failures=9), max_restarts=0)
    alone.lose("a")
    with pytest.raises(NoReplica, match="all 1 engines are excluded"):
        await alone.begin(3)


@in_virtual_time
async def test_shares_of_an_evaluation_go_to_different_workers_and_may_take_longer_than_any_group() -> None:
    workers = Worker(), Worker()
    async with watched_world("a", *workers) as world:
        running = [asyncio.create_task(world.evaluate(f"r{i}")) for i in range(4)]
        await asyncio.sleep(500.0)
        assert [len(worker.evaluations) for worker in workers] == [2, 2]
        world.clients[0].actor.die()
        workers[1].evaluation_over.set()
        assert await asyncio.gather(*running) == [["response"]] * 4, "it begins again where its worker is lost"
        workers[1].evaluation_over.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100.0):
                await world.evaluate("a")
        await asyncio.sleep(0.1)
        left = [task for task in world.clients[1].actor.tasks if "evaluate" in repr(task)]
        assert not left, "it ends at its worker, too"


@in_virtual_time
async def test_nothing_waits_for_a_worker_after_the_end_of_the_run_and_its_end_is_no_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched_world("a", restart_worker=never) as world:
        world.clients[0].actor.die()
        running = asyncio.create_task(world.evaluate("a"))
        await asyncio.sleep(5.0)
        assert not running.done(), "one may come back"
        world.fleet.close()
        for evaluation in (running, world.evaluate("a")):
            with pytest.raises(WorkerLost, match="no rollout worker is left"):
                await evaluation
    caplog.clear()
    world = World("", Worker({0: 1.0, 1: 50.0}))
    group = world.begin(1)
    await world.begin(0)
    world.fleet.close()
    world.clients[0].actor.die()
    with pytest.raises(WorkerLost, match="the run is over"):
        await group
    await asyncio.sleep(1.0)
    assert (world.clients[0].lost, caplog.text) == ("", "")


# Groups on their way to a worker and back


@pytest.mark.parametrize(
    ("worker", "num_groups", "num_replies", "ended_s"),
    [
        (Worker(1.0), 100, 1, 1.0),  # what comes alone waits for nothing
        (Worker({i: 1.0 + i * FLUSH_S / 20 for i in range(1000)}), 1000, 1000 / 20 + 2, 1.0 + 52 * FLUSH_S),
        (Worker(1.0, num_tokens=MAX_BYTES // 8), 10, 10, 1.0 + FLUSH_S),  # what is full is not kept waiting
    ],
    ids=["together", "soon after another", "large"],
)
@in_virtual_time
async def test_groups_travel_together_and_wait_a_moment_at_most(
    worker: Worker, num_groups: int, num_replies: float, ended_s: float
) -> None:
    groups = await asyncio.gather(*map(World("", worker).begin, range(num_groups)))
    assert [group.group_id for group in groups] == list(range(num_groups))
    assert [int(group.trajectories[0].token_ids[-1]) for group in groups] == list(range(num_groups))
    assert worker.submitted == [list(range(num_groups))]
    assert worker.num_replies <= num_replies
    assert now() <= ended_s + 1e-6


@in_virtual_time
async def test_a_group_that_is_given_up_ends_in_the_worker_and_the_others_do_not() -> None:
    worker = Worker({0: 1_000.0, 1: 5.0, 2: 1_000.0, 3: 1.0, 4: 1.0})
    world = World("", worker)
    first, second, third = map(world.begin, range(3))
    await asyncio.sleep(3.0)
    first.cancel()
    await asyncio.sleep(1.0)
    assert worker.cancelled == [0]
    assert (await second).group_id == 1
    words = rf"group 2 timed out after {GROUP_S + GROUP_GRACE_S:g} s on rollout worker 0; .*rollout.request_timeout_s"
    with pytest.raises(TimeoutError, match=words):
        await third
    assert now() == GROUP_S + GROUP_GRACE_S
    await asyncio.sleep(1.0)
    assert worker.cancelled == [0, 2]
    fourth = world.begin(3)
    await asyncio.sleep(0)
    fifth = world.begin(4)  # while the call for the fourth is on its way
    await asyncio.sleep(FLUSH_S / 4)
    fifth.cancel()
    await fourth
    assert [item.group_id for item in worker.items] == [0, 1, 2, 3], "what was not sent yet is not begun"
    client = world.clients[0]
    assert (client.num_groups, client._waiting, client._cancelled) == (0, {}, [])
    assert not worker.server._running


@in_virtual_time
async def test_the_error_of_one_group_is_its_own_and_a_cancellation_inside_it_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NoPickle(ValueError):
        """Cannot leave its process: it is local to a function."""

    async def run_group(_worker: Worker, item: RolloutRequest) -> Group:
        inner = asyncio.create_task(asyncio.sleep(1.0))
        match item.group_id:
            case 1:
                raise NoPickle("a defect")
            case 2:
                asyncio.get_running_loop().call_later(0.5, inner.cancel)
            case 3:
                raise TimeoutError("no sample ended")
        await inner
        return group_of(item)

    monkeypatch.setattr(Worker, "run_group", run_group)
    first, *failed, last = await asyncio.gather(*map(World("").begin, range(5)), return_exceptions=True)
    assert [one.group_id for one in (first, last) if isinstance(one, Group)] == [0, 4]
    assert [type(one) for one in failed] == [RuntimeError, RuntimeError, TimeoutError]
    for error, words in zip(failed, ("NoPickle: a defect", "was cancelled", "no sample ended"), strict=True):
        assert words in str(error)


@pytest.mark.parametrize("call", ["submit", "ended"])
@in_virtual_time
async def test_a_call_that_fails_costs_the_groups_it_may_have_carried_and_no_others(call: str) -> None:
    worker = Worker(5.0)
    world = World("", worker)
    worker.fails[call] = [OSError("too large to send")]
    with pytest.raises(OSError, match="too large to send"):
        await world.begin(0)
    assert (await world.begin(1)).group_id == 1
    assert worker.cancelled == ([0] if call == "ended" else [])
    third = world.begin(2)
    await asyncio.sleep(1.0)
    worker.fails["submit"] = [OSError("too large to send")]
    third.cancel()
    await asyncio.sleep(3.0)
    assert worker.cancelled[-1] == 2, "with the next call"


@in_virtual_time
async def test_a_lost_worker_fails_all_its_groups_at_once_and_is_never_called_again() -> None:
    worker = Worker(50.0)
    world = World("", worker)
    running = [world.begin(group_id) for group_id in range(5)]
    await asyncio.sleep(1.0)
    running.append(world.begin(5))
    await asyncio.sleep(0)
    client = world.clients[0]
    client.actor.die()
    await asyncio.sleep(FLUSH_S)
    assert all(isinstance(task.exception(), WorkerLost) for task in running)
    num_calls = len(worker.submitted)
    with pytest.raises(WorkerLost):
        await client.run(request(6))
    await asyncio.sleep(10.0)
    assert len(worker.submitted) == num_calls
    assert all(task.done() for task in client._tasks.values())


# Engines that are silent, and their load


SOON_S = 10.0
"""No poll takes longer, so a silence is noticed so much after the limit at the latest."""
CALM = EngineStatus(running=4, waiting=0, kv_usage_frac=0.3, num_preemptions=0)


@dataclass
class Stopping(FakeEngine):
    """While `is_stopped` it replies to no poll and gives no token, as a process that was sent SIGSTOP."""

    is_stopped: bool = False
    poll_error: Exception | None = None

    async def load(self) -> EngineStatus:
        while self.is_stopped:
            await asyncio.sleep(1.0)
        if self.poll_error is not None:
            raise self.poll_error
        return await super().load()

    def stop(self) -> None:
        self.is_stopped = self.hangs = True


@contextlib.asynccontextmanager
async def watching(**settings: Any) -> AsyncIterator[tuple[RolloutWorker, Fleet, Stopping, Stopping]]:
    """A real rollout worker, and the fleet of engines "a" and "b" under its watch, both calm at first."""
    first, other = Stopping("a", said_load=CALM, step_s=2.0), Stopping("b", said_load=CALM)
    busy = rollout_worker.worker(first, other)
    async with watched(busy, first, other, heartbeat_timeout_s=SILENCE_S, **settings) as fleet:
        yield busy, fleet, first, other


@pytest.mark.parametrize("replies", [False, True], ids=["its process stops", "its device hangs"])
@in_virtual_time
async def test_requests_of_an_engine_that_stops_continue_elsewhere_from_their_prefix(replies: bool) -> None:
    async with watching() as (busy, fleet, stopping, other):
        running = asyncio.create_task(busy.run_group(rollout_worker.item()))
        await asyncio.sleep(5.0)
        assert stopping.num_chunks > 0, "it has the group, and has begun"
        stopping.hangs, stopping.is_stopped = True, not replies
        stopping.said_load = replace(CALM, still_s=SILENCE_S - 1)
        await asyncio.sleep(SILENCE_S / 2)
        assert fleet.lost_engines == {}, "half the time is not over"
        stopping.said_load = replace(CALM, still_s=SILENCE_S + 1)
        group = await asyncio.wait_for(running, SILENCE_S / 2 + SOON_S)
        assert [rollout_worker.generated(t) for t in group.trajectories] == [rollout_worker.ANSWER] * 4
        assert min(len(tokens) for tokens in other.calls[0].token_ids) > len(rollout_worker.item().prompt.token_ids)
        reason = "it has requests and produced no token for 41 s" if replies else "did not reply to polls for"
        assert reason in fleet.lost_engines["a"]


@in_virtual_time
async def test_an_engine_that_is_dead_is_lost_at_once_and_one_whose_polls_fail_after_a_while() -> None:
    async with watching(max_engine_restarts=9, restart_engine=never) as (_busy, fleet, one, other):
        await asyncio.sleep(SOON_S)
        one.poll_error = RuntimeError("something else")
        await asyncio.sleep(SILENCE_S / 2)
        assert fleet.lost_engines == {}
        other.said_load = None
        await asyncio.sleep(SOON_S)
        assert fleet.lost_engines == {"b": "starting (EngineDead: b does not answer)"}, "it is polled all the while"
        await asyncio.sleep(SILENCE_S)
        assert list(fleet.lost_engines) == ["a", "b"]


@in_virtual_time
async def test_an_engine_that_starts_is_not_polled_and_a_new_one_has_its_own_time() -> None:
    new = Stopping("a")

    async def restart(name: str, _number: int) -> int:
        engines[name] = LocalActor(new)
        await asyncio.sleep(20 * SILENCE_S)  # it replies to no poll all the while
        new.said_load = CALM
        return 1

    async with watching(restart_engine=restart, max_engine_restarts=1) as (_busy, fleet, stopping, _other):
        engines: Any = fleet._engines
        await asyncio.sleep(SOON_S)
        stopping.stop()
        await asyncio.sleep(20 * SILENCE_S)
        assert fleet.lost_engines["a"].startswith("starting")
        await asyncio.sleep(20 * SILENCE_S)
        assert fleet.lost_engines == {}


@in_virtual_time
async def test_silences_that_end_do_not_add_up_and_delay_no_poll_of_the_others() -> None:
    async with watching() as (_busy, fleet, moody, _other):
        for _ in range(10):
            moody.is_stopped = False
            await asyncio.sleep(SOON_S)
            moody.is_stopped, num_polls = True, fleet._probes["b"].num_polls
            await asyncio.sleep(SILENCE_S / 2)
            assert fleet._probes["b"].num_polls - num_polls >= SILENCE_S / 2 / (POLL_S + 0.1) - 1
            assert (fleet._probes["a"].load_now, fleet._probes["b"].load) == (None, CALM)
        moody.is_stopped, loop = False, asyncio.get_running_loop()
        for _ in range(20):  # the driver's own process was stopped, so every reply is late
            await asyncio.sleep(SOON_S)
            loop._jumping.now += 3 * SILENCE_S  # type: ignore[attr-defined]
        assert fleet.lost_engines == {}


def test_what_workers_do_adds_up_and_what_an_engine_reports_does_not() -> None:
    one = WorkerReport(
        limits={"e0": 16}, in_flight={"e0": 10}, num_queued=2, migrated_requests=3, migrated_tokens=900,
        recovered_requests=2, recovered_tokens=30, lost_tokens=7, lost_engines={},
    )  # fmt: skip
    other = replace(one, in_flight={"e0": 20}, num_queued=5, migrated_requests=4, migrated_tokens=1000)
    load = EngineStatus(running=30, waiting=1, kv_usage_frac=0.5, num_preemptions=None)
    assert load_metrics([one, other], {"e0": load}) == {
        "engine/queued": 7,
        "engine/repacked_requests": 7,
        "engine/repacked_tokens": 1900,
        "engine/migrated_requests": 4,
        "engine/migrated_tokens": 60,
        "discarded/failed_attempt_tokens": 14,
        "engine/limit/e0": 32,
        "engine/in_flight/e0": 30,
        "engine/running/e0": 30,
        "engine/waiting/e0": 1,
        "engine/kv_usage_frac/e0": 0.5,
    }


A0, B0 = {"a": (1, 0, 10)}, {"b": (2, 0, 10)}
"""Engine -> when it began, its busy seconds, and how long it has been up."""
NO_B = {"b": (2, 90, 100)}
"""What b reported before it was lost."""


@pytest.mark.parametrize(
    ("story", "idle"),
    [
        ([(0, "", {"a": (1, 50, 100)})], None),
        ([(0, "", A0), (10, "", {"a": (1, 10, 20), "b": (2, 0, 40)})], None),  # b has reported only once
        # a had nothing, b for a quarter of its time.
        ([(0, "", A0 | B0), (10, "", A0 | B0), (20, "", {"a": (1, 0, 30), "b": (2, 15, 30)})], (1 + 0.25) / 2),
        # b was there for 90 s of 100.
        (
            [
                (0, "", A0 | B0),
                (90, "", {"a": (1, 90, 100)} | NO_B),
                (91, "b", {"a": (1, 91, 101)} | NO_B),
                (100, "b", {"a": (1, 100, 110)} | NO_B),
            ],
            (0 + 0.1) / 2,
        ),
        # A loss that was not noticed costs as much.
        (
            [
                (0, "", A0 | B0),
                (40, "", {"a": (1, 40, 50), "b": (2, 40, 50)}),
                (100, "", {"a": (1, 100, 110), "b": (60, 30, 35)}),
            ],
            (0 + 0.3) / 2,
        ),
        ([(at, "b", {"a": (1, at, at + 1)}) for at in (0, 10, 20)], 0.5),  # never there
    ],
)
def test_how_idle_engines_are(
    story: list[tuple[float, str, dict[str, tuple[int, int, int]]]], idle: float | None
) -> None:
    clock = [0.0]
    meter = EngineIdleMeter(clock=lambda: clock[0])
    for seconds, lost, reported in story:
        clock[0] = seconds
        times = {name: EngineTimes(began_at=a, busy_s=busy, up_s=up) for name, (a, busy, up) in reported.items()}
        meter.add(times, lost)
    expected = None if idle is None else pytest.approx(idle)
    assert meter.take_frac(num_replicas=2) == expected
    assert meter.take_frac(num_replicas=2) == expected, "nothing new"
    if idle is not None:  # the share is of the time since the call before
        for busy in (100.0, 200.0):
            clock[0] += 100.0
            meter.add({name: EngineTimes(began_at=99, busy_s=busy, up_s=busy) for name in "ab"}, "")
        assert meter.take_frac(num_replicas=2) == pytest.approx(0.0)
