"""The run directory: its lock, its configuration and its summary."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.full_disk import file_limit
from trainer.config.schema import RunConfig
from trainer.errors import ConfigurationError
from trainer.files import write_atomically
from trainer.telemetry.run_dir import RunDirLost, open_run_dir
from trainer.telemetry.session import Summary, claimed_run_dir, write_summary

ROOT = Path(__file__).resolve().parents[4]
HOLD_LOCK = """
import sys, time
from trainer.config.schema import RunConfig
from trainer.telemetry.run_dir import open_run_dir
run_dir = open_run_dir(RunConfig(run_dir=sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_the_default_directory_is_named_by_run_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    first = open_run_dir(RunConfig(name="abc"), clock=lambda: 0.0)
    second = open_run_dir(RunConfig(name="abc"), clock=lambda: 0.0)
    assert first.path.parent == tmp_path / "runs" / "abc"
    assert second.path.name == f"{first.path.name}-2"
    assert first.trajectories.is_dir()
    assert first.answers.is_dir() and first.answers.name == "evaluations"
    first.close()
    second.close()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        open_run_dir(RunConfig(run_dir=str(tmp_path / "file" / "run")))


def test_a_full_disk_refuses_a_run_and_leaves_no_directory_behind(tmp_path: Path) -> None:
    with file_limit(0), pytest.raises(ConfigurationError, match="cannot be written"):
        open_run_dir(RunConfig(run_dir=str(tmp_path / "run")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_new", [True, False])
def test_a_disk_that_fills_up_at_the_configuration_refuses_the_run(tmp_path: Path, is_new: bool) -> None:
    config = RunConfig(run_dir=str(tmp_path / "run"))
    if not is_new:
        open_run_dir(config).close()
    claim = claimed_run_dir(config, Console(file=io.StringIO()))
    with file_limit(200), pytest.raises(ConfigurationError, match="cannot be written"), claim as run_dir:
        run_dir.write_config(config)
    assert (tmp_path / "run").exists() is not is_new
    assert not (tmp_path / "run" / "owner.lock").exists()


def test_a_run_directory_that_is_removed_or_taken_is_noticed(tmp_path: Path) -> None:
    config = RunConfig(run_dir=str(tmp_path / "run"))
    first = open_run_dir(config)
    first.check()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(RunDirLost, match="was removed or moved"):
        first.check()
    assert not first.is_taken, "what was trained can still be saved there"
    second = open_run_dir(config)
    with pytest.raises(RunDirLost, match="belongs to another process"):
        first.check()
    assert first.is_taken
    first.close()
    second.check()
    second.close()


def test_a_second_owner_is_refused_with_pid_and_host_and_kill_frees_the_directory(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=f"in use by process {holder.pid} on host {os.uname().nodename}"):
            open_run_dir(RunConfig(run_dir=str(tmp_path)))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    run_dir = open_run_dir(RunConfig(run_dir=str(tmp_path)))
    run_dir.close()
    run_dir.close()
    assert not (tmp_path / "owner.lock").exists()


def test_an_earlier_configuration_is_kept_if_it_was_another_and_the_log_names_every_changed_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RunConfig(run_dir=str(tmp_path))
    run_dir = open_run_dir(config)
    for other in (config, config, replace(config, run_dir=f"{tmp_path}/.")):
        run_dir.write_config(other)
    assert not caplog.records
    assert (tmp_path / "config.1.yaml").exists() and not (tmp_path / "config.2.yaml").exists(), "one per change"
    run_dir.write_config(replace(config, seed=7, learner=replace(config.learner, lr=1e-4)))
    assert "seed: 0" in (tmp_path / "config.2.yaml").read_text() and "seed: 7" in run_dir.config.read_text()
    (record,) = caplog.records
    changed = f"(config.2.yaml): seed: 0 -> 7; learner.lr: {config.learner.lr:g} -> 0.0001"
    assert record.levelname == "WARNING" and record.getMessage().endswith(changed)
    run_dir.config.write_text("seed: [")
    run_dir.write_config(config)
    assert "config.3.yaml cannot be read" in caplog.text
    run_dir.close()


def test_a_full_disk_leaves_the_old_summary_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    with file_limit(10), pytest.raises(OSError):
        write_atomically(path, "x" * 100)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("summary.json", "old")]


def test_the_summary_is_one_json_object_that_replaces_the_old_one(tmp_path: Path) -> None:
    summary = Summary(
        exit_reason="completed", steps=10, version=10, wall_s=3.5, startup_s=None, first_accuracy=0.25,
        last_accuracy=float("nan"), seed=0,
    )  # fmt: skip
    path = tmp_path / "summary.json"
    path.write_text("old")
    write_summary(path, summary)
    written = json.loads(path.read_text())
    assert written["exit_reason"] == "completed"
    assert (written["first_accuracy"], written["last_accuracy"], written["startup_s"]) == (0.25, None, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
