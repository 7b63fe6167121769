"""When an engine has work and when it stands still, by a clock that moves whenever somebody looks at it."""

from __future__ import annotations

import itertools

from rollout.engine.load_meter import Activity


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
