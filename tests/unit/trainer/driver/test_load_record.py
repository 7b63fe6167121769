"""Metrics of the engines' load, out of what each rollout worker sees."""

from __future__ import annotations

from dataclasses import replace

from rollout.engine.interface import EngineLoad, EngineTimes
from rollout.fleet.engine_monitor import LoadReport, ReplicaLoad
from trainer.driver.fleet import engine_times, load_record

LOAD = EngineLoad(running=30, waiting=1, kv_usage_frac=0.5, num_preemptions=None)
SEEN = ReplicaLoad(limit=None, in_flight=0, load=LOAD)


def report(in_flight: int, *, limit: int | None, held: int, moved: tuple[int, int]) -> LoadReport:
    return LoadReport(
        replicas={"e0": replace(SEEN, limit=limit, in_flight=in_flight)},
        held=held,
        moved_requests=moved[0],
        moved_tokens=moved[1],
        rescued_requests=2,
        rescued_tokens=30,
        quarantined={},
        lost_tokens=7,
    )


def test_what_workers_do_adds_up_and_what_an_engine_says_does_not() -> None:
    reports = [report(10, limit=16, held=2, moved=(3, 900)), report(20, limit=16, held=5, moved=(4, 1000))]
    assert load_record(reports) == {
        "engine/held": 7,
        "engine/moved_requests": 7,
        "engine/moved_tokens": 1900,
        "engine/rescued_requests": 4,
        "engine/rescued_tokens": 60,
        "discarded/attempt_tokens": 14,
        "engine/limit/e0": 32,
        "engine/in_flight/e0": 30,
        "engine/running/e0": 30,
        "engine/waiting/e0": 1,
        "engine/kv_usage_frac/e0": 0.5,
    }


def test_of_an_engine_counts_what_it_said_last() -> None:
    def saw(load: EngineLoad | None) -> LoadReport:
        return replace(report(1, limit=None, held=0, moved=(0, 0)), replicas={"e0": replace(SEEN, load=load)})

    early, late, new = (
        EngineTimes(began_at=began, busy_s=busy, up_s=up) for began, busy, up in ((1, 3, 9), (1, 4, 10), (20, 0, 2))
    )
    said = [replace(LOAD, times=times) for times in (early, late, None)]
    assert engine_times([*map(saw, said), saw(None)]) == {"e0": late}
    assert engine_times([saw(replace(LOAD, times=new)), *map(saw, said)]) == {"e0": new}, (
        "it took the place of the other"
    )
    assert engine_times([saw(None)]) == {}
