"""Whole runs that lose everything that may be lost: all engines at once, versions on their way, rollout workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.scripted_replica import Workload
from tests.simulation.fleet import Plan
from tests.simulation.test_control_plane import check_promises, check_tables, play, quiet
from trainer.driver.fleet import AllEnginesLost

__all__ = ["quiet"]


def plan_with(**changes: Any) -> Plan:
    workload = Workload(tail=1.5, stream_interval=16)
    return Plan(**({"num_steps": 40, "group_size": 2, "workload": workload, "seed": 5} | changes))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_run_that_loses_all_its_engines_waits_for_them_and_loses_no_group(num_replicas: int) -> None:
    losses = {"death_every_s": 30.0, "all_die_frac": 0.5, "restart_s": 40.0}
    run = play(plan_with(num_replicas=num_replicas, num_steps=120, **losses))
    check_promises(run)
    assert run.fleet.num_lost["all"] >= 3
    assert run.buffer.stats().retried == 0, "a group was charged with it"
    assert run.fleet.num_restarts.total() >= 2 * num_replicas


def test_a_run_whose_engines_do_not_come_back_ends_with_the_reason() -> None:
    with pytest.raises(AllEnginesLost, match=r"no engine is left, and each had its 2 restarts"):
        play(plan_with(num_replicas=1, death_every_s=5.0, all_die_frac=1.0, max_restarts=2))


def test_versions_that_are_written_over_on_their_way_go_live_with_newer_ones() -> None:
    """Pulls fail now and then, and restarts hold syncs up, while a learner without a rest packs slowly."""
    times = {"train_s": 0.1, "pack_s": 2.0, "sync_s": 6.0, "restart_s": 5.0}
    losses = {"failed_pull_frac": 0.3, "death_every_s": 40.0}
    run = play(plan_with(num_steps=150, max_staleness=6, num_replicas=4, **times, **losses))
    check_promises(run)
    learner = run.fleet.learner
    assert learner.num_missing_while_packing >= 2, "the newer version was not there yet"
    assert learner.num_missing > learner.num_missing_while_packing
    assert len(run.running) < 150 - 10, "some versions never went live themselves"


def test_rollout_workers_that_die_cost_no_group() -> None:
    run = play(plan_with(num_workers=2, worker_death_every_s=20.0, restart_s=15.0, max_retries=0))
    assert run.fleet.num_lost["worker"] >= 5
    check_promises(run)
    assert run.buffer.stats().retried > 0
    assert not run.buffer.stats().dropped


plans = st.builds(
    Plan,
    num_steps=st.integers(3, 12),
    groups_per_step=st.integers(1, 4),
    max_staleness=st.integers(0, 4),
    num_replicas=st.integers(1, 4),
    num_workers=st.integers(1, 2),
    num_arena_slots=st.sampled_from([1, 2, 3]),
    workload=st.builds(Workload, tail=st.sampled_from([0.7, 3.0]), stream_interval=st.sampled_from([7, 64])),
    max_response_tokens=st.sampled_from([20, 200]),
    train_s=st.sampled_from([0.0, 1.0, 30.0]),
    pack_s=st.sampled_from([0.0, 1.0, 10.0]),
    sync_s=st.sampled_from([0.0, 1.0, 20.0]),
    failed_pull_frac=st.sampled_from([0.0, 0.1, 0.3]),
    aborts_at_commit=st.booleans(),
    death_every_s=st.sampled_from([0.0, 10.0, 100.0]),
    all_die_frac=st.sampled_from([0.0, 0.1, 0.5]),
    worker_death_every_s=st.sampled_from([0.0, 30.0]),
    restart_s=st.sampled_from([0.0, 5.0, 200.0]),
    max_retries=st.integers(0, 2),
    repack_below=st.sampled_from([0, 4]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_every_promise_holds_whatever_is_lost(plan: Plan) -> None:
    run = play(plan)
    check_promises(run)
    check_tables(run)
