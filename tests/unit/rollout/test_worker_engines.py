"""A worker between groups and engines: limits, pins, losses, waits for room, and groups that move to free an engine."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from rollout.engine.interface import EngineStatus
from rollout.fleet import generation
from rollout.fleet.adaptive_limit import LimitRange
from rollout.fleet.consolidation import ConsolidationRule
from rollout.fleet.scheduler import NoReplica
from rollout.fleet.states import EngineView, FleetView
from rollout.types import SamplingParams
from tests.fakes.engine_client import FakeEngine, expected_answer
from tests.fakes.local_actor import view_of, watched
from tests.fakes.rollout_worker import ANSWER, Played, counting_down, generated, item, segments, worker
from tests.fakes.virtual_time import in_virtual_time
from tests.unit.rollout.fleet.test_scheduler import Holder
from trainer.driver.engine_monitor import POLL_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.agent.loop import Generate
    from rollout.types import Group, Prompt, Trajectory
    from rollout.worker.worker import RolloutWorker


def load(running: int = 0, waiting: int = 0, kv_frac: float | None = None) -> EngineStatus:
    return EngineStatus(running=running, waiting=waiting, kv_usage_frac=kv_frac, num_preemptions=None)


def limit(lowest: int, highest: int | None = None) -> dict[str, Any]:
    return {"concurrency": LimitRange(lowest=lowest, highest=lowest if highest is None else highest)}


def begin(busy: RolloutWorker, *numbers: int, **fields: Any) -> list[asyncio.Task[Group]]:
    return [asyncio.create_task(busy.run_group(item(group_id=number, **fields))) for number in numbers]


async def end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Limits, pins, losses


@in_virtual_time
async def test_an_engine_never_has_more_than_its_limit_and_older_groups_come_first() -> None:
    engines = [FakeEngine("e0"), FakeEngine("e1")]
    busy = worker(*engines, **limit(9))
    numbers = [3, 9, 1, 7, 2, 8, 5, 6, 4, 0]
    for group in await asyncio.gather(*begin(busy, *numbers)):
        assert [generated(t) for t in group.trajectories] == [ANSWER] * 4
    assert [engine.most for engine in engines] == [8, 8], "two groups of four each; three would be twelve"
    sent = [[int(call.request_ids[0].split(".")[0][1:]) for call in engine.calls] for engine in engines]
    assert sorted(number for of_one in sent for number in of_one) == sorted(numbers)
    assert all(of_one[2:] == sorted(of_one[2:]) for of_one in sent)
    assert busy.report().num_queued == 0


@in_virtual_time
async def test_a_pinned_engine_finishes_what_it_has_and_serves_an_evaluation_but_gets_no_new_group() -> None:
    pinned, other = FakeEngine("e0", version=1), FakeEngine("e1", version=1)
    busy = worker(pinned, other)
    (running,) = begin(busy, 0, start_version=1)
    await asyncio.sleep(0.015)
    busy.update(view_of(e0="pinned"), {})
    other.version = 2  # a commit that passes e0 by
    new = await asyncio.gather(*begin(busy, *range(1, 6), start_version=2))
    assert {t.policy_versions for group in new for t in group.trajectories} == {(2,)}
    assert {t.policy_versions for t in (await running).trajectories} == {(1,)}
    (evaluated,) = await busy.evaluate([item().prompt], SamplingParams(max_tokens=4, temperature=0.0), engine="e0")
    assert evaluated.policy_versions == (1,)
    assert busy.report().lost_engines == {}
    pinned.version = 2
    busy.update(view_of(e0="live"), {})
    await busy.run_group(item(group_id=7, start_version=2))
    assert len(pinned.calls) == 3


@in_virtual_time
async def test_a_group_whose_engine_dies_waits_for_the_end_of_an_evaluation_on_the_other_one() -> None:
    dying, pinned = FakeEngine("e0", die_after_chunks=8), FakeEngine("e1")
    busy = worker(dying, pinned)
    busy.update(view_of(e1="pinned"), {})
    (running,) = begin(busy, 0)
    await asyncio.sleep(50.0)
    assert not running.done()
    busy.update(view_of(e1="live"), {})
    assert [(t.status, generated(t)) for t in (await running).trajectories] == [("truncated", ANSWER)] * 4
    assert busy.report().recovered_tokens == 8 * dying.chunk_tokens


@in_virtual_time
async def test_a_group_that_waits_too_long_for_the_end_of_an_evaluation_is_no_failure() -> None:
    """`NoReplica` costs it no retry; a time-out would."""
    busy = worker(FakeEngine("e0"), FakeEngine("e1"))
    busy.update(view_of(e0="lost", e1="pinned"), {})
    with pytest.raises(NoReplica, match=r"e1: pinned; e0: weight sync: dead"):
        await busy.run_group(item())
    assert asyncio.get_running_loop().time() == pytest.approx(60.0, abs=0.1)


@in_virtual_time
async def test_a_wait_for_room_counts_as_time_of_the_request() -> None:
    busy = worker(FakeEngine("e0", hangs=True), request_timeout_s=10.0, **limit(4))
    for group in begin(busy, 0, 1):
        with pytest.raises(TimeoutError):
            await group
    assert asyncio.get_running_loop().time() == pytest.approx(10.0, abs=0.1)
    assert (busy.report().num_queued, busy.report().in_flight) == (0, {"e0": 0})


@in_virtual_time
async def test_limits_follow_loads_that_are_new_and_a_new_engine_starts_over() -> None:
    loads = {"a": load(), "b": load(4, kv_frac=0.99), "c": None}

    def view(num_polls: int, incarnation: int = 0) -> FleetView:
        how: dict[str, Any] = {"incarnation": incarnation, "state": "live", "num_polls": num_polls}
        engines = {name: EngineView(load=load, **how) for name, load in loads.items()}
        return FleetView(epoch=1, engines=engines, handles={})

    busy = worker(*(FakeEngine(name, hangs=True) for name in loads), **limit(1, 8))
    groups = begin(busy, *range(6))
    await asyncio.sleep(0.1)
    assert busy.update(view(0), {}).limits == {"a": 8, "b": 8, "c": 8}, "nothing is known yet"
    for _ in range(2):
        report = busy.update(view(1), {})
        assert report.limits == {"a": 8, "b": 4, "c": 8}, "sent twice, it counts once"
        assert report.in_flight == {"a": 8, "b": 8, "c": 8}
    assert busy.update(view(0, 1), {"b": FakeEngine("b")}).limits == {"a": 8, "b": 8, "c": 8}
    await end(*groups)


@in_virtual_time
async def test_an_engine_that_this_worker_lost_stays_out_until_a_new_one_takes_its_place() -> None:
    busy, new = worker(FakeEngine("e0", die_after_chunks=0), FakeEngine("e1")), FakeEngine("e0")
    await busy.run_group(item())
    assert busy.update(view_of(e0="live"), {}).lost_engines == {"e0": (0, "e0 was killed")}
    assert list(busy.update(view_of(e0="starting", incarnation=1), {}).lost_engines) == ["e0"]
    assert busy.update(view_of(e0="live", incarnation=1), {"e0": new}).lost_engines == {}
    await busy.run_group(item(group_id=6))
    assert len(new.calls) == 1


# Waits for room, as `timings` have them

RESPONSE_S = 7.0
"""20 tokens, three in a second."""


def slow(name: str = "e0", **changes: Any) -> FakeEngine:
    return FakeEngine(name, step_s=1.0, **changes)


def waits(groups: Sequence[Group]) -> list[list[float]]:
    return [[round(t.timings["engine_wait_s"], 6) for t in group.generated] for group in groups]


@in_virtual_time
async def test_with_room_for_one_the_next_responses_wait_as_long_as_those_before_take() -> None:
    groups = await asyncio.gather(*begin(worker(slow(), group_size=1, **limit(1)), 0, 1, 2))
    assert waits(groups) == [[0.0], [RESPONSE_S], [2 * RESPONSE_S]]
    spent = [group.trajectories[0].timings["generate_s"] for group in groups]
    assert spent == pytest.approx([RESPONSE_S, 2 * RESPONSE_S, 3 * RESPONSE_S]), "the wait is part of it"


@in_virtual_time
async def test_a_pin_of_the_only_engine_and_the_loss_of_one_count_as_waits() -> None:
    busy = worker(slow("e0", die_after_chunks=2), slow("e1"), group_size=1, **limit(1))
    busy.update(view_of(e1="pinned"), {})
    running = begin(busy, 0)  # to e0, which is dead at 3 s
    await asyncio.sleep(8)
    busy.update(view_of(e1="live"), {})
    assert waits([await running[0]]) == [[5.0]]


@in_virtual_time
async def test_waits_of_all_turns_of_a_response_add_up() -> None:
    how: dict[str, Any] = {"loop": counting_down(2), "group_size": 1}
    alone = await worker(slow(stop_one_in=4), **how).run_group(item())
    assert len(alone.trajectories[0].turns()) == 2
    for group in await asyncio.gather(*begin(worker(slow(stop_one_in=4), **how, **limit(1)), 0, 1)):
        (trajectory,) = group.trajectories
        waited_s = trajectory.timings["engine_wait_s"]
        assert waited_s > 0
        generating_s = alone.trajectories[0].timings["generate_s"]
        assert trajectory.timings["generate_s"] == pytest.approx(generating_s + waited_s)


@in_virtual_time
async def test_a_wait_that_is_cancelled_counts() -> None:
    num_begun = 0

    async def one_second_later_each(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        nonlocal num_begun
        num_begun += 1
        await asyncio.sleep(num_begun - 1)
        return await counting_down(1).run(prompt, max_tokens, generate)

    how: dict[str, Any] = {"loop": Played(one_second_later_each), "group_size": 3, "agent_timeout_s": 8.5}
    group = await worker(slow(), **how, **limit(1)).run_group(item())
    assert [t.status for t in group.trajectories] == ["truncated", "failed", "failed"]
    assert waits([group]) == [[0.0, RESPONSE_S - 1, 8.5 - 2]], "the last one never came in"


@in_virtual_time
async def test_responses_that_are_all_cancelled_leave_their_place_at_once() -> None:
    async def thinks_instead(prompt: Prompt, max_tokens: int, generate: Generate) -> Trajectory:
        if prompt.prompt_id == "hasty":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(generate(prompt.token_ids, max_tokens), 1.0)
            await asyncio.sleep(4.0)
        return await counting_down(1).run(prompt, max_tokens, generate)

    busy = worker(slow(), loop=Played(thinks_instead), group_size=2, **limit(2))
    groups = begin(busy, 0)
    await asyncio.sleep(0.5)
    groups += begin(busy, 1, prompt_id="hasty")
    await asyncio.sleep(0.5)
    assert busy.report().num_queued == 2
    await asyncio.sleep(1.0)
    assert (busy.report().num_queued, groups[0].done()) == (0, False)
    await asyncio.gather(*groups)
    assert busy.report().in_flight == {"e0": 0}


# Consolidation

LONG = 60
LONG_ANSWER = expected_answer(item().prompt.token_ids, LONG)
STEP_S = 0.2
"""Per chunk of three tokens; a response takes 4 s, and is twice its prompt after one chunk."""
SAMPLING = SamplingParams(max_tokens=LONG, temperature=0.7)
RULE: dict[str, Any] = {"repacking": ConsolidationRule(below=6, most=64), "sampling": SAMPLING}


def engine(name: str, **changes: Any) -> FakeEngine:
    return FakeEngine(name, **({"said_load": load(), "step_s": STEP_S} | changes))


@in_virtual_time
async def test_the_last_group_of_an_engine_continues_with_the_others_and_the_next_new_one_finds_it_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "MAX_FRUITLESS_SUBMISSIONS", 1)  # a move is none
    lone, crowded = engine("e0", version=1), engine("e1", version=2)
    busy = worker(lone, crowded, **RULE)
    async with watched(busy, lone, crowded):
        early = begin(busy, 0, 1, 2, start_version=1)  # e0 gets 0 and 2
        await asyncio.sleep(0.01)
        late = begin(busy, 3, start_version=1)  # and e1 gets 1 and 3
        early[2].cancel()
        await asyncio.sleep(POLL_S + STEP_S)
        assert busy.report().in_flight == {"e0": 0, "e1": 12}
        assert [call.is_closed for call in lone.calls if call.request_ids[0].startswith("g0.")] == [True]
        moved = crowded.calls[-1]
        assert moved.request_ids[0].startswith("g0.")
        lengths = [len(tokens) for tokens in moved.token_ids]
        assert len(lengths) == 4 and min(lengths) >= 2 * 3, "the group stays together"
        report = busy.report()
        assert (report.migrated_requests, report.migrated_tokens) == (4, sum(lengths))
        kept = lengths[0] - 3
        group, *_ = await asyncio.gather(early[0], early[1], *late)
        assert [generated(trajectory) for trajectory in group.trajectories] == [LONG_ANSWER] * 4
        assert {tuple(segments(t)) for t in group.trajectories} == {((1, kept), (2, LONG - kept))}
        assert busy.report().migrated_requests == 4, "each moved once"
        assert len(lone.calls) == 2 and busy.report().lost_engines == {}
        (new,) = begin(busy, 9, start_version=1)
        await asyncio.sleep(0.01)
        assert busy.report().in_flight == {"e0": 4, "e1": 0}
        await new


@pytest.mark.parametrize(
    ("loads", "changes", "num_moved"),
    [
        ((load(), load()), {}, 4),
        ((load(), load()), {"repacking": None}, 0),
        ((load(), None), {}, 0),  # it does not report its load
        ((load(30), load(30)), {}, 0),  # requests that others sent count
        ((load(), load(7, waiting=1)), {}, 0),  # requests wait in it
        ((load(), load()), {"pins": "e0"}, 0),
        ((load(), load()), limit(8), 4),
        ((load(), load()), limit(7), 0),  # both groups together are beyond it
    ],
)
@in_virtual_time
async def test_which_requests_move(loads: Any, changes: dict[str, Any], num_moved: int) -> None:
    engines = [engine(name, said_load=said) for name, said in zip(("e0", "e1"), loads, strict=True)]
    pins, changes = changes.get("pins"), {key: changes[key] for key in changes if key != "pins"}
    busy = worker(*engines, **(RULE | changes))
    async with watched(busy, *engines) as fleet:
        groups = begin(busy, 0, 1)
        await asyncio.sleep(0.01)
        if pins:
            await fleet.pin(pins)
        await asyncio.gather(*groups)
    assert busy.report().migrated_requests == num_moved


@pytest.mark.parametrize("is_queued", [False, True])
@in_virtual_time
async def test_nothing_moves_while_something_waits_to_be_sent(is_queued: bool) -> None:
    """Under a limit of six, three requests have room for one more, but not for the six that wait."""
    engines, holder = [engine("e0"), engine("e1")], Holder("g0")
    busy = worker(*engines, **RULE, **limit(6))
    scheduler = busy._scheduler
    for group, num in (("g0", 1), ("g1", 3)):
        await scheduler.acquire(group, (0, 0), tokens=100 * num, num_requests=num)
    queued = [
        asyncio.create_task(scheduler.acquire("g2", (0, 2), tokens=1, num_requests=num)) for num in [6] * is_queued
    ]
    async with watched(busy, *engines), holder.at(scheduler, "e0"):
        await asyncio.sleep(2 * POLL_S + 0.1)
    assert (busy.report().num_queued, holder.num_asked) == (6 * is_queued, not is_queued)
    await end(*queued)


@in_virtual_time
async def test_a_request_moves_only_once_it_is_twice_as_long_as_it_came() -> None:
    """One token per 0.3 s after three of prompt: the first poll sees one, the second one three."""
    engines = [engine(name, step_s=0.3, chunk_tokens=1) for name in ("e0", "e1")]
    busy = worker(*engines, **RULE)
    async with watched(busy, *engines):
        await asyncio.gather(*begin(busy, 0, 1))
    assert [len(tokens) for tokens in engines[1].calls[-1].token_ids] == [6] * 4
    seeds = [params.seed for one in engines for call in one.calls for params in call.params]
    assert len(seeds) == len(set(seeds)) == 12, "every submission has its own"


@in_virtual_time
async def test_requests_continue_when_the_engine_that_is_to_be_free_dies_before_it_returns_them() -> None:
    class Deaf(FakeEngine):
        def abort(self, request_ids: Any) -> None:
            pass

    engines = Deaf("e0", said_load=load(), step_s=STEP_S), engine("e1")
    busy = worker(*engines, **RULE)
    async with watched(busy, *engines):
        groups = begin(busy, 0, 1)
        await asyncio.sleep(POLL_S + STEP_S)
        assert busy.report().migrated_requests == 0
        busy.update(view_of(e0="lost"), {})
        for group in await asyncio.gather(*groups):
            assert [generated(trajectory) for trajectory in group.trajectories] == [LONG_ANSWER] * 4
