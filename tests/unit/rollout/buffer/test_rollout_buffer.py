from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.buffer.rollout_buffer import MAX_WORKER_LOSSES, RolloutBuffer
from rollout.errors import BufferClosed, NoProgress, WorkerLost
from rollout.types import Group, Prompt, Trajectory
from tests.fakes.trajectories import make_turn
from tests.fakes.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rollout.types import RolloutRequest


def prompt(name: str) -> Prompt:
    return Prompt(prompt_id=name, token_ids=np.array([5, 6], np.int32), text=f"<{name}>", answer="4")


def new_buffer(**changes: Any) -> RolloutBuffer:
    settings: dict[str, Any] = {
        "groups_per_step": 2,
        "max_staleness": 1,
        "max_retries": 1,
        "max_filtered_batches_per_step": 3,
    }
    return RolloutBuffer(**({"step": changes.get("version", 0)} | settings | changes))


def group_of(item: RolloutRequest, *, num_tokens: int = 3) -> Group:
    turn = make_turn([], np.zeros(num_tokens, np.int32), [(item.start_version, num_tokens)])
    response = Trajectory.of_turns([turn], reward=1.0, status="completed")
    names = {"group_id": item.group_id, "prompt_id": item.prompt.prompt_id}
    return Group(**names, trajectories=[response], start_version=item.start_version)


async def admit_and_claim(buffer: RolloutBuffer, *names: str) -> list[RolloutRequest]:
    for name in names:
        buffer.admit(prompt(name))
    return [await buffer.claim() for _ in names]


async def admit_and_finish(buffer: RolloutBuffer, *names: str) -> None:
    for item in await admit_and_claim(buffer, *names):
        buffer.finish(group_of(item))


async def train_one(buffer: RolloutBuffer, step: int, *names: str, releases: bool = False) -> None:
    await admit_and_finish(buffer, *names)
    await buffer.take(step)
    if releases:
        buffer.release(step, version=step + 1)


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


async def blocks(waiting: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Starts it and asserts that it waits although an hour goes by."""
    task = asyncio.create_task(waiting)
    await asyncio.sleep(3600)
    assert not task.done()
    return task


# Slots


@pytest.mark.parametrize(
    ("max_staleness", "slots"), [(0, [2, 2, 2, 2]), (1, [4, 4, 4, 4]), (2, [6, 6, 6, 6]), (4, [6, 8, 10, 10])]
)
@in_virtual_time
async def test_slots_are_opened_step_by_step_while_the_learner_waits_up_to_s_plus_1_steps_of_groups(
    max_staleness: int, slots: list[int]
) -> None:
    buffer = new_buffer(max_staleness=max_staleness)
    await train_one(buffer, 0, "a", "b", releases=True)
    assert await let_the_learner_wait(buffer, 1, 4) == slots
    for _ in range(slots[-1]):
        await asyncio.wait_for(buffer.wait_for_slot(), 1.0)
        buffer.admit(prompt("c"))
    (await blocks(buffer.wait_for_slot())).cancel()
    with pytest.raises(RuntimeError, match=f"all {slots[-1]} slots are in use"):
        buffer.admit(prompt("one too many"))


@in_virtual_time
async def test_slots_stay_as_they_are_before_the_first_step_and_while_groups_are_not_what_is_missing() -> None:
    buffer = new_buffer(max_staleness=3, version=7)
    for step in (7, 8):
        taking = asyncio.create_task(buffer.take(step))
        await asyncio.sleep(0)
        if step == 7:
            buffer.grow_slots()  # nothing can be ready before the first step
        await admit_and_finish(buffer, "a", "b")
        buffer.grow_slots()  # the groups are there, and will be taken in a moment
        await taking
        buffer.release(step, version=step + 1)
        buffer.grow_slots()  # no step is taken: a batch is being built
    assert buffer.stats().num_slots == 4


@in_virtual_time
async def test_no_slots_are_opened_for_groups_that_no_step_is_left_for() -> None:
    buffer = new_buffer(max_staleness=3, end_step=2)
    await train_one(buffer, 0, "a", "b", releases=True)
    await admit_and_claim(buffer, "c", "d")
    assert await let_the_learner_wait(buffer, 1, 2) == [4, 4]


@in_virtual_time
async def test_what_leaves_near_the_end_is_replaced_and_nothing_more() -> None:
    buffer = new_buffer(end_step=1, max_retries=0)
    first, second = await admit_and_claim(buffer, "a", "b")
    waiting = await blocks(buffer.wait_for_slot())  # two of four slots are free, and no step needs them
    buffer.filter(first.group_id, "zero_variance")
    await asyncio.wait_for(waiting, 1.0)
    await admit_and_finish(buffer, "c")
    waiting = await blocks(buffer.wait_for_slot())
    buffer.fail(second.group_id, OSError("no response"))
    await asyncio.wait_for(waiting, 1.0)
    await admit_and_finish(buffer, "d")
    assert len(await buffer.take(0)) == 2
    (await blocks(buffer.wait_for_slot())).cancel()


@in_virtual_time
async def test_slot_is_not_freed_before_weights_land() -> None:
    buffer = new_buffer(max_staleness=0)
    await train_one(buffer, 0, "a", "b")
    waiting = await blocks(buffer.wait_for_slot())
    assert buffer.stats().num_training == 2
    with pytest.raises(ValueError, match="step 0 was released with version 2"):
        buffer.release(0, version=2)
    buffer.release(0, version=1)
    await waiting
    assert buffer.admit(prompt("c")).start_version == 1
    assert buffer.stats().trained == 2


@in_virtual_time
async def test_releasing_a_later_step_releases_the_ones_it_overtook() -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=2)
    await train_one(buffer, 0, "a")
    await train_one(buffer, 1, "b")
    buffer.release(1, version=2)
    assert (buffer.stats().num_slots_used, buffer.stats().version) == (0, 2)
    with pytest.raises(ValueError, match="step 0 was released but not taken, or released twice"):
        buffer.release(0, version=1)


# Taking


@in_virtual_time
async def test_take_returns_groups_by_id_whatever_order_they_finish_in_and_steps_in_order() -> None:
    buffer = new_buffer(groups_per_step=3)
    for item in reversed(await admit_and_claim(buffer, "a", "b", "c")):
        buffer.finish(group_of(item))
    with pytest.raises(ValueError, match="step 1 was taken out of order; the next one is 0"):
        await buffer.take(1)
    assert [group.group_id for group in await buffer.take(0)] == [0, 1, 2]


@in_virtual_time
async def test_take_says_which_old_group_it_waits_for_and_counts_the_time() -> None:
    buffer = new_buffer(groups_per_step=1, clock=asyncio.get_running_loop().time)
    (old,) = await admit_and_claim(buffer, "old")
    await train_one(buffer, 0, "a", releases=True)
    await admit_and_finish(buffer, "young")
    taking = await blocks(buffer.take(1))
    assert buffer.waiting_for == "step 1 waits for 1 of the unfinished groups that are due, although 1 are ready (0)"
    assert buffer.stats().oldest_age == 1
    buffer.finish(group_of(old))
    assert [group.group_id for group in await taking] == [0]
    assert buffer.waiting_for == ""
    assert buffer.stats().oldest_wait_s == buffer.stats().batch_wait_s == 3600


# Groups that lead nowhere


@in_virtual_time
async def test_a_filtered_group_makes_room_and_its_refill_starts_at_the_live_version() -> None:
    buffer = new_buffer(groups_per_step=1)
    (straggler,) = await admit_and_claim(buffer, "straggler")
    await train_one(buffer, 0, "a", releases=True)
    buffer.filter(straggler.group_id, "zero_variance")
    buffer.admit(prompt("b"))
    assert buffer.admit(prompt("c")).start_version == 1
    stats = buffer.stats()
    assert (stats.filtered, stats.replaced, stats.discarded_tokens) == ({"zero_variance": 1}, 1, 0)


@in_virtual_time
async def test_a_failed_group_comes_back_first_and_as_young_as_a_new_one() -> None:
    buffer = new_buffer(groups_per_step=1, max_staleness=2)
    (item,) = await admit_and_claim(buffer, "a")
    await train_one(buffer, 0, "b", releases=True)
    buffer.admit(prompt("c"))
    assert buffer.fail(item.group_id, RuntimeError("lost")) == "retried"
    retried = await buffer.claim()
    assert (retried.group_id, retried.attempt, retried.start_version) == (0, 1, 1)
    with pytest.raises(ValueError, match="claimed with start_version 1 but finished with 0"):
        buffer.finish(group_of(item))
    buffer.finish(group_of(retried))


OWN, LOST = OSError("its own fault"), WorkerLost("a rollout worker died")


@pytest.mark.parametrize(
    ("errors", "attempts"),
    [
        ([OWN, TimeoutError("again")], [1]),
        ([LOST, OWN, LOST, OWN], [0, 1, 1]),  # a lost worker costs a group none of its retries
        ([LOST] * (MAX_WORKER_LOSSES + 2), [*[0] * MAX_WORKER_LOSSES, 1]),  # until it has lost too many
    ],
)
@in_virtual_time
async def test_a_group_that_fails_too_often_is_dropped_and_counted(
    errors: list[Exception], attempts: list[int]
) -> None:
    buffer = new_buffer(max_retries=1)
    (item,) = await admit_and_claim(buffer, "a")
    for error, attempt in zip(errors[:-1], attempts, strict=True):
        assert buffer.fail(item.group_id, error) == "retried"
        item = await buffer.claim()
        assert item.attempt == attempt
    assert buffer.fail(item.group_id, errors[-1]) == "dropped"
    stats = buffer.stats()
    assert (stats.failed, stats.retried, stats.replaced) == (len(errors), len(errors) - 1, 1)
    assert (stats.dropped, stats.num_slots_used) == ({type(errors[-1]).__name__: 1}, 0)


@pytest.mark.parametrize(
    ("groups_per_step", "batches", "ends", "message"),
    [
        (2, 3, "ffffff", ""),
        (2, 3, "Fffffff", r"7 groups were filtered \(zero_variance: 6, rewards_failed: 1\) .*may not distinguish"),
        (2, 3, "FFFFFFF", r"7 groups were filtered \(rewards_failed: 7\) .* The first failure: KeyError: 'x'$"),
        (2, 2, "ffoffoffoffo", ""),  # a step's worth that is ready starts the count again, taken or not
        (2, 2, "offfff", "5 groups were filtered"),
        (2, 3, "xxx", "3 prompts in a row were dropped .* with ConnectionError: no route to engine 0"),
        (8, 2, "xoxoxoxoxo", ""),
        (8, 2, "xfxfxf", ""),
    ],
)
@in_virtual_time
async def test_a_run_that_makes_no_progress_stops_with_the_reasons(
    groups_per_step: int, batches: int, ends: str, message: str
) -> None:
    """f: filtered, F: because its rewards failed, x: dropped, o: it worked."""
    sizes = {"groups_per_step": groups_per_step, "max_filtered_batches_per_step": batches}
    buffer = new_buffer(**sizes, max_retries=0)

    def end(number: int, item: RolloutRequest) -> None:
        match ends[number]:
            case "o":
                buffer.finish(group_of(item))
            case "x":
                buffer.fail(item.group_id, ConnectionError(f"no route to engine {number}"))
            case "f":
                buffer.filter(item.group_id, "zero_variance")
            case _:
                buffer.filter(item.group_id, "rewards_failed", failure="KeyError: 'x'\nand a traceback")

    waiting = asyncio.create_task(buffer.take(0)) if message else None
    for number in range(len(ends) - bool(message)):
        end(number, *await admit_and_claim(buffer, "p"))
    if waiting is not None:
        (last,) = await admit_and_claim(buffer, "last")
        with pytest.raises(NoProgress, match=message) as caught:
            end(len(ends) - 1, last)
        with pytest.raises(BufferClosed) as closed:
            await waiting
        assert closed.value.__cause__ is caught.value
        assert isinstance(caught.value.__cause__, ConnectionError) == ("x" in ends)


@pytest.mark.parametrize("verb", ["finish", "filter", "fail"])
@in_virtual_time
async def test_a_group_ends_once_and_only_after_it_was_claimed(verb: str) -> None:
    buffer = new_buffer(max_retries=0)
    item = buffer.admit(prompt("a"))
    how = {"finish": (group_of(item),), "filter": (0, "x"), "fail": (0, RuntimeError("x"))}[verb]
    with pytest.raises(ValueError, match=f"cannot {verb} group 0: it is not running"):
        getattr(buffer, verb)(*how)
    await buffer.claim()
    getattr(buffer, verb)(*how)
    with pytest.raises(ValueError, match=f"cannot {verb} group 0: it is not running"):
        getattr(buffer, verb)(*how)


# Waits


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
    for task in (*waiting, WAITS[wait](buffer)):
        with pytest.raises(BufferClosed, match="OSError: disk full") as caught:
            await task
        assert caught.value.__cause__ is cause


@in_virtual_time
async def test_many_claimers_share_prompts_without_loss_or_repetition_some_of_them_cancelled() -> None:
    buffer = new_buffer(groups_per_step=50)
    claims = [asyncio.create_task(buffer.claim()) for _ in range(120)]
    await asyncio.sleep(0)
    for index in range(100):
        buffer.admit(prompt(str(index)))
    for claim in claims[::6]:
        claim.cancel()
    await asyncio.wait(claims)
    assert sorted(claim.result().group_id for claim in claims if not claim.cancelled()) == list(range(100))


# Resuming


@in_virtual_time
async def test_a_checkpoint_owes_every_prompt_that_its_steps_did_not_train() -> None:
    """Step 0 is trained, step 1 is taken but not trained; one group each is ready, running, queued and filtered."""
    buffer = new_buffer(groups_per_step=1, max_staleness=6)
    await train_one(buffer, 0, "trained", releases=True)
    assert await let_the_learner_wait(buffer, 1, 4) == [3, 4, 5, 6]
    await train_one(buffer, 1, "taken")
    ready, _running, filtered = await admit_and_claim(buffer, "ready", "running", "filtered")
    buffer.finish(group_of(ready))
    buffer.filter(filtered.group_id, "zero_variance")
    buffer.admit(prompt("queued"))
    state = json.loads(json.dumps(buffer.state_dict(1)))
    assert state["num_finished"] == 2, "taken and ready: their responses are lost"
    state["prompts"][2] = {"group_id": 3, "prompt": {"prompt_id": "running"}}  # as checkpoints were once

    resumed = new_buffer(groups_per_step=1, version=1)
    resumed.load_state_dict(state, prompt)
    with pytest.raises(RuntimeError, match="4 prompts of the resumed run come first"):
        resumed.admit(prompt("new"))
    for expected in ((1, "taken", 1), (2, "ready", 1)):
        item = resumed.readmit()
        assert item is not None
        assert (item.group_id, item.prompt.prompt_id, item.start_version) == expected
    with pytest.raises(RuntimeError, match="all 2 slots are in use"):
        resumed.readmit()
    owed = [entry["prompt_id"] for entry in resumed.state_dict(1)["prompts"]]
    assert owed == ["taken", "ready", "running", "queued"]
    stats = resumed.stats()
    assert (stats.trained, stats.filtered, stats.discarded_tokens) == (1, {"zero_variance": 1}, 0)


@in_virtual_time
async def test_a_checkpoint_can_be_written_whatever_the_data_set_has_in_its_columns_and_group_ids_continue() -> None:
    buffer, resumed = new_buffer(), new_buffer()
    odd = replace(prompt("a"), metadata={"when": date(2026, 1, 31), "image": b"bytes", 3: {1, 2}})
    buffer.admit(odd)
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict(0))), {"a": odd}.__getitem__)
    item = resumed.readmit()
    assert item is not None and item.prompt is odd
    assert resumed.readmit() is None
    assert resumed.admit(prompt("b")).group_id == 1


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
