"""Whole runs in which learner and replicas take turns on the same devices, whatever is lost on the way.

The fleet itself looks at every turn: no replica has its memory while the learner has its own, at no onload, step,
commit or restart.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_replica import Workload
from tests.simulation.fleet import Plan
from tests.simulation.test_control_plane import check_promises, check_tables, play, quiet

__all__ = ["quiet"]


def shared(**changes: Any) -> Plan:
    workload = Workload(tail=1.5, stream_interval=16)
    sizes: dict[str, Any] = {"num_steps": 40, "max_staleness": 0, "num_arena_slots": 1, "workload": workload, "seed": 5}
    return Plan(**(sizes | {"shares_devices": True} | changes))


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_answers_go_on_from_their_prefix_after_every_turn(max_staleness: int) -> None:
    run = play(shared(max_staleness=max_staleness, eval_every=7))
    check_promises(run)
    assert run.fleet.num_lost == {}
    spans_turns = any(age > 0 for age in run.books.ages)
    assert spans_turns == (max_staleness > 0)


def test_replicas_that_die_or_do_not_fall_asleep_are_replaced_in_the_engines_turn() -> None:
    run = play(shared(num_steps=80, max_staleness=1, death_every_s=20.0, restart_s=10.0))
    check_promises(run)
    assert run.fleet.num_lost["silence"] >= 2
    assert run.fleet.num_lost["missed commit"] >= 2
    assert run.fleet.num_restarts.total() >= 6


def test_a_run_that_loses_all_its_replicas_waits_for_them() -> None:
    run = play(shared(max_staleness=1, death_every_s=30.0, all_die_frac=0.5, restart_s=40.0))
    check_promises(run)
    assert run.fleet.num_lost["all"] >= 3
    assert run.buffer.stats().retried == 0, "a group was charged with it"


plans = st.builds(
    Plan,
    shares_devices=st.just(True),
    num_steps=st.integers(2, 8),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 3),
    num_replicas=st.integers(1, 4),
    num_workers=st.integers(1, 2),
    num_arena_slots=st.sampled_from([1, 2]),
    workload=st.builds(Workload, tail=st.sampled_from([0.7, 3.0]), stream_interval=st.sampled_from([7, 64])),
    max_response_tokens=st.sampled_from([20, 200]),
    train_s=st.sampled_from([0.0, 1.0, 30.0]),
    move_s=st.sampled_from([0.0, 0.5, 20.0]),
    sync_s=st.sampled_from([0.0, 1.0, 20.0]),
    failed_pull_frac=st.sampled_from([0.0, 0.1]),
    death_every_s=st.sampled_from([0.0, 10.0, 100.0]),
    all_die_frac=st.sampled_from([0.0, 0.3]),
    worker_death_every_s=st.sampled_from([0.0, 30.0]),
    restart_s=st.sampled_from([0.0, 5.0, 200.0]),
    dynamic_sampling=st.booleans(),
    most_requests=st.sampled_from([0, 2]),
    eval_every=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=40, deadline=None)
@given(plans)
def test_every_promise_holds_in_turns_whatever_is_lost(plan: Plan) -> None:
    run = play(plan)
    check_promises(run)
    check_tables(run)
