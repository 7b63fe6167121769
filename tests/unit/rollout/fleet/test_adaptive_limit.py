from __future__ import annotations

import math
import random

import pytest

from rollout.engine.interface import EngineStatus
from rollout.fleet.adaptive_limit import (
    CUT,
    KV_CRITICAL,
    KV_ROOM,
    TRIM,
    AdaptiveLimit,
    LimitRange,
)

BOUNDS = LimitRange(lowest=8, highest=256)


def load(*, waiting: int = 0, kv: float | None = 0.5, preemptions: int | None = 0) -> EngineStatus:
    return EngineStatus(running=1, waiting=waiting, kv_usage_frac=kv, num_preemptions=preemptions)


def at(limit: int, **fields: int) -> AdaptiveLimit:
    return AdaptiveLimit(bounds=BOUNDS, limit=limit, num_preemptions=0, **fields)


def busy(in_flight: int, num_queued: int = 100) -> dict[str, int]:
    return {"in_flight": in_flight, "num_queued": num_queued}


@pytest.mark.parametrize(
    ("state", "said", "queue", "limit"),
    [
        (at(100), load(), busy(100), 108),
        (at(252), load(), busy(252), 256),
        (at(100), load(kv=None, preemptions=None), busy(100), 108),
        (at(100), load(), busy(100, num_queued=0), 100),  # no one requests more
        (at(100), load(kv=KV_ROOM), busy(100), 100),
        (at(100), load(waiting=3), busy(100), 100),  # perhaps a burst
        (at(100, queued_polls=1), load(waiting=3, kv=KV_ROOM), busy(100), 90),
        (at(100, queued_polls=1), load(waiting=3, kv=None), busy(100), 90),
        (at(100, queued_polls=1), load(), busy(100), 108),
        (at(100), load(preemptions=1), busy(100), 90),
        (at(100), load(preemptions=1), busy(60), 54),  # of what runs, or it would change nothing
        (at(100), load(kv=KV_CRITICAL), busy(100), 50),
        (at(100), load(kv=KV_CRITICAL, preemptions=5), busy(100), 50),
        (at(10), load(kv=KV_CRITICAL), busy(10), 8),
        (at(100), load(kv=KV_CRITICAL, preemptions=5), busy(101), 100),  # the last step is still draining
        (AdaptiveLimit(bounds=BOUNDS, limit=100), load(preemptions=7), busy(100), 108),  # 7 of an earlier time
        (at(100), load(preemptions=None), busy(100), 108),
    ],
)
def test_each_sign_leads_to_its_move(
    state: AdaptiveLimit, said: EngineStatus, queue: dict[str, int], limit: int
) -> None:
    assert state.next(said, **queue).limit == limit


def test_a_burst_of_prompts_beside_an_empty_cache_takes_nothing_back() -> None:
    """An engine of a shared device wakes up and gets a whole step's prompts, whose prefill takes several looks."""
    state = AdaptiveLimit.start(BOUNDS)
    for waiting in (200, 150, 100, 50):
        state = state.next(load(waiting=waiting, kv=0.1), **busy(256))
    assert state.limit == 256
    state = state.next(load(waiting=200, kv=KV_ROOM), **busy(256))
    assert state.limit == 256, "looks at a burst do not count for the queue that comes after it"


@pytest.mark.parametrize("seed", range(8))
def test_it_begins_at_the_upper_bound_never_leaves_its_bounds_and_repeats_itself(seed: int) -> None:
    def play() -> list[int]:
        rng = random.Random(seed)
        lowest = rng.randint(1, 50)
        highest = lowest if seed == 0 else rng.randint(lowest, 500)  # a fixed limit, too
        state = AdaptiveLimit.start(LimitRange(lowest=lowest, highest=highest))
        assert state.limit == highest
        limits: list[int] = []
        for _ in range(300):
            said = load(
                waiting=rng.choice([0, 0, rng.randint(1, 50)]),
                kv=rng.choice([None, rng.random()]),
                preemptions=rng.choice([None, rng.randint(0, 5)]),
            )
            state = state.next(said, in_flight=rng.randint(0, 600), num_queued=rng.choice([0, 9]))
            assert state.bounds.lowest <= state.limit <= state.bounds.highest
            limits.append(state.limit)
        return limits

    assert play() == play()


class Engine:
    """Has room for `capacity` requests; every one beyond is preempted at once."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.preemptions = capacity, 0

    def look(self, in_flight: int) -> EngineStatus:
        self.preemptions += max(0, in_flight - self.capacity)
        return load(kv=min(KV_ROOM - 0.01, in_flight / self.capacity), preemptions=self.preemptions)


@pytest.mark.parametrize("capacity", [8, 9, 20, 77, 150, 255, 256, 1000])
@pytest.mark.parametrize("step_lag", [0, 3])
def test_under_a_constant_capacity_it_settles_within_the_stated_amplitude(capacity: int, step_lag: int) -> None:
    """`step_lag`: looks that it takes until what is too much has drained."""
    engine, state, in_flight = Engine(capacity), AdaptiveLimit.start(BOUNDS), BOUNDS.highest
    limits: list[int] = []
    for _ in range(600):
        state = state.next(engine.look(in_flight), **busy(in_flight))
        too_many = max(0, in_flight - state.limit)
        in_flight = state.limit + too_many - math.ceil(too_many / (step_lag + 1))
        limits.append(state.limit)
    settled, reachable = limits[300:], min(capacity, BOUNDS.highest)
    assert max(settled) <= min(BOUNDS.highest, reachable + BOUNDS.step)
    assert min(settled) >= max(BOUNDS.lowest, math.floor(TRIM * (reachable + 1)) - (reachable == BOUNDS.highest))
    assert max(settled) >= reachable, "all of the capacity is used again and again"


def test_it_recovers_after_a_cut_in_bounded_time() -> None:
    state = at(200).next(load(kv=0.99), **busy(200))
    assert state.limit == 200 * CUT
    for _ in range(math.ceil((256 - 100) / BOUNDS.step)):
        state = state.next(load(), **busy(state.limit))
    assert state.limit == 256


def test_repeated_signs_of_one_overload_step_down_once_until_it_has_drained() -> None:
    state, preemptions = at(200), 0
    for in_flight in (200, 195, 190, 185, 181):
        preemptions += 10
        state = state.next(load(preemptions=preemptions), **busy(in_flight))
        assert state.limit == 180
    assert state.next(load(preemptions=preemptions + 1), **busy(180)).limit == 162


def test_shares_add_up_to_no_more_than_the_whole() -> None:
    assert LimitRange(lowest=8, highest=256).share(3) == LimitRange(lowest=2, highest=85)
    assert LimitRange(lowest=1, highest=2).share(4) == LimitRange(lowest=1, highest=1)
    with pytest.raises(ValueError, match="1 <= lowest <= highest, got 3 and 2"):
        LimitRange(lowest=3, highest=2)
