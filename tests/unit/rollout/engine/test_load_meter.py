"""What an engine reports of its load: preemptions, how long it is stalled, and how busy it has been."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from rollout.engine.load_meter import Activity, LoadMeter


class Scheduler:
    """vLLM's scheduler as the meter sees it."""

    def __init__(self) -> None:
        self.meter = LoadMeter()

    def step(self, running: int, preempted: int, *, inside: int | None = None) -> int | None:
        """The preemptions that the engine reports after the step."""
        inside = running if inside is None else inside
        stats = SimpleNamespace(num_running_reqs=running, num_waiting_reqs=inside - running, kv_cache_usage=0.5)
        self.meter.record(stats, SimpleNamespace(num_preempted_reqs=preempted))
        return self.meter.load(inside).num_preemptions


def test_what_a_commit_takes_out_is_no_preemption() -> None:
    engine = Scheduler()
    assert engine.step(4, 1) == 1
    engine.meter.before_commit("recompute")
    assert [engine.step(2, 2), engine.step(4, 1), engine.step(4, 2)] == [1, 1, 2], (
        "four were taken out, one lacked room"
    )
    engine.meter.before_commit("recompute")
    engine.meter.before_commit("recompute")
    assert engine.step(3, 5) == 3, "one that ended without a report does not excuse the next"
    engine.meter.before_commit("keep")
    assert engine.step(3, 1) == 4


def test_commits_in_quick_succession_count_no_preemption_either() -> None:
    engine = Scheduler()
    engine.step(64, 0)
    for _ in range(3):  # each time eight are resumed, reported as preempted, and preempted again
        engine.meter.before_commit("recompute")
        assert engine.meter.load(64).running > 0, "it has not lost them"
        assert engine.step(8, 8, inside=64) == 0
    assert [engine.step(running, 8, inside=64) for running in range(16, 72, 8)] == [0] * 7
    assert engine.meter.load(0).num_preemptions == 0
    assert engine.step(64, 1) == 1


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


def test_an_engine_is_stalled_from_its_last_token_on_unless_it_need_not_generate() -> None:
    now = 500.0
    activity = Activity(lambda: now)
    activity.begin()
    now += 5.0
    assert activity.still_s(should_generate=True) == 5.0
    activity.moved()
    assert activity.still_s(should_generate=True) == 0.0
    now += 200.0
    assert activity.still_s(should_generate=True) == 200.0
    assert activity.still_s(should_generate=False) == 0.0
    now += 1.0
    assert activity.still_s(should_generate=True) == 1.0, "time in which it need not generate does not count"
