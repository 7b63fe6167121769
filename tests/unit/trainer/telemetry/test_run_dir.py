"""Configuration -> run directory: its lock, config.yaml, environment.jsonl and summary.json."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from tests.fakes.full_disk import file_limit
from tests.fakes.trainer_process import ROOT
from trainer.config.schema import RunConfig
from trainer.errors import ConfigurationError
from trainer.telemetry import session
from trainer.telemetry.run_dir import RunDirLost, open_run_dir
from trainer.telemetry.session import Summary, append, claimed_run_dir, describe, versions, write_summary

if TYPE_CHECKING:
    from pathlib import Path

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
    first, second = (open_run_dir(RunConfig(name="abc"), clock=lambda: 0.0) for _ in range(2))
    assert first.path.parent == tmp_path / "runs" / "abc"
    assert second.path.name == f"{first.path.name}-2"
    assert first.trajectories.is_dir() and first.answers.is_dir()
    first.close()
    second.close()


def test_a_directory_that_cannot_be_made_or_filled_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        open_run_dir(RunConfig(run_dir=str(tmp_path / "file" / "run")))
    with file_limit(0), pytest.raises(ConfigurationError, match="cannot be written"):
        open_run_dir(RunConfig(run_dir=str(tmp_path / "run")))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a full disk leaves no directory behind"


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
    command = [sys.executable, "-c", HOLD_LOCK, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            owner = f"in use by process {holder.pid} on host {os.uname().nodename}"
            with pytest.raises(ConfigurationError, match=owner):
                open_run_dir(RunConfig(run_dir=str(tmp_path)))
        finally:
            holder.send_signal(signal.SIGKILL)
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


def test_the_summary_is_one_json_object_that_replaces_the_old_one_or_leaves_it(tmp_path: Path) -> None:
    summary = Summary(
        exit_reason="completed", steps=10, version=10, wall_s=3.5, startup_s=None, first_accuracy=0.25,
        last_accuracy=float("nan"), seed=0,
    )  # fmt: skip
    path = tmp_path / "summary.json"
    path.write_text("old")
    with file_limit(10), pytest.raises(OSError):
        write_summary(path, summary)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("summary.json", "old")]
    write_summary(path, summary)
    written = json.loads(path.read_text())
    assert (written["exit_reason"], written["startup_s"]) == ("completed", None)
    assert (written["first_accuracy"], written["last_accuracy"]) == (0.25, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


# What a run ran on and with


def test_every_start_has_a_record_that_no_torn_one_spoils(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "environment.jsonl"
    append(path, describe(device="cpu", resumed_from_step=None))
    with path.open("a") as file:
        file.write('{"device": "cu')
    append(path, describe(device="cuda", resumed_from_step=7))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["device"], second["device"], second["resumed_from_step"]) == ("cpu", "cuda", 7)
    assert second["versions"] == versions()
    append(tmp_path, {})
    assert "has no line of this start" in caplog.text


def test_variables_that_change_a_computation_are_recorded_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {
        "NCCL_DEBUG": "INFO", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "VLLM_HOST": "http://proxy:8080/a",
        "VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD": "256", "VLLM_MAX_TOKENS_PER_EXPERT": "7",
    }  # fmt: skip
    secrets = {
        **dict.fromkeys(("VLLM_API_TOKENS", "VLLM_API_KEY", "VLLM_HF_TOKEN_FILE", "VLLM_CLOUD_PWD"), "hidden"),
        **dict.fromkeys(("RAY_AUTH_TOKEN", "RAY_JOB_HEADERS", "RAY_JOB_CONFIG_JSON_ENV_VAR"), "hidden"),
        **dict.fromkeys(("RAY_RUNTIME_ENV", "RAY_REDIS_PASSWORD"), "hidden"),
        "RAY_REDIS_ADDRESS": "redis://user:hidden@host:6379",
        "RAY_object_spilling": '{"uri": "s3://key:hidden"}',
    }
    for name, value in (shown | secrets).items():
        monkeypatch.setenv(name, value)
    line = describe(device="cpu", resumed_from_step=None)
    variables: Any = line["variables"]
    assert shown.items() <= variables.items()
    assert variables["VLLM_API_KEY"] == variables["RAY_REDIS_ADDRESS"] == "(not shown)"
    assert "HOME" not in variables and "hidden" not in json.dumps(line)


def test_the_commit_is_that_of_the_checkout_of_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD").strip()
    monkeypatch.setattr(session, "ROOT", tmp_path)
    assert versions()["commit"] == head
    (tmp_path / "file").write_text("two")
    assert versions()["commit"] == f"{head}-dirty"
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr(session, "ROOT", tmp_path / "site-packages")
    assert "commit" not in versions(), "an installed package is not of the checkout that it was installed in"
    assert {"python", "torch", "ray"} <= set(versions())
