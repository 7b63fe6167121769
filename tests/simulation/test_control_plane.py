"""The promises of the asynchronous pipeline, over random worlds and at length; see `world.py` for what is real.

The fleet looks at every turn on shared devices: no replica has its memory while the learner has its own, at no onload,
step, commit or restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections import Counter, defaultdict
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.processes import rare_collections
from tests.fakes.scripted_replica import ScriptedReplica, Workload
from tests.fakes.virtual_time import run_virtual
from tests.simulation.fleet import Plan
from tests.simulation.world import HELD_OUT, Simulation, simulation
from trainer.driver.fleet import AllEnginesLost
from trainer.driver.step_metrics import COHORT_WINDOW

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from rollout.types import FinishReason


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of planned failures are no news."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def play(plan: Plan) -> Simulation:
    """Runs the plan to its end; an endless wait raises `Deadlock`, one that is too long `Stalled`."""
    with tempfile.TemporaryDirectory() as folder, simulation(plan, Path(folder) / "run") as run:
        run_virtual(run.run())
    return run


def check(run: Simulation) -> Simulation:
    check_promises(run)
    check_tables(run)
    return run


def check_promises(run: Simulation) -> None:
    """Ages, exact tokens and the size of steps were checked as they came (`Books`)."""
    plan, stats, books = run.plan, run.buffer.stats(), run.books
    assert books.trained_steps == plan.num_steps
    assert stats.discarded_tokens == 0
    owed = [entry["group_id"] for entry in run.buffer.state_dict(plan.num_steps)["prompts"]]
    assert sorted([*books.fates, *owed]) == list(range(stats.admitted)), "a prompt was lost, or counted twice"
    fates = Counter(books.fates.values())
    assert fates["trained"] == plan.num_steps * plan.groups_per_step
    assert fates["filtered"] == sum(stats.filtered.values())
    assert fates["dropped"] == sum(stats.dropped.values())
    assert books.most_attempts <= plan.max_retries + 1
    assert max(run.fleet.num_restarts.values(), default=0) <= plan.max_restarts
    if not plan.group_error_frac and not plan.worker_death_every_s:
        assert stats.failed == 0, "the loss of a replica cost a group"
    last = run.state.last_evaluation
    assert all(len(versions) <= 1 for versions in run.evaluated), "every result belongs to one version"
    if not plan.eval_every:
        assert not run.evaluated
    elif not (plan.death_every_s or plan.worker_death_every_s or plan.reward_error_frac or plan.group_error_frac):
        assert run.state.num_failed_evaluations == 0
        assert last is not None and last.version == plan.num_steps


MOVES = ("migrated_requests", "migrated_tokens", "recovered_requests", "recovered_tokens")
"""The counters of a scheduler."""


def check_tables(run: Simulation) -> None:
    """Nothing grows with the length of the run: every table is bounded by slots, replicas or a window."""
    plan, window = run.plan, 256
    held_out = HELD_OUT if run.plan.eval_every else 0
    exact = {
        "buffer.running": plan.num_slots,
        "streams": plan.num_slots + held_out,
        "tasks": plan.num_slots * (plan.group_size + 5) + 5 * held_out + 32,
        "answers": plan.num_slots * plan.group_size + held_out,
        "lengths._generated": window + plan.groups_per_step + 4 * plan.num_slots,  # whole steps, and the next
        "lengths._trained": window,
        "lengths._open": plan.max_staleness + 2,
        "lengths._complete": COHORT_WINDOW,
    }
    assert exact.keys() <= run.peaks.keys()
    others = max(plan.num_replicas, plan.num_slots * plan.group_size, len(MOVES)) + 2
    too_large = {name: size for name, size in run.peaks.items() if size > exact.get(name, others)}
    assert not too_large


# Random worlds


def one_of(*values: Any) -> Any:
    return st.sampled_from(values)


COMMON: dict[str, Any] = {
    "num_steps": st.integers(2, 14),
    "groups_per_step": st.integers(1, 5),
    "max_staleness": st.integers(0, 4),
    "group_size": st.integers(1, 4),
    "num_replicas": st.integers(1, 5),
    "num_workers": st.integers(1, 2),
    "workload": st.builds(
        Workload,
        min_tokens=one_of(1, 16),
        tail=one_of(0.7, 1.1, 3.0),
        first_token_s=one_of(0.0, 0.5, 20.0),
        stream_interval=one_of(1, 7, 64),
        kv_requests=one_of(4, 64),
    ),
    "max_response_tokens": one_of(1, 20, 200),
    "train_s": one_of(0.0, 1.0, 30.0),
    "sync_s": one_of(0.0, 1.0, 60.0),
    "pause_s": one_of(0.0, 3.0),
    "most_requests": one_of(0, 1, 4),
    "seed": st.integers(0, 2**32),
}
TROUBLES: dict[str, Any] = {
    "aborts_at_commit": st.booleans(),
    "death_every_s": one_of(0.0, 3.0, 20.0),
    "restart_s": one_of(0.0, 10.0, 500.0),
    "max_restarts": one_of(0, 1, 1000),
    "reward_error_frac": one_of(0.0, 0.1),
    "group_error_frac": one_of(0.0, 0.0, 0.1, 0.3),
    "max_retries": st.integers(0, 2),
}
LOSSES: dict[str, Any] = {
    "num_arena_slots": one_of(1, 2, 3),
    "failed_pull_frac": one_of(0.0, 0.1, 0.3),
    "death_every_s": one_of(0.0, 10.0, 100.0),
    "all_die_frac": one_of(0.0, 0.1, 0.5),
    "worker_death_every_s": one_of(0.0, 30.0),
    "restart_s": one_of(0.0, 5.0, 200.0),
}
MOVING: dict[str, Any] = {
    "num_replicas": st.integers(2, 5),
    "max_response_tokens": one_of(20, 200, 800),
    "repack_below": st.integers(2, 20),
}
WORLDS: dict[str, dict[str, Any]] = {
    "troubles": {**TROUBLES, "dynamic_sampling": st.booleans(), "eval_every": one_of(0, 1, 3)},
    "losses": {**LOSSES, "pack_s": one_of(0.0, 1.0, 10.0), "aborts_at_commit": st.booleans()},
    "shared devices": {
        **LOSSES,
        "shares_devices": st.just(True),
        "num_steps": st.integers(2, 8),
        "move_s": one_of(0.0, 0.5, 20.0),
        "sync_s": one_of(0.0, 1.0, 20.0),
        "dynamic_sampling": st.booleans(),
        "eval_every": one_of(0, 2),
    },
    "requests that move": {**TROUBLES, **MOVING},
}


@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_every_promise_holds_in_random_worlds(kind: str, data: Any) -> None:
    play_a_world_of(kind, data)


@pytest.mark.full
@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_promise_holds_in_many_random_worlds(kind: str, data: Any) -> None:
    play_a_world_of(kind, data)


def play_a_world_of(kind: str, data: Any) -> None:
    plan = data.draw(st.builds(Plan, **COMMON | WORLDS[kind]))
    if not plan.dynamic_sampling or plan.group_size > 1:  # else everything would be filtered
        check(play(plan))


# Size and length


@pytest.mark.parametrize("num_workers", [1, 16])
def test_all_replicas_get_their_share_however_many_workers_there_are(num_workers: int) -> None:
    sizes = {"num_steps": 20, "groups_per_step": 32, "max_staleness": 4, "group_size": 8, "train_s": 2.0}
    run = play(Plan(**sizes, num_replicas=16, num_workers=num_workers, workload=Workload(tail=1.5), seed=3))  # type: ignore[arg-type]
    answers = [replica.num_answers for replica in run.fleet.replicas.values()]
    assert max(answers) <= 1.5 * min(answers), answers


def test_ten_thousand_responses_are_under_way_at_64_replicas() -> None:
    workload = Workload(tail=3.0, min_tokens=64, token_s=(0.4, 0.6), stream_interval=64)
    sizes = {"num_steps": 3, "groups_per_step": 1_400, "max_staleness": 4, "group_size": 4}
    with rare_collections():
        run = check(
            play(Plan(**sizes, num_replicas=64, num_workers=2, workload=workload, train_s=0.05, sync_s=0.1, seed=5))
        )
    assert run.peaks["answers"] >= 10_000
    answers = [replica.num_answers for replica in run.fleet.replicas.values()]
    assert max(answers) <= 1.5 * min(answers), answers


def long_plan(num_groups: int, **changes: Any) -> Plan:
    """Everything goes wrong now and then; `num_groups` of one response each are trained."""
    sizes = {"groups_per_step": 50, "num_steps": num_groups // 50, "max_staleness": 2, "group_size": 1}
    fates = {"death_every_s": 60.0, "reward_error_frac": 0.01, "group_error_frac": 0.002}
    workload = Workload(tail=1.1, stream_interval=128)
    settings: dict[str, Any] = {"num_replicas": 8, "workload": workload, "seed": 7} | sizes | fates | changes
    return Plan(**settings)


def test_a_world_can_be_played_again() -> None:
    first, again = (play(long_plan(1_000, death_every_s=10.0)) for _ in range(2))
    assert sum(first.fleet.num_lost.values()) > 5
    assert first.num_turns == again.num_turns
    assert first.peaks == again.peaks
    assert list(first.books.fates.items()) == list(again.books.fates.items())


@pytest.mark.parametrize("num_groups", [6_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_long_run_takes_no_more_room_and_work_for_each_group_than_a_short_one(num_groups: int) -> None:
    with rare_collections():
        short, long = check(play(long_plan(1_000))), check(play(long_plan(num_groups)))
    assert sum(long.fleet.num_lost.values()) > num_groups / 5_000
    assert set(long.fleet.num_lost) <= {"death", "silence", "missed commit"}
    assert long.buffer.stats().retried > num_groups / 1_000
    assert long.books.num_resumed > num_groups / 100
    assert max(long.books.ages) == 2
    turns_short, turns_long = (run.num_turns / run.buffer.stats().admitted for run in (short, long))
    assert turns_long < 1.15 * turns_short
    for run in (short, long):  # a look sorts all slots: the first, one when B are ready, and one per old group at most
        assert run.num_choices <= 4 * run.plan.num_steps
    # A short run does not show how many groups wait after a loss: each has a slot, a handful of tasks and one call.
    slots = {name: long.plan.num_slots for name in long.peaks if name.startswith("buffer.")}
    most = slots | {"tasks": 5 * long.plan.num_slots, "calls 0._waiting": long.plan.num_slots}
    for name in long.peaks:
        assert long.peaks[name] <= most.get(name, 1.5 * short.peaks[name] + 32), name


# Whatever is lost


def plan_with(**changes: Any) -> Plan:
    workload = Workload(tail=1.5, stream_interval=16)
    return Plan(**({"num_steps": 40, "group_size": 2, "workload": workload, "seed": 5} | changes))


SHARED = {"shares_devices": True, "max_staleness": 1, "num_arena_slots": 1}


@pytest.mark.parametrize(
    ("changes", "least_restarts"),
    [({"num_replicas": 1, "num_steps": 120}, 2), ({"num_replicas": 3, "num_steps": 120}, 6), (SHARED, 3)],
    ids=["the only engine", "three engines", "shared devices"],
)
def test_a_run_that_loses_all_its_engines_waits_for_them_and_loses_no_group(
    changes: dict[str, Any], least_restarts: int
) -> None:
    run = check(play(plan_with(death_every_s=30.0, all_die_frac=0.5, restart_s=40.0, **changes)))
    assert run.fleet.num_lost["all"] >= 3
    assert run.buffer.stats().retried == 0, "a group was charged with it"
    assert run.fleet.num_restarts.total() >= least_restarts


def test_a_run_whose_engines_do_not_come_back_ends_with_the_reason() -> None:
    with pytest.raises(AllEnginesLost, match=r"no engine is left, and each had its 2 restarts"):
        play(plan_with(num_replicas=1, death_every_s=5.0, all_die_frac=1.0, max_restarts=2))


def test_versions_that_are_written_over_on_their_way_go_live_with_newer_ones() -> None:
    """Pulls fail now and then, and restarts hold syncs up, while a learner without a rest packs slowly."""
    times = {"train_s": 0.1, "pack_s": 2.0, "sync_s": 6.0, "restart_s": 5.0}
    losses = {"failed_pull_frac": 0.3, "death_every_s": 40.0}
    run = check(play(plan_with(num_steps=150, max_staleness=6, num_replicas=4, **times, **losses)))
    learner = run.fleet.learner
    assert learner.num_missing_while_packing >= 2, "the newer version was not there yet"
    assert learner.num_missing > learner.num_missing_while_packing
    assert len(run.running) < 150 - 10, "some versions never went live themselves"


def test_rollout_workers_that_die_cost_no_group() -> None:
    run = check(play(plan_with(num_workers=2, worker_death_every_s=20.0, restart_s=15.0, max_retries=0)))
    assert run.fleet.num_lost["worker"] >= 5
    assert run.buffer.stats().retried > 0
    assert not run.buffer.stats().dropped


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_on_shared_devices_responses_continue_from_their_prefix_after_every_turn(max_staleness: int) -> None:
    run = check(play(plan_with(**SHARED | {"max_staleness": max_staleness}, eval_every=7)))
    assert run.fleet.num_lost == {}
    spans_turns = any(age > 0 for age in run.books.ages)
    assert spans_turns == (max_staleness > 0)
    move_s = pytest.approx(run.plan.move_s)
    assert run.turns[-1] == {
        "devices/sleep_s": 0.0, "devices/onload_s": move_s, "devices/offload_s": move_s, "devices/onload_bytes": 1,
        "devices/free_frac": 1.0,
    }  # fmt: skip
    assert run.devices.offload_s == 0.0, "the learner is back for the export, and has not left"


def test_on_shared_devices_replicas_that_die_or_do_not_sleep_are_replaced_in_the_engines_turn() -> None:
    run = check(play(plan_with(**SHARED, num_steps=80, death_every_s=20.0, restart_s=10.0)))
    assert run.fleet.num_lost["silence"] >= 2
    assert run.fleet.num_lost["missed commit"] >= 2
    assert run.fleet.num_restarts.total() >= 6


# Requests that move so that replicas are free


@dataclass
class Notes:
    """What the replicas were sent, and when they had something to do."""

    sent: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Sample of an attempt at a group -> its tokens, each time that it was sent to a replica."""
    spells: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    """Replica -> (beginning, end) of every call."""

    def busy_s(self) -> float:
        """Sum over replicas of the time with at least one call."""
        total = 0.0
        for spells in self.spells.values():
            until = 0.0
            for begin, end in sorted(spells):
                total += max(0.0, end - max(begin, until))
                until = max(until, end)
        return total


@contextlib.contextmanager
def notes() -> Iterator[Notes]:
    """Of the scripted replicas in this block."""
    taken, stream_group = Notes(), ScriptedReplica.stream_group

    async def noting(self: ScriptedReplica, request_ids: Any, token_ids: Any, params: Any) -> Any:
        for request_id, tokens in zip(request_ids, token_ids, strict=True):
            taken.sent[request_id.rpartition("/")[0]].append(len(tokens))
        clock = asyncio.get_running_loop().time
        begin = clock()
        try:
            async with aclosing(stream_group(self, request_ids, token_ids, params)) as stream:
                async for item in stream:
                    yield item
        finally:
            taken.spells[self.name].append((begin, clock()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedReplica, "stream_group", noting)
        yield taken


def moved(run: Simulation) -> tuple[int, int]:
    """Requests and tokens."""
    reports = [local.worker.report() for local in run.workers]
    return sum(one.migrated_requests for one in reports), sum(one.migrated_tokens for one in reports)


@settings(max_examples=15, deadline=None)
@given(plan=st.builds(Plan, **COMMON | MOVING))
def test_a_request_moves_only_at_twice_its_length_and_its_moves_cost_at_most_twice_its_tokens(plan: Plan) -> None:
    """Where no replica is lost and no commit gives anything back, whatever is sent again has moved."""
    with notes() as taken:
        run = play(plan)
    check_promises(run)
    num_moved = num_tokens = 0
    for lengths in taken.sent.values():
        assert all(after >= 2 * before for before, after in pairwise(lengths))
        assert sum(lengths[1:]) <= 2 * lengths[-1]
        num_moved, num_tokens = num_moved + len(lengths) - 1, num_tokens + sum(lengths[1:])
    assert moved(run) == (num_moved, num_tokens)


CAP = 4000


class LongTailed(Workload):
    """A response that continues elsewhere ends where it would have: its length is drawn above what it has."""

    def draw_tokens(self, rng: random.Random, budget: int) -> tuple[int, FinishReason]:
        so_far = CAP - budget
        left = max(1, int(max(self.min_tokens, so_far) * rng.paretovariate(self.tail)) - so_far)
        return (left, "stop") if left < budget else (budget, "length")


def test_replicas_are_free_for_longer_at_the_price_of_some_prefixes() -> None:
    """The figures of docs/rollout.md, at 200 steps."""
    workload = LongTailed(tail=1.3, token_s=(0.02, 0.02), first_token_s=0.0)
    sizes: dict[str, Any] = {"num_steps": 80, "groups_per_step": 8, "group_size": 4, "num_replicas": 4}
    sizes |= {"max_response_tokens": CAP, "train_s": 5.0, "seed": 3}
    tokens_per_busy_s: dict[int, float] = {}
    for below in (0, 8):
        with notes() as taken:
            run = play(Plan(**sizes, workload=workload, repack_below=below))
        check_promises(run)
        num_trained = sum(run.books.ages.values())
        tokens_per_busy_s[below] = num_trained / taken.busy_s()
        num_moved, num_tokens = moved(run)
        assert (num_moved > 0) == (below > 0)
        assert num_tokens < 0.25 * num_trained
    assert tokens_per_busy_s[8] > 1.1 * tokens_per_busy_s[0]
