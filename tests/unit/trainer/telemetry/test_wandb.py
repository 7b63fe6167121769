"""Weights & Biases: what the package is told, and that nothing it does costs the run more than a deadline.

The package is a stand-in that the sink's process imports; it writes down what is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

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
    print("wandb: a word of the package")
    return Run()
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File of what the stand-in was asked, in order."""
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
    """What was said in calls of these names."""
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


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_package_gets_the_numbers_over_steps(tmp_path: Path, calls: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        write_steps(tmp_path / "run", 4)
    numbers = {"step": 4, "reward/mean": 0.5, "telemetry/sink_errors": 0}
    assert asked(calls, "define_metric", "log", "finish") == [["*", "step"], numbers, 0]
    assert "https://example.org/runs/1" in caplog.text
    assert "a word of the package" in (tmp_path / "run" / "wandb" / "process.txt").read_text()


def test_all_processes_of_a_run_directory_are_one_run(tmp_path: Path, calls: Path) -> None:
    write_steps(tmp_path / "run", 1, 2, 3)
    write_steps(tmp_path / "run", 2, 3)
    write_steps(tmp_path / "other", 1)
    first, second, other = asked(calls, "init")
    assert first["id"] == second["id"] == (tmp_path / "run" / "wandb_run_id").read_text().strip()
    assert other["id"] != first["id"]
    assert {settings["resume"] for settings in (first, second, other)} == {"allow"}
    assert [numbers["step"] for numbers in asked(calls, "log")] == [1, 2, 3, 2, 3, 1]
    (tmp_path / "run" / "wandb_run_id").write_text("")  # a disk that was full
    write_steps(tmp_path / "run", 4)
    assert asked(calls, "init")[-1]["id"]


def test_the_package_is_told_where_the_run_belongs(tmp_path: Path, calls: Path) -> None:
    write_steps(tmp_path / "plain")
    write_steps(tmp_path / "run", wandb_project="mine", wandb_entity="team", wandb_group="seeds", wandb_tags="a+b c")
    names = ("project", "entity", "group", "tags")
    plain, settings = asked(calls, "init")
    assert [plain[name] for name in names] == ["tandem", None, None, None]
    assert [settings[name] for name in names] == ["mine", "team", "seeds", ["a", "b c"]]
    assert settings["dir"] == str(tmp_path / "run")
    assert settings["config"]["telemetry"]["wandb_group"] == "seeds"


@pytest.fixture
def terminal() -> Iterator[None]:
    """This process reads from a terminal."""
    (ours, theirs), before = os.openpty(), os.dup(0)
    os.dup2(theirs, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        for descriptor in (ours, theirs, before):
            os.close(descriptor)


@pytest.mark.usefixtures("terminal")
def test_nobody_is_asked_for_a_login(tmp_path: Path, calls: Path) -> None:
    assert os.isatty(0)
    write_steps(tmp_path / "run")
    ((pid, is_a_terminal),) = asked(calls, "process")
    assert (is_a_terminal, is_there(pid)) == (False, False)


def test_a_run_that_is_not_online_is_told(
    tmp_path: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAND_IN_URL", "")
    write_steps(tmp_path / "run", 1)
    assert "wandb is not online" in caplog.text
    assert len(asked(calls, "log")) == 1


def test_what_the_package_raises_is_counted_and_the_next_record_is_tried(
    calls: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[RunConfig, RunDir]
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS_AT", "log")
    writer = build_writer(*opened)
    for step in (1, 2):
        writer.write({"step": step})
    writer.close()
    assert writer.num_errors == 2
    assert asked(calls, "finish") == [0]


def test_a_package_that_cannot_begin_is_left_out_and_counted(
    calls: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[RunConfig, RunDir], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STAND_IN_FAILS_AT", "init")
    writer = build_writer(*opened)
    writer.write({"step": 1})
    writer.close()
    assert writer.num_errors == 1
    assert "ConnectionError: no route" in caplog.text
    ((pid, _),) = asked(calls, "process")
    assert not is_there(pid)


@pytest.mark.parametrize("point", ["init", "log", "finish"])
def test_a_package_that_hangs_costs_a_deadline(
    point: str, calls: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[RunConfig, RunDir]
) -> None:
    monkeypatch.setenv("STAND_IN_HANGS_AT", point)
    if point == "init":
        with pytest.raises(RuntimeError, match="no answer within 5 s"):
            WandbSink(*opened, begin_s=5.0)  # in which it is imported, too
    else:
        sink = WandbSink(*opened)
        if point == "log":
            with pytest.raises(RuntimeError, match=r"no answer within 0\.2 s"):
                sink.write({"step": 1}, timeout_s=0.2)
            with pytest.raises(RuntimeError, match=r"has ended; see .*process\.txt"):
                sink.write({"step": 2})
            sink.close()
        else:
            with pytest.raises(RuntimeError, match="`wandb sync` sends what is in"):
                sink.close(timeout_s=0.2)
    ((pid, _),) = asked(calls, "process")
    assert not is_there(pid)


def test_a_process_that_dies_is_told_and_what_it_printed_is_kept(calls: Path, opened: tuple[RunConfig, RunDir]) -> None:
    sink = WandbSink(*opened)
    ((pid, _),) = asked(calls, "process")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended; see .*process\.txt"):
        sink.write({"step": 1})
    sink.close()
    assert "a word of the package" in (opened[1].path / "wandb" / "process.txt").read_text()


def test_the_run_has_failed_where_the_driver_is_killed(calls: Path, opened: tuple[RunConfig, RunDir]) -> None:
    sink = WandbSink(*opened)
    sink._answers.close()
    sink._socket.close()  # as the kernel does
    assert sink._process.wait(timeout=30.0) == 0
    assert asked(calls, "finish") == [1]


def test_nothing_is_left_where_the_driver_is_killed_while_the_package_hangs(
    calls: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[RunConfig, RunDir]
) -> None:
    monkeypatch.setenv("STAND_IN_HANGS_AT", "log")
    monkeypatch.setattr("trainer.telemetry.wandb.FINISH_S", 0.2)
    sink = WandbSink(*opened)
    sink._socket.sendall(b'{"step": 1}\n')
    sink._answers.close()
    sink._socket.close()  # as the kernel does
    assert sink._process.wait(timeout=30.0) == 1
