"""The start of all actors, which answer by hand."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.scripted_run import config
from tests.unit.trainer.learner.test_group import HandActor
from trainer.driver.actors import Actors, start_actors
from trainer.learner.actor import SetupReport
from trainer.learner.group import LearnerGroup
from trainer.telemetry.trace import Tracer

if TYPE_CHECKING:
    from pathlib import Path

SILENT = Tracer(None)


def engine(answer: object = None, **startup_s: float) -> HandActor:
    return HandActor(start=startup_s if answer is None else answer)


def set_up(*warnings: str, **seconds: float) -> SetupReport:
    return SetupReport(seconds=seconds, warnings=warnings)


def actors(ranks: list[HandActor], engines: list[HandActor], workers: list[HandActor]) -> Actors:
    ranks[0].answers["node_address"] = ("10.0.0.1", 77)
    for rank in ranks:
        rank.answers.setdefault("setup", set_up(imports=0.0))
    learner = LearnerGroup(ranks, timeout_s=30.0)
    return Actors(learner=learner, engines={f"replica_{i}": e for i, e in enumerate(engines)}, workers=workers)


async def test_log_and_trace_say_where_the_time_of_each_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tracer = Tracer(tmp_path / "trace.json")
    ranks = [HandActor(setup=set_up(imports=3.0, model=1.0)), HandActor(setup=set_up(imports=2.0, model=5.0))]
    parts = actors(ranks, [engine(imports=7.0, processes=20.5)], [HandActor()])
    await start_actors(config(), parts, None, tracer)
    tracer.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    spans = {event["name"]: event["args"] for event in events if event["ph"] == "b"}
    assert spans == {
        "learner": {"imports": 3.0, "model": 5.0},
        "replica_0": {"imports": 7.0, "processes": 20.5},
        "rollout_worker_0": {},
    }
    assert re.search(r"learner is ready after \d+\.\d s \(imports 3\.0 s, model 5\.0 s\)", caplog.text)
    assert re.search(r"replica_0 is ready after \d+\.\d s \(imports 7\.0 s, processes 20\.5 s\)", caplog.text)


async def test_what_ranks_warn_of_is_told_once_by_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    ranks = [HandActor(setup=set_up("no such kernel")), HandActor(setup=set_up("no such kernel", "another"))]
    await start_actors(config(), actors(ranks, [engine()], [HandActor()]), None, SILENT)
    assert [record.getMessage() for record in caplog.records] == ["learner: no such kernel", "learner: another"]


async def test_the_first_failure_ends_the_start_while_others_hang() -> None:
    parts = actors(
        [HandActor(setup="hang")], [engine("hang"), engine(ValueError("no memory"))], [HandActor(start="hang")]
    )
    with pytest.raises(ValueError, match="no memory"):
        await start_actors(config(), parts, None, SILENT)


async def test_a_start_that_takes_too_long_says_which_limit_it_had() -> None:
    parts = actors([HandActor()], [engine("hang")], [HandActor()])
    with pytest.raises(TimeoutError, match="startup_timeout_s"):
        await start_actors(config(trainer={"startup_timeout_s": 0.05}), parts, None, SILENT)


async def test_on_shared_devices_engines_begin_when_the_learner_has_left() -> None:
    order: list[str] = []

    class Noting(HandActor):
        def __getattr__(self, name: str) -> Any:
            order.append(name)
            return super().__getattr__(name)

    replica = Noting(start=engine().answers["start"])
    cfg = config(mode={"name": "colocated"})
    await start_actors(cfg, actors([Noting()], [replica], []), None, SILENT)
    assert order == ["node_address", "setup", "offload", "start"]
