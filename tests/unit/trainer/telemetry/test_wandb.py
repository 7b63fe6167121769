"""Weights & Biases: what the package gets, and that nothing it does costs the run more than a deadline.

The package is a stand-in that the sink's process imports; it writes down what is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.process_life import is_running, wait_until
from trainer.config.schema import RunConfig, TelemetryConfig
from trainer.telemetry.run_dir import RunDir, open_run_dir
from trainer.telemetry.sinks import build_writer
from trainer.telemetry.wandb import WandbSink

if TYPE_CHECKING:
    from collections.abc import Iterator

STAND_IN = """\
import json, os, pathlib, sys, threading

FILE = pathlib.Path(os.environ["STAND_IN_CALLS"])

def _write(name, said):
    with FILE.open("a") as file:
        file.write(json.dumps([name, said]) + "\\n")

def _at(point):
    if os.environ.get("STAND_IN_HANGS_AT") == point:
        threading.Event().wait()
    if os.environ.get("STAND_IN_FAILS_AT") == point:
        raise ConnectionError("no route")

class Run:
    url = os.environ.get("STAND_IN_URL", "https://example.org/runs/1")

    def define_metric(self, name, *, step_metric):
        _write("define_metric", [name, step_metric])

    def log(self, numbers):
        _at("log")
        _write("log", numbers)

    def finish(self, exit_code=0):
        _at("finish")
        _write("finish", exit_code)

def init(**settings):
    _write("init", settings)
    _write("process", [os.getpid(), sys.stdin.isatty()])
    _at("init")
    print("wandb: printed by the package")
    return Run()
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the stand-in's calls, in order."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "wandb.py").write_text(STAND_IN)
    root = Path(__file__).resolve().parents[4]
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{root}")
    monkeypatch.setenv("STAND_IN_CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[RunConfig, RunDir]]:
    config = config_for(tmp_path / "run")
    run_dir = open_run_dir(config)
    yield config, run_dir
    run_dir.close()


def config_for(path: Path, **telemetry: Any) -> RunConfig:
    return RunConfig(run_dir=str(path), telemetry=TelemetryConfig(tensorboard=False, wandb=True, **telemetry))


def asked(calls: Path, *names: str) -> list[Any]:
    pairs = [json.loads(line) for line in calls.read_text().splitlines()]
    return [said for name, said in pairs if name in names]


def write_steps(folder: Path, *steps: int, **telemetry: Any) -> None:
    """One process of a run."""
    config = config_for(folder, **telemetry)
    run_dir = open_run_dir(config)
    writer = build_writer(config, run_dir)
    for step in steps:
        writer.write({"step": step, "reward/mean": 0.5, "staleness/histogram": {"0": 1}})
    writer.close()
    run_dir.close()


def test_all_processes_of_a_run_directory_are_one_run_with_the_numbers_over_steps(
    tmp_path: Path, calls: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        write_steps(tmp_path / "run", 1, 2)
    assert "https://example.org/runs/1" in caplog.text
    assert "printed by the package" in (tmp_path / "run" / "wandb" / "process.txt").read_text()
    numbers = [{"step": step, "reward/mean": 0.5, "telemetry/sink_errors": 0} for step in (1, 2)]
    assert asked(calls, "define_metric", "log", "finish") == [["*", "step"], *numbers, 0]
    write_steps(tmp_path / "run", 2, wandb_project="mine", wandb_entity="team", wandb_group="seeds", wandb_tags="a+b c")
    first, second = asked(calls, "init")
    assert first["id"] == second["id"] == (tmp_path / "run" / "wandb_run_id").read_text().strip()
    assert {settings["resume"] for settings in (first, second)} == {"allow"}
    names = ("project", "entity", "group", "tags")
    assert [first[name] for name in names] == ["tandem", None, None, None]
    assert [second[name] for name in names] == ["mine", "team", "seeds", ["a", "b c"]]
    assert second["dir"] == str(tmp_path / "run")
    assert second["config"]["telemetry"]["wandb_group"] == "seeds"
    (tmp_path / "run" / "wandb_run_id").write_text("")  # a disk that was full
    write_steps(tmp_path / "run", 4)
    assert asked(calls, "init")[-1]["id"] not in ("", first["id"])


def test_no_login_is_asked_for_and_a_run_that_is_not_online_is_reported(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAND_IN_URL", "")
    (ours, theirs), before = os.openpty(), os.dup(0)
    os.dup2(theirs, 0)
    try:
        assert os.isatty(0)
        write_steps(tmp_path / "run", 1)
    finally:
        os.dup2(before, 0)
        for descriptor in (ours, theirs, before):
            os.close(descriptor)
    ((pid, is_a_terminal),) = asked(calls, "process")
    assert (is_a_terminal, is_running(pid)) == (False, False)
    assert "wandb is not online" in caplog.text
    assert len(asked(calls, "log")) == 1


@pytest.mark.parametrize("point", ["init", "log"])
def test_what_the_package_raises_is_counted_and_the_next_record_is_tried(
    point: str,
    calls: Path,
    monkeypatch: pytest.MonkeyPatch,
    opened: tuple[RunConfig, RunDir],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS_AT", point)
    writer = build_writer(*opened)
    for step in (1, 2):
        writer.write({"step": step})
    writer.close()
    assert writer.num_errors == 2
    assert "ConnectionError: no route" in caplog.text
    assert asked(calls, "finish") == ([0] if point == "log" else [])
    ((pid, _),) = asked(calls, "process")
    assert not is_running(pid)


@pytest.mark.parametrize("point", ["init", "log", "finish"])
def test_a_package_that_hangs_costs_a_deadline(
    point: str, calls: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[RunConfig, RunDir]
) -> None:
    monkeypatch.setenv("STAND_IN_HANGS_AT", point)
    if point == "init":
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 s"):
            WandbSink(*opened, begin_s=0.5)
    else:
        sink = WandbSink(*opened)
        if point == "log":
            with pytest.raises(RuntimeError, match=r"timed out after 0\.2 s"):
                sink.write({"step": 1}, timeout_s=0.2)
            with pytest.raises(RuntimeError, match=r"has ended; see .*process\.txt"):
                sink.write({"step": 2})
            sink.close()
        else:
            with pytest.raises(RuntimeError, match="`wandb sync` sends what is in"):
                sink.close(timeout_s=0.2)
    for pid, _ in asked(calls, "process"):  # none if it was killed before it had imported the package
        assert not is_running(pid)


def test_a_process_that_dies_is_reported_and_what_it_printed_is_kept(
    calls: Path, opened: tuple[RunConfig, RunDir]
) -> None:
    sink = WandbSink(*opened)
    ((pid, _),) = asked(calls, "process")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended; see .*process\.txt"):
        sink.write({"step": 1})
    sink.close()
    assert "printed by the package" in (opened[1].path / "wandb" / "process.txt").read_text()


DRIVER = """
import sys, time
from trainer.config.schema import RunConfig, TelemetryConfig
from trainer.telemetry import wandb
from trainer.telemetry.run_dir import open_run_dir
wandb.FINISH_S = 0.2
config = RunConfig(run_dir=sys.argv[1], telemetry=TelemetryConfig(wandb=True))
sink = wandb.WandbSink(config, open_run_dir(config))
sink._pipe.send({"step": 1})
print(sink._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("hangs_at", ["", "log"])
def test_a_killed_driver_is_a_failed_run_and_leaves_nothing_where_the_package_hangs(
    hangs_at: str, tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_HANGS_AT", hangs_at)
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        child = int(driver.stdout.readline())
        driver.kill()
    wait_until(lambda: not is_running(child), within_s=30.0, what="the process of the sink runs on")
    assert asked(calls, "finish") == ([] if hangs_at else [1])
