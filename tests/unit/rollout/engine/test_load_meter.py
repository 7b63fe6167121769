"""When an engine has work and when it stands still, by a clock that moves whenever somebody looks at it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from rollout.engine.load_meter import Activity, LoadMeter


def test_an_engine_that_need_not_generate_does_not_stand_still() -> None:
    activity = Activity(itertools.count().__next__)
    assert activity.still_s(should_generate=False) == 0.0
    assert activity.still_s(should_generate=True) > 0.0


def test_it_is_never_busier_than_it_is_old() -> None:
    activity = Activity(itertools.count().__next__)
    activity.begin()
    first, second = activity.times(), activity.times()
    assert second.busy_s - first.busy_s == second.up_s - first.up_s > 0
    activity.end()
    busy_s = activity.times().busy_s
    activity.end()
    assert activity.times().busy_s == busy_s, "there was nothing to end"
    assert activity.times().began_at == first.began_at == 0


def test_what_a_commit_takes_out_is_no_preemption() -> None:
    meter = LoadMeter()

    def step(running: int, preempted: int) -> int | None:
        stats = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=0, kv_cache_usage=0.5)
        meter.record(stats, SimpleNamespace(num_preempted_reqs=preempted))
        return meter.load(running).num_preemptions

    assert step(4, 1) == 1
    meter.before_commit("recompute")
    assert [step(2, 2), step(4, 1), step(4, 2)] == [1, 1, 2], "four were taken out, the fifth lacked room"
    meter.before_commit("recompute")
    meter.before_commit("recompute")
    assert step(3, 5) == 3, "one that ended unsaid is not held against the next"
    meter.before_commit("keep")
    assert step(3, 1) == 4


def test_commits_that_follow_each_other_before_all_is_computed_again_hold_nothing_against_the_engine() -> None:
    meter = LoadMeter()

    def step(running: int, preempted: int) -> int | None:
        stats = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=64 - running, kv_cache_usage=0.5)
        meter.record(stats, SimpleNamespace(num_preempted_reqs=preempted))
        return meter.load(64).num_preemptions

    step(64, 0)
    for _ in range(3):  # each time eight are resumed, say that they were preempted, and are preempted again
        meter.before_commit("recompute")
        assert meter.load(64).running > 0, "it has not lost them"
        assert step(8, 8) == 0
    assert [step(running, 8) for running in range(16, 72, 8)] == [0] * 7
    assert meter.load(0).num_preemptions == 0
    assert step(64, 1) == 1
