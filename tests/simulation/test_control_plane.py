"""The promises of the asynchronous pipeline, over random worlds and at length; see `world.py` for what is real."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.worker.actor import rare_collections
from tests.fakes.scripted_replica import Workload
from tests.fakes.virtual_time import run_virtual
from tests.simulation.fleet import Plan
from tests.simulation.world import HELD_OUT, Simulation, simulation
from trainer.driver.step_metrics import COHORT_WINDOW

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    check_evaluations(run)


def check_evaluations(run: Simulation) -> None:
    """Every result belongs to one version, and without losses none fails."""
    plan, last = run.plan, run.state.last_evaluation
    assert all(len(versions) <= 1 for versions in run.evaluated), run.evaluated
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


plans = st.builds(
    Plan,
    num_steps=st.integers(3, 16),
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    group_size=st.integers(1, 3),
    num_replicas=st.integers(1, 5),
    num_workers=st.integers(1, 2),
    workload=st.builds(
        Workload,
        tail=st.sampled_from([0.7, 1.1, 3.0]),
        first_token_s=st.sampled_from([0.0, 0.5, 20.0]),
        stream_interval=st.sampled_from([1, 7, 64]),
    ),
    max_response_tokens=st.sampled_from([1, 20, 200]),
    train_s=st.sampled_from([0.0, 1.0, 30.0]),
    sync_s=st.sampled_from([0.0, 1.0, 60.0]),
    pause_s=st.sampled_from([0.0, 3.0]),
    aborts_at_commit=st.booleans(),
    death_every_s=st.sampled_from([0.0, 3.0, 20.0]),
    restart_s=st.sampled_from([0.0, 10.0, 500.0]),
    max_restarts=st.sampled_from([0, 1, 1000]),
    reward_error_frac=st.sampled_from([0.0, 0.1]),
    group_error_frac=st.sampled_from([0.0, 0.0, 0.1, 0.3]),
    dynamic_sampling=st.booleans(),
    max_retries=st.integers(0, 2),
    most_requests=st.sampled_from([0, 1, 4]),
    eval_every=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=120, deadline=None)
@given(plans)
def test_every_promise_holds_in_random_worlds(plan: Plan) -> None:
    if plan.dynamic_sampling and plan.group_size == 1:
        return  # everything would be filtered
    run = play(plan)
    check_promises(run)
    check_tables(run)


@pytest.mark.parametrize("num_workers", [1, 4, 16])
def test_all_replicas_get_their_share_however_many_workers_there_are(num_workers: int) -> None:
    workload = Workload(tail=1.5)
    sizes = {"num_steps": 20, "groups_per_step": 32, "max_staleness": 4, "group_size": 8}
    run = play(Plan(**sizes, num_replicas=16, num_workers=num_workers, workload=workload, train_s=2.0, seed=3))
    answers = [replica.num_answers for replica in run.fleet.replicas.values()]
    assert max(answers) <= 1.5 * min(answers), answers


def test_ten_thousand_answers_are_under_way_at_64_replicas() -> None:
    workload = Workload(tail=3.0, min_tokens=64, token_s=(0.4, 0.6), stream_interval=64)
    sizes = {"num_steps": 3, "groups_per_step": 1_400, "max_staleness": 4, "group_size": 4}
    with rare_collections():
        run = play(Plan(**sizes, num_replicas=64, num_workers=2, workload=workload, train_s=0.05, sync_s=0.1, seed=5))
    check_promises(run)
    check_tables(run)
    assert run.peaks["answers"] >= 10_000
    answers = [replica.num_answers for replica in run.fleet.replicas.values()]
    assert max(answers) <= 1.5 * min(answers), answers


def long_plan(num_groups: int, **changes: Any) -> Plan:
    """Everything goes wrong now and then; `num_groups` of one answer each are trained."""
    sizes: dict[str, Any] = {
        "groups_per_step": 50,
        "num_steps": num_groups // 50,
        "max_staleness": 2,
        "group_size": 1,
    }
    fates: dict[str, Any] = {"death_every_s": 60.0, "reward_error_frac": 0.01, "group_error_frac": 0.002}
    workload = Workload(tail=1.1, stream_interval=128)
    return Plan(**({"num_replicas": 8, "workload": workload, "seed": 7} | sizes | fates | changes))


def test_a_world_can_be_played_again() -> None:
    first, again = (play(long_plan(2_000, death_every_s=10.0)) for _ in range(2))
    assert sum(first.fleet.num_lost.values()) > 5
    assert first.num_turns == again.num_turns
    assert first.peaks == again.peaks
    assert list(first.books.fates.items()) == list(again.books.fates.items())
    assert [r.num_answers for r in first.fleet.replicas.values()] == [
        r.num_answers for r in again.fleet.replicas.values()
    ]


@pytest.mark.parametrize("num_groups", [12_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_long_run_takes_no_more_room_and_work_for_each_group_than_a_short_one(num_groups: int) -> None:
    with rare_collections():
        short, long = play(long_plan(1_000)), play(long_plan(num_groups))
    for run in (short, long):
        check_promises(run)
        check_tables(run)
    assert sum(long.fleet.num_lost.values()) > num_groups / 5_000
    assert set(long.fleet.num_lost) <= {"death", "silence", "missed commit"}
    assert long.buffer.stats().retried > num_groups / 1_000
    assert long.books.num_resumed > num_groups / 100
    assert max(long.books.ages) == 2
    turns_short, turns_long = (run.num_turns / run.buffer.stats().admitted for run in (short, long))
    assert turns_long < 1.15 * turns_short
    for run in (short, long):  # a look sorts all slots: the first, one when B are ready, and one per old group at most
        assert run.num_choices <= 4 * run.plan.num_steps
    # How many groups are at the workers or wait for a step at once after a loss, a short run does not see: each has a
    # slot, a handful of tasks and one call.
    slots = {name: long.plan.num_slots for name in long.peaks if name.startswith("buffer.")}
    most = slots | {"tasks": 5 * long.plan.num_slots, "calls 0._waiting": long.plan.num_slots}
    for name in long.peaks:
        assert long.peaks[name] <= most.get(name, 1.5 * short.peaks[name] + 32), name
