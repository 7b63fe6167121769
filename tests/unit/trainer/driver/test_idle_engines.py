"""The idle share of engines, from their own words and by a clock that the test moves."""

from __future__ import annotations

import pytest

from rollout.engine.interface import EngineTimes
from trainer.driver.fleet import IdleEngines


class Story:
    """Two replicas, a and b; `hear(seconds, a=(began_at, busy_s, up_s), ...)`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.engines = IdleEngines(clock=lambda: self.now)

    def hear(self, seconds: float, *lost: str, **said: tuple[float, float, float]) -> None:
        self.now = 100.0 + seconds
        times = {name: EngineTimes(began_at=a, busy_s=busy, up_s=up) for name, (a, busy, up) in said.items()}
        self.engines.hear(times, lost)

    def take(self) -> float | None:
        return self.engines.take_frac(num_replicas=2)


def test_the_share_is_of_the_time_since_the_line_before() -> None:
    story = Story()
    story.hear(0, a=(1, 50, 100))
    assert story.take() is None
    story.hear(10, a=(1, 60, 110), b=(2, 0, 40))
    assert story.take() is None, "b has spoken only once"
    story.hear(20, a=(1, 60, 120), b=(2, 5, 50))
    story.hear(30, a=(1, 60, 130), b=(2, 15, 60))
    assert story.take() == pytest.approx((1 + 0.25) / 2), "a had nothing, b for a quarter of its time"
    story.hear(30.2, a=(1, 60, 130), b=(2, 15, 60))
    assert story.take() == pytest.approx(0.625), "nothing new: as busy as before"


def test_a_loss_costs_the_time_without_an_engine_and_no_other() -> None:
    story = Story()
    story.hear(0, a=(1, 0, 10), b=(2, 0, 10))
    story.hear(90, a=(1, 90, 100), b=(2, 90, 100))
    story.hear(91, "b", a=(1, 91, 101), b=(2, 90, 100))
    story.hear(100, "b", a=(1, 100, 110), b=(2, 90, 100))
    assert story.take() == pytest.approx((0 + 0.1) / 2), "b was there for 90 s of 100"
    story.hear(180, "b", a=(1, 180, 190))
    story.hear(190, a=(1, 190, 200), b=(60, 4, 30))
    story.hear(200, a=(1, 200, 210), b=(60, 14, 40))
    assert story.take() == pytest.approx((0 + 0.86) / 2), "its start is no work, the 14 s after it are"


def test_a_loss_that_nobody_noticed_costs_as_much() -> None:
    story = Story()
    story.hear(0, a=(1, 0, 10), b=(2, 0, 10))
    story.hear(40, a=(1, 40, 50), b=(2, 40, 50))
    story.hear(100, a=(1, 100, 110), b=(60, 30, 35))
    assert story.take() == pytest.approx((0 + 0.3) / 2)


def test_a_replica_that_was_never_there_is_idle() -> None:
    story = Story()
    for seconds in (0, 10, 20):
        story.hear(seconds, "b", a=(1, seconds, seconds + 1))
    assert story.take() == pytest.approx(0.5)
