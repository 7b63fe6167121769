"""What counts as a failure, and the figures of a case, from samples with known numbers."""

from __future__ import annotations

import json
import math
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest

from weight_sync.bench import report
from weight_sync.bench.case import Case
from weight_sync.bench.ceiling import volumes_of
from weight_sync.bench.processes import Span
from weight_sync.bench.results import BaselineResult, Results, SyncSample
from weight_sync.messages import PullReport, SyncReport
from weight_sync.plan.types import Manifest, PullPlan, Run

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T", bound=msgspec.Struct)


def zeros(kind: type[T], **values: Any) -> T:
    """A report of which only some numbers matter."""
    empty = {"counters": {}, "sources": (), "relays": ()}
    fields = {field.name: empty.get(field.name, 0) for field in msgspec.structs.fields(kind) if field.required}
    return kind(**{**fields, **values})


def sample(pull_s: float, *, skipped: int = 0) -> SyncSample:
    pulled = {"pull_s": pull_s, "attest_s": 0.01, "nbytes": 2_000_000_000}
    synced = {"pull_s": pull_s, "replicas_skipped": skipped}
    return SyncSample(
        started=100.0,
        published=100.5,
        stopped=100.5 + pull_s + 0.2,
        publish_s=0.005,
        report=zeros(SyncReport, **synced),
        pulls={"r0/0": zeros(PullReport, **pulled)},
        spans=(Span("learner 0", "publish", 100.0, 100.5), Span("r0", "commit", 100.9, 101.0)),
    )


def results(**changes: Any) -> Results:
    found = Results(case=Case(model="tiny"), device="cpu", transport="ipc", commit="staged")
    found.worker_bytes = {"r0/0": 2_000_000_000}
    found.samples = [sample(0.2), sample(0.1), sample(0.4)]
    found.first_counters = found.last_counters = {"allocations": 3, "sockets": 2, "versions_superseded": 0}
    found.first_memory = found.last_memory = {"learner 0": 1 << 30}
    found.ceiling_s = [0.16, 0.15, 0.18]
    found.baselines = {"rank0_broadcast": BaselineResult(seconds=[1.0], is_bit_exact=True, has_written=True)}
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_figures_are_median_and_maximum_and_the_ratio_is_to_the_best_copy() -> None:
    found = results()
    assert found.figures()["pull_s"] == {"p50": 0.2, "max": 0.4}
    assert found.figures()["total_s"]["max"] == pytest.approx(1.1)
    worker = found.worker_figures()["r0/0"]
    assert (worker["gb_s_p50"], worker["gb_s_min"]) == (pytest.approx(10.0), pytest.approx(5.0))
    ceiling = found.ceiling()
    assert (ceiling["s_p50"], ceiling["gb_s_best"]) == (0.16, pytest.approx(2 / 0.15))
    assert ceiling["ratio"] == pytest.approx(0.75)
    assert found.problems() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failures": ["PullTimeout: r0"]}, "PullTimeout: r0"),
        ({"mismatches": ["r0/0 differs"]}, "r0/0 differs"),
        ({"last_counters": {"allocations": 4, "sockets": 2}}, "allocations grew by 1 after the first sync"),
        ({"last_memory": {"learner 0": (1 << 30) + (65 << 20)}}, "memory of learner 0 grew by 65 MiB"),
        ({"samples": [sample(0.1, skipped=1)]}, "left out 1 times"),
        ({"generation": {"requests_lost": 2}}, "2 requests were lost"),
        (
            {"baselines": {"x": BaselineResult(seconds=[1.0], is_bit_exact=False, has_written=True)}},
            "x and weight sync left different bytes",
        ),
        (
            {"baselines": {"x": BaselineResult(seconds=[1.0], is_bit_exact=True, has_written=False)}},
            "x and weight sync left different bytes",
        ),
    ],
)
def test_whatever_went_wrong_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    found = results(**changes)
    assert any(problem in text for text in found.problems())
    assert f"FAILED: {found.problems()[0]}" in report.table(found)
    assert found.as_json()["ok"] is False


def test_counters_of_events_and_a_little_memory_may_grow() -> None:
    found = results(
        last_counters={"allocations": 3, "sockets": 2, "versions_superseded": 7},
        last_memory={"learner 0": (1 << 30) + (63 << 20)},
    )
    assert found.problems() == []


def test_a_case_that_failed_before_its_first_sync_can_still_be_reported(tmp_path: Path) -> None:
    found = Results(case=Case(model="tiny"), failures=["PullTimeout: x"])
    report.append_json(found, tmp_path / "out.json")
    report.append_json(results(), tmp_path / "out.json")
    first, second = map(json.loads, (tmp_path / "out.json").read_text().splitlines())
    assert (first["ok"], first["figures"], second["ok"]) == (False, {}, True)
    assert "not opened" in report.table(found)
    assert report.plot(found, tmp_path / "x.png") == "no picture: no sync succeeded"


def test_the_timeline_counts_from_the_start_of_publishing() -> None:
    rows = {(row["party"], row["phase"]): (row["start_s"], row["stop_s"]) for row in results().as_json()["timeline"]}
    assert rows["learner 0", "publish"] == (0.0, 0.5)
    assert rows["r0/0", "pull"] == (0.5, pytest.approx(0.7))
    assert rows["r0/0", "attest"] == (pytest.approx(0.7), pytest.approx(0.71))
    assert rows["r0", "commit"] == (pytest.approx(0.9), pytest.approx(1.0))


def test_volumes_are_summed_by_worker_and_source_and_the_largest_sizes_the_block() -> None:
    def run(rank: int, nbytes: int) -> Run:
        return Run(src_rank=rank, src_off=0, dst_param="w", dst_off=0, nbytes=nbytes)

    pull = (PullPlan(worker=0, runs=(run(0, 5), run(1, 7), run(0, 2))), PullPlan(worker=1, runs=(run(0, 9),)))
    volumes = volumes_of(Manifest(epoch=1, params=(), pack=(), pull=pull, digest=""))
    assert volumes.of_worker == {0: {0: 7, 1: 7}, 1: {0: 9}}
    assert [volumes.block_bytes(rank) for rank in (0, 1, 2)] == [9, 7, 0]


def test_without_matplotlib_there_is_a_reason_instead_of_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "matplotlib is not installed" in report.plot(results(), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_every_phase_is_drawn_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in that notes the bars; matplotlib is no dependency."""
    bars: list[tuple[int, float, float]] = []

    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: Anything()

        def barh(self, y: int, width: float, *, left: float, **_: Any) -> None:
            bars.append((y, round(left, 6), round(left + width, 6)))

    root, pyplot = ModuleType("matplotlib"), ModuleType("matplotlib.pyplot")
    root.use = lambda name: None  # type: ignore[attr-defined]
    pyplot.subplots = lambda **_: (Anything(), Anything())  # type: ignore[attr-defined]
    pyplot.Rectangle = pyplot.close = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", root)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    assert report.plot(results(), tmp_path / "x.png").startswith("picture")
    # Parties from top to bottom: learner 0, r0, r0/0.
    assert sorted(bars) == [(0, 500.0, 700.0), (0, 700.0, 710.0), (1, 900.0, 1000.0), (2, 0.0, 500.0)]


def test_an_instant_pull_is_infinitely_fast_and_not_an_error() -> None:
    assert math.isinf(results(samples=[sample(0.0)]).ceiling()["ratio"])
