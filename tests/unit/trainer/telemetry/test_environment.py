"""environment.jsonl says what a run ran on and with, and keeps secrets to itself."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from trainer.telemetry import session as environment
from trainer.telemetry.session import append, describe, versions

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_every_start_has_a_line_that_no_torn_one_spoils(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("VLLM_API_TOKENS", "hidden")
    monkeypatch.setenv("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
    monkeypatch.setenv("VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD", "256")
    for secret in ("AUTH_TOKEN", "JOB_HEADERS", "JOB_CONFIG_JSON_ENV_VAR", "RUNTIME_ENV", "REDIS_PASSWORD"):
        monkeypatch.setenv(f"RAY_{secret}", "hidden")
    for secret in ("API_KEY", "HF_TOKEN_FILE", "CLOUD_PWD"):
        monkeypatch.setenv(f"VLLM_{secret}", "hidden")
    monkeypatch.setenv("RAY_REDIS_ADDRESS", "redis://user:hidden@host:6379")
    monkeypatch.setenv("RAY_object_spilling", '{"uri": "s3://key:hidden"}')
    monkeypatch.setenv("VLLM_MAX_TOKENS_PER_EXPERT", "7")
    monkeypatch.setenv("VLLM_HOST", "http://proxy:8080/a")
    line = describe(device="cpu", resumed_from_step=None)
    variables: Any = line["variables"]
    assert (variables["NCCL_DEBUG"], variables["TORCHINDUCTOR_FX_GRAPH_CACHE"]) == ("INFO", "1")
    assert variables["VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"] == "256"
    assert (variables["VLLM_MAX_TOKENS_PER_EXPERT"], variables["VLLM_HOST"]) == ("7", "http://proxy:8080/a")
    assert "HOME" not in variables
    assert variables["VLLM_API_KEY"] == variables["RAY_REDIS_ADDRESS"] == "(not shown)"
    assert "hidden" not in json.dumps(line)


def test_the_commit_is_that_of_the_checkout_of_this_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "one")
    head = git(tmp_path, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert versions()["commit"] == head
    (tmp_path / "file").write_text("two")
    assert versions()["commit"] == f"{head}-dirty"
    inside = tmp_path / "site-packages"
    inside.mkdir()
    monkeypatch.setattr(environment, "ROOT", inside)
    assert "commit" not in versions(), "an installed package is not of the checkout that it was installed in"
    assert {"python", "torch", "ray"} <= set(versions())
