"""What the benchmark makes of a run directory and of its file of results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.trainer_process import ROOT
from tests.unit.trainer.tools.test_bench_figures import PLAN, sync_run
from trainer.telemetry.trace import Tracer
from trainer.tools.bench import EXIT_DONE, EXIT_USAGE, Results, WorkloadMismatch, can_plot, examine, main, plot, table
from trainer.tools.bench_figures import figures_as_values, figures_of, timeline_of
from trainer.tools.bench_workload import workload
from trainer.tools.run_process import RunOutcome

if TYPE_CHECKING:
    from pathlib import Path

W1 = workload("w1", is_tiny=True)
ENDED = RunOutcome(
    command=("python",),
    started_at=-30.0,
    wall_s=99.0,
    timeout_s=200.0,
    exit_code=0,
    timed_out=False,
    output=("starting Ray ... 4.5 s",),
)


def run(problem: str = "") -> dict[str, Any]:
    figures = figures_as_values(figures_of(*sync_run(), PLAN))
    return {"problem": problem, "figures": figures, "start_up": {"to_first_step_s": 36.0},
            "timeline": timeline_of(*sync_run(), PLAN)}  # fmt: skip


def test_results_of_several_calls_come_together(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.json"
    Results(path, W1).add("async 2+2", run())
    Results(path, W1).add("sync 2+2", run())
    Results(path, W1).add("async 2+2", run("again"))
    found = Results(path, W1).runs
    assert list(found) == ["async 2+2", "sync 2+2"]
    assert found["async 2+2"]["problem"] == "again"


@pytest.mark.parametrize("content", ['{"workload": {"name": "another"}, "runs": {}}', "[]", "{"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out.json"
    path.write_text(content)
    with pytest.raises(WorkloadMismatch, match="choose another file"):
        Results(path, W1)
    assert path.read_text() == content


def test_the_table_shows_bounds_ratio_and_failures() -> None:
    failed = {"problem": "exit code 1: no memory", "figures": None, "start_up": {}, "timeline": {}}
    lines = table({"sync 1+1": run(), "async 2+2": failed}).splitlines()
    assert len(lines) == 3
    row = dict(zip(lines[0].split("  "), lines[1].split("  "), strict=False))
    assert row["case"] == "sync 1+1"
    assert "10.00 (10.00-10.00)" in lines[1]
    assert "2.50" in lines[1].split()
    assert lines[2] == "FAILED async 2+2: exit code 1: no memory"


def column(runs: dict[str, Any], name: str) -> list[str]:
    lines = table(runs).splitlines()
    begin = lines[0].index(name)
    return [line[begin:].split()[0] for line in lines[1:]]


def test_the_strict_ratio_stands_in_file_and_table() -> None:
    one, never_full, unequal = run(), run(), run()
    assert one["figures"]["strict_ratio"] == pytest.approx(2.5)
    never_full["figures"]["generation_full_s"] = None
    unequal["figures"] |= {"generation_full_s": 1.0, "learning_s": 8.0}
    assert column({"one": one, "never full": never_full, "unequal": unequal}, "strict") == ["2.50", "-", "1.25"]


PUBLISHED = sorted((ROOT / "docs" / "data").glob("bench_*.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_results_that_were_published_before_steps_were_kept_are_still_shown(path: Path, tmp_path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    lines = table(content["runs"]).splitlines()
    assert [line.partition("  ")[0] for line in lines[1 : 1 + len(content["runs"])]] == list(content["runs"])
    name = content["workload"]["name"].partition(" ")[0]
    work = workload(name, is_tiny=False, shape=content["workload"]["shape"])
    with pytest.raises(WorkloadMismatch):
        Results(path, work)  # nothing measured with other lengths is put beside them
    results = Results(path, work, is_shown_only=True)
    assert results.runs == content["runs"]
    if can_plot():
        plot(results.runs, tmp_path / "out.png")


def write_run(run_dir: Path, num_steps: int) -> None:
    records, spans = sync_run(num_steps)
    run_dir.mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in records)
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 99, "perf/st')  # killed while it wrote
    tracer = Tracer(run_dir / "trace.json")
    for span in spans:
        overlaps = span.track == "groups"
        tracer.add_span(span.track, span.name, start_s=span.begin_s, end_s=span.end_s, overlapping=overlaps)
    tracer.close()


def test_a_run_is_examined_from_its_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 6)
    found = examine(tmp_path / "run", ENDED, PLAN)
    assert found["problem"] == ""
    assert found["figures"] == figures_as_values(figures_of(*sync_run(), PLAN))
    assert found["start_up"]["phase: starting Ray"] == 4.5
    json.dumps(found)


def test_a_run_that_ran_out_of_time_keeps_the_figures_it_got_to(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 4)
    found = examine(tmp_path / "run", replace(ENDED, timed_out=True, exit_code=130), PLAN)
    assert found["problem"] == "did not end within 200 s"
    assert found["figures"]["steps"] == (3, 4)


def test_a_run_that_ended_before_all_its_steps_has_a_problem(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 5)
    found = examine(tmp_path / "run", ENDED, PLAN)
    assert found["problem"] == "made only 5 of its 6 steps"
    assert found["figures"]["steps"] == (3, 5)


@pytest.mark.parametrize("num_steps", [None, 1])
def test_a_run_without_figures_has_a_problem(tmp_path: Path, num_steps: int | None) -> None:
    if num_steps is not None:
        write_run(tmp_path / "run", num_steps)
    found = examine(tmp_path / "run", ENDED, PLAN)
    assert found["figures"] is None
    assert len(found["per_step"]) == (0 if num_steps is None else num_steps)
    assert found["problem"]


def test_what_the_file_has_is_shown_without_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    Results(path, W1).add("sync 1+1", run())
    assert main(["--out", str(path), "--tiny", "--show"]) == EXIT_DONE
    assert "sync 1+1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "fast:2+2"], "MODE:SPLIT"),
        (["--case", "async:2+2", "--steps", "0"], "must be above 0"),
        (["--case", "async:2+2", "--set", "async:trainer.total_steps=9"], "give --steps N"),
        (["--case", "async:2+2", "--set", "async:mode.max_staleness=two"], "number >= 0"),
        (["--case", "async:2+2", "--set", "sync:a=1"], "reaches no case"),
        (["--only", "nothing"], "no such case"),
        (["--warmup", "0"], "must be above 0"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out.json"), "--tiny", *arguments])
    assert ended.value.code == EXIT_USAGE
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(can_plot(), reason="matplotlib is installed")
def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    assert ended.value.code == EXIT_USAGE
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.skipif(not can_plot(), reason="matplotlib is not installed")
def test_two_panels_are_drawn(tmp_path: Path) -> None:
    failed = {"problem": "exit code 1", "figures": None, "start_up": {}, "timeline": {}}
    plot({"sync 1+1": run(), "other": run(), "failed": failed}, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes()[1:4] == b"PNG"


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run has figures"):
        plot({"a": {"problem": "x", "figures": None, "timeline": {}}}, tmp_path / "out.png")
