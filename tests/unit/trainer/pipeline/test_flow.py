"""Queue times, idle engines and lost work, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from rollout.engine.base import EngineTimes
from rollout.types import Group
from tests.fakes.scripted_run import prompt_set, trajectory
from trainer.pipeline.flow import GroupFlow

PROMPT = prompt_set(1).prompts[0]


def group(group_id: int, *, lengths: tuple[int, ...] = (2, 3)) -> Group:
    parts = [trajectory(PROMPT, i, [(0, n)], reward=1.0) for i, n in enumerate(lengths)]
    return Group(group_id=group_id, prompt=PROMPT, trajectories=parts, start_version=0)


class Story:
    """A flow and its clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.flow = GroupFlow(clock=lambda: self.now)

    def at(self, seconds: float) -> GroupFlow:
        self.now = 100.0 + seconds
        return self.flow


def test_every_wait_of_a_group_has_its_own_figure() -> None:
    story = Story()
    story.at(0).admitted(0)
    story.at(1).admitted(1)
    story.at(2).claimed(0)
    story.at(2).claimed(1)
    story.at(5).finished(group(0))
    story.at(12).finished(group(1))
    story.at(20).taken([group(0), group(1)])
    record = story.at(30).step_record([group(0), group(1)], num_replicas=1, slot_wait_s=0.0, engine_times={})
    queues = {name.removeprefix("queue/"): value for name, value in record.items() if name.startswith("queue/")}
    assert queues == {
        "admitted_to_claimed_s": 1.5, "admitted_to_claimed_s_max": 2.0,
        "claimed_to_finished_s": 6.5, "claimed_to_finished_s_max": 10.0,
        "finished_to_taken_s": 11.5, "finished_to_taken_s_max": 15.0,
    }  # fmt: skip
    assert not story.flow._passages, "a trained group is forgotten"


@pytest.mark.parametrize(("num_replicas", "idle_s"), [(1, 20.0 + 10.0), (2, 20.0 + 10.0 / 2 + 10.0), (4, 42.5)])
def test_until_engines_speak_one_without_a_group_is_taken_for_idle(num_replicas: int, idle_s: float) -> None:
    story = Story()
    for group_id in (0, 1):
        story.at(0).admitted(group_id)
    story.at(20).claimed(0)  # one with the engines for 5 s, two for 10 s, one for 5 s, none for 10 s
    story.at(25).claimed(1)
    story.at(35).finished(group(0))
    story.at(40).finished(group(1))
    record = story.at(50).step_record([], num_replicas=num_replicas, slot_wait_s=0.0, engine_times={})
    assert record["perf/groups_running"] == pytest.approx((5 + 20 + 5) / 50)
    slow = sum(max(0, num_replicas - n) / num_replicas for n in [0] * 20 + [1] * 5 + [2] * 10 + [1] * 5 + [0] * 10)
    assert record["wait/engines_idle_s"] == pytest.approx(slow)
    assert record["perf/engines_busy_frac"] == pytest.approx(1 - slow / 50)
    assert slow == idle_s


def test_engines_say_themselves_how_long_they_were_idle() -> None:
    story = Story()

    def line(seconds: float, times: dict[str, tuple[float, float, float]], *lost: str) -> dict[str, float]:
        told = {name: EngineTimes(began_at=a, busy_s=busy, up_s=up) for name, (a, busy, up) in times.items()}
        flow = story.at(seconds)
        return flow.step_record([], num_replicas=2, slot_wait_s=0.0, engine_times=told, lost_engines=lost)

    story.at(0).admitted(0)
    story.at(0).claimed(0)
    assert line(10, {"a": (1, 50, 100)})["wait/engines_idle_s"] == 5.0, "one group for two engines"
    assert line(20, {"a": (1, 60, 110), "b": (2, 0, 40)})["wait/engines_idle_s"] == 5.0, "b has spoken only once"
    found = line(40, {"a": (1, 60, 130), "b": (2, 15, 60)})
    assert found["wait/engines_idle_s"] == pytest.approx((20 + 5) / 2), "a had nothing, b for a quarter of its time"
    assert found["perf/engines_busy_frac"] == pytest.approx(0.375)
    again = line(44, {"a": (1, 60, 130), "b": (2, 15, 60)})
    assert again["wait/engines_idle_s"] == pytest.approx(4 * 0.625), "nothing new: as busy as before"
    assert line(54, {"a": (1, 70, 140), "b": (2, 15, 60)}, "b")["wait/engines_idle_s"] == 5.0, "b is not there"
    found = line(64, {"a": (1, 80, 150), "b": (60, 34, 80)})
    assert found["perf/engines_busy_frac"] == pytest.approx((1 + 0.75) / 2), "a new b, of which nothing is known yet"
    found = line(74, {"a": (1, 90, 160), "b": (60, 40, 90)})
    assert found["perf/engines_busy_frac"] == pytest.approx((1 + 0.6) / 2)


def test_a_line_is_about_the_time_since_the_line_before() -> None:
    story = Story()
    assert story.at(10).step_record([], num_replicas=1, slot_wait_s=4.0, engine_times={})["wait/engines_idle_s"] == 10.0
    story.at(10).admitted(0)
    story.at(10).claimed(0)
    record = story.at(16).step_record([], num_replicas=1, slot_wait_s=7.0, engine_times={})
    assert (record["wait/engines_idle_s"], record["wait/producer_for_slots_s"]) == (0.0, 3.0)
    assert record["perf/engines_busy_frac"] == 1.0


def test_lost_work_is_told_apart() -> None:
    story = Story()
    for group_id in range(4):
        story.at(0).admitted(group_id)
        story.at(0).claimed(group_id)
    story.at(1).filtered(group(0))
    story.at(2).failed(1, "retried")
    story.at(3).failed(2, "dropped")
    whole = group(3, lengths=(4, 6))
    unjudged = replace(whole.trajectories[0], status="failed", reward=nan)
    story.at(4).finished(replace(whole, trajectories=[unjudged, whole.trajectories[1]]))
    record = story.at(9).step_record([], num_replicas=1, slot_wait_s=0.0, engine_times={})
    lost = {name.removeprefix("discarded/"): v for name, v in record.items() if name.startswith("discarded/")}
    assert lost == {"filtered_tokens": 5, "failed_tokens": 4, "retried_s": 2.0, "dropped_s": 3.0}
    assert set(story.flow._passages) == {1, 3}, "filtered and dropped groups are forgotten"
    again = story.at(10).step_record([], num_replicas=1, slot_wait_s=0.0, engine_times={})
    assert again["discarded/filtered_tokens"] == 0
    story.at(11).claimed(1)
    story.at(12).finished(group(1))
    record = story.at(12).step_record([group(1)], num_replicas=1, slot_wait_s=0.0, engine_times={})
    assert record["queue/admitted_to_claimed_s"] == 9.0, "a retry waits anew"
