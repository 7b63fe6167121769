"""Records -> sinks: what is on disk, after crashes and resumes too, and that a broken sink stops nothing."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.fakes.full_disk import file_limit
from tests.fakes.metric_names import METRICS, REQUIRED, find_row
from trainer.config.schema import RunConfig, TelemetryConfig
from trainer.telemetry.run_dir import open_run_dir
from trainer.telemetry.session import cut_records, set_records_aside
from trainer.telemetry.sinks import JsonlSink, MetricWriter, TensorBoardSink, build_writer, truncate_after

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from trainer.telemetry.run_dir import RunDir


class Broken:
    name = "broken"

    def write(self, record: Mapping[str, object]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


class Kept:
    name = "kept"

    def __init__(self) -> None:
        self.records: list[Mapping[str, object]] = []

    def write(self, record: Mapping[str, object]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def records(path: Path, name: str = "step") -> list[Any]:
    return [json.loads(line)[name] for line in path.read_text().splitlines()]


def rewards(folder: Path) -> list[tuple[int, float]]:
    """(step, reward/mean), as TensorBoard shows them."""
    events = EventAccumulator(str(folder))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    return [(event.step, round(event.value, 3)) for event in events.Scalars("reward/mean")]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[RunConfig, RunDir]]:
    config = RunConfig(run_dir=str(tmp_path / "run"), telemetry=TelemetryConfig())
    run_dir = open_run_dir(config)
    yield config, run_dir
    run_dir.close()


def test_records_after_the_checkpoint_and_torn_ones_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\nnoise\n{"step": 4}\n{"step": 2')
    assert truncate_after(path, 2) == 4
    assert records(path) == [1, 2]
    assert truncate_after(path, 2) == truncate_after(tmp_path / "missing.jsonl", 2) == 0
    with path.open("a") as file:
        file.write('{"st')
    JsonlSink(path).write({"step": 3})
    assert records(path) == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def jsonl_steps(folder: Path) -> list[int]:
    return records(folder / "m.jsonl")


@pytest.mark.parametrize(
    ("open_sink", "steps"),
    [
        (lambda folder: JsonlSink(folder / "m.jsonl"), jsonl_steps),
        (TensorBoardSink, lambda folder: [step for step, _ in rewards(folder)]),
    ],
    ids=["jsonl", "tensorboard"],
)
def test_a_full_disk_costs_the_records_that_it_refuses_and_no_other(
    tmp_path: Path, open_sink: Callable[[Path], Any], steps: Callable[[Path], list[int]]
) -> None:
    sink = open_sink(tmp_path)
    for step in range(1, 6):
        record = {"step": step, "reward/mean": step / 10, "text": "x" * 100}
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        if step in (1, 3):
            with file_limit(size + 20), pytest.raises(OSError):
                sink.write(record)
            assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size
        else:
            sink.write(record)
    sink.close()
    assert steps(tmp_path) == [2, 4, 5]


def test_a_resume_cuts_and_a_new_beginning_sets_aside_what_open_sinks_have_written(
    opened: tuple[RunConfig, RunDir],
) -> None:
    run_dir = opened[1]
    writer = build_writer(*opened)
    for step in (1, 2, 3):
        writer.write({"step": step})
    for version, step in ((0, 1), (1, 3), (2, 3)):
        writer.write_evaluation({"version": version, "step": step, "accuracy": np.float32(0.5)})
    writer.close()
    again = build_writer(*opened)
    cut_records(run_dir, after_step=1, after_version=1)
    again.write({"step": 2, "version": 2})
    assert records(run_dir.metrics) == [1, 2]
    assert (records(run_dir.evaluations, "version"), records(run_dir.evaluations)) == ([0, 1], [1, 3])
    assert list(run_dir.tensorboard.glob("events*"))
    run_dir.evaluations.write_text("")
    set_records_aside(run_dir)
    again.write({"step": 1})
    again.close()
    assert (records(run_dir.metrics), records(run_dir.path / "metrics.1.jsonl")) == ([1], [1, 2])
    assert not (run_dir.path / "evaluations.1.jsonl").exists(), "there was nothing in it"


def test_a_broken_sink_is_counted_and_the_others_get_every_record(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    writer = MetricWriter([Broken(), kept], kept)
    with caplog.at_level(logging.ERROR):
        for step in range(1, 4):
            writer.write({"step": step})
        writer.close()
    assert [record["telemetry/sink_errors"] for record in kept.records] == [0, 1, 2]
    assert writer.num_errors == 4
    assert len(caplog.records) == 1 and "broken" in caplog.text


def test_a_sink_that_cannot_be_opened_counts_as_one_that_fails(
    opened: tuple[RunConfig, RunDir], caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = opened[1]
    run_dir.tensorboard.write_text("a file where a directory should be")
    writer = build_writer(*opened)
    for step in (1, 2):
        writer.write({"step": step})
    assert records(run_dir.metrics, "telemetry/sink_errors") == [0, 1]
    writer.close()
    assert "tensorboard failed 2 times in all" in caplog.text


def test_values_that_json_lacks_cost_themselves_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    writer = MetricWriter([kept], kept)
    for step, loss in ((1, np.float32("nan")), (2, float("inf"))):
        writer.write({"step": step, "reward/part/x": object(), "learner/loss": loss, "eval/accuracy": None})
    writer.write_evaluation({"version": 1, "accuracy": float("nan"), "reward_parts": {"format": object()}})
    of_step = {"learner/loss": None, "eval/accuracy": None, "telemetry/sink_errors": 0}
    assert kept.records == [{"step": 1, **of_step}, {"step": 2, **of_step}, {"version": 1, "accuracy": None}]
    assert caplog.text.count("metric reward/part/x is skipped: cannot write a object as JSON") == 1
    assert caplog.text.count("learner/loss is nan at step 1") == 1
    assert "eval/accuracy" not in caplog.text


def test_tensorboard_shows_the_numbers_and_a_resume_hides_later_steps(tmp_path: Path) -> None:
    def write(at_s: float, *steps: tuple[int, float]) -> None:
        sink = TensorBoardSink(tmp_path, clock=lambda: at_s)
        for step, reward in steps:
            sink.write({"step": step, "reward/mean": reward, "staleness/histogram": {"0": 1}, "x": None})
        sink.close()

    write(100.0, (1, 0.1), (2, 0.2), (3, 0.3))
    write(150.0)  # a start that failed
    write(200.0, (2, 0.7))
    assert rewards(tmp_path) == [(1, 0.1), (2, 0.7)]
    write(300.0, (1, 0.9))
    assert rewards(tmp_path) == [(1, 0.9)]


# Names


def test_every_metric_has_one_full_row_also_of_a_family_and_an_evaluation_set() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) and {*REQUIRED} <= {*names}
    for name, row in {"reward/part/format": "reward/part/*", "eval/aime/accuracy": "eval/accuracy"}.items():
        found = find_row(name)
        assert found is not None and found.name == row
    assert find_row("reward/meen") is None
    assert all(map(all, METRICS))
