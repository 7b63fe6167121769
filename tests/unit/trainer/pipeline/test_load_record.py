"""Metrics of the engines' load, out of what each rollout worker sees."""

from __future__ import annotations

from rollout.engine.base import EngineLoad
from rollout.load_watch import LoadReport, ReplicaLoad
from trainer.pipeline.workers import load_record


def report(in_flight: int, *, limit: int | None, held: int, moved: tuple[int, int]) -> LoadReport:
    load = EngineLoad(running=30, waiting=1, kv_usage_frac=0.5, num_preemptions=None)
    seen = ReplicaLoad(limit=limit, in_flight=in_flight, load=load)
    return LoadReport(
        replicas={"e0": seen},
        held=held,
        moved_requests=moved[0],
        moved_tokens=moved[1],
        rescued_requests=2,
        rescued_tokens=30,
        quarantined={},
    )


def test_what_workers_do_adds_up_and_what_an_engine_says_does_not() -> None:
    reports = [report(10, limit=16, held=2, moved=(3, 900)), report(20, limit=16, held=5, moved=(4, 1000))]
    assert load_record(reports) == {
        "engine/held": 7,
        "engine/moved_requests": 7,
        "engine/moved_tokens": 1900,
        "engine/rescued_requests": 4,
        "engine/rescued_tokens": 60,
        "engine/limit/e0": 32,
        "engine/in_flight/e0": 30,
        "engine/running/e0": 30,
        "engine/waiting/e0": 1,
        "engine/kv_usage_frac/e0": 0.5,
    }
