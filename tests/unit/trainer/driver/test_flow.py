"""Queue times, idle engines and lost work, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from rollout.types import Group
from tests.fakes.scripted_run import prompt_set, trajectory
from trainer.driver.step_metrics import GroupFlow

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
    record = story.at(30).step_record([group(0), group(1)], num_replicas=1, slot_wait_s=0.0, engines_idle_frac=None)
    queues = {name.removeprefix("queue/"): value for name, value in record.items() if name.startswith("queue/")}
    assert queues == {
        "admitted_to_claimed_s": 1.5, "admitted_to_claimed_s_max": 2.0,
        "claimed_to_finished_s": 6.5, "claimed_to_finished_s_max": 10.0,
        "finished_to_taken_s": 11.5, "finished_to_taken_s_max": 15.0,
    }  # fmt: skip
    assert not story.flow._passages, "a trained group is forgotten"


def test_the_wait_for_an_engine_is_that_of_the_steps_answers() -> None:
    def waited(group_id: int, *seconds: float) -> Group:
        whole = group(group_id, lengths=(2,) * len(seconds))
        answers = zip(whole.trajectories, seconds, strict=True)
        return replace(whole, trajectories=[replace(t, timings={"engine_wait_s": s}) for t, s in answers])

    groups = [waited(0, 0.0, 2.0), waited(1, 4.0, 10.0)]
    record = Story().flow.step_record(groups, num_replicas=1, slot_wait_s=0.0, engines_idle_frac=None)
    assert (record["queue/for_engine_s"], record["queue/for_engine_s_max"]) == (4.0, 10.0)


@pytest.mark.parametrize(("num_replicas", "idle_s"), [(1, 20.0 + 10.0), (2, 20.0 + 10.0 / 2 + 10.0), (4, 42.5)])
def test_until_engines_speak_one_without_a_group_is_taken_for_idle(num_replicas: int, idle_s: float) -> None:
    story = Story()
    for group_id in (0, 1):
        story.at(0).admitted(group_id)
    story.at(20).claimed(0)  # one with the engines for 5 s, two for 10 s, one for 5 s, none for 10 s
    story.at(25).claimed(1)
    story.at(35).finished(group(0))
    story.at(40).finished(group(1))
    record = story.at(50).step_record([], num_replicas=num_replicas, slot_wait_s=0.0, engines_idle_frac=None)
    assert record["perf/groups_running"] == pytest.approx((5 + 20 + 5) / 50)
    slow = sum(max(0, num_replicas - n) / num_replicas for n in [0] * 20 + [1] * 5 + [2] * 10 + [1] * 5 + [0] * 10)
    assert record["wait/engines_idle_s"] == pytest.approx(slow)
    assert record["perf/engines_busy_frac"] == pytest.approx(1 - slow / 50)
    assert slow == idle_s


def test_what_engines_say_of_themselves_counts() -> None:
    story = Story()
    story.at(0).admitted(0)
    story.at(0).claimed(0)
    record = story.at(20).step_record([], num_replicas=2, slot_wait_s=0.0, engines_idle_frac=0.375)
    assert (record["wait/engines_idle_s"], record["perf/engines_busy_frac"]) == (7.5, 0.625)


def test_a_line_is_about_the_time_since_the_line_before() -> None:
    story = Story()
    record = story.at(10).step_record([], num_replicas=1, slot_wait_s=4.0, engines_idle_frac=None)
    assert record["wait/engines_idle_s"] == 10.0
    story.at(10).admitted(0)
    story.at(10).claimed(0)
    record = story.at(16).step_record([], num_replicas=1, slot_wait_s=7.0, engines_idle_frac=None)
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
    unjudged = replace(whole.trajectories[0], status="failed", reward=nan, num_lost_tokens=3)
    judged = replace(whole.trajectories[1], num_lost_tokens=8)
    story.at(4).finished(replace(whole, trajectories=[unjudged, judged]))
    record = story.at(9).step_record([], num_replicas=1, slot_wait_s=0.0, engines_idle_frac=None)
    lost = {name.removeprefix("discarded/"): v for name, v in record.items() if name.startswith("discarded/")}
    assert lost == {"filtered_tokens": 5, "failed_tokens": 7, "given_up_tokens": 8, "retried_s": 2.0, "dropped_s": 3.0}
    assert set(story.flow._passages) == {1, 3}, "filtered and dropped groups are forgotten"
    again = story.at(10).step_record([], num_replicas=1, slot_wait_s=0.0, engines_idle_frac=None)
    assert again["discarded/filtered_tokens"] == 0
    story.at(11).claimed(1)
    story.at(12).finished(group(1))
    record = story.at(12).step_record([group(1)], num_replicas=1, slot_wait_s=0.0, engines_idle_frac=None)
    assert record["queue/admitted_to_claimed_s"] == 9.0, "a retry waits anew"
