"""Metric sinks: what is on disk, after crashes and resumes too, and that a broken sink stops nothing."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.fakes.full_disk import file_limit
from trainer.config.schema import RunConfig, TelemetryConfig
from trainer.telemetry.metrics import METRICS, RENAMED, REQUIRED, current_names, find_row
from trainer.telemetry.run_dir import open_run_dir
from trainer.telemetry.session import cut_records, set_records_aside
from trainer.telemetry.sinks import JsonlSink, MetricWriter, TensorBoardSink, build_writer, truncate_after

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def config_for(path: Path, **telemetry: Any) -> RunConfig:
    return RunConfig(run_dir=str(path), telemetry=TelemetryConfig(**telemetry))


def test_lines_after_the_checkpoint_and_torn_ones_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\nnoise\n{"step": 4}\n{"step": 2')
    assert truncate_after(path, 2) == 4
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert truncate_after(path, 2) == truncate_after(tmp_path / "missing.jsonl", 2) == 0
    with path.open("a") as file:
        file.write('{"st')
    JsonlSink(path).write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_full_disk_costs_the_lines_that_it_refuses_and_no_other(tmp_path: Path) -> None:
    sink, path = JsonlSink(tmp_path / "m.jsonl"), tmp_path / "m.jsonl"
    sink.write({"step": 1, "text": "x" * 100})
    size = path.stat().st_size
    with file_limit(size + 20), pytest.raises(OSError):
        sink.write({"step": 2, "text": "x" * 100})
    assert path.stat().st_size == size
    sink.write({"step": 3})
    assert [line["step"] for line in lines(path)] == [1, 3]


def test_a_resume_cuts_and_a_new_beginning_sets_aside_what_open_sinks_have_written(tmp_path: Path) -> None:
    config = config_for(tmp_path / "run")
    run_dir = open_run_dir(config)
    writer = build_writer(config, run_dir)
    for step in (1, 2, 3):
        writer.write({"step": step})
    for version, step in ((0, 1), (1, 3), (2, 3)):
        writer.write_evaluation({"version": version, "step": step, "accuracy": np.float32(0.5)})
    writer.close()
    again = build_writer(config, run_dir)
    cut_records(run_dir, after_step=1, after_version=1)
    again.write({"step": 2, "version": 2})
    assert [line["step"] for line in lines(run_dir.metrics)] == [1, 2]
    assert [(line["version"], line["step"]) for line in lines(run_dir.evaluations)] == [(0, 1), (1, 3)]
    assert list(run_dir.tensorboard.glob("events*"))
    run_dir.evaluations.write_text("")
    set_records_aside(run_dir)
    again.write({"step": 1})
    again.close()
    assert [line["step"] for line in lines(run_dir.metrics)] == [1]
    assert [line["step"] for line in lines(run_dir.path / "metrics.1.jsonl")] == [1, 2]
    assert not (run_dir.path / "evaluations.1.jsonl").exists(), "there was nothing in it"
    run_dir.close()


def test_a_broken_sink_is_counted_and_the_others_get_every_record(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    writer = MetricWriter([Broken(), kept], kept)
    with caplog.at_level(logging.ERROR):
        for step in range(1, 4):
            writer.write({"step": step})
        writer.close()
    assert [record["telemetry/sink_errors"] for record in kept.records] == [0, 1, 2]
    assert writer.num_errors == 4
    assert len(caplog.records) == 1
    assert "broken" in caplog.text


def test_a_sink_that_cannot_be_opened_counts_as_one_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_for(tmp_path / "run")
    run_dir = open_run_dir(config)
    run_dir.tensorboard.write_text("a file where a directory should be")
    writer = build_writer(config, run_dir)
    for step in (1, 2):
        writer.write({"step": step})
    assert [line["telemetry/sink_errors"] for line in lines(run_dir.metrics)] == [0, 1]
    writer.close()
    assert "tensorboard failed 2 times in all" in caplog.text
    run_dir.close()


def test_a_value_that_json_cannot_say_costs_itself_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    writer = MetricWriter([kept], kept)
    for step in (1, 2):
        writer.write({"step": step, "reward/part/format": object(), "reward/mean": 0.5})
    writer.write_evaluation({"version": 1, "accuracy": float("nan"), "reward_parts": {"format": object()}})
    assert [sorted(record) for record in kept.records[:2]] == [["reward/mean", "step", "telemetry/sink_errors"]] * 2
    assert kept.records[2] == {"version": 1, "accuracy": None}
    assert caplog.text.count("metric reward/part/format is left out: cannot write a object as JSON") == 1


def test_a_nan_is_written_as_null_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    writer = MetricWriter([kept], kept)
    writer.write({"step": 1, "learner/loss": np.float32("nan"), "eval/accuracy": None})
    writer.write({"step": 2, "learner/loss": float("inf")})
    assert [record["learner/loss"] for record in kept.records] == [None, None]
    assert caplog.text.count("learner/loss is nan at step 1") == 1
    assert "eval/accuracy" not in caplog.text


def test_tensorboard_reads_back_the_numbers_and_a_resume_hides_later_steps(tmp_path: Path) -> None:
    first = TensorBoardSink(tmp_path, clock=lambda: 100.0)
    for step in (1, 2, 3):
        first.write({"step": step, "reward/mean": step / 10, "staleness/histogram": {"0": 1}, "x": None})
    first.close()
    TensorBoardSink(tmp_path, clock=lambda: 150.0).close()  # a start that failed
    second = TensorBoardSink(tmp_path, clock=lambda: 200.0)
    second.write({"step": 2, "reward/mean": 0.7})
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(1, 0.1), (2, 0.7)]
    anew = TensorBoardSink(tmp_path, clock=lambda: 300.0)
    anew.write({"step": 1, "reward/mean": 0.9})
    anew.close()
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(1, 0.9)]


def test_a_full_disk_costs_tensorboard_the_steps_that_it_refuses_and_no_other(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    for step in range(1, 6):
        record = {"step": step, "reward/mean": step / 10}
        if step in (1, 3):
            size = sum(path.stat().st_size for path in tmp_path.iterdir())
            with file_limit(size + 20), pytest.raises(OSError):
                sink.write(record)
        else:
            sink.write(record)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("reward/mean")] == [(2, 0.2), (4, 0.4), (5, 0.5)]


def test_every_metric_has_one_full_row_also_of_a_family_and_an_evaluation_set() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names)) and {*REQUIRED} <= {*names}
    for name, row in {"reward/part/format": "reward/part/*", "eval/aime/accuracy": "eval/accuracy"}.items():
        found = find_row(name)
        assert found is not None and found.name == row
    assert find_row("reward/meen") is None
    assert all(metric.unit and metric.meaning and metric.healthy and "|" not in metric.meaning for metric in METRICS)


def test_lines_of_earlier_runs_are_read_under_todays_names() -> None:
    assert all(find_row(old) is None for old in RENAMED)
    assert all(find_row(new) is not None or find_row(f"{new}/any") is not None for new in RENAMED.values())
    earlier = {"wait/learner_for_data_s": 1.0, "queue/for_engine_s_max": 2.0, "response/untrained/tied": 3, "loss": 4}
    today = {"time/wait_for_batch_s": 1.0, "queue/engine_slot_s_max": 2.0, "response/excluded/tied": 3, "loss": 4}
    assert current_names(earlier) == today == current_names(today)
