from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.buffer.rollout_buffer import MAX_WORKER_LOSSES, RolloutBuffer
from rollout.errors import BufferClosed, NoProgress, WorkerLost
from rollout.types import Group, Prompt, Trajectory
from tests.fakes.trajectories import make_turn
from tests.fakes.virtual_time import in_virtual_time, run_virtual

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.types import RolloutRequest


def prompt(name: str) -> Prompt:
    return Prompt(
        prompt_id=name, token_ids=np.array([5, 6], np.int32), text=f"<{name}>", answer="4", metadata={"level": 2}
    )


def new_buffer(**changes: Any) -> RolloutBuffer:
    settings = {"groups_per_step": 2, "max_staleness": 1, "max_retries": 1, "max_filtered_batches_per_step": 3}
    return RolloutBuffer(**({"step": changes.get("version", 0)} | settings | changes))


def group_of(item: RolloutRequest, *, num_tokens: int = 3, start_version: int | None = None) -> Group:
    turn = make_turn([], np.zeros(num_tokens, np.int32), [(item.start_version, num_tokens)])
    response = Trajectory.of_turns([turn], reward=1.0, status="completed")
    version = item.start_version if start_version is None else start_version
    return Group(
        group_id=item.group_id, prompt_id=item.prompt.prompt_id, trajectories=[response], start_version=version
    )


async def admit_and_claim(buffer: RolloutBuffer, *names: str) -> list[RolloutRequest]:
    for name in names:
        buffer.admit(prompt(name))
    return [await buffer.claim() for _ in names]


async def let_the_learner_wait(buffer: RolloutBuffer, step: int, num_times: int) -> list[int]:
    """For the groups of `step`, of which none is ready. Returns the slots that are open after each time."""
    taking = asyncio.create_task(buffer.take(step))
    await asyncio.sleep(0)
    found: list[int] = []
    for _ in range(num_times):
        buffer.grow_slots()
        found.append(buffer.stats().num_slots)
    taking.cancel()
    await asyncio.wait([taking])
    return found


async def train_one(buffer: RolloutBuffer, step: int, *names: str) -> None:
    for item in await admit_and_claim(buffer, *names):
        buffer.finish(group_of(item))
    await buffer.take(step)


async def blocks(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Starts it and asserts that it waits although an hour goes by."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(3600)
    assert not task.done()
    return task


@in_virtual_time
async def test_slots_run_out_after_s_plus_1_steps_of_groups() -> None:
    buffer = new_buffer(groups_per_step=2, max_staleness=1)
    for index in range(4):
        await buffer.wait_for_slot()
        buffer.admit(prompt(str(index)))
    waiting = await blocks(buffer.wait_for_slot())
    with pytest.raises(RuntimeError, match="all 4 slots are in use"):
        buffer.admit(prompt("one too many"))
    waiting.cancel()


@in_virtual_time
async def test_slot_is_not_freed_before_weights_land() -> None:
    buffer = new_buffer(max_staleness=0)
    await train_one(buffer, 0, "a", "b")
    waiting = await blocks(buffer.wait_for_slot())
    assert buffer.stats().num_training == 2
    buffer.release(0, version=1)
    await waiting
    assert buffer.admit(prompt("c")).start_version == 1
    assert buffer.stats().trained == 2


@pytest.mark.parametrize(
    ("max_staleness", "slots"),
    [(0, [2, 2, 2, 2]), (1, [4, 4, 4, 4]), (2, [6, 6, 6, 6]), (4, [6, 8, 10, 10])],
)
@in_virtual_time
async def test_slots_are_opened_step_by_step_while_the_learner_waits(max_staleness: int, slots: list[int]) -> None:
    buffer = new_buffer(max_staleness=max_staleness)
    await train_one(buffer, 0, "a", "b")
    buffer.release(0, version=1)
    assert await let_the_learner_wait(buffer, 1, 4) == slots
    for _ in range(slots[-1]):
        await asyncio.wait_for(buffer.wait_for_slot(), 1.0)
        buffer.admit(prompt("c"))
    with pytest.raises(RuntimeError, match=f"all {slots[-1]} slots are in use"):
        buffer.admit(prompt("one too many"))


@in_virtual_time
async def test_slots_stay_as_they_are_before_the_first_step_and_while_groups_are_not_what_is_missing() -> None:
    buffer = new_buffer(max_staleness=3, version=7)
    taking = asyncio.create_task(buffer.take(7))
    await asyncio.sleep(0)
    buffer.grow_slots()  # nothing can be ready before the first step
    for item in await admit_and_claim(buffer, "a", "b"):
        buffer.finish(group_of(item))
    await taking
    buffer.release(7, version=8)
    buffer.grow_slots()  # nobody takes: a batch is being built
    taking = asyncio.create_task(buffer.take(8))
    await asyncio.sleep(0)
    for item in await admit_and_claim(buffer, "c", "d"):
        buffer.finish(group_of(item))
    buffer.grow_slots()  # the groups are there, and will be taken in a moment
    await taking
    assert buffer.stats().num_slots == 4


@in_virtual_time
async def test_no_slots_are_opened_for_groups_that_no_step_is_left_for() -> None:
    buffer = new_buffer(max_staleness=3, end_step=2)
    await train_one(buffer, 0, "a", "b")
    buffer.release(0, version=1)
    await admit_and_claim(buffer, "c", "d")
    assert await let_the_learner_wait(buffer, 1, 2) == [4, 4]


@in_virtual_time
async def test_releasing_a_later_step_releases_the_ones_it_overtook() -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=2)
    await train_one(buffer, 0, "a")
    await train_one(buffer, 1, "b")
    buffer.release(1, version=2)
    assert (buffer.stats().num_slots_used, buffer.stats().version) == (0, 2)
    with pytest.raises(ValueError, match="step 0 was released but not taken, or released twice"):
        buffer.release(0, version=1)


@in_virtual_time
async def test_release_refuses_more_versions_than_steps() -> None:
    buffer = new_buffer()
    await train_one(buffer, 0, "a", "b")
    with pytest.raises(ValueError, match="step 0 was released with version 2"):
        buffer.release(0, version=2)


@in_virtual_time
async def test_take_returns_groups_by_id_whatever_order_they_finish_in() -> None:
    buffer = new_buffer(groups_per_step=3)
    items = await admit_and_claim(buffer, "a", "b", "c")
    for item in reversed(items):
        buffer.finish(group_of(item))
    assert [group.group_id for group in await buffer.take(0)] == [0, 1, 2]


@in_virtual_time
async def test_steps_are_taken_in_order() -> None:
    with pytest.raises(ValueError, match="step 5 was taken out of order; the next one is 4"):
        await new_buffer(version=4).take(5)


@in_virtual_time
async def test_take_says_which_old_group_it_waits_for_and_counts_the_time() -> None:
    buffer = new_buffer(groups_per_step=1, clock=asyncio.get_running_loop().time)
    (old,) = await admit_and_claim(buffer, "old")
    await train_one(buffer, 0, "a")
    buffer.release(0, version=1)
    (young,) = await admit_and_claim(buffer, "young")
    buffer.finish(group_of(young))
    taking = await blocks(buffer.take(1))
    assert buffer.waiting_for == "step 1 waits for 1 of the unfinished groups that are due, although 1 are ready (0)"
    assert buffer.stats().oldest_age == 1
    buffer.finish(group_of(old))
    assert [group.group_id for group in await taking] == [0]
    assert buffer.waiting_for == ""
    assert buffer.stats().oldest_wait_s == buffer.stats().batch_wait_s == 3600


@in_virtual_time
async def test_a_filtered_group_makes_room_and_its_refill_starts_at_the_live_version() -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=1)
    (straggler,) = await admit_and_claim(buffer, "straggler")
    await train_one(buffer, 0, "a")
    buffer.release(0, version=1)
    buffer.filter(straggler.group_id, "zero_variance")
    buffer.admit(prompt("b"))
    assert buffer.admit(prompt("c")).start_version == 1
    stats = buffer.stats()
    assert (stats.filtered, stats.replaced, stats.discarded_tokens) == ({"zero_variance": 1}, 1, 0)


@in_virtual_time
async def test_a_failed_group_comes_back_first_and_as_young_as_a_new_one() -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=2)
    (item,) = await admit_and_claim(buffer, "a")
    await train_one(buffer, 0, "b")
    buffer.release(0, version=1)
    buffer.admit(prompt("c"))
    assert buffer.fail(item.group_id, RuntimeError("lost")) == "retried"
    retried = await buffer.claim()
    assert (retried.group_id, retried.attempt, retried.start_version) == (0, 1, 1)
    with pytest.raises(ValueError, match="claimed with start_version 1 but finished with 0"):
        buffer.finish(group_of(item))
    buffer.finish(group_of(retried))


@in_virtual_time
async def test_a_group_that_fails_too_often_is_dropped_and_counted() -> None:
    buffer = new_buffer(max_retries=1)
    (item,) = await admit_and_claim(buffer, "a")
    buffer.fail(item.group_id, RuntimeError("first"))
    assert buffer.fail((await buffer.claim()).group_id, TimeoutError("second")) == "dropped"
    stats = buffer.stats()
    assert (stats.failed, stats.retried, stats.dropped, stats.replaced) == (2, 1, {"TimeoutError": 1}, 1)
    assert stats.num_slots_used == 0


@in_virtual_time
async def test_a_run_that_filters_everything_stops_with_the_reasons() -> None:
    buffer = new_buffer(groups_per_step=2, max_filtered_batches_per_step=3)
    waiting = await blocks(buffer.take(0))
    for index in range(6):
        (item,) = await admit_and_claim(buffer, str(index))
        buffer.filter(item.group_id, "zero_variance" if index else "rewards_failed")
    (item,) = await admit_and_claim(buffer, "last")
    with pytest.raises(NoProgress, match=r"7 groups were filtered \(zero_variance: 6, rewards_failed: 1\)"):
        buffer.filter(item.group_id, "zero_variance")
    with pytest.raises(BufferClosed) as caught:
        await waiting
    assert isinstance(caught.value.__cause__, NoProgress)


@in_virtual_time
async def test_a_step_that_is_ready_starts_the_count_of_filtered_groups_anew_taken_or_not() -> None:
    buffer = new_buffer(groups_per_step=2, max_filtered_batches_per_step=2)
    for _ in range(2):  # the learner is slow: nothing is taken
        for worth in (False, False, True) * 2:
            (item,) = await admit_and_claim(buffer, "x")
            if worth:
                buffer.finish(group_of(item))
            else:
                buffer.filter(item.group_id, "zero_variance")
    assert (buffer.stats().num_ready, buffer.stats().filtered) == (4, {"zero_variance": 8})


@in_virtual_time
async def test_fewer_ready_groups_than_a_step_needs_are_no_progress() -> None:
    buffer = new_buffer(groups_per_step=2, max_filtered_batches_per_step=2)
    (item,) = await admit_and_claim(buffer, "x")
    buffer.finish(group_of(item))
    with pytest.raises(NoProgress, match="5 groups were filtered"):
        for _ in range(5):
            (item,) = await admit_and_claim(buffer, "x")
            buffer.filter(item.group_id, "zero_variance")


@in_virtual_time
async def test_a_run_in_which_everything_fails_stops_with_the_first_cause() -> None:
    buffer = new_buffer(max_retries=0, max_filtered_batches_per_step=3)
    first = ConnectionError("no route to engine")
    for error in (first, RuntimeError("later")):
        (item,) = await admit_and_claim(buffer, "x")
        buffer.fail(item.group_id, error)
    (item,) = await admit_and_claim(buffer, "x")
    with pytest.raises(NoProgress, match="ConnectionError: no route to engine") as caught:
        buffer.fail(item.group_id, RuntimeError("latest"))
    assert caught.value.__cause__ is first


@in_virtual_time
async def test_one_success_between_failures_keeps_the_run_going() -> None:
    buffer = new_buffer(max_retries=0, max_filtered_batches_per_step=2, groups_per_step=8)
    for index in range(10):
        (item,) = await admit_and_claim(buffer, "x")
        if index % 2:
            buffer.finish(group_of(item))
        else:
            buffer.fail(item.group_id, RuntimeError("lost"))
    assert buffer.stats().dropped == {"RuntimeError": 5}


WAITS: dict[str, Callable[[RolloutBuffer], Coroutine[Any, Any, Any]]] = {
    "slot": lambda buffer: buffer.wait_for_slot(),
    "claim": lambda buffer: buffer.claim(),
    "take": lambda buffer: buffer.take(0),
}


@pytest.mark.parametrize("wait", WAITS)
@in_virtual_time
async def test_close_wakes_every_waiter_with_the_cause(wait: str) -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=0)
    await admit_and_claim(buffer, "a")
    waiting = [await blocks(WAITS[wait](buffer)) for _ in range(3 if wait != "take" else 1)]
    cause = OSError("disk full")
    buffer.close(cause)
    buffer.close()
    for task in waiting:
        with pytest.raises(BufferClosed, match="OSError: disk full") as caught:
            await task
        assert caught.value.__cause__ is cause
    with pytest.raises(BufferClosed):
        await WAITS[wait](buffer)


@in_virtual_time
async def test_a_cancelled_claimer_does_not_take_a_prompt_with_it() -> None:
    buffer = new_buffer()
    first, second = await blocks(buffer.claim()), await blocks(buffer.claim())
    buffer.admit(prompt("a"))
    first.cancel()
    assert (await second).prompt.prompt_id == "a"


@in_virtual_time
async def test_many_claimers_share_prompts_without_loss_or_repetition() -> None:
    buffer = new_buffer(groups_per_step=50)
    claims = [asyncio.create_task(buffer.claim()) for _ in range(100)]
    await asyncio.sleep(0)
    for index in range(100):
        buffer.admit(prompt(str(index)))
    assert sorted(item.group_id for item in await asyncio.gather(*claims)) == list(range(100))


@pytest.mark.parametrize("verb", ["finish", "filter", "fail"])
@in_virtual_time
async def test_a_group_ends_once_and_only_after_it_was_claimed(verb: str) -> None:
    buffer = new_buffer(max_retries=0)

    def end(item: RolloutRequest) -> None:
        match verb:
            case "finish":
                buffer.finish(group_of(item))
            case "filter":
                buffer.filter(item.group_id, "x")
            case _:
                buffer.fail(item.group_id, RuntimeError("x"))

    item = buffer.admit(prompt("a"))
    with pytest.raises(ValueError, match=f"cannot {verb} group 0: it is not running"):
        end(item)
    end(await buffer.claim())
    with pytest.raises(ValueError, match=f"cannot {verb} group 0: it is not running"):
        end(item)


@in_virtual_time
async def test_a_checkpoint_owes_every_prompt_that_its_steps_did_not_train() -> None:
    """Step 0 is trained, step 1 is taken but not trained; one group each is ready, running, queued and filtered."""
    buffer = new_buffer(groups_per_step=1, max_staleness=6)
    await train_one(buffer, 0, "trained")
    buffer.release(0, version=1)
    assert await let_the_learner_wait(buffer, 1, 4) == [3, 4, 5, 6]
    await train_one(buffer, 1, "taken")
    ready, _running, filtered = await admit_and_claim(buffer, "ready", "running", "filtered")
    buffer.finish(group_of(ready))
    buffer.filter(filtered.group_id, "zero_variance")
    buffer.admit(prompt("queued"))
    state = json.loads(json.dumps(buffer.state_dict(1)))
    assert state["num_finished"] == 2, "taken and ready: their answers are lost"
    state["prompts"][2] = {"group_id": 3, "prompt": {"prompt_id": "running"}}  # as checkpoints were once

    resumed = new_buffer(groups_per_step=1, max_staleness=1, version=1)
    resumed.load_state_dict(state, prompt)
    with pytest.raises(RuntimeError, match="4 prompts of the resumed run come first"):
        resumed.admit(prompt("new"))
    back: list[tuple[int, str, int]] = []
    for _ in range(2):
        item = resumed.readmit()
        assert item is not None
        back.append((item.group_id, item.prompt.prompt_id, item.start_version))
    assert back == [(1, "taken", 1), (2, "ready", 1)]
    with pytest.raises(RuntimeError, match="all 2 slots are in use"):
        resumed.readmit()
    owed = [entry["prompt_id"] for entry in resumed.state_dict(1)["prompts"]]
    assert owed == ["taken", "ready", "running", "queued"]
    stats = resumed.stats()
    assert (stats.trained, stats.filtered, stats.discarded_tokens) == (1, {"zero_variance": 1}, 0)


@in_virtual_time
async def test_a_checkpoint_can_be_written_whatever_the_data_set_has_in_its_columns() -> None:
    buffer = new_buffer()
    odd = replace(prompt("a"), metadata={"when": date(2026, 1, 31), "image": b"bytes", 3: {1, 2}})
    buffer.admit(odd)
    resumed = new_buffer()
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict(0))), {"a": odd}.__getitem__)
    item = resumed.readmit()
    assert item is not None
    assert item.prompt is odd


@in_virtual_time
async def test_group_ids_go_on_after_a_resume() -> None:
    buffer = new_buffer()
    await train_one(buffer, 0, "a", "b")
    resumed = new_buffer(version=1)
    resumed.load_state_dict(buffer.state_dict(1), prompt)
    assert resumed.readmit() is None
    assert resumed.admit(prompt("c")).group_id == 2


@in_virtual_time
async def test_a_checkpoint_of_another_step_is_refused() -> None:
    buffer = new_buffer()
    with pytest.raises(ValueError, match="no checkpoint of step 1 can be made"):
        buffer.state_dict(1)
    await train_one(buffer, 0, "a", "b")
    with pytest.raises(ValueError, match="the checkpoint is of step 1, but this buffer starts at 0"):
        new_buffer().load_state_dict(buffer.state_dict(1), prompt)
    with pytest.raises(ValueError, match="not used yet"):
        buffer.load_state_dict(buffer.state_dict(1), prompt)


@pytest.mark.parametrize(
    ("name", "value"),
    [("groups_per_step", 0), ("max_staleness", -1), ("max_retries", -1), ("max_filtered_batches_per_step", 0)],
)
def test_a_size_out_of_range_is_refused_by_name(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= {value + 1}, got {value}"):
        new_buffer(**{name: value})


# --- the end of a run, and lost workers ---

B, STEPS = 3, 8


class Fates:
    """What becomes of groups, drawn anew for each."""

    def __init__(self, seed: int, *, filtered: float = 0.0, failed: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.filtered, self.failed = filtered, failed
        self.ended: Counter[str] = Counter()
        self.trained: list[int] = []

    async def roll_out(self, buffer: RolloutBuffer, item: RolloutRequest) -> None:
        await asyncio.sleep(self.rng.paretovariate(1.2))
        draw = self.rng.random()
        if draw < self.filtered:
            buffer.filter(item.group_id, "zero_variance")
        elif draw < self.filtered + self.failed:
            self.ended[buffer.fail(item.group_id, OSError("no answer"))] += 1
        else:
            buffer.finish(group_of(item))
            self.ended["finished"] += 1


async def play(buffer: RolloutBuffer, fates: Fates, *, first: int = 0, end: int = STEPS, rest_s: float = 100.0) -> None:
    """The loops of a run around the buffer, and some time after its last step."""

    async def admit() -> None:
        while True:
            await buffer.wait_for_slot()
            if buffer.readmit() is None:
                buffer.admit(prompt("p"))

    async def roll_out() -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                groups.create_task(fates.roll_out(buffer, await buffer.claim()))

    loops = [asyncio.create_task(admit()), asyncio.create_task(roll_out())]
    for step in range(first, end):
        fates.trained += [group.group_id for group in await buffer.take(step)]
        await asyncio.sleep(fates.rng.expovariate(1.0))
        buffer.release(step, version=step + 1)
    await asyncio.sleep(rest_s)
    for loop in loops:
        assert not loop.done()
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def with_end(**changes: Any) -> RolloutBuffer:
    return new_buffer(**({"groups_per_step": B, "max_filtered_batches_per_step": 1000, "end_step": STEPS} | changes))


@pytest.mark.parametrize("max_staleness", [0, 1, 4, 20])
@pytest.mark.parametrize(("filtered", "failed"), [(0.0, 0.0), (0.4, 0.0), (0.2, 0.3)])
def test_every_group_that_is_generated_to_its_end_is_trained(
    max_staleness: int, filtered: float, failed: float
) -> None:
    for seed in range(5):
        buffer, fates = with_end(max_staleness=max_staleness), Fates(seed, filtered=filtered, failed=failed)
        run_virtual(play(buffer, fates))
        stats = buffer.stats()
        assert fates.ended["finished"] == len(fates.trained) == STEPS * B
        assert stats.num_slots_used == 0
        assert stats.admitted == STEPS * B + stats.replaced, "those that led nowhere were replaced, and no others came"
        if filtered:
            assert stats.replaced > 0


@in_virtual_time
async def test_what_leaves_near_the_end_is_replaced_and_nothing_more() -> None:
    buffer = new_buffer(end_step=1, max_retries=0)
    first, second = await admit_and_claim(buffer, "a", "b")
    waiting = await blocks(buffer.wait_for_slot())  # two of four slots are free, and nobody needs them
    buffer.filter(first.group_id, "zero_variance")
    await asyncio.wait_for(waiting, 1.0)
    (third,) = await admit_and_claim(buffer, "c")
    waiting = await blocks(buffer.wait_for_slot())
    buffer.fail(second.group_id, OSError("no answer"))
    await asyncio.wait_for(waiting, 1.0)
    (fourth,) = await admit_and_claim(buffer, "d")
    for item in (third, fourth):
        buffer.finish(group_of(item))
    assert len(await buffer.take(0)) == 2
    waiting = await blocks(buffer.wait_for_slot())
    waiting.cancel()


def test_a_run_that_goes_on_with_more_steps_trains_every_prompt_once() -> None:
    first = with_end(max_staleness=2)
    fates = Fates(0)
    run_virtual(play(first, fates, end=STEPS - 3, rest_s=0.0))
    state = json.loads(json.dumps(first.state_dict(STEPS - 3)))
    again = with_end(max_staleness=2, version=STEPS - 3, end_step=STEPS + 4)
    again.load_state_dict(state, prompt)
    run_virtual(play(again, fates, first=STEPS - 3, end=STEPS + 4))
    assert sorted(fates.trained) == list(range((STEPS + 4) * B))


def test_a_resumed_run_that_owes_more_than_it_needs_keeps_the_rest_for_later() -> None:
    first, fates = with_end(max_staleness=4, end_step=None), Fates(0)
    run_virtual(play(first, fates, end=1, rest_s=0.0))
    again = with_end(max_staleness=4, version=1, end_step=2)
    again.load_state_dict(first.state_dict(1), prompt)
    run_virtual(play(again, fates, first=1, end=2))
    assert again.stats().num_slots_used == 0
    owed = [entry["group_id"] for entry in again.state_dict(2)["prompts"]]
    assert sorted(fates.trained + owed) == list(range(again.stats().admitted))
    assert len(fates.trained) == 2 * B


@in_virtual_time
async def test_a_lost_worker_costs_a_group_none_of_its_retries() -> None:
    buffer = new_buffer(max_retries=1, max_filtered_batches_per_step=1)
    (item,) = await admit_and_claim(buffer, "a")
    assert buffer.fail(item.group_id, WorkerLost("rollout worker 0 died")) == "retried"
    item = await buffer.claim()
    assert item.attempt == 0
    assert buffer.fail(item.group_id, OSError("its own fault")) == "retried"
    item = await buffer.claim()
    assert item.attempt == 1
    assert buffer.fail(item.group_id, WorkerLost("rollout worker 1 died")) == "retried"
    item = await buffer.claim()
    assert item.attempt == 1
    buffer.finish(group_of(item))
    stats = buffer.stats()
    assert (stats.failed, stats.retried, stats.dropped) == (3, 3, {})


@in_virtual_time
async def test_a_group_that_loses_one_worker_after_the_other_is_blamed_in_the_end() -> None:
    buffer = new_buffer(max_retries=1)
    (item,) = await admit_and_claim(buffer, "poison")
    lost = WorkerLost("a rollout worker died")
    for _ in range(MAX_WORKER_LOSSES + 1):  # the last of them costs its one retry
        assert buffer.fail(item.group_id, lost) == "retried"
        item = await buffer.claim()
    assert buffer.fail(item.group_id, lost) == "dropped"
    assert buffer.stats().dropped == {"WorkerLost": 1}
