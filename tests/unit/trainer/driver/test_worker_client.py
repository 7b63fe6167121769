"""Groups on their way to a rollout worker and back: how many calls they take, and what a call that fails costs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rollout.errors import WorkerLost
from rollout.types import Group, Prompt, RolloutRequest, Trajectory
from rollout.worker.group_server import FLUSH_S, MAX_BYTES, GroupServer
from tests.fakes.local_actor import LocalActor, ServesGroups
from tests.fakes.trajectories import make_turn
from tests.fakes.virtual_time import run_virtual
from trainer.driver import fleet as fleet_module
from trainer.driver.fleet import Fleet

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer="")


def item(group_id: int) -> RolloutRequest:
    return RolloutRequest(group_id=group_id, prompt=PROMPT, start_version=0)


def group_of(item: RolloutRequest, *, num_tokens: int = 4) -> Group:
    turn = make_turn([], np.full(num_tokens, item.group_id, np.int32), [(0, num_tokens)])
    answer = Trajectory.of_turns(
        [turn], prompt_id="p", sample_index=0, reward=1.0, reward_parts={}, status="completed", timings={}
    )
    return Group(group_id=item.group_id, prompt_id=item.prompt.prompt_id, trajectories=[answer], start_version=0)


class Worker(ServesGroups):
    """Takes `seconds[group_id]` for a group; counts calls."""

    def __init__(self, seconds: dict[int, float] | float = 1.0, *, num_tokens: int = 4) -> None:
        super().__init__()
        self.seconds, self.num_tokens = seconds, num_tokens
        self.submitted: list[list[int]] = []
        self.answered: list[list[int]] = []
        self.ran: list[int] = []
        self.cancelled: list[int] = []

    async def run_group(self, item: RolloutRequest) -> Group:
        self.ran.append(item.group_id)
        try:
            await asyncio.sleep(self.seconds if isinstance(self.seconds, float) else self.seconds[item.group_id])
        except asyncio.CancelledError:
            self.cancelled.append(item.group_id)
            raise
        return group_of(item, num_tokens=self.num_tokens)

    async def submit(self, items: Any, given_up: Any) -> None:
        self.submitted.append([item.group_id for item in items.values()])
        await super().submit(items, given_up)

    async def ended(self) -> Any:
        ended = await super().ended()
        self.answered.append(sorted(group.group_id for group in ended.values() if isinstance(group, Group)))
        return ended


def run_groups(worker: Worker, group_ids: range, *, group_timeout_s: float = 100.0) -> tuple[list[Group], float]:
    """What the fleet brings, and when the last of it came."""

    async def main() -> tuple[list[Group], float]:
        fleet = Fleet({}, [LocalActor(worker)], group_timeout_s=group_timeout_s)
        groups = await asyncio.gather(*(fleet.run_group(item(group_id)) for group_id in group_ids))
        return groups, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_what_begins_and_ends_together_takes_one_call_each_way() -> None:
    worker = Worker(1.0)
    groups, ended_s = run_groups(worker, range(100))
    assert [group.group_id for group in groups] == list(range(100))
    assert [turn.token_ids[0] for group in groups for turn in group.trajectories[0].turns()] == list(range(100))
    assert worker.submitted == [list(range(100))]
    assert worker.answered == [list(range(100))]
    assert ended_s == pytest.approx(1.0), "what comes alone waits for nothing"


def test_what_comes_soon_after_an_answer_waits_a_moment_and_comes_together() -> None:
    num_groups, apart_s = 1_000, FLUSH_S / 20
    worker = Worker({group_id: 1.0 + group_id * apart_s for group_id in range(num_groups)})
    groups, ended_s = run_groups(worker, range(num_groups))
    assert [group.group_id for group in groups] == list(range(num_groups))
    assert len(worker.answered) <= num_groups / 20 + 2
    assert ended_s <= 1.0 + num_groups * apart_s + 2 * FLUSH_S


def test_a_large_group_has_an_answer_for_itself() -> None:
    worker = Worker(1.0, num_tokens=MAX_BYTES // 8)
    groups, ended_s = run_groups(worker, range(10))
    assert sorted(worker.answered) == [[group_id] for group_id in range(10)]
    assert [group.group_id for group in groups] == list(range(10))
    assert ended_s == pytest.approx(1.0, abs=FLUSH_S), "what is full is not kept waiting"


def test_a_group_that_is_given_up_ends_in_the_worker_and_the_others_do_not() -> None:
    worker = Worker({0: 1_000.0, 1: 5.0, 2: 1_000.0})

    async def main() -> None:
        fleet = Fleet({}, [LocalActor(worker)], group_timeout_s=100.0)
        first, second, third = (asyncio.create_task(fleet.run_group(item(group_id))) for group_id in range(3))
        await asyncio.sleep(3.0)
        first.cancel()
        await asyncio.sleep(1.0)
        assert worker.cancelled == [0]
        assert (await second).group_id == 1
        with pytest.raises(TimeoutError, match="group 2 timed out after 160 s on rollout worker 0"):
            await third
        await asyncio.sleep(1.0)
        assert worker.cancelled == [0, 2]
        assert fleet._workers[0].num_groups == 0
        client = fleet._workers[0].client
        assert client is not None
        assert not client._waiting
        assert not client._cancelled
        assert not worker.server._running

    run_virtual(main())


def test_a_group_that_was_given_up_before_it_was_sent_is_not_begun() -> None:
    worker = Worker(1.0)

    async def main() -> None:
        fleet = Fleet({}, [LocalActor(worker)], group_timeout_s=100.0)
        await fleet.run_group(item(0))
        second = asyncio.create_task(fleet.run_group(item(1)))
        await asyncio.sleep(0)
        third = asyncio.create_task(fleet.run_group(item(2)))  # while the call for the second is on its way
        await asyncio.sleep(FLUSH_S / 4)
        third.cancel()
        await second

    run_virtual(main())
    assert worker.ran == [0, 1]


def test_the_error_of_one_group_is_its_own() -> None:
    class NoPickle(ValueError):
        """Cannot leave its process: it is local to a function."""

    class Failing(Worker):
        async def run_group(self, item: RolloutRequest) -> Group:
            if item.group_id == 1:
                raise NoPickle("a defect")
            return await super().run_group(item)

    async def main() -> list[Any]:
        fleet = Fleet({}, [LocalActor(Failing(1.0))], group_timeout_s=100.0)
        return await asyncio.gather(*(fleet.run_group(item(index)) for index in range(3)), return_exceptions=True)

    first, second, third = run_virtual(main())
    assert (first.group_id, third.group_id) == (0, 2)
    assert type(second) is RuntimeError
    assert str(second) == "NoPickle: a defect"


def test_a_group_that_something_inside_it_cancelled_fails_at_once() -> None:
    class Cancelled(Worker):
        async def run_group(self, item: RolloutRequest) -> Group:
            inner = asyncio.create_task(asyncio.sleep(50.0))
            asyncio.get_running_loop().call_later(1.0, inner.cancel)
            await inner
            return await super().run_group(item)

    async def main() -> None:
        fleet = Fleet({}, [LocalActor(Cancelled())], group_timeout_s=100.0)
        with pytest.raises(RuntimeError, match="was cancelled"):
            await fleet.run_group(item(0))
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    run_virtual(main())


def test_what_was_given_up_in_a_call_that_failed_is_given_up_in_the_next() -> None:
    worker = Worker(1_000.0)
    works, failures = worker.submit, [OSError("too large to send")]

    async def main() -> None:
        fleet = Fleet({}, [LocalActor(worker)], group_timeout_s=5_000.0)
        running = asyncio.create_task(fleet.run_group(item(0)))
        await asyncio.sleep(1.0)

        async def fails_once(*args: Any) -> None:
            if failures:
                raise failures.pop()
            await works(*args)

        worker.submit = fails_once  # type: ignore[method-assign]
        running.cancel()
        await asyncio.sleep(3.0)
        assert worker.cancelled == [0]

    run_virtual(main())


@pytest.mark.parametrize("call", ["submit", "ended"])
def test_a_call_that_fails_costs_the_groups_it_may_have_carried_and_no_others(call: str) -> None:
    worker = Worker(5.0)
    works, failures = getattr(worker, call), [OSError("too large to send")]

    async def fails_once(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await works(*args)

    async def main() -> None:
        setattr(worker, call, fails_once)
        fleet = Fleet({}, [LocalActor(worker)], group_timeout_s=100.0)
        with pytest.raises(OSError, match="too large to send"):
            await fleet.run_group(item(0))
        assert (await fleet.run_group(item(1))).group_id == 1
        assert worker.cancelled == ([0] if call == "ended" else [])

    run_virtual(main())


def test_a_lost_worker_fails_all_its_groups_at_once_and_is_never_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())
    worker = Worker(50.0)
    actor = LocalActor(worker)

    async def main() -> None:
        fleet = Fleet({}, [actor], group_timeout_s=100.0)
        running = [asyncio.create_task(fleet.run_group(item(group_id))) for group_id in range(5)]
        await asyncio.sleep(1.0)
        running.append(asyncio.create_task(fleet.run_group(item(5))))
        await asyncio.sleep(0)
        actor.die()
        await asyncio.sleep(FLUSH_S)
        assert all(isinstance(task.exception(), WorkerLost) for task in running)
        num_calls = len(worker.submitted)
        client = fleet._workers[0].client
        assert client is not None
        with pytest.raises(WorkerLost):
            await client.run(item(6))
        await asyncio.sleep(10.0)
        assert len(worker.submitted) == num_calls
        assert all(task.done() for task in client._tasks.values())

    run_virtual(main())


def test_a_worker_that_ends_after_the_run_is_no_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "kill_actor", lambda actor: actor.die())
    actor = LocalActor(Worker({0: 1.0, 1: 50.0}))

    async def main() -> None:
        fleet = Fleet({}, [actor], group_timeout_s=100.0)
        running = asyncio.create_task(fleet.run_group(item(1)))
        await fleet.run_group(item(0))
        fleet.close()
        actor.die()
        with pytest.raises(WorkerLost, match="the run is over"):
            await running
        await asyncio.sleep(1.0)
        assert fleet._workers[0].lost == ""

    run_virtual(main())
    assert caplog.text == ""


def test_a_server_that_is_closed_ends_what_runs() -> None:
    async def main() -> None:
        worker = Worker(50.0)
        server = GroupServer(worker.run_group)
        server.submit({0: item(0)}, ())
        await asyncio.sleep(1.0)
        server.close()
        await asyncio.sleep(0)
        assert worker.cancelled == [0]

    run_virtual(main())
