"""`scripts/quickstart.sh` and `scripts/dapo_7b.sh` with a stand-in for Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PYTHON = """#!/usr/bin/env bash
case $1 in -c) echo cpu ;; *) echo "called: $*"; exit "$CODE" ;; esac
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("quickstart.sh", "dapo_7b.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts/install.sh").write_text("exit 0\n")
    python = tmp_path / ".venv/bin/python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def call(repository: Path, script: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", f"scripts/{script}", *arguments], cwd=repository, env={"PATH": "/usr/bin:/bin", "CODE": str(code)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "Done."), (1, "log.txt of the run directory"), (2, "what to change is above"), (130, "resumes from the last")],
)
def test_the_end_of_a_run_is_reported_by_its_code(repository: Path, code: int, words: str) -> None:
    result = call(repository, "quickstart.sh", "seed=1", code=code)
    assert result.returncode == code
    assert "called: -m trainer seed=1" in result.stdout and words in result.stdout + result.stderr


@pytest.mark.parametrize("option", [["--help"], ["--cfg", "job"], ["--dry-run"]])
def test_an_option_that_only_shows_something_starts_no_run(repository: Path, option: list[str]) -> None:
    result = call(repository, "quickstart.sh", *option)
    assert result.returncode == 0 and "Done." not in result.stdout


def test_a_run_of_7b_needs_an_accelerator_and_its_plan_none(repository: Path) -> None:
    refused = call(repository, "dapo_7b.sh", "run_dir=x", "--config-dir", "mine")
    assert refused.returncode == 2 and "found no accelerator" in refused.stderr and "called" not in refused.stdout
    planned = call(repository, "dapo_7b.sh", "--dry-run", "--device-memory-gib", "80")
    assert "called: -m trainer --config-name dapo_7b --dry-run --device-memory-gib 80" in planned.stdout
